"""Changes of a config that a user gives to `md4_jax.load`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from md4_jax.options import PromptOptions
from md4_jax.protocols import UserError


def check_changes(changes: Mapping[str, Any]) -> None:
    """Raises UserError for what is no dict, and for keys that only `sample` takes."""
    if not isinstance(changes, Mapping):
        raise UserError(f'config must be a dict, such as {{"mesh.tensor": 4}}, not {changes!r}')
    prompts = [field.name for field in dataclasses.fields(PromptOptions) if field.name != "blank"]
    for key in map(str, changes):
        section = key.removeprefix("sample.").split(".")[0]
        if key.startswith("sample.") and section in (*prompts, "reward", "classifier"):
            raise UserError(
                f"{key} belongs to single samples: give it to sample, as in "
                f"model.sample({section}=...), not to load"
            )
