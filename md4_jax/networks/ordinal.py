"""Head for ordered symbols: a location and a scale instead of one logit for each symbol."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from md4_jax.protocols import Array

# Bound of the log-scale. exp(-12) gives all mass to one symbol and exp(12) is uniform over any
# vocabulary, up to rounding. Beyond, exp would overflow.
WIDEST = 12.0


class TruncatedLogistic(nn.Module):
    """Maps h [..., D] to log-probabilities [..., V] of a discretised, truncated logistic.

    D3PM (arXiv:2107.03006, appendix on the truncated logistic): symbol k is a bin of width
    2 / (V - 1) around its place -1 + 2 k / (V - 1), and

        p_k = (sigmoid(b_k) - sigmoid(a_k)) / sum_j (sigmoid(b_j) - sigmoid(a_j)),

    where a_k and b_k are the edges of the bin minus the location, divided by the scale. Location
    and log-scale are linear in h and start at 0. They are float32, since bfloat16 cannot resolve
    256 bins near 1. Needs at least two symbols.
    """

    vocab_size: int

    @nn.compact
    def __call__(self, h: Array) -> Array:
        head = nn.Dense(
            2, kernel_init=nn.initializers.zeros, dtype=jnp.float32, name="location_scale"
        )
        return log_probabilities(head(h), self.vocab_size)


def log_probabilities(pair: Array, symbols: int) -> Array:
    """Computes log p_k, [..., symbols], of a location and an unbounded log-scale, [..., 2]."""
    location, raw = jnp.split(pair, 2, axis=-1)
    # A smooth bound, since beyond a hard one the gradient would be zero.
    return log_masses(location, WIDEST * jnp.tanh(raw / WIDEST), symbols)


def log_masses(location: Array, log_scale: Array, symbols: int) -> Array:
    """Computes log p_k: location and log_scale [..., 1] -> [..., symbols].

    sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - exp(a - b)). The last factor is equal for
    all bins and cancels, so that no nearly equal numbers are subtracted.
    """
    places = jnp.linspace(-1.0, 1.0, symbols, dtype=location.dtype)
    half = 1.0 / (symbols - 1)
    inverse = jnp.exp(-log_scale)
    lower = inverse * (places - half - location)
    upper = inverse * (places + half - location)
    return jax.nn.log_softmax(jax.nn.log_sigmoid(upper) + jax.nn.log_sigmoid(-lower), axis=-1)
