"""Models go back to the layout of the published checkpoint that they were made of."""

import copy
import dataclasses
import errno
import json

import jax
import numpy as np
import pytest
from peer_folders import SIZES, TOLD, answers, chat_folder, peer_folder, with_mask_at
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import md4_jax
from md4_jax.model import folder as model_folder
from md4_jax.model import own_layouts
from md4_jax.model.layout import Layout, Numbered, _place
from md4_jax.protocols import UserError

# What the network does not have: the head's part of a mask that is the last entry, and rows that
# pad a vocabulary.
ADAPTED = {"objective.name": "md4", "network.causal": False, "sample.name": "ancestral"}


def arrays(folder) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def left_out(name: str, array: np.ndarray, model) -> np.ndarray:
    """Marks the entries of an array that no parameter stands for."""
    symbols = model.domain.vocab_size
    marks = np.zeros(array.shape, bool)
    is_head = any(word in name for word in HEADS) and not name.startswith(BEFORE_HEAD)
    is_table = any(word in name for word in ("embed", "wte")) and "blocks" not in name
    has_mask = model.config["process"]["name"] in ("masking", "hybrid")
    tied = model.config["network"].get("tied")
    if is_head and has_mask and (marks.ndim == 1 or not tied):
        marks[symbols + 1 :] = True
        marks[model.config["tokenizer"].get("mask", symbols)] = True
    elif is_table or is_head:
        marks[symbols + (0 if marks.ndim == 1 else has_mask) :] = True
    if name.startswith("Transformer_0/Dense_") and array.shape[-1] == symbols + 1:
        marks[..., symbols:] = True
    return marks


HEADS = ("output_layer.linear", "lm_head", "diffusion_head", "transformer.ff_out", "decoder.")
# Of ESM, with features of its own, and of E2D2, whose second part is a decoder.
BEFORE_HEAD = ("lm_head.dense", "lm_head.layer_norm", "backbone.decoder.model.")
IN_PART = ("diffusiongemma",)  # without the part that reads images: test_diffusion_gemma.py
# Which say nothing of a whole text: test_eso.py, test_wedlm.py, test_sdlm.py.
IN_ORDER = ("esolm", "wedlm", "sdlm")
CAUSAL = ("qwen2", "qwen3", "qwen3moe", "llama")
APART = (*CAUSAL, *IN_PART, *IN_ORDER, "smdm", "smdm_ar")  # the last two: test_smdm.py


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [name for name in TOLD if name not in APART])
@pytest.mark.cases(2)
def test_what_is_exported_is_what_was_read(name, tmp_path):
    """Bit for bit, but for what no parameter stands for, which is 0."""
    source = peer_folder(tmp_path, name)
    model = md4_jax.load(source)
    folder = model.export(tmp_path / "exported")
    found, expected = arrays(folder), arrays(source)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        marks = left_out(key, value, model)
        assert found[key].dtype == value.dtype and found[key].shape == value.shape
        assert np.array_equal(found[key][~marks], value[~marks]), key
        assert not np.any(found[key][marks]), key
    assert json.loads((folder / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    # An encoder reads only the blocks before the one that is asked for.
    again, z = md4_jax.load(folder), np.zeros((1, 4 if name.startswith("e2d2") else 8), np.int32)
    assert np.array_equal(again.logits(z, 0.3), model.logits(z, 0.3))


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_stays_one(name, tmp_path):
    """The vector of the mask, with which texts begin, becomes that of the entry that did so."""
    source = peer_folder(tmp_path, name)
    model = md4_jax.load(source)
    found, expected = arrays(model.export(tmp_path / "exported")), arrays(source)
    for key, value in expected.items():
        rows = 124 if key in ("model.embed_tokens.weight", "lm_head.weight") else len(value)
        assert np.array_equal(found[key][:rows], value[:rows]) and not np.any(found[key][rows:])
    table = model.params["network"]["embedding"]
    model.params["network"]["embedding"] = table.at[124].set(7.0)
    found = arrays(model.export(tmp_path / "changed"))["model.embed_tokens.weight"]
    begins = answers(name)["config"]["bos_token_id"]
    assert np.all(found[begins] == 7.0)
    assert np.array_equal(np.delete(found, begins, 0)[:123], np.delete(table, begins, 0)[:123])


@pytest.mark.parametrize(
    "name, shifted, kind",
    [
        ("qwen2", True, "Dream"),
        ("qwen2", False, "a2d-qwen2"),
        ("llama", False, "a2d-llama"),
        ("qwen3moe", True, "rnd1"),
    ],
)
@pytest.mark.cases(2)
def test_a_causal_model_leaves_as_a_diffusion_model(name, shifted, kind, tmp_path):
    """With its mask as an entry of its own, and read again it is the same model."""
    model = md4_jax.load(peer_folder(tmp_path, name), config=ADAPTED | {"network.shifted": shifted})
    folder = model.export(tmp_path / "exported")
    told = json.loads((folder / "config.json").read_text())
    assert told["model_type"] == kind and told["mask_token_id"] == 124
    again = md4_jax.load(folder)
    assert again.config["network"]["shifted"] == shifted
    assert again.domain.vocab_size == 124 and again.config["objective"]["name"] == "md4"
    z = np.array([[0, 124, 5, 124, 123]])
    np.testing.assert_array_equal(again.logits(z), model.logits(z))


@pytest.mark.parametrize(
    "name, shifted, kind",
    [
        ("dream", False, "a2d-qwen2"),
        ("diffugpt", False, "gpt2"),
        ("stable_diffcoder", True, "llama"),
    ],
)
def test_config_says_another_shift(name, shifted, kind, tmp_path):
    model = md4_jax.load(peer_folder(tmp_path, name), config={"network.shifted": shifted})
    folder = model.export(tmp_path / "exported")
    again, z = md4_jax.load(folder), np.array([[0, model.domain.vocab_size, 5, 1]])
    assert json.loads((folder / "config.json").read_text())["model_type"].endswith(kind)
    assert again.config["network"]["shifted"] == shifted
    np.testing.assert_array_equal(again.logits(z), model.logits(z))


@pytest.mark.parametrize(
    "name, key, value, read",
    [
        ("dream", "rotary_base", 5e6, "1000000.0"),
        ("dream", "norm_eps", 1e-2, "1e-06"),
        ("llada2", "router_scale", 7.0, "2.5"),
        ("modernbert", "window", 4, "6"),
        ("esm", "token_dropout", False, "True"),
        ("mdlm", "rotary_base", 5.0, "10000.0"),
    ],
)
def test_a_network_that_config_does_not_tell_is_refused(name, key, value, read, tmp_path):
    model = md4_jax.load(peer_folder(tmp_path, name), config={f"network.{key}": value})
    said = rf"network.{key}={value}, .* would be read with {read}: use save"
    with pytest.raises(UserError, match=said):
        model.export(tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.quick(1)
@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "name, changes",
    [
        ("mdlm", {"process.conditioning": "sigma"}),
        ("bd3lm", {"objective.block": 8}),
        ("llada2", {"objective.block": 8, "data.length": 16}),
        ("diffusiongemma", {"objective.block": 16, "data.length": 16}),
        ("md4_text", {"process.schedule.name": "cosine"}),
        ("sedd_absorb", {"objective.scaled": False}),
    ],
)
def test_config_says_another_process_and_objective(name, changes, tmp_path):
    source = peer_folder(tmp_path, name)
    model = md4_jax.load(source, changes)
    again = md4_jax.load(model.export(tmp_path / "exported"))
    before = md4_jax.load(source)
    for key in ("process", "objective"):
        assert again.config[key] == model.config[key]
    assert any(before.config[key] != model.config[key] for key in ("process", "objective"))
    assert again.experiment.process == model.experiment.process


@pytest.mark.parametrize(
    "name, changes, said",
    [
        ("llada", {"objective.name": "block", "objective.block": 4}, "objective.block=4, .* 0:"),
        ("mdlm", {"objective.name": "block", "objective.block": 4}, "objective.block=4, .* 0:"),
        ("bd3lm", {"objective.name": "md4"}, "objective.block=0, .* with 4:"),
        ("duo", {"process.conditioning": "zero"}, "process.conditioning='zero', .* 'sigma':"),
        ("duo", {"process.schedule.eps": 0.1}, r"process.schedule=LogLinear\(eps=0.1\), .*=0.001"),
        ("sedd_absorb", {"objective.name": "md4"}, "objective.name='md4', .* 'score_entropy':"),
    ],
)
def test_a_process_or_objective_that_config_does_not_tell_is_refused(name, changes, said, tmp_path):
    model = md4_jax.load(peer_folder(tmp_path, name), {"data.length": 16, **changes})
    with pytest.raises(UserError, match=f"the model has {said}.* use save"):
        model.export(tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize(
    "name, changes",
    [
        ("llada", {"process.schedule.name": "cosine"}),
        ("mdlm", {"process.schedule.name": "linear", "objective.name": "any_order"}),
        ("llada", {"objective.name": "preference", "data.rejected_key": "worse"}),
        ("radd", {"objective.name": "any_order", "objective.max_masked": 0.5}),
    ],
)
def test_what_changes_the_training_alone_goes_back(name, changes, tmp_path):
    """A network that is told no time means the same with every schedule of masks."""
    source = peer_folder(tmp_path, name)
    folder = md4_jax.load(source, changes).export(tmp_path / "exported")
    told = [json.loads((each / "config.json").read_text()) for each in (source, folder)]
    assert told[0] == told[1]


def test_half_precision_is_kept(tmp_path):
    source = peer_folder(tmp_path, "dream")
    halves = {k: v.astype(np.float16) for k, v in load_file(source / "model.safetensors").items()}
    save_file(halves, source / "model.safetensors")
    found = arrays(md4_jax.load(source).export(tmp_path / "exported"))
    assert all(value.dtype == np.float16 for value in found.values())
    name = "model.layers.1.mlp.up_proj.weight"
    assert np.array_equal(found[name], halves[name])


def test_a_mask_among_the_entries_goes_back_to_its_row(tmp_path):
    source = with_mask_at(peer_folder(tmp_path, "llada"), 7)
    found = arrays(md4_jax.load(source).export(tmp_path / "exported"))
    table = "model.transformer.wte.weight"
    assert np.array_equal(found[table][:126], arrays(source)[table][:126])


@pytest.mark.parametrize(
    "name, changes, mask",
    [
        ("stable_diffcoder", {"objective.name": "md4"}, 5),
        ("dream", {"tokenizer.mask": 121}, 121),
    ],
)
def test_config_names_a_mask_that_its_kind_would_not_tell(name, changes, mask, tmp_path):
    """Stable-DiffCoder's code implies the mask, and the kind of what was made of it does not."""
    model = md4_jax.load(peer_folder(tmp_path, name), config=changes)
    folder = model.export(tmp_path / "exported")
    assert json.loads((folder / "config.json").read_text())["mask_token_id"] == mask
    again = md4_jax.load(folder)
    assert again.config["tokenizer"]["mask"] == mask == model.config["tokenizer"]["mask"]
    z = np.array([[0, again.domain.vocab_size, 5, 1]])
    np.testing.assert_array_equal(again.logits(z), model.logits(z))


def test_a_mask_that_the_tokenizer_names_is_not_written_to_config(tmp_path):
    source = peer_folder(tmp_path, "dream", mask_token_id=None)
    (source / "special_tokens_map.json").write_text(json.dumps({"mask_token": "<|special_1|>"}))
    folder = md4_jax.load(source).export(tmp_path / "exported")
    assert json.loads((folder / "config.json").read_text())["mask_token_id"] is None
    assert md4_jax.load(folder).config["tokenizer"]["mask"] == 121


def test_it_goes_through_a_saved_folder_and_keeps_the_chat(tmp_path):
    source = chat_folder(tmp_path)
    saved = md4_jax.load(md4_jax.load(source).save(tmp_path / "saved"))
    again = md4_jax.load(saved.export(tmp_path / "exported"))
    talk = [{"role": "user", "content": "hi"}]
    assert again.form.prompt(talk) == md4_jax.load(source).form.prompt(talk)
    assert (
        again.domain.encode("hi<|eot_id|>").tolist() == saved.domain.encode("hi<|eot_id|>").tolist()
    )


def test_the_files_beside_a_checkpoint_go_back_with_it(tmp_path):
    """Its weights are marked as transformers wants them; a template that was changed is written."""
    source = chat_folder(tmp_path)
    told = {"tokenizer_class": "Fast", "eos_token": {"content": "<|endoftext|>", "special": True}}
    told |= {"chat_template": "old", "added_tokens_decoder": {"7": {"content": "<|x|>"}}}
    (source / "tokenizer_config.json").write_text(json.dumps(told))
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    saved = md4_jax.load(md4_jax.load(source).save(tmp_path / "saved"))
    folder = saved.export(tmp_path / "exported")
    found = json.loads((folder / "tokenizer_config.json").read_text())
    assert found == told | {"chat_template": saved.form.template}
    assert (folder / "generation_config.json").read_text() == '{"temperature": 0.5}'
    assert not (folder / "special_tokens_map.json").exists()
    with safe_open(folder / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("is_full", [True, False])
def test_a_full_disk_or_an_interruption_leaves_no_files(is_full, tmp_path, monkeypatch):
    """The folder can then be used again. It keeps hidden files that were there."""
    model = md4_jax.load(peer_folder(tmp_path, "llada"))
    (tmp_path / "mine" / ".git").mkdir(parents=True)
    full, said = KeyboardInterrupt(), None
    if is_full:
        full, said = OSError(errno.ENOSPC, "No space left on device", "FILE"), "mine: .*No space l"

    def fail(path, text):
        path.write_text(text[:9])
        (path.parent / "autoencoder").mkdir()
        (path.parent / "autoencoder" / "config.json").write_text("{")
        raise full

    for write in (model.export, model.save):
        with monkeypatch.context() as patched:
            patched.setattr(model_folder, "replace", fail)
            with pytest.raises(UserError if is_full else KeyboardInterrupt, match=said):
                write(tmp_path / "mine")
        assert [path.name for path in (tmp_path / "mine").iterdir()] == [".git"]
    model.save(tmp_path / "mine")
    assert md4_jax.load(tmp_path / "mine").layout is not None


def test_nothing_is_overwritten(tmp_path):
    """Neither a run nor another model nor anything else; hidden files may be there."""
    model = md4_jax.load(peer_folder(tmp_path, "llada"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".git").mkdir()
    model.export(tmp_path / "mine")
    before = (tmp_path / "mine" / "model.safetensors").read_bytes()
    for write in (model.export, model.save):
        with pytest.raises(UserError, match="mine is not empty: it holds config.json, "):
            write(tmp_path / "mine")
    assert (tmp_path / "mine" / "model.safetensors").read_bytes() == before
    with pytest.raises(UserError, match="model.safetensors is a file, not a folder"):
        model.save(tmp_path / "mine" / "model.safetensors")


def test_a_tied_head_that_is_stored_is_written_too(tmp_path):
    source = peer_folder(tmp_path, "qwen2")
    held = load_file(source / "model.safetensors")
    held["lm_head.weight"] = held["model.embed_tokens.weight"]
    save_file(held, source / "model.safetensors")
    found = arrays(md4_jax.load(source).export(tmp_path / "exported"))
    assert np.array_equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert np.array_equal(found["lm_head.weight"][:120], held["lm_head.weight"][:120])


def test_an_array_of_no_parameter_is_kept_or_refused(tmp_path):
    source = peer_folder(tmp_path, "dream")
    held = load_file(source / "model.safetensors")
    held["rotary.inv_freq"] = np.array([1.0, 0.25], np.float32)
    save_file(held, source / "model.safetensors")
    found = arrays(md4_jax.load(source).export(tmp_path / "exported"))
    assert found["rotary.inv_freq"].tolist() == [1.0, 0.25]
    save_file(held | {"score.weight": np.ones((90, 90), np.float32)}, source / "model.safetensors")
    with pytest.raises(
        UserError, match="the array 'score.weight' of .* is not part of the network"
    ):
        md4_jax.load(source).export(tmp_path / "again")


def test_adapters_are_folded_into_what_is_exported(tmp_path):
    model = md4_jax.load(peer_folder(tmp_path, "llada"), config={"network.lora_rank": 2})
    rng = np.random.default_rng(0)
    model.params["network"] = jax.tree_util.tree_map_with_path(
        lambda path, x: x + (rng.normal(size=x.shape) if "lora_b" in str(path) else 0.0),
        model.params["network"],
    )
    again, z = md4_jax.load(model.export(tmp_path / "exported")), answers("llada")["z"]
    assert again.config["network"]["lora_rank"] == 0
    np.testing.assert_allclose(again.logits(z), model.logits(z), atol=1e-4)
    plain = np.asarray(answers("llada")["outputs"])[..., :125]
    assert np.abs(again.logits(z) - plain).max() > 0.1


def without_layout(model, tmp_path):
    """The model as if it were trained here from the start: saved, without its layout."""
    saved = model.save(tmp_path / "saved")
    (saved / "layout.json").unlink()
    return md4_jax.load(saved)


@pytest.mark.quick(2)
@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "name",
    [
        "mdlm",
        "bd3lm",
        "duo",
        "udlm",
        "udlm_labels",
        "sedd_absorb",
        "sedd_uniform",
        "radd",
        "llada",
    ],
)
def test_a_model_trained_here_goes_into_the_layout_that_it_fits(name, tmp_path):
    source = peer_folder(tmp_path, name)
    model = md4_jax.load(source)
    exported = without_layout(model, tmp_path).export(tmp_path / "exported")
    ours, theirs = arrays(exported), arrays(source)
    assert ours.keys() == theirs.keys()
    for key, array in ours.items():
        rows = len(array)  # a LLaDA's tables have rows of padding after these
        assert rows == len(theirs[key]) or (name, rows) == ("llada", 126)
        there = ~left_out(key, array, model)
        np.testing.assert_allclose(array[there], theirs[key][:rows][there], rtol=1e-6, err_msg=key)
    told, again = json.loads((exported / "config.json").read_text()), md4_jax.load(exported)
    sizes = told.get("model", {"hidden_size": 32, "n_heads": 2, "length": 16, "n_blocks": 2})
    assert {"hidden_size": 32, "n_heads": 2, "length": 16, "n_blocks": 2}.items() <= sizes.items()
    if name in ("mdlm", "bd3lm", "duo"):
        assert {key: told[key] for key in SIZES} == SIZES
    for section in ("process", "objective", "network"):
        assert again.config[section] == model.config[section]
    z = answers(name)["z"]
    np.testing.assert_array_equal(again.logits(z, t=0.5), model.logits(z, t=0.5))


def test_a_parameter_without_a_place_is_not_lost(tmp_path):
    model = md4_jax.load(peer_folder(tmp_path, "mdlm"))
    network = model.params["network"] | {"more": {"kernel": np.ones(3)}}
    model = dataclasses.replace(model, params={**model.params, "network": network})
    with pytest.raises(UserError, match=r"has no array for the parameter 'more/kernel': use save"):
        model.export(tmp_path / "exported")


def test_experts_fit_into_no_layout_of_a_plain_network(tmp_path):
    model = md4_jax.load(peer_folder(tmp_path, "llada"))
    config = copy.deepcopy(model.config)
    config["network"] |= {"experts": 4, "experts_per_token": 2}
    experiment = model.experiment._replace(config=config)
    with pytest.raises(UserError, match="most similar, llada, needs network.experts=0; .*Use save"):
        own_layouts.layout_of(dataclasses.replace(model, experiment=experiment))


def test_a_network_of_no_project_is_told_what_the_nearest_has(tmp_path):
    changed = {"network.norm_eps": 1e-4}
    model = md4_jax.load(peer_folder(tmp_path, "mdlm"), changed)
    with pytest.raises(UserError, match="similar, mdlm, needs network.norm_eps=1e-05. Use save"):
        without_layout(model, tmp_path).export(tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


class Looked(np.ndarray):
    """Values that count how many entries are looked at to choose some of them."""

    entries = 0

    def __getitem__(self, key):
        Looked.entries += key.size if isinstance(key, np.ndarray) else 0
        return super().__getitem__(key)


@pytest.mark.parametrize("mixed", [False, True])
def test_each_entry_is_looked_at_once_however_many_arrays_there_are(mixed):
    """Experts are many arrays: time must not grow as their number times their entries."""
    layout = Layout({}, {f"expert{n}": ("F32", (2, 3)) for n in range(50)}, None, {})
    numbers = Numbered(layout, "folder")
    out = {name: np.zeros(6, np.float32) for name in layout.arrays}
    number = np.concatenate([[0], *(numbers[name].ravel() for name in out)])
    if mixed:
        number = np.random.default_rng(0).permutation(number)
    Looked.entries = 0
    _place(number, number.astype(np.float32).view(Looked), numbers, out)
    assert all(np.array_equal(out[name], numbers[name].ravel()) for name in out)
    assert 0 < Looked.entries <= 2 * number.size


@pytest.mark.parametrize("content", ["[]", "{", '{"arrays": {"a": ["F31", [1]]}}'])
def test_a_damaged_layout_is_named(content, tmp_path):
    saved = md4_jax.load(peer_folder(tmp_path, "mdlm")).save(tmp_path / "saved")
    (saved / "layout.json").write_text(content)
    with pytest.raises(UserError, match="layout.json is damaged"):
        md4_jax.load(saved)
