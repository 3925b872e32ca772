"""Workaround for a memory leak of TensorStore in every save and restore.

TensorStore (0.1.76 to 0.1.86) counts one reference too many to each key and value of a dict that it
returns as JSON (`JsonToPyObject` in its json_type_caster.cc), so they are never freed. Orbax
requests two such dicts: the spec of the directory, once per array, and the counters of TensorStore,
twice per item. No option of Orbax disables either.
"""

import copy
import json
import sys
from typing import Any

import tensorstore as ts


def mend() -> None:
    """Reduces Orbax's requests for leaking dicts, if TensorStore has the leak."""
    if not _leaks():
        return
    ts.KvStore.Spec.to_json = _to_json
    for name, module in list(sys.modules.items()):
        # Releases of Orbax request the counters in different modules, all by the name `ts`.
        if name.startswith("orbax.checkpoint.") and vars(module).get("ts") is ts:
            module.ts = _WithoutCounters()


def _leaks() -> bool:
    """Returns whether a string in TensorStore's JSON has more references than it should."""
    spec = {"driver": "file", "path": "/counted/"}
    found, right = ts.KvStore.Spec(spec).to_json(), json.loads(json.dumps(spec))
    return sys.getrefcount(found["path"]) > sys.getrefcount(right["path"])


_ask = ts.KvStore.Spec.to_json
_kinds: dict[str, dict[str, Any]] = {}  # printed spec -> its JSON without the path


def _to_json(spec: ts.KvStore.Spec, include_defaults: bool = False) -> Any:
    """Returns KvStore.Spec.to_json of a spec, calling it once for all directories of a store."""
    if include_defaults or spec.base is not None or not spec.path:
        return _ask(spec, include_defaults)
    kind = spec.copy()
    kind.path = ""
    name = repr(kind)
    if name not in _kinds:
        _kinds[name] = _ask(kind)
    return {**copy.deepcopy(_kinds[name]), "path": spec.path}


class _WithoutCounters:
    """TensorStore for Orbax, without counters.

    Orbax turns them into jax.monitoring events (bytes written and read, and their compression) and
    omits these events if there are no counters. This package does not use the events.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(ts, name)

    def experimental_collect_matching_metrics(self, *_: Any, **__: Any) -> list:
        return []
