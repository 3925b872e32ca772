"""Quality of images: the distance beside a public formula, sets whose answers are known."""

import json
import struct
import types
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from scipy import linalg

from md4_jax.config import build, schema
from md4_jax.data import Digits
from md4_jax.data.sequences import SplitSize
from md4_jax.evals import frechet, inception, sets
from md4_jax.evals.features import FEATURES, InceptionFeatures, RandomFeatures
from md4_jax.evals.frechet import FrechetDistance, beside_nearest, spread
from md4_jax.evals.samples import drawn_samples
from md4_jax.evals.suite import Suite, sizes_of
from md4_jax.generate import pictures
from md4_jax.generate.pictures import decoded
from md4_jax.options import SampleOptions
from md4_jax.protocols import UserError, batch_of


def by_sqrtm(one: np.ndarray, other: np.ndarray) -> float:
    """The distance as public implementations of FID compute it, by scipy's matrix square root."""
    (m, c), (n, d) = ((x.mean(axis=0), np.cov(x, rowvar=False)) for x in (one, other))
    root = linalg.sqrtm(c @ d)
    return float((m - n) @ (m - n) + np.trace(c) + np.trace(d) - 2 * np.trace(root).real)


def features(rows: int, seed: int, size: int = 24) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.gamma(2.0, size=(rows, size)) @ rng.normal(size=(size, size))).astype(np.float32)


@pytest.mark.parametrize("rows", [2500, 40])
def test_the_distance_is_that_of_public_implementations(rows):
    one, other = features(rows, 0), features(rows + 7, 1)
    wide = one.astype(np.float64), other.astype(np.float64)
    assert sets.frechet_distance(one, other) == pytest.approx(by_sqrtm(*wide), rel=1e-9)
    assert sets.frechet_distance(one, one) == pytest.approx(0.0, abs=1e-6)


def test_the_distance_of_fewer_points_than_dimensions():
    """Covariances without full rank: two points at distance 2 on different axes of four."""
    one, other = np.eye(4)[[0, 0]] * [[1], [-1]], np.eye(4)[[1, 1]] * [[2], [-2]]
    assert sets.frechet_distance(one, other) == pytest.approx(2.0 + 8.0, abs=1e-12)
    # Along one axis the root of the product is not zero: (sqrt 2 - sqrt 8)^2.
    assert sets.frechet_distance(one, 2 * one) == pytest.approx(2.0, abs=1e-12)


def test_the_distance_of_shifted_sets_is_the_shift():
    one = features(300, 0)
    shift = np.arange(24.0)
    assert sets.frechet_distance(one, one + shift) == pytest.approx((shift**2).sum(), rel=1e-6)


def test_precision_and_recall_of_sets_on_a_line():
    """Images at 0, 1, 2, 3, with k = 1: balls of radius 1; samples inside, outside and far."""
    images = np.arange(4.0)[:, None]
    samples = np.array([[0.5], [3.9], [7.0], [9.0]])
    precision, recall = sets.precision_recall(samples, images, 1)
    assert precision == 2 / 4
    # Balls of the samples: radius 3.4, 3.1, 2, 2 about 0.5, 3.9, 7, 9: all four images.
    assert recall == 1.0
    assert sets.precision_recall(images, images, 3) == (1.0, 1.0)
    assert sets.precision_recall(images + 100.0, images, 3) == (0.0, 0.0)
    # One mode of two: every sample is good, half of the images are never near a sample.
    two = np.concatenate([images, images + 100.0])
    assert sets.precision_recall(images, two, 2) == (1.0, 0.5)
    assert sets.precision_recall(two, images, 2) == (0.5, 1.0)


def test_the_pieces_of_large_sets_change_nothing(monkeypatch):
    one, other = features(50, 0), features(60, 1)
    whole = sets.precision_recall(one, other), sets.nearest(one, other, 3), sets.moments(one)
    monkeypatch.setattr(sets, "AT_ONCE", 7)
    again = sets.precision_recall(one, other), sets.nearest(one, other, 3), sets.moments(one)
    assert whole[0] == again[0]
    for pair in (1, 2):
        for found, want in zip(again[pair], whole[pair], strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-9)


def test_nearest_points_come_in_order():
    index, away = sets.nearest(np.array([[2], [10]]), np.array([[0], [3], [9], [4]]), 3)
    assert index.tolist() == [[1, 0, 3], [2, 3, 1]] and away.tolist() == [[1, 4, 4], [1, 36, 49]]


DOMAIN = types.SimpleNamespace(
    shape=(8, 8, 1), unit="dimension", vocab_size=256, labels=(),
    decode=lambda row: np.asarray(row, np.uint8).reshape(8, 8, 1),
)  # fmt: skip


def blobs(rows: int, seed: int) -> np.ndarray:
    """Images [N, 64] of one soft blob each, of random place and size."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:8, :8]
    place, size = rng.uniform(2, 6, (2, rows, 1, 1)), rng.uniform(1, 2, (rows, 1, 1))
    light = np.exp(-((y - place[0]) ** 2 + (x - place[1]) ** 2) / (2 * size**2))
    return np.round(255 * light).astype(np.int32).reshape(rows, 64)


def test_random_features_order_real_noised_and_noisier_images():
    rng, kind = np.random.default_rng(0), RandomFeatures(6)
    real, other = blobs(300, 1), blobs(300, 2)

    def noised(share: float) -> np.ndarray:
        return np.where(rng.random(other.shape) < share, rng.integers(0, 256, other.shape), other)

    theirs = kind(decoded(DOMAIN, real))
    assert theirs.shape == (300, 96) and theirs.dtype == np.float32
    found = [
        sets.frechet_distance(kind(decoded(DOMAIN, x)), theirs)
        for x in (other, noised(0.02), noised(0.1), noised(0.5))
    ]
    assert found == sorted(found) and found[2] > 2 * found[0]
    precisions = [
        sets.precision_recall(kind(decoded(DOMAIN, x)), theirs)[0] for x in (other, noised(0.1))
    ]
    assert precisions[0] > 0.8 > precisions[1]
    # Nothing is learned, so that another process finds the same features.
    np.testing.assert_allclose(RandomFeatures(6)(decoded(DOMAIN, real[:5])), theirs[:5], rtol=1e-5)


def test_images_of_any_size_and_channels_have_features():
    for shape in ((1, 1, 1), (5, 3, 3), (32, 32, 3)):
        assert RandomFeatures(2)(np.zeros((3, *shape), np.uint8)).shape == (3, 32)


class Images:
    """A corpus of images that counts what is read."""

    def __init__(self, rows: np.ndarray):
        self.rows, self.source = rows, None

    def sizes(self, splits):
        return {split: types.SimpleNamespace(sequences=len(self.rows)) for split in splits}

    def stream(self, split):
        return self.rows.ravel()

    def eval_batches(self, split, *, batch_size, rows):
        assert (rows == np.arange(batch_size)).all()
        for first in range(0, len(self.rows), batch_size):
            part = self.rows[first : first + batch_size]
            yield batch_of(part, context={"label": part[:, 0] % 3})


def test_images_are_spread_over_the_split():
    corpus = Images(np.arange(2500)[:, None] * np.ones((1, 64), int))
    rows, labels = spread(corpus, "train", 10)
    assert rows[:, 0].tolist() == list(range(0, 2500, 250))
    assert (labels == rows[:, 0] % 3).all()
    assert len(spread(corpus, "train", 5000)[0]) == 2500


def test_copies_of_training_images_are_found():
    train = blobs(300, 1)
    samples = np.concatenate([train[[5, 250]], blobs(2, 9)])
    rows, away = beside_nearest(samples, train.ravel(), 3)
    assert rows.shape == (4, 4, 64) and (away[:2] == 0).all() and (away[2:] > 1).all()
    np.testing.assert_array_equal(rows[:2, 0], rows[:2, 1])
    np.testing.assert_array_equal(beside_nearest(train[:3] + 2, train.ravel(), 1)[1], 2.0)


def test_what_frechet_refuses():
    for options, words in (
        (dict(num=3), "num=3 must be at least 2 and more than neighbours=3"),
        (dict(nearest=-1), "nearest must not be negative, not -1"),
        (dict(split="dev"), "split must be train"),
    ):
        with pytest.raises(UserError, match=words):
            FrechetDistance(**options)
    text = types.SimpleNamespace(domain=types.SimpleNamespace(shape=(256,), unit="token"))
    with pytest.raises(UserError, match=r"evals.q compares images, but .* of the shape \(256,\)"):
        FrechetDistance().check(text, "evals.q")
    images = types.SimpleNamespace(domain=DOMAIN)
    FrechetDistance().check(images, "evals.q")
    with pytest.raises(UserError, match="evals.q.labels=True needs data with labels"):
        FrechetDistance(labels=True).check(images, "evals.q")
    guide = types.SimpleNamespace(label=1, options=types.SimpleNamespace(classifier="runs/c"))
    guided = types.SimpleNamespace(domain=types.SimpleNamespace(**{**vars(DOMAIN), "labels": "ab"}))
    guided.guide = guide
    FrechetDistance().check(guided, "evals.q")
    with pytest.raises(UserError, match="labels=True .*=runs/c guides each to sample.label=1"):
        FrechetDistance(labels=True).check(guided, "evals.q")
    with pytest.raises(UserError, match="features.weights must name the weights of Inception"):
        InceptionFeatures()
    assert [kind.distance for kind in FEATURES.values()] == ["random_feature_distance", "fid"]


def written(path, tensors: dict[str, np.ndarray]):
    """A safetensors file of float32 tensors."""
    header, at = {}, 0
    for name, value in tensors.items():
        end = at + value.nbytes
        header[name] = {"dtype": "F32", "shape": value.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    body = b"".join(value.tobytes() for value in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def test_weights_are_read_and_wrong_files_are_named(tmp_path):
    known = "Mixed_7c.branch_pool.conv.weight"
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), known: np.ones(2, np.float32)}
    path = written(tmp_path / "w.safetensors", tensors)
    found = inception.loaded(str(path))
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(found[name], value)
    other = written(tmp_path / "other.safetensors", {"a": tensors["a"]})
    with pytest.raises(UserError, match=f"has no {known}"):
        inception.loaded(str(other))
    with pytest.raises(UserError, match="there is no such file, and it is not an OWNER/NAME/FILE"):
        inception.loaded("nowhere.safetensors")
    other.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match="other.safetensors is cut short: it has"):
        inception.loaded(str(other))


def test_a_run_compares_samples_with_the_split_and_keeps_its_features(monkeypatch, tmp_path):
    """Samples that are held-out images; each has the label of an image of the split."""
    images, asked = Images(blobs(400, 1)), {}

    def drawn(experiment, params, programs, prompts, context=None):
        assert len(prompts) == 1 and not prompts[0].mask.any()
        asked.update(num=experiment.sample.num, context=context)
        return types.SimpleNamespace(tokens=blobs(experiment.sample.num, 2))

    monkeypatch.setattr(frechet, "drawn_samples", drawn)
    said, programs = [], {}
    context = types.SimpleNamespace(
        name="q",
        step=7,
        workdir=tmp_path,
        programs=programs,
        say=said.append,
        corpus=lambda changes: images,
    )
    experiment = Fake(DOMAIN, SampleOptions(num=4, trace=True))
    found = FrechetDistance(num=300, labels=True).run(experiment, {}, context)
    assert asked["num"] == 300
    wanted = np.linspace(0, 400, 300, endpoint=False).astype(int)
    np.testing.assert_array_equal(asked["context"]["label"], images.rows[wanted, 0] % 3)
    assert (found["split"], found["samples"], found["images"]) == ("train", 300, 300)
    direct = sets.frechet_distance(
        RandomFeatures()(decoded(DOMAIN, blobs(300, 2))),
        RandomFeatures()(decoded(DOMAIN, images.rows[wanted])),
    )
    assert found["random_feature_distance"] == pytest.approx(direct, rel=1e-6)
    assert found["precision"] > 0.7 and found["recall"] > 0.7 and found["copies"] == 0
    picture = tmp_path / "samples" / "step_00000007.q.png"
    assert found["picture"] == str(picture) and pictures.read(picture).shape[2] == 3
    assert len(programs) == 1 and "random feature distance" in said[0]
    # Where nobody may write, the numbers are kept without the picture.
    context.workdir = picture
    alone = FrechetDistance(num=300).run(experiment, {}, context)
    assert alone["copies"] == 0 and "picture" not in alone
    assert said[-2].startswith("warning: the picture of the nearest images was not saved in ")
    # Another image in the split is not noticed, since its features are kept.
    images.rows = images.rows[::-1]
    plain = FrechetDistance(num=300, neighbours=0, nearest=0).run(experiment, {}, context)
    assert plain["random_feature_distance"] == found["random_feature_distance"]
    assert asked["context"] is None and not {"precision", "copies"} & plain.keys()


@pytest.mark.parametrize(("split", "more"), [("test", r", or raise data\.test"), ("train", "")])
def test_a_split_of_one_image_is_refused_before_the_run(split, more):
    def corpus(size):
        sizes = lambda splits: {split: SplitSize(size, 4 * size) for split in splits}  # noqa: E731
        return types.SimpleNamespace(sizes=sizes, check_stride=lambda stride: None)

    asked = FrechetDistance(split=split)
    said = rf"^evals\.q: the {split} split has 1 image, but .* at least 2: set evals\.q\.split to "
    with pytest.raises(UserError, match=rf"{said}another split{more}$"):
        sizes_of("q", asked, lambda changes: corpus(1))
    assert sizes_of("q", asked, lambda changes: corpus(2)) == {("q", split): SplitSize(2, 8)}


@pytest.fixture
def guided():
    """A model of digits, samples with guidance but without sample.label, and an evaluator."""
    words = {"sample.guidance": "2.0", "mesh.data": "1", "network.size": "32", "network.depth": "1"}

    def make(**more):
        keys = {f"evals.quality.{key}": str(value) for key, value in more.items()}
        config = schema.load_config("configs/digits.py", {**words, **keys})
        return build.experiment(config, Digits().domain())

    return make


def test_guidance_needs_no_label_that_the_samples_have(guided):
    """Labels of images replace sample.label, so it is not asked for; `samples` needs it."""
    found = guided(name="frechet", labels=True, split="test")
    sizes = lambda splits: {split: SplitSize(9, 9 * 64) for split in splits}  # noqa: E731
    corpus = types.SimpleNamespace(
        sizes=sizes, check_stride=lambda stride: None, has_labels=lambda split: True
    )
    suite = Suite(found, "WORKDIR", lambda changes: corpus)
    assert suite.sizes(["quality"]) == {("quality", "test"): SplitSize(9, 9 * 64)}
    said = "sample.guidance=2.0 steers samples towards a class or a prompt: set sample.label"
    with pytest.raises(UserError, match=said):
        suite.sizes(["samples"])
    with pytest.raises(UserError, match=said):
        drawn_samples(found, {}, {})
    for more in ({}, dict(name="frechet", split="test")):
        with pytest.raises(UserError, match=said):
            guided(**more)


class Fake(NamedTuple):
    """As much of an experiment as the evaluator looks at."""

    domain: object
    sample: SampleOptions


@pytest.mark.slow
def test_inception_has_the_features_of_pytorch_fid(tmp_path):
    """With random weights; tests/published/README.md says where the numbers are from."""
    stored = json.loads((Path(__file__).parents[1] / "published" / "inception.json").read_text())
    shapes = {}
    for name, shape in stored["convolutions"].items():
        norm = ("bias", "running_mean", "running_var", "weight")
        shapes |= {f"{name}.conv.weight": shape}
        shapes |= {f"{name}.bn.{part}": shape[:1] for part in norm}
    draw, weights = np.random.RandomState(0), {}
    for name, shape in sorted(shapes.items()):
        if name.endswith(("running_var", "bn.weight")):
            value = draw.uniform(0.5, 1.5, shape)
        elif name.endswith("conv.weight"):
            value = draw.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
        else:
            value = 0.1 * draw.standard_normal(shape)
        weights[name] = value.astype(np.float32)
    images = np.random.RandomState(1).randint(0, 256, (2, 32, 40, 3)).astype(np.uint8)
    images[1] = images[1] // 3 + np.arange(40)[None, :, None].astype(np.uint8)
    path = written(tmp_path / "w.safetensors", weights)
    found = InceptionFeatures(str(path))(images)
    assert found.shape == (2, 2048)
    np.testing.assert_allclose(found[:, :40], stored["first_features"], rtol=1e-3, atol=1e-3)
    assert found.mean() == pytest.approx(stored["mean"], rel=1e-4)
    assert found.std() == pytest.approx(stored["std"], rel=1e-4)
