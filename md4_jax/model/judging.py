"""Published models and saved folders as judges of a run's samples."""

from collections.abc import Mapping
from typing import Any

from md4_jax.config import load as config
from md4_jax.config.judging import Foreign, says_causal
from md4_jax.experiment import Experiment
from md4_jax.model import finding, hub
from md4_jax.model.load import described, load
from md4_jax.protocols import Params, UserError
from md4_jax.runtime.paths import place
from md4_jax.runtime.tensors import is_folder


def read(key: str, asked: str, mesh: Mapping[str, Any]) -> tuple[Experiment, Params, bool] | None:
    """Reads hf:NAME, or a folder of safetensors, as `load` does; None for any other source.

    Returns (experiment, params, whether this package trained it). UserError, which names the key.

    mesh: the devices that it is placed on
    """
    if not _is_model(key, asked):
        return None
    try:
        model = load(asked, {f"mesh.{axis}": size for axis, size in mesh.items()})
    except UserError as error:
        raise UserError(f"{key}={asked}: {error}") from error
    return model.experiment, model.params, model.layout is None or model.step > 0


def is_causal(key: str, asked: str) -> bool | None:
    """Returns whether the network of hf:NAME, or in a folder of safetensors, is causal.

    None for any other source. A model on the hub is fetched. UserError, which names the key, for a
    model whose config, arrays' names or tokenizer cannot be read.
    """
    if not _is_model(key, asked):
        return None
    try:
        where = finding.found(asked)
        told = finding.told_by(where.folder)
        finding.check_whole(where, told)
        if told.get("package") == "md4_jax":
            kept = config.stored(where.folder) or {}
            return says_causal(key, asked, kept["network"])
        return bool(described(where, told).sections["network"].get("causal", False))
    except UserError as error:
        raise UserError(f"{key}={asked}: {error}") from error


def _is_model(key: str, asked: str) -> bool:
    """Returns whether a judge is hf:NAME or a folder of safetensors."""
    return asked.startswith(hub.MARK) or is_folder(place(asked, key))


FOREIGN = Foreign(read, is_causal)
