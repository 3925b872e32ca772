"""Pictures of images: grids, paths from noise, inpainting, and which prompts are refused."""

import json
import re
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from md4_jax.data.pixels import PixelDomain
from md4_jax.data.tokenizers import Bytes
from md4_jax.generate import image_traces, pages, pictures, traces, writers
from md4_jax.generate.prompts import templates
from md4_jax.options import PromptOptions
from md4_jax.protocols import Prompt, UserError
from md4_jax.runtime.paths import place

RGB = PixelDomain((2, 2, 3))
GREY = PixelDomain((2, 3, 1), 4)  # shown as 0, 85, 170, 255
BLANK = list(pictures.BLANK)


def read(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def cells(path, shape):
    """The images of a grid, [rows, columns, H, W, 3], after a check that each is flat squares."""
    whole, scale, gap = read(path), pictures.factor(shape), pictures.GAP
    height, width = shape[0] * scale + gap, shape[1] * scale + gap
    assert (whole.shape[0] - gap) % height == (whole.shape[1] - gap) % width == 0
    found = [
        [
            whole[top + gap : top + height, left + gap : left + width]
            for left in range(0, whole.shape[1] - gap, width)
        ]
        for top in range(0, whole.shape[0] - gap, height)
    ]
    found = np.array(found)
    small = found[:, :, ::scale, ::scale]
    np.testing.assert_array_equal(small.repeat(scale, axis=2).repeat(scale, axis=3), found)
    return small


def test_a_pixel_without_all_of_its_channels_has_one_flat_colour():
    z = np.arange(12) * 10
    z[[3, 10]] = 256, -1
    image = pictures.coloured(RGB, z)
    assert image[0, 0].tolist() == [0, 10, 20] and image[1, 0].tolist() == [60, 70, 80]
    assert image[0, 1].tolist() == image[1, 1].tolist() == BLANK
    assert len(set(BLANK)) > 1  # no grey


def test_small_images_are_enlarged_without_smoothing():
    assert [pictures.factor((n, n, 1)) for n in (8, 28, 32, 64, 200)] == [16, 4, 4, 2, 1]


class Samples(NamedTuple):
    tokens: np.ndarray
    prompt_mask: np.ndarray


def test_samples_are_a_grid_and_an_array(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 4, (5, 6))
    drawn = Samples(tokens, np.zeros((5, 6), bool))
    path = writers.write_pictures(place(tmp_path), 7, GREY, drawn, [])
    again = writers.write_pictures(place(tmp_path), 7, GREY, drawn, [])
    assert [path.name, again.name] == ["step_00000007.png", "step_00000007-2.png"]
    np.testing.assert_array_equal(np.load(path.with_suffix(".npy")), tokens.reshape(5, 2, 3, 1))
    grid = cells(path, GREY.shape)
    assert grid.shape == (2, 3, 2, 3, 3)
    shown = np.array([0, 85, 170, 255])[tokens].reshape(5, 2, 3)
    np.testing.assert_array_equal(grid.reshape(6, 2, 3, 3)[:5], shown[..., None].repeat(3, axis=3))
    assert (grid[1, 2] == 255).all()
    assert not list(tmp_path.glob("*inpaint*"))


def test_what_was_filled_in_stands_below_its_original(tmp_path):
    originals = np.array([[0, 1, 2, 3, 2, 1], [3, 3, 3, 0, 0, 0]])
    stays = np.array([True, True, False, True, False, False])
    prompts = [Prompt(row, stays) for row in originals]
    tokens = np.where(stays, originals.repeat(2, axis=0), [[0], [1], [2], [3]])
    drawn = Samples(tokens, np.tile(stays, (4, 1)))
    path = writers.write_pictures(place(tmp_path), 0, GREY, drawn, prompts)
    grid = cells(path.with_suffix(".inpaint.png"), GREY.shape).reshape(4, 2, 6, 3)
    for column in range(2):
        np.testing.assert_array_equal(grid[0, column, :, 0] // 85, originals[column])
        assert (grid[1, column, ~stays] == BLANK).all()
        np.testing.assert_array_equal(grid[1, column, stays, 0] // 85, originals[column, stays])
        for number in range(2):
            here = grid[2 + number, column, :, 0] // 85
            np.testing.assert_array_equal(here, tokens[2 * column + number])


def path_of(domain, count=3):
    """States of `count` samples that reveal position f in step f, with confidence (f + 1) / 10."""
    length = int(np.prod(domain.shape))
    final = np.arange(count)[:, None] + np.arange(length) % 3
    steps = np.arange(length + 1)[:, None, None]
    drawn = np.arange(length) < steps
    z = np.where(drawn, final % domain.vocab_size, domain.vocab_size)
    return z, np.where(drawn, (np.arange(length) + 1) / 10, np.zeros(z.shape))


def test_paths_go_from_the_mask_to_the_samples(tmp_path):
    z, _ = path_of(GREY)
    image_traces.paths(GREY, z, tmp_path / "a.png")
    grid = cells(tmp_path / "a.png", GREY.shape)
    assert grid.shape == (3, 7, 2, 3, 3)
    assert (grid[:, 0] == BLANK).all()
    for row in range(3):
        blanks = [(image.reshape(-1, 3) == BLANK).all(axis=1).sum() for image in grid[row]]
        assert blanks == [6, 5, 4, 3, 2, 1, 0]
        np.testing.assert_array_equal(grid[row, -1, ..., 0].ravel() // 85, z[-1, row])


def test_the_page_and_the_animation_of_an_image(tmp_path):
    z, confidence = path_of(GREY)
    free = np.zeros(6, bool)
    path = traces.trajectory((z[None, :, 1], confidence[None, :, 1]), free, GREY)
    image_traces.gif(path, place(tmp_path / "a.gif"), GREY)
    with Image.open(tmp_path / "a.gif") as image:
        assert image.n_frames == 7
        first = np.asarray(image.convert("RGB"))
        assert np.abs(first[60, 60].astype(int) - BLANK).max() <= 2
    pages.write([path], place(tmp_path / "a.html"), "A <title>", GREY)
    text = (tmp_path / "a.html").read_text()
    data = json.loads(re.search(r"const data = (.*);\n", text)[1])
    assert data["shared"]["shape"] == [2, 3, 1] and data["shared"]["flat"] == BLANK
    assert data["shared"]["unit"] == "values"
    (sample,) = data["samples"]
    painted = [sample["values"][symbol] // 85 for symbol in sample["final"]]
    assert painted == z[-1, 1].tolist()
    assert sample["frames"][3]["changes"] == [[2, sample["final"][2], 0.3]]
    assert sample["words"][sample["mask"]] == traces.MASK


# Prompts


def asked(domain, example=None, **options):
    return templates(PromptOptions(**options), domain, int(np.prod(domain.shape)), example)


@pytest.fixture
def image(tmp_path):
    """A 2 x 2 picture and a mask, white in its left column."""
    values = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    Image.fromarray(values).save(tmp_path / "image.png")
    Image.fromarray(np.array([[255, 0], [200, 100]], np.uint8)).save(tmp_path / "mask.png")
    return str(tmp_path / "image.png"), str(tmp_path / "mask.png")


def test_an_image_without_a_prompt_is_free():
    (free,) = asked(RGB)
    assert not free.mask.any() and free.mask.shape == (12,)


def test_a_mask_is_white_where_all_channels_are_filled(image):
    (prompt,) = asked(RGB, inpaint=image[0], mask=image[1])
    assert prompt.tokens.tolist() == list(range(12)) and prompt.tokens.dtype == np.int32
    assert prompt.mask.reshape(2, 2, 3).all(axis=2).tolist() == [[False, True], [False, True]]
    assert prompt.mask.sum() == 6


def test_a_box_is_top_left_height_and_width(image):
    (prompt,) = asked(RGB, inpaint=image[0], box="1,0,1,2")
    assert prompt.mask.reshape(2, 2, 3).all(axis=2).tolist() == [[True, True], [False, False]]
    assert prompt.mask.sum() == 6


def test_a_colour_picture_is_made_grey_for_grey_data_and_quantised(tmp_path):
    Image.new("RGB", (3, 2), (200, 200, 200)).save(tmp_path / "a.png")
    (prompt,) = asked(GREY, inpaint=str(tmp_path / "a.png"), box="0,0,1,1")
    assert prompt.tokens.tolist() == [3] * 6


def test_examples_of_the_data():
    seen = []

    def example(split, number):
        seen.append((split, number))
        return np.full(6, number % 4, np.uint8)

    found = asked(GREY, example, image_from="test:2,5", box="0,0,2,1")
    assert seen == [("test", 2), ("test", 5)]
    assert [prompt.tokens[0] for prompt in found] == [2, 1]
    assert found[0].mask.tolist() == [False, True, True, False, True, True]
    assert len(asked(GREY, image_from="test:2", box="0,0,2,1")) == 1  # is checked, not read


@pytest.mark.parametrize(
    "options, words",
    [
        (
            dict(inpaint="a.png"),
            "sample.inpaint also needs the region to fill: set sample.mask or sample.box",
        ),
        (dict(image_from="test:1"), "sample.image_from also needs the region to fill"),
        (
            dict(box="0,0,1,1"),
            "sample.box also needs an image: set sample.inpaint or sample.image_from",
        ),
        (dict(mask="a.png"), "sample.mask also needs an image"),
        (dict(inpaint="a", image_from="test:1"), "inpaint cannot be combined with sample.image_"),
        (dict(inpaint="a", mask="b", box="0,0,1,1"), "mask cannot be combined with sample.box"),
        (dict(image_from="test:1", box="0,0,1"), "box=0,0,1 must be four whole numbers"),
        (dict(image_from="test:1", box="0,0,0,1"), "height and width of at least 1"),
        (dict(image_from="test:1", box="0,0,-1,1"), "four whole numbers"),
        (dict(image_from="test:1", box="1,1,2,1"), "ends at row 3 and column 2, .* 2 x 3 pix"),
        (dict(image_from="test:1", box="0,2,1,2"), "ends at row 1 and column 4, .* 2 x 3 pix"),
        (dict(image_from="exam:1", box="0,0,1,1"), "image_from=exam:1 must be a split .train,"),
        (dict(image_from="test", box="0,0,1,1"), "such as test:3 or test:0,3,7"),
        (dict(image_from="test:-1", box="0,0,1,1"), "image_from=test:-1 must be"),
        (dict(inpaint="no.png", box="0,0,1,1"), "sample.inpaint=no.png cannot be read as an"),
        (dict(prompt="To be"), "sample.prompt is only for text, and this run has images"),
        (dict(template="_"), "sample.template is only for text"),
    ],
)
def test_prompts_of_images_that_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        asked(GREY, **options)


def test_sizes_are_named(image):
    with pytest.raises(UserError, match=r"image.png has 2 x 2 pixels .height x width., .* 2 x 3"):
        asked(GREY, inpaint=image[0], box="0,0,1,1")
    with pytest.raises(UserError, match="sample.mask=.*mask.png has 2 x 2 pixels"):
        asked(GREY, image_from="test:0", mask=image[1])


def test_text_takes_no_image():
    with pytest.raises(UserError, match="sample.box is only for images, and this run has text"):
        templates(PromptOptions(box="0,0,1,1"), Bytes(), 8)
