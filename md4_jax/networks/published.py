"""Conversion of the parameters of published networks to those of `Transformer`.

Each function takes the arrays of a checkpoint, by the names in the original project, and returns
the parameters of a transformer with the given options (see configs/networks.py). Names, orders and
shapes differ; the network computes the same function.

Arrays are read parameter by parameter. `put` creates the array of a parameter: it is called with
its path and with functions that read its layers, one for each layer if blocks are scanned.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from md4_jax.networks.depth import STACKED
from md4_jax.networks.linear import rounded
from md4_jax.protocols import Array, Params

Arrays = Mapping[str, np.ndarray]
Read = Callable[[], np.ndarray]
Put = Callable[[str, Sequence[Read]], Array]
DIT_TABLE = "vocab_embed.embedding"
DIT_LABELS = "cond_map.embedding_table.weight"
# Prefixes of the names of arrays in the class of DiffuGPT and DiffuLLaMA (arXiv:2410.17891), and in
# Nemotron-Labs-Diffusion (arXiv:2607.05722).
DIFFUSION, ENCODER = "denoise_model.", "encoder."


class View(Mapping):
    """Arrays of a checkpoint by name; base of views that change how an array is read."""

    def __init__(self, arrays: Arrays):
        self._arrays = arrays

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


class MaskLast(View):
    """Arrays of a checkpoint, with the row of the mask after those of the symbols.

    tables  names of the arrays that have a row for each entry of the vocabulary
    mask    row of the mask, which is moved to the end; with `added`, a row that is copied there
    rows    number of entries of the vocabulary, including the mask; further rows are dropped
    """

    def __init__(
        self, arrays: Arrays, tables: Sequence[str], mask: int, rows: int, *, added: bool = False
    ):
        super().__init__(arrays)
        self._tables = frozenset(tables)
        self._mask, self._rows, self._added = mask, rows, added

    def __getitem__(self, name: str) -> np.ndarray:
        array = self._arrays[name]
        if name not in self._tables:
            return array
        mask, rows = self._mask, self._rows
        symbols = [array[: rows - 1]] if self._added else [array[:mask], array[mask + 1 : rows]]
        return np.concatenate([*symbols, array[mask : mask + 1]])


def in_memory(path: str, layers: Sequence[Read]) -> np.ndarray:
    """Returns the parameter as a float32 array."""
    arrays = [np.asarray(read(), np.float32) for read in layers]
    return np.stack(arrays) if path.startswith(STACKED) else arrays[0]


def from_md4(arrays: Arrays, options: Any, put: Put = in_memory) -> Params:
    """Converts google-deepmind/md4's DiscreteClassifier on text.

    Its rotary positions rotate neighbouring pairs of a head's features, those of `Transformer` its
    two halves. The columns of query and key are reordered accordingly.
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
    found = blocks(arrays, "Transformer_0/TransformerBlock_{}/{}", gives, options)
    trunk, dense = "Transformer_0/", 0
    table = "Embed_0/embedding" if options.embedding else trunk + "Embed_0/embedding"
    symbols = options.vocab_size
    found["embedding"] = lambda: padded_rows(arrays[table], rounded(symbols + 1))
    names = {}
    if options.embedding:
        names |= {f"embedding_in/{x}": f"{trunk}Dense_0/{x}" for x in ("kernel", "bias")}
        dense += 1
    if options.time_conditioning:
        for x in ("kernel", "bias"):
            names[f"time/time_in/{x}"] = f"CondEmbedding_0/dense0/{x}"
            names[f"time/time_out/{x}"] = f"CondEmbedding_0/Dense_0/{x}"
            names[f"final_modulation/modulation/{x}"] = f"{trunk}Dense_{dense}/{x}"
        dense += 1
    else:
        names["final_norm/scale"] = f"{trunk}RMSNorm_0/scale"
    found |= {ours: lambda x=theirs: arrays[x] for ours, theirs in names.items()}
    found["head/kernel"] = lambda: of_symbols(arrays[f"{trunk}Dense_{dense}/kernel"], symbols)
    return nested(found, put)


def from_dit(arrays: Arrays, options: Any, put: Put = in_memory) -> Params:
    """Converts the DiT of SEDD, RADD, MDLM, UDLM, Duo, BD3-LM, GIDD and MDM-Prime: shared names.

    The mask's column of the head is dropped: no loss and no sampler uses it.
    """
    prefix = "backbone." if "backbone.blocks.0.attn_qkv.weight" in arrays else ""
    size, symbols = options.size, options.vocab_size

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
    found = blocks(arrays, prefix + "blocks.{}.{}", gives, options)
    last = "output_layer."
    plain = {f"final_norm/{ours}": f"{last}norm_final.{theirs}" for ours, theirs in names.items()}
    if options.time_conditioning:
        for ours, theirs in (("kernel", "weight"), ("bias", "bias")):
            plain[f"time/time_in/{ours}"] = f"sigma_map.mlp.0.{theirs}"
            plain[f"time/time_out/{ours}"] = f"sigma_map.mlp.2.{theirs}"
            plain[f"final_modulation/modulation/{ours}"] = f"{last}adaLN_modulation.{theirs}"
    found |= {ours: lambda x=theirs: arrays[prefix + x].T for ours, theirs in plain.items()}
    if options.time_conditioning:
        read = found["time/time_in/kernel"]
        found["time/time_in/kernel"] = lambda: _sines_first(read())
    if options.classes:
        found["label_table"] = lambda: arrays[prefix + DIT_LABELS]
    rows, table = rounded(getattr(options, "table", [symbols + 1])[0]), f"{prefix}{DIT_TABLE}"
    head, bias = f"{prefix}{last}linear.weight", f"{last}linear.bias"
    # A tied checkpoint may contain the matrix under only one of its two names.
    found["embedding"] = lambda: padded_rows(arrays[table if table in arrays else head], rows)
    columns = rows if options.tied else 0
    found["head_bias" if options.tied else "head/bias"] = lambda: of_symbols(
        arrays[prefix + bias][None], symbols, columns
    )[0]
    if not options.tied:
        found["head/kernel"] = lambda: of_symbols(arrays[head].T, symbols)
    return nested(found, put)


def from_llada(arrays: Arrays, options: Any, put: Put = in_memory) -> Params:
    """Converts LLaDA, with the mask in the row after those of the symbols; see `MaskLast`."""
    names = {
        "attention/query/kernel": "q_proj", "attention/key/kernel": "k_proj",
        "attention/value/kernel": "v_proj", "attention/out/kernel": "attn_out",
        "feed_forward/gate/kernel": "ff_proj", "feed_forward/up/kernel": "up_proj",
        "feed_forward/down/kernel": "ff_out", "attention_norm/scale": "attn_norm",
        "feed_forward_norm/scale": "ff_norm",
    }  # fmt: skip
    gives = {ours: lambda a, x=theirs: a(f"{x}.weight").T for ours, theirs in names.items()}
    found = blocks(arrays, "model.transformer.blocks.{}.{}", gives, options)
    trunk, symbols = "model.transformer.", options.vocab_size
    table, head = f"{trunk}wte.weight", f"{trunk}ff_out.weight"
    found["embedding"] = lambda: padded_rows(arrays[table][: symbols + 1], rounded(symbols + 1))
    found["final_norm/scale"] = lambda: arrays[f"{trunk}ln_f.weight"]
    if not options.tied:
        found["head/kernel"] = lambda: of_symbols(arrays[head].T, symbols)
    return nested(found, put)


class LlamaNames(NamedTuple):
    """Names of the arrays of a model in the layout of transformers' Llama.

    trunk  prefix of the names of the layers
    table  name of the embedding matrix; `head`: that of the head
    """

    trunk: str
    table: str
    head: str = "lm_head.weight"


def llama_names(arrays: Mapping[str, Any]) -> LlamaNames:
    """Returns the names of a Llama's arrays.

    They are those of the transformers library, of DiffuLLaMA's class DiscreteDiffusionModel, or of
    the class NemotronLabsDiffusionModel.
    """
    first = "layers.0.input_layernorm.weight"
    if DIFFUSION + first in arrays:
        return LlamaNames(DIFFUSION, "embed_tokens.weight")
    if ENCODER + first in arrays:
        return LlamaNames(ENCODER, f"{ENCODER}embed_tokens.weight", "diffusion_head.weight")
    return LlamaNames("model.", "model.embed_tokens.weight")


def from_llama(arrays: Arrays, options: Any, put: Put = in_memory) -> Params:
    """Converts models in the layout of transformers' Llama and Qwen, with the mask last."""
    symbols, (trunk, table, head) = options.vocab_size, llama_names(arrays)
    found = blocks(arrays, trunk + "layers.{}.{}", llama_layers(options), options)
    found["embedding"] = lambda: padded_rows(arrays[table][: symbols + 1], rounded(symbols + 1))
    found["final_norm/scale"] = lambda: arrays[f"{trunk}norm.weight"]
    if not options.tied:
        found["head/kernel"] = lambda: of_symbols(arrays[head].T, symbols)
    return nested(found, put)


def llama_layers(options: Any) -> dict[str, Any]:
    """Returns {path in a block: function from a Llama layer's arrays to the parameter}."""
    norms = {"query": "self_attn.q_norm", "key": "self_attn.k_norm"} if options.qk_norm else {}
    biased = ("query", "key", "value") if options.qkv_bias else ()
    layers = {
        "attention/query": "self_attn.q_proj", "attention/key": "self_attn.k_proj",
        "attention/value": "self_attn.v_proj", "attention/out": "self_attn.o_proj",
        "feed_forward/gate": "mlp.gate_proj", "feed_forward/up": "mlp.up_proj",
        "feed_forward/down": "mlp.down_proj",
    }  # fmt: skip
    gives = {
        f"{ours}/kernel": lambda a, x=theirs: a(f"{x}.weight").T for ours, theirs in layers.items()
    }
    vectors = {f"attention/{x}/bias": f"{layers[f'attention/{x}']}.bias" for x in biased}
    vectors |= {f"attention/{x}_norm/scale": f"{theirs}.weight" for x, theirs in norms.items()}
    vectors["attention_norm/scale"] = "input_layernorm.weight"
    vectors["feed_forward_norm/scale"] = "post_attention_layernorm.weight"
    return gives | {ours: lambda a, x=theirs: a(x) for ours, theirs in vectors.items()}


def blocks(
    arrays: Arrays, names: str, gives: Mapping[str, Any], options: Any, begin: int = 0
) -> dict:
    """Returns {path: function that reads it}, or lists of functions if blocks are scanned.

    gives: {path in a block: function of a reader of the layer's arrays}. begin: first layer to read
    """
    layers = [
        {
            ours: lambda make=make, n=n: make(lambda name: arrays[names.format(n, name)])
            for ours, make in gives.items()
        }
        for n in range(begin, options.depth)
    ]
    if options.scan_blocks:
        return {f"blocks/{ours}": [layer[ours] for layer in layers] for ours in gives}
    return {f"blocks_{n}/{x}": read for n, layer in enumerate(layers) for x, read in layer.items()}


def _sines_first(kernel: np.ndarray) -> np.ndarray:
    """Swaps the halves of the inputs: the published networks have cosines first."""
    return np.roll(kernel, len(kernel) // 2, axis=0)


def padded_rows(table: np.ndarray, rows: int) -> np.ndarray:
    """Appends rows of zeros, up to `rows` rows; they belong to no symbol."""
    return np.pad(table, ((0, rows - len(table)), (0, 0)))


def of_symbols(matrix: np.ndarray, symbols: int, columns: int = 0) -> np.ndarray:
    """Returns the columns of the symbols, and zeros up to a rounded number of columns."""
    more = (columns or rounded(symbols)) - symbols
    return np.pad(matrix[:, :symbols], ((0, 0), (0, more)))


def nested(found: Mapping[str, Read | list[Read]], put: Put = in_memory) -> Params:
    """Creates the nested dicts of parameters from {path: functions that read it}."""
    tree: dict = {}
    for path, layers in found.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = put(path, layers if isinstance(layers, list) else [layers])
    return tree
