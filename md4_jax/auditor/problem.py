"""Problems small enough to compute a bound for every sequence."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.auditor.denoisers import tabled
from md4_jax.auditor.draws import Choices, enumerated
from md4_jax.processes.capabilities import RevealsParts
from md4_jax.protocols import Array, Batch, batch_of

FINEST = 4.0**-6  # width of the smallest panels, at both ends of [0, 1]
MOST_STEPS = 64


class Rule(NamedTuple):
    """Quadrature over u in [0, 1] that is unbiased for every function, as a mean over `key`.

    Each panel has a random point and its mirror image, so the error for a smooth function is of
    third order in the width. In the first panel the square root of the point is uniform, because
    the integrand is about 1 / sqrt(t) for noise that begins as sqrt(t).
    """

    edges: np.ndarray

    @property
    def size(self) -> int:
        return 2 * (len(self.edges) - 1)

    def points(self, key: Array) -> tuple[Array, Array]:
        """Draws (u, weights), each [size]."""
        low, width = jnp.asarray(self.edges[:-1]), jnp.asarray(np.diff(self.edges))
        once = jax.random.uniform(key, low.shape)
        at = jnp.stack([once, 1.0 - once])
        first = low == 0.0
        u = low + jnp.where(first, at**2, at) * width
        # The weights of a point and its mirror image add up to the width.
        weight = jnp.where(first, at, 0.5) * width
        return jnp.clip(u, 0.0, 1.0 - 2.0**-24).ravel(), weight.ravel()


def rule(steps: int, panels: int) -> Rule:
    """Returns a rule with edges at j / steps, and panels that get narrower towards both ends."""
    even = steps * max(1, panels // steps)
    near = 4.0 ** -np.arange(1, 1 - math.log(FINEST, 4))
    edges = np.concatenate([np.arange(even + 1) / even, near, 1.0 - near])
    return Rule(np.unique(edges))


@dataclasses.dataclass(frozen=True)
class Problem:
    """All sequences x of `length` over `symbols` symbols, alone and with the first token given.

    objective, process  for these symbols
    """

    symbols: int
    length: int
    objective: Any
    process: Any

    @functools.cached_property
    def batch(self) -> Batch:
        """Returns all sequences twice: with all tokens counted, then with all but the first."""
        x = np.array(list(itertools.product(range(self.symbols), repeat=self.length)), np.int32)
        mask = np.ones((2, *x.shape), bool)
        mask[1, :, 0] = False
        return batch_of(np.tile(x, (2, 1)), loss_mask=mask.reshape(-1, self.length))

    @functools.cached_property
    def groups(self) -> np.ndarray:
        """Returns the groups of sequences for the sums of exp(-L): bool [1 + V, rows]."""
        x, mask = self.batch.tokens, self.batch.loss_mask
        given = [(x[:, 0] == k) & ~mask[:, 0] for k in range(self.symbols)]
        return np.stack([mask[:, 0], *given])

    @property
    def sizes(self) -> np.ndarray:
        """Returns the number of sequences of each group."""
        return self.groups.sum(axis=1)

    @property
    def steps(self) -> int:
        """Returns a number of equal parts of [0, 1] in which step and mask count are constant.

        Many steps need no separate edges: their sum is nearly an integral.
        """
        own = getattr(self.objective, "timesteps", None) or self.process.timesteps or 1
        return math.lcm(own if own <= MOST_STEPS else 1, *range(1, self.length + 1))

    @functools.cached_property
    def outcomes(self) -> tuple[int, ...]:
        """Returns the number of outcomes of each choice that can be enumerated."""
        size, found = len(self.batch.tokens), []

        def trace() -> Array:
            keys = jax.random.split(jax.random.key(0), size)
            choices = Choices(jnp.zeros(size, int), keys[0])
            nats = self._call(jnp.zeros(self.table), choices, self.batch, jnp.full(size, 0.5), keys)
            found.extend(choices.sizes)
            return nats

        jax.eval_shape(trace)
        return tuple(found)

    @property
    def table(self) -> tuple[int, ...]:
        """Returns the shape of the tables of denoisers."""
        states = max(self.symbols + 1, getattr(self.process, "states", 0))
        return 4, states**self.length, self.length, self.symbols

    def calls(self, rule: Rule) -> int:
        """Returns the number of calls of the objective for computing L of every sequence."""
        return rule.size * math.prod(self.outcomes) * len(self.batch.tokens)

    def nats(self, rule: Rule, copies: int = 1) -> Callable[[Array, Array, Array], Array]:
        """Returns (table, key, draws) -> L(x) [rows], the mean over u, enumerated choices and keys.

        key is the random key of u, and draws that of the objective's own draws.
        copies: number of u and draws per panel and outcome
        """
        outcomes = math.prod(self.outcomes)
        shape = (rule.size * copies, outcomes, len(self.batch.tokens))
        _, which, row = (axis.ravel() for axis in np.indices(shape))

        def mean(table: Array, key: Array, draws: Array) -> Array:
            u, weight = jax.vmap(rule.points)(jax.random.split(key, copies))
            each = lambda a: jnp.repeat(a.ravel(), shape[1] * shape[2])  # noqa: E731
            choices = Choices(jnp.asarray(which), jax.random.fold_in(key, 1))
            keys = jax.random.split(draws, len(row))
            batch = jax.tree.map(lambda a: jnp.asarray(a)[row], self.batch)
            nats = self._call(table, choices, batch, each(u), keys)
            share = each(weight) * choices.weight / copies
            counted = jnp.where(share > 0, share * nats, 0.0)
            return jnp.sum(counted.reshape(shape), axis=(0, 1))

        return mean

    def _call(self, table: Array, choices: Choices, batch: Batch, u: Array, keys: Array) -> Array:
        needs = self.objective.needs
        denoiser = tabled(table, causal=needs.causal)
        nats, _ = self.objective(denoiser, enumerated(self.process, choices), batch, u, keys)
        return nats


def problem(objective: Any, process: Any, symbols: int, length: int) -> Problem:
    """Makes the problem of an objective and a process with this number of symbols.

    Blocks of an objective are limited to half of the length, so that there are several, and
    sub-tokens of a process to two: more have too many states.
    """
    block = getattr(objective, "block", 0)
    if block > 1:
        objective = dataclasses.replace(objective, block=min(block, -(-length // 2)))
    fewer = {"parts": min(process.parts, 2)} if isinstance(process, RevealsParts) else {}
    process = dataclasses.replace(process, vocab_size=symbols, **fewer).init()
    return Problem(symbols, length, objective, process)
