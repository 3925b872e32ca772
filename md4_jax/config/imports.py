"""Note in a directory that an import into it has begun and has not ended."""

import json

from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, exists, replace

FILE = "import.json"


def begin(workdir: Place, source: str) -> None:
    """Notes the source of an import, before anything else of it is written."""
    replace(workdir / FILE, json.dumps({"from": source}) + "\n")


def end(workdir: Place) -> None:
    """Removes the note, once the run is complete."""
    (workdir / FILE).unlink(missing_ok=True)


def has_begun(workdir: Place) -> bool:
    """Returns whether an import into a directory has begun and has not ended."""
    return exists(workdir / FILE)


def check_ended(folder: Place) -> None:
    """Raises UserError for a directory, without config.json, of an import that has not ended."""
    if has_begun(folder):
        raise UserError(
            f"{folder} holds an import that was interrupted or is still running, and no run yet: "
            "repeat the command of the import, which begins again, or use another directory"
        )
