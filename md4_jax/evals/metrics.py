"""Likelihoods with their standard errors, and the one place where nats are converted."""

import math

import numpy as np

from md4_jax.protocols import Array

BITS = 1.0 / math.log(2.0)


def bits(nats: float) -> float:
    """nats -> bits."""
    return nats * BITS


class Likelihood:
    """A bound on -log p of a split: sums in float64 on the host, with its standard error.

    The estimate is the ratio (sum of nats) / (sum of tokens) over sequences, each
    sequence's nats being the mean of its draws. Its standard error is that of a
    ratio, sqrt(N / (N - 1) sum_i (nats_i - ratio tokens_i)^2) / sum_i tokens_i,
    which holds both the spread between sequences and the noise of the draws.
    The same nats over the bytes and over the words of the text are ratios of that kind too.
    """

    def __init__(self):
        self._nats: list[np.ndarray] = []
        self._tokens: list[np.ndarray] = []
        self._text: list[np.ndarray] = []

    def add(self, nats: Array, tokens: Array, *, text: Array | None = None) -> None:
        """Adds nats [draws, B] of sequences in which tokens [B] count; with none a row is padding.

        text [B, 2], the bytes and words that the counted tokens stand for, if they are known.
        """
        real = np.asarray(tokens) > 0
        self._nats.append(np.asarray(nats, np.float64).mean(axis=0)[real])
        self._tokens.append(np.asarray(tokens, np.float64)[real])
        if text is not None:
            self._text.append(np.asarray(text, np.float64)[real])

    def result(self, *, characters: bool) -> dict[str, float]:
        """Named numbers with errors: per token, per character where tokens are characters,
        and per byte and word where the text is known and has any."""
        nats, tokens = np.concatenate(self._nats), np.concatenate(self._tokens)
        sizes = {"tokens": tokens}
        if self._text:
            sizes["bytes"], sizes["words"] = np.concatenate(self._text).T
        ratio, error = _ratio(nats, tokens)
        named = {
            "nats_per_token": (ratio, error),
            "bits_per_token": (bits(ratio), bits(error)),
            "perplexity": _perplexity(ratio, error),
        }
        if characters:
            named["bits_per_character"] = named["bits_per_token"]
        if self._text and sizes["bytes"].any():
            named["bits_per_byte"] = tuple(map(bits, _ratio(nats, sizes["bytes"])))
        if self._text and sizes["words"].any():
            named["word_perplexity"] = _perplexity(*_ratio(nats, sizes["words"]))
        out: dict[str, float] = {"sequences": len(nats)}
        out |= {name: int(size.sum()) for name, size in sizes.items()}
        for name, (value, its_error) in named.items():
            out[name], out[name + "_se"] = value, its_error
        return out


def _ratio(nats: np.ndarray, sizes: np.ndarray) -> tuple[float, float]:
    """(sum of nats) / (sum of sizes) over sequences, and its standard error."""
    ratio = nats.sum() / sizes.sum()
    spread = np.sum((nats - ratio * sizes) ** 2) * len(nats) / max(1, len(nats) - 1)
    return ratio, math.sqrt(spread) / sizes.sum() if len(nats) > 1 else math.nan


def _perplexity(nats: float, error: float) -> tuple[float, float]:
    """exp(nats), finite also for a hopeless model, and its standard error."""
    perplexity = math.exp(min(nats, 700.0))
    return perplexity, perplexity * error
