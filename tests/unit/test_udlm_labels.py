"""UDLM with labels: logits and guided steps are those of its authors' code."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import TOLD, answers, peer_folder, tokenizer
from safetensors.numpy import load_file, save_file

import md4_jax
from md4_jax import main
from md4_jax.protocols import UserError
from md4_jax.samplers.guidance import guided

CLOSE = 1e-5
NAME = "udlm_labels"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return md4_jax.load(peer_folder(tmp_path_factory.mktemp("peers"), NAME))


def times(sigma) -> np.ndarray:
    """t of exp(-sigma) = 1 - (1 - eps) t."""
    return -np.expm1(-np.asarray(sigma)) / (1.0 - 1e-3)


def test_logits_with_each_label_and_without(model):
    told = answers(NAME)
    t, label = times(told["sigma"]), np.asarray(told["label"])
    for context, outputs in (({"label": label}, "outputs"), ({}, "outputs_no_label")):
        found = model.logits(told["z"], t, context)
        np.testing.assert_allclose(found, np.asarray(told[outputs]), atol=CLOSE)
    difference = np.asarray(told["outputs"]) - np.asarray(told["outputs_no_label"])
    assert np.abs(difference).max() > 0.5
    assert model.domain.labels == (0, 1, 2) and model.domain.vocab_size == 12


def test_a_model_that_is_told_no_time_still_has_labels(tmp_path):
    model, told = md4_jax.load(peer_folder(tmp_path, NAME, time_conditioning=False)), answers(NAME)
    found = model.logits(told["z"], 0.5, {"label": np.asarray(told["label"])})
    np.testing.assert_allclose(found, np.asarray(told["outputs_sigma_zero"]), atol=CLOSE)


def test_an_mdlm_of_the_same_network_has_labels_too(tmp_path):
    """The last row is the mask, and no symbol."""
    names = {"model_type": "mdlm", "architectures": ["MDLM"], "time_conditioning": False}
    folder, told = peer_folder(tmp_path, NAME, **names), answers(NAME)
    tokenizer(11).save(str(folder / "tokenizer.json"))
    model = md4_jax.load(folder)
    assert model.experiment.process.mask_id == 11 and model.domain.labels == (0, 1, 2)
    found = model.logits(told["z"], 0.5, {"label": np.asarray(told["label"])})
    expected = np.asarray(told["outputs_sigma_zero"])[..., :11]
    np.testing.assert_allclose(found, expected, atol=CLOSE)


@pytest.mark.parametrize("told", answers(NAME)["steps"], ids=lambda told: str(told["gamma"]))
def test_a_guided_step_is_theirs(told, model):
    """p(z_s | z_t, y)^w p(z_s | z_t)^(1 - w), as `_cfg_denoise` of their diffusion.py has it."""
    known, z = answers(NAME), jnp.asarray(answers(NAME)["z"])
    t, s = (jnp.asarray(told[name], jnp.float32) for name in ("t", "s"))
    label = {"label": jnp.asarray(known["label"])}
    denoiser, process = guided(model.experiment.network, model.params, label, told["gamma"])
    step = jax.jit(lambda z: jax.nn.softmax(process.reverse_logits(denoiser(z, t), z, s, t)))
    np.testing.assert_allclose(step(z), np.asarray(told["q"]), atol=CLOSE)


def test_it_is_scored_and_sampled_with_a_label(model):
    assert np.isfinite(model.score("abab", draws=2, label=2).nats).all()
    assert model.sample(num=1, steps=2, label=2, guidance=3.0).tokens.shape == (1, 16)
    with pytest.raises(UserError, match="sample.label=3 must be less than network.classes=3"):
        model.sample(num=1, label=3)


@pytest.mark.parametrize(
    "name, changes, said",
    [
        (NAME, {"cfg": False}, "says cfg=False, but its arrays have vectors for 3 classes"),
        ("udlm", {"cfg": True}, "says cfg=True, but its arrays have vectors for 0 classes"),
        (NAME, {"cfg_num_classes": 5}, "says cfg_num_classes=5, but its arrays have 3"),
    ],
)
def test_config_and_arrays_must_agree_on_labels(name, changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        md4_jax.load(peer_folder(tmp_path, name, **changes))


def test_a_model_of_molecules_takes_their_vocabulary(tmp_path, monkeypatch):
    """If its sizes are those of the published one, and its folder has none."""
    told = dict(TOLD["udlm"], vocab_size=35, model_length=32)
    folder = peer_folder(tmp_path, "udlm", **told)
    (folder / "tokenizer.json").unlink()
    arrays = load_file(folder / "model.safetensors")
    for name in ("vocab_embed.embedding", "output_layer.linear.weight", "output_layer.linear.bias"):
        rows = arrays[f"backbone.{name}"]
        arrays[f"backbone.{name}"] = np.concatenate([rows, rows, rows])[:35]
    save_file(arrays, folder / "model.safetensors")
    monkeypatch.setenv("MD4_JAX_CACHE", str(tmp_path / "cache"))
    own = tmp_path / "cache" / "tokenizers" / "yairschiff" / "qm9-tokenizer"
    own.mkdir(parents=True)
    (own / "vocab.json").write_text(json.dumps(answers("smiles")["entries"]))
    (own / "tokenizer_config.json").write_text('{"tokenizer_class": "QM9Tokenizer"}')
    model = md4_jax.load(folder)
    assert model.domain.encode("<bos>CCO<eos>").tolist() == [0, 15, 15, 18, 1]
    assert (model.domain.vocab_size, model.domain.eot_id, model.length) == (35, 1, 32)
    exported = md4_jax.load(model.export(tmp_path / "exported"))
    assert exported.domain.encode("C[NH+]1CC1").tolist() == [15, 23, 9, 15, 15, 9]
    assert exported.domain.eot_id == 1


@pytest.mark.slow
@pytest.mark.campaign
def test_training_goes_on_with_labels(model, tmp_path):
    texts, run = tmp_path / "texts.jsonl", tmp_path / "run"
    lines = [json.dumps({"text": "abcdef"[k % 3 :], "kind": k % 3}) for k in range(60)]
    texts.write_text("\n".join(lines) + "\n")
    keys = {
        "train.num_steps": 2, "train.batch_size": 2, "optim.warmup_steps": 0, "log.every": 1,
        "evals.validation.every": 0, "evals.test.final": False, "evals.samples.final": False,
        "data.path": texts, "data.label_key": "kind", "data.text_key": "text",
    }  # fmt: skip
    flags = ["--mode", "import", "--from", model.origin, "--workdir", str(run)]
    assert main.run([*flags, *(f"--config.{key}={value}" for key, value in keys.items())]) == 0
    assert main.run(["--workdir", str(run)]) == 0
    found = md4_jax.load(run)
    assert found.step == 2 and found.domain.labels == (0, 1, 2)
    assert np.any(found.params["network"]["label_table"] != model.params["network"]["label_table"])
