"""Pixels as symbols: levels, order, what is shown, and mirrored images in training."""

import json

import numpy as np
import pytest

from md4_jax.data import images, loader
from md4_jax.data.domains import domain_from_json
from md4_jax.data.pixels import PixelDomain, shown
from md4_jax.data.sequences import Rows
from md4_jax.protocols import UserError


def test_symbols_are_the_levels_of_the_channels_in_raster_order():
    image = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 10
    domain = PixelDomain((2, 3, 3))
    assert domain.encode(image).tolist() == [10 * i for i in range(18)]
    assert domain.encode(image)[:3].tolist() == image[0, 0].tolist()
    np.testing.assert_array_equal(domain.decode(domain.encode(image)), image)
    batch = np.stack([image, image[::-1]])
    np.testing.assert_array_equal(domain.decode(domain.encode(batch)), batch)
    assert domain.encode(batch).shape == (2, 18) and domain.encode(batch).dtype == np.uint8


def test_fewer_levels_are_bins_of_equal_width():
    values = np.arange(256, dtype=np.uint8).reshape(16, 16, 1)
    assert PixelDomain((16, 16, 1), 32).encode(values).tolist() == [v >> 3 for v in range(256)]
    assert PixelDomain((16, 16, 1), 2).encode(values).tolist() == [v > 127 for v in range(256)]
    widths = np.bincount(PixelDomain((16, 16, 1), 17).encode(values))
    assert len(widths) == 17 and set(widths.tolist()) == {15, 16}


@pytest.mark.parametrize("levels", range(2, 257))
def test_what_is_shown_is_of_the_same_level_from_black_to_white(levels):
    values = shown(levels)
    assert values.dtype == np.uint8 and (np.diff(values.astype(int)) > 0).all()
    assert (values[0], values[-1]) == (0, 255)
    domain = PixelDomain((1, levels, 1), levels)
    assert domain.encode(values.reshape(1, levels, 1)).tolist() == list(range(levels))


def test_the_greys_of_the_digits_are_shown_in_equal_steps():
    assert np.abs(shown(17) - 255 / 16 * np.arange(17)).max() <= 1


def test_a_stored_domain_comes_back():
    domain = PixelDomain((8, 8, 1), 17, ("a", "b"))
    assert domain_from_json(domain.to_json(), 64) == domain
    assert json.loads(domain.to_json())["domain"] == "pixels"
    assert (domain.vocab_size, domain.unit) == (17, "dimension")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (((8, 8),), r"images have the shape \(H, W, 1\) or \(H, W, 3\), not \(8, 8\)"),
        (((8, 8, 2),), r"not \(8, 8, 2\)"),
        (((8, 8, 1), 257), r"data.levels=257 must lie in 2..256"),
        (((8, 8, 1), 1), r"data.levels=1 must lie in 2..256"),
    ],
)
def test_shapes_and_levels_that_are_refused(arguments, words):
    with pytest.raises(UserError, match=words):
        PixelDomain(*arguments)


def test_a_mirror_turns_left_into_right_where_the_bit_is_odd():
    image = np.arange(12).reshape(1, 12)  # 2 x 2 x 3
    mirrored = [3, 4, 5, 0, 1, 2, 9, 10, 11, 6, 7, 8]
    found = images.Mirror((2, 2, 3))(np.repeat(image, 3, axis=0), np.array([0, 1, 6], np.uint64))
    assert found.tolist() == [image[0].tolist(), mirrored, image[0].tolist()]


def flips(rows, taken=0, batches=40, seed=3, batch_size=4):
    """Image and whether it is mirrored, in the order of training: [places, 2]."""
    tokens = np.repeat(np.arange(10, dtype=np.uint8)[:, None], 4, axis=1)
    tokens[:, 1::2] += 100  # 1 x 4 x 1: the first value is larger once it is mirrored
    source = Rows(tokens, augment=images.Mirror((1, 4, 1)))
    made = [
        loader.train_iterator(source, batch_size=batch_size, seed=seed, rows=own) for own in rows
    ]
    for one in made:
        one.set_state({"sequences": taken})
    found = [next(one).tokens for _ in range(batches) for one in made]
    return np.array([(row[0] % 100, row[0] >= 100) for row in np.concatenate(found)])


def test_half_of_the_training_images_are_mirrored_anew_in_each_epoch():
    """400 images: within 4 standard errors, 0.1, of a half."""
    found = flips([np.arange(4)], batches=100)
    assert abs(found[:, 1].mean() - 0.5) < 4 * 0.5 / 20
    of_one = found[found[:, 0] == 7, 1]
    assert len(of_one) == 40 and 8 <= of_one.sum() <= 32
    of_epochs = found[:, 1].reshape(40, 10)
    assert len(np.unique(of_epochs, axis=0)) > 30


def test_mirrors_do_not_depend_on_processes_batches_or_restarts():
    whole = flips([np.arange(4)])
    np.testing.assert_array_equal(flips([np.arange(2), np.arange(2, 4)]), whole)
    np.testing.assert_array_equal(flips([np.arange(4)], taken=60, batches=20), whole[60:140])
    np.testing.assert_array_equal(flips([np.arange(8)], batches=20, batch_size=8), whole)
    assert (flips([np.arange(4)], seed=4) != whole).any()


def test_evaluation_never_mirrors():
    tokens = np.arange(12, dtype=np.uint8).reshape(3, 4)
    rows = Rows(tokens, augment=images.Mirror((1, 4, 1)))
    (batch,) = loader.eval_batches(rows, batch_size=3)
    np.testing.assert_array_equal(batch.tokens, tokens)
