"""Entropy and distinct n-grams of samples, against values worked out by hand."""

import math

import numpy as np
import pytest

from md4_jax.generate import diversity


def test_entropy_of_known_frequencies():
    """aabb has one bit, aaaa none, abcd two; aaab 3/4 log2(4/3) + 1/4 log2 4."""
    uneven = 0.75 * math.log2(4 / 3) + 0.5
    for row, bits in (
        ([0, 0, 1, 1], 1.0),
        ([7, 7, 7, 7], 0.0),
        ([3, 1, 2, 0], 2.0),
        ([5, 5, 5, 9], uneven),
        ([5, 5, 9, 5], uneven),
    ):
        mean, error = diversity.unigram_entropy(np.array([row]))
        assert mean == pytest.approx(bits, abs=1e-12)
        assert math.isnan(error)


def test_entropy_is_that_of_each_sequence_and_its_error_that_of_the_mean():
    """Two sequences of one symbol each have none, though together they have a bit."""
    assert diversity.unigram_entropy(np.array([[0, 0], [1, 1]])) == (0.0, 0.0)
    # 0, 1 and 2 bits: mean 1, standard deviation 1, error 1/sqrt(3).
    tokens = np.array([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3]])
    mean, error = diversity.unigram_entropy(tokens)
    assert mean == pytest.approx(1.0)
    assert error == pytest.approx(1 / math.sqrt(3))


def test_distinct_counts_over_all_sequences_and_not_across_their_ends():
    tokens = np.array([[0, 1, 0, 1], [0, 1, 2, 0]])
    assert diversity.distinct(tokens, 1) == 3 / 8
    # 01 10 01 | 01 12 20, without 10 of the seam
    assert diversity.distinct(tokens, 2) == 4 / 6
    # 010 101 | 012 120
    assert diversity.distinct(tokens, 3) == 4 / 4
    assert diversity.distinct(tokens, 4) == 2 / 2
    assert diversity.distinct(tokens[[0, 0]], 4) == 1 / 2
    assert math.isnan(diversity.distinct(tokens, 5))


def test_the_order_of_an_n_gram_matters():
    assert diversity.distinct(np.array([[0, 1], [1, 0]]), 2) == 1.0
    assert diversity.distinct(np.array([[0, 1], [0, 1]]), 2) == 0.5


def test_numbers_by_name():
    tokens = np.array([[0, 0, 1]])
    found = diversity.numbers(tokens)
    assert list(found) == [
        "unigram_entropy_bits", "unigram_entropy_bits_se",
        "distinct_1", "distinct_2", "distinct_3", "distinct_4",
    ]  # fmt: skip
    assert found["unigram_entropy_bits"] == pytest.approx(math.log2(3) - 2 / 3)
    assert (found["distinct_1"], found["distinct_2"], found["distinct_3"]) == (2 / 3, 1.0, 1.0)
    assert math.isnan(found["distinct_4"]) and math.isnan(found["unigram_entropy_bits_se"])
