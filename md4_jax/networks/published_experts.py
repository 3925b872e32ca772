"""Conversion of the parameters of published mixture-of-experts networks: LLaDA-MoE, LLaDA2.

As in `published`, functions only rename, transpose and slice arrays.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

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

LAYERS = "model.layers.{}.{}"
GATED = ("gate", "up", "down")
NORMS = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}


def from_lladamoe(arrays: Arrays, options: Any, put: Put = in_memory) -> Params:
    """Converts LLaDA-MoE (arXiv:2509.24389), with the mask last."""
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
    gives = {f"attention/{x}/kernel": _matrix(f"self_attn.{y}.weight") for x, y in names.items()}
    if options.qk_norm:
        gives["attention/query_norm/scale"] = lambda a: a("self_attn.q_norm.weight")
        gives["attention/key_norm/scale"] = lambda a: a("self_attn.k_norm.weight")
    return _converted(arrays, options, put, gives, "model.embed_tokens.weight", "shared_expert")


def from_llada2(arrays: Arrays, options: Any, put: Put = in_memory) -> Params:
    """Converts LLaDA2 (arXiv:2512.15745), with the mask last."""
    each, heads = options.attention_size, options.heads
    ends = np.cumsum([0, heads * each] + 2 * [(options.kv_heads or heads) * each])
    gives: dict[str, Callable] = {"attention/out/kernel": _matrix("attention.dense.weight")}
    for name, begin, end in zip(("query", "key", "value"), ends, ends[1:], strict=False):
        part = slice(begin, end)
        gives[f"attention/{name}/kernel"] = lambda a, p=part: (
            a("attention.query_key_value.weight")[p].T
        )
        if options.qkv_bias:
            gives[f"attention/{name}/bias"] = lambda a, p=part: a("attention.query_key_value.bias")[
                p
            ]
    if options.qk_norm:
        gives["attention/query_norm/scale"] = lambda a: a("attention.query_layernorm.weight")
        gives["attention/key_norm/scale"] = lambda a: a("attention.key_layernorm.weight")
    table = "model.word_embeddings.weight"
    return _converted(arrays, options, put, gives, table, "mlp.shared_experts")


def _converted(
    arrays: Arrays,
    options: Any,
    put: Put,
    attention: Mapping[str, Callable],
    table: str,
    shared: str,
) -> Params:
    """Converts the parameters that both networks have.

    attention: functions that read the parameters of attention. shared: name of the shared expert.
    """
    vectors = {f"{ours}/scale": f"{theirs}.weight" for ours, theirs in NORMS.items()}
    gives = dict(attention) | {x: lambda a, y=y: a(y) for x, y in vectors.items()}
    plain = gives | {f"feed_forward/{x}/kernel": _matrix(f"mlp.{x}_proj.weight") for x in GATED}
    gives["feed_forward/router/kernel"] = _matrix("mlp.gate.weight")
    if options.router_bias:
        gives["feed_forward/router/bias"] = lambda a: a("mlp.gate.expert_bias")
    for name in GATED:
        gives[f"feed_forward/experts_{name}/kernel"] = lambda a, x=name: np.stack(
            [a(f"mlp.experts.{e}.{x}_proj.weight").T for e in range(options.experts)]
        )
        if options.shared_hidden:
            matrix = _matrix(f"{shared}.{name}_proj.weight")
            gives[f"feed_forward/shared/{name}/kernel"] = matrix
    found = blocks(arrays, LAYERS, gives, options, options.dense_layers)
    for number in range(options.dense_layers):
        for ours, read in plain.items():
            found[f"first_blocks_{number}/{ours}"] = lambda read=read, n=number: read(
                lambda name: arrays[LAYERS.format(n, name)]
            )
    symbols = options.vocab_size
    found["embedding"] = lambda: padded_rows(arrays[table][: symbols + 1], rounded(symbols + 1))
    found["final_norm/scale"] = lambda: arrays["model.norm.weight"]
    if not options.tied:
        found["head/kernel"] = lambda: of_symbols(arrays["lm_head.weight"].T, symbols)
    return nested(found, put)


def _matrix(name: str) -> Callable:
    """Returns a function that reads a linear layer's matrix."""
    return lambda a: a(name).T
