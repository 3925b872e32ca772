"""Abilities of processes that discrete flow matching asks for; see `capabilities`."""

from typing import Protocol, runtime_checkable

from md4_jax.protocols import Array, Process


@runtime_checkable
class PredictsClean(Process, Protocol):
    """Distribution of the clean tokens, computed from the network's outputs [B, L, V]."""

    def clean_logits(self, outputs: Array, z: Array, t: Array) -> Array:
        """Returns log p(x | z_t = z) [B, L, V] up to a constant, the step to clean data."""
        ...


@runtime_checkable
class HasFlow(PredictsClean, Protocol):
    """Chain from noise to data, given x, in which a token only moves towards x."""

    def flow_step(
        self, keys: Array, z: Array, x: Array, times: tuple[Array, Array], frozen: bool
    ) -> Array:
        """Draws z_s given z_t = z and x, [B, L]; times (s, t), s < t, each [B].

        frozen: the rates are those of t, without what is known of them between s and t.
        """
        ...


@runtime_checkable
class FollowsDistances(HasFlow, Protocol):
    """Noise q(z_t = z | x) prop exp(-beta_t d(z, x)) by the distance d of two symbols."""

    parametrisation: str

    @property
    def distances(self) -> Array:
        """d[z, x] >= 0, [V, V]; 0 for z = x alone."""
        ...

    def sharpness(self, t: Array) -> Array:
        """Returns beta_t, like t; 0 at t = 1."""
        ...

    def sharpness_slope(self, t: Array) -> Array:
        """Returns the derivative of beta_t, below 0, like t."""
        ...

    def prior_nats(self, x: Array) -> Array:
        """Returns KL(q(z_1 | x) || prior) of each token, in nats, like x."""
        ...

    def reconstruction_nats(self, x: Array) -> Array:
        """Returns -E log p(x | z_0) per token, in nats, for a decoder without network: like x."""
        ...
