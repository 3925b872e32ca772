"""Conversion of the parameters of GPT-2 and DiffuGPT to those of `Transformer`.

As in `published`, functions only rename, transpose and slice arrays.
"""

from collections.abc import Mapping
from typing import Any

from md4_jax.networks.linear import rounded
from md4_jax.networks.published import (
    DIFFUSION,
    Arrays,
    Put,
    blocks,
    in_memory,
    nested,
    of_symbols,
    padded_rows,
)
from md4_jax.protocols import Params

HEAD = "lm_head.weight"
# Prefixes of the names of the blocks: GPT-2 with and without its head, DiffuGPT.
PREFIXES = ("transformer.", "", DIFFUSION)
# Their names -> ours. Query, key and value are concatenated in `c_attn`.
LAYERS = {"attention/out": "attn.c_proj", "feed_forward/up": "mlp.c_fc"}
LAYERS |= {"feed_forward/down": "mlp.c_proj"}
NORMS = {"attention_norm": "ln_1", "feed_forward_norm": "ln_2"}


def prefix_of(arrays: Mapping[str, Any]) -> str | None:
    """Returns the prefix of the names of the blocks; None if there are no blocks."""
    found = (prefix for prefix in PREFIXES if f"{prefix}h.0.attn.c_attn.weight" in arrays)
    return next(found, None)


def tables_of(arrays: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the names of the embedding matrix and of the head, which may be the same.

    A DiffuGPT with tied matrices stores them under one of two names.
    """
    prefix = prefix_of(arrays)
    own = "embed_tokens.weight" if prefix == DIFFUSION else f"{prefix}wte.weight"
    return (own, HEAD) if own in arrays else (HEAD, own)


def from_gpt2(arrays: Arrays, options: Any, put: Put = in_memory) -> Params:
    """Converts GPT-2 and DiffuGPT (arXiv:2410.17891), with the mask last.

    Their linear layers are stored as [in, out], like ours.
    """
    size, symbols, prefix = options.size, options.vocab_size, prefix_of(arrays)
    gives = {}
    for number, name in enumerate(("query", "key", "value")):
        part = slice(number * size, (number + 1) * size)
        for ours, theirs in (("kernel", "weight"), ("bias", "bias")):
            gives[f"attention/{name}/{ours}"] = lambda a, x=theirs, p=part: a(f"attn.c_attn.{x}")[
                ..., p
            ]
    for ours, theirs in LAYERS.items():
        gives[f"{ours}/kernel"] = lambda a, x=theirs: a(f"{x}.weight")
        gives[f"{ours}/bias"] = lambda a, x=theirs: a(f"{x}.bias")
    for ours, theirs in NORMS.items():
        gives[f"{ours}/scale"] = lambda a, x=theirs: a(f"{x}.weight")
        gives[f"{ours}/bias"] = lambda a, x=theirs: a(f"{x}.bias")
    found = blocks(arrays, prefix + "h.{}.{}", gives, options)
    table, head = tables_of(arrays)
    found["embedding"] = lambda: padded_rows(arrays[table][: symbols + 1], rounded(symbols + 1))
    found["positions"] = lambda: arrays[f"{prefix}wpe.weight"]
    found["final_norm/scale"] = lambda: arrays[f"{prefix}ln_f.weight"]
    found["final_norm/bias"] = lambda: arrays[f"{prefix}ln_f.bias"]
    if not options.tied:
        found["head/kernel"] = lambda: of_symbols(arrays[head].T, symbols)
    return nested(found, put)
