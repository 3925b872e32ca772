"""ModernBERT (arXiv:2412.13663) as a masked diffusion model: dLLM's BERT-Chat, and its base.

dLLM trains it further on conversations with the loss of masked diffusion. Each token is predicted
at its own position.
"""

from collections.abc import Mapping
from typing import Any

from md4_jax.config import files
from md4_jax.model.peer import Peer, agree, check_built, needed, of_masks
from md4_jax.networks.published_modernbert import BIAS, HEAD, TABLE, from_modernbert
from md4_jax.protocols import UserError
from md4_jax.runtime.tensors import Tensors

# Keys of config.json -> their only supported values.
BUILT = {
    "hidden_activation": "gelu", "classifier_activation": "gelu", "tie_word_embeddings": True,
    "decoder_bias": True, "norm_bias": False, "attention_bias": False, "mlp_bias": False,
    "classifier_bias": False, "rope_scaling": None,
}  # fmt: skip
# Default largest length of sequences: that of dLLM's training of BERT-Chat.
LENGTH = 1024


def peer(told: Mapping[str, Any], tensors: Tensors) -> Peer:
    """Reads config.json and the shapes of arrays; UserError for unsupported models."""
    check_built(told, tensors, BUILT)
    for name in (TABLE, BIAS, "head.dense.weight"):
        if name not in tensors:
            raise UserError(
                f"{tensors.folder} has no array {name!r}, which every ModernBertForMaskedLM has: "
                "without this output layer it cannot predict tokens"
            )
    found = of_masks(told, tensors, _network(told, tensors), from_modernbert, (TABLE, HEAD), LENGTH)
    return found._replace(tables=(*found.tables, BIAS))


def _network(told: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Returns the section `network` of the config."""
    size, first = tensors.shape(TABLE)[1], "model.layers.0."
    network = {
        **files.shipped("networks").MODERNBERT,
        "name": "modernbert",
        "size": size,
        "depth": tensors.count(r"model\.layers\.(\d+)\."),
        "hidden": tensors.shape(f"{first}mlp.Wo.weight")[1],
        "heads": needed(told, tensors, "num_attention_heads"),
        "norm_eps": float(told.get("norm_eps", 1e-5)),
        "window": told.get("local_attention", 128),
    }
    network["global_every"] = _global_every(told, tensors, network["depth"])
    every, near = _bases(told, tensors)
    network |= {"rotary_base": every, "local_base": near}
    agree(
        told, tensors, hidden_size=size, num_hidden_layers=network["depth"],
        intermediate_size=network["hidden"],
    )  # fmt: skip
    return network


def _global_every(told: Mapping[str, Any], tensors: Tensors, depth: int) -> int:
    """Returns global_every: one of this number of layers attends to all tokens.

    transformers 5 uses a list of the kinds of all layers.
    """
    kinds = told.get("layer_types")
    if kinds is None:
        return told.get("global_attn_every_n_layers", 3)
    seeing_all = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    every = seeing_all[1] if len(seeing_all) > 1 else depth
    if len(kinds) != depth or seeing_all != list(range(0, depth, every)):
        raise UserError(
            f"{tensors.folder}: config.json says layer_types={kinds}: only {depth} layers of "
            "which the first and then every n-th has full_attention are supported"
        )
    return every


def _bases(told: Mapping[str, Any], tensors: Tensors) -> tuple[float, float]:
    """Returns the bases of rotary positions: of global layers and of local layers.

    transformers 5 stores them by kind of layer, under `rope_parameters`.
    """
    every = told.get("global_rope_theta", 160_000.0)
    near = told.get("local_rope_theta", every if "global_rope_theta" in told else 10_000.0)
    for kind, rope in (told.get("rope_parameters") or {}).items():
        if kind not in ("full_attention", "sliding_attention") or (
            rope.get("rope_type", "default") != "default"
        ):
            raise UserError(
                f"{tensors.folder}: config.json says rope_parameters.{kind}={rope!r}, which is "
                "not supported: only rope_theta of full_attention and sliding_attention is"
            )
        if kind == "full_attention":
            every = rope["rope_theta"]
        else:
            near = rope["rope_theta"]
    return float(every), float(near)
