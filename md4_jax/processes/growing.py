"""Base class of the processes of variable-length texts."""

from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.event_rates import reveal_probability
from md4_jax.processes.scheduled import Unlearned
from md4_jax.processes.schedules import covers_unit_interval
from md4_jax.protocols import Array, Schedule


class Growing(Unlearned):
    """Methods shared by processes of texts that grow in sampling."""

    timesteps: ClassVar[None] = None
    shows_clean: ClassVar[bool] = True

    vocab_size: int
    schedule: Schedule

    @property
    def absent_id(self) -> int:
        return self.vocab_size + 1

    @property
    def presence(self) -> Schedule:
        """Schedule whose alpha, a_t, is the probability that a token is present."""
        return self.schedule

    @property
    def is_complete(self) -> bool:
        """Whether all schedules run from 1 to 0, so that a bound over t in [0, 1] is complete."""
        with jax.ensure_compile_time_eval():
            return all(map(covers_unit_interval, (self.schedule, self.presence)))

    def log_missing(self, outputs: Array, t: Array) -> Array:
        """Returns log y_g = outputs + log(1 - a_t), [B, L + 1]: outputs [B, L + 1], t [B].

        The factor 1 - a_t accounts for the few missing tokens near t = 0: a network could not learn
        so small a number.
        """
        return outputs + jnp.log(self.presence.one_minus_alpha(t))[:, None]

    def insert_probability(self, s: Array, t: Array) -> Array:
        """Returns P(a token is present at s | it is absent at t) = (a_s - a_t) / (1 - a_t)."""
        return reveal_probability(self.presence, s, t)

    def is_noise(self, z: Array) -> Array:
        """Returns whether each symbol is a mask or absent: bool like z."""
        return z >= self.vocab_size

    def noise_left(self, t: Array) -> Array:
        """Returns whether z_t may have missing tokens or masks: bool []."""
        return t > 0.0
