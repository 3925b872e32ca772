"""Published models and saved folders as judges of a run's samples."""

from collections.abc import Mapping
from typing import Any

from md4_jax.config import load as config
from md4_jax.config.judging import Foreign, says_causal
from md4_jax.experiment import Experiment
from md4_jax.model import hub, peers
from md4_jax.model.finding import told_by
from md4_jax.model.load import load
from md4_jax.protocols import Params, UserError
from md4_jax.runtime.paths import place
from md4_jax.runtime.tensors import Tensors, is_folder


def read(key: str, asked: str, mesh: Mapping[str, Any]) -> tuple[Experiment, Params, bool] | None:
    """Reads hf:NAME, or a folder of safetensors, as `load` does; None for any other source.

    Returns (experiment, params, whether this package trained it). UserError, which names the key.

    mesh: the devices that it is placed on
    """
    if not asked.startswith(hub.MARK) and not is_folder(place(asked, key)):
        return None
    try:
        model = load(asked, {f"mesh.{axis}": size for axis, size in mesh.items()})
    except UserError as error:
        raise UserError(f"{key}={asked}: {error}") from error
    return model.experiment, model.params, model.layout is None or model.step > 0


def is_causal(key: str, asked: str) -> bool | None:
    """Returns whether the network in a folder of safetensors is causal; None for other sources.

    UserError, which names the key, for a folder without a model.
    """
    folder = place(asked, key)
    if not is_folder(folder):
        return None
    try:
        told = told_by(folder)
        if told.get("package") == "md4_jax":
            kept = config.stored(folder) or {}
            return says_causal(key, asked, kept["network"])
        found = peers.peer(peers.with_mask(told, folder), Tensors(folder))
    except UserError as error:
        raise UserError(f"{key}={asked}: {error}") from error
    return bool(found.sections["network"].get("causal", False))


FOREIGN = Foreign(read, is_causal)
