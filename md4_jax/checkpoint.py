"""Checkpoints through Orbax: parameters, optimizer, moving average, step and data iterator."""

import dataclasses
import json
import time
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from md4_jax.checksums import checksums
from md4_jax.paths import Place, move
from md4_jax.protocols import Params, UserError
from md4_jax.sharding import largest


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
    """The `checkpoint` section: steps between saves and how many of the newest are kept."""

    every: int = 1000
    keep: int = 3

    def __post_init__(self):
        for name in ("every", "keep"):
            if getattr(self, name) < 1:
                raise UserError(f"checkpoint.{name} must be at least 1, not {getattr(self, name)}")


class Checkpoints:
    """The numbered checkpoints of one run: saved in the background, committed whole or not at all.

    A checkpoint has three items: `ema` (what evaluation and sampling need),
    `train` (everything else of the state) and `host` (JSON: the data iterator's
    position, the log's open window, and a checksum of every array and of itself).
    """

    def __init__(self, directory: Place, options: CheckpointOptions, *, read_only: bool = False):
        self.directory = directory
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=options.keep,
                create=not read_only,
                read_only=read_only,
                cleanup_tmp_directories=not read_only,
            ),
            item_names=("ema", "train", "host"),
        )

    def steps(self) -> list[int]:
        """The steps that have a committed checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, host: dict) -> None:
        """Starts saving; UserError if this or the previous save failed (disk full, say)."""
        ema, train = _leaves(state.ema), _leaves(state._replace(ema=()))
        record = {"state": host, "checksums": {"ema": checksums(ema), "train": checksums(train)}}
        items = ocp.args.Composite(
            ema=ocp.args.StandardSave(ema),
            train=ocp.args.StandardSave(train),
            host=ocp.args.JsonSave({**record, "crc32": _crc32(record)}),
        )
        self._guard(lambda: self._manager.save(step, args=items))

    def check(self) -> None:
        """UserError if a save in the background has failed meanwhile."""
        self._guard(lambda: None)

    def wait(self) -> None:
        """Blocks until what was started is on disk; UserError if it failed."""
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
        return sorted(int(p.name) for p in self.directory.glob("[0-9]*") if p.name.isdigit())

    def restore(self, template: Any, say=print) -> tuple[Any, dict] | None:
        """The newest readable (state, host state) laid out as the template; None if none was saved.

        template: the state with ShapeDtypeStruct leaves that carry shardings. One
        that cannot be read is named through `say`, moved aside and not deleted,
        and the one before it is taken. UserError when none of them can be read.
        """
        ema, rest = template.ema, template._replace(ema=())
        for step in reversed(self.steps()):
            found = self._read(step, {"ema": ema, "train": rest}, say)
            if found is not None:
                self._move_aside_after(step, say)
                state = _graft(rest, found["train"])._replace(ema=_graft(ema, found["ema"]))
                return state, found["host"]["state"]
        return None

    def restore_ema(self, template: Params, say=print) -> tuple[int, Params] | None:
        """(step, moving average) of the newest readable checkpoint; None if none was saved."""
        for step in reversed(self.steps()):
            found = self._read(step, {"ema": template}, say)
            if found is not None:
                return step, _graft(template, found["ema"])
        return None

    def _read(self, step: int, templates: Mapping[str, Any], say) -> Any:
        """These items and `host`, or None, alike on all processes; what is wrong is said."""
        items = {k: ocp.args.StandardRestore(_leaves(v)) for k, v in templates.items()}
        found, wrong = None, ""
        try:
            items = ocp.args.Composite(**items, host=ocp.args.JsonRestore())
            found = self._manager.restore(step, args=items)
        except Exception as error:
            wrong = _reason(error)
        # Checksums are sums over all processes, so that all of them must have read something.
        if largest(int(bool(wrong))):
            wrong = wrong or "another process could not read it"
        else:
            wrong = _damage(found, templates)
        if not wrong:
            return found
        say(f"checkpoint {step} in {self.directory} cannot be read: {wrong}")
        if step == self.steps()[0]:
            raise UserError(
                f"none of the checkpoints {self.steps()} in {self.directory} can be read; "
                "nothing was changed. To start anew choose another --workdir"
            )
        say("falling back to the checkpoint before it")
        return None

    def _move_aside_after(self, step: int, say) -> None:
        """Unreadable newer checkpoints would stand in the way of saving those steps again."""
        newer = [s for s in self.steps() if s > step]
        if newer and jax.process_index() == 0:
            aside = self.directory.parent / "unreadable_checkpoints"
            aside.mkdir(exist_ok=True)
            for bad in newer:
                target = aside / f"{bad}-{time.time_ns()}"
                move(self.directory / str(bad), target)
                say(f"moved the unreadable checkpoint {bad} to {target}")
        if newer:
            self._manager.reload()

    def close(self) -> None:
        self._manager.close()


def _leaves(tree: Any) -> dict[str, Any]:
    """A flat dict path -> array: what is on disk then depends on names and on no Python class."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in flat}


def _damage(found: Any, items: Mapping[str, Any]) -> str:
    """What was read and is not what was saved; '' if all is as it was."""
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
    """The template's structure with the restored arrays in it."""
    return jax.tree_util.tree_map_with_path(
        lambda p, _: leaves[jax.tree_util.keystr(p, simple=True, separator="/")], template
    )


def _reason(error: Exception) -> str:
    """The first line of the innermost cause, which names the file or the errno."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip()
    return (text.splitlines() or [type(error).__name__])[0][:300]
