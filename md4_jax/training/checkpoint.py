"""Checkpoints by Orbax of the state of a run, its data iterator and its log."""

import json
import math
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from md4_jax.options import CheckpointOptions
from md4_jax.protocols import Params, UserError
from md4_jax.runtime.checksums import checksums
from md4_jax.runtime.paths import Place, move
from md4_jax.runtime.sharding import max_over_processes
from md4_jax.training.keeping import kept_by, surplus

# Extra bytes on a device while a checkpoint is read back, part by part.
PART_BYTES = 2**28


class Checkpoints:
    """Numbered checkpoints of one run, saved in the background, each whole or not at all.

    The first checkpoint that a process saves is read back before any older one is deleted. After
    that each save deletes what the options do not keep; `best` is a step to keep besides.

    A checkpoint has three items: `ema` (for evaluation and sampling), `train` (the rest of the
    state) and `host` (JSON: position of the data iterator, open window of the log, and checksums of
    every array and of the JSON itself).
    """

    def __init__(self, directory: Place, options: CheckpointOptions, *, read_only: bool = False):
        self.directory = directory
        self.best: int | None = None
        self._options, self._is_proven = options, False
        every_one = ocp.checkpoint_managers.LatestN(None)
        self._kept = ocp.checkpoint_managers.AnyPreservationPolicy([every_one])
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=self._kept,
                create=not read_only,
                read_only=read_only,
                cleanup_tmp_directories=not read_only,
            ),
            item_names=("ema", "train", "host"),
        )

    def steps(self) -> list[int]:
        """Returns the steps of the committed checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, host: dict) -> None:
        """Starts saving; UserError if this or the previous save failed, say with a full disk.

        The first call waits until the checkpoint has been read back; UserError if it differs.
        """
        ema, train = _leaves(state.ema), _leaves(state._replace(ema=()))
        record = {"state": host, "checksums": {"ema": checksums(ema), "train": checksums(train)}}
        items = ocp.args.Composite(
            ema=ocp.args.StandardSave(ema),
            train=ocp.args.StandardSave(train),
            host=ocp.args.JsonSave({**record, "crc32": _crc32(record)}),
        )
        if self._is_proven:
            self._kept.policies = kept_by(self._options, self.best)
        self._guard(lambda: self._manager.save(step, args=items))
        if not self._is_proven:
            self._guard(self._manager.wait_until_finished)
            self._prove(step, record, {"ema": ema, "train": train})

    def _prove(self, step: int, record: dict, saved: Mapping[str, dict[str, Any]]) -> None:
        """Reads a checkpoint back, then deletes old ones; UserError if it differs.

        Doing so once shows that this process can read the directory.
        """
        wrong = self._difference(step, record, saved)
        if wrong:
            before = [s for s in self.steps() if s != step]
            raise UserError(
                f"checkpoint {step} in {self.directory} was written, but cannot be read back: "
                f"{wrong}. No other was deleted; those before it are of steps {before}. Mend the "
                "directory or its disk and start the same command again, or choose another "
                "--workdir"
            )
        self._is_proven = True
        self.prune()

    def prune(self) -> None:
        """Deletes what the options do not keep, if this process has saved a checkpoint."""
        if self._is_proven:
            for old in surplus(self.steps(), self._options, self.best):
                self._manager.delete(old)

    def _difference(self, step: int, record: dict, saved: Mapping[str, dict[str, Any]]) -> str:
        """Says how a checkpoint differs from what was saved; '' if it does not."""
        only_host = ocp.args.Composite(host=ocp.args.JsonRestore())
        found, wrong = _attempt(lambda: self._manager.restore(step, args=only_host))
        if wrong or found["host"].get("crc32") != _crc32(record):
            return wrong or "its host file is not what was saved"
        wrong = _damage(found, ())
        for item, part in ((i, part) for i, arrays in saved.items() for part in _parts(arrays)):
            if not wrong:
                where = self.directory / str(step) / item
                leaves, wrong = _attempt(lambda w=where, p=part: _read_part(w, p))
                wrong = wrong or _damage({"host": found["host"], item: leaves}, (item,))
        return wrong

    def check(self) -> None:
        """Raises UserError if a save in the background has failed."""
        self._guard(lambda: None)

    def wait(self) -> None:
        """Waits until all saves are on disk; UserError if one failed."""
        self._guard(self._manager.wait_until_finished)

    def _guard(self, action) -> None:
        try:
            action()
            self._manager.check_for_errors()
        except Exception as error:
            raise UserError(
                f"a checkpoint could not be saved in {self.directory}: {_reason(error)}. "
                f"Checkpoints that are whole: steps {self._on_disk()}; free some space or "
                "mend the directory, then start the same command again to resume"
            ) from error

    def _on_disk(self) -> list[int]:
        return sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdigit())

    def restore(self, template: Any, say=print) -> tuple[Any, dict] | None:
        """Returns the newest readable (state, host state), or None if there is no checkpoint.

        template: the state with ShapeDtypeStruct leaves and shardings. Unreadable checkpoints are
        reported by `say` and moved aside, and the one before is taken. UserError if none can be
        read.
        """
        ema, rest = template.ema, template._replace(ema=())
        newest = self._newest({"ema": ema, "train": rest}, say)
        if newest is None:
            return None
        step, found = newest
        self._move_aside_after(step, say)
        state = _graft(rest, found["train"])._replace(ema=_graft(ema, found["ema"]))
        return state, found["host"]["state"]

    def restore_ema(
        self, template: Params, say=print, step: int | None = None
    ) -> tuple[int, Params] | None:
        """Returns (step, moving average) of the newest readable checkpoint, or None.

        step: another checkpoint to read; UserError if it cannot be read.
        """
        asked = {"ema": template}
        found = self._newest(asked, say) if step is None else (step, self._one(step, asked))
        return found and (found[0], _graft(template, found[1]["ema"]))

    def host(self, say=print) -> dict | None:
        """Returns the host state of the newest readable checkpoint, or None."""
        found = self._newest({}, say)
        return found and found[1]["host"]["state"]

    def _newest(self, templates: Mapping[str, Any], say) -> tuple[int, Any] | None:
        """Reads these items and `host` of the newest readable checkpoint; says which are not."""
        for step in reversed(self.steps()):
            found, wrong = self._read(step, templates)
            if not wrong:
                return step, found
            say(f"checkpoint {step} in {self.directory} cannot be read: {wrong}")
            if step == self.steps()[0]:
                raise UserError(
                    f"none of the checkpoints {self.steps()} in {self.directory} can be read; "
                    "nothing was changed. To start anew choose another --workdir"
                )
            say("falling back to the checkpoint before it")
        return None

    def _one(self, step: int, templates: Mapping[str, Any]) -> Any:
        """Reads these items and `host` of one checkpoint; UserError if it cannot be read."""
        found, wrong = self._read(step, templates)
        if wrong:
            raise UserError(
                f"checkpoint {step} in {self.directory} cannot be read: {wrong}. "
                f"There are those of steps {self.steps()}: choose another by eval.checkpoint"
            )
        return found

    def _read(self, step: int, templates: Mapping[str, Any]) -> tuple[Any, str]:
        """Reads these items and `host`: (items, ''), or (None, reason) alike on all processes."""
        items = {k: ocp.args.StandardRestore(_leaves(v)) for k, v in templates.items()}
        items = ocp.args.Composite(**items, host=ocp.args.JsonRestore())
        found, wrong = _attempt(lambda: self._manager.restore(step, args=items))
        return found, wrong or _damage(found, templates)

    def _move_aside_after(self, step: int, say) -> None:
        """Moves unreadable newer checkpoints aside, since their steps will be saved again."""
        newer = [s for s in self.steps() if s > step]
        if newer and jax.process_index() == 0:
            aside = self.directory.parent / "unreadable_checkpoints"
            aside.mkdir(exist_ok=True)
            for bad in newer:
                target = aside / f"{bad}-{time.time_ns()}"
                move(self.directory / str(bad), target)
                say(f"moved the unreadable checkpoint {bad} to {target}")
        if newer:
            # All processes wait for the move, so that none takes these steps for saved.
            max_over_processes(len(newer))
            self._manager.reload()

    def close(self) -> None:
        self._manager.close()


def _leaves(tree: Any) -> dict[str, Any]:
    """Returns {path: array}, so that files depend on names and not on Python classes."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in flat}


def _attempt(read: Callable[[], Any]) -> tuple[Any, str]:
    """Returns (result, ''), or (None, reason) on all processes if reading failed on any.

    Checksums are sums over all processes, so all of them must have read the arrays.
    """
    found, wrong = None, ""
    try:
        found = read()
    except Exception as error:
        wrong = _reason(error)
    if max_over_processes(int(bool(wrong))):
        return None, wrong or "another process could not read it"
    return found, ""


def _parts(arrays: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Splits arrays into parts of at most PART_BYTES on a device, or of one array."""
    parts, size = [{}], 0
    for name, x in arrays.items():
        own = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        if parts[-1] and size + own > PART_BYTES:
            parts, size = [*parts, {}], 0
        parts[-1][name] = x
        size += own
    return parts


def _read_part(directory: Place, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Reads some arrays of an item, with the shapes and shardings of those given."""
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in arrays.items()
    }
    arguments = ocp.checkpoint_utils.construct_restore_args(shapes)
    asked = ocp.args.PyTreeRestore(shapes, restore_args=arguments, partial_restore=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(directory, args=asked)


def _damage(found: Any, items: Iterable[str]) -> str:
    """Names the part of a checkpoint that is not as it was saved, '' if all is."""
    record = dict(found["host"])
    if record.pop("crc32", None) != _crc32(record):
        return "its host file does not have the checksum with which it was saved"
    for item in items:
        kept, now = record["checksums"][item], checksums(found[item])
        for name in now:
            if kept.get(name) != now[name]:
                return f"{item} {name} does not have the checksum with which it was saved"
    return ""


def _crc32(record: Any) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _graft(template: Any, leaves: dict[str, Any]) -> Any:
    """Puts restored arrays into the template's structure."""
    return jax.tree_util.tree_map_with_path(
        lambda p, _: leaves[jax.tree_util.keystr(p, simple=True, separator="/")], template
    )


def _reason(error: Exception) -> str:
    """Returns the first line of the innermost cause, which names the file or the errno."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip()
    return (text.splitlines() or [type(error).__name__])[0][:300]
