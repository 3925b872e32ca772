"""Forward processes and their schedules, as structural protocols."""

from typing import Protocol, runtime_checkable

from md4_jax.protocols.batch import Array


@runtime_checkable
class Schedule(Protocol):
    """The signal level alpha_t of a forward process; elementwise in t in [0, 1].

    `one_minus_alpha` is not computed as `1 - alpha(t)`, which has no precision near t = 0 in
    float32.
    """

    def alpha(self, t: Array) -> Array: ...

    def one_minus_alpha(self, t: Array) -> Array: ...

    def dalpha(self, t: Array) -> Array: ...

    def inverse(self, one_minus_alpha: Array) -> Array:
        """Returns the t at which 1 - alpha has this value, clamped to [0, 1]."""


@runtime_checkable
class Process(Protocol):
    """Forward process q(z_t | x), a pytree: array leaves are learnable and made by `init`.

    timesteps    number of discrete steps; None in continuous time
    shows_clean  whether all symbols not marked by `is_noise` are clean. If so, the network sees a
                 prompt without noise; otherwise with the noise of time t
    """

    vocab_size: int
    timesteps: int | None
    shows_clean: bool

    def init(self) -> "Process":
        """Returns the process with initialised learnable leaves; called with other parameters."""

    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        """Draws z_t ~ q(. | x), [B, L], from x [B, L], t [B] and keys [B]."""

    def prior(self, keys: Array, length: int) -> Array:
        """Draws z_1, the initial state of sampling: int32 [B, length], from keys [B]."""

    def is_noise(self, z: Array) -> Array:
        """Marks symbols that show nothing or only part of x, such as the mask: bool like z."""

    def noise_left(self, t: Array) -> Array:
        """Returns whether z_t may contain noise that a sampler ending at t must remove: bool []."""

    def signal(self, t: Array) -> Array:
        """Returns the time input of the network: t, alpha_t, -log alpha_t or 0."""

    def learned(self) -> dict[str, Array]:
        """Returns learned values of each symbol, {name: [V]}; empty if nothing is learned."""
