"""Layouts of other projects for a model that was trained from scratch with this package.

A layout is made from the sizes of the network and read like a published folder. It is used only if
this gives the same network, process and objective as the model has.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from md4_jax.config.same_network import computed
from md4_jax.config.schema import build_section
from md4_jax.model import esm, peers
from md4_jax.model.agreement import Meaning, differences
from md4_jax.model.layout import Layout, Numbered
from md4_jax.networks.esm import Esm
from md4_jax.networks.published import DIT_LABELS, DIT_TABLE
from md4_jax.networks.sub_tokens import SubTokens
from md4_jax.networks.transformer import Transformer
from md4_jax.protocols import UserError

SINUSOIDS = 256  # of the time, in a DiT
# Code on the hub that reads a layout: repository, and modules of configuration and model.
CODE = {
    "mdlm": ("kuleshov-group/mdlm-owt", "configuration_mdlm.MDLMConfig", "modeling_mdlm.MDLM"),
    "bd3lm": (
        "kuleshov-group/bd3lm-owt-block_size4",
        "configuration_bd3lm.BD3LMConfig",
        "modeling_bd3lm.BD3LM",
    ),
    "llada": (
        "GSAI-ML/LLaDA-8B-Base",
        "configuration_llada.LLaDAConfig",
        "modeling_llada.LLaDAModelLM",
    ),
}
Shapes = Iterator[tuple[str, tuple[int, ...]]]


class Own(NamedTuple):
    """Model that was trained with this package.

    options   of the network; process, objective: those of its experiment
    length    number of tokens of a sequence
    ends      id of the end of text, or None
    """

    options: Any
    process: Any
    objective: dict[str, Any]
    length: int
    ends: int | None

    @property
    def rows(self) -> int:
        """Number of entries of the vocabulary, including the mask if it is one."""
        own = hasattr(self.process, "mask_id") and type(self.options) is not SubTokens
        return self.options.vocab_size + own

    @property
    def meaning(self) -> Meaning:
        """Meaning of the outputs of the network."""
        return Meaning(self.options, self.process, self.objective)


def layout_of(model: Any) -> Layout:
    """Returns the layout of the first project that supports the model.

    Network, process and objective must agree. Otherwise UserError, with the closest project and the
    differences.
    """
    model.check_text("export")
    symbols, config = model.domain.vocab_size, model.config
    options = build_section("network", config["network"], vocab_size=symbols)
    if type(options) not in (Transformer, Esm, SubTokens):
        raise _no_layout(model, f"network.name={config['network']['name']!r}")
    own = Own(
        options.resolved("cpu"), model.experiment.process, config["objective"], model.length,
        model.domain.tokenizer.eot_id,
    )  # fmt: skip
    nearest, fewest = "", None
    for kind in KINDS:
        if type(options) is not kind.network:
            continue
        layout = kind.make(own)
        differs = _differences(own, kind, layout, str(model.origin))
        if not differs:
            return layout
        if fewest is None or len(differs) < len(fewest):
            nearest, fewest = kind.name, differs
    raise _no_layout(model, f"the most similar, {nearest}, needs {'; '.join(fewest)}")


def _no_layout(model: Any, why: str) -> UserError:
    names = ", ".join(dict.fromkeys(kind.name for kind in KINDS))
    return UserError(
        f"{model.origin} cannot be written in any of the layouts {names}: {why}. Use save, which "
        "writes the layout of md4_jax"
    )


def _differences(own: Own, kind: "Kind", layout: Layout, origin: str) -> list[str]:
    """Lists the keys that would change if the model were read from this layout."""
    peer = peers.peer(layout.config, Numbered(layout, origin))
    config, symbols = peers.config_of(peer, {}), own.options.vocab_size
    read = build_section("network", config["network"], vocab_size=symbols)
    ours, theirs = computed(own.options), computed(read)
    if peer.tables:  # a head that is tied is written a second time
        ours["tied"] = theirs["tied"]
    found = [f"network.{key}={theirs.get(key)!r}" for key in ours if ours[key] != theirs.get(key)]
    if own.options.time_conditioning != kind.timed:
        found.append(f"network.time_conditioning={kind.timed}")
    if own.objective["name"] not in kind.objectives:
        found.append(f"objective.name of {', '.join(kind.objectives)}")
    others = differences(own.meaning, config)
    found += [f"{key}={value!r}" for key, _, value in others if key != "objective.name"]
    return found


def _dit(own: Own, kind: str, prefix: str, told: dict[str, Any]) -> Layout:
    """Returns the layout of a DiT, with the names of SEDD's code, which the others share."""
    o, pairs = own.options, own.options.attention_size // 2
    arrays = {prefix + name: ("F32", shape) for name, shape in _dit_arrays(o, own.rows)}
    frequencies = f"{prefix}rotary_emb.inv_freq"
    arrays[frequencies] = ("F32", (pairs,))
    values = o.rotary_base ** -(np.arange(pairs) / pairs)
    return Layout({**told, **_code(kind)}, arrays, None, {frequencies: values.tolist()})


def _code(kind: str, model: str = "AutoModelForMaskedLM") -> dict[str, Any]:
    """Returns the keys by which the transformers library finds the code of a layout."""
    if kind not in CODE:
        return {}
    repository, configuration, modelling = CODE[kind]
    return {
        "architectures": [modelling.partition(".")[2]],
        "auto_map": {
            "AutoConfig": f"{repository}--{configuration}",
            model: f"{repository}--{modelling}",
        },
    }


def _dit_arrays(o: Any, rows: int) -> Shapes:
    size, condition, timed = o.size, o.condition or o.size, o.time_conditioning
    has_bias = o.norm_parameters == "affine"

    def layer(name: str, out: int, into: int, bias: bool = True) -> Shapes:
        yield f"{name}.weight", (out, into)
        if bias:
            yield f"{name}.bias", (out,)

    def norm(name: str) -> Shapes:
        yield f"{name}.weight", (size,)
        if has_bias:
            yield f"{name}.bias", (size,)

    yield DIT_TABLE, getattr(o, "table", (rows, size))
    if o.classes:
        yield DIT_LABELS, (o.classes + 1, condition)
    if timed:
        yield from layer("sigma_map.mlp.0", condition, SINUSOIDS)
        yield from layer("sigma_map.mlp.2", condition, condition)
    for number in range(o.depth):
        block = f"blocks.{number}."
        yield from norm(f"{block}norm1")
        yield from layer(f"{block}attn_qkv", 3 * size, size, bias=False)
        yield from layer(f"{block}attn_out", size, size, bias=False)
        yield from norm(f"{block}norm2")
        yield from layer(f"{block}mlp.0", o.hidden, size)
        yield from layer(f"{block}mlp.2", size, o.hidden)
        if timed:
            yield from layer(f"{block}adaLN_modulation", 6 * size, condition)
    yield from norm("output_layer.norm_final")
    yield from layer("output_layer.linear", rows, size)
    if timed:
        yield from layer("output_layer.adaLN_modulation", 2 * size, condition)


def _hub(kind: str, **more: Any) -> Callable[[Own], Layout]:
    """Returns a function that makes a layout with a flat config.json, like MDLM's."""

    def make(own: Own) -> Layout:
        o = own.options
        told = {
            "model_type": kind, "vocab_size": own.rows, "model_length": own.length,
            "hidden_dim": o.size, "cond_dim": o.condition or o.size, "n_blocks": o.depth,
            "n_heads": o.heads, "dropout": o.dropout, **more,
        }  # fmt: skip
        if kind == "bd3lm":
            told["block_size"] = own.meaning.block or 1
        if kind == "udlm":
            told |= {"cfg": o.classes > 0, "cfg_num_classes": o.classes or -1}
        if kind == "esolm":
            told["alpha_0"] = own.meaning.alpha_0 or 0.0
        return _dit(own, kind, "backbone.", told)

    return make


def _run_config(kind: str, graph: str) -> Callable[[Own], Layout]:
    """Returns a function that makes a layout with the nested config of SEDD's code."""

    def make(own: Own) -> Layout:
        o, schedule = own.options, getattr(own.process, "schedule", None)
        limits = getattr(schedule, "minimum", 1e-4), getattr(schedule, "maximum", 20)
        noise = "geometric" if hasattr(schedule, "minimum") else "loglinear"
        told = {
            "tokens": own.rows - (graph == "absorb"),
            "graph": {"type": graph, "file": "data", "report_all": False},
            "noise": dict(zip(("type", "sigma_min", "sigma_max"), (noise, *limits), strict=True)),
            "model": {
                "name": "small", "type": "ddit", "hidden_size": o.size,
                "cond_dim": o.condition or o.size, "length": own.length, "n_blocks": o.depth,
                "n_heads": o.heads, "dropout": o.dropout,
                "scale_by_sigma": bool(own.meaning.scaled),
                "tie_word_embeddings": False,
            },
        }  # fmt: skip
        if kind == "radd":
            name = own.objective["name"]
            told["training"] = {"loss_type": name if name == "lambda_dce" else "t_dce"}
        return _dit(own, kind, "", told)

    return make


def _llada(own: Own) -> Layout:
    """Returns the layout of LLaDA, whose config.json has the switches of OLMo's code."""
    o, trunk = own.options, "model.transformer."
    heads, kv_heads = o.heads * o.attention_size, o.kv_heads * o.attention_size
    shapes = {f"{trunk}wte.weight": (own.rows, o.size), f"{trunk}ln_f.weight": (o.size,)}
    if not o.tied:
        shapes[f"{trunk}ff_out.weight"] = (own.rows, o.size)
    for number in range(o.depth):
        of_block = {
            "q_proj": (heads, o.size), "k_proj": (kv_heads, o.size), "v_proj": (kv_heads, o.size),
            "attn_out": (o.size, heads), "ff_proj": (o.hidden, o.size),
            "up_proj": (o.hidden, o.size), "ff_out": (o.size, o.hidden), "attn_norm": (o.size,),
            "ff_norm": (o.size,),
        }  # fmt: skip
        shapes |= {f"{trunk}blocks.{number}.{x}.weight": shape for x, shape in of_block.items()}
    told = {
        "model_type": "llada", "block_type": "llama", "activation_type": "silu",
        "layer_norm_type": "rms", "rms_norm_eps": o.norm_eps, "rope": True,
        "rope_theta": o.rotary_base, "alibi": False, "attention_layer_norm": False,
        "bias_for_layer_norm": False, "include_bias": False, "include_qkv_bias": False,
        "attention_dropout": 0.0, "embedding_dropout": 0.0, "residual_dropout": 0.0,
        "d_model": o.size, "n_layers": o.depth, "n_heads": o.heads, "n_kv_heads": o.kv_heads,
        "mlp_hidden_size": o.hidden, "vocab_size": own.rows, "embedding_size": own.rows,
        "max_sequence_length": own.length, "weight_tying": o.tied,
        "mask_token_id": o.vocab_size, "eos_token_id": own.ends, "pad_token_id": own.ends,
        **_code("llada", "AutoModelForCausalLM"),
    }  # fmt: skip
    return Layout(told, {name: ("F32", shape) for name, shape in shapes.items()}, o.vocab_size, {})


def _esm(own: Own) -> Layout:
    """Returns the layout of ESM-2, which stores the angles of rotary positions."""
    o = own.options
    arrays = {name: ("F32", shape) for name, shape in esm.arrays(o, own.rows)}
    angles = o.rope.frequency(o.attention_size).tolist()
    return Layout(esm.told(o, own.length, own.rows), arrays, None, {esm.ANGLES[0]: angles})


class Kind(NamedTuple):
    """Layout of a project.

    objectives  names of objectives for which outputs are those that the project's code expects
    make        makes the layout with a model's sizes
    timed       whether the network has a time embedding
    network     class of its options
    """

    name: str
    objectives: tuple[str, ...]
    make: Callable[[Own], Layout]
    timed: bool = True
    network: type = Transformer


_MASKED = ("md4", "md4_discrete", "any_order", "t_dce", "lambda_dce", "sdtt", "dcd", "preference")
_MASKED += ("reparameterized", "proseco")
_UNIFORM = ("uniform_elbo", "duo", "sdtt", "dcd")
KINDS = (
    Kind("mdlm", _MASKED, _hub("mdlm", time_conditioning=False)),
    Kind("mdlm", _MASKED, _hub("mdlm", time_conditioning=True)),
    Kind("bd3lm", ("block",), _hub("bd3lm", time_conditioning=False)),
    Kind("esolm", ("eso", "eso_orders", "wedlm"), _hub("esolm", time_conditioning=False)),
    Kind("duo", _UNIFORM, _hub("duo", time_conditioning=True, var_min=True)),
    Kind("udlm", _UNIFORM, _hub("udlm", time_conditioning=False)),
    Kind("udlm", _UNIFORM, _hub("udlm", time_conditioning=True)),
    Kind("radd", _MASKED, _run_config("radd", "absorb"), timed=False),
    Kind("sedd", ("score_entropy",), _run_config("sedd", "absorb")),
    Kind("sedd", ("score_entropy",), _run_config("sedd", "uniform")),
    Kind("llada", _MASKED, _llada, timed=False),
    Kind(esm.KIND, _MASKED, _esm, timed=False, network=Esm),
    Kind("mdm_prime", ("prime",), _hub("mdm_prime"), network=SubTokens),
)
