"""Masks of the TPU's attention kernel, which is made from their tiles."""

import itertools

import numpy as np
import pytest

from md4_jax.networks import splash
from md4_jax.networks.splash import BlockDiffusionMask, CausalMask, kernel_of

LENGTH = 6
SLICES = [slice(a, b) for a, b in itertools.combinations(range(2 * LENGTH + 1), 2)]


def by_definition(block: int, causal: bool) -> np.ndarray:
    """Entry by entry: a noisy position sees its own block and the clean ones before it."""
    seen = np.zeros((2 * LENGTH, 2 * LENGTH), bool)
    for query, key in np.ndindex(seen.shape):
        (clean, place), (of_clean, other) = divmod(query, LENGTH), divmod(key, LENGTH)
        if not of_clean:
            seen[query, key] = not clean and other // block == place // block
        elif not clean:
            seen[query, key] = other // block < place // block
        else:
            seen[query, key] = other <= place if causal else other // block <= place // block
    return seen


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("block", [1, 2, 3, 6])
def test_every_tile_of_halves_is_that_of_the_definition(block, causal):
    """Of any place and size, in one half or in both."""
    expected = by_definition(block, causal)
    mask = BlockDiffusionMask(LENGTH, block, 2 * LENGTH, causal)
    for rows, columns in itertools.product(SLICES, SLICES):
        tile = mask[rows, columns]
        assert (tile == expected[rows, columns]).all(), (rows, columns)
        assert tile.shape == expected[rows, columns].shape and tile.dtype == bool
    odd = (slice(0, 2 * LENGTH, 2), slice(1, 2 * LENGTH, 3))
    np.testing.assert_array_equal(mask[odd], expected[odd])


def test_every_tile_of_a_causal_mask_is_that_of_the_definition():
    expected = np.tril(np.ones((2 * LENGTH, 2 * LENGTH), bool))
    mask = CausalMask(expected.shape)
    for tile in itertools.product(SLICES, SLICES):
        np.testing.assert_array_equal(mask[tile], expected[tile])
    assert mask == CausalMask(expected.shape) and hash(mask) == hash(CausalMask(expected.shape))


def test_only_tiles_that_have_both_are_computed(monkeypatch):
    """Of 16 x 16 the 3 x 8 on diagonals, twice for each of two kernels: not those of all."""
    calls, seen = [], splash.halves_seen

    def counted(*arguments, **options):
        calls.append(arguments)
        return seen(*arguments, **options)

    monkeypatch.setattr(splash, "halves_seen", counted)
    kernel_of(8192, 8192, 1, causal=False, block=32)
    assert len(calls) == 3 * 8 * 4
