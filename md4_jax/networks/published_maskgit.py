"""Conversion of the parameters of Halton-MaskGIT to those of `MaskGit`.

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
    padded_rows,
)
from md4_jax.protocols import Params

TABLE, HEAD, BIAS = "tok_emb.weight", "head.weight", "head.bias"
LABELS, POSITIONS, REGISTERS = "cls_emb.weight", "pos_emb.weight", "reg_tokens.weight"
LAYER = "transformer.layers.{}.{}"
# Our layers -> theirs.
LINEAR = {
    "attention/query": "attn.wq", "attention/key": "attn.wk", "attention/value": "attn.wv",
    "attention/out": "attn.wo", "feed_forward/gate": "ff.w1", "feed_forward/up": "ff.w3",
    "feed_forward/down": "ff.w2", "modulation": "mlp.1",
}  # fmt: skip
NORMS = {"attention_norm": "ln1", "feed_forward_norm": "ln2"}
LAST = "last_norm."


def from_maskgit(arrays: Arrays, options: Any, put: Put = in_memory) -> Params:
    """Converts valeoai's `Transformer` of a class to an image, where the mask is the last code.

    The bias of the mask is kept behind those of the symbols, for export; no loss and no sampler
    here uses it.
    """
    gives = {f"{ours}/kernel": lambda a, x=x: a(f"{x}.weight").T for ours, x in LINEAR.items()}
    gives |= {f"{ours}/scale": lambda a, x=x: a(f"{x}.weight") for ours, x in NORMS.items()}
    gives["modulation/bias"] = lambda a: a("mlp.1.bias")
    found, symbols = blocks(arrays, LAYER, gives, options), options.vocab_size
    rows = rounded(symbols + 1)
    found["embedding"] = lambda: padded_rows(arrays[TABLE], rows)
    found["head_bias"] = lambda: padded_rows(arrays[BIAS][:, None], rows)[:, 0]
    plain = {
        "label_table": LABELS, "positions": POSITIONS, "registers": REGISTERS,
        "final_norm/scale": f"{LAST}norm_final.weight", "final_bias": f"{LAST}norm_final.bias",
        "final_modulation/modulation/bias": f"{LAST}mlp.1.bias",
    }  # fmt: skip
    if not options.registers:
        del plain["registers"]
    found |= {ours: lambda x=theirs: arrays[x] for ours, theirs in plain.items()}
    kernel = f"{LAST}mlp.1.weight"
    found["final_modulation/modulation/kernel"] = lambda: arrays[kernel].T
    return nested(found, put)
