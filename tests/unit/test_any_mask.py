"""Checkpoints whose mask lies among the other entries of their vocabulary."""

import json

import numpy as np
import pytest
from peer_folders import answers, byte_level, peer_folder, tokenizer, with_mask_at
from safetensors.numpy import load_file, save_file

import md4_jax
from md4_jax.data.tokenizers import BytePairs, from_json
from md4_jax.networks.published import MaskLast
from md4_jax.protocols import UserError

MASK = 7
TEXT = "ab<|special_1|>hz<|special_2|>g"


def inward(ids, mask: int, last: int):
    """Ids of a checkpoint as those of this package, entry by entry."""
    return [last if e == mask else e - 1 if e > mask else e for e in ids]


@pytest.fixture(scope="module")
def middle(tmp_path_factory):
    """The instance with its mask in row 7 instead of 125."""
    return with_mask_at(peer_folder(tmp_path_factory.mktemp("middle"), "llada"), MASK)


def test_rows_of_tables_move_and_those_without_an_entry_are_left_out():
    arrays = {"table": np.arange(6)[:, None] * [1, 10], "bias": np.arange(6), "other": np.arange(6)}
    view = MaskLast(arrays, ["table", "bias"], mask=1, rows=5)
    assert view["bias"].tolist() == [0, 2, 3, 4, 1]
    assert view["table"].tolist() == [[0, 0], [2, 20], [3, 30], [4, 40], [1, 10]]
    assert view["other"].tolist() == list(range(6)) and list(view) == list(arrays)
    assert "bias" in view and "none" not in view and len(view) == 3


def test_logits_are_those_of_the_mask_at_the_end(middle):
    """The same symbols in the same order, and the reference's own answers."""
    told, model = answers("llada"), md4_jax.load(middle)
    assert model.config["tokenizer"]["mask"] == MASK
    assert model.experiment.process.mask_id == model.domain.vocab_size == 125
    expected = np.asarray(told["outputs"])[..., :125]
    np.testing.assert_allclose(model.logits(told["z"]), expected, atol=1e-5)


def test_entries_after_the_mask_are_symbols(tmp_path):
    """All 128 rows of the instance, of which config.json calls two padding, as a vocabulary."""
    told, model = answers("llada"), md4_jax.load(peer_folder(tmp_path, "llada", vocab_size=128))
    assert model.domain.vocab_size == 127
    z = np.array([inward(row, 125, 127) for row in told["z"]])
    expected = np.delete(np.asarray(told["outputs"]), 125, axis=-1)
    np.testing.assert_allclose(model.logits(z), expected, atol=1e-5)
    ids = model.domain.encode("a<|special_1|><|special_2|>")
    assert (
        ids.tolist() == [0, 125, 126] and model.domain.decode(ids) == "a<|special_1|><|special_2|>"
    )
    assert np.isfinite(model.score("a<|special_2|>", draws=2).nats).all()
    with pytest.raises(UserError, match=r"has '<\|special_0\|>', which is the mask of the model"):
        model.score("ab<|special_0|>")


def test_what_is_saved_and_imported_is_the_same_model(middle, tmp_path):
    model = md4_jax.load(middle)
    saved = md4_jax.load(model.save(tmp_path / "saved"))
    z = answers("llada")["z"]
    assert np.array_equal(saved.logits(z), model.logits(z))
    assert saved.domain.decode(range(125)) == model.domain.decode(range(125))
    assert saved.domain.to_json() == model.domain.to_json()


def test_a_mask_at_the_end_is_stored_as_before(tmp_path):
    """So that runs that were made before there was the key are read, and are the same."""
    model = md4_jax.load(peer_folder(tmp_path, "llada"))
    kept = json.loads(model.domain.to_json())["tokenizer"]
    assert kept.keys() == {"name", "definition", "eot", "size"} and kept["size"] == 125
    assert model.config["tokenizer"].keys() == {"name", "path", "eot", "size"}
    saved = model.save(tmp_path / "saved")
    assert sorted(path.name for path in saved.iterdir()) == [
        "README.md", "config.json", "layout.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    assert np.array_equal(md4_jax.load(saved).logits([1, 125]), model.logits([1, 125]))


@pytest.mark.parametrize("null", [False, True])
def test_a_mask_that_config_json_does_not_name_is_a_key(null, middle, tmp_path):
    folder = peer_folder(tmp_path, "llada")
    told = json.loads((middle / "config.json").read_text())
    del told["mask_token_id"]
    told |= {"mask_token_id": None} if null else {}
    (folder / "config.json").write_text(json.dumps(told))
    (folder / "model.safetensors").write_bytes((middle / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"lacks mask_token_id.*\{'tokenizer.mask': ID\}"):
        md4_jax.load(folder)
    found = md4_jax.load(folder, {"tokenizer.mask": MASK})
    z = answers("llada")["z"]
    assert np.array_equal(found.logits(z), md4_jax.load(middle).logits(z))


def test_a_dit_may_have_its_mask_anywhere(tmp_path):
    """MDLM with its mask in row 3 of 12 has the logits of the instance."""
    folder, told = peer_folder(tmp_path, "mdlm"), answers("mdlm")
    before = md4_jax.load(folder).logits(told["z"])
    arrays = load_file(folder / "model.safetensors")
    for name in ("vocab_embed.embedding", "output_layer.linear.weight", "output_layer.linear.bias"):
        rows = arrays[f"backbone.{name}"]
        arrays[f"backbone.{name}"] = np.concatenate([rows[:3], rows[11:], rows[3:11]])
    save_file(arrays, folder / "model.safetensors")
    tokenizer(12).save(str(folder / "tokenizer.json"))
    model = md4_jax.load(folder, {"tokenizer.mask": 3})
    np.testing.assert_allclose(model.logits(told["z"]), before, atol=1e-6)
    assert model.domain.decode([0, 1, 2, 3]) == "abce"


@pytest.mark.parametrize(
    "name, mask, said",
    [
        ("llada", 126, "the mask is 126 .*, but must be below the vocabulary size of 126"),
        ("llada", -2, "the mask is -2 .*, but must be below the vocabulary size of 126"),
        (
            "duo",
            3,
            r"tokenizer.mask=3 is only for .*\(duo\) the mask comes after the vocabulary",
        ),
        ("md4_text", 3, r"tokenizer.mask=3 is only for .*\(md4\) the mask comes after"),
    ],
)
def test_a_mask_that_cannot_be_is_refused(name, mask, said, tmp_path):
    folder = peer_folder(tmp_path, name)
    with pytest.raises(UserError, match=said):
        md4_jax.load(folder, {"tokenizer.mask": mask})


def text_of_gemma(**changes):
    """The section of the text model in an instance's config.json, with changes."""
    return {**answers("diffusiongemma")["config"]["text_config"], **changes}


@pytest.mark.parametrize(
    "name, changes, said",
    [
        ("bd3lm", {"causal": True}, "causal=True: it is the autoregressive baseline"),
        ("llada", {"clip_qkv": 8.0}, "clip_qkv=8.0; only None is supported"),
        ("llada", {"rope_scaling": {"factor": 4.0}}, "rope_scaling=.*; only None is supported"),
        ("md4_text", {"mlp_type": "swiglu"}, "mlp_type='swiglu'; only 'glu' is supported"),
        ("md4_text", {"causal": True}, "causal=True; only False is supported"),
        ("lladamoe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor=2.5; only 1 is"),
        ("e2d2", {"diffusion_type": "uniform"}, "diffusion_type='uniform'; only 'absorbing' is"),
        (
            "diffusiongemma",
            {"text_config": text_of_gemma(use_bidirectional_attention="all")},
            "use_bidirectional_attention='all'; only encoders that read text from left to right",
        ),
        (
            "diffusiongemma",
            {"text_config": text_of_gemma(per_layer_config={"1": {"sliding_window": 2}})},
            r"per_layer_config\.1=.*, in which sliding_window is not supported",
        ),
    ],
)
def test_switches_that_are_not_known_are_refused(name, changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        md4_jax.load(peer_folder(tmp_path, name, **changes))


def test_a_llada_whose_head_is_tied_reads_no_other(tmp_path):
    """Whatever is stored under its name."""
    model = md4_jax.load(peer_folder(tmp_path, "llada", weight_tying=True))
    assert model.config["network"]["tied"] and "head" not in model.params["network"]


@pytest.mark.parametrize("name, letters", [("mdlm", 14), ("llada", 125)])
def test_a_vocabulary_of_another_size_is_refused(name, letters, tmp_path):
    """Of more entries than there are rows, or of so few that padding does not explain it."""
    folder = peer_folder(tmp_path, name)
    tokenizer(letters).save(str(folder / "tokenizer.json"))
    if name == "llada":
        arrays = load_file(folder / "model.safetensors")
        for table in ("model.transformer.wte.weight", "model.transformer.ff_out.weight"):
            arrays[table] = np.tile(arrays[table], (2, 1))
        save_file(arrays, folder / "model.safetensors")
        told = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**told, "vocab_size": 253}))
    rows = {"mdlm": 12, "llada": 253}[name]
    with pytest.raises(UserError, match=f"has {letters} symbols, but the model in .* {rows}: give"):
        md4_jax.load(folder, {"tokenizer.mask": 3})


def with_and_without(mask: int, **keys) -> tuple[BytePairs, BytePairs]:
    """Tokenizers of 20 letters and 4 special entries, with this mask and without one."""
    made = tokenizer(20, 4).to_str()
    return BytePairs(definition=made, mask=mask, **keys), BytePairs(definition=made, eot=None)


@pytest.mark.parametrize("mask", [0, MASK, 19, 20, 23])
def test_ids_after_the_mask_are_one_less(mask):
    moved, plain = with_and_without(mask, eot="<|special_1|>")
    text = "bcd<|special_1|>ij<|special_2|>k"
    ids = plain.encode(text).tolist()
    assert mask not in ids
    assert moved.encode(text).tolist() == inward(ids, mask, 23)
    assert moved.encode(text).dtype == np.uint8 and moved.vocab_size == 23
    assert moved.eot_id == inward([21], mask, 23)[0]
    assert moved.decode(moved.encode(text)) == text
    assert moved.decode([23, 0]) == "_" + plain.decode([int(mask == 0)])
    assert moved.spellings() == [s for i, s in enumerate(plain.spellings()) if i != mask]
    assert moved.encode_batch([text, "b"])[0].tolist() == moved.encode(text).tolist()


def test_the_mask_is_kept_with_the_tokenizer_and_files_without_it_still_load():
    moved, plain = with_and_without(MASK, eot=None)
    assert from_json(moved.to_json()).encode("abij").tolist() == moved.encode("abij").tolist()
    assert "mask" not in json.loads(plain.to_json())
    old = {key: value for key, value in json.loads(plain.to_json()).items() if key != "mask"}
    assert from_json(json.dumps(old)).encode("abij").tolist() == plain.encode("abij").tolist()


def test_a_mask_outside_of_the_vocabulary_names_both_numbers():
    for wrong in (24, -1):
        with pytest.raises(UserError, match=rf"mask={wrong} is not in .* the 24 ids 0 to 23"):
            with_and_without(wrong, eot=None)
    with pytest.raises(
        UserError, match=r"eot='<\|special_1\|>' has the id 21, which is also tokenizer"
    ):
        with_and_without(21, eot="<|special_1|>")


def test_ids_that_the_model_has_no_row_for_are_refused():
    made = tokenizer(20, 4).to_str()
    short = BytePairs(definition=made, mask=MASK, size=21, eot=None)
    assert short.encode("b<|special_1|>").tolist() == [1, 20]
    with pytest.raises(
        UserError, match=r"has '<\|special_2\|>', which is not a symbol of the model"
    ):
        short.encode("b<|special_2|>")
    with pytest.raises(UserError, match=r"has 'h', which is the mask of the model"):
        short.encode("ghi")


def test_special_entries_are_those_that_the_file_calls_special():
    made = byte_level("abc", ["<|x|>"])
    made.add_tokens(["<plain>"])
    assert BytePairs(definition=made.to_str(), eot=None).special == ("<|x|>",)
