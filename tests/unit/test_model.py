"""Models of other projects and of this one, as `md4_jax.load` returns them."""

import ast
import copy
import errno
import json
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import jax
import numpy as np
import playgrounds
import pytest
from peer_folders import TOLD, answers, peer_folder, tokenizer
from safetensors.numpy import load_file, save_file
from several_devices import with_devices

import md4_jax
from md4_jax.config import build, files
from md4_jax.data.domains import TextDomain
from md4_jax.data.tokenizers import Characters
from md4_jax.model import hub, importing
from md4_jax.model.model import Model
from md4_jax.protocols import UserError
from md4_jax.runtime import tensors
from md4_jax.runtime.paths import Place
from md4_jax.training.loop import fresh_state

ROOT = Path(__file__).parents[2]
CLOSE = 1e-4  # times are computed from sigma
TOKEN = np.arange(16) % 11


def time_of(model, sigma) -> np.ndarray:
    """t with this sigma."""
    noise = -np.expm1(-np.asarray(sigma, np.float64))
    return np.asarray(model.experiment.process.schedule.inverse(noise))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: folder} of all instances."""
    directory = tmp_path_factory.mktemp("peers")
    return {name: peer_folder(directory, name) for name in TOLD}


@pytest.fixture(scope="module")
def mdlm(folders):
    return md4_jax.load(folders["mdlm"])


@pytest.fixture(scope="module")
def images():
    return playgrounds.of_images()


def test_importing_the_package_does_not_import_jax():
    script = "import sys, md4_jax; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.parametrize("name", [name for name in TOLD if name.startswith("md4")])
def test_models_of_md4(name, folders):
    told = answers(name)
    found = md4_jax.load(folders[name]).logits(told["z"], 0.0 if told["t"] is None else told["t"])
    np.testing.assert_allclose(found, np.asarray(told["outputs"]), atol=1e-5)


@pytest.mark.parametrize("timed", [False, True])
def test_mdlm_is_told_the_noise_only_if_its_config_says_so(timed, tmp_path):
    told = answers("mdlm")
    model = md4_jax.load(peer_folder(tmp_path, "mdlm", time_conditioning=timed))
    found = model.logits(told["z"], time_of(model, told["sigma"]))
    expected = told["outputs" if timed else "outputs_sigma_zero"]
    np.testing.assert_allclose(found, np.asarray(expected)[..., :11], atol=CLOSE)


def test_a_key_of_one_model_is_none_of_the_next(folders):
    changed = md4_jax.load(folders["mdlm"], {"process.schedule.eps": 0.25})
    assert changed.config["process"]["schedule"]["eps"] == 0.25
    for name in ("mdlm", "duo"):
        assert md4_jax.load(folders[name]).config["process"]["schedule"]["eps"] == 1e-3


def test_rotary_positions_have_the_base_of_the_stored_frequencies(tmp_path):
    """Which its authors' code uses, whatever config.json says; also once it is exported."""
    folder = peer_folder(tmp_path, "mdlm")
    plain = md4_jax.load(folder, {"network.rotary_base": 500.0}).logits(TOKEN)
    held, name = load_file(folder / "model.safetensors"), "backbone.rotary_emb.inv_freq"
    assert np.abs(md4_jax.load(folder).logits(TOKEN) - plain).max() > 1e-3
    held[name] = (500.0 ** -(np.arange(8) / 8)).astype(np.float32)
    save_file(held, folder / "model.safetensors")
    model = md4_jax.load(folder)
    model.export(tmp_path / "out")
    for found in (model, md4_jax.load(tmp_path / "out")):
        assert found.config["network"]["rotary_base"] == 500.0
        np.testing.assert_array_equal(found.logits(TOKEN), plain)
    held[name][3] *= 1.01
    save_file(held, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"inv_freq' are not base\^\(-i / 8\) of any base"):
        md4_jax.load(folder)


@pytest.mark.parametrize("timed", [None, False])
def test_duo(timed, tmp_path):
    changed = {} if timed is None else {"time_conditioning": timed}
    model, told = md4_jax.load(peer_folder(tmp_path, "duo", **changed)), answers("duo")
    found = model.logits(told["z"], time_of(model, told["sigma"]))
    expected = told["outputs_sigma_zero" if timed is False else "outputs"]
    np.testing.assert_allclose(found, np.asarray(expected), atol=CLOSE)
    # The symbol that Duo has for a mask, and never uses, has no text.
    assert model.domain.vocab_size == 12 and model.domain.decode([0, 11, 1]) == "ab"


@pytest.mark.quick(1)
@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.cases(1)
def test_udlm(timed, tmp_path):
    model = md4_jax.load(peer_folder(tmp_path, "udlm", time_conditioning=timed))
    told = answers("udlm")
    found = model.logits(told["z"], time_of(model, told["sigma"]))
    expected = np.asarray(told["outputs" if timed else "outputs_sigma_zero"])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # All rows are symbols, the entry that BERT has for a mask among them.
    assert model.domain.vocab_size == 12 and model.config["objective"]["name"] == "uniform_elbo"
    assert np.isfinite(model.score("abab", draws=2).nats).all()
    assert model.sample(num=np.int32(1), steps=2).tokens.shape == (1, 16)


@pytest.mark.campaign
def test_blocks_of_uniform_noise_end_with_a_token_that_stops_them(tmp_path):
    """Not with the block that has it, nor with one of the prompt; and they have a bound."""
    folder = peer_folder(tmp_path, "udlm", time_conditioning=True)
    model = md4_jax.load(folder, config={"objective.block": 4})
    free, ended = (model.sample(8, "a", steps=4, **more) for more in ({}, {"stop": "a b"}))
    for text, whole in zip(ended.texts, free.texts, strict=True):
        assert text == re.match("a[^ab]*[ab]?", whole)[0]
    assert ended.lengths.tolist() == [len(text) for text in ended.texts]
    assert len(set(ended.lengths)) > 2
    whole = md4_jax.load(folder)
    nats = [one.score("abab" * 4, draws=2).nats for one in (model, whole)]
    assert np.isfinite(nats).all() and nats[0] != nats[1]


def test_bd3lm(folders):
    model, told = md4_jax.load(folders["bd3lm"]), answers("bd3lm")
    denoiser = model.experiment.network.denoiser(model.params)
    z, clean = np.asarray(told["z"]), np.asarray(told["clean"])
    h = jax.jit(lambda z, clean: denoiser.blocks.features(z, np.zeros((3, 4)), clean, 4))(z, clean)
    expected = np.asarray(told["outputs_sigma_zero"])[..., :11]
    np.testing.assert_allclose(denoiser.unembed(h), expected, atol=1e-5)
    assert model.experiment.objective.block == 4
    with pytest.raises(UserError, match=r"stride=6 leaves .* objective.block=4 must divide"):
        model.score("abab" * 8, stride=6)


def test_sedd_with_masks(folders):
    model, told = md4_jax.load(folders["sedd_absorb"]), answers("sedd_absorb")
    z, sigma = np.asarray(told["z"]), np.asarray(told["sigma"])
    found = model.logits(z, time_of(model, sigma)) - np.log(np.expm1(sigma) * 11)[:, None, None]
    expected = np.asarray(told["outputs"])[..., :11]
    np.testing.assert_allclose(found[z == 11], expected[z == 11], atol=CLOSE)
    assert model.experiment.objective.scaled


def test_sedd_with_uniform_noise(folders):
    model, told = md4_jax.load(folders["sedd_uniform"]), answers("sedd_uniform")
    z, t = np.asarray(told["z"]), time_of(model, told["sigma"])
    found = model.experiment.process.log_score(model.logits(z, t), z, t)
    np.testing.assert_allclose(found, np.asarray(told["outputs"]), atol=CLOSE)


def test_gidd(folders):
    model, told = md4_jax.load(folders["gidd"]), answers("gidd")
    found = model.logits(told["z"], told["t"])
    np.testing.assert_allclose(found, np.asarray(told["outputs"])[..., :11], atol=CLOSE)
    assert model.config["process"] == {"name": "hybrid", "uniform": 0.1, "gamma": 1.0}
    assert model.config["objective"] == {"name": "gidd", "weights": "dynamic"}
    assert model.domain.vocab_size == 11 and model.config["data"]["length"] == 16
    assert np.isfinite(model.score("abab").nats).all()


def test_radd(folders):
    model, told = md4_jax.load(folders["radd"]), answers("radd")
    expected = np.asarray(told["logits"])[..., :11]
    np.testing.assert_allclose(model.logits(told["z"]), expected, atol=1e-5)
    assert model.config["objective"]["name"] == "lambda_dce"


def test_llada(folders):
    model, told = md4_jax.load(folders["llada"]), answers("llada")
    expected = np.asarray(told["outputs"])[..., :125]
    np.testing.assert_allclose(model.logits(told["z"]), expected, atol=1e-5)
    with pytest.raises(UserError, match="not a symbol of the model"):
        model.score("ab<|special_0|>")


def test_sizes_and_heads_need_no_config(tmp_path):
    """Only what arrays cannot tell is asked for."""
    folder = peer_folder(tmp_path, "mdlm")
    (folder / "config.json").write_text(json.dumps({"model_type": "mdlm"}))
    found = md4_jax.load(folder).logits(answers("mdlm")["z"])
    expected = np.asarray(answers("mdlm")["outputs_sigma_zero"])[..., :11]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("gone", ["output_layer.linear.weight", "vocab_embed.embedding"])
@pytest.mark.cases(1)
def test_a_tied_head_is_stored_under_either_name(gone, tmp_path):
    folder = peer_folder(tmp_path, "bd3lm")
    arrays = load_file(folder / "model.safetensors")
    both = ("backbone.output_layer.linear.weight", "backbone.vocab_embed.embedding")
    arrays |= dict.fromkeys(both, arrays[both[1]])
    save_file(arrays, folder / "model.safetensors")
    untied = md4_jax.load(folder).logits(answers("bd3lm")["z"])
    del arrays[f"backbone.{gone}"]
    save_file(arrays, folder / "model.safetensors")
    model = md4_jax.load(folder)
    assert model.config["network"]["tied"]
    np.testing.assert_allclose(model.logits(answers("bd3lm")["z"]), untied, atol=1e-5)


def sharded(folder: Place, count: int = 3) -> None:
    """Splits a folder's file into several with an index."""
    arrays = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {}
    for number in range(count):
        part = dict(list(arrays.items())[number::count])
        file = f"model-{number + 1:05}-of-{count:05}.safetensors"
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


@pytest.mark.parametrize("name", ["mdlm", "bd3lm", "dream"])
@pytest.mark.cases(1)
def test_logits_of_one_position_are_those_of_all(name, tmp_path):
    model = md4_jax.load(peer_folder(tmp_path, name))
    z = np.array([[1, 2, 3, 4], [4, 3, 2, 1]])
    found, at = model.logits(z, 0.5), [0, 3]
    np.testing.assert_allclose(model.logits(z, 0.5, at=at), found[[0, 1], at], atol=1e-5)
    np.testing.assert_allclose(model.logits(z[0], 0.5, at=1), found[0, 1], atol=1e-5)


def test_sharded_files(tmp_path, mdlm):
    folder = peer_folder(tmp_path, "mdlm")
    sharded(folder)
    assert np.array_equal(md4_jax.load(folder).logits(TOKEN), mdlm.logits(TOKEN))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match="lacks model-00002-of-00003.safetensors, one of the 3"):
        md4_jax.load(folder)


def test_bfloat16_is_widened(tmp_path, mdlm):
    folder = peer_folder(tmp_path, "mdlm")
    arrays = load_file(folder / "model.safetensors")
    narrow = {name: array.astype(jax.numpy.bfloat16) for name, array in arrays.items()}
    (folder / "model.safetensors").unlink()
    tensors.write(Place(folder), narrow)
    found = md4_jax.load(folder)
    leaves = jax.tree.leaves(found.params)
    assert {leaf.dtype for leaf in leaves} == {np.dtype("float32")}
    np.testing.assert_allclose(found.logits(TOKEN), mdlm.logits(TOKEN), atol=0.2)


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def renamed(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_bigcode"}))


def other_tokenizer(folder):
    tokenizer(9).save(str(folder / "tokenizer.json"))


def other_size(folder):
    (folder / "config.json").write_text(json.dumps({**TOLD["mdlm"], "hidden_dim": 64}))


def wrong_shape(folder):
    arrays = load_file(folder / "model.safetensors")
    arrays["backbone.blocks.1.attn_out.weight"] = np.zeros((32, 16), np.float32)
    save_file(arrays, folder / "model.safetensors")


def array_gone(folder):
    arrays = load_file(folder / "model.safetensors")
    del arrays["backbone.blocks.1.attn_out.weight"]
    save_file(arrays, folder / "model.safetensors")


@pytest.mark.parametrize(
    "damage, said",
    [
        (cut, "model.safetensors is cut short: it has .* bytes of"),
        (
            pickled,
            "pytorch_model.bin is a pickle, which runs code when it is read: if you trust it",
        ),
        (
            renamed,
            "has an unsupported architecture .*gpt_bigcode.*Supported are mdlm, proseco, bd3lm",
        ),
        (
            other_tokenizer,
            "the tokenizer has 9 symbols, but the model in .* 11: give the tokenizer",
        ),
        (other_size, "config.json says hidden_dim=64, but its arrays have 32"),
        (wrong_shape, r"attention/out/kernel, layer 1 has the shape \(16, 32\), but .* \(32, 32\)"),
        (array_gone, "holds no array 'backbone.blocks.1.attn_out.weight'"),
        (shutil.rmtree, "there is no folder"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_errors_are_one_sentence(damage, said, tmp_path):
    folder = peer_folder(tmp_path, "mdlm")
    damage(folder)
    with pytest.raises(UserError, match=said) as caught:
        md4_jax.load(folder)
    assert "\n" not in str(caught.value)


def test_saved_and_loaded_it_draws_the_same_samples(mdlm, tmp_path):
    model = md4_jax.load(mdlm.save(tmp_path / "saved"))
    first, second = (m.sample(num=3, steps=4, seed=7) for m in (mdlm, model))
    assert first.texts == second.texts and np.array_equal(first.tokens, second.tokens)
    assert (tmp_path / "saved" / "README.md").read_text().startswith("---\nlibrary_name: md4_jax")
    assert np.array_equal(mdlm.logits(TOKEN), model.logits(TOKEN))


@pytest.mark.parametrize(
    "path, said",
    [
        ("", "the name of the folder to write to is empty: give one"),
        (" ", "the name of the folder to write to is empty: give one"),
        (None, "the folder to write to must be text or a Path, not None: give one"),
        (b"a", "the folder to write to must be text or a Path, not b'a': give one"),
    ],
)
def test_a_folder_without_a_name_is_refused(path, said, mdlm, tmp_path, monkeypatch):
    """The empty name would mean the current directory."""
    monkeypatch.chdir(tmp_path)
    for write in (mdlm.save, mdlm.export):
        with pytest.raises(UserError, match=said):
            write(path)
    assert not list(tmp_path.iterdir())


def test_what_is_saved_can_be_split_over_files(mdlm, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors.write, "__defaults__", (50_000,))
    folder = mdlm.save(tmp_path / "saved")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert np.array_equal(md4_jax.load(folder).logits(TOKEN), mdlm.logits(TOKEN))


def test_samples_keep_the_prompt_and_take_the_options_of_the_section(mdlm):
    drawn = mdlm.sample(num=2, prompt="abc", sampler="confidence", steps=4, trace=True)
    assert [text[:3] for text in drawn.texts] == ["abc", "abc"] and drawn.tokens.shape == (2, 16)
    assert [drawn.trace.words[i] for i in drawn.trace.symbol[-1, :3]] == ["a", "b", "c"]
    assert drawn.evaluations.tolist() == [4, 4]
    with pytest.raises(UserError, match="unknown key in sample 'stepz'; did you mean 'steps'"):
        mdlm.sample(stepz=4)
    with pytest.raises(UserError, match="unknown sample.name"):
        mdlm.sample(sampler="annealed")


def test_a_text_ends_with_a_token_that_stops_it(mdlm):
    """And not with one of the prompt."""
    free, ended = (mdlm.sample(8, "a", steps=4, **more) for more in ({}, {"stop": "a b"}))
    assert ended.tokens.tolist() == free.tokens.tolist()
    for text, whole in zip(ended.texts, free.texts, strict=True):
        assert text == re.match("a[^ab]*[ab]?", whole)[0]
    assert ended.lengths.tolist() == [len(text) for text in ended.texts]
    assert len(set(ended.lengths)) > 2 and "b" in {text[-1] for text in ended.texts}
    with pytest.raises(UserError, match="sample.stop='zz' is not an entry of the vocabulary"):
        mdlm.sample(1, stop="zz")
    with pytest.raises(UserError, match="sample.judge='self' needs texts of a fixed length"):
        mdlm.sample(1, stop="a", judge="self")


def test_infilling_ends_with_the_text(mdlm):
    found = mdlm.infill("ab__cd_", num=3, steps=4)
    assert {(len(t), t[:2], t[4:6]) for t in found.texts} == {(7, "ab", "cd")}
    assert found.tokens.shape == (3, 7)


@pytest.mark.campaign
def test_infilling_fills_the_blanks_after_a_stop():
    model = playgrounds.of_blocks(4)
    model.config["sample"] |= dict(stop=" ".join(playgrounds.ALPHABET[1:60]), min_entropy=1.5)
    text = "ab____________cd"
    found = model.infill(text, num=8, steps=4)
    assert (found.tokens < len(playgrounds.ALPHABET)).all() and found.tokens.shape == (8, 16)
    for key in ("stop", "min_entropy"):
        with pytest.raises(UserError, match=f"fills every blank of the text, so {key}="):
            model.infill(text, **{key: model.config["sample"][key]})


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda m: m.infill("no gap"), "the text must contain a blank '_' to fill: 'no gap'"),
        (lambda m: m.infill("a_c", blank=""), "the text must contain a blank '' to fill"),
        (lambda m: m.infill(["a_c"]), r"infill takes text, not \['a_c'\]"),
        (lambda m: m.sample(prompt=None), "sample.prompt must be text, not None"),
        (lambda m: m.sample(template=["a_"]), r"sample.template must be text, not \['a_'\]"),
        (lambda m: m.sample(num=2.0), "sample.num must be a whole number, not 2.0"),
        (lambda m: m.sample(num=True), "sample.num must be a whole number, not True"),
        (lambda m: m.sample(1, steps=4.0), "sample.steps must be a whole number, not 4.0"),
        (lambda m: m.infill("a_c", num="2"), "sample.num must be a whole number, not '2'"),
        (lambda m: next(m.watch(seed=1.0)), "sample.seed must be a whole number, not 1.0"),
        (lambda m: m.score("ab", draws=4.0), "draws must be a whole number, not 4.0"),
        (lambda m: m.token_costs("ab", estimates=True), "estimates must be a whole .* not True"),
        (lambda m: m.score(["ab", 1]), "text 1 must be text, not 1"),
        (lambda m: m.score(3), "score takes a text or a list of texts, not 3"),
        (lambda m: m.score(b"ab"), "score takes a text or a list of texts, not b'ab'"),
        (
            lambda m: m.score("ab", stride=17),
            "at most data.length=16, .* set it to less, such as 8,",
        ),
        (lambda m: m.score("ab", label="x"), "label must be the number of a class, .*, not 'x'"),
        (lambda m: m.score("ab", label=True), "label must be the number of a class, .* not True"),
        (lambda m: m.score("ab", label=-2), "label must be .* or -1 for none, not -2"),
        (lambda m: m.score("ab", label=0), "label=0 is a class, but the network has no"),
        (lambda m: m.token_costs(b"ab"), "token_costs takes text, not b'ab'"),
        (lambda m: m.token_costs("ab", estimates=0), "estimates must be a whole .* not 0"),
        (lambda m: m.token_costs("ab", estimates=1.5), "estimates must be a whole .* not 1.5"),
        (lambda m: m.token_costs("ab", label=0), "label=0 is a class, but the network has no"),
        (lambda m: m.logits([[0, 1]], at=2), "at=2 must lie between 0 and 1, the last position"),
        (lambda m: m.logits([[0, 1]], at=[0, 1]), "at must be one position, or one for each of 1"),
        (lambda m: m.logits([[0, 1]], at=0.5), "at must be one position"),
        (lambda m: m.logits([[0, 1], [2]]), "tokens must be numbers, in rows of equal length"),
        (lambda m: m.logits([]), r"tokens must .* not be empty, but their shape is \(1, 0\)"),
        (
            lambda m: m.logits([[[0, 1]]]),
            r"tokens must have the shape \[B, L\] or \[L\].* \(1, 1, 2\)",
        ),
        (lambda m: m.logits([0, -1]), "the token -1 must lie between 0 and"),
        (lambda m: m.logits([[0, 9999]]), "the token 9999 must lie .*, where .* is the mask"),
        (lambda m: m.logits([0.7, 1.2]), "tokens must be whole numbers, not float64"),
        (lambda m: m.logits([0, 1], t=7.0), "t=7.0 must lie between 0 and 1"),
        (lambda m: m.logits([0, 1], t="x"), "t must be numbers, in rows of equal length"),
        (lambda m: m.logits([[0], [1]], [0, 0, 1]), "t must be .* each of 2 sequences, not"),
        (lambda m: m.logits([[0], [1]], 0, {"label": 1}), r"label'\] must .* \(2,\) for tokens"),
        (lambda m: m.logits([[0, 1]], 0, {"segments": [[0]]}), r"segments'\] .* \(1, 2\) for"),
        (lambda m: m.logits([[0, 1]], 0, {"segments": [[0, "a"]]}), "must be numbers of the"),
        (lambda m: m.logits([0], 0, [1]), r"context must be a dict of arrays, not \[1\]"),
    ],
)
def test_what_is_no_text_or_token_is_refused(call, said, mdlm):
    with pytest.raises(UserError, match=said):
        call(mdlm)


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.score("ab"),
        lambda m: m.infill("a_"),
        lambda m: m.token_costs("ab"),
        lambda m: m.chat("ab"),
    ],
    ids=["score", "infill", "token_costs", "chat"],
)
def test_a_model_of_images_takes_no_text(call, images):
    with pytest.raises(UserError, match="takes text, and this model has images$"):
        call(images)


def test_a_file_is_no_model(tmp_path):
    (tmp_path / "book.txt").write_text("words")
    with pytest.raises(UserError, match=r"book\.txt is a file, but must be the folder of a run"):
        md4_jax.load(tmp_path / "book.txt")


@pytest.mark.parametrize(
    "lost, said",
    [
        ("model.safetensors", "saved lacks the model.safetensors of a saved model: copy it again$"),
        ("tokenizer.json", "tokenizer.json is missing: copy it from where this run or model comes"),
    ],
)
def test_what_an_incomplete_copy_lacks(lost, said, mdlm, tmp_path):
    """It is no run, so nobody is told to train it first."""
    folder = Path(str(mdlm.save(tmp_path / "saved")))
    (folder / lost).unlink()
    with pytest.raises(UserError, match=said):
        md4_jax.load(folder)


def test_the_folder_of_checkpoints_is_not_the_run(tmp_path):
    (tmp_path / "run" / "checkpoints" / "700").mkdir(parents=True)
    said = "checkpoints holds the checkpoints of a run: give the run, .*/run, or one of them"
    with pytest.raises(UserError, match=said):
        md4_jax.load(tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize(
    "changes, said",
    [
        ("mesh.tensor=4", "config must be a dict, .*, not 'mesh.tensor=4'"),
        ({3: 4}, "the keys of config must be text, such as 'mesh.tensor', not 3"),
        ({"mesh": {"tensor": 4}}, "must name single keys, such as 'mesh.tensor'"),
    ],
)
def test_changes_that_are_no_keys_with_values(changes, said):
    with pytest.raises(UserError, match=said):
        md4_jax.load("runs/mine", changes)


@pytest.mark.parametrize("source", [None, 3, b"runs/mine"])
def test_what_is_no_name_of_a_model(source):
    """None was looked for in the folder None."""
    with pytest.raises(UserError, match=f"or hf:USER/NAME, not {source!r}"):
        md4_jax.load(source)


def test_prompts_that_are_no_text(mdlm):
    with pytest.raises(UserError, match="sample.prompt must be text, not 3"):
        mdlm.watch(3)
    with pytest.raises(UserError, match=r"half of a surrogate pair, '\\ud800', at offset 1"):
        mdlm.sample(prompt="a\ud800")


def test_a_model_may_be_the_key_of_a_dict(mdlm):
    """As functools.cache needs it."""
    assert {mdlm: 1}[mdlm] == 1


def test_a_program_is_compiled_once_for_the_same_shapes(mdlm):
    mdlm.sample(num=2, steps=4)
    before = len(mdlm.programs)
    mdlm.sample(num=2, steps=4, seed=1)
    assert len(mdlm.programs) == before
    mdlm.sample(num=2, steps=5)
    assert len(mdlm.programs) == before + 1


def test_an_empty_name_is_not_the_current_directory():
    with pytest.raises(UserError, match="the name of the model is empty"):
        md4_jax.load("")


def test_a_model_is_copied_and_not_pickled(mdlm):
    with pytest.raises(UserError, match=r"cannot be pickled.*md4_jax.load\('.*model.save"):
        pickle.dumps(mdlm)
    for copied in (copy.copy(mdlm), copy.deepcopy(mdlm)):
        assert copied is not mdlm
        assert repr(copied) == repr(mdlm)


def test_without_network_a_commit_is_asked_for_once(monkeypatch):
    """The library repeats the question for the files of a commit for 23 s."""
    asked = []

    class Interface:
        def repo_info(self, name, **options):
            asked.append(name)
            raise ConnectionError("Got: no network")

    stand_in = types.SimpleNamespace(
        HfApi=Interface, snapshot_download=lambda *_, **options: asked.append("files")
    )
    monkeypatch.setattr(hub, "_library", lambda: stand_in)
    with pytest.raises(UserError, match="hf:nobody/nothing is not in .* fetched: no network$"):
        md4_jax.load(f"hf:nobody/nothing@{'0' * 40}")
    assert asked == ["nobody/nothing"]


def test_the_hubs_cache_is_enough(folders, tmp_path, monkeypatch):
    from huggingface_hub import constants

    cache = tmp_path / "models--kuleshov-group--mdlm-owt"
    shutil.copytree(folders["mdlm"], cache / "snapshots" / ("0" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert md4_jax.load("hf:kuleshov-group/mdlm-owt").length == 16
    with pytest.raises(UserError, match="hf:nobody/nothing is not in the hub's cache and cannot"):
        md4_jax.load("hf:nobody/nothing")


def test_pushing_uploads_what_is_saved(mdlm, monkeypatch):
    class Interface:
        def create_repo(self, name, **options):
            return f"hub/{name}"

        def upload_folder(self, *, repo_id, folder_path):
            names = sorted(path.name for path in Place(folder_path).iterdir())
            assert names == [
                "README.md", "config.json", "layout.json", "model.safetensors", "tokenizer.json"
            ]  # fmt: skip

    monkeypatch.setattr(hub, "_library", lambda: types.SimpleNamespace(HfApi=Interface))
    assert mdlm.push("user/name") == "hub/user/name"


def test_an_import_onto_a_full_disk(mdlm, tmp_path, monkeypatch):
    def full(domain, workdir):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(importing, "load", lambda *arguments, **options: mdlm)
    monkeypatch.setattr(importing, "keep_domain", full)
    with pytest.raises(UserError, match="No space left .*/run: free some space and start the same"):
        importing.run("mine", {}, Place(tmp_path / "run"))


@pytest.mark.campaign
def test_an_imported_run_holds_the_same_model(mdlm, folders, tmp_path):
    changes = {"train.num_steps": "2", "optim.warmup_steps": "0"}
    importing.run(str(folders["mdlm"]), changes, Place(tmp_path / "run"))
    run = md4_jax.load(tmp_path / "run")
    assert run.step == 0 and run.config["train"]["num_steps"] == 2
    assert md4_jax.load(tmp_path / "run/checkpoints/0").config["eval"]["checkpoint"] == "0"
    (tmp_path / "run/checkpoints/7").mkdir()
    with pytest.raises(UserError, match="checkpoint 7 in .* cannot be read"):
        md4_jax.load(tmp_path / "run/checkpoints/7")
    assert np.array_equal(run.logits(TOKEN), mdlm.logits(TOKEN))
    saved = md4_jax.load(run.save(tmp_path / "saved"))
    assert saved.sample(num=2, steps=3).texts == run.sample(num=2, steps=3).texts
    importing.run(str(tmp_path / "saved"), {"train.num_steps": "3"}, Place(tmp_path / "again"))
    again = md4_jax.load(tmp_path / "again")
    assert again.config["train"]["num_steps"] == 3
    assert np.array_equal(again.logits(TOKEN), mdlm.logits(TOKEN))
    with pytest.raises(UserError, match="already holds a run: use another --workdir"):
        importing.run(str(folders["mdlm"]), {}, Place(tmp_path / "run"))


def test_data_that_cannot_be_read_is_told_before_anything_is_written(folders, tmp_path):
    (tmp_path / "talks.jsonl").write_text('{"talk": []}\n' * 30)
    changes = {"data.path": str(tmp_path / "talks.jsonl"), "data.text_key": "text"}
    with pytest.raises(UserError, match="talks.jsonl, line 1: no key 'text'"):
        importing.run(str(folders["mdlm"]), changes, Place(tmp_path / "run"))
    with pytest.raises(UserError, match="data.path: no file matches ''"):
        importing.run(str(folders["mdlm"]), {"data.text_key": "talk"}, Place(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.campaign
def test_loading_holds_the_parameters_and_little_more(tmp_path):
    """Less than 1.5 of the largest of 4 files besides, onto a mesh of 1 x 4 devices."""
    command = [sys.executable, "tools/loading.py", "--gigabytes", "0.4", "--shards", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["parameters"] > 3e8
    assert found["peak"] < found["limit"]


ON_A_MESH = """
import sys, jax, md4_jax
model = md4_jax.load(sys.argv[1], {"mesh.data": 2, "mesh.tensor": 2})
assert model.params["network"]["embedding"].sharding.shard_shape((128, 32)) == (64, 32)
print(model.logits([[1, 2, 3, 11]] * 3).tolist())
print(model.score(["abc", "abcdabcdabcdabcdabcd"]).nats.tolist())
print(model.sample(num=3, steps=4).texts)
"""


@pytest.mark.campaign
def test_on_a_mesh_the_numbers_are_the_same(folders, mdlm):
    """Two by two devices, and three rows, which these do not divide."""
    command = [sys.executable, "-c", ON_A_MESH, str(folders["mdlm"])]
    done = subprocess.run(command, env=with_devices(4), capture_output=True, text=True, check=True)
    logits, nats, texts = map(ast.literal_eval, done.stdout.strip().splitlines())
    np.testing.assert_allclose(logits, mdlm.logits([[1, 2, 3, 11]] * 3), atol=1e-5)
    texts_here = mdlm.sample(num=3, steps=4).texts
    assert texts == texts_here
    here = mdlm.score(["abc", "abcdabcdabcdabcdabcd"])
    assert np.all(np.abs(nats - here.nats) < 4 * here.nats_se * 2**0.5)


def snippets(page: Path) -> list[str]:
    """The indented Python of a page, with what its lines print."""
    blocks = re.findall(r"(?:^    \S.*\n|^    .*\n|^\n(?=    ))+", page.read_text(), re.M)
    return [textwrap.dedent(block) for block in blocks if "import md4_jax" in block]


@pytest.mark.slow
def test_what_the_page_shows_runs(tmp_path, monkeypatch, capsys):
    """With a model of random parameters in place of the run that it names."""
    config = files.load("quickstart")
    config["network"] |= dict(size=16, depth=1, heads=2, hidden=32, tables=0)
    config["data"] |= dict(length=32)
    alphabet = "".join(chr(c) for c in range(32, 127)) + "\n"
    experiment = build.experiment(config, TextDomain(Characters(alphabet), 32))
    params = fresh_state(experiment).ema
    facts = {"commit": "unknown", "results": {}}
    Model(experiment, params, 0, "", facts).save(tmp_path / "runs" / "quickstart")
    monkeypatch.chdir(tmp_path)
    (snippet,) = snippets(ROOT / "docs" / "python.md")
    exec(snippet, {})
    assert capsys.readouterr().out.startswith("ROMEO:")
    assert md4_jax.load("folder").length == 32


@pytest.mark.parametrize(("name", "is_saved"), [("qwen2", False), ("qwen2", True), ("e2d2", False)])
@pytest.mark.cases(1)
def test_a_size_that_the_arrays_do_not_have_is_named(name, is_saved, folders, tmp_path):
    """Also fewer layers than there are: the others would be left out without a word."""
    model, folder = md4_jax.load(folders[name]), folders[name]
    if is_saved:
        folder = model.save(tmp_path / "saved")
    had = {key: model.config["network"][key] for key in ("depth", "size", "heads", "hidden")}
    asked = [("depth", 1), *((key, 2 * value) for key, value in had.items())]
    for key, value in asked:
        said = f"^network.{key}={value}, but the model has {had[key]}: its arrays in .*this key"
        with pytest.raises(UserError, match=said):
            md4_jax.load(folder, {f"network.{key}": value})


def test_all_sizes_that_the_arrays_do_not_have_are_named(folders):
    changes = {"network.depth": 1, "network.size": 64, "network.dropout": 0.1}
    said = "^network.depth=1, .* has 2; network.size=64, .* has 32: .* Remove these keys"
    with pytest.raises(UserError, match=said):
        md4_jax.load(folders["qwen2"], changes)


def test_keys_without_parameters_and_adapters_may_change(folders):
    """Parameters of layers have other names without a scan, and adapters are added."""
    changes = {"network.scan_blocks": False, "network.lora_rank": 2, "network.dtype": "bfloat16"}
    model = md4_jax.load(folders["qwen2"], changes)
    assert model.config["network"]["lora_rank"] == 2 and "blocks" not in model.params["network"]
