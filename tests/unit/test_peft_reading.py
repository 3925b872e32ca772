"""LoRA in PEFT's layout on published models: folded into their matrices, or beside them."""

import json

import numpy as np
import pytest
from peer_folders import answers, lora_folder, own_lora, peer_folder
from safetensors.numpy import load_file, save_file

import md4_jax
from md4_jax import main
from md4_jax.model.peft_config import Lora, matches
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import Place
from md4_jax.runtime.sharding import path_name

CLOSE = 2e-6  # of the largest logit
# Adapters that peft made, with the logits of its code.
BASES = {"qwen2_lora": "qwen2", "qwen2_all_linear_lora": "qwen2", "llama_lora": "llama"}
Z = np.array([[3, 1, 11, 7, 11, 0]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    directory = tmp_path_factory.mktemp("bases")
    return {name: peer_folder(directory, name) for name in ("qwen2", "llama", "mdlm", "llada")}


def check(model, name: str) -> None:
    """The logits are those of peft."""
    expected = np.asarray(answers(name)["outputs"])[..., :124]
    np.testing.assert_allclose(logits(model, name), expected, atol=CLOSE * np.abs(expected).max())


def logits(model, name: str) -> np.ndarray:
    """Those of the text that peft was asked for."""
    base = BASES[name]
    clean = np.asarray(answers(base)["clean"])[answers(name)["rows"]]
    z = np.concatenate([np.full((len(clean), 1), 124), clean[:, :-1]], axis=1)
    return model.logits(z)


@pytest.mark.parametrize("name", BASES)
def test_a_folded_adapter_gives_the_logits_of_peft(name, folders, tmp_path):
    """Lists, expressions and all-linear; patterns of ranks and factors, rsLoRA, and a head."""
    base = folders[BASES[name]]
    model = md4_jax.load(base, adapters=lora_folder(tmp_path, name))
    check(model, name)
    assert np.abs(logits(md4_jax.load(base), name) - logits(model, name)).max() > 0.1
    assert model.config["network"]["lora_rank"] == 0 and model.layout.base == ""


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("name, rank", [("qwen2_lora", 4), ("qwen2_all_linear_lora", 2)])
@pytest.mark.cases(2)
def test_an_adapter_beside_its_base_gives_them_too(name, rank, scan, folders, tmp_path):
    """And is trained on as it was: the same layers, factor and dropout."""
    keys = {"network.lora_rank": rank, "network.scan_blocks": scan}
    told = answers(name)["config"]
    model = md4_jax.load(folders["qwen2"], config=keys, adapters=lora_folder(tmp_path, name))
    check(model, name)
    network, trainable = model.config["network"], model.config["train"]["trainable"]
    assert network["lora_alpha"] == told["lora_alpha"]
    assert network["lora_dropout"] == told["lora_dropout"]
    some = "(attention/query|attention/value)/lora"
    assert trainable == (some if name == "qwen2_lora" else "")
    assert model.layout.base == str(folders["qwen2"])


def test_a_head_of_quality_begins_beside_a_read_adapter(folders, tmp_path):
    """The adapter is that of the folder, and the head is fresh."""
    base = folders["llada"]
    folder = own_lora(tmp_path / "lora", base, {"model.transformer.blocks.1.ff_out": 2})
    keys = {"network.lora_rank": 2}
    model = md4_jax.load(base, config=keys | {"network.quality": True}, adapters=folder)
    plain = md4_jax.load(base, config=keys, adapters=folder)
    assert model.logits(Z, 0.3).tobytes() == plain.logits(Z, 0.3).tobytes()
    assert model.params["network"]["quality"]["hidden"]["kernel"].shape == (32, 32)


def test_keys_of_the_command_line_come_first(folders, tmp_path):
    """Another factor changes nothing at first: the second matrices make up for it."""
    keys = {
        "network.lora_rank": 4, "network.lora_alpha": 48.0, "network.lora_dropout": 0.25,
        "train.trainable": "lora",
    }  # fmt: skip
    folder = lora_folder(tmp_path, "qwen2_lora")
    model = md4_jax.load(folders["qwen2"], config=keys, adapters=folder)
    check(model, "qwen2_lora")
    assert model.config["network"]["lora_alpha"] == 48.0
    assert model.config["network"]["lora_dropout"] == 0.25
    assert model.config["train"]["trainable"] == "lora"
    network = model.params["network"]["blocks"]["attention"]
    held = load_file(folder / "adapter_model.safetensors")
    b = held["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]
    found = network["value"]["lora_b"]["kernel"][1]
    np.testing.assert_allclose(found, b.T / 8, rtol=1e-6)
    assert not np.any(network["key"]["lora_b"]["kernel"])


@pytest.mark.quick(1)
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.cases(1)
def test_several_matrices_that_are_one_there(scan, folders, tmp_path):
    """Query, key and value of a DiT share A, and each has its rows of B."""
    base = folders["mdlm"]
    modules = {f"backbone.blocks.{n}.{name}": 3 for n in range(2) for name in ("attn_qkv", "mlp.0")}
    folder = own_lora(tmp_path / "lora", base, modules, r=3, alpha_pattern={"mlp.0": 12})
    folded = md4_jax.load(base, adapters=folder)
    keys = {"network.lora_rank": 3, "network.scan_blocks": scan}
    beside = md4_jax.load(base, config=keys, adapters=folder)
    np.testing.assert_allclose(beside.logits(Z, 0.3), folded.logits(Z, 0.3), atol=2e-5)
    assert np.abs(md4_jax.load(base).logits(Z, 0.3) - folded.logits(Z, 0.3)).max() > 0.05
    held, adapter = (load_file(next(x.glob("*.safetensors"))) for x in (base, folder))
    a, b = (adapter[f"base_model.model.backbone.blocks.1.attn_qkv.lora_{x}.weight"] for x in "AB")
    w = held["backbone.blocks.1.attn_qkv.weight"] + 3 / 3 * b.astype(np.float64) @ a
    params = {path_name(p): x for p, x in leaves(folded)}
    for n, name in enumerate(("query", "key", "value")):
        found = params[f"network/blocks/attention/{name}/kernel"][1]
        np.testing.assert_allclose(found, w[32 * n : 32 * (n + 1)].T, atol=1e-6)


def leaves(model):
    import jax

    return jax.tree_util.tree_leaves_with_path(model.params)


def test_layers_without_an_adapter_begin_fresh(folders, tmp_path):
    base = folders["llada"]
    module = "model.transformer.blocks.1.ff_out"
    told = {"target_modules": ["ff_out"], "layers_to_transform": [1]}
    folder = own_lora(tmp_path / "lora", base, {module: 2}, **told)
    model = md4_jax.load(base, config={"network.lora_rank": 2}, adapters=folder)
    fresh = md4_jax.load(base, config={"network.lora_rank": 2})
    folded = md4_jax.load(base, adapters=folder)
    np.testing.assert_allclose(model.logits(Z, 0.3), folded.logits(Z, 0.3), atol=2e-5)
    found, expected = (
        m.params["network"]["blocks"]["feed_forward"]["down"] for m in (model, fresh)
    )
    for which in ("lora_a", "lora_b"):
        a, b = (np.asarray(x[which]["kernel"]) for x in (found, expected))
        assert np.array_equal(a[0], b[0]) and not np.array_equal(a[1], b[1])


def test_a_base_in_half_precision_is_rounded_once(folders, tmp_path):
    model, exact = (
        md4_jax.load(
            folders["qwen2"],
            config={"network.parameters": dtype},
            adapters=lora_folder(tmp_path / dtype, "qwen2_lora"),
        )
        for dtype in ("bfloat16", "float32")
    )
    found, expected = (m.params["network"]["blocks"]["attention"] for m in (model, exact))
    rounded = expected["query"]["kernel"].astype("bfloat16")
    assert np.array_equal(found["query"]["kernel"], rounded)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA': only 'LORA' is supported"),
        ({"use_dora": True}, "use_dora=True: DoRA also changes the norms"),
        ({"bias": "lora_only"}, "bias='lora_only': biases of the base model are trained"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]: whole modules"),
        ({"lora_bias": True}, "lora_bias=True: the matrices of adapters have biases"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa', with which PEFT also changes"),
        ({"some_day": 3}, "some_day=3: this option is not supported"),
        ({"r": 3}, r"lora_A.weight has the shape \(4, 32\), but must have \(3, 32\) for the rank"),
        ({"r": 0}, "a rank must be a whole number above 0, not 0"),
        ({"lora_alpha": None}, "lora_alpha must be a number, not None"),
        ({"rank_pattern": {"(": 3}}, r"'\(' is not a regular expression"),
        ({"target_modules": None}, "must have target_modules"),
        (
            {"target_modules": ["q_proj"]},
            "adapts model.layers.0.self_attn.v_proj, which is not among",
        ),
        (
            {"target_modules": ["q_proj", "v_proj", "o_proj"]},
            r"lacks 'base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight': target_mod",
        ),
    ],
)
def test_configs_that_cannot_be_read(changes, said, folders, tmp_path):
    with pytest.raises(UserError, match=said) as caught:
        md4_jax.load(folders["qwen2"], adapters=lora_folder(tmp_path, "qwen2_lora", **changes))
    assert "adapter_" in str(caught.value)


def changed(folder, change):
    """Applies a change to the arrays of an adapter."""
    file = folder / "adapter_model.safetensors"
    arrays = load_file(file)
    change(arrays)
    save_file({name: np.ascontiguousarray(x) for name, x in arrays.items()}, file)
    return folder


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda x: x.pop(f"{FIRST}B.weight"), r"lacks '.*q_proj.lora_B.weight', the other matrix"),
        (lambda x: x.update(extra=x[f"{FIRST}A.weight"]), "holds 'extra', which is not a matrix"),
        (
            lambda x: x.update({f"{FIRST}B.weight": x[f"{FIRST}B.weight"][:31]}),
            r"safetensors: .*lora_B.weight has the shape \(31, 4\), but must have \(32, 4\) for "
            r"the rank 4 of adapter_config.json and .*layers.0.self_attn.q_proj.weight \(32, 32\)",
        ),
        (lambda x: x.clear(), "holds no matrices"),
        (
            lambda x: x.update({"base_model.model.model.norm.weight": np.ones(32, np.float32)}),
            r"array base_model.model.model.norm.weight \(32,\), which differs from model.norm",
        ),
    ],
)
def test_matrices_that_do_not_fit(change, said, folders, tmp_path):
    folder = changed(lora_folder(tmp_path, "qwen2_lora"), change)
    with pytest.raises(UserError, match=said):
        md4_jax.load(folders["qwen2"], adapters=folder)


def test_an_adapter_of_another_base_is_refused(folders, tmp_path):
    folder = lora_folder(tmp_path, "qwen2_lora")
    said = "has no matrix 'model.layers.0.self_attn.q_proj.weight': .* names tiny/qwen2"
    with pytest.raises(UserError, match=said):
        md4_jax.load(folders["llada"], adapters=folder)
    with pytest.raises(UserError, match="holds only an adapter of tiny/qwen2: load tiny/qwen2"):
        md4_jax.load(folder)
    saved = md4_jax.load(folders["qwen2"]).save(tmp_path / "saved")
    with pytest.raises(UserError, match="can only be added to a published model, but .*saved was"):
        md4_jax.load(saved, adapters=folder)


@pytest.mark.parametrize(
    "name, rank, said",
    [
        ("qwen2_lora", 3, "q_proj with the rank 4, but network.lora_rank=3"),
        ("llama_lora", 3, "adapts lm_head, which is not a layer of attention or feed-forward"),
    ],
)
def test_what_cannot_stand_beside_the_matrices(name, rank, said, folders, tmp_path):
    with pytest.raises(UserError, match=said):
        md4_jax.load(
            folders[BASES[name]],
            config={"network.lora_rank": rank},
            adapters=lora_folder(tmp_path, name),
        )


def test_an_adapter_of_a_head_that_is_not_there(folders, tmp_path):
    """The head of a tied model is its table, and another matrix in the file is not read."""
    base = peer_folder(tmp_path, "qwen2")
    held = load_file(base / "model.safetensors")
    save_file(
        held | {"lm_head.weight": held["model.embed_tokens.weight"]}, base / "model.safetensors"
    )
    folder = own_lora(tmp_path / "lora", base, {"lm_head": 2})
    with pytest.raises(UserError, match="has an adapter of lm_head, but no matrix"):
        md4_jax.load(base, adapters=folder)


def test_files_that_are_missing(folders, tmp_path):
    folder = lora_folder(tmp_path, "qwen2_lora")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match=r"adapter_model.bin is a pickle.*'adapter_model.safetens"):
        md4_jax.load(folders["qwen2"], adapters=folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match="adapter_config.json is not readable JSON"):
        md4_jax.load(folders["qwen2"], adapters=folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(UserError, match="holds no adapter_config.json"):
        md4_jax.load(folders["qwen2"], adapters=folder)
    lora_folder(folder, "llama_lora")  # as PEFT writes an adapter with a name
    with pytest.raises(UserError, match=f"in PEFT's layout: give {folder / 'llama_lora'}$"):
        md4_jax.load(folders["qwen2"], adapters=folder)
    with pytest.raises(UserError, match="there is no folder"):
        md4_jax.load(folders["qwen2"], adapters=tmp_path / "nowhere")


@pytest.mark.parametrize(
    "told, module, expected",
    [
        (dict(target_modules=["q_proj"]), "model.layers.0.self_attn.q_proj", True),
        (dict(target_modules=["proj"]), "model.layers.0.self_attn.q_proj", False),
        (dict(target_modules="q_proj"), "model.layers.0.self_attn.q_proj", False),
        (dict(target_modules=".*q_proj"), "model.layers.0.self_attn.q_proj", True),
        (dict(target_modules="All-Linear"), "lm_head", True),
        (dict(target_modules=["up"], exclude_modules=["0.up"]), "layers.0.up", False),
        (dict(target_modules=["up"], exclude_modules=".*1.*"), "layers.0.up", True),
        (dict(target_modules=["up"], layers_to_transform=3), "model.layers.3.up", True),
        (dict(target_modules=["up"], layers_to_transform=[1, 2]), "model.layers.3.up", False),
        (
            dict(target_modules=["up"], layers_to_transform=[1], layers_pattern="h"),
            "model.layers.0.h.1.up",
            True,
        ),
        (
            dict(target_modules=["up"], layers_to_transform=[1], layers_pattern=["x"]),
            "model.layers.1.up",
            False,
        ),
    ],
)
def test_which_modules_are_meant(told, module, expected):
    assert Lora(Place("file"), told).adapts(module) == expected


def test_patterns_are_those_of_the_end_of_a_name():
    told = dict(
        r=4, lora_alpha=8, rank_pattern={"q_proj": 2, "layers.1.*": 16}, use_rslora=True,
        alpha_pattern={"up": 1},
    )  # fmt: skip
    lora = Lora(Place("file"), told)
    assert lora.rank("layers.1.q_proj") == 2 and lora.rank("layers.1.up") == 16
    assert lora.rank("layers.1.xq_proj") == 16 and lora.rank("layers.0.xq_proj") == 4
    assert lora.scale("layers.0.k") == 8 / 2 and lora.scale("layers.1.up") == 1 / 4
    assert not matches(["q_proj"], "xq_proj") and matches(["q_proj"], "q_proj")


@pytest.mark.slow
def test_the_command_line_takes_an_adapter(folders, tmp_path, capsys):
    run, folder = tmp_path / "run", lora_folder(tmp_path, "qwen2_lora")
    words = ["--mode", "import", "--from", str(folders["qwen2"]), "--workdir", str(run)]
    keys = ["--config.network.lora_rank=4"]
    assert main.run([*words, "--adapters", str(folder), *keys]) == 0
    model = md4_jax.load(run)
    check(model, "qwen2_lora")
    stored = json.loads((run / "config.json").read_text())["config"]
    assert stored["train"]["trainable"] == "(attention/query|attention/value)/lora"
    with pytest.raises(UserError, match="--adapters=x is for --mode import and --mode serve"):
        main.run(["--workdir", str(run), "--adapters", "x"])
