"""Options of --mode audit."""

import dataclasses

from md4_jax.protocols import UserError


@dataclasses.dataclass(frozen=True)
class AuditOptions:
    """The `audit` section: search of --mode audit for a denoiser that violates a bound.

    steps  number of gradient ascent steps from each start
    seed   random seed of the starts and of the draws
    """

    steps: int = 80
    seed: int = 0

    def __post_init__(self):
        if self.steps < 1:
            raise UserError(f"audit.steps must be at least 1, not {self.steps}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"audit.seed must lie between 0 and {2**32 - 1}, not {self.seed}")
