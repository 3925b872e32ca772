"""Remedy for memory that TensorStore keeps at every save and every restore.

TensorStore (0.1.76 to 0.1.86) counts one reference too many to each key and each value of a dict
that it gives as JSON (`JsonToPyObject` in its json_type_caster.cc), so that they are never freed.
Orbax asks for two such things: the spec of the directory, once for every array, and the counters of
TensorStore, twice for every item. No option of Orbax turns either off.
"""

import copy
import json
import sys
from typing import Any

import tensorstore as ts


def mend() -> None:
    """Has Orbax ask TensorStore for less that is never freed, if TensorStore counts wrongly."""
    if not _leaks():
        return
    ts.KvStore.Spec.to_json = _to_json
    for name, module in list(sys.modules.items()):
        # The releases of Orbax ask for the counters in different modules, all by the name of ts.
        if name.startswith("orbax.checkpoint.") and vars(module).get("ts") is ts:
            module.ts = _WithoutCounters()


def _leaks() -> bool:
    """Returns whether a string of TensorStore's JSON has more references than one of Python's."""
    spec = {"driver": "file", "path": "/counted/"}
    found, right = ts.KvStore.Spec(spec).to_json(), json.loads(json.dumps(spec))
    return sys.getrefcount(found["path"]) > sys.getrefcount(right["path"])


_ask = ts.KvStore.Spec.to_json
_kinds: dict[str, dict[str, Any]] = {}  # by how it prints: the JSON of a spec without its path


def _to_json(spec: ts.KvStore.Spec, include_defaults: bool = False) -> Any:
    """Returns what KvStore.Spec.to_json does, and asks it once for all directories of a store."""
    if include_defaults or spec.base is not None or not spec.path:
        return _ask(spec, include_defaults)
    kind = spec.copy()
    kind.path = ""
    name = repr(kind)
    if name not in _kinds:
        _kinds[name] = _ask(kind)
    return {**copy.deepcopy(_kinds[name]), "path": spec.path}


class _WithoutCounters:
    """TensorStore for Orbax, with no counters.

    Orbax makes events of jax.monitoring of them, the bytes written and read and their compression,
    and leaves these events out if the counters show none. Nothing here listens to them.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(ts, name)

    def experimental_collect_matching_metrics(self, *_: Any, **__: Any) -> list:
        return []
