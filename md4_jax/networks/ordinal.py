"""A head for ordered symbols: a location and a scale instead of a number for each symbol."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.protocols import Array

# Bounds of the log-scale. Between exp(-12) and exp(12) lie a single symbol and, to rounding, the
# uniform distribution over any vocabulary; beyond them exp would overflow.
WIDEST = 12.0


class TruncatedLogistic(nn.Module):
    """h [..., D] -> log-probabilities [..., V] of a discretised, truncated logistic.

    D3PM (arXiv:2107.03006, appendix on the truncated logistic): symbol k is a bin of width
    2 / (V - 1) around its place -1 + 2 k / (V - 1), and

        p_k = (sigmoid(b_k) - sigmoid(a_k)) / sum_j (sigmoid(b_j) - sigmoid(a_j)),

    a_k and b_k the edges of the bin less the location, divided by the scale. Location and
    log-scale are linear in h; they start at 0, which is broad. Float32, whatever h is: a bin of
    256 is narrower than the steps of bfloat16 near 1. Needs two symbols at least.
    """

    vocab_size: int

    @nn.compact
    def __call__(self, h: Array) -> Array:
        head = nn.Dense(
            2, kernel_init=nn.initializers.zeros, dtype=jnp.float32, name="location_scale"
        )
        location, raw = jnp.split(head(h), 2, axis=-1)
        # A smooth bound: a hard one would have no gradient to come back by.
        log_scale = WIDEST * jnp.tanh(raw / WIDEST)
        return log_masses(location, log_scale, self.vocab_size)


def log_masses(location: Array, log_scale: Array, symbols: int) -> Array:
    """log p_k of the truncated logistic: location and log_scale [..., 1] -> [..., symbols].

    sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - exp(a - b)), and b - a is the same
    for all bins: the last factor drops out, and with it every difference of near numbers.
    """
    places = jnp.linspace(-1.0, 1.0, symbols, dtype=location.dtype)
    half = 1.0 / (symbols - 1)
    inverse = jnp.exp(-log_scale)
    lower = inverse * (places - half - location)
    upper = inverse * (places + half - location)
    return jax.nn.log_softmax(jax.nn.log_sigmoid(upper) + jax.nn.log_sigmoid(-lower), axis=-1)
