"""Continuous-time Markov chains as forward processes: docs/families/tauldr.md."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes import kernels
from md4_jax.processes.conditioning import check_conditioning, sigma_bar
from md4_jax.processes.draws import draw_rows, split_keys
from md4_jax.processes.event_rates import time_rate
from md4_jax.processes.outputs import picked, widened
from md4_jax.processes.scheduled import Scheduled
from md4_jax.processes.schedules import LATEST, Linear, reaches_one
from md4_jax.protocols import Array, Schedule, UserError, pytree

PLAIN = {"uniform": kernels.uniform, "absorbing": kernels.absorbing}
# Kernels of ordinal symbols, with the default of stationary_width.
ORDERED = {
    "gaussian_target": (kernels.gaussian_target, 2.0),
    "gaussian_symmetric": (kernels.gaussian_symmetric, 0.5),
}
PARAMETRISATIONS = ("joint", "mixture")
MOST_SYMBOLS = 2048


@pytree()
@dataclasses.dataclass(frozen=True)
class Rates(Scheduled):
    """Continuous-time Markov chain in which tokens jump from x to y at the rate beta(t) R[x, y].

    tauLDR (arXiv:2205.14987): beta = -alpha' / alpha, and q(z_n | x_n) is row x_n of
    P_{0,t} = exp(R sigma_bar_t) with sigma_bar = -log alpha. R is scaled so that its slowest mode
    decays as exp(-sigma_bar), like masks. alpha_1 = 0 gives exactly the stationary distribution.

    kernel: uniform, R = 1 1^T / V - I; absorbing, into the mask V; gaussian_target, tauLDR's for
    images, or gaussian_symmetric, both between similar symbols of ordinal data (see `kernels`).
    rate_width is in symbols, stationary_width in units of V (None: 2 and 0.5). There are S = V
    states, or V + 1 with the mask. Matrices take O(V^2) memory and O(V^3) work for a sequence.
    parametrisation: meaning of the network's outputs [..., V] at z, as in `Uniform`, with w = mu
    for joint and w(x) = mu(x) / q(z_n | x) for mixture (tauLDR):

        s_y = sum_x w(x) q(y | x) / sum_x w(x) q(z_n | x),   rate of z_n -> y: beta R[y, z_n] s_y.

    Nothing is learned. UserError for more than 2048 symbols, since matrices would not fit.
    """

    vocab_size: int
    schedule: Schedule = Linear()
    kernel: str = "uniform"
    parametrisation: str = "joint"
    rate_width: float = 6.0
    stationary_width: float | None = None
    conditioning: str = "time"

    def __post_init__(self):
        check_conditioning(self.conditioning)
        known_kernels = (*PLAIN, *ORDERED)
        for name, known in (("kernel", known_kernels), ("parametrisation", PARAMETRISATIONS)):
            if getattr(self, name) not in known:
                raise UserError(
                    f"process.{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}"
                )
        if self.vocab_size < 2:
            raise UserError(f"process.name='rates' needs at least 2 symbols, not {self.vocab_size}")
        if self.vocab_size > MOST_SYMBOLS:
            raise UserError(
                f"process.name='rates' takes at most {MOST_SYMBOLS} symbols: with "
                f"{self.vocab_size} it needs {self.vocab_size} x {self.vocab_size} matrices, "
                f"{4e-6 * self.vocab_size**2:.0f} MB for each sequence of a batch. "
                "process.name='masking' or 'uniform' need no matrices"
            )
        if not self.rate_width >= 0.5:
            raise UserError(f"process.rate_width must be at least 0.5, not {self.rate_width}")
        if self.stationary_width is not None and not self.stationary_width >= 0.2:
            raise UserError(
                f"process.stationary_width must be at least 0.2, not {self.stationary_width}"
            )
        widths = (self.rate_width, self.stationary_width)
        if not self.is_ordered and widths != (Rates.rate_width, Rates.stationary_width):
            raise UserError(
                "process.rate_width and process.stationary_width need process.kernel="
                f"{' or '.join(map(repr, ORDERED))}, not {self.kernel!r}"
            )
        if self.kernel == "absorbing" and not reaches_one(self.schedule):
            raise UserError(
                "process.kernel='absorbing' needs a schedule that reaches alpha = 0 (linear, "
                "polynomial, cosine): with another schedule the prior term of the bound is "
                "infinite"
            )

    @property
    def shows_clean(self) -> bool:
        """Whether every symbol but the mask is clean."""
        return self.kernel == "absorbing"

    def is_noise(self, z: Array) -> Array:
        """Returns whether each symbol is the mask, if there is one: bool like z."""
        return z == self.vocab_size

    @property
    def is_ordered(self) -> bool:
        """Whether symbols are ordinal, so that near symbols are similar."""
        return self.kernel in ORDERED

    @property
    def parts(self) -> kernels.Kernel:
        """R and its spectrum, float64, cached."""
        if not self.is_ordered:
            return PLAIN[self.kernel](self.vocab_size)
        make, width = ORDERED[self.kernel]
        width = width if self.stationary_width is None else self.stationary_width
        return make(self.vocab_size, self.rate_width, width)

    @property
    def mask_id(self) -> int | None:
        """V with the absorbing kernel, otherwise None."""
        return self.vocab_size if self.kernel == "absorbing" else None

    def sigma_bar(self, t: Array) -> Array:
        """Computes -log alpha_t without cancellation; alpha is at least the smallest float."""
        return sigma_bar(self.schedule, t)

    def beta(self, t: Array) -> Array:
        """Returns -alpha'_t / alpha_t; large, not infinite, where alpha is 0."""
        return time_rate(self.schedule, t)

    def transition(self, s: Array, t: Array) -> Array:
        """Computes P_{s,t}[x, y] = q(z_t = y | z_s = x): [B, S, S], 0 below the rounding error."""
        q, noise = self.parts.exponentials(jnp.maximum(self.sigma_bar(t) - self.sigma_bar(s), 0.0))
        return jnp.where(q > noise, q, 0.0)

    def marginal(self, t: Array) -> Array:
        """Computes q(z_t = y | x), x clean: [B, V, S], 0 below the rounding error."""
        q, noise = self.parts.exponentials(self.sigma_bar(t))
        return jnp.where(q > noise, q, 0.0)[:, : self.vocab_size]

    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        """Draws z_t ~ q(. | x), [B, L], from x [B, L], t [B] and keys [B]."""
        return draw_rows(keys, self.marginal(t), x)

    def prior(self, keys: Array, length: int) -> Array:
        """Draws from the stationary distribution, int32 [B, length]."""
        log_pi = jnp.log(jnp.asarray(self.parts.stationary, jnp.float32))
        return _draw(keys, jnp.broadcast_to(log_pi, (len(keys), length, len(log_pi))))

    def _marginal_at(self, t: float) -> np.ndarray:
        """Computes q(z_t | x) for a t known at compile time, float64 [V, S]."""
        with jax.ensure_compile_time_eval():
            alpha = float(self.schedule.alpha(jnp.asarray(t, float)))
            noise = float(self.schedule.one_minus_alpha(jnp.asarray(t, float)))
            time = -np.log1p(-noise) if noise < 0.5 else -np.log(max(alpha, 1e-300))
        return self.parts.exponential(time)[: self.vocab_size]

    def prior_nats(self, x: Array) -> Array:
        """Returns KL(q(z_1 | x) || pi) of each token, in nats, like x; 0 if alpha_1 = 0."""
        if reaches_one(self.schedule):
            return jnp.zeros(x.shape)
        q = self._marginal_at(1.0)
        return jnp.asarray(np.sum(_times_log(q, q / self.parts.stationary), axis=1))[x]

    def reconstruction_nats(self, x: Array, t: float = 0.0) -> Array:
        """Returns -E log p(x | z_t) of each token, p prop q(z_t | x), in nats, like x."""
        q = self._marginal_at(t)
        total = q.sum(axis=0)
        decoder = q / np.where(total > 0, total, 1.0)
        return jnp.asarray(-np.sum(_times_log(q, decoder), axis=1))[x]

    def exit_rate(self, z: Array) -> Array:
        """Returns Z(z) = sum_{y != z} R[z, y] of each token, without beta: like z."""
        return jnp.asarray(-np.diagonal(self.parts.generator), _default())[z]

    def forward_rates(self, z: Array) -> Array:
        """Returns R[z_n, y], without beta, 0 at y = z_n: [B, L, S]."""
        return jnp.asarray(self._off_diagonal(), _default())[z]

    def backward_rates(self, z: Array) -> Array:
        """Returns R[y, z_n], without beta, 0 at y = z_n: [B, L, S]."""
        return jnp.asarray(self._off_diagonal().T, _default())[z]

    def reverse_rates(self, outputs: Array, z: Array, t: Array) -> Array:
        """Returns beta R[y, z_n] s_y, the model's rates of z_n -> y, 0 at y = z_n: [B, L, S].

        t is at most LATEST: where alpha is 0, beta is infinite and a mask's score is 0.
        """
        t = jnp.minimum(t, LATEST)
        score = jnp.exp(self.log_score(outputs, z, t))
        return self.beta(t)[:, None, None] * self.backward_rates(z) * score

    def _off_diagonal(self) -> np.ndarray:
        generator = self.parts.generator
        return np.where(np.eye(len(generator), dtype=bool), 0.0, generator)

    def jump(self, keys: Array, z: Array, movable: Array) -> Array:
        """Draws one jump of the forward chain from z at the positions `movable`, bool [B, L].

        Rows without a possible jump are not changed.
        """
        where, what = split_keys(keys)
        rates = jnp.where(movable, self.exit_rate(z), 0.0)
        position = _draw(where, jnp.log(rates)[:, None])
        there = jnp.take_along_axis(z, position, axis=1)
        symbol = _draw(what, jnp.log(self.forward_rates(there)))
        moved = jnp.where(jnp.arange(z.shape[1]) == position, symbol, z)
        return jnp.where(jnp.any(rates > 0, axis=1, keepdims=True), moved, z)

    def score_given(self, z: Array, x: Array, t: Array) -> Array:
        """Returns r_y = q(y | x_n) / q(z_n | x_n), the score given x: [B, L, S]."""
        q = _rows(self._floored(t), x)
        return q / picked(q, z)

    def _floored(self, t: Array) -> Array:
        """Computes `marginal` for quotients: at least its rounding error, or 0 if 0 for all t."""
        q, noise = self.parts.exponentials(self.sigma_bar(t))
        return jnp.maximum(q, noise)[:, : self.vocab_size]

    def log_score(self, outputs: Array, z: Array, t: Array) -> Array:
        """Computes log s [B, L, S] from the network's outputs, at least float32; 0 at z itself."""
        q = self._floored(t)
        total = _mixed(self._log_weight(outputs, z, q), q)
        log_total = jnp.log(jnp.maximum(total, jnp.finfo(total.dtype).tiny))
        return log_total - picked(log_total, z)

    def _log_weight(self, outputs: Array, z: Array, q: Array) -> Array:
        """Computes log w [B, L, V] up to a constant per position; finite where outputs are -inf."""
        outputs = widened(outputs)
        tiny = jnp.finfo(outputs.dtype).tiny
        log_weight = jnp.maximum(jax.nn.log_softmax(outputs, axis=-1), jnp.log(tiny))
        if self.parametrisation == "mixture":
            at_z = _rows(q.swapaxes(1, 2), z)
            # Symbols that cannot become z have no weight (tauLDR, eq. 7).
            log_weight = jnp.where(at_z > 0, log_weight, jnp.log(tiny))
            log_weight -= jnp.log(jnp.where(at_z > 0, at_z, 1.0))
        return log_weight

    def reverse_logits(self, outputs: Array, z: Array, s: Array, t: Array) -> Array:
        """Computes log(P_{s,t}[z_s, z] sum_x w(x) q(z_s | x)) [B, L, S], s < t, each [B]."""
        q = self.marginal(s)
        total = _mixed(self._log_weight(outputs, z, self._floored(t)), q)
        tiny = jnp.finfo(total.dtype).tiny
        # Staying is always possible, also for a prompt's symbol at alpha = 0.
        here = jnp.arange(q.shape[-1]) == z[..., None]
        reachable = jnp.any(q > 0, axis=1)[:, None] | here
        log_total = jnp.where(reachable, jnp.log(jnp.maximum(total, tiny)), -jnp.inf)
        step = _rows(self.transition(s, t).swapaxes(1, 2), z)
        return log_total + jnp.log(jnp.where(here, jnp.maximum(step, tiny), step))

    def clean_logits(self, outputs: Array, z: Array, t: Array) -> Array:
        """Returns log p(x | z_t = z) [B, L, V], the step to clean data."""
        log_weight = self._log_weight(outputs, z, self._floored(t))
        return log_weight + jnp.log(_rows(self.marginal(t).swapaxes(1, 2), z))


def _default() -> np.dtype:
    """Returns the default float type, float32 unless x64 is on."""
    return jax.dtypes.canonicalize_dtype(float)


def _rows(matrix: Array, index: Array) -> Array:
    """Returns row index[b, n] of matrix[b]: [B, I, J], [B, L] -> [B, L, J]."""
    return jnp.take_along_axis(matrix, index[..., None], axis=1)


def _mixed(log_weight: Array, q: Array) -> Array:
    """Sums w(x) q[x, y] over x, with max w = 1: [B, L, V], [B, V, S] -> [B, L, S]."""
    log_weight -= jax.lax.stop_gradient(jnp.max(log_weight, axis=-1, keepdims=True))
    return jnp.matmul(jnp.exp(log_weight), q, precision=jax.lax.Precision.HIGHEST)


def _draw(keys: Array, logits: Array) -> Array:
    """Draws a symbol for each position, int32 [B, L], with keys [B] and full-precision noise."""

    def one(key: Array, row: Array) -> Array:
        return jax.random.categorical(key, row, axis=-1, mode="high")

    return jax.vmap(one)(keys, logits).astype(jnp.int32)


def _times_log(weight: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Computes weight log value, 0 where weight is 0."""
    return np.where(weight > 0, weight * np.log(np.where(weight > 0, value, 1.0)), 0.0)
