"""Rewards that steer samples: docs/samplers.md#rewards.

A reward is a frozen dataclass of its options with a line in REWARDS below, or in a config as
package.module:attribute. It has

    __call__(tokens, domain)  rewards [N], finite numbers, of sequences int32 [N, L];
                              `domain.decode(tokens[0])` is the text of the first one. In training
                              the tokens after the end of a text are -1; `decode` skips them

and optionally

    check(domain)              raises UserError for data without such a reward
    opened(run_of, programs)   returns the reward to call, after loading other models if it needs
                               them; arguments as in evals/context.py. UserError at start-up if a
                               model is missing
    compared(answers, expected)  rewards [N] of answers to prompts, given the expected answers of
                               the data, both lists of texts. Called instead of the reward; only
                               for training with objective.name=policy
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from md4_jax.data.units import OF_IMAGES
from md4_jax.evals import judges
from md4_jax.evals.context import RunOf
from md4_jax.evals.judged import cut
from md4_jax.protocols import UserError


@dataclasses.dataclass(frozen=True)
class NoReward:
    """Placeholder for sample.reward.name=none: samples are not steered."""

    def __call__(self, tokens: np.ndarray, domain: Any) -> np.ndarray:
        """Returns 0 for each sequence."""
        return np.zeros(len(tokens))


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Number of matches of a regular expression (Python's `re`) in the text.

    pattern  the expression; matches do not overlap
    """

    pattern: str = ""

    def __post_init__(self):
        if not self.pattern:
            raise UserError(
                "sample.reward.name='pattern' needs sample.reward.pattern, a regular expression "
                "such as 'the|and'"
            )
        _compiled("sample.reward.pattern", self.pattern)

    def check(self, domain: Any) -> None:
        """Raises UserError if the data are not text."""
        _check_text("pattern", domain)

    def __call__(self, tokens: np.ndarray, domain: Any) -> np.ndarray:
        """Counts the matches in each sequence [N, L]: float64 [N]."""
        found = re.compile(self.pattern)
        texts = (domain.decode(row) for row in tokens)
        return np.array([sum(1 for _ in found.finditer(text)) for text in texts], np.float64)


@dataclasses.dataclass(frozen=True)
class JudgeReward:
    """Log-probability of the text under a causal judge q, in nats.

    With strength lambda samples follow p(x) q(x)^lambda / Z: a product of experts. If a text has
    more tokens than the judge can read, only the first ones count.

    judge       as for the evaluator `generative_perplexity`
    batch_size  number of texts judged at once
    """

    judge: str = ""
    batch_size: int = 8

    def __post_init__(self):
        if not self.judge:
            raise UserError(
                "sample.reward.name='judge' needs sample.reward.judge: the directory of a causal "
                f"run, the folder of a causal model, hf:NAME such as hf:gpt2, or {judges.MARK}NAME"
            )
        if self.batch_size < 1:
            raise UserError(f"sample.reward.batch_size must be at least 1, not {self.batch_size}")

    def check(self, domain: Any) -> None:
        """Raises UserError if the data are not text."""
        _check_text("judge", domain)

    def opened(self, run_of: RunOf, programs: dict) -> "LogProbability":
        """Returns the reward; its judge is loaded at first use and cached in `programs`.

        UserError if the judge does not exist.
        """
        key = "sample.reward.judge"
        judges.check_source(key, self.judge, run_of.is_causal)

        def judge() -> Any:
            return judges.opened(key, self.judge, run_of, programs)

        return LogProbability(judge, self.batch_size)

    def __call__(self, tokens: np.ndarray, domain: Any) -> np.ndarray:
        """Raises TypeError: the judge is not loaded; see `opened`."""
        raise TypeError(
            "this reward must load its judge first: call `opened` and then the reward that it "
            "returns"
        )


@dataclasses.dataclass(frozen=True)
class LogProbability:
    """Reward of `JudgeReward` after loading; `judge()` returns the judge."""

    judge: Callable[[], Any]
    batch_size: int

    def __call__(self, tokens: np.ndarray, domain: Any) -> np.ndarray:
        """Returns log q of the text of each sequence [N, L]: float64 [N]."""
        judge, found = self.judge(), np.zeros(len(tokens))
        ids = cut(judge.tokens([domain.decode(row) for row in tokens]), judge.length, None)
        counted = [i for i, row in enumerate(ids) if len(row)]  # a text may be empty
        if counted:
            found[counted] = -judge.judge([ids[i] for i in counted], self.batch_size).nats
        return found


@dataclasses.dataclass(frozen=True)
class Answer:
    """1 if an answer agrees with that of the data, else 0; for objective.name=policy.

    pattern  regular expression for the part to compare: the last match in each answer, or its first
             group if there is one. An answer without a match is wrong. '': the whole answer,
             without white space at its ends
    """

    pattern: str = ""

    def __post_init__(self):
        _compiled("sample.reward.pattern", self.pattern)

    def check(self, domain: Any) -> None:
        """Raises UserError if the data are not text."""
        _check_text("answer", domain)

    def __call__(self, tokens: np.ndarray, domain: Any) -> np.ndarray:
        """Raises TypeError: this reward needs an answer to compare with; see `compared`."""
        raise TypeError("this reward compares answers: call `compared`")

    def compared(self, answers: Sequence[str], expected: Sequence[str]) -> np.ndarray:
        """Compares answers with the expected ones: float64 [N]."""
        pairs = zip(map(self._said, answers), map(self._said, expected), strict=True)
        return np.array([one is not None and one == other for one, other in pairs], np.float64)

    def _said(self, answer: str) -> str | None:
        if not self.pattern:
            return answer.strip()
        found = list(re.finditer(self.pattern, answer))
        return found[-1][1 if found[-1].re.groups else 0] if found else None


def _compiled(key: str, pattern: str) -> re.Pattern:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{key}={pattern!r} is not a regular expression: {error}") from error


def _check_text(name: str, domain: Any) -> None:
    if domain.unit in OF_IMAGES or not hasattr(domain, "encode"):
        raise UserError(
            f"sample.reward.name={name!r} is only for text, and the data of this run are not text"
        )


REWARDS = {"none": NoReward, "pattern": Pattern, "judge": JudgeReward, "answer": Answer}
