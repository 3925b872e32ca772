"""Conversion of the parameters of E2D2 to those of `EncoderDecoder`.

As in `published`, functions only rename, transpose and slice arrays.
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

# Prefixes of the names of arrays in encoder and decoder.
ENCODER, DECODER = "backbone.encoder.", "backbone.decoder."
HEAD = "lm_head.weight"


def encoder_of(arrays: Mapping[str, Any]) -> str:
    """Returns the prefix of the names of the encoder's arrays.

    If encoder and decoder are shared, arrays may be stored under the names of one of them only.
    """
    return ENCODER if f"{ENCODER}model.norm.weight" in arrays else DECODER


def tables_of(arrays: Mapping[str, Any]) -> tuple[str, str, str]:
    """Returns the names of the embedding matrix and of the heads of encoder and decoder."""
    return f"{encoder_of(arrays)}model.embed_tokens.weight", ENCODER + HEAD, DECODER + HEAD


def from_e2d2(arrays: Arrays, options: Any, put: Put = in_memory) -> Params:
    """Converts E2D2 (arXiv:2510.22852), with two Qwen3 models; the mask becomes the last row."""
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
