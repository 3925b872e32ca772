"""Likelihoods with standard errors; the only place where nats are converted."""

import math

import numpy as np

from md4_jax.protocols import Array

BITS = 1.0 / math.log(2.0)


def bits(nats: float) -> float:
    """Converts nats to bits."""
    return nats * BITS


class Likelihood:
    """Estimate of a bound on -log p of a split, with its standard error, in float64 on the host.

    The estimate is the ratio (sum of nats) / (sum of tokens) over N sequences. The nats of a
    sequence are the mean of its draws. The standard error is that of a ratio,
    sqrt(N / (N - 1) sum_i (nats_i - ratio tokens_i)^2) / sum_i tokens_i,
    and includes the spread between sequences and the noise of the draws. For a single sequence it
    is that of its draws alone, taken as independent: too large rather than too small.
    Nats per byte and nats per word are estimated in the same way.
    """

    def __init__(self):
        self._nats: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []
        self._text: list[np.ndarray] = []

    def add(self, nats: Array, tokens: Array, *, text: Array | None = None) -> None:
        """Adds nats [draws, B] of sequences with tokens [B] that count; rows with 0 are padding.

        text [B, 2]: numbers of bytes and words of the counted tokens, if they are known.
        """
        real = np.asarray(tokens) > 0
        self._nats.append(np.asarray(nats, np.float64)[:, real])
        self._tokens.append(np.asarray(tokens, np.float64)[real])
        if text is not None:
            self._text.append(np.asarray(text, np.float64)[real])

    def result(self, unit: str = "token") -> dict[str, float]:
        """Returns {name: value, name_se: error} per token and, if known, per byte and word.

        unit: what a token is, in bits_per_UNIT: "token", "character" or "dimension"
        """
        nats, tokens = np.concatenate(self._nats, axis=1), np.concatenate(self._tokens)
        sizes = {"tokens": tokens}
        if self._text:
            sizes["bytes"], sizes["words"] = np.concatenate(self._text).T
        ratio, error = _ratio(nats, tokens)
        named = {
            "nats_per_token": (ratio, error),
            "bits_per_token": (bits(ratio), bits(error)),
            "perplexity": _perplexity(ratio, error),
        }
        named[f"bits_per_{unit}"] = named["bits_per_token"]
        if self._text and sizes["bytes"].any():
            named["bits_per_byte"] = tuple(map(bits, _ratio(nats, sizes["bytes"])))
        if self._text and sizes["words"].any():
            named["word_perplexity"] = _perplexity(*_ratio(nats, sizes["words"]))
        out: dict[str, float] = {"sequences": len(tokens)}
        out |= {name: int(size.sum()) for name, size in sizes.items()}
        for name, (value, its_error) in named.items():
            out[name], out[name + "_se"] = value, its_error
        return out


def _ratio(nats: np.ndarray, sizes: np.ndarray) -> tuple[float, float]:
    """Returns (sum of nats [draws, N]) / (sum of sizes [N]) and its standard error."""
    draws, count = nats.shape
    each = nats.mean(axis=0)
    ratio = each.sum() / sizes.sum()
    if count > 1:
        spread = np.sum((each - ratio * sizes) ** 2) * count / (count - 1)
    else:
        spread = np.var(nats, ddof=1) / draws if draws > 1 else math.nan
    return ratio, math.sqrt(spread) / sizes.sum()


def _perplexity(nats: float, error: float) -> tuple[float, float]:
    """Returns exp(nats), limited to finite values, and its standard error."""
    perplexity = math.exp(min(nats, 700.0))
    return perplexity, perplexity * error
