"""Methods shared by processes with one schedule and nothing learned."""

from typing import Any

from md4_jax.processes.conditioning import signal
from md4_jax.protocols import Array, Schedule


class Scheduled:
    """Defaults of a process in continuous time with a schedule and no mask; see `Process`.

    conditioning: time input of the network, `time` t, `alpha` alpha_t, `sigma` -log alpha_t or
    `zero` 0.
    """

    timesteps: int | None = None
    shows_clean: bool = False
    schedule: Schedule
    conditioning: str

    def init(self) -> Any:
        """Returns itself: there are no leaves to make."""
        return self

    def learned(self) -> dict[str, Array]:
        """Returns nothing: nothing is learned."""
        return {}

    def noise_left(self, t: Array) -> Array:
        """Returns whether z_t may hold noise: bool []."""
        return self.schedule.one_minus_alpha(t) > 0.0

    def signal(self, t: Array) -> Array:
        """Returns the time input of the network, like t."""
        return signal(self.conditioning, self.schedule, t)
