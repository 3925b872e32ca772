"""Conversion of the parameters of ESM-2 and DPLM to those of `Esm`.

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

TABLE, HEAD, BIAS = (
    "esm.embeddings.word_embeddings.weight",
    "lm_head.decoder.weight",
    "lm_head.bias",
)
LAYER = "esm.encoder.layer.{}."
# Our layers -> theirs.
LINEAR = {
    **{f"attention/{name}": f"attention.self.{name}" for name in ("query", "key", "value")},
    "attention/out": "attention.output.dense", "feed_forward/up": "intermediate.dense",
    "feed_forward/down": "output.dense",
}  # fmt: skip
NORMS = {"attention_norm": "attention.LayerNorm", "feed_forward_norm": "LayerNorm"}
FINAL = {"final_norm": "esm.encoder.emb_layer_norm_after", "head_norm": "lm_head.layer_norm"}


def from_esm(arrays: Arrays, options: Any, put: Put = in_memory) -> Params:
    """Converts transformers' EsmForMaskedLM, where the mask is the last entry.

    The bias of the mask is dropped: no loss and no sampler uses it.
    """
    symbols, gives = options.vocab_size, {}
    for ours, theirs in LINEAR.items():
        gives[f"{ours}/kernel"] = lambda a, x=theirs: a(f"{x}.weight").T
        gives[f"{ours}/bias"] = lambda a, x=theirs: a(f"{x}.bias")
    for ours, theirs in NORMS.items():
        gives[f"{ours}/scale"] = lambda a, x=theirs: a(f"{x}.weight")
        gives[f"{ours}/bias"] = lambda a, x=theirs: a(f"{x}.bias")
    found, rows = blocks(arrays, LAYER + "{}", gives, options), rounded(symbols + 1)
    found["embedding"] = lambda: padded_rows(arrays[TABLE][: symbols + 1], rows)
    found["head_bias"] = lambda: of_symbols(arrays[BIAS][None], symbols, rows)[0]
    for ours, theirs in FINAL.items():
        found[f"{ours}/scale"] = lambda x=theirs: arrays[f"{x}.weight"]
        found[f"{ours}/bias"] = lambda x=theirs: arrays[f"{x}.bias"]
    found["head_in/kernel"] = lambda: arrays["lm_head.dense.weight"].T
    found["head_in/bias"] = lambda: arrays["lm_head.dense.bias"]
    return nested(found, put)
