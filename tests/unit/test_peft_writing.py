"""Adapters that are written in PEFT's layout: names, values, and what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import own_lora, peer_folder
from safetensors.numpy import load_file

import md4_jax
from md4_jax.model import importing
from md4_jax.model.layout import Layout
from md4_jax.model.peft_config import matches
from md4_jax.model.peft_writing import targets
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place
from md4_jax.runtime.sharding import path_name

LORA = {"network.lora_rank": 2, "network.lora_alpha": 5.0, "network.lora_dropout": 0.1}
Z = np.array([[3, 1, 11, 7, 11, 0]])
DIFFUSION = {
    "objective.name": "md4",
    "network.causal": False,
    "sample.name": "ancestral",
}


def noisy(model, pattern: str = "lora_b"):
    """The model with other adapters, as after training."""
    rng = np.random.default_rng(0)

    def one(path, x):
        if pattern not in path_name(path):
            return x
        return jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype)

    return dataclasses.replace(model, params=jax.tree_util.tree_map_with_path(one, model.params))


def written(folder) -> tuple[dict, dict]:
    """adapter_config.json and the matrices."""
    arrays = load_file(folder / "adapter_model.safetensors")
    return json.loads((folder / "adapter_config.json").read_text()), arrays


QKV = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up")]
# What each project calls the layers, and how the file names them.
NAMES = {
    "qwen2": (
        "model.layers.{}.",
        [*QKV, "mlp.down_proj"],
        sorted([x.rpartition(".")[2] for x in QKV] + ["down_proj"]),
    ),
    "llada": (
        "model.transformer.blocks.{}.",
        ["q_proj", "k_proj", "v_proj", "attn_out", "ff_proj", "up_proj", "ff_out"],
        r"(model\.transformer\.blocks\.)\d+\.(attn_out|ff_out|ff_proj|k_proj|q_proj|up_proj|v_proj)",
    ),
    "mdlm": (
        "backbone.blocks.{}.",
        ["attn_qkv", "attn_out", "mlp.0", "mlp.2"],
        r"(backbone\.blocks\.)\d+\.(attn_out|attn_qkv|mlp\.0|mlp\.2)",
    ),
    "radd": ("blocks.{}.", ["attn_qkv", "attn_out", "mlp.0", "mlp.2"], None),
}


@pytest.mark.parametrize("name, scan", [*((name, True) for name in NAMES), ("mdlm", False)])
@pytest.mark.cases(2)
def test_what_is_written_is_the_model(name, scan, tmp_path):
    """W + scale B A of the file are the matrices of the whole model, and it reads as the same."""
    source, (prefix, layers, asked) = peer_folder(tmp_path, name), NAMES[name]
    model = noisy(md4_jax.load(source, config={**LORA, "network.scan_blocks": scan}))
    folder = model.export(tmp_path / "adapter", adapters=True)
    told, arrays = written(folder)
    modules = {prefix.format(n) + layer for n in range(2) for layer in layers}
    wanted = {f"base_model.model.{m}.lora_{x}.weight" for m in modules for x in "AB"}
    assert arrays.keys() == wanted and {x.dtype for x in arrays.values()} == {np.dtype("float32")}
    assert told["base_model_name_or_path"] == str(source) and told["revision"] is None
    assert (told["r"], told["lora_alpha"], told["lora_dropout"]) == (2, 5, 0.1)
    assert told["peft_type"] == "LORA" and told["bias"] == "none" and not told["use_rslora"]
    assert told["task_type"] == ("CAUSAL_LM" if name == "qwen2" else None)
    assert asked in (None, told["target_modules"])
    fused = {"attn_qkv": 6} if "attn_qkv" in layers else {}
    assert told["rank_pattern"] == fused
    assert told["alpha_pattern"] == dict.fromkeys(fused, 15)
    before = load_file(source / "model.safetensors")
    after = load_file(model.export(tmp_path / "whole") / "model.safetensors")
    for key, value in before.items():
        module = key.removesuffix(".weight")
        assert matches(told["target_modules"], module) == (module in modules)
        if module in modules:
            a, b = (arrays[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
            value = value + 2.5 * b.astype(np.float64) @ a
            np.testing.assert_allclose(after[key], value, atol=1e-6)
            assert np.abs(value - before[key]).max() > 0.1
    again = md4_jax.load(source, adapters=folder)
    np.testing.assert_allclose(again.logits(Z, 0.3), model.logits(Z, 0.3), atol=2e-5)


def test_reading_what_was_written_beside_its_base_is_the_same(tmp_path):
    source = peer_folder(tmp_path, "llada")
    model = noisy(md4_jax.load(source, config=LORA))
    folder = model.export(tmp_path / "adapter", adapters=True)
    again = md4_jax.load(source, config={"network.lora_rank": 2}, adapters=folder)
    assert again.logits(Z, 0.3).tobytes() == model.logits(Z, 0.3).tobytes()
    assert again.config["network"] == model.config["network"]


def test_layers_that_are_not_trained_are_left_out(tmp_path):
    """Unless their adapters add something."""
    source = peer_folder(tmp_path, "qwen2")
    keys = {**LORA, "train.trainable": "attention/(query|value)/lora"}
    model = md4_jax.load(source, config=keys)
    told, arrays = written(noisy(model, "query/lora_b").export(tmp_path / "a", adapters=True))
    assert told["target_modules"] == ["q_proj", "v_proj"] and len(arrays) == 8
    told, _ = written(noisy(model, "down/lora_b").export(tmp_path / "b", adapters=True))
    assert told["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    again = md4_jax.load(source, config={"network.lora_rank": 2}, adapters=tmp_path / "a")
    assert again.config["train"]["trainable"] == "(attention/query|attention/value)/lora"


@pytest.mark.parametrize(
    "modules, arrays, expected",
    [
        (["h.0.q", "h.1.q"], ["h.0.q.weight", "h.1.q.weight", "q.bias"], r"(h\.)\d+\.(q)"),
        (["h.0.a.q", "h.1.a.q"], ["h.0.a.q.weight", "h.1.a.q.weight", "b.q.weight"], ["a.q"]),
        (["h.0.q", "h.1.q"], ["h.0.q.weight", "h.1.q.weight", "x.weight"], ["q"]),
        (["h.0.2", "h.1.2"], ["h.0.2.weight", "h.1.2.bias", "h.2.1.w"], r"(h\.)\d+\.(2)"),
    ],
)
def test_target_modules_match_no_other_module(modules, arrays, expected):
    assert targets(modules, arrays) == expected


def test_the_base_is_named_as_other_code_finds_it(tmp_path):
    model = md4_jax.load(peer_folder(tmp_path, "llada"), config=LORA)
    for number, (base, name, revision) in enumerate(
        (
            ("USER/NAME@main", "USER/NAME", "main"),
            ("USER/NAME", "USER/NAME", None),
            ("/models/a@b/c", "/models/a@b/c", None),
        )
    ):
        named = dataclasses.replace(model.layout, base=base)
        adapted = dataclasses.replace(model, layout=named)
        told, _ = written(adapted.export(tmp_path / str(number), adapters=True))
        assert (told["base_model_name_or_path"], told["revision"]) == (name, revision)
    told, _ = written(model.export(tmp_path / "a", adapters=True, base="OTHER/NAME"))
    assert told["base_model_name_or_path"] == "OTHER/NAME"


@pytest.mark.campaign
def test_the_base_is_known_as_long_as_it_is_the_base(tmp_path):
    """Through a run and a saved folder, but not once adapters were folded, or all was trained."""
    source, run = peer_folder(tmp_path, "llada"), Place(tmp_path / "run")
    keys = {key: str(value) for key, value in LORA.items()}
    importing.imported(str(source), keys, run)
    model = md4_jax.load(run)
    assert model.layout.base == str(source)
    saved = md4_jax.load(model.save(tmp_path / "saved"))
    assert saved.layout.base == str(source)
    merged = md4_jax.load(model.save(tmp_path / "merged", merged=True), config=LORA)
    said = r"other than its adapters may differ from those of every published .*base=FOLDER"
    with pytest.raises(UserError, match=said):
        merged.export(tmp_path / "a", adapters=True)
    told, _ = written(merged.export(tmp_path / "a", adapters=True, base="mine"))
    assert told["base_model_name_or_path"] == "mine"


def test_the_base_of_a_trained_model_is_not_that_of_its_layout(tmp_path):
    """Since that says what its config trains."""
    model = md4_jax.load(peer_folder(tmp_path, "llada"), config={"train.trainable": "norm/"})
    for step in (0, 7):
        folder = dataclasses.replace(model, step=step).save(tmp_path / f"saved_{step}")
        assert bool(md4_jax.load(folder).layout.base) == (step == 0)


def test_a_layout_of_an_older_version_says_nothing_of_the_base(tmp_path):
    saved = md4_jax.load(peer_folder(tmp_path, "llada")).save(tmp_path / "saved")
    told = json.loads((saved / "layout.json").read_text())
    del told["base"]
    (saved / "layout.json").write_text(json.dumps(told))
    assert Layout.kept(saved).base == ""


def test_what_an_adapter_cannot_hold_is_refused(tmp_path):
    source = peer_folder(tmp_path, "llada")
    plain = md4_jax.load(source)
    with pytest.raises(UserError, match="adapters=True writes adapters, but .*llada has none"):
        plain.export(tmp_path / "a", adapters=True)
    keys = {**LORA, "train.trainable": "lora|final_norm/"}
    model = dataclasses.replace(md4_jax.load(source, config=keys), step=1)
    with pytest.raises(UserError, match="has also trained final_norm/scale, which a folder of"):
        model.export(tmp_path / "a", adapters=True, base="mine")
    with pytest.raises(UserError, match="was not made from a published checkpoint, to which"):
        dataclasses.replace(model, layout=None).export(tmp_path / "a", adapters=True)
    flax = md4_jax.load(peer_folder(tmp_path, "md4_text"), config=LORA)
    with pytest.raises(UserError, match=r"md4_text is not a checkpoint of PyTorch \(md4\)"):
        flax.export(tmp_path / "a", adapters=True)
    assert not (tmp_path / "a").exists()


@pytest.mark.campaign
def test_modules_with_the_same_matrices_have_no_adapter_of_their_layer(tmp_path):
    """As encoder and decoder of DiffusionGemma: none is written, and none read."""
    source, module = peer_folder(tmp_path, "diffusiongemma"), "model.decoder.layers.0.mlp.up_proj"
    model = md4_jax.load(source, {"network.lora_rank": 2})
    said = r"gemma \(diffusion_gemma\) has two modules for each layer, one of the encoder"
    with pytest.raises(UserError, match=said):
        model.export(tmp_path / "a", adapters=True)
    adapter = own_lora(tmp_path / "lora", source, {module: 2})
    for keys in ({}, {"network.lora_rank": 2}):
        with pytest.raises(UserError, match=said):
            md4_jax.load(source, keys, adapters=adapter)


def test_a_causal_base_has_no_mask(tmp_path):
    """So the base with one is written first, and is the base of the adapters."""
    source = peer_folder(tmp_path, "qwen2")
    model = noisy(md4_jax.load(source, config=LORA | DIFFUSION))
    with pytest.raises(
        UserError, match="made from the causal .*qwen2, which has no mask. First write"
    ):
        model.export(tmp_path / "a", adapters=True)
    base = md4_jax.load(source, config=DIFFUSION).export(tmp_path / "base")
    folder = model.export(tmp_path / "a", adapters=True, base=str(base))
    again = md4_jax.load(base, adapters=folder)
    z = np.array([[0, 124, 5, 124, 123]])
    np.testing.assert_allclose(again.logits(z), model.logits(z), atol=2e-5)
    assert written(folder)[0]["task_type"] is None
