"""Models in the layout of transformers' Llama and Qwen, and diffusion models made of them."""

import json

import numpy as np
import pytest
from peer_folders import DECODERS, answers, peer_folder, trained_on
from safetensors.numpy import load_file, save_file

import md4_jax
from md4_jax.protocols import UserError, batch_of

CLOSE = 3e-5  # of logits up to 12
ENTRIES = 124
ADAPTED = {
    "objective.name": "md4", "network.causal": False, "network.shifted": True,
    "sample.name": "ancestral", "evals.test.draws": 1,
}  # fmt: skip
BLOCKS = ADAPTED | {"objective.name": "block", "objective.block": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    directory = tmp_path_factory.mktemp("decoders")
    return {name: peer_folder(directory, name) for name in DECODERS}


def begun(name: str) -> np.ndarray:
    """The texts after the mask, as the autoregressive objective shows them to the network."""
    clean = np.asarray(answers(name)["clean"])
    return np.concatenate([np.full((len(clean), 1), ENTRIES), clean], axis=1)


def test_dream_is_a_diffusion_model(folders):
    model, told = md4_jax.load(folders["dream"]), answers("dream")
    assert model.domain.vocab_size == 123 == model.experiment.process.mask_id
    found = model.logits(told["z"])
    np.testing.assert_allclose(found, np.asarray(told["outputs"])[..., :123], atol=CLOSE)
    assert model.config["objective"]["name"] == "md4" and model.config["data"]["length"] == 64
    assert np.isfinite(model.score("abab", draws=2).nats).all()
    assert len(model.sample(num=1, steps=2, length=4).tokens[0]) == 4


def test_a_qwen2_whose_tokenizer_has_a_mask_is_open_dllm_s(tmp_path):
    """Its network is that of Dream, and its config.json that of a Qwen2."""
    changes = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "mask_token_id": None}
    folder, told = peer_folder(tmp_path, "dream", **changes), answers("dream")
    (folder / "tokenizer_config.json").write_text('{"mask_token": "<|special_3|>"}')
    model = md4_jax.load(folder)
    assert model.config["objective"]["name"] == "md4" and not model.config["network"]["causal"]
    found = model.logits(told["z"])
    np.testing.assert_allclose(found, np.asarray(told["outputs"])[..., :123], atol=CLOSE)
    exported = model.export(tmp_path / "exported")
    config = json.loads((exported / "config.json").read_text())
    assert config["model_type"] == "qwen2" and config["architectures"] == ["Qwen2ForCausalLM"]
    again = md4_jax.load(exported)
    np.testing.assert_array_equal(again.logits(told["z"]), found)


@pytest.mark.parametrize("told", [{}, {"mask_token_id": None}])
def test_rnd1_is_a_qwen3_with_experts_that_sees_both_sides(told, tmp_path):
    folder = peer_folder(tmp_path, "rnd1", **told)
    if told:  # the mask that its code takes then, which is no row of the tiny one
        with pytest.raises(UserError, match="the mask is 151669"):
            md4_jax.load(folder)
        return
    model, expected = md4_jax.load(folder), answers("rnd1")
    found = model.logits(expected["z"])
    np.testing.assert_allclose(found, np.asarray(expected["outputs"])[..., :123], atol=CLOSE)
    assert model.config["network"]["shifted"] and model.config["objective"]["name"] == "md4"
    exported = model.export(tmp_path / "exported")
    assert json.loads((exported / "config.json").read_text())["model_type"] == "rnd1"
    held = load_file(folder / "model.safetensors")
    kept = load_file(exported / "model.safetensors")
    # Rows of padding behind the 124 entries, and the head's row of the mask, are written as 0.
    for name in held:
        rows = {"model.embed_tokens.weight": 124, "lm_head.weight": 123}.get(name)
        assert np.array_equal(held[name][:rows], kept[name][:rows])


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "qwen3moe"])
@pytest.mark.cases(1)
def test_causal_models_are_autoregressive_baselines(name, folders):
    """The start of a text is the mask, whose vector is that of the entry that begins texts."""
    model, told = md4_jax.load(folders[name]), answers(name)
    assert model.domain.vocab_size == ENTRIES
    expected = np.asarray(told["outputs"])[..., :ENTRIES]
    found = model.logits(begun(name)[:, :-1])
    np.testing.assert_allclose(found, expected, atol=CLOSE)
    clean = np.asarray(told["clean"])
    exact = expected - np.log(np.sum(np.exp(expected), axis=-1, keepdims=True))
    nats = -np.sum(np.take_along_axis(exact, clean[..., None], axis=2)[..., 0], axis=1)
    own = model.experiment
    denoiser = own.network.denoiser(model.params)
    scored, _ = own.objective(denoiser, own.process, batch_of(clean), None, None)
    np.testing.assert_allclose(scored, nats, rtol=1e-5)
    assert np.isfinite(model.score("abab", draws=1).nats).all()
    assert model.sample(num=1, length=4).tokens.shape == (1, 4)


def test_the_end_of_a_text_is_what_config_json_says(folders):
    model = md4_jax.load(folders["llama"])
    assert model.config["tokenizer"]["eot"] == "<|special_0|>"  # the entry 120
    assert model.domain.tokenizer.eot_id == 120


def test_a_causal_model_becomes_a_diffusion_model(folders):
    """With both sides in sight, and with the logits of the position before."""
    told = answers("qwen3")
    model = md4_jax.load(folders["qwen3"], config=ADAPTED)
    z = begun("qwen3")[:1]
    expected = np.asarray(told["bidirectional"])[:, :, :ENTRIES]
    moved = np.concatenate([expected[:, :1], expected[:, :-1]], axis=1)
    np.testing.assert_allclose(model.logits(z), moved, atol=CLOSE)
    plain = md4_jax.load(folders["qwen3"], config=ADAPTED | {"network.shifted": False})
    np.testing.assert_allclose(plain.logits(z), expected, atol=CLOSE)


def test_a_model_of_dllm_sees_both_sides_without_a_shift(tmp_path):
    folder = peer_folder(tmp_path, "qwen3", model_type="a2d-qwen3", mask_token_id=123)
    found = md4_jax.load(folder)
    assert not found.config["network"]["shifted"] and not found.config["network"]["causal"]
    told = answers("qwen3")
    # Its mask is the entry 123, and text that begins with the entry 120 is a text.
    z = np.concatenate([[120], np.asarray(told["clean"])[0]])
    expected = np.asarray(told["bidirectional"])[0, :, :123]
    np.testing.assert_allclose(found.logits(z), expected, atol=CLOSE)


def test_the_mask_may_be_an_unused_entry(folders):
    """As with models that have one, by tokenizer.mask."""
    model = md4_jax.load(folders["qwen2"], config=ADAPTED | {"tokenizer.mask": 122})
    assert model.domain.vocab_size == 123 and model.experiment.process.mask_id == 123
    with pytest.raises(UserError, match="which is the mask of the model"):
        model.score("ab<|special_2|>", draws=1)


@pytest.mark.parametrize(
    "name, changes, said",
    [
        ("qwen2", {"rope_scaling": {"type": "linear"}}, "scales rotary positions by 'linear'"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu' is supported"),
        ("llama", {"sliding_window": 8, "use_sliding_window": None}, "sliding_window=8"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.*window"),
        ("llama", {"model_type": "mistral", "sliding_window": 4096}, "sliding_window=4096"),
        ("qwen3moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2; only 1 is supported"),
        ("qwen3moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]; only \[\] is supported"),
        ("qwen3moe", {"moe_intermediate_size": 8}, "says moe_intermediate_size=8, but its arrays"),
        ("qwen3moe", {"num_experts": 4}, "says num_experts=4, but its arrays have 8"),
        ("llama", {"hidden_size": 64}, "says hidden_size=64, but its arrays have 32"),
        ("llama", {"bos_token_id": None, "eos_token_id": None}, "config.json lacks bos_token_id"),
        ("llama", {"bos_token_id": 125}, "with the token 125, but the tokenizer has only 124"),
        ("dream", {"mask_token_id": 300}, "the mask is 300 .*, but must be below .* of 128"),
        ("llama", {"model_type": "gpt_neox", "architectures": []}, "an unsupported architecture"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(name, changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        md4_jax.load(peer_folder(tmp_path, name, **changes))


def test_a_tied_head_may_be_stored_too(tmp_path):
    """Whatever else stands under its name."""
    folder = peer_folder(tmp_path, "qwen2")
    arrays = load_file(folder / "model.safetensors")
    arrays["lm_head.weight"] = np.zeros((128, 32), np.float32)
    save_file(arrays, folder / "model.safetensors")
    expected = np.asarray(answers("qwen2")["outputs"])[..., :ENTRIES]
    found = md4_jax.load(folder).logits(begun("qwen2")[:, :-1])
    np.testing.assert_allclose(found, expected, atol=CLOSE)


def test_scaled_positions_of_llama_3(tmp_path):
    """Also under the name that transformers 5 gives them, with the base."""
    scaling = dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32,
    )  # fmt: skip
    old = peer_folder(tmp_path / "old", "llama", rope_scaling=scaling, rope_theta=1e4)
    changes = {"rope_parameters": scaling | {"rope_theta": 1e4}, "rope_theta": None}
    new = peer_folder(tmp_path / "new", "llama", **changes)
    models = [md4_jax.load(folder) for folder in (old, new)]
    assert all(
        tuple(m.config["network"]["rotary_scaling"]) == (8.0, 1.0, 4.0, 32.0) for m in models
    )
    z = begun("llama")[:, :-1]
    logits = [model.logits(z) for model in models]
    assert np.array_equal(*logits)
    assert np.abs(logits[0] - np.asarray(answers("llama")["outputs"])[..., :ENTRIES]).max() > 0.1


def test_biases_that_are_not_known_are_refused(tmp_path):
    folder = peer_folder(tmp_path, "llama")
    arrays = load_file(folder / "model.safetensors")
    arrays["model.layers.0.self_attn.o_proj.bias"] = np.zeros(32, np.float32)
    save_file(arrays, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"biases 'model.layers.0.self_attn.o_proj.bias'"):
        md4_jax.load(folder)


def test_ids_of_several_ends(tmp_path):
    """Models for chats name more than one entry that ends a text."""
    folder = peer_folder(tmp_path, "qwen2", eos_token_id=[121, 120], bos_token_id=None)
    model = md4_jax.load(folder)
    assert model.domain.tokenizer.eot_id == 121


@pytest.mark.campaign
@pytest.mark.parametrize(
    "name, keys",
    [
        ("dream", {}),
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in (
                ("qwen2", BLOCKS), ("qwen2", {}), ("llama", BLOCKS), ("qwen3", ADAPTED),
                ("sdar", {}),
                ("qwen3moe", BLOCKS | {"network.shifted": False, "network.balance": 0.01}),
            )
        ),
    ],
)  # fmt: skip
def test_training_goes_on(name, keys, folders, tmp_path):
    run = trained_on(folders[name], tmp_path, {"network.scan_blocks": False, **keys})
    model = md4_jax.load(run)
    assert model.step == 2
    if name == "qwen3moe":
        rows = (run / "metrics.jsonl").read_text().splitlines()
        assert all(1.0 <= json.loads(x)["expert_load"] <= 4.0 for x in rows if "expert_" in x)
        assert any("expert_load_max" in x for x in rows)
        told = json.loads((model.export(tmp_path / "exported") / "config.json").read_text())
        assert told["model_type"] == "sdar_moe" and told["block_size"] == 4
