"""Frozen parameters of a run, stored once in its directory instead of in every checkpoint."""

import json
import time
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from md4_jax.protocols import Params, UserError
from md4_jax.runtime import retries
from md4_jax.runtime.checksums import checksums
from md4_jax.runtime.paths import Place, move, replace, sync_all
from md4_jax.runtime.sharding import max_over_processes
from md4_jax.training import items, tensorstore
from md4_jax.training.trainable import stored

FOLDER = "base"
ARRAYS = "arrays"
RECORD = "record.json"  # written last: it marks a complete base


def keep(workdir: Place, frozen: Params, again: int = 0) -> None:
    """Writes the base of a new run; () writes nothing.

    It is written atomically and read back once. An existing base is kept if it is equal. Otherwise
    it belongs to a start that reached no checkpoint, and is moved aside. UserError if writing fails
    after `again` retries.
    """
    arrays = items.leaves(frozen)
    if not arrays:
        return
    folder, record = workdir / FOLDER, _record(arrays)
    if _is_there(folder, record) and not _difference(folder, arrays, record):
        return
    if max_over_processes(int(folder.exists())):
        _move_aside(folder)
    for pause in (*retries.pauses(again if jax.process_count() == 1 else 0), None):
        try:
            _write(folder, arrays, record)
            break
        except Exception as error:
            if pause is None:
                raise UserError(
                    f"the frozen parameters could not be saved in {folder}: "
                    f"{items.reason(error)}. Free some space or repair the directory, then repeat "
                    "the command"
                ) from error
            retries.wait(f"{folder} could not be saved: {items.reason(error)}", pause)
    wrong = _difference(folder, arrays, record)
    if wrong:
        raise UserError(
            f"{folder} was written, but cannot be read back: {wrong}. Repair the directory or its "
            "disk and repeat the command, or use another --workdir"
        )


def mark(workdir: Place) -> dict[str, int]:
    """Returns {"base": checksum} of the base, for checkpoints; {} without a base."""
    record = _stored_record(workdir / FOLDER)
    return {} if record is None else {"base": items.crc32(record)}


def read(workdir: Place, template: Params, host: Mapping[str, Any]) -> Params:
    """Reads the base of a run, part by part, into the types and shardings of the template.

    template: frozen parameters as ShapeDtypeStructs; () reads nothing. host: host state of a
    checkpoint, with the `mark` of its base. UserError if the base is missing, is another one, lacks
    a parameter or is damaged.
    """
    wanted = items.leaves(template)
    if not wanted:
        return template
    folder = workdir / FOLDER
    record = _stored_record(folder)
    if record is None:
        raise UserError(
            f"{folder} with the frozen parameters of the run is missing or incomplete. The "
            "checkpoints do not contain these parameters: copy the folder from the original run"
        )
    if items.crc32(record) != host.get("base"):
        raise UserError(
            f"{folder} does not belong to the checkpoints beside it: its frozen parameters are "
            "those of another run. Restore the folder of this run"
        )
    found: dict[str, Any] = {}
    for part in _parts(folder, wanted, record):
        arrays, wrong = items.attempt(lambda p=part: items.read_part(folder / ARRAYS, p))
        if wrong := wrong or _damage(arrays, record):
            raise UserError(
                f"{folder}, the frozen parameters of the run, cannot be read: {wrong}. Restore it "
                "from an intact copy. Nothing was changed"
            )
        found |= {name: stored(x, str(wanted[name].dtype)) for name, x in arrays.items()}
    return items.graft(template, found)


def _is_there(folder: Place, record: dict[str, Any]) -> bool:
    """Returns whether the folder already holds this base, with the same answer on all processes."""
    try:
        found = _stored_record(folder)
    except UserError:
        found = None
    return not max_over_processes(int(found != record))


def _record(arrays: dict[str, Any]) -> dict[str, Any]:
    types = {name: str(x.dtype) for name, x in arrays.items()}
    return {"checksums": checksums(arrays), "types": types}


def _stored_record(folder: Place) -> dict[str, Any] | None:
    """Returns the record, None if there is none; UserError if it is damaged."""
    file = folder / RECORD
    if not file.exists():
        return None
    try:
        record = json.loads(file.read_text())
        if record.pop("crc32") != items.crc32(record):
            raise ValueError("its checksum is wrong")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{file} is damaged ({error}): restore {folder}, the frozen parameters of the run, "
            "from an intact copy"
        ) from error
    return record


def _write(folder: Place, arrays: dict[str, Any], record: dict[str, Any]) -> None:
    tensorstore.mend()
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as writer:
        writer.save(folder / ARRAYS, args=ocp.args.StandardSave(arrays), force=True)
    if jax.process_index() == 0:
        sync_all(folder)
        whole = {**record, "crc32": items.crc32(record)}
        replace(folder / RECORD, json.dumps(whole, indent=1) + "\n")
    max_over_processes(0)  # the others wait for the record


def _parts(folder: Place, wanted: dict[str, Any], record: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the arrays to read, with their stored types, in parts."""
    missing = sorted(wanted.keys() - record["types"].keys())
    if missing:
        raise UserError(
            f"{folder}, the frozen parameters of the run, lacks {missing[0]}, which the network of "
            f"this config has"
        )
    return items.parts({name: stored(x, record["types"][name]) for name, x in wanted.items()})


def _damage(arrays: dict[str, Any], record: dict[str, Any]) -> str:
    """Names an array that differs from what was saved, '' if none does."""
    for name, found in checksums(arrays).items():
        if record["checksums"][name] != found:
            return f"{name} has a wrong checksum"
    return ""


def _difference(folder: Place, arrays: dict[str, Any], record: dict[str, Any]) -> str:
    """Describes how the base differs from these arrays, '' if it does not."""
    for part in items.parts(arrays):
        found, wrong = items.attempt(lambda p=part: items.read_part(folder / ARRAYS, p))
        if wrong := wrong or _damage(found, record):
            return wrong
    return ""


def _move_aside(folder: Place) -> None:
    """Moves the base of a start without a checkpoint to the folder of unreadable checkpoints."""
    if jax.process_index() == 0:
        aside = folder.parent / "unreadable_checkpoints"
        aside.mkdir(exist_ok=True)
        move(folder, aside / f"{FOLDER}-{time.time_ns()}")
    max_over_processes(0)
