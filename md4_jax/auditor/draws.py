"""Forward processes with enumerated random choices, so that means become sums."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from md4_jax.processes.capabilities import (
    HasForwardRates,
    RedrawsUniformly,
    RevealsBySymbol,
    RevealsMasks,
    RevealsParts,
)
from md4_jax.protocols import Array

# Strata of the noise level that `mask_exactly` draws in addition to the pattern.
LEVELS = 2


class Choices:
    """Random choices of an objective as digits of an index, with their probabilities.

    index   int [B], one number per row; 0 <= index < the product of `sizes`
    key     random key of continuous choices
    sizes   number of outcomes of each choice, in the order in which the objective makes them
    weight  float [B], the probability of the row's outcomes so far
    """

    def __init__(self, index: Array, key: Array):
        self._left, self.key = index, key
        self.sizes: list[int] = []
        self.weight = jnp.ones(index.shape)

    def fits(self, x: Array, *, in_parts: bool = False) -> bool:
        """Returns whether x [B, L] has the rows of these choices; in_parts: or a multiple."""
        rows = self._left.shape[0]
        return x.ndim == 2 and (x.shape[0] % rows == 0 if in_parts else x.shape[0] == rows)

    def take(self, size: int) -> Array:
        """Returns the next digit, of `size` outcomes: int [B]."""
        self.sizes.append(size)
        digit = self._left % size
        self._left = self._left // size
        return digit

    def each(self, size: int, length: int) -> Array:
        """Returns `length` digits, of `size` outcomes each: int [B, length]."""
        whole = self.take(size**length)
        return whole[:, None] // size ** jnp.arange(length) % size

    def count(self, probability: Array) -> None:
        """Multiplies the weight by the probability of the outcome [B]."""
        self.weight = self.weight * probability


def enumerated(process: Any, choices: Choices) -> Any:
    """Returns the process with its draws replaced by `choices`, if it states their distribution.

    Other draws of the process and the objective still use the keys.
    """
    cls = type(process)
    own: dict[str, Callable] = {}
    if marginals_of(process) is not None:
        own["corrupt"] = _corrupt(cls, choices)
    if isinstance(process, RevealsParts):
        own["mask_each"] = _hide_each(cls, choices)
    if isinstance(process, RevealsMasks):
        own |= {"mask_each": _mask_each(cls, choices), "mask_exactly": _mask_exactly(cls, choices)}
    if isinstance(process, HasForwardRates) and hasattr(process, "jump"):
        own["jump"] = _jump(cls, choices)
    # A subclass, so that the process keeps its capabilities and its methods call these.
    made = object.__new__(type(cls.__name__, (cls,), own))
    made.__dict__.update(process.__dict__)
    return made


def marginals_of(process: Any) -> Callable[[Array, Array], Array] | None:
    """Returns (x [B, L], t [B]) -> q(z_n = y | x_n) [B, L, S]; None if the process states none."""
    if hasattr(process, "marginal"):
        return lambda x, t: jnp.take_along_axis(process.marginal(t), x[..., None], axis=1)
    if isinstance(process, RevealsBySymbol):
        masks = lambda x: jnp.full_like(x, process.mask_id)  # noqa: E731
        hidden = lambda x, t: jnp.exp(process.log_probability(masks(x), x, t))  # noqa: E731
        return lambda x, t: _masked_marginals(process, x, hidden(x, t))
    if isinstance(process, RevealsMasks):
        hidden = lambda t: process.schedule.one_minus_alpha(t)[:, None]  # noqa: E731
        return lambda x, t: _masked_marginals(process, x, jnp.broadcast_to(hidden(t), x.shape))
    if isinstance(process, RedrawsUniformly):
        return lambda x, t: _redrawn_marginals(process, x, t)
    return None


def _masked_marginals(process: Any, x: Array, hidden: Array) -> Array:
    kept = jax.nn.one_hot(x, process.vocab_size + 1)
    mask = jax.nn.one_hot(jnp.full_like(x, process.mask_id), process.vocab_size + 1)
    return (1.0 - hidden)[..., None] * kept + hidden[..., None] * mask


def _redrawn_marginals(process: RedrawsUniformly, x: Array, t: Array) -> Array:
    symbols, rho = process.vocab_size, process.ratio(t)[:, None, None]
    ratios = jnp.where(jax.nn.one_hot(x, symbols) > 0, 1.0, rho)
    return ratios / (1.0 + (symbols - 1) * rho)


def _corrupt(cls: type, choices: Choices) -> Callable:
    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        """Takes every z with q(z | x) > 0; others are replaced by x, with weight 0.

        x may have the blocks of a sequence in separate successive rows.
        """
        if not choices.fits(x, in_parts=True):
            return cls.corrupt(self, keys, x, t)
        q, length = marginals_of(self)(x, t), x.size // len(choices.weight)
        if self.shows_clean and getattr(self, "mask_id", None) is not None:
            z = jnp.where(choices.each(2, length).reshape(x.shape) > 0, self.mask_id, x)
        else:
            z = choices.each(q.shape[-1], length).reshape(x.shape)
        of_tokens = jnp.take_along_axis(q, z[..., None], axis=-1)[..., 0]
        probability = jnp.prod(of_tokens.reshape(-1, length), axis=1)
        choices.count(probability)
        possible = jnp.repeat(probability > 0, len(x) // len(probability))[:, None]
        return jnp.where(possible, z, x).astype(x.dtype)

    return corrupt


def _hide_each(cls: type, choices: Choices) -> Callable:
    def mask_each(self, keys: Array, x: Array, probability: Array) -> Array:
        """Takes every pattern of hidden sub-tokens."""
        if not choices.fits(x):
            return cls.mask_each(self, keys, x, probability)
        pattern = choices.each(2**self.parts, x.shape[1])
        hidden = pattern[..., None] >> jnp.arange(self.parts) & 1 > 0
        noise = probability[:, None, None]
        choices.count(jnp.prod(jnp.where(hidden, noise, 1.0 - noise), axis=(1, 2)))
        return self.hide(x, hidden)

    return mask_each


def _mask_each(cls: type, choices: Choices) -> Callable:
    def mask_each(self, keys: Array, x: Array, probability: Array) -> Array:
        """Takes every pattern of masks."""
        if not choices.fits(x):
            return cls.mask_each(self, keys, x, probability)
        hidden, p = choices.each(2, x.shape[1]) > 0, probability[:, None]
        choices.count(jnp.prod(jnp.where(hidden, p, 1.0 - p), axis=1))
        return jnp.where(hidden, self.mask_id, x)

    return mask_each


def _mask_exactly(cls: type, choices: Choices) -> Callable:
    def mask_exactly(self, keys: Array, x: Array, count: Array, among: Array) -> tuple:
        """Takes every pattern of count[b] masks, and strata of the corresponding noise level.

        The level is the k-th smallest of n uniforms, drawn within its stratum.
        """
        if not choices.fits(x):
            return cls.mask_exactly(self, keys, x, count, among)
        hidden, free = choices.each(2, x.shape[1]) > 0, jnp.sum(among, axis=1)
        right = (jnp.sum(hidden, axis=1) == count) & ~jnp.any(hidden & ~among, axis=1)
        choices.count(right / _binomials(x.shape[1])[free, count])
        within = jax.random.uniform(choices.key, count.shape)
        level = (choices.take(LEVELS) + within) / LEVELS
        choices.count(jnp.full(level.shape, 1.0 / LEVELS))
        # Patterns with another number of masks have weight 0, and are replaced by the first
        # count[b].
        hidden = jnp.where(right[:, None], hidden, among & (jnp.cumsum(among, 1) <= count[:, None]))
        z = jnp.where(hidden, self.mask_id, x)
        return z, _order_statistic(level, count, free, x.shape[1])

    return mask_exactly


def _jump(cls: type, choices: Choices) -> Callable:
    def jump(self, keys: Array, z: Array, movable: Array) -> Array:
        """Takes every jump of the forward chain; rows without a jump are unchanged."""
        if not choices.fits(z):
            return cls.jump(self, keys, z, movable)
        rates = jnp.where(movable[..., None], self.forward_rates(z), 0.0)
        _, length, states = rates.shape
        chosen = choices.take(length * states)
        where, symbol = chosen // states, chosen % states
        rate = rates.reshape(len(z), -1)[jnp.arange(len(z)), chosen]
        total = jnp.sum(rates, axis=(1, 2))
        stuck = total <= 0
        choices.count(
            jnp.where(stuck, 1.0 / (length * states), rate / jnp.where(stuck, 1.0, total))
        )
        moved = (jnp.arange(length) == where[:, None]) & (rate > 0)[:, None]
        return jnp.where(moved, symbol[:, None], z)

    return jump


def _binomials(length: int) -> Array:
    """Returns n choose k, at least 1: [length + 1, length + 1]."""
    sizes = range(length + 1)
    return jnp.array([[max(1, math.comb(n, k)) for k in sizes] for n in sizes], float)


def _order_statistic(level: Array, k: Array, n: Array, length: int) -> Array:
    """Returns the u with P(k-th smallest of n uniforms <= u) = level, by bisection: [B]."""
    many, ways = jnp.arange(length + 1), _binomials(length)[n]

    def reached(u: Array) -> Array:
        u = u[:, None]
        terms = ways * u**many * (1.0 - u) ** jnp.maximum(n[:, None] - many, 0)
        return jnp.sum(jnp.where((many >= k[:, None]) & (many <= n[:, None]), terms, 0.0), axis=1)

    def halve(_, bounds):
        low, high = bounds
        middle = 0.5 * (low + high)
        below = reached(middle) < level
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    ends = (jnp.zeros_like(level), jnp.ones_like(level))
    low, high = jax.lax.fori_loop(0, 30, halve, ends)
    return 0.5 * (low + high)
