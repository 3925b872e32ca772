"""Changes of a config that a user gives to `md4_jax.load`."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from md4_jax.options import PromptOptions
from md4_jax.protocols import UserError


def check_changes(changes: Mapping[str, Any]) -> None:
    """Raises UserError for what is no dict, and for keys that only `sample` takes."""
    if not isinstance(changes, Mapping):
        raise UserError(f'config must be a dict, such as {{"mesh.tensor": 4}}, not {changes!r}')
    for key, value in changes.items():
        if not isinstance(key, str):
            raise UserError(f"the keys of config must be text, such as 'mesh.tensor', not {key!r}")
        if "." not in key and isinstance(value, Mapping) and value:
            inner = f"{key}.{next(iter(value))}"
            raise UserError(f"config={{{key!r}: ...}} must name single keys, such as {inner!r}")
    prompts = [field.name for field in dataclasses.fields(PromptOptions) if field.name != "blank"]
    for key in changes:
        section = key.removeprefix("sample.").split(".")[0]
        if key.startswith("sample.") and section in (*prompts, "reward", "classifier"):
            raise UserError(
                f"{key} belongs to single samples: give it to sample, as in "
                f"model.sample({section}=...), not to load"
            )


def check_source(source: Any) -> None:
    """Raises UserError for what is neither text nor a path."""
    if not isinstance(source, str | os.PathLike):
        raise UserError(
            f"the model must be the folder of a run or a model, or hf:USER/NAME, not {source!r}"
        )
