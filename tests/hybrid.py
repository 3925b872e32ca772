"""A toy process whose noise is partly the mask and partly a uniform symbol, and its exact laws."""

import dataclasses
import functools
import itertools

import exact
import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.scheduled import Scheduled, uniforms
from md4_jax.processes.schedules import Linear
from md4_jax.protocols import Array, Denoiser, Schedule


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
        when, what = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
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


def single(process: Hybrid, alpha: float) -> np.ndarray:
    """q(z | x) of one token by hand, float64 [V, V + 1]."""
    size = process.vocab_size
    noise = np.full(size + 1, (1.0 - process.masked) / size)
    noise[size] = process.masked
    return alpha * np.eye(size, size + 1) + (1.0 - alpha) * noise


def perfect(process: Hybrid, p: np.ndarray) -> Denoiser:
    """log P(x_n = k | z_t) [B, L, V] for data p, by Bayes over all sequences."""
    x = exact.sequences(p.shape[0], p.ndim)
    picks = np.eye(p.shape[0])[x]

    def features(z: Array, t: Array) -> Array:
        law, rows = process.marginal(t), jnp.arange(len(z))[:, None, None]
        joint = p.ravel() * jnp.prod(law[rows, x[None], z[:, None]], axis=-1)
        return jnp.log(jnp.einsum("bx,xlk->blk", joint, picks))

    return Denoiser(features, lambda h: h)


def products(laws: np.ndarray) -> np.ndarray:
    """The products over positions of laws [Z, L, S] of single tokens: [Z, S^L]."""
    after = exact.sequences(laws.shape[2], laws.shape[1])
    each = [laws[:, n][:, after[:, n]] for n in range(laws.shape[1])]
    return np.prod(each, axis=0)


def transition(denoiser: Denoiser, process: Hybrid, s: float, t: float, length: int) -> np.ndarray:
    """p(z_s | z_t) of all sequences, float64 [Z, Z]."""
    z = jnp.asarray(exact.sequences(process.vocab_size + 1, length))
    before, now = jnp.full(len(z), s), jnp.full(len(z), t)
    logits = process.reverse_logits(denoiser(z, now), z, before, now)
    return products(np.asarray(jax.nn.softmax(logits), np.float64))


def model_law(denoiser: Denoiser, process: Hybrid, grid: np.ndarray, length: int) -> np.ndarray:
    """The law [Z] over all noised sequences of the steps of the grid, from the prior."""
    law = products(np.tile(np.asarray(process.noise, np.float64), (1, length, 1)))[0]
    for s, t in itertools.pairwise(grid[::-1]):
        law = law @ transition(denoiser, process, float(t), float(s), length)
    return law


def finished(denoiser: Denoiser, process: Hybrid, law: np.ndarray, length: int) -> np.ndarray:
    """The law over clean sequences [V^L] after what noise is left at t = 0 is taken away."""
    z, zeros = exact.sequences(process.vocab_size + 1, length), jnp.zeros(law.shape)
    logits = process.clean_logits(denoiser(jnp.asarray(z), zeros), z, zeros)
    return law @ products(np.asarray(jax.nn.softmax(logits), np.float64))
