"""E2D2 (arXiv:2510.22852): block diffusion with an encoder and a decoder, from Qwen3."""

import re
from collections.abc import Mapping
from typing import Any

from md4_jax.config import files
from md4_jax.model.peer import Peer, check_built, in_blocks, needed, of_masks
from md4_jax.model.told import Told
from md4_jax.networks.published_e2d2 import DECODER, ENCODER, encoder_of, from_e2d2, tables_of
from md4_jax.protocols import UserError
from md4_jax.runtime.tensors import Tensors

# Keys of backbone_config that override the values of Qwen3.
OTHERWISE = {"rope_theta": "rotary_base", "rms_norm_eps": "norm_eps"}
# Sizes of Qwen3 with tied head and embedding.
TIED = re.compile(r"qwen3-(0\.6|1\.7|4)b", re.IGNORECASE)
SHARES_KEYS = "LLMasEncoderDecoderShareKV"
# Keys of backbone_config with which the decoder reads layers other than the encoder's last.
CUTS = ("num_encoder_layers", "num_decoder_layers", "keep_top_encoder_layers")


def peer(told: Told, tensors: Tensors) -> Peer:
    """Reads config.json and the shapes of arrays; UserError for unsupported models."""
    needed(told, tensors, "backbone_config")
    backbone = told.within("backbone_config")
    check_built(told, tensors, {"diffusion_type": "absorbing"})
    _check(backbone, tensors)
    names = tables_of(tensors)
    network = _network(backbone, tensors)
    tables = tuple(name for name in names if name in tensors)
    said = told.get("tokenization_config") or {}
    told = told.without("vocab_size").over({"mask_token_id": said.get("mask_token_id")}).known()
    length = needed(told, tensors, "length")
    found = of_masks(told, tensors, network, from_e2d2, names[:2], length)
    shared = network["shared_blocks"]
    found = found._replace(
        tables=tables, buffers=r"(encoder_)?static_attention_mask", told_of=_told_of,
        copied=_encoder_s if shared else str,
    )  # fmt: skip
    return in_blocks(found, needed(told, tensors, "block_size"))


def _encoder_s(name: str) -> str:
    """Returns the name of the encoder's array that an array of the decoder is, if they are one."""
    begin = (DECODER, ENCODER) if name.startswith(DECODER) else (ENCODER, DECODER)
    return name.replace(*begin, 1)


def _told_of(
    told: Mapping[str, Any], kind: str, *, shifted: bool, block: int, context: bool
) -> dict[str, Any]:
    """Returns config.json with blocks of another size; it has no key for anything else."""
    del kind, shifted, context
    return {**told, "block_size": block, "eval_block_size": block}


def _network(backbone: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Returns the section `network` of the config."""
    encoder = encoder_of(tensors)
    first = f"{encoder}model.layers.0."
    size = tensors.shape(tables_of(tensors)[0])[1]
    each = tensors.shape(f"{first}self_attn.q_norm.weight")[0]
    heads, kv_heads = (
        tensors.shape(f"{first}self_attn.{x}_proj.weight")[0] // each for x in ("q", "k")
    )
    depth, own = (
        tensors.count(rf"{re.escape(part)}model\.layers\.(\d+)\.") for part in (encoder, DECODER)
    )
    shared = bool(backbone.get("tie_encoder_decoder_weights", False))
    asked = backbone.get("num_decoder_layers", -1)
    said = {ours: float(backbone[key]) for key, ours in OTHERWISE.items() if key in backbone}
    return {
        **files.shipped("networks").QWEN3,
        "name": "encoder_decoder",
        "size": size,
        "depth": depth,
        "decoder_depth": (depth if asked == -1 else asked) if shared else own,
        "decoder_reads": "keys_values" if _shares_keys(backbone) else "features",
        "shared_blocks": shared,
        "hidden": tensors.shape(f"{first}mlp.gate_proj.weight")[0],
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": each,
        "tied": _is_tied(backbone, tensors, shared=shared),
        **said,
    }


def _is_tied(backbone: Mapping[str, Any], tensors: Tensors, *, shared: bool) -> bool:
    """Returns whether head and embedding are tied.

    The published code drops the encoder's head if it is not tied and encoder and decoder differ.
    """
    _, own, decoder_s = tables_of(tensors)
    stored = [name for name in (own, decoder_s) if name in tensors]
    if not stored or TIED.search(str(backbone.get("pretrained_model_name_or_path", ""))):
        return True
    return not shared and own in tensors


def _shares_keys(backbone: Mapping[str, Any]) -> bool:
    return str(backbone.get("_target_", "")).endswith(SHARES_KEYS)


def _check(backbone: Mapping[str, Any], tensors: Tensors) -> None:
    """Raises UserError for an unsupported form of the published code."""
    where = f"{tensors.folder}: config.json says backbone_config"
    kind = str(backbone.get("_target_", "")).rpartition(".")[2]
    if kind not in ("LLMasEncoderDecoder", SHARES_KEYS):
        raise UserError(f"{where}._target_={backbone.get('_target_')!r}, which is not supported")
    if backbone.get("use_encoder_causal_mask"):
        raise UserError(
            f"{where}.use_encoder_causal_mask=True: only encoders that attend to whole blocks are "
            "supported"
        )
    shared = backbone.get("tie_encoder_decoder_weights", False)
    cut = shared and backbone.get("keep_top_encoder_layers", False)
    if _shares_keys(backbone) and not shared:
        encoder, decoder = (
            (
                backbone.get(f"num_{part}_layers", -1),
                backbone.get(f"keep_top_{part}_layers", False)
                and not backbone.get(f"reinit_{part}", False),
            )
            for part in ("encoder", "decoder")
        )
        cut = encoder != decoder
    if cut:
        said = ", ".join(f"{key}={backbone.get(key)}" for key in CUTS)
        raise UserError(
            f"{where}.{said}: a decoder is only supported if its layers read the last layers of "
            "the encoder, as with tie_encoder_decoder_weights"
        )
