"""LLaDA-MoE and LLaDA2: what their authors' code answers, and what is not known of others."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import answers, peer_folder, trained_on
from safetensors.numpy import load_file, save_file

import md4_jax
from md4_jax.protocols import UserError

CLOSE = 1e-5
MASK = 123
BLOCK = {"objective.block": 4}  # of the tiny instance; that of the published ones is 32


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    directory = tmp_path_factory.mktemp("experts")
    return {name: peer_folder(directory, name) for name in ("lladamoe", "llada2")}


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_llada_moe_answers_what_its_code_answers(scan, folders):
    model = md4_jax.load(folders["lladamoe"], {"network.scan_blocks": scan})
    told = answers("lladamoe")
    network = model.config["network"]
    assert (network["experts"], network["experts_per_token"], network["expert_hidden"]) == (
        4,
        2,
        24,
    )
    assert model.domain.vocab_size == MASK == model.experiment.process.mask_id
    expected = np.asarray(told["outputs"])[..., :MASK]
    np.testing.assert_allclose(model.logits(told["z"]), expected, atol=CLOSE)
    assert model.config["objective"]["name"] == "md4" and model.config["data"]["length"] == 64
    assert np.isfinite(model.score("abab", draws=2).nats).all()
    assert len(model.sample(num=1, steps=2, length=4).tokens[0]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_llada2_answers_what_its_code_answers(scan, folders):
    """A noisy block after clean ones, in one pass over both halves and with a cache of these."""
    model = md4_jax.load(folders["llada2"], BLOCK | {"network.scan_blocks": scan})
    told = answers("llada2")
    z, clean = (np.asarray(told[name]) for name in ("z", "clean"))
    network, t = model.config["network"], jnp.zeros((3, 4))
    assert network["dense_layers"] == 1 and network["rotary_part"] == 0.5
    expected = np.asarray(told["outputs"])[..., :MASK]
    denoiser = model.experiment.network.denoiser(model.params)
    both = denoiser.blocks.features(z, t, clean, 4)
    np.testing.assert_allclose(denoiser.unembed(both), expected, atol=CLOSE)
    cache = denoiser.blocks.empty_cache(3, 16)
    step = jax.jit(denoiser.blocks.append_block)
    for begin in range(0, 16, 4):
        part = slice(begin, begin + 4)
        h, _ = step(z[:, part], t[:, 0], cache)
        np.testing.assert_allclose(denoiser.unembed(h), expected[:, part], atol=CLOSE)
        _, cache = step(clean[:, part], t[:, 0], cache)


def test_llada22_chooses_from_experts_that_a_block_shares(tmp_path, capsys):
    """By the network of LLaDA2, whose groups its config.json has too."""
    told = answers("llada22")
    folder = peer_folder(tmp_path, "llada2", **told["config"])
    model = md4_jax.load(folder)
    assert "does not know" not in capsys.readouterr().err
    network, t = model.config["network"], jnp.zeros((2, 4))
    assert (network["router_block"], network["router_block_taken"]) == (4, 3)
    assert model.config["objective"] == {"name": "block", "block": 4}
    z, clean = (np.asarray(told[name]) for name in ("z", "clean"))
    expected = np.asarray(told["outputs"])[..., :MASK]
    denoiser = model.experiment.network.denoiser(model.params)
    found = denoiser.unembed(denoiser.blocks.features(z, t, clean, 4))
    np.testing.assert_allclose(found, expected, atol=CLOSE)
    cache = denoiser.blocks.empty_cache(2, 16)
    _, cache = denoiser.blocks.append_block(clean[:, :4], t[:, 0], cache)
    h, _ = denoiser.blocks.append_block(z[:, 4:8], t[:, 0], cache)
    np.testing.assert_allclose(denoiser.unembed(h), expected[:, 4:8], atol=CLOSE)
    exported = json.loads((model.export(tmp_path / "exported") / "config.json").read_text())
    assert exported == json.loads((folder / "config.json").read_text())


@pytest.mark.slow
def test_llada2_is_a_block_diffusion_model(folders):
    plain = md4_jax.load(folders["llada2"])
    assert plain.config["objective"] == {"name": "block", "block": 32}
    model = md4_jax.load(folders["llada2"], BLOCK)
    assert not model.config["network"]["shifted"]
    assert np.isfinite(model.score("abcd", draws=2).nats).all()
    assert model.sample(num=1, steps=2, length=8).tokens.shape == (1, 8)


@pytest.mark.parametrize("name, null", [("lladamoe", False), ("lladamoe", True), ("llada2", True)])
def test_the_mask_is_that_of_the_published_models_or_must_be_named(
    name, null, tmp_path, monkeypatch
):
    unnamed = peer_folder(tmp_path, name, mask_token_id=None)
    told = json.loads((unnamed / "config.json").read_text())
    if not null:
        del told["mask_token_id"]
    (unnamed / "config.json").write_text(json.dumps(told))
    with pytest.raises(UserError, match="config.json lacks mask_token_id"):
        md4_jax.load(unnamed)
    found = md4_jax.load(unnamed, {"tokenizer.mask": MASK})
    assert found.domain.vocab_size == MASK
    monkeypatch.setattr("md4_jax.model.experts.ROWS", 128)
    monkeypatch.setattr("md4_jax.model.experts.MASK", MASK)
    assert md4_jax.load(unnamed).domain.vocab_size == MASK


@pytest.mark.parametrize(
    "name, changes, said",
    [
        ("lladamoe", {"norm_topk_prob": True}, "norm_topk_prob=True; only False is supported"),
        ("lladamoe", {"moe_router_enable_expert_bias": True}, "enable_expert_bias=True; only"),
        ("lladamoe", {"rope_scaling": {"type": "yarn"}}, "only None is supported"),
        ("lladamoe", {"num_experts": 8}, "says num_experts=8, but its arrays have 4"),
        ("lladamoe", {"expert_intermediate_size": 8}, "says expert_intermediate_size=8"),
        ("llada2", {"score_function": "softmax"}, "score_function='softmax'; only 'sigmoid'"),
        ("llada2", {"first_k_dense_replace": 0}, "says first_k_dense_replace=0, but its arrays"),
        ("llada2", {"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu' is supported"),
        ("llada2", {"n_group": 3}, "experts=8 must be a multiple of network.router_groups=3"),
    ],
)
def test_what_is_not_known_is_refused(name, changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        md4_jax.load(peer_folder(tmp_path, name, **changes))


def test_arrays_that_are_not_known_are_refused(tmp_path):
    for name, more, said in (
        ("llada2", "model.layers.0.attention.dense.bias", "biases 'model.layers.0.attention.dense"),
        ("lladamoe", "model.layers.1.mlp.gate_proj.weight", r"the layers \[1\] have no experts"),
    ):
        folder = peer_folder(tmp_path, name)
        arrays = load_file(folder / "model.safetensors")
        save_file(arrays | {more: np.zeros((32, 32), np.float32)}, folder / "model.safetensors")
        with pytest.raises(UserError, match=said):
            md4_jax.load(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, keys",
    [
        pytest.param("lladamoe", {"network.balance": 0.01}, marks=pytest.mark.campaign),
        pytest.param("llada2", BLOCK, marks=pytest.mark.campaign),
    ],
)
def test_training_goes_on(name, keys, folders, tmp_path):
    model = md4_jax.load(trained_on(folders[name], tmp_path, keys))
    changed = model.params["network"]["blocks"]["feed_forward"]["experts_up"]["kernel"]
    begun = md4_jax.load(folders[name], keys).params["network"]["blocks"]["feed_forward"]
    assert model.step == 2 and np.any(changed != begun["experts_up"]["kernel"])
    again = md4_jax.load(model.export(tmp_path / "exported"), keys)
    z = np.asarray(answers(name)["z"])
    np.testing.assert_allclose(again.logits(z), model.logits(z), atol=1e-6)
