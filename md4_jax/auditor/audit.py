"""Test whether an objective is a bound: docs/objectives.md."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.auditor.problem import Problem, problem, rule
from md4_jax.processes.capabilities import ObservesMasks
from md4_jax.protocols import Array, UserError
from md4_jax.protocols.phrases import amount

# (symbols, length) of the problems.
PROBLEMS = ((3, 2), (2, 3))
REPLICATES = 16
ERRORS = 5.0  # standard errors of a decision
RETRIES = 5  # successive descents before a bound is called loose
ROUNDING = 2e-6  # nats, beyond which a decision needs no standard error
LOOSE = 0.02  # largest relative excess over log V per token for independent uniform data
# If not all choices can be enumerated: keys per u and outcome, and calls of the objective.
COPIES, MOST_CALLS = 32, 1 << 16


class Found(NamedTuple):
    """Denoiser and group of sequences for which an objective was measured.

    nats     L(x) of each row of the problem, and `errors` their standard errors
    table    the denoiser's table
    group    index of the group of sequences
    value    log of the sum of exp(-L(x)) over the group, or the mean excess of L, in nats
    error    its standard error
    """

    nats: np.ndarray
    errors: np.ndarray
    table: np.ndarray
    group: int
    value: float
    error: float

    @property
    def least(self) -> float:
        """Returns the value minus ERRORS standard errors, or minus ROUNDING if that is more."""
        return self.value - max(ERRORS * self.error, ROUNDING)


@dataclasses.dataclass(frozen=True)
class Audited:
    """Results for one problem.

    largest    the denoiser with the largest log sum_x exp(-L(x)) among all tried
    closest    the denoiser with the mean of L closest to log V per token, from above
    dependent  excess in nats of the best denoiser over the entropy of dependent data
    enumerated whether all draws of the objective were enumerated
    tried      number of denoisers
    """

    problem: Problem
    largest: Found
    closest: Found
    dependent: float
    enumerated: bool
    tried: int

    @property
    def is_bound(self) -> bool:
        """Whether all sums of exp(-L(x)) are at most 1."""
        return self.largest.least <= 0

    @property
    def is_tight(self) -> bool:
        """Whether the cost of independent uniform data is log V nats per token."""
        return _is_tight(self.problem, self.closest)


@dataclasses.dataclass(frozen=True)
class Audit:
    """Verdict on an objective with a process.

    claims: whether the objective claims to be a bound with this process
    is_loose: whether it declares that the optimal denoiser does not reach the entropy
    """

    objective: Any
    process: Any
    claims: bool
    results: tuple[Audited, ...]
    is_loose: bool = False

    @property
    def is_bound(self) -> bool:
        """Whether sum_x exp(-L(x)) <= 1 for every denoiser tried."""
        return all(result.is_bound for result in self.results)

    @property
    def is_tight(self) -> bool:
        """Whether some denoiser reaches the entropy of independent uniform data."""
        return all(result.is_tight for result in self.results)

    @property
    def passed(self) -> bool:
        """Whether the objective is the bound that it claims to be, or does not claim to be one."""
        return (self.is_bound and (self.is_tight or self.is_loose)) or not self.claims


def why_not(objective: Any, process: Any) -> str:
    """Returns the reason why an objective cannot be audited with this process; '' if it can."""
    if objective.needs.gaps:
        return "its texts have different lengths, but the auditor enumerates texts of one length"
    if objective.needs.hides:
        return "its texts change their length, and it is only for training, not a bound"
    if objective.needs.teacher:
        return "it learns from another model and is only for training, not a bound"
    if objective.needs.classifies:
        return "it trains a classifier, not a model of texts"
    if objective.needs.rewards:
        return "it learns from rewards of samples and is only for training, not a bound"
    if isinstance(process, ObservesMasks):
        return "its network reads Gaussian noise, but the auditor's denoisers only read symbols"
    return ""


def audit(
    objective: Any,
    process: Any,
    *,
    problems: tuple[tuple[int, int], ...] = PROBLEMS,
    steps: int = 80,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Audit:
    """Decides whether an objective is a bound on -log p with a process.

    L(x) is the mean of the objective over its draws. If it is a bound on -log p of some model, then
    sum_x exp(-L(x)) <= 1 for every denoiser, also given a prompt. The sum is computed for random
    denoisers and for those found by gradient ascent. A tight bound also reaches equality: L(x) is
    log V per token for independent uniform data and the optimal denoiser. Only an objective that
    declares it (`is_loose`) may miss that.

    objective, process  instances as in `protocols`; the process is rebuilt for a small vocabulary
    problems            (symbols, length) of each problem
    steps               number of gradient ascent steps
    say                 prints a line before each problem, which may take a minute

    UserError for objectives that cannot be audited (`why_not`).
    """
    if why := why_not(objective, process):
        raise UserError(f"{type(objective).__name__} cannot be audited: {why}")
    with jax.enable_x64(True):
        asked = [problem(objective, process, *size) for size in problems]
        results = []
        for number, one in enumerate(asked, 1):
            say(
                f"problem {number} of {len(asked)}, all texts of {amount(one.length, 'token')} "
                f"over {amount(one.symbols, 'symbol')} ..."
            )
            results.append(_audited(one, steps, jax.random.key(seed)))
    claims, is_loose = bool(objective.is_bound(process)), getattr(objective, "is_loose", False)
    return Audit(objective, process, claims, tuple(results), is_loose)


def _audited(problem: Problem, steps: int, key: Array) -> Audited:
    """Measures an objective on one problem."""
    ascend, starts = _search(problem, steps), _starts(problem, key)
    groups, sizes = problem.groups, problem.sizes
    flat, lean = np.zeros(len(sizes)), _dependent(problem)
    uniform = groups / sizes[:, None]
    tables = [*starts, *(ascend(start, key, 1.0, flat @ uniform) for start in starts)]
    is_enumerated = _is_enumerated(problem, starts[-1], key)
    measure = _measure(problem, many=not is_enumerated)
    level, best = starts[0], ascend(starts[0], key, 0.0, lean)
    for number in range(RETRIES):  # uniform data, for which all groups count
        level = ascend(level, jax.random.fold_in(key, number), 0.0, np.sum(uniform, axis=0))
        if _is_tight(problem, _excess(problem, np.asarray(level), measure(level, key))):
            break
    drawn = [(np.asarray(table), measure(table, key)) for table in (*tables, level, best)]
    largest = max((_sum(problem, *one) for one in drawn), key=lambda found: found.least)
    closest = min((_excess(problem, *one) for one in drawn), key=lambda found: found.value)
    entropy = -np.sum(lean * np.log(np.where(lean > 0, lean, 1.0)))
    dependent = float(lean @ drawn[-1][1].mean(axis=0) - entropy)
    return Audited(problem, largest, closest, dependent, is_enumerated, len(drawn))


def _is_tight(problem: Problem, found: Found) -> bool:
    """Returns whether the mean excess of L is small relative to log V per token."""
    return found.least <= LOOSE * float(np.log(problem.sizes[found.group]))


def _is_enumerated(problem: Problem, table: Array, key: Array) -> bool:
    """Returns whether the objective draws nothing itself: its keys have no effect."""
    nats, keys = jax.jit(problem.nats(rule(1, 2))), jax.random.split(key)
    found = [nats(table, key, own) for own in keys]
    return bool(jnp.allclose(*found, rtol=1e-9, atol=1e-9))


def _starts(problem: Problem, key: Array) -> list[Array]:
    """Returns the initial tables of the ascent: zeros, and random ones."""
    draw = lambda n: jax.random.normal(jax.random.fold_in(key, n), problem.table)  # noqa: E731
    return [jnp.zeros(problem.table), 0.3 * draw(1), 1.5 * draw(2)]


def _dependent(problem: Problem) -> np.ndarray:
    """Returns a distribution of dependent tokens over the rows where all tokens count: [rows]."""
    x, counts = problem.batch.tokens, problem.groups[0]
    p = np.where((x[:, 1:] == x[:, :-1]).all(axis=1), 4.0, 1.0) * counts
    return p / p.sum()


def _search(problem: Problem, steps: int) -> Callable[..., Array]:
    """Returns (table, key, a, p) -> table after Adam on a log sum exp(-L) - sum p L."""
    nats, groups = problem.nats(rule(problem.steps, 6)), jnp.asarray(problem.groups)

    def loss(table: Array, key: Array, weight: Array, p: Array) -> Array:
        found = nats(table, *jax.random.split(key))
        sums = jax.nn.logsumexp(jnp.where(groups, -found, -jnp.inf), axis=1)
        return p @ found - weight * jnp.max(sums)

    @jax.jit
    def ascend(table: Array, key: Array, weight: Array, p: Array) -> Array:
        def step(state, number):
            table, first, second = state
            slope = jax.grad(loss)(table, jax.random.fold_in(key, number), weight, p)
            slope = jnp.nan_to_num(slope)
            first, second = 0.9 * first + 0.1 * slope, 0.99 * second + 0.01 * slope**2
            count = number + 1.0
            way = (first / (1 - 0.9**count)) / (jnp.sqrt(second / (1 - 0.99**count)) + 1e-9)
            rate = 0.2 * (1.0 - number / steps)
            return (table - rate * way, first, second), None

        still = jnp.zeros_like(table)
        return jax.lax.scan(step, (table, still, still), jnp.arange(steps))[0][0]

    return lambda table, key, weight, p: ascend(table, key, jnp.asarray(weight), jnp.asarray(p))


def _measure(problem: Problem, many: bool) -> Callable[[Array, Array], np.ndarray]:
    """Returns (table, key) -> L(x) with fresh draws, float64 [REPLICATES, rows]."""
    points = rule(problem.steps, 12)
    copies = max(1, min(COPIES, MOST_CALLS // problem.calls(points))) if many else 1
    nats = problem.nats(points, copies)
    one = lambda table, key: nats(table, *jax.random.split(key))  # noqa: E731
    each = jax.jit(lambda table, keys: jax.lax.map(lambda key: one(table, key), keys))

    def measure(table: Array, key: Array) -> np.ndarray:
        fresh = jax.random.split(jax.random.fold_in(key, 1 << 20), REPLICATES)
        return np.asarray(each(table, fresh), np.float64)

    return measure


def _log_sums(problem: Problem, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (log sum_x exp(-L(x)), standard error) of each group, by the delta method."""
    mean = drawn.mean(axis=0)
    with np.errstate(over="ignore"):
        parts = np.where(problem.groups, np.exp(-mean), 0.0)
    sums = parts.sum(axis=1)
    slopes = parts / np.maximum(sums, 1e-300)[:, None]
    spread = ((drawn - mean) @ slopes.T).std(axis=0, ddof=1)
    return np.log(np.maximum(sums, 1e-300)), spread / np.sqrt(len(drawn))


def _errors(drawn: np.ndarray) -> np.ndarray:
    return drawn.std(axis=0, ddof=1) / np.sqrt(len(drawn))


def _sum(problem: Problem, table: np.ndarray, drawn: np.ndarray) -> Found:
    """Returns the group with the largest sum."""
    values, errors = _log_sums(problem, drawn)
    at = int(np.argmax(values - np.maximum(ERRORS * errors, ROUNDING)))
    return Found(drawn.mean(axis=0), _errors(drawn), table, at, values[at], errors[at])


def _excess(problem: Problem, table: np.ndarray, drawn: np.ndarray) -> Found:
    """Returns the group with the largest excess of the mean L over log V per token."""
    share = problem.groups / problem.sizes[:, None]
    each = drawn @ share.T - np.log(problem.sizes)
    errors = _errors(each)
    at = int(np.argmax(each.mean(axis=0)))
    value = float(each.mean(axis=0)[at])
    return Found(drawn.mean(axis=0), _errors(drawn), table, at, value, errors[at])
