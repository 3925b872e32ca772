"""SMDM: files without a config.json, named alone or on the hub, and guidance by a prompt."""

import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import answers, own_lora, peer_folder, trained_on
from safetensors.numpy import load_file

import md4_jax
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.model import continuations, hub, smdm
from md4_jax.model.continuations import Pair
from md4_jax.protocols import Prompt, UserError
from md4_jax.samplers.guidance import guided

CLOSE, MASK, BEGINS = 1e-5, 12, 1
ADAPTED = {"objective.name": "md4", "network.causal": False, "sample.name": "ancestral"}
# Millions of parameters in the name of a published size -> layers, heads, features, feed-forward.
PUBLISHED = {
    6: (6, 4, 256, 1024), 19: (8, 6, 384, 1536), 34: (8, 8, 512, 2048), 48: (9, 9, 576, 2304),
    66: (10, 10, 640, 2560), 85: (13, 10, 640, 2560), 75: (16, 8, 640, 1600),
    113: (12, 12, 768, 3072), 142: (15, 12, 768, 3072), 170: (18, 12, 768, 3072),
    180: (14, 14, 896, 3584), 206: (16, 14, 896, 3584), 231: (18, 14, 896, 3584),
    268: (16, 16, 1024, 4096), 302: (18, 16, 1024, 4096), 336: (20, 16, 1024, 4096),
    472: (18, 10, 1280, 5120), 551: (21, 10, 1280, 5120), 571: (18, 11, 1408, 5632),
    629: (24, 10, 1280, 5120), 666: (21, 11, 1408, 5632), 717: (19, 12, 1536, 6144),
    761: (24, 11, 1408, 5632), 831: (22, 12, 1536, 6144), 944: (25, 12, 1536, 6144),
    1028: (20, 14, 1792, 7168), 1233: (24, 14, 1792, 7168), 1476: (22, 16, 2048, 8192),
    1678: (25, 16, 2048, 8192), 2121: (28, 17, 2176, 8704),
}  # fmt: skip


def arrays(folder) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    directory = tmp_path_factory.mktemp("peers")
    return {name: peer_folder(directory, name) for name in ("smdm", "smdm_ar")}


def tokens(name: str) -> np.ndarray:
    """Their tokens; a causal text begins with the mask, whose vector is that of the entry 1."""
    z = np.asarray(answers(name)["z"])
    if name == "smdm_ar":
        assert (z[:, 0] == BEGINS).all()
        z[:, 0] = MASK
    return z


@pytest.mark.parametrize("name", ["smdm", "smdm_ar"])
@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.cases(2)
def test_logits_are_those_of_their_code(scan, name, folders):
    """Which rounds cosines and sines to bfloat16; without that it gives the other answers."""
    for rounded, outputs in (("bfloat16", "outputs_rounded"), ("float32", "outputs")):
        keys = {"network.scan_blocks": scan, "network.rotary_type": rounded}
        found = md4_jax.load(folders[name], keys).logits(tokens(name))
        np.testing.assert_allclose(found, np.asarray(answers(name)[outputs]), atol=CLOSE)
    both = (np.asarray(answers(name)[key]) for key in ("outputs_rounded", "outputs"))
    assert np.abs(np.subtract(*both)).max() > 1e-2
    model = md4_jax.load(folders[name])
    network, is_causal = model.config["network"], name == "smdm_ar"
    assert (network["heads"], network["kv_heads"], network["rotary_type"]) == (4, 2, "bfloat16")
    assert network["causal"] == is_causal and model.domain.vocab_size == MASK
    assert model.config["objective"]["name"] == ("autoregressive" if is_causal else "md4")


def test_the_heads_of_every_published_size_are_known():
    assert {(size, wide): heads for _, heads, size, wide in PUBLISHED.values()} == smdm.HEADS
    # 1028M of the paper: embedding and head are not counted.
    layers, _, size, wide = PUBLISHED[1028]
    norms = (2 * layers + 1) * size
    assert layers * (4 * size**2 + 3 * size * wide) + norms == 1_027_677_952


def test_guidance_by_a_prompt_is_theirs(folders):
    """Their weight is ours less 1: un_logits + (cfg + 1) (logits - un_logits)."""
    told = answers("smdm")["guided"]
    model = md4_jax.load(folders["smdm"], {"network.rotary_type": "float32"})
    z = jnp.asarray(told["z"])
    given = np.broadcast_to(np.arange(z.shape[1]) < told["prompt"], z.shape)
    prompt = Prompt(np.asarray(z), given)
    weight = told["cfg"] + 1.0
    denoiser, _ = guided(model.experiment.network, model.params, {}, weight, prompt)
    found = denoiser(z, jnp.zeros(len(z)))
    np.testing.assert_allclose(found, np.asarray(told["outputs"]), atol=2e-5)
    plain = model.logits(z)
    assert np.abs(plain - np.asarray(told["outputs"])).max() > 0.1


@pytest.mark.quick(1)
@pytest.mark.parametrize("cfg", ["0.0", "0.6", "1.6"])
@pytest.mark.cases(1)
def test_costs_of_continuations_with_guidance_are_theirs(cfg, folders):
    """Each token from left to right, the later ones masked: `_eval_target_nll_ar`."""
    model, told = md4_jax.load(folders["smdm"]), answers("smdm")["costs"]
    names = ("context", "continuation")
    pairs = [Pair(*(np.asarray(one[name], np.int32) for name in names)) for one in told]
    bound = LikelihoodBound(continuations.objective_of(model, "chain_rule"), batch_size=2)
    logs, errors = continuations.log_likelihoods(model, pairs, bound, float(cfg) + 1.0)
    np.testing.assert_allclose(-logs, [one[cfg] for one in told], rtol=2e-5)
    assert not errors.any()


def test_the_greedy_choice_is_that_of_guided_predictions(folders):
    """Of all symbols one has the largest guided probability, and it may be another than without."""
    model = md4_jax.load(folders["smdm"])
    bound = LikelihoodBound(continuations.objective_of(model, "chain_rule"), batch_size=12)
    chosen = []
    for context in (np.int32([5, 8, 9, 2]), np.int32([1, 1, 4]), np.int32([11, 7, 3, 0, 6])):
        pairs = [Pair(context, np.int32([symbol])) for symbol in range(MASK)]
        for guidance in (0.0, 1.0, 6.0):
            logs, _ = continuations.log_likelihoods(model, pairs, bound, guidance)
            assert np.exp(logs).sum() == pytest.approx(1.0, abs=1e-5)
            greedy = continuations.are_greedy(model, pairs, 12, guidance)
            np.testing.assert_array_equal(np.flatnonzero(greedy), [np.argmax(logs)])
            chosen.append(np.argmax(logs))
    assert chosen[::3] != chosen[1::3] != chosen[2::3]


def test_guidance_by_a_context_needs_masks(folders, tmp_path):
    model = md4_jax.load(folders["smdm"])
    assert continuations.guidance_of(model, "1.6") == 1.6
    with pytest.raises(UserError, match="guidance='much' must be a number"):
        continuations.guidance_of(model, "much")
    for name in ("udlm", "sdar"):
        other = md4_jax.load(peer_folder(tmp_path, name, mask_token_id=123))
        assert continuations.guidance_of(other, 1) == 1.0
        with pytest.raises(UserError, match="guidance=2 also predicts with the context replaced"):
            continuations.guidance_of(other, 2)


def test_it_goes_back_as_it_came(folders, tmp_path):
    for name, folder in folders.items():
        model = md4_jax.load(folder)
        again = md4_jax.load(model.save(tmp_path / name))
        for number, own in enumerate((model, again)):
            exported = own.export(tmp_path / f"{name}_{number}")
            held, found = arrays(folder), arrays(exported)
            assert held.keys() == found.keys()
            assert all(np.array_equal(held[key], found[key]) for key in held)
            assert json.loads((exported / "config.json").read_text()) == {"n_head": 4}


def test_a_causal_model_leaves_as_one_of_masks(folders, tmp_path):
    """With a vector of the mask, and no output for it, as theirs."""
    model = md4_jax.load(folders["smdm_ar"], ADAPTED)
    exported = model.export(tmp_path / "exported")
    shapes = {name: array.shape for name, array in arrays(exported).items()}
    assert shapes == {name: array.shape for name, array in arrays(folders["smdm"]).items()}
    again = md4_jax.load(exported)
    assert again.config["objective"]["name"] == "md4" and again.domain.vocab_size == MASK
    z = tokens("smdm")
    np.testing.assert_array_equal(again.logits(z), model.logits(z))


def of_two(directory):
    """A folder of two models, without their names in an index."""
    peer_folder(directory, "smdm")
    for name in ("smdm", "smdm_ar"):
        source = peer_folder(directory / "others", name) / "model.safetensors"
        source.rename(directory / "smdm" / f"{name}-1M.safetensors")
    (directory / "smdm" / "model.safetensors").unlink()
    return directory / "smdm"


def test_one_file_of_a_folder_is_named(tmp_path):
    folder = of_two(tmp_path)
    for name in ("smdm", "smdm_ar"):
        model = md4_jax.load(folder / f"{name}-1M.safetensors")
        assert model.experiment.network.causal == (name == "smdm_ar")
        assert str(model.origin).endswith(f"{name}-1M.safetensors")
    with pytest.raises(UserError, match="holds 2 safetensors files .*: give one of the files"):
        md4_jax.load(folder)
    with pytest.raises(UserError, match="there is no file .*other.safetensors"):
        md4_jax.load(folder / "other.safetensors")
    with pytest.raises(UserError, match="config.json is a file, but must be the folder"):
        md4_jax.load(folder / "config.json")
    with pytest.raises(UserError, match="smdm-1M.safetensors is a file: give its folder"):
        md4_jax.load(folder / "smdm-1M.safetensors", adapters=folder / "smdm-1M.safetensors")
    saved = md4_jax.load(folder / "smdm-1M.safetensors").save(tmp_path / "saved")
    with pytest.raises(UserError, match="belongs to a model that md4_jax saved: give its folder"):
        md4_jax.load(saved / "model.safetensors")


@pytest.mark.parametrize(
    "name, revision, file",
    [
        ("someone/SMDM/mdm/smdm-1M.safetensors", None, "mdm/smdm-1M.safetensors"),
        ("someone/SMDM@v1/mdm/smdm-1M.safetensors", "v1", "mdm/smdm-1M.safetensors"),
        ("someone/SMDM/smdm-1M.safetensors", None, "smdm-1M.safetensors"),
        ("someone/SMDM@refs/pr/1", "refs/pr/1", ""),
    ],
)
def test_one_file_of_the_hub_is_fetched(name, revision, file, tmp_path, monkeypatch):
    """And with a folder's name, none of the files of its subfolders."""
    folder, asked = of_two(tmp_path), {}
    if "/" in file:
        (tmp_path / "hub").mkdir()
        folder = folder.rename(tmp_path / "hub" / "mdm").parent

    def snapshot_download(repository, **options):
        asked.update(options, repository=repository)
        return str(folder)

    stand_in = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setattr(hub, "_library", lambda: stand_in)
    if file:
        assert md4_jax.load(f"hf:{name}").domain.vocab_size == MASK
        assert asked["revision"] == revision
        beside = f"{file.rpartition('/')[0]}/*.json".lstrip("/")
        assert {file, beside} <= set(asked["allow_patterns"])
        assert not any("safetensors" in each for each in set(asked["allow_patterns"]) - {file})
        with pytest.raises(UserError, match="hf:someone/SMDM has no file other.safetensors"):
            md4_jax.load("hf:someone/SMDM/other.safetensors")
    else:
        with pytest.raises(UserError, match="give one of the files"):
            md4_jax.load(f"hf:{name}")
        assert asked["ignore_patterns"] == ["*/*.safetensors"]
        assert "*.safetensors" in asked["allow_patterns"] and asked["revision"] == revision
    assert asked["repository"] == "someone/SMDM"


def test_a_name_on_the_hub_that_is_none():
    with pytest.raises(UserError, match="hf:a.safetensors must be hf:USER/NAME/FILE.safetensors"):
        md4_jax.load("hf:a.safetensors")


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"n_head": None}, "32 features with .* of 48 are not one of them.*n_head"),
        ({"parallel_residual": True}, "parallel_residual=True; only False is supported"),
        ({"n_embd": 64}, "says n_embd=64, but its arrays have 32"),
        ({"n_layer": 3}, "says n_layer=3, but its arrays have 2"),
        ({"intermediate_size": 9}, "says intermediate_size=9, but its arrays have 48"),
    ],
)
def test_what_does_not_fit_is_refused(changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        md4_jax.load(peer_folder(tmp_path, "smdm", **changes))


def test_adapters_of_peft_are_refused(folders, tmp_path):
    """Queries, keys and values of each group alternate in one matrix."""
    adapter = own_lora(tmp_path / "lora", folders["smdm"], {"transformer.h.0.attn.proj": 2})
    with pytest.raises(
        UserError, match="attention/query does not consist of whole rows of one matrix"
    ):
        md4_jax.load(folders["smdm"], {"network.lora_rank": 2}, adapters=adapter)


def test_it_is_scored_and_sampled(folders):
    model = md4_jax.load(folders["smdm"])
    assert np.isfinite(model.score("abab", draws=2).nats).all()
    drawn = model.sample(num=1, steps=2, length=4, prompt="ab", guidance=2.1)
    assert drawn.texts[0].startswith("ab")


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("name", ["smdm", "smdm_ar"])
def test_training_goes_on(name, folders, tmp_path):
    model = md4_jax.load(trained_on(folders[name], tmp_path, {"data.length": 16}))
    assert model.config["network"]["rotary_type"] == "bfloat16"
    again, z = md4_jax.load(model.export(tmp_path / "exported")), tokens(name)[:, :8]
    found, expected = again.logits(z)[..., 2:], model.logits(z)[..., 2:]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    before = arrays(folders[name])
    assert any(np.any(array != before[key]) for key, array in arrays(tmp_path / "exported").items())
