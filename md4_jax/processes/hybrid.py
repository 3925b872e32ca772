"""Noise that is partly the mask and partly a uniform symbol: docs/families/gidd.md."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.draws import split_keys, uniform_symbols, uniforms
from md4_jax.processes.outputs import widened
from md4_jax.processes.scheduled import Unlearned
from md4_jax.processes.schedules import LATEST
from md4_jax.protocols import Array, UserError, pytree

# Lower bound of a probability that is 0 only where no token can be, so that its log is finite.
LEAST = 1e-30
# Largest exponent by which 2^-exponent / gamma is still a float32, and c_t is well drawn.
FINEST = 40.0


@pytree()
@dataclasses.dataclass(frozen=True)
class Hybrid(Unlearned):
    """Noise that is partly random symbols and partly the mask V (GIDD, arXiv:2503.04482).

    With V clean symbols and t from 0 to 1, a token is

        x itself       with probability alpha_t = (1 - t) / (1 + c_t)
        the mask       with probability t / (1 + c_t)
        redrawn        with probability c_t / (1 + c_t), uniformly over the V symbols,

    where c_t = B (t (1 - t))^(gamma / 2) and B = 2^gamma uniform / (1 - uniform). Uniform noise has
    its largest probability, `uniform`, at t = 1/2 and vanishes at both ends: z_0 is clean and z_1
    all masks. With uniform=0 the process is `Masking` with the linear schedule. In the forward
    chain every symbol, the mask too, jumps to y at a rate that does not depend on the symbol
    (`jump_rates`). No rate is negative for gamma up to 2.

    The outputs of the network are logits of mu in p(z_s | z_t) prop sum_x q(z_s, z_t | x) mu(x), as
    in the form `joint` of `Uniform`: the optimal mu is the distribution of x_n given the other
    tokens.
    """

    timesteps: ClassVar[None] = None
    parametrisation: ClassVar[str] = "joint"

    vocab_size: int
    uniform: float = 0.1
    gamma: float = 1.0

    def __post_init__(self):
        if not 0 <= self.uniform < 1:
            raise UserError(f"process.uniform must lie in [0, 1), not {self.uniform}")
        if not 0.5 <= self.gamma <= 2:
            raise UserError(
                f"process.gamma must lie in [0.5, 2], not {self.gamma}: above 2 no forward process "
                "has these probabilities, and below 0.5 they rise too fast at t = 0 for a float32"
            )

    @property
    def shows_clean(self) -> bool:
        """Whether every symbol but the mask is clean."""
        return self.uniform == 0.0

    @property
    def is_uniform(self) -> bool:
        """Whether a changed token may be redrawn uniformly."""
        return self.uniform > 0.0

    @property
    def mask_id(self) -> int:
        return self.vocab_size

    @property
    def earliest(self) -> float:
        """Smallest time that is drawn; the noise before it costs less than 1e-5 nats."""
        return 2.0 ** (-FINEST / self.gamma)

    def is_noise(self, z: Array) -> Array:
        """Returns whether each symbol is the mask: bool like z. Others may be clean or noise."""
        return z == self.mask_id

    def noise_left(self, t: Array) -> Array:
        """Returns whether z_t may hold noise: bool []."""
        return t > 0.0

    def prior(self, keys: Array, length: int) -> Array:
        """Returns all masks, int32 [B, length], which is exact."""
        return jnp.full((keys.shape[0], length), self.mask_id, jnp.int32)

    def prior_nats(self, x: Array) -> Array:
        """Returns 0 for each token, since z_1 is all masks."""
        return jnp.zeros(x.shape)

    def pinned(self) -> "Hybrid":
        """Returns itself, since alpha_0 = 1."""
        return self

    def levels(self, t: Array) -> tuple[Array, Array, Array]:
        """Returns (alpha_t, probability of each symbol as noise, probability of the mask)."""
        c = self._spread(t)
        return (1.0 - t) / (1.0 + c), c / (1.0 + c) / self.vocab_size, t / (1.0 + c)

    def jump_rates(self, t: Array) -> tuple[Array, Array]:
        """Returns the forward rates (to each clean symbol, to the mask), like t in (0, 1).

        They are (beta pi)' - (alpha' / alpha) beta pi, from the levels beta pi of the noise:
        c' + c / (1 - t) over V (1 + c), and 1 / ((1 - t) (1 + c)).
        """
        c = self._spread(t)
        to_mask = 1.0 / ((1.0 - t) * (1.0 + c))
        rising = (self.gamma * (1.0 - 2.0 * t) + 2.0 * t) / (2.0 * t)
        return c * rising * to_mask / self.vocab_size, to_mask

    def marginal(self, t: Array) -> Array:
        """Returns q(z = b | x = a) at t [B]: [B, V, V + 1]."""
        alpha, each, mask = (level[:, None, None] for level in self.levels(t))
        clean = alpha * jnp.eye(self.vocab_size) + each
        return jnp.concatenate([clean, jnp.broadcast_to(mask, (*clean.shape[:2], 1))], axis=-1)

    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        """Draws z_t ~ q(. | x), [B, L], from x [B, L], t [B] and keys [B].

        First draws whether a token is noise, then the kind of noise, so that neither probability is
        below the resolution of a float32 uniform.
        """
        when, kind, what = split_keys(keys, 3)
        length, c = x.shape[1], self._spread(t)
        noised = uniforms(when, length) < ((t + c) / (1.0 + c))[:, None]
        masked = uniforms(kind, length) < (t / jnp.maximum(t + c, LEAST))[:, None]
        noise = jnp.where(masked, self.mask_id, uniform_symbols(what, length, self.vocab_size))
        return jnp.where(noised, noise, x).astype(jnp.int32)

    def posterior_logits(self, x: Array, z: Array, s: Array, t: Array) -> Array:
        """Returns log q(z_s | z_t = z, x) [B, L, V + 1] up to a constant."""
        found = jnp.arange(self.vocab_size) == x[..., None]
        s, t = s[:, None, None], t[:, None, None]
        each = self._spread(s) / self.vocab_size
        clean = jnp.log(jnp.where(found, 1.0 - s + each, each))
        return self._with_mask(clean, s) + self._log_step(z, s, t)

    def reverse_logits(self, outputs: Array, z: Array, s: Array, t: Array) -> Array:
        """Returns log p(z_s | z_t = z) [B, L, V + 1] up to a constant, s < t, each [B].

        Q(z_s -> z) sum_x q(z_s | x) mu(x), with Q the forward step from s to t.
        """
        s, t = s[:, None, None], t[:, None, None]
        return self._log_mean(outputs, s) + self._log_step(z, s, t)

    def clean_logits(self, outputs: Array, z: Array, t: Array) -> Array:
        """Returns log p(x | z_t = z) [B, L, V] up to a constant, the step to clean data."""
        here, t = jnp.arange(self.vocab_size) == z[..., None], t[:, None, None]
        each = self._spread(t) / self.vocab_size
        reach = jnp.where(here, jnp.maximum(1.0 - t + each, LEAST), each)
        reach = jnp.where(self.is_noise(z)[..., None], 1.0, reach)
        log_mu = jnp.maximum(jax.nn.log_softmax(widened(outputs), axis=-1), math.log(LEAST))
        return log_mu + jnp.log(reach)

    def log_score(self, outputs: Array, z: Array, t: Array) -> Array:
        """Computes log s [B, L, V + 1], s_y = q(y | mu) / q(z | mu); 0 at z itself.

        t is kept within `earliest` and LATEST, where every s is finite.
        """
        mean = self._log_mean(outputs, jnp.clip(t, self.earliest, LATEST)[:, None, None])
        return mean - jnp.take_along_axis(mean, z[..., None], axis=-1)

    def reverse_rates(self, outputs: Array, z: Array, t: Array) -> Array:
        """Returns the model's rates of z_n -> y, 0 at y = z_n: [B, L, V + 1].

        They are s_y times the forward rate to z, which is the same from every y.
        """
        t = jnp.clip(t, self.earliest, LATEST)
        to_each, to_mask = (rate[:, None] for rate in self.jump_rates(t))
        rate = jnp.where(self.is_noise(z), to_mask, to_each)[..., None]
        here = jnp.arange(self.vocab_size + 1) == z[..., None]
        return jnp.where(here, 0.0, rate * jnp.exp(self.log_score(outputs, z, t)))

    def _spread(self, t: Array) -> Array:
        """Returns c_t, the odds of uniform noise, like t."""
        most = 2.0**self.gamma * self.uniform / (1.0 - self.uniform)
        return most * (t * (1.0 - t)) ** (0.5 * self.gamma)

    def _log_mean(self, outputs: Array, s: Array) -> Array:
        """Returns log of (1 + c_s) sum_x q(z_s | x) mu(x) [B, L, V + 1], s [B, 1, 1]."""
        log_mu = jax.nn.log_softmax(widened(outputs), axis=-1)
        # Above 0, so that a clean z can stay, even if top-k has excluded it.
        each = jnp.maximum(self._spread(s) / self.vocab_size, LEAST)
        return self._with_mask(jnp.logaddexp(jnp.log1p(-s) + log_mu, jnp.log(each)), s)

    def _with_mask(self, clean: Array, s: Array) -> Array:
        """Appends log s, (1 + c_s) times the probability of the mask, to the clean symbols."""
        mask = jnp.broadcast_to(jnp.log(s), (*clean.shape[:-1], 1))
        return jnp.concatenate([clean, mask.astype(clean.dtype)], axis=-1)

    def _log_step(self, z: Array, s: Array, t: Array) -> Array:
        """Returns log of (1 + c_t) Q(y -> z) over y, [B, L, V + 1], without cancellation.

        A symbol stays with alpha_t / alpha_s, and jumps to z from anywhere with
        beta_t pi_t(z) - alpha_t / alpha_s beta_s pi_s(z). For a clean z that is
        c_t (1 - h_s / h_t) / V with h = t^(gamma/2) (1 - t)^(gamma/2 - 1).
        """
        half, passed = 0.5 * self.gamma, t - s
        rest = jnp.maximum(1.0 - s, LEAST)  # fine grids round their first two times to 1
        log_ratio = half * jnp.log1p(-passed / t)
        log_ratio -= (1.0 - half) * jnp.log1p(passed / jnp.maximum(1.0 - t, LEAST))
        to_each = -self._spread(t) * jnp.expm1(log_ratio) / self.vocab_size
        stays = (1.0 - t) / rest * (1.0 + self._spread(s))
        moved = jnp.where(self.is_noise(z)[..., None], passed / rest, to_each)
        here = jnp.arange(self.vocab_size + 1) == z[..., None]
        # Staying is always possible, also for a prompt's symbol at t = 1.
        return jnp.log(jnp.where(here, jnp.maximum(stays + moved, LEAST), moved))
