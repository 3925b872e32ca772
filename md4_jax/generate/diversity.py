"""Diversity of samples, measured on their tokens."""

import math
from collections.abc import Sequence

import numpy as np

ORDERS = (1, 2, 3, 4)


def unigram_entropy(rows: Sequence[np.ndarray]) -> tuple[float, float]:
    """Entropy in bits of each sequence's token histogram: (mean, standard error).

    -sum_k f_k log2 f_k is at most log2(min(L, V)), and low for repetitive samples. The standard
    error is nan for a single sequence.
    """
    each = []
    for row in rows:
        share = np.unique(row, return_counts=True)[1] / row.size
        each.append(-np.sum(share * np.log2(share)))
    error = np.std(each, ddof=1) / math.sqrt(len(each)) if len(each) > 1 else math.nan
    return float(np.mean(each)), float(error)


def distinct(rows: Sequence[np.ndarray], order: int) -> float:
    """Fraction of distinct n-grams among all n-grams of the sequences, n = order; nan for none."""
    view = np.lib.stride_tricks.sliding_window_view
    grams = [view(row, order) for row in rows if len(row) >= order]
    if not grams:
        return math.nan
    grams = np.concatenate(grams)
    return len(np.unique(grams, axis=0)) / len(grams)


def numbers(rows: Sequence[np.ndarray]) -> dict[str, float]:
    """Returns the entropy and the fractions of distinct n-grams, by name."""
    entropy, error = unigram_entropy(rows)
    named = {"unigram_entropy_bits": entropy, "unigram_entropy_bits_se": error}
    return named | {f"distinct_{n}": distinct(rows, n) for n in ORDERS}
