"""What is done to the logits of a token before it is drawn: temperature, top-k, top-p."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from md4_jax.protocols import Array, UserError


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["temperature", "top_p"], meta_fields=["top_k"]
)
@dataclasses.dataclass(frozen=True)
class Transform:
    """logits / temperature, then the top_k best symbols, then the top_p nucleus.

    temperature 0 is the most likely symbol; top_k 0 and top_p 1 keep all. They
    act on the denoiser's distribution at each position, before it is decided
    which positions are revealed, so they never change when a token appears.
    """

    temperature: Array | float = 1.0
    top_p: Array | float = 1.0
    top_k: int = 0

    def __call__(self, logits: Array) -> Array:
        """float32 logits [..., V] -> [..., V], excluded symbols at -inf."""
        # 1e-6 turns the smallest difference of two logits into more than any Gumbel draw.
        logits = logits.astype(jnp.float32) / jnp.maximum(self.temperature, 1e-6)
        if 0 < self.top_k < logits.shape[-1]:
            smallest = jax.lax.top_k(logits, self.top_k)[0][..., -1:]
            logits = jnp.where(logits < smallest, -jnp.inf, logits)
        return jax.lax.cond(jnp.asarray(self.top_p) < 1.0, self._nucleus, lambda x: x, logits)

    def _nucleus(self, logits: Array) -> Array:
        """The most likely symbols whose probability reaches top_p, ties at the edge included.

        A symbol stays if those that are more likely have less than top_p together. The
        least such logit is found by bisection over the float32 numbers, which are ordered as
        their bits are: 32 sums, where a sort of a large vocabulary takes longer.
        """
        probability, order = jax.nn.softmax(logits, axis=-1), _ordered(logits)
        most = jnp.max(order, axis=-1, keepdims=True)

        def halve(_, bounds):
            low, high = bounds
            middle = (low & high) + ((low ^ high) >> 1)
            above = jnp.sum(jnp.where(order > middle, probability, 0.0), axis=-1, keepdims=True)
            enough = above >= self.top_p
            return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

        least = jnp.full_like(most, jnp.iinfo(jnp.int32).min)
        _, edge = jax.lax.fori_loop(0, 32, halve, (least, most))
        return jnp.where(order < edge, -jnp.inf, logits)


def _ordered(x: Array) -> Array:
    """int32 numbers in the order of the float32 ones (-0 just before 0)."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & jnp.iinfo(jnp.int32).max)


def check_transform(temperature: float, top_k: int, top_p: float) -> None:
    """UserError for settings that make no distribution."""
    if temperature < 0:
        raise UserError(f"sample.temperature must not be negative, not {temperature}")
    if top_k < 0:
        raise UserError(f"sample.top_k must not be negative, not {top_k}")
    if not 0 < top_p <= 1:
        raise UserError(f"sample.top_p must lie in (0, 1], not {top_p}")
