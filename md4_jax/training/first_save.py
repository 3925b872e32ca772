"""Note in a run directory that its first checkpoint may not be on the disk yet."""

import json

from md4_jax.runtime.paths import Place, is_remote, replace

FILE = "first_save.json"


def begin(workdir: Place, step: int) -> None:
    """Notes the step before its checkpoint is written; object storage does not need the note."""
    if not is_remote(workdir):
        replace(workdir / FILE, json.dumps({"step": step}) + "\n")


def end(workdir: Place) -> None:
    """Removes the note, once a checkpoint is on the disk."""
    if not is_remote(workdir):
        (workdir / FILE).unlink(missing_ok=True)


def was_cut_short(workdir: Place, step: int) -> bool:
    """Returns whether this is the first checkpoint and may be incomplete after a loss of power."""
    try:
        return json.loads((workdir / FILE).read_text("utf-8")) == {"step": step}
    except (OSError, ValueError, RecursionError):
        return False
