"""Locations of models: folders and safetensors files, local or on the hub."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from md4_jax.config import imports
from md4_jax.config import load as config_lib
from md4_jax.model import hub, peft_config
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place, exists, place


class Found(NamedTuple):
    """Location of a model.

    folder  of a run, of a model, or of a file
    file    name of a single file to read; "": all files of a model
    """

    folder: Place
    file: str = ""

    @property
    def place(self) -> Place:
        """Returns the file, or the folder."""
        return self.folder / self.file if self.file else self.folder


def found(source: str) -> Found:
    """Returns the location of a path or of a name on the hub, which is downloaded if needed."""
    if not source:  # as a path it would be the current directory
        raise UserError(
            "the name of the model is empty: give the folder of a run or a model, or hf:USER/NAME"
        )
    if source.startswith(hub.MARK):
        return _of(hub.snapshot(source))
    here = place(source, "the model")
    if here.is_dir():
        return Found(here)
    if here.exists():
        if source.endswith(hub.ENDINGS):
            return _of(here)
        raise UserError(
            f"{source} is a file, but must be the folder of a run or a model, or a model's "
            f"{', '.join(hub.ENDINGS)} file"
        )
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", source):
        try:
            return _of(hub.snapshot(source))
        except UserError as error:
            raise UserError(f"there is no folder {here}, and {error}") from error
    raise UserError(f"there is no {'file' if source.endswith(hub.ENDINGS) else 'folder'} {here}")


def _of(here: Place) -> Found:
    return Found(here.parent, here.name) if here.name.endswith(hub.ENDINGS) else Found(here)


def folder_of(source: str) -> Place:
    """Returns the folder of a path or of a name on the hub; UserError for a file."""
    where = found(source)
    if where.file:
        raise UserError(f"{source} is a file: give its folder")
    return where.folder


def named(source: str, where: Found) -> str:
    """Returns the name of a model for other libraries: USER/NAME, or its path."""
    if source.startswith(hub.MARK):
        return source.removeprefix(hub.MARK)
    own = place(source, "the model")
    return str(own) if own == where.place else source


def told_by(folder: Place) -> dict[str, Any]:
    """Returns a folder's config.json, {} if there is none; UserError for only an adapter."""
    file = folder / config_lib.FILE
    if not exists(file):
        config_lib.check_one(folder)
        imports.check_ended(folder)
        peft_config.check_no_adapter(folder)
        return {}
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not readable JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def check_whole(where: Found, told: Mapping[str, Any]) -> None:
    """Raises UserError for a single file of a model of this package, which needs its folder."""
    if where.file and told.get("package") == "md4_jax":
        raise UserError(
            f"{where.place} belongs to a model that md4_jax saved: give its folder, {where.folder}"
        )
