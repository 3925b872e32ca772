"""Digits from the package to pictures: training, sampling, inpainting and TensorBoard."""

import json
import re

import autoencoder_folders as autoencoders
import numpy as np
import pytest
from events import events_of
from PIL import Image

import md4_jax
from md4_jax.data import Digits
from md4_jax.server.actions import Playground

FLAGS = [
    f"--config.{word}"
    for word in (
        "network.size=32", "network.depth=1", "network.heads=2", "train.num_steps=6",
        "optim.warmup_steps=2", "train.batch_size=8", "evals.validation.every=0", "log.every=3",
        "evals.samples.every=3", "evals.test.limit=60", "evals.test.draws=1", "sample.num=4",
        "sample.steps=4",
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def digits(run, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("digits") / "run"
    ended = run("--config", "configs/digits.py", "--workdir", workdir, *FLAGS)
    assert ended.code == 0, ended
    return workdir, ended


@pytest.mark.slow
def test_a_run_of_digits(digits):
    workdir, ended = digits
    assert "bits/dimension" in ended.out and "perplexity" not in ended.out
    assert "4 samples of 64 dimensions from step 6" in ended.out
    assert "train: 1,437 images, " in ended.out and "8 images of 64 dimensions, " in ended.out
    assert " images/s" in ended.out + ended.err and "tokens" not in ended.out
    (last,) = (
        row
        for row in map(json.loads, (workdir / "evaluations.jsonl").read_text().splitlines())
        if row["eval"] == "test"
    )
    assert last["bits_per_dimension"] == last["bits_per_token"] > 0
    assert last["tokens"] == 64 * last["sequences"]
    pictures = sorted(path.name for path in (workdir / "samples").glob("*.png"))
    assert pictures == ["step_00000003.png", "step_00000006-2.png", "step_00000006.png"]
    arrays = np.load(workdir / "samples" / "step_00000006.npy")
    assert arrays.shape == (4, 8, 8, 1) and arrays.dtype == np.uint8 and arrays.max() <= 16
    (file,) = (workdir / "tensorboard").glob("events.*")
    shown = [
        (e.step, v.tag) for e in events_of(file) for v in e.summary.value if v.HasField("image")
    ]
    assert shown == [(3, "samples"), (6, "samples")]


@pytest.mark.slow
def test_inpainting_and_paths_from_the_command_line(digits, run, tmp_path):
    workdir, _ = digits
    sample = ["--workdir", workdir, "--mode", "sample", "--config.sample.label=3"]
    box = ["--config.sample.box=2,0,6,8", "--config.sample.image_from=test:3,5"]
    ended = run(*sample, *box, "--config.sample.trace=true", "--config.sample.num=2")
    assert ended.code == 0, ended
    result = json.loads(ended.out.strip().splitlines()[-1])
    arrays = np.load(result["picture"].replace(".png", ".npy"))
    originals = Digits().rows("test").tokens[[3, 5]].reshape(2, 8, 8, 1)
    np.testing.assert_array_equal(arrays[:, :2], originals.repeat(2, axis=0)[:, :2])
    assert (arrays[:, 2:] != originals.repeat(2, axis=0)[:, 2:]).any()
    for ending in (".inpaint.png", ".path.png", ".gif", ".html"):
        assert len(list((workdir / "samples").glob(f"*{ending}"))) == 1
    Image.fromarray(arrays[0, :, :, 0] * 15).save(tmp_path / "image.png")
    for key, value, words in (
        ("sample.inpaint", tmp_path / "image.png", "also needs the region to fill"),
        ("sample.box", "0,0,9,9", "needs an image"),
        ("sample.length", "128", "this run has images of 64 values"),
        ("sample.stride", "8", "this run has images of 64 values"),
        ("sample.prompt", "three", "is only for text"),
    ):
        refused = run(*sample, f"--config.{key}={value}")
        assert refused.code == 2 and re.search(words, refused.err), refused
    refused = run(*sample, "--config.sample.image_from=test:180", box[0])
    assert refused.code == 2 and "the test split has 180 images" in refused.err


@pytest.mark.slow
def test_quality_and_guidance_from_the_command_line(digits, run):
    """Each evaluation of guided samples calls the network twice; its options are checked."""
    workdir, _ = digits
    sample = ["--workdir", workdir, "--mode", "sample", "--config.sample.label=3"]
    ended = run(*sample, "--config.sample.guidance=2.5")
    assert ended.code == 0, ended
    found = json.loads(ended.out.splitlines()[-1])
    assert found["network_evaluations"] > 4  # of four steps
    ended = run("--workdir", workdir, "--mode", "sample", "--config.sample.guidance=2.5")
    assert ended.code == 2 and "set sample.label" in ended.err
    options = dict(name="frechet", num=12, labels=True, nearest=5, split="test")
    quality = [f"--config.evals.quality.{key}={value}" for key, value in options.items()]
    quality += ["--config.evals.quality.features.name=random"]
    quality += ["--config.evals.quality.features.channels=4"]
    ended = run("--workdir", workdir, "--mode", "eval", "--evals", "quality", *quality)
    assert ended.code == 0, ended
    found = json.loads(ended.out.splitlines()[-1])
    assert found["random_feature_distance"] > 0 and 0 <= found["recall"] <= 1
    assert (found["samples"], found["images"], found["copies"]) == (12, 12, 0)
    assert found["picture"].endswith("step_00000006.quality.png")


CODES = [
    f"--config.{word}"
    for word in (
        "data.name=images", "data.levels=256", "data.length=24", "data.validation=8", "data.test=8",
        "network.classes=2", "network.patch=1", "evals.quality.name=frechet", "evals.quality.num=6",
        "evals.quality.split=test", "evals.quality.nearest=2", "evals.quality.final=True",
        "sample.trace=True",
    )
]  # fmt: skip


@pytest.mark.campaign
def test_images_as_codes_of_an_autoencoder(run, tmp_path):
    folder, png = tmp_path / "vqgan", tmp_path / "png"
    autoencoders.write("vqgan", folder)
    autoencoders.pictures(png, ((16, 24),) * 24)
    data = [f"--config.data.path={png}", f"--config.data.autoencoder={folder}"]
    workdir = tmp_path / "run"
    ended = run("--config", "configs/digits.py", "--workdir", workdir, *FLAGS, *CODES, *data)
    assert ended.code == 0, ended
    assert "train: 8 images, 192 codes" in ended.out and " bits/code" in ended.out
    assert "4 samples of 24 codes from step 6" in ended.out
    # Everything after training needs the run alone.
    folder.rename(tmp_path / "elsewhere")
    sample = ["--workdir", workdir, "--mode", "sample", "--config.sample.image_from=test:3,5"]
    ended = run(*sample, "--config.sample.box=5,9,6,8", "--config.sample.num=2")
    assert ended.code == 0, ended
    result = json.loads(ended.out.strip().splitlines()[-1])
    codes = np.load(result["picture"].replace(".png", ".npy"))
    rows = md4_jax.load(workdir).experiment.domain.encode(autoencoders.images_of_test(png))
    originals = rows[[3, 5]].reshape(2, 4, 6, 1).repeat(2, axis=0)
    # Pixels in rows 5 to 10 and columns 9 to 16 are in rows 1 and 2, columns 2 to 4, of codes.
    filled = np.zeros((4, 6), bool)
    filled[1:3, 2:5] = True
    np.testing.assert_array_equal(codes[:, ~filled], originals[:, ~filled])
    assert (codes[:, filled] != originals[:, filled]).any()
    (page, *_) = (workdir / "samples").glob("*.html")
    assert '"picture": "data:image/jpeg;base64,' in page.read_text(encoding="utf-8")
    assert len(list((workdir / "samples").glob("*.path.png"))) >= 1
    assert Playground(md4_jax.load(workdir), "run").facts["picture"] == [16, 24, 3]
    (workdir / "autoencoder" / "config.json").write_text(
        (workdir / "autoencoder" / "config.json").read_text().replace('"signed"', '"unit"')
    )
    refused = run(*sample, "--config.sample.box=5,9,6,8")
    assert refused.code == 2 and "is not the autoencoder of this run" in refused.err
