"""Uniform noise, which replaces tokens by random symbols: docs/families/uniform.md."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.conditioning import check_conditioning
from md4_jax.processes.draws import split_keys, uniform_symbols, uniforms
from md4_jax.processes.event_rates import time_rate
from md4_jax.processes.outputs import picked, widened
from md4_jax.processes.scheduled import Scheduled
from md4_jax.processes.schedules import (
    LATEST,
    Linear,
    reaches_one,
)
from md4_jax.protocols import Array, Schedule, UserError, pytree

PARAMETRISATIONS = ("joint", "mixture", "score")

# Lower bound of alpha_t and 1 - alpha_t; scores and steps at t = 0 and t = 1 are then their limits
# instead of 0 / 0.
LEAST = 1e-30


@pytree()
@dataclasses.dataclass(frozen=True)
class Uniform(Scheduled):
    """Uniform noise: each token is redrawn over the V symbols with probability 1 - alpha_t.

    q(z_n = j | x_n) = alpha_t [j = x_n] + (1 - alpha_t) / V, as in D3PM-uniform
    (arXiv:2107.03006), SEDD-uniform (arXiv:2310.16834), UDLM (arXiv:2412.10193) and Duo. There is
    no mask, and nothing is learned. parametrisation defines the network's outputs [..., V] at z,
    for bounds and samplers:

    joint    logits of mu in p(z_s | z_t) prop sum_x q(z_s, z_t | x) mu(x); the optimal mu is the
             distribution of x_n given the other tokens, without z_n itself
    mixture  logits of mu in sum_x q(z_s | z_t, x) mu(x); the optimal mu is the posterior of x_n
    score    log of the concrete score s_y ~ p_t(z with y at n) / p_t(z); its entry at z_n is 0
    """

    is_uniform: ClassVar[bool] = True

    vocab_size: int
    schedule: Schedule = Linear()
    parametrisation: str = "joint"
    conditioning: str = "time"

    def __post_init__(self):
        check_conditioning(self.conditioning)
        if self.parametrisation not in PARAMETRISATIONS:
            raise UserError(
                f"process.parametrisation must be one of {', '.join(PARAMETRISATIONS)}, "
                f"not {self.parametrisation!r}"
            )
        if self.parametrisation == "score" and reaches_one(self.schedule):
            raise UserError(
                "process.parametrisation='score' with uniform noise needs a schedule that stops "
                "before alpha = 0, where the weight sigma would be infinite: set "
                "process.schedule.name to log_linear or geometric"
            )

    def is_noise(self, z: Array) -> Array:
        """Returns False everywhere, since any symbol may be the clean one."""
        return jnp.zeros(z.shape, bool)

    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        """Draws z_t ~ q(. | x), [B, L], from x [B, L], t [B] and keys [B]."""
        when, what = split_keys(keys)
        redrawn = uniforms(when, x.shape[1]) < self.schedule.one_minus_alpha(t)[:, None]
        return jnp.where(redrawn, self.prior(what, x.shape[1]), x)

    def ratio(self, t: Array) -> Array:
        """Returns rho = q(a given other symbol | x) / q(x | x), like t."""
        noise = self.schedule.one_minus_alpha(t)
        return noise / (noise + self.vocab_size * self.schedule.alpha(t))

    def odds(self, t: Array) -> Array:
        """Returns 1 / rho - 1 = V alpha / (1 - alpha), like t; log rho is -log1p of it."""
        noise = jnp.maximum(self.schedule.one_minus_alpha(t), LEAST)
        return self.vocab_size * self.schedule.alpha(t) / noise

    def prior(self, keys: Array, length: int) -> Array:
        """Draws uniform symbols, int32 [B, length]."""
        return uniform_symbols(keys, length, self.vocab_size)

    def prior_nats(self, x: Array) -> Array:
        """Returns KL(q(z_1 | x) || uniform) of each token, in nats, like x; 0 if alpha_1 = 0.

        It is (1/V) sum_j h(V q_j) with h(1 + d) = (1 + d) log(1 + d) - d. For small alpha_1 h is
        about d^2 / 2, which the plain sum of q log q would lose to rounding.
        """
        alpha = self.schedule.alpha(jnp.ones(()))
        others = self.vocab_size - 1
        nats = (_excess(others * alpha) + others * _excess(-alpha)) / self.vocab_size
        return jnp.full(x.shape, nats)

    def reconstruction_nats(self, x: Array) -> Array:
        """Returns -E log p(x | z_0) of each token, p prop q(z_0 | x), in nats, like x.

        It is the entropy of q(z_0 | x), 0 if alpha_0 = 1.
        """
        each = self.schedule.one_minus_alpha(jnp.zeros(())) / self.vocab_size
        moved = (self.vocab_size - 1) * each
        nats = -(1.0 - moved) * jnp.log1p(-moved) - _times_log(moved, each)
        return jnp.full(x.shape, nats)

    def pinned(self) -> "Uniform":
        """Returns the process with alpha = 1 at t = 0, so that the last step leaves no noise."""
        return dataclasses.replace(self, schedule=_FromClean(self.schedule))

    def posterior_logits(self, x: Array, z: Array, s: Array, t: Array) -> Array:
        """Returns log q(z_s | z_t = z, x) [B, L, V] up to a constant."""
        alpha_s, alpha_t = (jnp.maximum(self.schedule.alpha(time), LEAST) for time in (s, t))
        noise_s, noise_t = (self.schedule.one_minus_alpha(time) for time in (s, t))
        kept = alpha_t / alpha_s
        # 1 - kept, without cancellation.
        lost = jnp.where(noise_t < 0.5, noise_t - noise_s, alpha_s - alpha_t) / alpha_s
        moved, each = lost / self.vocab_size, noise_s / self.vocab_size

        def logs(at: Array, here: Array, elsewhere: Array) -> Array:
            found = jnp.arange(self.vocab_size) == at[..., None]
            return jnp.where(found, jnp.log(here)[:, None, None], jnp.log(elsewhere)[:, None, None])

        return logs(z, kept + moved, moved) + logs(x, alpha_s + each, each)

    def log_score(self, outputs: Array, z: Array, t: Array) -> Array:
        """Computes log s [B, L, V] from the network's outputs, at least float32; 0 at z itself.

        At t = 0 and t = 1 it is the limit, or a large number if that is infinite (mixture, t = 0).

        joint    s_y = xbar_y / xbar_z, xbar = V alpha mu + 1 - alpha
        mixture  s_y = 1 - mu_z + rho mu_z + V alpha / (1 - alpha) mu_y
        """
        outputs = widened(outputs)
        log_score = outputs
        if self.parametrisation != "score":
            log_mu = jax.nn.log_softmax(outputs, axis=-1)
            log_score = self._of_mean(log_mu, z, t)
        if self.parametrisation == "joint":
            return log_score - picked(log_score, z)
        return jnp.where(jnp.arange(self.vocab_size) == z[..., None], 0.0, log_score)

    def _of_mean(self, log_mu: Array, z: Array, t: Array) -> Array:
        """Computes log s of the mixture, or log xbar of the joint form up to a constant."""
        alpha, noise = (level[:, None, None] for level in self._levels(t))
        log_signal = jnp.log(self.vocab_size * alpha) - jnp.log(noise)
        if self.parametrisation == "joint":
            return jnp.logaddexp(log_signal + log_mu, 0.0)
        # 1 - mu_z as a sum over the other symbols, without cancellation.
        others = jnp.where(jnp.arange(self.vocab_size) == z[..., None], -jnp.inf, log_mu)
        moved = jax.nn.logsumexp(others, axis=-1, keepdims=True)
        stayed = picked(log_mu, z) - jnp.log1p(self.odds(t))[:, None, None]
        return jnp.logaddexp(log_signal + log_mu, jnp.logaddexp(moved, stayed))

    def _levels(self, t: Array) -> tuple[Array, Array]:
        """Returns (alpha_t, 1 - alpha_t), each at least LEAST."""
        return tuple(
            jnp.maximum(level(t), LEAST)
            for level in (self.schedule.alpha, self.schedule.one_minus_alpha)
        )

    def reverse_logits(self, outputs: Array, z: Array, s: Array, t: Array) -> Array:
        """Returns log p(z_s | z_t = z) [B, L, V] up to a constant, s < t, each [B].

        With Q the step from s to t,

        joint    Q(z_s -> z) sum_x q(z_s | x) mu(x)
        mixture  Q(z_s -> z) sum_x q(z_s | x) mu(x) / q(z | x)
        score    Q(z_s -> z) (s_y - (1 - k) mean(s)) with k = alpha_t / alpha_s, SEDD's analytic
                 (Tweedie) step, with negative entries clipped to 0

        At alpha_t = 0 it is the limit, for joint and mixture alpha_s mu + (1 - alpha_s) / V.
        """
        noise_s = self.schedule.one_minus_alpha(s)
        return self._reverse(outputs, z, t, jnp.maximum(self.schedule.alpha(s), LEAST), noise_s)

    def flow_step(
        self, keys: Array, z: Array, x: Array, times: tuple[Array, Array], frozen: bool
    ) -> Array:
        """Draws z_s given z_t = z and x: a token either stays or becomes x.

        times (s, t), each [B]. The probability of x is 1 - exp(-int_s^t w) with
        w = -alpha' / (1 - alpha); frozen: 1 - exp(-(t - s) w(t)), and 1 at s = 0.
        """
        s, t = times
        noise_s, noise_t = (self.schedule.one_minus_alpha(time) for time in times)
        noise = jnp.maximum(noise_t, LEAST)
        probability = (noise_t - noise_s) / noise
        if frozen:
            jumps = (t - s) * -self.schedule.dalpha(t) / noise
            probability = jnp.where(s > 0.0, -jnp.expm1(-jumps), 1.0)
        return jnp.where(uniforms(keys, z.shape[1]) < probability[:, None], x, z)

    def beta(self, t: Array) -> Array:
        """Returns -alpha'_t / alpha_t; large, not infinite, where alpha is 0."""
        return time_rate(self.schedule, t)

    def forward_rates(self, z: Array) -> Array:
        """Returns the rates 1 / V of z_n -> y, without beta, 0 at y = z_n: [B, L, V]."""
        here = jnp.arange(self.vocab_size) == z[..., None]
        return jnp.where(here, 0.0, 1.0 / self.vocab_size)

    def reverse_rates(self, outputs: Array, z: Array, t: Array) -> Array:
        """Returns beta s_y / V, the model's rates of z_n -> y, 0 at y = z_n: [B, L, V].

        t is at most LATEST, where they are finite.
        """
        t = jnp.minimum(t, LATEST)
        score = jnp.exp(self.log_score(outputs, z, t))
        return self.beta(t)[:, None, None] * self.forward_rates(z) * score

    def clean_logits(self, outputs: Array, z: Array, t: Array) -> Array:
        """Returns log p(x | z_t = z) [B, L, V], the step to clean data."""
        return self._reverse(outputs, z, t, jnp.ones_like(t), jnp.zeros_like(t))

    def _reverse(self, outputs: Array, z: Array, t: Array, alpha_s: Array, noise_s: Array) -> Array:
        """Computes `reverse_logits`, given alpha_s and 1 - alpha_s, each [B]."""
        outputs = widened(outputs)
        alpha_t, noise_t = (level[:, None, None] for level in self._levels(t))
        alpha_s, noise_s = alpha_s[:, None, None], noise_s[:, None, None]
        # alpha of the step from s to t, and 1 minus it without cancellation.
        kept = alpha_t / alpha_s
        lost = jnp.where(noise_t < 0.5, noise_t - noise_s, alpha_s - alpha_t) / alpha_s
        here = jnp.arange(self.vocab_size) == z[..., None]
        moved = lost / self.vocab_size
        log_step = jnp.log(jnp.where(here, kept + moved, moved))
        if self.parametrisation == "score":
            return _before(self.log_score(outputs, z, t), kept, lost) + log_step
        log_weight = jax.nn.log_softmax(outputs, axis=-1)
        if self.parametrisation == "mixture":
            each = noise_t / self.vocab_size
            log_weight = log_weight - jnp.log(jnp.where(here, alpha_t + each, each))
        total = jax.nn.logsumexp(log_weight, axis=-1, keepdims=True)
        log_noise = jnp.log(noise_s / self.vocab_size) + total
        return jnp.logaddexp(jnp.log(alpha_s) + log_weight, log_noise) + log_step


@dataclasses.dataclass(frozen=True)
class _FromClean:
    """Schedule with alpha pinned to 1 at t = 0."""

    base: Schedule

    def alpha(self, t: Array) -> Array:
        return jnp.where(t <= 0, 1.0, self.base.alpha(t))

    def one_minus_alpha(self, t: Array) -> Array:
        return jnp.where(t <= 0, 0.0, self.base.one_minus_alpha(t))

    def dalpha(self, t: Array) -> Array:
        return self.base.dalpha(t)

    def inverse(self, one_minus_alpha: Array) -> Array:
        return self.base.inverse(one_minus_alpha)


def _before(log_score: Array, kept: Array, lost: Array) -> Array:
    """Computes log max(0, s_y - lost mean(s)) up to a constant, lost = 1 - kept.

    Near alpha = 0 all s and lost are nearly 1. There s_y / mean(s) - 1 + kept is computed without
    cancellation, so that the entry of the largest s is positive.
    """
    below = log_score - jnp.max(log_score, axis=-1, keepdims=True)
    near = jnp.mean(jnp.expm1(below), axis=-1, keepdims=True)
    far = jax.nn.logsumexp(below, axis=-1, keepdims=True) - jnp.log(below.shape[-1])
    log_ratio = below - jnp.where(near > -0.5, jnp.log1p(jnp.maximum(near, -0.5)), far)
    left = jnp.where(lost < 0.5, jnp.exp(log_ratio) - lost, jnp.expm1(log_ratio) + kept)
    return jnp.log(jnp.maximum(left, 0.0))


def _excess(d: Array) -> Array:
    """Computes (1 + d) log(1 + d) - d for d >= -1."""
    inside = d > -1.0
    return jnp.where(inside, (1.0 + d) * jnp.log1p(jnp.where(inside, d, 0.0)), 0.0) - d


def _times_log(weight: Array, value: Array) -> Array:
    """Computes weight log value, 0 where weight is 0."""
    return jnp.where(weight > 0, weight * jnp.log(jnp.where(weight > 0, value, 1.0)), 0.0)
