"""Fraction of sampled words that occur in the training text: a measure of correct spelling."""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from md4_jax.data.corpus import Corpus
from md4_jax.data.domains import TextDomain
from md4_jax.evals.context import Context, OnSplit, check_least, first_alone
from md4_jax.evals.samples import check_guided, drawn_samples
from md4_jax.experiment import Experiment
from md4_jax.generate import writers
from md4_jax.protocols import Params, UserError
from md4_jax.protocols.phrases import TOO_FEW, amount, plus_minus

# The words are kept in memory, so only this many tokens of a split are read.
MOST_TOKENS = 20_000_000


@dataclasses.dataclass(frozen=True)
class KnownWords(OnSplit):
    """Draws samples and computes the fraction of their words that occur in the training split.

    every, final, split, data  as in `likelihood`; the same fraction is computed for this split
    num                        number of samples of each prompt; 0: sample.num

    The first and the last word of a sample do not count, since they may be cut off. Words that
    contain tokens of a prompt do not count either.
    """

    num: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_least(self, num=0)

    def check(self, experiment: Experiment, key: str) -> None:
        """Raises UserError for a model that is not a text model."""
        if not isinstance(experiment.domain, TextDomain):
            raise UserError(f"{key} is only for models of text, and this model is not one")

    def check_samples(self, experiment: Experiment, key: str) -> None:
        """Raises UserError, before a run begins, for guidance without a class or a prompt."""
        del key
        check_guided(experiment)

    def run(self, experiment: Experiment, params: Params, context: Context) -> dict[str, Any]:
        """Returns the fractions of known words of the samples and of the split."""
        num = self.num or experiment.sample.num
        asked = dataclasses.replace(experiment.sample, num=num, trace=False)
        drawn = drawn_samples(experiment._replace(sample=asked), params, context.programs)
        if jax.process_index() != 0:
            return {}
        with first_alone():
            return self._counted(drawn, experiment, context)

    def _counted(self, drawn: Any, experiment: Experiment, context: Context) -> dict[str, Any]:
        """Counts known words; prints and returns the fractions."""
        known = set(_words(context.corpus({}), "train"))
        rows = zip(drawn.tokens, drawn.prompt_mask, drawn.lengths, strict=True)
        decode = experiment.domain.decode
        found = share(
            [own_words(decode, row[:end], given[:end]) for row, given, end in rows], known
        )
        others, _, _ = share([_words(context.corpus(self.data), self.split)], known)
        result = dict(zip(("known_words", "known_words_se", "words"), found, strict=True))
        context.say(f"{context.name}: {_line(found, len(drawn.tokens), self.split, others)}")
        sampler = {"sampler": experiment.config["sample"]["name"], **writers.of_samples(drawn)}
        return {"split": self.split, **result, "split_known_words": others, **sampler}


def _line(found: tuple[float, float, int], samples: int, split: str, others: float) -> str:
    """Formats the fractions of known words, or says that there are no words; found: see `share`."""
    ratio, error, words = found
    drawn = amount(samples, "sample")
    of_split = f"of {split} {others:.1%}" if math.isfinite(others) else f"{split} has no words"
    if not words:
        return (
            f"there are no words to count in {drawn}, since the first and the last word of each "
            f"may be cut off; {of_split}"
        )
    margin = plus_minus(error, ".1%")
    why = "" if margin else f" ({TOO_FEW})"
    return (
        f"{ratio:.1%}{margin} of {amount(words, 'word')} of {drawn} are words of the training "
        f"text{why}; {of_split}"
    )


def own_words(
    decode: Callable[[np.ndarray], str], tokens: np.ndarray, given: np.ndarray
) -> list[str]:
    """Returns the words that the model generated entirely, without the first and the last one.

    given: bool [L], the tokens that the user fixed
    """
    cuts = np.flatnonzero(np.diff(given)) + 1
    text, fixed = "", []
    for part in np.split(np.arange(len(tokens)), cuts):
        piece = decode(tokens[part])
        text += piece
        fixed += [given[part].any()] * len(piece)
    words = list(re.finditer(r"\S+", text))[1:-1]
    return [word[0] for word in words if not any(fixed[word.start() : word.end()])]


def share(texts: Sequence[Sequence[str]], known: Collection[str]) -> tuple[float, float, int]:
    """Returns (fraction of known words in all texts, its standard error, number of words).

    The standard error is that of a ratio of sums over texts; nan for a single text.
    """
    counts = [len(words) for words in texts]
    hits = [sum(word in known for word in words) for words in texts]
    total, number = sum(counts), len(texts)
    if not total:
        return math.nan, math.nan, 0
    ratio = sum(hits) / total
    squares = sum((hit - ratio * count) ** 2 for hit, count in zip(hits, counts, strict=True))
    error = math.sqrt(squares * number / (number - 1)) / total if number > 1 else math.nan
    return ratio, error, total


def _words(corpus: Corpus, split: str) -> list[str]:
    """Returns the words at the beginning of a split."""
    return corpus.domain.decode(corpus.stream(split)[:MOST_TOKENS]).split()
