"""Images as codes of an autoencoder: against diffusers' answers, and through the whole program."""

import contextlib
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch_saved
from autoencoder_folders import PUBLISHED, llamagen, pictures, write
from PIL import Image

from md4_jax import autoencoders
from md4_jax.data import codes
from md4_jax.data.codes import CodedImages
from md4_jax.data.corpus import Corpus
from md4_jax.data.sources.folders import ImageFolder
from md4_jax.evals import frechet
from md4_jax.options.data import DataOptions
from md4_jax.protocols import UserError
from md4_jax.runtime.paths import cache_root, place

NAMES = ("vqgan", "vqgan_amused")
HASH = "6dd113043f010ae08041cd4a6f3135d4e2799c4628366e728025086f939c10b2"  # of vqgan


def answers(name: str) -> tuple[np.ndarray, ...]:
    told = json.loads((PUBLISHED / f"{name}.json").read_text())
    kinds = {"images": np.uint8, "codes": np.int32, "decoded": np.uint8}
    return tuple(np.array(told[key], kind) for key, kind in kinds.items())


@pytest.mark.parametrize("name", NAMES)
def test_codes_and_images_are_those_of_diffusers(name, tmp_path):
    found = autoencoders.read(place(write(name, tmp_path / "a")))
    images, codes, decoded = answers(name)
    assert codes.shape[1:] == (16 // found.factor, 24 // found.factor)
    np.testing.assert_array_equal(found.encode(images), codes)
    # Rounding to whole values may go either way.
    np.testing.assert_allclose(found.decode(codes).astype(int), decoded, atol=1)


def test_codes_and_images_are_those_of_llamagen(tmp_path):
    found = autoencoders.read(place(llamagen(tmp_path / "vq_ds16_c2i.pt")))
    images, codes, decoded = answers("llamagen_vq")
    assert (found.codes, found.channels, found.factor) == (40, 3, 2)
    np.testing.assert_array_equal(found.encode(images), codes)
    np.testing.assert_allclose(found.decode(codes).astype(int), decoded, atol=1)
    found.keep(place(tmp_path / "copy"))
    copy = autoencoders.read(place(tmp_path / "copy"))
    assert copy.sha256 == found.sha256
    np.testing.assert_array_equal(copy.encode(images), codes)
    np.testing.assert_array_equal(copy.decode(codes), found.decode(codes))


def test_files_of_autoencoders_are_found_by_their_ending(tmp_path, monkeypatch):
    file = llamagen(tmp_path / "vq.pt")
    found = codes.found_autoencoder(str(file), "auto")
    assert found.sha256 == codes.found_autoencoder(str(file), "signed").sha256
    asked = []
    monkeypatch.setattr(codes.hub, "model_file", lambda *name: asked.append(name) or file)
    assert codes.found_autoencoder("hf:A/B/c/vq.pt", "auto").sha256 == found.sha256
    assert asked == [("A/B", "c/vq.pt")]
    with pytest.raises(UserError, match=r"there is no file .*absent.pt"):
        codes.found_autoencoder(str(tmp_path / "absent.pt"), "auto")
    other = torch_saved.write(tmp_path / "other.pt", {"model": {"x": np.zeros(3, np.float32)}})
    with pytest.raises(UserError, match="other.pt is not the VQ autoencoder of LlamaGen.*no array"):
        codes.found_autoencoder(str(other), "auto")


def test_the_hash_of_diffusers_autoencoders_is_that_of_older_versions(tmp_path):
    own = autoencoders.read(place(write("vqgan", tmp_path / "a")))
    assert own.sha256 == HASH


def test_older_names_of_attention_are_read(tmp_path):
    from safetensors.numpy import load_file, save_file

    folder = write("vqgan", tmp_path / "a")
    arrays = load_file(folder / autoencoders.ARRAYS)
    names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    old = {}
    for name, array in arrays.items():
        for new, before in names.items():
            if f".{new}.weight" in name:
                array = array[:, :, None, None]  # a 1 x 1 convolution
            name = name.replace(f".{new}.", f".{before}.")
        old[name] = array
    assert set(old) != set(arrays)
    save_file(old, folder / autoencoders.ARRAYS)
    images, codes, _ = answers("vqgan")
    np.testing.assert_array_equal(autoencoders.read(place(folder)).encode(images), codes)


def test_the_range_of_pixels_changes_the_codes(tmp_path):
    folder = place(write("vqgan", tmp_path / "a"))
    images, codes, _ = answers("vqgan")
    assert np.any(autoencoders.read(folder, "unit").encode(images) != codes)
    np.testing.assert_array_equal(autoencoders.read(folder, "signed").encode(images), codes)
    assert autoencoders.read(folder, "unit").sha256 != autoencoders.read(folder).sha256


def test_a_copy_is_the_same_autoencoder_and_keeps_its_range(tmp_path):
    own = autoencoders.read(place(write("vqgan", tmp_path / "a")), "unit")
    own.keep(place(tmp_path / "b"))
    copy = autoencoders.read(place(tmp_path / "b"))
    assert copy.sha256 == own.sha256
    images = answers("vqgan")[0]
    np.testing.assert_array_equal(copy.encode(images), own.encode(images))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"_class_name": "AutoencoderKL"}, "_class_name is 'AutoencoderKL'"),
        ({"norm_type": "spatial"}, "norm_type='spatial' is not supported, only 'group'"),
        ({"up_block_types": ["UpBlock2D"]}, "up_block_types has UpBlock2D, but only"),
    ],
)
def test_other_autoencoders_are_refused(changes, said, tmp_path):
    with pytest.raises(UserError, match=said):
        autoencoders.read(place(write("vqgan", tmp_path / "a", **changes)))


def coded(tmp_path: Path, **changes) -> CodedImages:
    pictures(tmp_path / "png", ((16, 24),) * 10)
    options = dict(validation=2, test=2) | changes
    source = ImageFolder(str(tmp_path / "png"), **options)
    return CodedImages(source, autoencoders.read(place(write("vqgan", tmp_path / "a"))))


def test_rows_are_codes_of_images_and_of_mirrored_images(tmp_path):
    plain, own = coded(tmp_path), autoencoders.read(place(tmp_path / "a"))
    flipped = ImageFolder(str(tmp_path / "png"), flip=True, validation=2, test=2)
    mirrored = CodedImages(flipped, own)
    images = np.concatenate(list(plain._source.images("train")))
    assert images.shape == (6, 16, 24, 3)
    rows = plain.rows("train")
    np.testing.assert_array_equal(rows.tokens.reshape(6, 4, 6), own.encode(images))
    both = mirrored.rows("train")
    np.testing.assert_array_equal(both.tokens[:6], rows.tokens)
    np.testing.assert_array_equal(both.tokens[6:].reshape(6, 4, 6), own.encode(images[:, :, ::-1]))
    np.testing.assert_array_equal(both.context["label"], np.tile(rows.context["label"], 2))
    shown = np.concatenate(list(mirrored.pictures("train")))
    np.testing.assert_array_equal(shown, np.concatenate([images, images[:, :, ::-1]]))
    assert len(mirrored.rows("test")) == 2
    assert plain.domain().picture == (16, 24, 3)
    assert plain.domain().shape == (4, 6, 1)


def test_images_that_codes_do_not_fit_are_refused(tmp_path):
    pictures(tmp_path / "odd", ((18, 24),) * 8)
    own = autoencoders.read(place(write("vqgan", tmp_path / "a")))
    with pytest.raises(UserError, match="one code of 4 x 4 pixels .* images of 18 x 24 pixels"):
        CodedImages(ImageFolder(str(tmp_path / "odd")), own)


def test_images_of_any_size_are_cut(tmp_path):
    pictures(tmp_path / "png", ((16, 24), (40, 12), (20, 20), (13, 64)))
    source = ImageFolder(str(tmp_path / "png"), size=12, validation=1, test=1)
    assert source.shape == (12, 12, 3)
    assert len(np.concatenate(list(source.images("all")))) == 4
    with pytest.raises(UserError, match="With data.size=N all images are cut"):
        list(ImageFolder(str(tmp_path / "png"), validation=1, test=1).images("all"))
    # The middle of an image that already has the shorter side.
    (tmp_path / "one").mkdir()
    values = np.arange(12 * 20 * 3, dtype=np.uint8).reshape(12, 20, 3)
    Image.fromarray(values).save(tmp_path / "one" / "0.png")
    one = ImageFolder(str(tmp_path / "one"), size=12, validation=0, test=0)
    np.testing.assert_array_equal(next(one.images("train"))[0], values[:, 4:16])


def test_frechet_distances_are_to_the_original_images(tmp_path):
    source = coded(tmp_path)
    corpus = Corpus(source, source.domain(), DataOptions(length=24))
    images = np.concatenate(list(source.pictures("train")))
    rows, _ = frechet.spread(corpus, "train", 3)
    np.testing.assert_array_equal(rows, source.rows("train").tokens[[0, 2, 4]])
    np.testing.assert_array_equal(
        frechet.pictures(corpus.domain, corpus, "train", rows), images[[0, 2, 4]]
    )


def test_the_nearest_codes_are_those_of_which_the_fewest_differ():
    train = np.array([[9, 9, 9, 1], [0, 0, 5, 5], [0, 0, 0, 7]])
    rows, away = frechet.beside_nearest(np.array([[0, 0, 0, 900]]), train, 2, of_codes=True)
    np.testing.assert_array_equal(rows[0, 1:], train[[2, 1]])
    assert away == [1 / 4]


def test_images_are_encoded_by_one_process_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setenv("MD4_JAX_CACHE", str(tmp_path / "cache"))
    source, events = coded(tmp_path), []

    @contextlib.contextmanager
    def alone(path, work):
        assert path.parent == cache_root() / "tokens" and work == "the encoding of the test images"
        events.append("begins")
        yield
        events.append("ends")

    encode = autoencoders.Autoencoder.encode
    told = lambda *a: events.append("encodes") or encode(*a)  # noqa: E731
    monkeypatch.setattr(autoencoders.Autoencoder, "encode", told)
    monkeypatch.setattr(codes, "alone", alone)
    source.rows("test")
    assert events == ["begins", "encodes", "ends"]


def test_accelerators_do_not_round_the_operands_of_its_products(tmp_path):
    own = autoencoders.read(place(write("vqgan", tmp_path / "a")))
    images, codes, _ = answers("vqgan")
    for function, rows in ((own._encode, images), (own._decode, codes)):
        text = str(jax.make_jaxpr(function)(own._arrays, rows))
        assert text.count("conv_general_dilated[") > 5
        assert "HIGHEST" in text and "DEFAULT" not in text and "precision=None" not in text
