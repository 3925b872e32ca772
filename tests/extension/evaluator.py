"""An evaluator: how many of the sums that the model writes are right."""

import dataclasses
import re
from typing import Any, ClassVar

from md4_jax.evals.context import Context
from md4_jax.evals.samples import drawn_samples
from md4_jax.experiment import Experiment
from md4_jax.protocols import Params

SUM = re.compile(r"(\d+)\+(\d+)=(\d+)\n")


@dataclasses.dataclass(frozen=True)
class RightSums:
    """Counts the lines of samples that are sums, and those that are right.

    every, final: when it runs, as for every evaluator.
    """

    every: int = 0
    final: bool = True

    needs_data: ClassVar[bool] = False

    def run(self, experiment: Experiment, params: Params, context: Context) -> dict[str, Any]:
        """Returns the number of sums and the part of them that are right."""
        drawn = drawn_samples(experiment, params, context.programs)
        text = "\n".join(experiment.domain.decode(row) for row in drawn.tokens)
        sums = [tuple(map(int, found)) for found in SUM.findall(text)]
        right = sum(a + b == c for a, b, c in sums) / max(1, len(sums))
        context.say(f"{context.name}: {len(sums)} sums, {right:.0%} of them right")
        return {"sums": len(sums), "right": right}
