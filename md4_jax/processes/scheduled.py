"""Base classes of processes without learned parameters, and of those with one schedule."""

from typing import Self

from md4_jax.processes.conditioning import signal
from md4_jax.protocols import Array, Schedule


class Unlearned:
    """Defaults of a process without learned parameters; see `Process`."""

    def init(self) -> Self:
        """Returns itself: there are no parameters to initialise."""
        return self

    def learned(self) -> dict[str, Array]:
        """Returns an empty dict: nothing is learned."""
        return {}

    def signal(self, t: Array) -> Array:
        """Returns t, the time input of the network."""
        return t


class Scheduled(Unlearned):
    """Defaults of a process with one schedule; see `Process`.

    Unless a subclass says otherwise, time is continuous and clean tokens cannot be told from noise.
    conditioning: the time input of the network, `time` t, `alpha` alpha_t, `sigma` -log alpha_t or
    `zero` 0.
    """

    timesteps: int | None = None
    shows_clean: bool = False
    schedule: Schedule
    conditioning: str

    def noise_left(self, t: Array) -> Array:
        """Returns whether z_t may hold noise: bool []."""
        return self.schedule.one_minus_alpha(t) > 0.0

    def signal(self, t: Array) -> Array:
        """Returns the time input of the network, like t."""
        return signal(self.conditioning, self.schedule, t)
