"""Conversion of the parameters of published image networks to those of `UNet` and `UViT`."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from md4_jax.networks.linear import rounded
from md4_jax.networks.published import Arrays, nested, padded_rows
from md4_jax.protocols import Params

UNET, DIT, BLOCK = "UNet5DWrapper_0/UNet_0", "UNet5DWrapper_0/UNet_0/DiT_0", "ResBlock_{}"
Found = Iterator[tuple[str, np.ndarray]]


def from_md4_unet(arrays: Arrays, options: Any) -> Params:
    """Converts google-deepmind/md4's DiscreteClassifier on images without a transformer."""
    found = dict(_ends(arrays, options))
    first = options.blocks
    middle = {f"middle_{n}": _block(arrays, first + n, options) for n in range(2)}
    found |= _paths(middle)
    found |= _up_and_down(arrays, options, first + 2)
    attention = f"{UNET}/SelfAttention_0"
    for x in ("scale", "bias"):
        found[f"middle_attention/norm/{x}"] = arrays[f"{attention}/GroupNorm_0/{x}"]
    for name in ("query", "key", "value", "out"):
        layer = f"{attention}/MultiHeadDotProductAttention_0/{name}"
        size = arrays[f"{layer}/kernel"].shape[-1]
        found[f"middle_attention/{name}/kernel"] = arrays[f"{layer}/kernel"].reshape(-1, size)
        found[f"middle_attention/{name}/bias"] = arrays[f"{layer}/bias"].reshape(size)
    return _params(found)


def from_md4_uvit(arrays: Arrays, options: Any) -> Params:
    """Converts google-deepmind/md4's DiscreteClassifier on images with a transformer inside."""
    found = dict(_ends(arrays, options)) | _up_and_down(arrays, options, options.blocks)
    layers = [dict(_layer(arrays, n)) for n in range(options.depth)]
    found |= _stacked("middle/blocks/layers", layers, options.scan_blocks)
    found["middle/positions"] = arrays[f"{DIT}/pos_embed"]
    names = {
        "patch_in": "x_embedder/proj", "patch_out": "final_layer/linear",
        "final_modulation/modulation": "final_layer/Dense_0",
    }  # fmt: skip
    for ours, theirs in names.items():
        kernel = arrays[f"{DIT}/{theirs}/kernel"]
        found[f"middle/{ours}/kernel"] = kernel.reshape(-1, kernel.shape[-1])
        found[f"middle/{ours}/bias"] = arrays[f"{DIT}/{theirs}/bias"]
    return _params(found)


def _params(found: Mapping[str, np.ndarray]) -> Params:
    return nested({path: lambda array=array: array for path, array in found.items()})


def _ends(arrays: Arrays, options: Any) -> Found:
    """Converts the layers before the first block, those after the last one, and the condition."""
    yield "embedding", padded_rows(arrays["Embed_0/embedding"], rounded(options.vocab_size + 1))
    for x in ("kernel", "bias"):
        yield f"time/time_in/{x}", arrays[f"CondEmbedding_0/dense0/{x}"]
        yield f"time/time_out/{x}", arrays[f"CondEmbedding_0/Dense_0/{x}"]
        yield f"conv_in/{x}", arrays[f"{UNET}/Conv_0/{x}"]
        yield f"conv_out/{x}", arrays[f"{UNET}/Conv_1/{x}"]
    for ours, array in _norm(arrays, UNET, 0, options):
        yield f"norm_out/{ours}", array


def _up_and_down(arrays: Arrays, options: Any, up: int) -> dict[str, np.ndarray]:
    """Converts the down and up blocks; `up` is the index of the first up block."""
    down = [_block(arrays, n, options) for n in range(options.blocks)]
    upwards = [_block(arrays, up + n, options) for n in range(options.blocks + 1)]
    if options.scans:
        return _stacked("down", down, True) | _stacked("up", upwards, True)
    return _stacked("down_0", down, False) | _stacked("up_0", upwards, False)


def _block(arrays: Arrays, number: int, options: Any) -> dict[str, np.ndarray]:
    """Converts a residual block."""
    path, found, dense = f"{UNET}/{BLOCK.format(number)}", {}, 0
    for n in range(2):
        for ours, array in _norm(arrays, path, n, options):
            found[f"norm_{n + 1}/{ours}"] = array
        for x in ("kernel", "bias"):
            found[f"conv_{n + 1}/{x}"] = arrays[f"{path}/Conv_{n}/{x}"]
    if not options.adaptive:
        found["modulation/kernel"] = arrays[f"{path}/Dense_0/kernel"]
        dense = 1
    for x in ("kernel", "bias"):
        if f"{path}/Dense_{dense}/{x}" in arrays:
            found[f"shortcut/{x}"] = arrays[f"{path}/Dense_{dense}/{x}"]
    return found


def _norm(arrays: Arrays, path: str, number: int, options: Any) -> Found:
    """Converts a normalisation, with its own parameters or parameters from the condition."""
    if options.adaptive:
        for x in ("kernel", "bias"):
            yield f"modulation/{x}", arrays[f"{path}/CondGroupNorm_{number}/Dense_0/{x}"]
        return
    for x in ("scale", "bias"):
        yield x, arrays[f"{path}/GroupNorm_{number}/{x}"]


def _layer(arrays: Arrays, number: int) -> Found:
    """Converts a block of the transformer."""
    names = {
        "attention/query": "attn/wq", "attention/key": "attn/wk", "attention/value": "attn/wv",
        "attention/out": "attn/wo", "feed_forward/up": "mlp/fc1", "feed_forward/down": "mlp/fc2",
        "modulation": "Dense_0",
    }  # fmt: skip
    for ours, theirs in names.items():
        for x in ("kernel", "bias"):
            if (name := f"{DIT}/blocks_{number}/{theirs}/{x}") in arrays:
                yield f"{ours}/{x}", arrays[name]


def _stacked(name: str, layers: list[dict], scanned: bool) -> dict[str, np.ndarray]:
    """Returns the arrays of equal layers by path, with a leading layer axis if scanned."""
    if scanned:
        return {f"{name}/{x}": np.stack([layer[x] for layer in layers]) for x in layers[0]}
    return _paths({f"{name}_{n}": layer for n, layer in enumerate(layers)})


def _paths(modules: dict[str, dict]) -> dict[str, np.ndarray]:
    return {f"{name}/{x}": array for name, own in modules.items() for x, array in own.items()}
