"""Temperature, top-k and top-p."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.processes.outputs import widened
from md4_jax.protocols import Array, UserError, pytree


@pytree("temperature", "top_p")
@dataclasses.dataclass(frozen=True)
class Transform:
    """Divides logits by the temperature, then applies top-k and top-p filtering.

    Symbols as likely as the least likely one that is kept are kept too.
    temperature 0 gives the most likely symbol; top_k 0 and top_p 1 keep all symbols.
    excluded: symbols that are never drawn.
    postponed: symbols that an order by confidence reveals after all others (LLaDA's
    confidence_eos_eot_inf).
    """

    temperature: Array | float = 1.0
    top_p: Array | float = 1.0
    top_k: int = 0
    excluded: tuple[int, ...] = ()
    postponed: tuple[int, ...] = ()

    def __call__(self, logits: Array) -> Array:
        """Returns logits [..., V] of at least float32, with excluded symbols at -inf."""
        logits = widened(logits)
        if self.excluded:
            logits = logits.at[..., jnp.asarray(self.excluded)].set(-jnp.inf)
        # Divided by 2^-90, any difference of two logits is larger than Gumbel noise, and finite.
        logits = logits / jnp.maximum(self.temperature, 2.0**-90)
        if 0 < self.top_k < logits.shape[-1]:
            smallest = jax.lax.top_k(logits, self.top_k)[0][..., -1:]
            logits = jnp.where(logits < smallest, -jnp.inf, logits)
        return jax.lax.cond(jnp.asarray(self.top_p) < 1.0, self._nucleus, lambda x: x, logits)

    def warm(self, logits: Array) -> Array:
        """Returns the same as a call, with temperature 1 in place of 0."""
        temperature = jnp.asarray(self.temperature)
        temperature = jnp.where(temperature > 0, temperature, 1.0)
        return dataclasses.replace(self, temperature=temperature)(logits)

    def _nucleus(self, logits: Array) -> Array:
        """Keeps the most likely symbols whose probability reaches top_p, and ties at the edge.

        A symbol stays if all more likely ones together have less than top_p. Bisection finds the
        smallest such probability among the bits of float32, which are in the order of the numbers.
        """
        # 10 times the speed of a sort at [1, 1024, 32768] on CPU, 3.6 times at [64, 256, 27].
        probability = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        bits = jax.lax.bitcast_convert_type(probability, jnp.int32)
        most = jnp.max(bits, axis=-1, keepdims=True)

        def halve(_, bounds):
            low, high = bounds
            middle = (low + high) // 2
            above = jnp.sum(jnp.where(bits > middle, probability, 0.0), axis=-1, keepdims=True)
            enough = above >= self.top_p
            return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

        _, edge = jax.lax.fori_loop(0, 31, halve, (jnp.full_like(most, -1), most))
        return jnp.where(bits < edge, -jnp.inf, logits)


def predicts_ratios(process: Any) -> bool:
    """Returns whether outputs are ratios of probabilities, to which no temperature applies.

    The present symbol has ratio 1. Ratios are not a distribution; one is computed from them.
    """
    return getattr(process, "parametrisation", "") == "score"


def check_exclude(transform: Transform, process: Any, sampler: str) -> None:
    """Raises UserError for excluded symbols with a sampler of jumps and noise other than masks.

    Every other sampler draws each token of the last step from the network's prediction.
    """
    if transform.excluded and not process.shows_clean:
        raise UserError(
            f"sample.exclude cannot be used with sample.name={sampler!r} unless the noise "
            "consists of masks: a token that never jumps keeps its initial random symbol, which "
            "may be an excluded one. Set sample.name=ancestral, or sample.exclude=''"
        )


def check_transform(temperature: float, top_k: int, top_p: float) -> None:
    """Raises UserError for settings that do not define a distribution."""
    if temperature < 0:
        raise UserError(f"sample.temperature must not be negative, not {temperature}")
    if top_k < 0:
        raise UserError(f"sample.top_k must not be negative, not {top_k}")
    if not 0 < top_p <= 1:
        raise UserError(f"sample.top_p must lie in (0, 1], not {top_p}")
