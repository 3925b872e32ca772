"""Numbers that say how varied samples are, from their tokens alone."""

import math

import numpy as np

ORDERS = (1, 2, 3, 4)


def unigram_entropy(tokens: np.ndarray) -> tuple[float, float]:
    """Entropy in bits of the token frequencies within each sequence of [N, L]: (mean, its error).

    -sum_k f_k log2 f_k: at most log2(min(L, V)); low where a sample repeats itself. The error is
    that of the mean over sequences, nan for one.
    """
    each = []
    for row in tokens:
        share = np.unique(row, return_counts=True)[1] / row.size
        each.append(-np.sum(share * np.log2(share)))
    error = np.std(each, ddof=1) / math.sqrt(len(each)) if len(each) > 1 else math.nan
    return float(np.mean(each)), float(error)


def distinct(tokens: np.ndarray, order: int) -> float:
    """Different n-grams as a share of all n-grams of [N, L], n = order; nan where L < n."""
    if tokens.shape[1] < order:
        return math.nan
    grams = np.lib.stride_tricks.sliding_window_view(tokens, order, axis=1).reshape(-1, order)
    return len(np.unique(grams, axis=0)) / len(grams)


def numbers(tokens: np.ndarray) -> dict[str, float]:
    """Those above by name."""
    entropy, error = unigram_entropy(tokens)
    named = {"unigram_entropy_bits": entropy, "unigram_entropy_bits_se": error}
    return named | {f"distinct_{n}": distinct(tokens, n) for n in ORDERS}
