"""Masking with a schedule for each symbol: docs/families/genmd4.md."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from md4_jax.processes.draws import uniforms
from md4_jax.protocols import Array, UserError, pytree


@pytree("raw_power")
@dataclasses.dataclass(frozen=True)
class StateDependent:
    """Masking of symbol k with probability t^{w_k} at time t, w = softplus(raw_power) learned.

    GenMD4 (arXiv:2406.04329, section 6): alpha_{t,k} = 1 - t^{w_k}. A symbol with a larger w_k is
    masked later and unmasked earlier. `init` creates raw_power [V], with every w = initial_power.
    """

    timesteps: ClassVar[None] = None
    shows_clean: ClassVar[bool] = True

    vocab_size: int
    initial_power: float = 1.0
    raw_power: Array | None = None

    def __post_init__(self):
        if not self.initial_power > 0:
            raise UserError(f"process.initial_power must be positive, not {self.initial_power}")

    def init(self) -> "StateDependent":
        """Returns the process with raw_power, every w = initial_power."""
        power = self.initial_power
        raw = power + math.log(-math.expm1(-power))  # log(exp(power) - 1)
        return dataclasses.replace(self, raw_power=jnp.full((self.vocab_size,), raw, jnp.float32))

    @property
    def mask_id(self) -> int:
        return self.vocab_size

    @property
    def power(self) -> Array:
        """w > 0: [V]."""
        return jax.nn.softplus(self.raw_power)

    def log_masked(self, x: Array, t: Array) -> Array:
        """Computes log P(z_n = m | x_n) = w[x_n] log t: x [B, L], t [B] -> [B, L]."""
        return self.power[x] * jnp.log(t)[:, None]

    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        """Draws z_t ~ q(. | x), [B, L], from x [B, L], t [B] and keys [B]."""
        return jnp.where(
            uniforms(keys, x.shape[1]) < jnp.exp(self.log_masked(x, t)), self.mask_id, x
        )

    def is_noise(self, z: Array) -> Array:
        """Returns whether each symbol is the mask: bool like z."""
        return z == self.mask_id

    def noise_left(self, t: Array) -> Array:
        """Returns whether z_t may contain masks: bool []."""
        return t > 0.0

    def signal(self, t: Array) -> Array:
        """Returns t, since alpha depends on the symbol."""
        return t

    def log_probability(self, z: Array, x: Array, t: Array) -> Array:
        """Returns log q(z_n | x_n, t) of each token [B, L], differentiable in w (REINFORCE)."""
        log_masked = self.log_masked(x, t)
        log_clean = jnp.log(-jnp.expm1(jnp.minimum(log_masked, -1e-37)))
        return jnp.where(z == self.mask_id, log_masked, log_clean)

    def reveal_probabilities(self, s: Array, t: Array) -> Array:
        """Returns P(z_s is clean | z_t is the mask, x_0 = k) = 1 - (s/t)^{w_k}, s < t: [V]."""
        return -jnp.expm1(self.power * jnp.log(s / t))

    def reverse_rates(self, outputs: Array, z: Array, t: Array) -> Array:
        """Returns the rates mu_k (-alpha'_k) / (1 - alpha_k) = mu_k w_k / t of m -> k: [B, L, V].

        outputs [B, L, V] are logits of mu at z and t [B]. Rates are 0 where z is not a mask.
        """
        mu = jax.nn.softmax(outputs.astype(jnp.float32), axis=-1)
        rates = mu * self.power / t[:, None, None]
        return jnp.where((z == self.mask_id)[..., None], rates, 0.0)

    def learned(self) -> dict[str, Array]:
        """Returns {'power': w [V]}; a symbol with a larger w is unmasked earlier."""
        return {"power": self.power}

    def prior(self, keys: Array, length: int) -> Array:
        """Returns all masks, int32 [B, length], since alpha_1 = 0 for every symbol."""
        return jnp.full((keys.shape[0], length), self.mask_id, jnp.int32)
