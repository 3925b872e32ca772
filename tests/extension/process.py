"""A forward process: noise that is partly the mask and partly a uniform symbol."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from md4_jax.processes.draws import split_keys, uniforms
from md4_jax.processes.scheduled import Scheduled
from md4_jax.processes.schedules import Linear
from md4_jax.protocols import Array, Schedule


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[],
    meta_fields=["vocab_size", "masked", "schedule", "conditioning"],
)
@dataclasses.dataclass(frozen=True)
class Hybrid(Scheduled):
    """q(z_t | x) = alpha_t [z = x] + (1 - alpha_t) pi(z), pi = w [z = m] + (1 - w) / V elsewhere.

    masked is w. A token that is not the mask may be noise, so that shows_clean is False. The
    network's outputs are logits of mu, the posterior of x.
    """

    vocab_size: int
    masked: float = 0.4
    schedule: Schedule = Linear()
    conditioning: str = "time"

    @property
    def noise(self) -> Array:
        """pi, [V + 1]."""
        each = (1.0 - self.masked) / self.vocab_size
        return jnp.full(self.vocab_size + 1, each).at[self.vocab_size].set(self.masked)

    def is_noise(self, z: Array) -> Array:
        return z == self.vocab_size

    def prior(self, keys: Array, length: int) -> Array:
        logits = jnp.log(self.noise)
        draw = lambda key: jax.random.categorical(key, logits, shape=(length,))  # noqa: E731
        return jax.vmap(draw)(keys).astype(jnp.int32)

    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        when, what = split_keys(keys)
        redrawn = uniforms(when, x.shape[1]) < self.schedule.one_minus_alpha(t)[:, None]
        return jnp.where(redrawn, self.prior(what, x.shape[1]), x)

    def marginal(self, t: Array) -> Array:
        """q(z_t = z | x) [B, V, V + 1]."""
        alpha, noise = (f(t)[:, None, None] for f in self._levels)
        return alpha * jnp.eye(self.vocab_size, self.vocab_size + 1) + noise * self.noise

    def step(self, s: Array, t: Array) -> Array:
        """q(z_t | z_s) [B, V + 1, V + 1]."""
        alpha, _ = self._levels
        kept = (alpha(t) / alpha(s))[:, None, None]
        return kept * jnp.eye(self.vocab_size + 1) + (1.0 - kept) * self.noise

    def pinned(self) -> "Hybrid":
        return self  # for schedules with alpha_0 = 1

    def posterior_logits(self, x: Array, z: Array, s: Array, t: Array) -> Array:
        rows = jnp.arange(len(z))[:, None]
        before = self.marginal(s)[rows, x]
        return jnp.log(before) + jnp.log(self._came_from(z, s, t))

    def reverse_logits(self, outputs: Array, z: Array, s: Array, t: Array) -> Array:
        """log sum_x mu(x) q(z_s | z_t, x): by Bayes from the posterior mu of x."""
        rows = jnp.arange(len(z))[:, None]
        reach = jnp.moveaxis(self.marginal(t), 2, 1)[rows, z]  # q(z_t | x) [B, L, V]
        weight = jax.nn.softmax(outputs, axis=-1) / reach
        mean = jnp.einsum("blx,bxy->bly", weight, self.marginal(s))
        return jnp.log(mean) + jnp.log(self._came_from(z, s, t))

    def clean_logits(self, outputs: Array, z: Array, t: Array) -> Array:
        return outputs

    def prior_nats(self, x: Array) -> Array:
        law = self.marginal(jnp.ones(1))[0]
        return jnp.sum(law * jnp.log(law / self.noise), axis=1)[x]

    @property
    def _levels(self):
        return self.schedule.alpha, self.schedule.one_minus_alpha

    def _came_from(self, z: Array, s: Array, t: Array) -> Array:
        """q(z_t = z | z_s = y) over y, [B, L, V + 1]."""
        return jnp.moveaxis(self.step(s, t), 2, 1)[jnp.arange(len(z))[:, None], z]
