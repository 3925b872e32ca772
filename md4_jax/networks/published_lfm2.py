"""Conversion of the parameters of LFM2 models to those of `Lfm2`.

As in `published`, functions only rename, transpose and slice arrays.
"""

from collections.abc import Mapping
from typing import Any

from md4_jax.networks.linear import rounded
from md4_jax.networks.published import Arrays, Put, in_memory, nested, padded_rows
from md4_jax.protocols import Params

# Prefixes of the names: of the encoders, and of the left-to-right models.
ENCODER, CAUSAL = "lfm2.", "model."
TABLE, HEAD = "embed_tokens.weight", "lm_head.weight"
LAYERS = "layers.{}.{}"
# Linear layers: path of the parameter -> name of the array.
OF_ATTENTION = {
    "attention/query": "self_attn.q_proj", "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj", "attention/out": "self_attn.out_proj",
}  # fmt: skip
OF_ALL = {
    "feed_forward/gate": "feed_forward.w1", "feed_forward/up": "feed_forward.w3",
    "feed_forward/down": "feed_forward.w2",
}  # fmt: skip
# Matrices stacked in `conv.in_proj`, in this order.
STACKED = ("input_gate", "output_gate", "value")


def trunk_of(arrays: Mapping[str, Any]) -> str | None:
    """Returns the prefix of the names; None if there is no table under either."""
    return next((prefix for prefix in (ENCODER, CAUSAL) if prefix + TABLE in arrays), None)


def from_lfm2(arrays: Arrays, options: Any, put: Put = in_memory) -> Params:
    """Converts Lfm2BidirectionalForMaskedLM of LFM2.5-Encoder, and Lfm2ForCausalLM; mask last."""
    found, trunk = {}, trunk_of(arrays)
    for number in range(options.depth):
        here = number in options.attention_layers
        gives = _attention() if here else _convolution(options.size)
        gives |= {f"{x}/kernel": lambda a, y=y: a(f"{y}.weight").T for x, y in OF_ALL.items()}
        norm = "attention_norm" if here else "convolution_norm"
        gives[f"{norm}/scale"] = lambda a: a("operator_norm.weight")
        gives["feed_forward_norm/scale"] = lambda a: a("ffn_norm.weight")
        found |= {
            f"blocks_{number}/{ours}": lambda make=make, n=number: make(
                lambda name: arrays[trunk + LAYERS.format(n, name)]
            )
            for ours, make in gives.items()
        }
    rows = rounded(options.vocab_size + 1)
    found["embedding"] = lambda: padded_rows(arrays[trunk + TABLE][: options.vocab_size + 1], rows)
    found["final_norm/scale"] = lambda: arrays[f"{trunk}embedding_norm.weight"]
    return nested(found, put)


def _attention() -> dict[str, Any]:
    """Returns {path in a block: function of the arrays of a layer with attention}."""
    gives = {f"{x}/kernel": lambda a, y=y: a(f"{y}.weight").T for x, y in OF_ATTENTION.items()}
    for name in ("query", "key"):
        array = f"self_attn.{name[0]}_layernorm.weight"
        gives[f"attention/{name}_norm/scale"] = lambda a, x=array: a(x)
    return gives


def _convolution(size: int) -> dict[str, Any]:
    """Returns {path in a block: function of the arrays of a layer with a convolution}."""
    gives = {
        f"convolution/{name}/kernel": lambda a, n=n: a("conv.in_proj.weight")[n * size :][:size].T
        for n, name in enumerate(STACKED)
    }
    gives["convolution/out/kernel"] = lambda a: a("conv.out_proj.weight").T
    gives["convolution/taps"] = lambda a: a("conv.conv.weight")[:, 0].T
    return gives
