"""Discrete-time process with a transition matrix for each step: docs/families/d3pm.md."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.conditioning import check_conditioning
from md4_jax.processes.draws import draw_rows, uniform_symbols
from md4_jax.processes.outputs import widened
from md4_jax.processes.scheduled import Scheduled
from md4_jax.processes.schedules import Linear
from md4_jax.protocols import Array, Schedule, UserError, pytree

PARAMETRISATIONS = ("joint", "mixture")
# Largest size of the table of products in bytes; it is a constant in every compiled program.
LARGEST_TABLE = 2**30


class _Tables(NamedTuple):
    """Tables of the steps i = 1..T over S states, as numpy arrays.

    products  [T + 1, S, S]  row a of Q_1 ... Q_i is q(z_i | x = a); the first is the identity
    stay      [T, S]         Q_i[a, a]
    move      [T, S]         Q_i[a, b], a != b, by the distance |a - b|
    prior     [V]            KL(q(z_T | x) || prior) of each symbol, in nats
    """

    products: np.ndarray
    stay: np.ndarray
    move: np.ndarray
    prior: np.ndarray


@pytree()
@dataclasses.dataclass(frozen=True)
class Transition(Scheduled):
    """Markov chain of T steps z_i ~ Cat(row z_{i-1} of Q_i) per token (D3PM, arXiv:2107.03006).

    q(z_i = b | x = a) = (Q_1 ... Q_i)[a, b], at t = i / T. kernel names the matrices:

    gaussian   Q_i[a, b] prop exp(-4 |a - b|^2 / ((V-1)^2 beta_i)) over distances -(V-1)..V-1, and
               the diagonal makes rows sum to 1. beta_i runs linearly from beta_start to beta_end.
               For ordinal symbols (grey values). D3PM's 1e-4 to 0.02 are for V = 256 and T = 1000.
               With a smaller V or T, z_T still depends on x, which increases the prior's term
    uniform    (1 - beta_i) I + beta_i / V, with alpha_i = prod (1 - beta) the schedule at i / T
    absorbing  (1 - beta_i) I + beta_i on the mask V, likewise, with alpha_T pinned to 0

    alpha_0 is pinned to 1. beta_start and beta_end are used by gaussian only, the schedule by the
    others. The denoiser has logits of V clean symbols; parametrisation is as in `Uniform`. The
    products are float32 and take 4 (T + 1) S^2 bytes: UserError above 1 GiB.
    """

    vocab_size: int
    schedule: Schedule = Linear()
    timesteps: int = 1000
    kernel: str = "gaussian"
    beta_start: float = 1e-4
    beta_end: float = 0.02
    parametrisation: str = "joint"
    conditioning: str = "time"

    def __post_init__(self):
        check_conditioning(self.conditioning)
        for name, known in (("kernel", tuple(_KERNELS)), ("parametrisation", PARAMETRISATIONS)):
            if getattr(self, name) not in known:
                raise UserError(
                    f"process.{name} must be one of {', '.join(known)}, not {getattr(self, name)!r}"
                )
        if self.timesteps < 1:
            raise UserError(f"process.timesteps must be at least 1, not {self.timesteps}")
        for name in ("beta_start", "beta_end"):
            if not getattr(self, name) > 0:
                raise UserError(f"process.{name} must be positive, not {getattr(self, name)}")
        size = 4 * (self.timesteps + 1) * self.states**2
        if size > LARGEST_TABLE:
            raise UserError(
                f"process.name='transition' with process.timesteps={self.timesteps} and "
                f"{self.states} symbols needs a table of {size / 2**30:.1f} GiB, more than "
                f"{LARGEST_TABLE / 2**30:.0f}: reduce process.timesteps, or use "
                "process.name='uniform' or 'masking', which need no matrices"
            )

    @property
    def mask_id(self) -> int | None:
        return self.vocab_size if self.kernel == "absorbing" else None

    @property
    def is_uniform(self) -> bool:
        """Whether a changed token is redrawn uniformly."""
        return self.kernel == "uniform"

    @property
    def shows_clean(self) -> bool:
        """Whether every symbol but the mask is clean."""
        return self.mask_id is not None

    def is_noise(self, z: Array) -> Array:
        """Returns whether each symbol is the mask, if there is one: bool like z."""
        return z == self.vocab_size

    def noise_left(self, t: Array) -> Array:
        """Returns whether z_t may contain noise; it cannot at step 0: bool []."""
        return self.step(t) > 0

    def pinned(self) -> "Transition":
        """Returns itself, since alpha_0 is pinned to 1."""
        return self

    @property
    def states(self) -> int:
        """S: V, or V + 1 with a mask."""
        return self.vocab_size + (self.mask_id is not None)

    def corrupt(self, keys: Array, x: Array, t: Array) -> Array:
        """Draws z ~ q(. | x) at step t T, [B, L], from x [B, L], t [B] and keys [B]."""
        return draw_rows(keys, jnp.asarray(self._tables.products)[self.step(t)], x)

    def marginal(self, t: Array) -> Array:
        """Returns q(z = b | x = a) at step t T, from t [B]: [B, V, S]."""
        return jnp.asarray(self._tables.products)[self.step(t), : self.vocab_size]

    def step(self, t: Array) -> Array:
        """Returns the step i nearest to t T, int32 like t."""
        return jnp.clip(jnp.round(t * self.timesteps), 0, self.timesteps).astype(jnp.int32)

    def prior(self, keys: Array, length: int) -> Array:
        """Draws z_T of the model, int32 [B, length]: uniform symbols, or all masks."""
        if self.mask_id is not None:
            return jnp.full((keys.shape[0], length), self.mask_id, jnp.int32)
        return uniform_symbols(keys, length, self.vocab_size)

    def prior_nats(self, x: Array) -> Array:
        """Returns KL(q(z_T | x) || prior) of each token, in nats, like x."""
        return jnp.asarray(self._tables.prior)[x]

    def posterior_logits(self, x: Array, z: Array, s: Array, t: Array) -> Array:
        """Returns log q(z_{i-1} | z_i = z, x) [B, L, S] up to a constant, i = t T, s = t - 1/T.

        Q_i[y, z] (Q_1 ... Q_{i-1})[x, y] (arXiv:2107.03006, eq. 3); z must have q(z | x) > 0.
        """
        del s
        before = jnp.asarray(self._tables.products)[self.step(t)[:, None] - 1, x]
        return jnp.log(before) + jnp.log(self._column(z, t))

    def reverse_logits(self, outputs: Array, z: Array, s: Array, t: Array) -> Array:
        """Returns log p(z_{i-1} | z_i = z) [B, L, S] up to a constant, i = t T.

        s must be t - 1/T, since other steps have no matrix. outputs [B, L, V].
        """
        outputs = widened(outputs)
        return self.step_back(jax.nn.log_softmax(outputs, axis=-1), z, t)

    def step_back(self, log_mu: Array, z: Array, t: Array) -> Array:
        """Computes `reverse_logits` from log mu [B, L, V], or [B, L, S] with mass on the mask.

        joint    Q_i[y, z] sum_x mu(x) (Q_1 ... Q_{i-1})[x, y]
        mixture  Q_i[y, z] sum_x mu(x) (Q_1 ... Q_{i-1})[x, y] / (Q_1 ... Q_i)[x, z]

        In the mixture, an x that cannot become z has weight 0.
        """
        products, step = jnp.asarray(self._tables.products), self.step(t)
        size = log_mu.shape[-1]
        if self.parametrisation == "mixture":
            # Every x that can become z keeps some weight.
            log_mu = jnp.maximum(log_mu, jnp.log(jnp.finfo(log_mu.dtype).tiny))
            log_mu = log_mu - self._log_reach(z, step, size)
        largest = jax.lax.stop_gradient(jnp.max(log_mu, axis=-1, keepdims=True))
        largest = jnp.where(largest > -jnp.inf, largest, 0.0)
        before = products[step - 1, :size]
        mean = jnp.einsum(
            "blx,bxy->bly", jnp.exp(log_mu - largest), before, precision=jax.lax.Precision.HIGHEST
        )
        # A probability rounded to zero would have infinite cost.
        tiny = jnp.finfo(mean.dtype).tiny
        return jnp.log(jnp.maximum(mean, tiny)) + jnp.log(self._column(z, t))

    def clean_logits(self, outputs: Array, z: Array, t: Array) -> Array:
        """Returns log p(x | z_i = z) [B, L, V], i = t T, the step to clean data."""
        outputs = widened(outputs)
        if self.parametrisation == "mixture":
            return outputs
        reach = jnp.asarray(self._tables.products)[self.step(t)[:, None], : self.vocab_size, z]
        # Every x that can become z keeps some weight.
        least = jnp.max(outputs, axis=-1, keepdims=True) + jnp.log(jnp.finfo(outputs.dtype).tiny)
        return jnp.maximum(outputs, least) + jnp.log(reach)

    @property
    def _tables(self) -> _Tables:
        return _made(self, np.dtype(jnp.zeros(()).dtype).name)

    def _log_reach(self, z: Array, step: Array, size: int) -> Array:
        """Returns log q(z | x) [B, L, size]; +inf where it is 0, so that x has weight 0."""
        reach = jnp.asarray(self._tables.products)[step[:, None], :size, z]
        return jnp.where(reach > 0, jnp.log(jnp.where(reach > 0, reach, 1.0)), jnp.inf)

    def _column(self, z: Array, t: Array) -> Array:
        """Returns Q_i[y, z] over y, [B, L, S]; with a mask, for a clean z up to a constant."""
        index = self.step(t) - 1
        distance = jnp.abs(jnp.arange(self.states) - z[..., None])
        stay = jnp.asarray(self._tables.stay)[index][:, None]
        move = jax.vmap(lambda row, d: row[d])(jnp.asarray(self._tables.move)[index], distance)
        if self.mask_id is not None:
            move = jnp.where((z == self.mask_id)[..., None], move, 0.0)
            # Staying is always possible, also for a prompt's symbol at alpha = 0.
            stay = jnp.where(jnp.arange(self.states) == self.mask_id, stay, 1.0)
        return jnp.where(distance == 0, stay, move)


@functools.lru_cache(maxsize=4)
def _made(process: Transition, dtype: str) -> _Tables:
    """Computes the tables in float64, once."""
    stay, move = _KERNELS[process.kernel](process)
    last, size = process.timesteps, process.states
    distance = np.abs(np.arange(size)[:, None] - np.arange(size))
    product = np.eye(size)
    products = np.empty((last + 1, size, size), dtype)
    products[0] = product
    for i in range(last):
        matrix = move[i][distance]
        if process.mask_id is not None:
            matrix[:, : process.mask_id] = 0.0
        np.fill_diagonal(matrix, stay[i])
        product = product @ matrix
        products[i + 1] = product
    prior = np.zeros(process.vocab_size)  # all mask at the end: alpha_T = 0
    if process.mask_id is None:
        ratio = np.log(np.where(product > 0, size * product, 1.0))
        prior = np.maximum((product * ratio).sum(axis=1), 0.0)
    return _Tables(products, stay.astype(dtype), move.astype(dtype), prior.astype(dtype))


def _gaussian(process: Transition) -> tuple[np.ndarray, np.ndarray]:
    """Returns (stay, move) of the discretised Gaussian (arXiv:2107.03006, appendix A.2)."""
    size = process.states
    beta = np.linspace(process.beta_start, process.beta_end, process.timesteps)[:, None]
    weight = np.exp(-4.0 * np.arange(size) ** 2 / (max(1, size - 1) ** 2 * beta))
    move = weight / (weight[:, :1] + 2.0 * weight[:, 1:].sum(axis=1, keepdims=True))
    # Probability of leaving a: distances 1..a to one side and 1..S-1-a to the other.
    beyond = np.cumsum(move, axis=1) - move[:, :1]
    return 1.0 - beyond - beyond[:, ::-1], move


def _uniform(process: Transition) -> tuple[np.ndarray, np.ndarray]:
    shape = (process.timesteps, process.states)
    beta = _betas(process, end=None)[:, None]
    move = np.broadcast_to(beta / process.states, shape)
    return np.broadcast_to(1.0 - beta, shape) + move, move


def _absorbing(process: Transition) -> tuple[np.ndarray, np.ndarray]:
    move = np.broadcast_to(_betas(process, end=0.0)[:, None], (process.timesteps, process.states))
    stay = 1.0 - move
    stay[:, process.mask_id] = 1.0
    return stay, move


def _betas(process: Transition, *, end: float | None) -> np.ndarray:
    """Returns 1 - alpha_i / alpha_{i-1} [T], alpha pinned to 1 at the start and to `end`."""
    t = np.arange(process.timesteps + 1) / process.timesteps
    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        alpha = np.array(process.schedule.alpha(jnp.asarray(t)), np.float64)
    alpha[0] = 1.0
    if end is not None:
        alpha[-1] = end
    # Where alpha = 0, each step redraws every token.
    left = alpha[:-1] > 0
    return np.where(left, 1.0 - alpha[1:] / np.where(left, alpha[:-1], 1.0), 1.0)


_KERNELS: dict[str, Callable] = {
    "gaussian": _gaussian,
    "uniform": _uniform,
    "absorbing": _absorbing,
}
