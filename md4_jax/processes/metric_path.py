"""Metric-induced probability paths of discrete flow matching: docs/families/flow_matching.md."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.draws import draw_rows, split_keys, uniform_symbols, uniforms
from md4_jax.processes.outputs import widened
from md4_jax.processes.scheduled import Unlearned
from md4_jax.protocols import Array, UserError, pytree

PARAMETRISATIONS = ("joint", "mixture")
MOST_SYMBOLS = 2048
# Lower bound of t and 1 - t, for which beta and its slope are finite.
LEAST = 2.0**-24
# Nats per token that a bound may omit before the first and after the last of these times.
MOST_LOST = 1e-3


@pytree()
@dataclasses.dataclass(frozen=True)
class MetricPath(Unlearned):
    """Noise q(z_n = z | x_n = x) prop exp(-beta_t d(z, x)), x at t = 0 (arXiv:2412.03487).

        beta_t = scale ((1 - t) / (t + offset))^exponent,   d(z, x) = |z - x|^power

    for ordered symbols, such as grey values, with d divided by its mean over z != x. table: V^2
    numbers that replace |z - x|, in rows of equal z (`distances_of` computes them from vectors).
    z_1 is uniform. With offset = 0, z_0 = x; otherwise beta ends at scale / offset^exponent.

    Given x, a token jumps from z to a y that is nearer to x, at the kinetic-optimal rate

        -beta'_t q(y | x) (d(z, x) - d(y, x)).

    parametrisation: how outputs [..., V] at z define mu, the distribution of x given z. mixture: mu
    is their softmax. joint: mu is the softmax of outputs + log q(z | x). A mixture needs an offset:
    otherwise the cost at z = x, -beta' times the uncertainty of mu, has no finite integral.

    Bounds integrate over times in [2^-24, 1 - 2^-24]. Raises UserError if this omits more than
    MOST_LOST nats per token: if z differs from x at the first time, or is not uniform at the last.

    Nothing is learned. Tables take 4 V^2 bytes per sequence. UserError for more than 2048 symbols.
    """

    timesteps: ClassVar[None] = None
    shows_clean: ClassVar[bool] = False

    vocab_size: int
    power: float = 1.0
    table: tuple[float, ...] = dataclasses.field(default=(), repr=False)
    scale: float = 3.0
    exponent: float = 1.0
    offset: float = 0.0
    parametrisation: str = "joint"

    def __post_init__(self):
        if self.vocab_size > MOST_SYMBOLS:
            raise UserError(
                "process.name='metric_path' needs a number of operations quadratic in the "
                f"vocabulary size for each token, and supports at most {MOST_SYMBOLS} symbols, "
                f"not {self.vocab_size}: use process.name='uniform'"
            )
        if self.parametrisation not in PARAMETRISATIONS:
            raise UserError(
                f"process.parametrisation must be one of {', '.join(PARAMETRISATIONS)}, "
                f"not {self.parametrisation!r}"
            )
        for name in ("power", "scale"):
            if not getattr(self, name) > 0:
                raise UserError(f"process.{name} must be positive, not {getattr(self, name)}")
        if not 0.25 <= self.exponent <= 3:
            raise UserError(f"process.exponent must lie in [0.25, 3], not {self.exponent}")
        if not 0 <= self.offset < 1:
            raise UserError(f"process.offset must lie in [0, 1), not {self.offset}")
        if self.parametrisation == "mixture" and self.offset == 0:
            raise UserError(
                "process.parametrisation='mixture' needs process.offset above 0, such as 1e-3: "
                "with 0 beta is unbounded and the bound is infinite"
            )
        self._check_table()
        self._check_ends()

    def _check_table(self) -> None:
        """Raises UserError if the table does not contain distances between V symbols."""
        size = self.vocab_size
        if not self.table:
            return
        if len(self.table) != size**2:
            raise UserError(
                f"process.table must have {size**2} numbers, the distances between {size} "
                f"symbols, not {len(self.table)}"
            )
        table = np.reshape(np.asarray(self.table, np.float64), (size, size))
        apart = table[~np.eye(size, dtype=bool)]
        if np.diag(table).any() or not np.isfinite(table).all() or not (apart > 0).all():
            raise UserError(
                "process.table must be 0 between a symbol and itself, and positive between two "
                "different symbols"
            )

    def _check_ends(self) -> None:
        """Raises UserError if beta is too small at the first time or too large at the last."""
        early, late = lost_nats(self)
        if early > MOST_LOST:
            raise UserError(
                f"process.scale={self.scale} and process.exponent={self.exponent} leave too much "
                "noise at t = 2^-24, the smallest time that is drawn: a bound would lack about "
                f"{early:.2g} nats per token. Use a larger exponent or scale, or process.offset "
                "above 0, with which the bound includes them"
            )
        if late > MOST_LOST:
            raise UserError(
                f"process.scale={self.scale} and process.exponent={self.exponent} keep too much "
                "information at t = 1 - 2^-24, the largest time that is drawn: a token is still "
                f"{late:.2g} nats from uniform, and a bound would lack them. Use a larger "
                "exponent or a smaller scale"
            )

    def is_noise(self, z: Array) -> Array:
        """Returns False everywhere, since any symbol may be the clean one."""
        return jnp.zeros(z.shape, bool)

    def noise_left(self, t: Array) -> Array:
        """Returns whether z_t may hold noise: bool []."""
        return (t > 0.0) | (self.offset > 0.0)

    @property
    def distances(self) -> Array:
        """d[z, x], [V, V], with the mean 1 over z != x."""
        return jnp.asarray(_distances(self), jnp.zeros(()).dtype)

    def sharpness(self, t: Array) -> Array:
        """Returns beta_t, like t."""
        return self.scale * ((1.0 - t) / jnp.maximum(t + self.offset, LEAST)) ** self.exponent

    def sharpness_slope(self, t: Array) -> Array:
        """Returns the derivative of beta_t, below 0, like t."""
        since, left = jnp.maximum(t + self.offset, LEAST), jnp.maximum(1.0 - t, LEAST)
        slope = (left / since) ** (self.exponent - 1.0) * (1.0 + self.offset) / since**2
        return -self.scale * self.exponent * slope

    def log_marginal(self, t: Array) -> Array:
        """Returns log q(z | x) from t [B]: [B, V, V], by x and then z."""
        beta = self.sharpness(t)[:, None, None]
        return jax.nn.log_softmax(-beta * self.distances.T, axis=-1)

    def marginal(self, t: Array) -> Array:
        """Returns q(z | x) from t [B]: [B, V, V], by x and then z."""
        return jnp.exp(self.log_marginal(t))

    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        """Draws z_t ~ q(. | x), [B, L], from x [B, L], t [B] and keys [B]."""
        return draw_rows(keys, self.marginal(t), x)

    def prior(self, keys: Array, length: int) -> Array:
        """Draws uniform symbols, int32 [B, length]."""
        return uniform_symbols(keys, length, self.vocab_size)

    def prior_nats(self, x: Array) -> Array:
        """Returns 0 for each token, since z_1 is uniform."""
        return jnp.zeros(x.shape)

    def reconstruction_nats(self, x: Array) -> Array:
        """Returns -E log p(x | z_0) of each token, p prop q(z_0 | x), in nats, like x."""
        return jnp.asarray(_reconstruction(self), jnp.zeros(()).dtype)[x]

    def clean_logits(self, outputs: Array, z: Array, t: Array) -> Array:
        """Returns log p(x | z_t = z) [B, L, V] up to a constant, the step to clean data."""
        outputs = widened(outputs)
        if self.parametrisation == "mixture":
            return outputs
        of_z = jnp.swapaxes(self.log_marginal(t), 1, 2)
        return outputs + jnp.take_along_axis(of_z, z[..., None], axis=1)

    def flow_step(
        self, keys: Array, z: Array, x: Array, times: tuple[Array, Array], frozen: bool
    ) -> Array:
        """Draws z_s given z_t = z and x, with at most one jump; z_0 is x.

        q(y | x) is taken at t, so the step is exact to first order in t - s. -beta' is integrated
        from s to t; frozen: taken at t.
        """
        s, t = times
        change = self.sharpness(s) - self.sharpness(t)
        if frozen:
            change = (t - s) * -self.sharpness_slope(t)
        distances = self.distances
        nearer = jnp.maximum(distances[z, x][..., None] - distances.T[x], 0.0)
        rates = jnp.take_along_axis(self.marginal(t), x[..., None], axis=1) * nearer
        when, what = split_keys(keys)
        target = jax.vmap(jax.random.categorical)(what, jnp.log(rates)).astype(z.dtype)
        probability = -jnp.expm1(-change[:, None] * jnp.sum(rates, axis=-1))
        moved = jnp.where(uniforms(when, z.shape[1]) < probability, target, z)
        return jnp.where(s[:, None] > 0.0, moved, x)


def distances_of(vectors: np.ndarray) -> tuple[float, ...]:
    """Returns `process.table` of one vector for each symbol, [V, D]: |v_z - v_x| row after row."""
    vectors = np.asarray(vectors, np.float64)
    apart = np.linalg.norm(vectors[:, None] - vectors[None], axis=-1)
    return tuple(apart.ravel().tolist())


@functools.lru_cache(maxsize=4)
def _distances(process: MetricPath) -> np.ndarray:
    """Computes d[z, x] in float64."""
    size = process.vocab_size
    apart: Sequence | np.ndarray = process.table
    if not process.table:
        apart = np.abs(np.arange(size)[:, None] - np.arange(size))
    distances = np.reshape(np.asarray(apart, np.float64), (size, size)) ** process.power
    return distances * (max(1, size * (size - 1)) / max(distances.sum(), 1e-300))


@functools.lru_cache(maxsize=4)
def _reconstruction(process: MetricPath) -> np.ndarray:
    """Computes -E log p(x | z_0) of each x in float64."""
    if process.offset == 0:
        return np.zeros(process.vocab_size)
    return _decoding(process, process.scale / process.offset**process.exponent)


@functools.lru_cache(maxsize=4)
def lost_nats(process: MetricPath) -> tuple[float, float]:
    """Computes upper limits of what bounds omit before t = 2^-24 and after 1 - 2^-24.

    In nats per token. Before: by how much decoding z without a network costs more there than at
    t = 0. After: KL(q(z | x) || uniform), since a chain would begin there with uniform symbols.
    """
    first, last = (
        process.scale * ((1.0 - t) / (t + process.offset)) ** process.exponent
        for t in (LEAST, 1.0 - LEAST)
    )
    early = _decoding(process, first) - _reconstruction(process)
    log_law = _log_law(process, last) + np.log(process.vocab_size)
    late = (np.exp(log_law) * log_law).mean(axis=0)
    return float(early.max()), float(late.max())


def _decoding(process: MetricPath, beta: float) -> np.ndarray:
    """Computes -E log p(x | z) of each x with p prop q(z | x) at this beta."""
    log_law = _log_law(process, beta)
    total = np.log(np.exp(log_law).sum(axis=1, keepdims=True))
    return (np.exp(log_law) * (total - log_law)).sum(axis=0)


def _log_law(process: MetricPath, beta: float) -> np.ndarray:
    """Computes log q(z | x), [z, x]."""
    logits = -beta * _distances(process)
    return logits - np.log(np.exp(logits).sum(axis=0))
