"""Parameters of E2D2 as those of `EncoderDecoder`.

See `published`: each function only moves, turns and cuts arrays.
"""

from collections.abc import Mapping
from typing import Any

from md4_jax.networks.linear import rounded
from md4_jax.networks.published import (
    Arrays,
    Put,
    blocks,
    in_memory,
    llama_layers,
    nested,
    of_symbols,
    padded_rows,
)
from md4_jax.protocols import Params

# What the names of the arrays of its two parts begin with.
ENCODER, DECODER = "backbone.encoder.", "backbone.decoder."
HEAD = "lm_head.weight"


def encoder_of(arrays: Mapping[str, Any]) -> str:
    """Returns what the names of the encoder's arrays begin with.

    Parts that are one may be stored under the name of the other alone.
    """
    return ENCODER if f"{ENCODER}model.norm.weight" in arrays else DECODER


def tables_of(arrays: Mapping[str, Any]) -> tuple[str, str, str]:
    """Returns the names of the embedding's matrix and of the heads' of encoder and decoder."""
    return f"{encoder_of(arrays)}model.embed_tokens.weight", ENCODER + HEAD, DECODER + HEAD


def from_e2d2(arrays: Arrays, options: Any, put: Put = in_memory) -> Params:
    """Converts E2D2 (arXiv:2510.22852), whose two parts are Qwen3s, with the mask last."""
    symbols, encoder, gives = options.vocab_size, encoder_of(arrays), llama_layers(options)
    found = blocks(arrays, f"{encoder}model.layers.{{}}.{{}}", gives, options)
    last = encoder if options.shared_blocks else DECODER
    if not options.shared_blocks:
        own = blocks(arrays, f"{DECODER}model.layers.{{}}.{{}}", gives, options.of_decoder)
        found |= {f"decoder_{path}": layers for path, layers in own.items()}
        if options.reads_features:
            found["encoder_norm/scale"] = lambda: arrays[f"{encoder}model.norm.weight"]
    found["final_norm/scale"] = lambda: arrays[f"{last}model.norm.weight"]
    table, *heads = tables_of(arrays)
    found["embedding"] = lambda: padded_rows(arrays[table][: symbols + 1], rounded(symbols + 1))
    if not options.tied:
        head = next(name for name in reversed(heads) if name in arrays)
        found["head/kernel"] = lambda: of_symbols(arrays[head].T, symbols)
    return nested(found, put)
