"""Capabilities of forward processes beyond noising, as structural protocols.

An objective or a sampler names the capabilities that it needs (`Needs.processes`); any process
with these methods works, whatever its class.
"""

from typing import Protocol, runtime_checkable

from md4_jax.protocols import Array, Mixture, Process, Schedule


@runtime_checkable
class RevealsMasks(Process, Protocol):
    """Masking with one schedule: all masks are unmasked with the same probability."""

    schedule: Schedule

    @property
    def mask_id(self) -> int: ...

    @property
    def is_complete(self) -> bool:
        """Whether alpha runs from 1 to 0, so that a bound over t in [0, 1] misses no term."""

    def reveal_probability(self, s: Array, t: Array) -> Array:
        """Returns P(z_s is clean | z_t is the mask), s < t."""

    def mask_each(self, keys: Array, x: Array, probability: Array) -> Array:
        """Masks each token of row b with probability[b], independently."""

    def mask_exactly(self, keys: Array, x: Array, count: Array, among: Array) -> tuple:
        """Masks count[b] of the tokens marked by `among`; returns (z, 1 - alpha [B])."""


@runtime_checkable
class ObservesMasks(Process, Protocol):
    """Masks with a continuous state y in addition to z: the hidden tokens with Gaussian noise.

    y is float [B, L, V]; its values are ignored where z is clean.
    """

    schedule: Schedule

    @property
    def mask_id(self) -> int: ...

    @property
    def is_complete(self) -> bool:
        """Whether alpha runs from 1 to 0, so that a bound over t in [0, 1] misses no term."""

    def observed(self, keys: Array, x: Array, t: Array) -> Array:
        """Draws y_t = onehot(x) + sigma_t noise."""

    def precision(self, t: Array) -> Array:
        """Returns 1 / sigma_t^2, like t."""

    def precision_slope(self, t: Array) -> Array:
        """Returns the derivative of 1 / sigma_t^2, below 0, like t."""

    def seen(self, z: Array, y: Array, t: Array) -> Mixture:
        """Returns the input of the network for (z, y)."""

    def evidence(self, y: Array, t: Array) -> Array | None:
        """Returns the term [B, L, V] that turns outputs into logits of x when added, or None."""

    def reveal_probability(self, s: Array, t: Array) -> Array:
        """Returns P(z_s is clean | z_t is the mask), s < t."""

    def earlier(self, keys: Array, y: Array, x: Array, s: Array, t: Array) -> Array:
        """Draws y_s given y_t = y and x, s < t."""

    def prior_observed(self, keys: Array, length: int) -> Array:
        """Draws y_1 from the prior, float32 [B, length, V]."""

    def prior_nats(self, x: Array) -> Array:
        """Returns KL(q(y_1 | x) || prior) of each token, in nats, like x."""


@runtime_checkable
class RevealsBySymbol(Process, Protocol):
    """Masking with alpha_{t,k} = 1 - t^{w_k} for the hidden symbol k; learned()['power'] is w."""

    @property
    def mask_id(self) -> int: ...

    def reveal_probabilities(self, s: Array, t: Array) -> Array:
        """Returns P(z_s is clean | z_t is the mask, x = k) for each symbol k: [V]."""

    def log_probability(self, z: Array, x: Array, t: Array) -> Array:
        """Returns log q(z_n | x_n, t) of each token [B, L], differentiable in w."""


@runtime_checkable
class PredictsClean(Process, Protocol):
    """Distribution of the clean tokens, computed from the network's outputs [B, L, V]."""

    def clean_logits(self, outputs: Array, z: Array, t: Array) -> Array:
        """Returns log p(x | z_t = z) [B, L, V] up to a constant, for the step to clean data."""


@runtime_checkable
class RevealsParts(PredictsClean, Protocol):
    """Masking of the sub-tokens of each token, all with one schedule."""

    schedule: Schedule
    parts: int

    @property
    def mask_id(self) -> int: ...

    @property
    def digits(self) -> Array:
        """Sub-tokens of each token, int32 [V, parts]."""

    def hidden(self, z: Array) -> Array:
        """Returns which sub-tokens are hidden: bool [..., parts]."""

    def hide(self, x: Array, hidden: Array) -> Array:
        """Returns the symbols of tokens x [...] with hidden sub-tokens, bool [..., parts]."""

    def mask_each(self, keys: Array, x: Array, probability: Array) -> Array:
        """Hides each sub-token of row b with probability[b], independently."""

    def code(self, z: Array) -> Array:
        """Returns the input of the network for each symbol: int32 like z."""

    def chosen(self, keys: Array, length: int, probability: Array) -> Array:
        """Draws sub-tokens with this probability: bool [B, length, parts]."""

    def reveal_probability(self, s: Array, t: Array) -> Array:
        """Returns P(a sub-token is visible at s | it is hidden at t), s < t."""


@runtime_checkable
class HasReverse(PredictsClean, Protocol):
    """Reverse step p(z_s | z_t), computed from the network's outputs [B, L, V]."""

    def reverse_logits(self, outputs: Array, z: Array, s: Array, t: Array) -> Array:
        """Returns log p(z_s | z_t = z) [B, L, S] up to a constant, s < t, each [B]."""


@runtime_checkable
class HasPrior(Process, Protocol):
    """Divergence of q(z_1 | x) from the prior, from which sampling starts."""

    def prior_nats(self, x: Array) -> Array:
        """Returns KL(q(z_1 | x) || prior) of each token, in nats, like x."""


@runtime_checkable
class HasPosterior(HasPrior, HasReverse, Protocol):
    """Reverse steps with a known posterior given the clean token, for D3PM's bound."""

    def pinned(self) -> "HasPosterior":
        """Returns the process with alpha = 1 at t = 0, so that the last step leaves no noise."""

    def posterior_logits(self, x: Array, z: Array, s: Array, t: Array) -> Array:
        """Returns log q(z_s | z_t = z, x) [B, L, S] up to a constant."""


@runtime_checkable
class HasRates(Process, Protocol):
    """Reverse rates of a continuous-time chain."""

    def reverse_rates(self, outputs: Array, z: Array, t: Array) -> Array:
        """Returns the rates of z_n -> y at t, 0 at y = z_n: [B, L, S]."""


@runtime_checkable
class HasForwardRates(HasRates, Protocol):
    """Forward and reverse rates, for correctors."""

    def beta(self, t: Array) -> Array:
        """Returns -alpha'_t / alpha_t; large, not infinite, where alpha is 0."""

    def forward_rates(self, z: Array) -> Array:
        """Returns the rates of z_n -> y without beta, 0 at y = z_n: [B, L, S]."""


@runtime_checkable
class HasScore(Process, Protocol):
    """Concrete score s_y = p_t(z with y at n) / p_t(z), computed from the network's outputs."""

    def log_score(self, outputs: Array, z: Array, t: Array) -> Array:
        """Returns log s [B, L, S], at least float32; 0 at z itself."""


@runtime_checkable
class RedrawsUniformly(HasPrior, HasScore, HasReverse, Protocol):
    """Uniform noise: rho = q(a given other symbol | x) / q(x | x) determines q(z_t | x)."""

    schedule: Schedule
    parametrisation: str

    def ratio(self, t: Array) -> Array:
        """Returns rho, like t."""

    def odds(self, t: Array) -> Array:
        """Returns 1 / rho - 1, like t."""

    def reconstruction_nats(self, x: Array) -> Array:
        """Returns -E log p(x | z_0) per token, in nats, for a decoder without network: like x."""


@runtime_checkable
class Interpolates(HasReverse, Protocol):
    """Noise that is partly the mask and partly a uniform symbol, clean at t = 0, masks at t = 1."""

    parametrisation: str

    @property
    def earliest(self) -> float:
        """Smallest time that is drawn; the noise before it is negligible."""

    def levels(self, t: Array) -> tuple[Array, Array, Array]:
        """Returns (alpha_t, probability of each symbol as noise, probability of the mask)."""

    def jump_rates(self, t: Array) -> tuple[Array, Array]:
        """Returns the forward rates (to each clean symbol, to the mask), from any symbol."""


@runtime_checkable
class HasGenerator(HasPrior, HasScore, HasForwardRates, Protocol):
    """Generator R of the forward chain and the other terms of tauLDR's bound."""

    def backward_rates(self, z: Array) -> Array:
        """Returns R[y, z_n] without beta, 0 at y = z_n: [B, L, S]."""

    def exit_rate(self, z: Array) -> Array:
        """Returns the sum of R[z, y] over y other than z, without beta, like z."""

    def score_given(self, z: Array, x: Array, t: Array) -> Array:
        """Returns q(y | x_n) / q(z_n | x_n), the score given x: [B, L, S]."""

    def jump(self, keys: Array, z: Array, movable: Array) -> Array:
        """Draws one jump of the forward chain at one of the positions `movable`."""

    def reconstruction_nats(self, x: Array, t: float = 0.0) -> Array:
        """Returns -E log p(x | z_t) per token, in nats, for a decoder without network: like x."""


@runtime_checkable
class HasFlow(PredictsClean, Protocol):
    """Chain from noise to data, given x, in which a token only moves towards x."""

    def flow_step(
        self, keys: Array, z: Array, x: Array, times: tuple[Array, Array], frozen: bool
    ) -> Array:
        """Draws z_s given z_t = z and x, [B, L]; times (s, t), s < t, each [B].

        frozen: uses the rates at t for the whole step, instead of integrating them from s to t.
        """


@runtime_checkable
class FollowsDistances(HasPrior, HasFlow, Protocol):
    """Noise q(z_t = z | x) prop exp(-beta_t d(z, x)) with a distance d between symbols."""

    parametrisation: str

    @property
    def distances(self) -> Array:
        """d[z, x] >= 0, [V, V]; 0 only for z = x."""

    def sharpness(self, t: Array) -> Array:
        """Returns beta_t, like t; 0 at t = 1."""

    def sharpness_slope(self, t: Array) -> Array:
        """Returns the derivative of beta_t, below 0, like t."""

    def reconstruction_nats(self, x: Array) -> Array:
        """Returns -E log p(x | z_0) per token, in nats, for a decoder without network: like x."""
