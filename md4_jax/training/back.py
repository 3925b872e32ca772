"""Return of a run to an earlier checkpoint, for example after it diverged."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from md4_jax.protocols import UserError
from md4_jax.protocols.phrases import amount
from md4_jax.runtime.paths import Place, append, move, replace
from md4_jax.training.report import METRICS
from md4_jax.training.writers import read_rows

FILE = "back.json"
ASIDE = "abandoned_checkpoints"
# Keys that may change on a return, because they do not affect the arrays of a checkpoint.
FREE = ("optim.", "train.max_skipped_in_a_row")


def is_done(workdir: Place, asked: str, optim: Mapping[str, Any]) -> bool:
    """Returns whether the last return was to this checkpoint; the command then only resumes."""
    last = _last(workdir)
    return bool(last and last["done"] and (last["asked"], last["optim"]) == (asked, dict(optim)))


def begin(
    workdir: Place, asked: str, step: int, newest: tuple[int, Mapping[str, Any]],
    config: Mapping[str, Any], each: int, times: int = 1,
) -> None:  # fmt: skip
    """Records the decision to return to a checkpoint; `finish` carries it out.

    newest: step and host state of the newest readable checkpoint. each: data sequences per batch,
    which is used for `times` steps. The training data continue after the last step that may have
    run: one log window after the last row of the log.
    """
    log = workdir / METRICS
    rows = read_rows(log) if log.exists() else []
    reached, host = newest
    last = max((row["step"] for row in rows), default=0) + config["log"]["every"]
    # The position of a checkpoint within a batch's steps is before that batch.
    batches = max(0, -(-last // times) - reached // times)
    sequences = host["data"]["sequences"] + batches * each
    entry = {"asked": asked, "step": step, "sequences": sequences}
    replace(
        workdir / FILE,
        json.dumps({**entry, "optim": config["optim"], "done": False}, indent=1) + "\n",
    )


def finish(workdir: Place, say: Callable[[str], None]) -> None:
    """Moves later checkpoints aside, if a return was recorded and is not finished."""
    last = _last(workdir)
    if last is None or last["done"]:
        return
    aside, log = workdir / ASIDE, workdir / METRICS
    aside.mkdir(exist_ok=True)
    if log.exists():
        append(aside / f"metrics-{time.time_ns()}.jsonl", log.read_text())
    for path in sorted((workdir / "checkpoints").iterdir(), key=lambda path: path.name):
        if path.name.isdecimal() and int(path.name) > last["step"]:
            target = aside / f"{path.name}-{time.time_ns()}"
            move(path, target)
            say(f"moved checkpoint {path.name} to {target}")
    replace(workdir / FILE, json.dumps({**last, "done": True}, indent=1) + "\n")
    used = amount(last["sequences"], "sequence", ",")
    say(f"back to step {last['step']}; the data continue after {used}")


def position(workdir: Place, step: int, kept: Mapping[str, int]) -> Mapping[str, int]:
    """Returns the data position after a step: that of a return to this step, else `kept`."""
    last = _last(workdir)
    return {"sequences": last["sequences"]} if last and last["step"] == step else kept


def _last(workdir: Place) -> dict[str, Any] | None:
    file = workdir / FILE
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text("utf-8"))
        wanted = {"asked": str, "step": int, "sequences": int, "optim": dict, "done": bool}
        if any(type(found[key]) is not kind for key, kind in wanted.items()):
            raise ValueError("a value has another type")
        return found
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(
            f"{file} is damaged ({type(error).__name__}: {error}): it stores where the data of "
            "this run continue. Restore it from a copy, or move it away to continue with the "
            "data of the checkpoint"
        ) from error
