"""Note in a run directory about the import that made it, written before anything else of it."""

import json

from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, exists, replace

FILE = "import.json"


def begin(workdir: Place, source: str) -> None:
    """Notes that an import has begun, before anything else of it is written."""
    _write(workdir, source, is_complete=False)


def end(workdir: Place, source: str) -> None:
    """Notes that the run is complete."""
    _write(workdir, source, is_complete=True)


def _write(workdir: Place, source: str, *, is_complete: bool) -> None:
    note = {"from": source, "is_complete": is_complete}
    replace(workdir / FILE, json.dumps(note) + "\n")


def has_begun(workdir: Place) -> bool:
    """Returns whether an import into a directory has begun and has not ended."""
    return _read(workdir).get("is_complete") is False


def source_of(workdir: Place) -> str:
    """Returns the model of which an import made a run; "" if the run was made otherwise."""
    note = _read(workdir)
    return str(note["from"]) if note.get("is_complete") and "from" in note else ""


def _read(workdir: Place) -> dict:
    """Returns the note; {} if there is none, or a damaged one."""
    if not exists(workdir / FILE):
        return {}
    try:
        note = json.loads((workdir / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def check_ended(folder: Place) -> None:
    """Raises UserError for a directory, without config.json, of an import that has not ended."""
    if has_begun(folder):
        raise UserError(
            f"{folder} holds an import that was interrupted or is still running, and no run yet: "
            "repeat the command of the import, which begins again, or use another directory"
        )
