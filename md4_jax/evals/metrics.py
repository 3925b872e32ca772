"""Likelihoods with standard errors; the only module that converts nats."""

import math

import numpy as np

from md4_jax.protocols import Array

BITS = 1.0 / math.log(2.0)
# Smallest number of sequences, or batches, for an error from their spread; degree of the polynomial
# fitted to the mean over strata.
FEWEST, DEGREE = 32, 4


def bits(nats: float) -> float:
    """Converts nats to bits."""
    return nats * BITS


class Likelihood:
    """Estimate of a bound on -log p of a split, with its standard error, in float64 on the host.

    The estimate is the ratio (sum of nats) / (sum of tokens) over N sequences. The nats of a
    sequence are the mean of its draws. The standard error is that of a ratio,
    sqrt(N / (N - 1) sum_i e_i^2) / sum_i tokens_i,   e_i = nats_i - ratio tokens_i,
    which includes the spread between sequences and the noise of the draws. If the noise levels are
    stratified over each batch, `_stratified` replaces the sum of squares. For a single sequence it
    is the error of its draws, treated as independent, which overestimates it. Nats per byte and per
    word are estimated in the same way.
    """

    def __init__(self):
        self._nats: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []
        self._text: list[np.ndarray] = []
        self._strata: list[np.ndarray] = []

    def add(
        self,
        nats: Array,
        tokens: Array,
        *,
        text: Array | None = None,
        strata: Array | None = None,
    ) -> None:
        """Adds nats [draws, B] of sequences with tokens [B] that count; 0 tokens mark padding rows.

        text [B, 2]: numbers of bytes and words of the counted tokens, if known.
        strata [B]: numbers in [0, 1), spread evenly over the batch, that determine the noise
        levels; None: draws of different sequences are independent.
        """
        real = np.asarray(tokens) > 0
        if strata is not None:
            self._strata.append(np.asarray(strata, np.float64)[real])
        self._nats.append(np.asarray(nats, np.float64)[:, real])
        self._tokens.append(np.asarray(tokens, np.float64)[real])
        if text is not None:
            self._text.append(np.asarray(text, np.float64)[real])

    def result(self, unit: str = "token") -> dict[str, float]:
        """Returns {name: value, name_se: error} per token and, if known, per byte and word.

        unit: name of a token, in bits_per_UNIT: "token", "character" or "dimension"
        """
        nats, tokens = np.concatenate(self._nats, axis=1), np.concatenate(self._tokens)
        sizes = {"tokens": tokens}
        if self._text:
            sizes["bytes"], sizes["words"] = np.concatenate(self._text).T
        ratio, error = _ratio(nats, tokens, self._strata)
        named = {
            "nats_per_token": (ratio, error),
            "bits_per_token": (bits(ratio), bits(error)),
            "perplexity": _perplexity(ratio, error),
        }
        named[f"bits_per_{unit}"] = named["bits_per_token"]
        if self._text and sizes["bytes"].any():
            named["bits_per_byte"] = tuple(map(bits, _ratio(nats, sizes["bytes"], self._strata)))
        if self._text and sizes["words"].any():
            named["word_perplexity"] = _perplexity(*_ratio(nats, sizes["words"], self._strata))
        out: dict[str, float] = {"sequences": len(tokens)}
        out |= {name: int(size.sum()) for name, size in sizes.items()}
        for name, (value, its_error) in named.items():
            out[name], out[name + "_se"] = value, its_error
        return out


def _ratio(nats: np.ndarray, sizes: np.ndarray, strata: list[np.ndarray]) -> tuple[float, float]:
    """Returns (sum of nats [draws, N]) / (sum of sizes [N]) and its standard error."""
    draws, count = nats.shape
    each = nats.mean(axis=0)
    ratio = each.sum() / sizes.sum()
    rest = each - ratio * sizes
    if strata and count >= FEWEST:
        spread = _stratified(rest, strata)
    elif count > 1:
        spread = np.sum(rest**2) * count / (count - 1)
    else:
        spread = np.var(nats, ddof=1) / draws if draws > 1 else math.nan
    return ratio, math.sqrt(spread) / sizes.sum()


def _stratified(rest: np.ndarray, strata: list[np.ndarray]) -> float:
    """Estimates the variance of sum(rest) [N], given the strata of each batch.

    Batches are independent, so with many of them the variance follows from their sums. For a few
    batches let m(v) be the mean of an entry at stratum v. The variance around m is half the mean
    squared difference of neighbours in v, since they have nearly the same m. The sum of m over a
    batch also varies, though little in a large batch; a polynomial fit to m estimates this part.
    """
    count, ends = len(rest), np.cumsum([len(part) for part in strata])[:-1]
    if len(strata) >= FEWEST:
        sums = [np.sum(part) for part in np.split(rest, ends)]
        return np.sum(np.square(sums)) * len(sums) / (len(sums) - 1)
    v = np.concatenate(strata)
    differences = np.diff(rest[np.argsort(v)])
    around = np.sum(differences**2) * count / (2 * (count - 1))
    powers = np.polynomial.legendre.legvander(2.0 * v - 1.0, DEGREE)[:, 1:]
    fitted = powers @ np.linalg.lstsq(powers, rest)[0]
    return around + sum(np.sum(part) ** 2 for part in np.split(fitted, ends))


def perplexity(nats: np.ndarray) -> np.ndarray:
    """Computes exp(nats) of nats per token or word, limited to finite values."""
    return np.exp(np.minimum(nats, 700.0))


def _perplexity(nats: float, error: float) -> tuple[float, float]:
    """Returns the perplexity and its standard error."""
    found = float(perplexity(nats))
    return found, found * error
