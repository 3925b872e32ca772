"""Conversion of the parameters of SMDM (arXiv:2410.18514) to those of `Transformer`.

As in `published`, functions only rename, transpose and slice arrays. The names are those of lit-gpt
as used by TinyLlama.
"""

from typing import Any

from md4_jax.networks.linear import rounded
from md4_jax.networks.published import (
    Arrays,
    Put,
    blocks,
    in_memory,
    nested,
    of_symbols,
    padded_rows,
)
from md4_jax.protocols import Params

TRUNK, HEAD = "transformer.", "lm_head.weight"
TABLE = f"{TRUNK}wte.weight"
# Name of the matrix of concatenated queries, keys and values.
FUSED = "attn.attn.weight"
LAYERS = {
    "attention/out": "attn.proj", "feed_forward/gate": "mlp.swiglu.w1",
    "feed_forward/up": "mlp.swiglu.w2", "feed_forward/down": "mlp.swiglu.w3",
}  # fmt: skip
NORMS = {"attention_norm": "norm_1", "feed_forward_norm": "norm_2"}


def from_smdm(arrays: Arrays, options: Any, put: Put = in_memory) -> Params:
    """Converts SMDM's diffusion and causal models, with the mask last.

    The rows of `FUSED` are ordered by group: query heads, key and value of the first group, then
    those of the next.
    """
    groups, each = options.kv_heads or options.heads, options.attention_size
    symbols = options.vocab_size
    shared = options.heads // groups
    parts = {"query": (0, shared), "key": (shared, 1), "value": (shared + 1, 1)}

    def of_groups(first: int, count: int):
        def read(a):
            rows = a(FUSED).reshape(groups, shared + 2, each, -1)[:, first : first + count]
            return rows.reshape(groups * count * each, -1).T

        return read

    gives = {f"attention/{name}/kernel": of_groups(*part) for name, part in parts.items()}
    gives |= {f"{ours}/kernel": lambda a, x=x: a(f"{x}.weight").T for ours, x in LAYERS.items()}
    gives |= {f"{ours}/scale": lambda a, x=x: a(f"{x}.weight") for ours, x in NORMS.items()}
    found = blocks(arrays, TRUNK + "h.{}.{}", gives, options)
    found["embedding"] = lambda: padded_rows(arrays[TABLE][: symbols + 1], rounded(symbols + 1))
    found["final_norm/scale"] = lambda: arrays[f"{TRUNK}ln_f.weight"]
    found["head/kernel"] = lambda: of_symbols(arrays[HEAD].T, symbols)
    return nested(found, put)
