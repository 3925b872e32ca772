"""GPT-2, and diffusion models adapted from it: DiffuGPT (arXiv:2410.17891).

A DiffuGPT is bidirectional and computes the logits of a token at the previous position. Its
config.json is that of a GPT-2, and its arrays have other names.
"""

import re
from collections.abc import Mapping
from typing import Any

from md4_jax.config import files
from md4_jax.model.peer import Peer, agree, check_built, from_the_left, in_blocks, needed, of_masks
from md4_jax.model.told import Told
from md4_jax.networks.published_gpt2 import DIFFUSION, HEAD, from_gpt2, prefix_of, tables_of
from md4_jax.protocols import UserError
from md4_jax.runtime.tensors import Tensors

# Names of the tanh approximation of GELU (arXiv:1606.08415).
GELU = ("gelu_new", "gelu_pytorch_tanh")
# Keys of config.json -> their only supported values.
BUILT = {
    "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False, "add_cross_attention": False,
}  # fmt: skip
# The causal mask, which older versions of transformers stored with the parameters.
BUFFERS = r"(transformer\.|denoise_model\.)?h\.\d+\.attn\.(bias|masked_bias)"


def peer(told: Told, tensors: Tensors) -> Peer:
    """Reads config.json and the shapes of arrays; UserError for unsupported models."""
    prefix = prefix_of(tensors)
    if prefix is None:
        raise UserError(
            f"{tensors.folder} has no array 'h.0.attn.c_attn.weight', which every GPT-2 has"
        )
    _check(told, tensors)
    network, tables = _network(told, tensors, prefix), tables_of(tensors)
    places = network["positions"]
    told |= {"max_position_embeddings": places}
    if prefix == DIFFUSION:  # the code of DiffuGPT takes the number of rows from its tokenizer
        told = told.without("vocab_size")
    found = of_masks(told, tensors, network, from_gpt2, tables, places)
    found = found._replace(told_of=told_of, renamed=renamed, buffers=BUFFERS, transposed=True)
    found = found._replace(head=HEAD if tables[1] == HEAD else "")
    if prefix != DIFFUSION:
        return from_the_left(found, told, tensors)
    network["shifted"] = bool(told.get("right_shift_logits", True))
    block = told.get("block_size")
    network["causal_context"] = block is not None and bool(told.get("causal_context"))
    return found if block is None else in_blocks(found, block)


def told_of(
    told: Mapping[str, Any], kind: str, *, shifted: bool, block: int, context: bool
) -> dict[str, Any]:
    """Returns the config.json of a diffusion model that was adapted from a GPT-2.

    Options that DiffuGPT's own code does not have (no shift, blocks) are written under keys of
    other models.
    """
    del kind
    left = ("right_shift_logits", "block_size", "causal_context")
    found = {key: value for key, value in told.items() if key not in left}
    found["architectures"] = ["DiscreteDiffusionModel"]
    if not shifted:
        found["right_shift_logits"] = False
    if context:
        found["causal_context"] = True
    return found | ({"block_size": block} if block else {})


def renamed(name: str) -> str:
    """Returns the name that an array of a GPT-2 has in a DiffuGPT."""
    name = name.removeprefix("transformer.")
    if name == HEAD:
        return name
    return "embed_tokens.weight" if name == "wte.weight" else DIFFUSION + name


def _network(told: Mapping[str, Any], tensors: Tensors, prefix: str) -> dict[str, Any]:
    """Returns the section `network` of the config."""
    embedding, head = tables_of(tensors)
    size = tensors.shape(embedding)[1]
    network = {
        **files.shipped("networks").GPT2,
        "size": size,
        "depth": tensors.count(rf"{re.escape(prefix)}h\.(\d+)\."),
        "heads": needed(told, tensors, "n_head"),
        "hidden": tensors.shape(f"{prefix}h.0.mlp.c_fc.weight")[1],
        "positions": tensors.shape(f"{prefix}wpe.weight")[0],
        "tied": bool(told.get("tie_word_embeddings", True)) or head not in tensors,
        "norm_eps": float(told.get("layer_norm_epsilon", 1e-5)),
    }
    agree(
        told, tensors, n_embd=size, n_layer=network["depth"], n_inner=network["hidden"],
        n_positions=network["positions"],
    )  # fmt: skip
    return network


def _check(told: Mapping[str, Any], tensors: Tensors) -> None:
    """Raises UserError for unsupported options of the architecture."""
    check_built(told, tensors, BUILT)
    activation = told.get("activation_function", GELU[0])
    if activation not in GELU:
        raise UserError(
            f"{tensors.folder}: config.json says activation_function={activation!r}; only "
            f"{' and '.join(map(repr, GELU))} are supported"
        )
