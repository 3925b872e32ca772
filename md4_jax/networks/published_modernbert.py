"""Conversion of the parameters of ModernBERT to those of `ModernBert`.

As in `published`, functions only rename, transpose and slice arrays.
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

TABLE, HEAD = "model.embeddings.tok_embeddings.weight", "decoder.weight"
BIAS = "decoder.bias"


def from_modernbert(arrays: Arrays, options: Any, put: Put = in_memory) -> Params:
    """Converts transformers' ModernBertForMaskedLM (arXiv:2412.13663), with the mask last.

    Query, key and value are stacked in `Wqkv`. In `Wi` the matrix before GELU comes first, then the
    matrix of the other factor. The bias of the mask is dropped: no loss and no sampler uses it.
    """
    size, symbols, hidden = options.size, options.vocab_size, options.hidden
    gives = {
        f"attention/{name}/kernel": lambda a, n=n: a("attn.Wqkv.weight")[n * size :][:size].T
        for n, name in enumerate(("query", "key", "value"))
    }
    for n, name in enumerate(("gate", "up")):
        gives[f"feed_forward/{name}/kernel"] = lambda a, n=n: (
            a("mlp.Wi.weight")[n * hidden :][:hidden].T
        )
    gives["attention/out/kernel"] = lambda a: a("attn.Wo.weight").T
    gives["feed_forward/down/kernel"] = lambda a: a("mlp.Wo.weight").T
    gives["attention_norm/scale"] = lambda a: a("attn_norm.weight")
    gives["feed_forward_norm/scale"] = lambda a: a("mlp_norm.weight")
    found = blocks(arrays, "model.layers.{}.{}", gives, options)
    del found["blocks_0/attention_norm/scale"]
    rows = rounded(symbols + 1)
    found["embedding"] = lambda: padded_rows(arrays[TABLE][: symbols + 1], rows)
    found["head_bias"] = lambda: of_symbols(arrays[BIAS][None], symbols, rows)[0]
    found["embedding_norm/scale"] = lambda: arrays["model.embeddings.norm.weight"]
    found["final_norm/scale"] = lambda: arrays["model.final_norm.weight"]
    found["head_in/kernel"] = lambda: arrays["head.dense.weight"].T
    found["head_norm/scale"] = lambda: arrays["head.norm.weight"]
    return nested(found, put)
