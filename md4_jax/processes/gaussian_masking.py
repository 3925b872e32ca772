"""Masking with Gaussian observations of the hidden tokens: docs/families/candi.md."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtri

from md4_jax.processes.conditioning import check_conditioning
from md4_jax.processes.masking import Masks
from md4_jax.processes.schedules import Linear
from md4_jax.protocols import Array, Mixture, Schedule, UserError, pytree

PARAMETRISATIONS = ("mixture", "joint")


@pytree()
@dataclasses.dataclass(frozen=True)
class GaussianMasking(Masks):
    """Masking with a Gaussian observation of each masked token (CANDI, arXiv:2510.22510).

    A token becomes the mask V with probability 1 - alpha_t. The state also has a continuous part,
    y_t = onehot(x) + sigma_t noise in R^V at each position. Its noise grows with t by independent
    increments. The network reads y where z is masked. sigma_t increases such that

        P(y_t at a given wrong symbol > y_t at x) = Phi(-1 / (sqrt(2) sigma_t)) = p_t

    is linear in t, from `confusion_start` to `confusion_end`, both in (0, 1/2). The paper's r is
    the expected fraction of symbols above x, r = p (V - 1) / V.

    y takes 4 bytes for each of B L V numbers, and so do the weights that the network reads.
    parametrisation is the meaning of the network's outputs [..., V]:

    mixture  logits of the posterior of x_n given all of (z, y), as published
    joint    logits of x_n given (z, y) without y_n; the log-likelihood y_n / sigma^2 is added
    """

    vocab_size: int
    schedule: Schedule = Linear()
    confusion_start: float = 0.05
    confusion_end: float = 0.45
    parametrisation: str = "mixture"
    conditioning: str = "time"

    def __post_init__(self):
        check_conditioning(self.conditioning)
        if self.parametrisation not in PARAMETRISATIONS:
            raise UserError(
                f"process.parametrisation must be one of {', '.join(PARAMETRISATIONS)}, "
                f"not {self.parametrisation!r}"
            )
        if not 0 < self.confusion_start < self.confusion_end < 0.5:
            raise UserError(
                f"process.confusion_start={self.confusion_start} and "
                f"process.confusion_end={self.confusion_end} must satisfy 0 < confusion_start < "
                "confusion_end < 0.5, because the standard deviation of the noise is infinite at "
                "0.5"
            )

    def observed(self, keys: Array, x: Array, t: Array) -> Array:
        """Draws y_t = onehot(x) + sigma_t noise, float [B, L, V]."""
        sigma = jax.lax.rsqrt(self.precision(t))[:, None, None]
        return jax.nn.one_hot(x, self.vocab_size) + sigma * self._normal(keys, x.shape[1])

    def precision(self, t: Array) -> Array:
        """Returns 1 / sigma_t^2, like t."""
        return 2.0 * self._quantile(t) ** 2

    def precision_slope(self, t: Array) -> Array:
        """Returns the derivative of 1 / sigma_t^2, below 0, like t."""
        q, rise = self._quantile(t), self.confusion_end - self.confusion_start
        return 4.0 * rise * math.sqrt(2.0 * math.pi) * q * jnp.exp(0.5 * q**2)

    def seen(self, z: Array, y: Array, t: Array) -> Mixture:
        """Returns the network's input: z, where each mask is mixed with its noisy token.

        The weights of a mask are c y / 2 for the V symbols and 1/2 for the mask itself, with
        c = (1 + sigma^2)^(-1/2), so that the weights of the symbols do not grow with the noise.
        """
        precision = self.precision(t)
        scale = 0.5 * jnp.sqrt(precision / (1.0 + precision))[:, None, None]
        half = jnp.full((*z.shape, 1), 0.5, y.dtype)
        hidden = jnp.concatenate([scale.astype(y.dtype) * y, half], axis=-1)
        symbols = jnp.arange(self.vocab_size + 1)
        clean = (z[..., None] == symbols).astype(y.dtype)
        return Mixture(symbols, jnp.where(self.is_noise(z)[..., None], hidden, clean))

    def evidence(self, y: Array, t: Array) -> Array | None:
        """Returns the term to add to the network's outputs, y / sigma_t^2 [B, L, V], or None."""
        return self.precision(t)[:, None, None] * y if self.parametrisation == "joint" else None

    def earlier(self, keys: Array, y: Array, x: Array, s: Array, t: Array) -> Array:
        """Draws y_s given y_t = y [B, L, V] and x [B, L], s < t each [B]: exact.

        Each entry is normal with mean onehot(x) + r (y - onehot(x)) and variance sigma_s^2 (1 - r),
        with r = sigma_s^2 / sigma_t^2.
        """
        at_s, at_t = (self.precision(time)[:, None, None] for time in (s, t))
        clean, ratio = jax.nn.one_hot(x, self.vocab_size), at_t / at_s
        deviation = jnp.sqrt(jnp.maximum(1.0 - ratio, 0.0) / at_s)
        return clean + ratio * (y - clean) + deviation * self._normal(keys, x.shape[1])

    def prior_observed(self, keys: Array, length: int) -> Array:
        """Draws y_1 of the model, N(1 / V, sigma_1^2) in each entry: float32 [B, length, V]."""
        sigma = jax.lax.rsqrt(self.precision(jnp.float32(1.0)))
        return 1.0 / self.vocab_size + sigma * self._normal(keys, length)

    def prior_nats(self, x: Array) -> Array:
        """Returns KL(q(y_1 | x) || p(y_1)) = (1 - 1 / V) / (2 sigma_1^2) of each token, like x."""
        with jax.ensure_compile_time_eval():
            nats = 0.5 * (1.0 - 1.0 / self.vocab_size) * self.precision(jnp.ones(()))
        return jnp.broadcast_to(nats, x.shape)

    def _quantile(self, t: Array) -> Array:
        rise = self.confusion_end - self.confusion_start
        return ndtri(self.confusion_start + rise * t)

    def _normal(self, keys: Array, length: int) -> Array:
        shape = (length, self.vocab_size)
        return jax.vmap(lambda key: jax.random.normal(key, shape))(keys)
