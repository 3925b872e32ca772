"""Orbax checkpoints of the state of a run, its data iterator and its log."""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from md4_jax.options import CheckpointOptions
from md4_jax.protocols import Params, UserError
from md4_jax.runtime import retries
from md4_jax.runtime.checksums import checksums
from md4_jax.runtime.heap import give_back
from md4_jax.runtime.paths import Place, move, sync_all
from md4_jax.runtime.sharding import max_over_processes
from md4_jax.training import first_save, items, tensorstore
from md4_jax.training.keeping import surplus


class Checkpoints:
    """Numbered checkpoints of one run, saved atomically in the background.

    The first checkpoint that a process saves is read back before any older one is deleted. Surplus
    checkpoints are deleted when the next save begins, once the last one is on disk; `best(steps)`
    is kept in addition to those of the options. A single process retries a failed save.

    A checkpoint has three items: `ema` (for evaluation and sampling), `train` (the rest of the
    state) and `host` (JSON: position of the data iterator, open window of the log, and checksums of
    every array and of the JSON itself).
    """

    def __init__(self, directory: Place, options: CheckpointOptions, *, read_only: bool = False):
        self.directory = directory
        self.best: Callable[[Iterable[int]], int | None] = lambda steps: None
        self._options, self._read_only, self._is_proven = options, read_only, False
        self._has_failed, self._not_flushed = False, set()
        tensorstore.mend()
        self._manager = self._opened()

    def _opened(self) -> ocp.CheckpointManager:
        """Opens the directory, and deletes the remains of unfinished saves."""
        every_one = ocp.checkpoint_managers.LatestN(None)
        return ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=every_one,
                create=not self._read_only,
                read_only=self._read_only,
                cleanup_tmp_directories=not self._read_only,
            ),
            item_names=("ema", "train", "host"),
        )

    def steps(self) -> list[int]:
        """Returns the steps of the committed checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, host: dict) -> None:
        """Starts saving; UserError if this or the previous save failed, for example on a full disk.

        The first save, and one after a failure, blocks until it is done. The first one is also read
        back; UserError if it differs.
        """
        ema, train = items.leaves(state.ema), items.leaves(state._replace(ema=()))
        record = {"state": host, "checksums": {"ema": checksums(ema), "train": checksums(train)}}
        saved = ocp.args.Composite(
            ema=ocp.args.StandardSave(ema),
            train=ocp.args.StandardSave(train),
            host=ocp.args.JsonSave({**record, "crc32": items.crc32(record)}),
        )
        if not self.steps() and jax.process_index() == 0:
            parent = self.directory.parent
            retries.patiently(lambda: first_save.begin(parent, step), self._retries)
        for pause in (*retries.pauses(self._retries), None):
            try:
                self._begin(step, saved)
                break
            except Exception as error:
                if pause is None:
                    raise self._not_saved(error) from error
                retries.wait(f"checkpoint {step} could not be saved: {items.reason(error)}", pause)
                self._open_again()
        if not self._is_proven:
            self._prove(step, record, {"ema": ema, "train": train})
            self.wait()

    def _begin(self, step: int, saved: ocp.args.Composite) -> None:
        """Saves in the background, unless no save has succeeded before."""
        self._finished()
        self.prune()
        self._manager.save(step, args=saved)
        if self._has_failed or not self._is_proven:
            self._finished()
        self._has_failed = False

    def _finished(self) -> None:
        """Waits for the save in the background, and releases its memory."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()
        give_back()

    @property
    def _retries(self) -> int:
        """Number of retries; 0 with several processes, since a single one cannot retry alone."""
        return self._options.retries if jax.process_count() == 1 else 0

    def _open_again(self) -> None:
        self._has_failed = True
        with contextlib.suppress(Exception):
            self._manager.close()
        with contextlib.suppress(Exception):  # each object store has errors of its own
            self._manager = self._opened()

    def _prove(self, step: int, record: dict, saved: Mapping[str, dict[str, Any]]) -> None:
        """Reads a checkpoint back; UserError if it differs.

        Done once, this shows that the process can read the directory.
        """
        wrong = self._difference(step, record, saved)
        if wrong:
            before = ", ".join(str(s) for s in self.steps() if s != step)
            others = f"The earlier checkpoints were kept: step {before}"
            raise UserError(
                f"checkpoint {step} in {self.directory} was written, but cannot be read back: "
                f"{wrong}. {others if before else 'There is no earlier checkpoint'}. Repair the "
                "directory or its disk and repeat the command, or use another --workdir"
            )
        self._is_proven = True

    def prune(self) -> None:
        """Deletes surplus checkpoints, if this process has saved one.

        The newest one is flushed to the disk before that, in case the machine loses power. If that
        fails, a newer one is needed: a second flush succeeds although the data are lost.
        """
        if not self._is_proven:
            return
        steps = self.steps()
        if steps[-1] in self._not_flushed:
            return
        self._not_flushed.add(steps[-1])
        sync_all(self.directory / str(steps[-1]))
        self._not_flushed.clear()
        if jax.process_index() == 0:
            first_save.end(self.directory.parent)
        for old in surplus(steps, self._options, self.best(steps)):
            self._manager.delete(old)

    def _difference(self, step: int, record: dict, saved: Mapping[str, dict[str, Any]]) -> str:
        """Describes how a checkpoint differs from what was saved; '' if it does not."""
        only_host = ocp.args.Composite(host=ocp.args.JsonRestore())
        found, wrong = items.attempt(lambda: self._manager.restore(step, args=only_host))
        if wrong or found["host"].get("crc32") != items.crc32(record):
            return wrong or "its host file differs from what was saved"
        wrong = items.damage(found, ())
        for item, part in ((i, p) for i, arrays in saved.items() for p in items.parts(arrays)):
            if not wrong:
                where = self.directory / str(step) / item
                leaves, wrong = items.attempt(lambda w=where, p=part: items.read_part(w, p))
                wrong = wrong or items.damage({"host": found["host"], item: leaves}, (item,))
        return wrong

    def has_failed(self) -> bool:
        """Returns whether a save in the background failed and must be retried.

        UserError if no retries are left.
        """
        return self._fails(self._manager.check_for_errors)

    def wait(self) -> bool:
        """Waits until all saves are on disk, deletes surplus ones, and returns `has_failed`."""
        return self._fails(lambda: (self._finished(), self.prune()))

    def _fails(self, action: Callable[[], Any]) -> bool:
        try:
            action()
        except Exception as error:
            if not self._retries:
                raise self._not_saved(error) from error
            self._open_again()
        return self._has_failed

    def _not_saved(self, error: Exception) -> UserError:
        steps = ", ".join(map(str, self._listed()))
        kept = f"Complete checkpoints: step {steps}" if steps else "There is no complete checkpoint"
        then = "to resume" if steps else "from the beginning"
        return UserError(
            f"a checkpoint could not be saved in {self.directory}: {items.reason(error)}. {kept}; "
            f"free some space or repair the directory, then repeat the command {then}"
        )

    def _listed(self) -> list[int]:
        with contextlib.suppress(Exception):  # it cannot be read: those that are known
            return sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdigit())
        return self.steps()

    def restore(self, template: Any, say=print) -> tuple[Any, dict] | None:
        """Returns the newest readable (state, host state), or None if there is no checkpoint.

        template: the state with ShapeDtypeStruct leaves and shardings. Unreadable checkpoints are
        reported by `say` and moved aside, and the previous one is read. UserError if none can be
        read. If only the first save exists and a loss of power interrupted it, returns None.
        """
        ema, rest = template.ema, template._replace(ema=())
        newest = self._newest({"ema": ema, "train": rest}, say)
        if newest is None:
            self._move_aside_after(-1, say)
            return None
        step, found = newest
        self._move_aside_after(step, say)
        state = items.graft(rest, found["train"])._replace(ema=items.graft(ema, found["ema"]))
        return state, found["host"]["state"]

    def restore_ema(
        self, template: Params, say=print, step: int | None = None
    ) -> tuple[int, Params, dict] | None:
        """Returns (step, averaged parameters, host state) of the newest readable checkpoint.

        None if there is none. step: another checkpoint to read; UserError if it cannot be read.
        """
        asked = {"ema": template}
        found = self._newest(asked, say) if step is None else (step, self._one(step, asked))
        if found is None:
            return None
        step, arrays = found
        return step, items.graft(template, arrays["ema"]), arrays["host"]["state"]

    def newest_host(self, say=print) -> tuple[int, dict] | None:
        """Returns (step, host state) of the newest readable checkpoint, or None."""
        found = self._newest({}, say)
        return found and (found[0], found[1]["host"]["state"])

    def _newest(self, templates: Mapping[str, Any], say) -> tuple[int, Any] | None:
        """Reads these items and `host` of the newest readable checkpoint; reports others."""
        items.wait_for_same(self.steps, self._manager.reload, self.directory)
        for step in reversed(self.steps()):
            found, wrong = self._read(step, templates)
            if not wrong:
                return step, found
            items.check_allowed(self.directory / str(step))
            say(f"checkpoint {step} in {self.directory} cannot be read: {wrong}")
            if step == self.steps()[0]:
                if first_save.was_cut_short(self.directory.parent, step):
                    say("the machine stopped before this first checkpoint was on its disk")
                    return None
                raise UserError(
                    f"none of the checkpoints {self.steps()} in {self.directory} can be read; "
                    "nothing was changed. To start again, use another --workdir"
                )
            say("falling back to the checkpoint before it")
        return None

    def _one(self, step: int, templates: Mapping[str, Any]) -> Any:
        """Reads these items and `host` of one checkpoint; UserError if it cannot be read."""
        found, wrong = self._read(step, templates)
        if wrong:
            raise UserError(
                f"checkpoint {step} in {self.directory} cannot be read: {wrong}. There are "
                f"checkpoints of the steps {self.steps()}: choose one by eval.checkpoint"
            )
        return found

    def _read(self, step: int, templates: Mapping[str, Any]) -> tuple[Any, str]:
        """Reads these items and `host`: (items, ''), or on all processes (None, reason)."""
        asked = {k: ocp.args.StandardRestore(items.leaves(v)) for k, v in templates.items()}
        asked = ocp.args.Composite(**asked, host=ocp.args.JsonRestore())
        found, wrong = items.attempt(lambda: self._manager.restore(step, args=asked))
        if wrong := wrong or items.damage(found, templates):
            wrong = self._other_type(step, templates) or wrong
        return found, wrong

    def _other_type(self, step: int, templates: Mapping[str, Any]) -> str:
        """Names an array of a checkpoint with another type than its template, '' if none."""
        for item, template in templates.items():
            where, asked = self.directory / str(step) / item, items.leaves(template)
            said, unread = items.attempt(lambda w=where, a=asked: items.other_type(w, a))
            if said and not unread:
                return said
        return ""

    def _move_aside_after(self, step: int, say) -> None:
        """Moves unreadable newer checkpoints aside, because their steps will be saved again."""
        newer = [s for s in self.steps() if s > step]
        if newer and jax.process_index() == 0:
            aside = self.directory.parent / "unreadable_checkpoints"
            aside.mkdir(exist_ok=True)
            for bad in newer:
                target = aside / f"{bad}-{time.time_ns()}"
                move(self.directory / str(bad), target)
                say(f"moved the unreadable checkpoint {bad} to {target}")
        if newer:
            # All processes wait for the move, so that none considers these steps saved.
            max_over_processes(len(newer))
            self._manager.reload()

    def close(self) -> None:
        self._manager.close()
