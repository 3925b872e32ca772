"""Parameters of published networks as those of `Transformer`.

Each function takes the arrays of a checkpoint by the names that its project gives them and
returns the parameters of a transformer with these options, which configs/networks.py has. Names,
orders and shapes differ; the function that is computed is the same.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from md4_jax.networks.trunk import rounded
from md4_jax.protocols import Params

Arrays = Mapping[str, np.ndarray]


def from_md4(arrays: Arrays, options: Any) -> Params:
    """Converts google-deepmind/md4's DiscreteClassifier on text.

    It turns neighbouring pairs of a head's features where `Transformer` turns halves, which the
    order of the columns of query and key makes up for.
    """
    each = options.size // options.heads
    pairs = np.arange(options.size).reshape(options.heads, each // 2, 2)
    halves = np.moveaxis(pairs, 2, 1).ravel()
    gives = {
        "attention/query/kernel": lambda a: a("attention/wq/kernel")[:, halves],
        "attention/key/kernel": lambda a: a("attention/wk/kernel")[:, halves],
        "attention/value/kernel": lambda a: a("attention/wv/kernel"),
        "attention/out/kernel": lambda a: a("attention/wo/kernel"),
        "feed_forward/gate/kernel": lambda a: a("feed_forward/w1/kernel"),
        "feed_forward/up/kernel": lambda a: a("feed_forward/w3/kernel"),
        "feed_forward/down/kernel": lambda a: a("feed_forward/w2/kernel"),
    }
    if options.time_conditioning:
        gives |= {f"modulation/{x}": lambda a, x=x: a(f"Dense_0/{x}") for x in ("kernel", "bias")}
    else:
        gives |= {
            f"{name}_norm/scale": lambda a, n=n: a(f"RMSNorm_{n}/scale")
            for n, name in enumerate(("attention", "feed_forward"))
        }
    found = _blocks(arrays, "Transformer_0/TransformerBlock_{}/{}", gives, options)
    trunk, dense = "Transformer_0/", 0
    table = "Embed_0/embedding" if options.embedding else trunk + "Embed_0/embedding"
    found["embedding"] = padded_rows(arrays[table], rounded(options.vocab_size + 1))
    if options.embedding:
        found |= {f"embedding_in/{x}": arrays[f"{trunk}Dense_0/{x}"] for x in ("kernel", "bias")}
        dense += 1
    if options.time_conditioning:
        for x in ("kernel", "bias"):
            found[f"time/time_in/{x}"] = arrays[f"CondEmbedding_0/dense0/{x}"]
            found[f"time/time_out/{x}"] = arrays[f"CondEmbedding_0/Dense_0/{x}"]
            found[f"final_modulation/modulation/{x}"] = arrays[f"{trunk}Dense_{dense}/{x}"]
        dense += 1
    else:
        found["final_norm/scale"] = arrays[f"{trunk}RMSNorm_0/scale"]
    found["head/kernel"] = _columns(arrays[f"{trunk}Dense_{dense}/kernel"], options.vocab_size)
    return nested(found)


def from_dit(arrays: Arrays, options: Any) -> Params:
    """Converts the DiT of SEDD, RADD, MDLM, Duo and BD3-LM, all with one set of names.

    The head's column of the mask is left out: no loss and no sampler uses it.
    """
    arrays = {name.removeprefix("backbone."): array for name, array in arrays.items()}
    size = options.size

    def own(name: str, of: str):
        return lambda a: a(f"{name}.{of}").T

    gives = {
        f"attention/{name}/kernel": lambda a, n=n: a("attn_qkv.weight")[n * size :][:size].T
        for n, name in enumerate(("query", "key", "value"))
    }
    gives["attention/out/kernel"] = own("attn_out", "weight")
    for name, layer in (("up", "mlp.0"), ("down", "mlp.2")):
        gives[f"feed_forward/{name}/kernel"] = own(layer, "weight")
        gives[f"feed_forward/{name}/bias"] = own(layer, "bias")
    if options.time_conditioning:
        gives["modulation/kernel"] = own("adaLN_modulation", "weight")
        gives["modulation/bias"] = own("adaLN_modulation", "bias")
    names = {"scale": "weight"} | ({"bias": "bias"} if options.norm_parameters == "affine" else {})
    for ours, theirs in names.items():
        gives[f"attention_norm/{ours}"] = own("norm1", theirs)
        gives[f"feed_forward_norm/{ours}"] = own("norm2", theirs)
    found = _blocks(arrays, "blocks.{}.{}", gives, options)
    last = "output_layer."
    for ours, theirs in names.items():
        found[f"final_norm/{ours}"] = arrays[f"{last}norm_final.{theirs}"]
    if options.time_conditioning:
        first = arrays["sigma_map.mlp.0.weight"].T
        # Their cosines come first.
        found["time/time_in/kernel"] = np.roll(first, len(first) // 2, axis=0)
        found["time/time_in/bias"] = arrays["sigma_map.mlp.0.bias"]
        found["time/time_out/kernel"] = arrays["sigma_map.mlp.2.weight"].T
        found["time/time_out/bias"] = arrays["sigma_map.mlp.2.bias"]
        for ours, theirs in (("kernel", "weight"), ("bias", "bias")):
            found[f"final_modulation/modulation/{ours}"] = arrays[
                f"{last}adaLN_modulation.{theirs}"
            ].T
    table = arrays["vocab_embed.embedding"]
    found["embedding"] = padded_rows(table, rounded(options.vocab_size + 1))
    bias = arrays[f"{last}linear.bias"][None]
    if options.tied:
        found["head_bias"] = _columns(bias, options.vocab_size, len(found["embedding"]))[0]
    else:
        found["head/kernel"] = _columns(arrays[f"{last}linear.weight"].T, options.vocab_size)
        found["head/bias"] = _columns(bias, options.vocab_size)[0]
    return nested(found)


def from_llada(arrays: Arrays, options: Any) -> Params:
    """Converts LLaDA, whose mask is the symbol after the vocabulary's last one."""
    names = {
        "attention/query/kernel": "q_proj", "attention/key/kernel": "k_proj",
        "attention/value/kernel": "v_proj", "attention/out/kernel": "attn_out",
        "feed_forward/gate/kernel": "ff_proj", "feed_forward/up/kernel": "up_proj",
        "feed_forward/down/kernel": "ff_out", "attention_norm/scale": "attn_norm",
        "feed_forward_norm/scale": "ff_norm",
    }  # fmt: skip
    gives = {ours: lambda a, x=theirs: a(f"{x}.weight").T for ours, theirs in names.items()}
    found = _blocks(arrays, "model.transformer.blocks.{}.{}", gives, options)
    trunk, symbols = "model.transformer.", options.vocab_size
    table = arrays[f"{trunk}wte.weight"][: symbols + 1]
    found["embedding"] = padded_rows(table, rounded(symbols + 1))
    found["final_norm/scale"] = arrays[f"{trunk}ln_f.weight"]
    if not options.tied:
        found["head/kernel"] = _columns(arrays[f"{trunk}ff_out.weight"].T, symbols)
    return nested(found)


def _blocks(arrays: Arrays, names: str, gives: Mapping[str, Any], options: Any) -> dict:
    """Collects the blocks: {path: array}, with a leading layer axis if blocks are scanned."""
    layers = [
        {
            ours: make(lambda name, n=n: arrays[names.format(n, name)])
            for ours, make in gives.items()
        }
        for n in range(options.depth)
    ]
    if options.scan_blocks:
        return {f"blocks/{ours}": np.stack([layer[ours] for layer in layers]) for ours in gives}
    return {f"blocks_{n}/{x}": a for n, layer in enumerate(layers) for x, a in layer.items()}


def padded_rows(table: np.ndarray, rows: int) -> np.ndarray:
    """Appends rows of zeros, which stand for no symbol."""
    return np.pad(table, ((0, rows - len(table)), (0, 0)))


def _columns(matrix: np.ndarray, symbols: int, columns: int = 0) -> np.ndarray:
    """Returns the columns of the symbols, and zeros up to a rounded number of columns."""
    more = (columns or rounded(symbols)) - symbols
    return np.pad(matrix[:, :symbols], ((0, 0), (0, more)))


def nested(found: Mapping[str, np.ndarray]) -> Params:
    """Makes nested dicts of float32 arrays from paths."""
    tree: dict = {}
    for path, array in found.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = np.asarray(array, np.float32)
    return tree
