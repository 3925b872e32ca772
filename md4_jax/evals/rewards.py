"""Rewards towards which samples are drawn: docs/samplers.md#rewards.

A reward is a frozen dataclass of its options, a line in REWARDS below or in a config as
package.module:attribute, with

    __call__(tokens, domain)  rewards [N], finite numbers, of sequences int32 [N, L]; `domain` gives
                              the tokens their meaning, as `domain.decode(tokens[0])`

and optionally check(domain), which raises UserError for data that have no such reward.
"""

import dataclasses
import re
from typing import Any

import numpy as np

from md4_jax.protocols import UserError


@dataclasses.dataclass(frozen=True)
class NoReward:
    """Placeholder for sample.reward.name=none: samples are drawn as the model has them."""

    def __call__(self, tokens: np.ndarray, domain: Any) -> np.ndarray:
        """Returns 0 for each sequence."""
        return np.zeros(len(tokens))


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Number of places of the text that match a regular expression, as Python's `re` writes it.

    pattern  the expression; matches do not overlap
    """

    pattern: str = ""

    def __post_init__(self):
        if not self.pattern:
            raise UserError(
                "sample.reward.name='pattern' needs sample.reward.pattern, a regular expression "
                "such as 'the|and'"
            )
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise UserError(
                f"sample.reward.pattern={self.pattern!r} is no regular expression: {error}"
            ) from error

    def check(self, domain: Any) -> None:
        """Raises UserError if the data are no text."""
        if not hasattr(domain, "encode"):
            raise UserError(
                f"sample.reward.name='pattern' reads text, and this run has {domain.unit}s"
            )

    def __call__(self, tokens: np.ndarray, domain: Any) -> np.ndarray:
        """Counts the matches in each sequence [N, L]: float64 [N]."""
        found = re.compile(self.pattern)
        texts = (domain.decode(row) for row in tokens)
        return np.array([sum(1 for _ in found.finditer(text)) for text in texts], np.float64)


REWARDS = {"none": NoReward, "pattern": Pattern}
