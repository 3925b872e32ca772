"""SMDM (arXiv:2410.18514): bidirectional and causal Llamas in lit-gpt's layout.

Their files have no config.json. The shapes determine everything except the number of heads. For the
published sizes, which `lit_gpt/config.py` of ML-GSAI/SMDM lists, the number of heads is known too.
"""

from collections.abc import Mapping
from typing import Any

from md4_jax.config import files
from md4_jax.model.peer import Peer, agree, check_built, from_the_left
from md4_jax.networks.published_smdm import FUSED, HEAD, TABLE, TRUNK, from_smdm
from md4_jax.protocols import UserError
from md4_jax.runtime.tensors import Tensors

FIRST = f"{TRUNK}h.0.{FUSED}"
TOKENIZER = "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T"
BEGINS, END = 1, "</s>"  # row that begins a text, entry that ends it
LENGTH = 2048
# (features, width of the feed-forward layer) of the published sizes -> heads.
HEADS = {
    (256, 1024): 4, (384, 1536): 6, (512, 2048): 8, (576, 2304): 9, (640, 1600): 8,
    (640, 2560): 10, (768, 3072): 12, (896, 3584): 14, (1024, 4096): 16, (1280, 5120): 10,
    (1408, 5632): 11, (1536, 6144): 12, (1792, 7168): 14, (2048, 8192): 16, (2176, 8704): 17,
}  # fmt: skip
# Keys of a config.json, under lit-gpt's names -> their only supported values.
BUILT = {
    "rotary_percentage": 1.0, "parallel_residual": False, "shared_attention_norm": False,
    "bias": False, "condense_ratio": 1,
}  # fmt: skip


def peer(told: Mapping[str, Any], tensors: Tensors) -> Peer:
    """Reads the shapes of the arrays; told: a config.json under lit-gpt's names, or {}.

    A model with one more embedding vector than outputs is a masked model: the last is the mask's.
    """
    check_built(told, tensors, BUILT)
    network, (symbols, _) = _network(told, tensors), tensors.shape(HEAD)
    sections = {
        "network": network,
        "process": {"name": "masking", "schedule": {"name": "linear"}},
        "objective": {"name": "md4"},
    }
    found = Peer(
        "smdm", told.get("block_size", LENGTH), symbols, sections, from_smdm, TOKENIZER, eot=END
    )
    if tensors.shape(TABLE)[0] > symbols:
        return found
    found = found._replace(
        symbols=symbols - 1, tables=(TABLE, HEAD), grows=(TABLE,), told_of=told_of
    )
    return from_the_left(found, {"bos_token_id": BEGINS}, tensors)


def told_of(
    told: Mapping[str, Any], kind: str, *, shifted: bool, block: int, context: bool
) -> dict[str, Any]:
    """Returns the config.json of a masked model adapted from a causal one: it is unchanged."""
    del kind, shifted, block, context  # none of which a config.json can say here
    return dict(told)


def _network(told: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Returns the section `network` of the config."""
    size, hidden = tensors.shape(TABLE)[1], tensors.shape(f"{TRUNK}h.0.mlp.swiglu.w1.weight")[0]
    heads = told.get("n_head") or HEADS.get((size, hidden))
    if not heads:
        raise UserError(
            f"{tensors.folder}: the number of heads is only known for the published sizes, and "
            f"{size} features with a feed-forward layer of {hidden} are not one of them: add a "
            "config.json with n_head"
        )
    depth = tensors.count(rf"{TRUNK}h\.(\d+)\.")
    agree(told, tensors, n_embd=size, n_layer=depth, intermediate_size=hidden)
    return {
        **files.shipped("networks").LLADA,
        "size": size,
        "depth": depth,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": (tensors.shape(FIRST)[0] * heads // size - heads) // 2,
        "rotary_base": 10_000.0,
        "rotary_type": "bfloat16",
        "norm_eps": float(told.get("norm_eps", 1e-5)),
    }
