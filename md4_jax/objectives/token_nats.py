"""Reductions of logits over the vocabulary to nats per token."""

import jax
import jax.numpy as jnp

from md4_jax.objectives.head import at_noise, features_at_noise, noise_of
from md4_jax.objectives.log_sum_exp import log_sum_exp, summed
from md4_jax.processes.outputs import widened
from md4_jax.protocols import Array, Batch, Denoiser, Process
from md4_jax.runtime.reductions import with_entries


@jax.custom_vjp
def token_nats(logits: Array, x: Array) -> Array:
    """Computes -log softmax(logits)[x] in nats: logits [..., V], x [...] -> [...]."""
    return _token_nats(logits, x)[0]


def _token_nats(logits: Array, x: Array) -> tuple[Array, tuple[Array, ...]]:
    wide = widened(logits)
    picked = jnp.take_along_axis(wide, x[..., None], axis=-1)[..., 0]
    total = summed(wide)
    return total - picked, (logits, total, picked, x)


def _slope_of_logits(kept: tuple[Array, ...], slope: Array) -> tuple[Array, None]:
    """Computes slope (softmax(logits) - 1 at x)."""
    logits, total, picked, x = kept
    of_all = slope[..., None] * jnp.exp(widened(logits) - total[..., None])
    of_x = slope * jnp.expm1(picked - total)
    return with_entries(of_all, x, of_x).astype(logits.dtype), None


token_nats.defvjp(_token_nats, _slope_of_logits)


def expected(logits: Array, values: Array) -> Array:
    """Computes sum_k softmax(logits)_k values_k: logits [..., V], values [V] -> [...]."""
    # GPUs and TPUs would round the factors, and GenMD4 subtracts a number close to this sum.
    exact = jax.lax.Precision.HIGHEST
    return jnp.matmul(jax.nn.softmax(widened(logits), axis=-1), values, precision=exact)


def score_nats(log_ratio: Array, x: Array) -> Array:
    """Computes sum_j r_j - 1 - log r_x, r = exp(log_ratio): [..., V], x [...] -> [...]."""
    log_ratio = widened(log_ratio)
    picked = jnp.take_along_axis(log_ratio, x[..., None], axis=-1)[..., 0]
    # C - 1 as expm1(log C): near a normalised score a subtraction would leave only rounding errors.
    return jnp.expm1(log_sum_exp(log_ratio)) - picked


def excess_squares(log_ratio: Array) -> Array:
    """Computes sum_y (c_y^2 + 2 c_y), c = exp(log_ratio) - 1: log_ratio [..., V] -> [...]."""
    return jnp.sum(jnp.expm1(2.0 * widened(log_ratio)), axis=-1)


def ratio_error(
    log_ratio: Array, scale: Array, x: Array, *, at_x: Array, elsewhere: Array
) -> Array:
    """Computes sum_y (scale exp(log_ratio_y) - target_y)^2: log_ratio [..., V] -> [...].

    The target is at_x at y = x, `elsewhere` otherwise. x and the others broadcast to [...].
    """
    found = scale[..., None] * jnp.exp(widened(log_ratio))
    here = jnp.arange(log_ratio.shape[-1]) == x[..., None]
    return jnp.sum((found - jnp.where(here, at_x[..., None], elsewhere[..., None])) ** 2, axis=-1)


def masked_nats(denoiser: Denoiser, process: Process, batch: Batch, z: Array, t: Array) -> Array:
    """Sums -log mu(z, t)[x] over the masked positions that count, nats per sequence [B].

    Unmasked positions are copied by the denoiser and cost nothing.
    """
    return jnp.sum(nats_of_masks(denoiser, process, batch, z, t), axis=1)


def nats_of_masks(denoiser: Denoiser, process: Process, batch: Batch, z: Array, t: Array) -> Array:
    """Computes -log mu(z, t)[x] at the masked positions that count, 0 elsewhere: [B, L]."""
    noise = noise_of(process, batch, z)
    h_BxLxD = features_at_noise(denoiser, process, z, t, noise)
    return at_noise(denoiser, h_BxLxD, noise, reduce=token_nats, padded=True, rows=(batch.tokens,))


def counted(nats_BxL: Array, batch: Batch) -> Array:
    """Sums over the positions that count [B]."""
    return jnp.sum(jnp.where(batch.loss_mask, nats_BxL, 0.0), axis=1)


def divergence_nats(log_p: Array, log_q: Array) -> Array:
    """Computes KL(q || p) in nats of logits over the states: each [..., S] -> [...].

    It is the sum of q (exp(d) - 1 - d) with d = log p - log q. No term is negative, and an error
    common to all log p cancels, so that small divergences (one step of a thousand) are accurate in
    float32. Entries may be -inf.
    """
    log_p = jax.nn.log_softmax(widened(log_p), axis=-1)
    log_q = jax.nn.log_softmax(widened(log_q), axis=-1)
    possible = log_q > -jnp.inf
    d = jnp.where(possible, log_p, 0.0) - jnp.where(possible, log_q, 0.0)
    close = possible & (jnp.abs(d) < 1.0)
    small = jnp.where(close, d, 0.0)
    q = jnp.exp(log_q)
    apart = jnp.exp(log_p) - q - q * jnp.where(close, 0.0, d)
    return jnp.sum(jnp.where(close, q * (jnp.expm1(small) - small), apart), axis=-1)


def rate_excess(rate: Array, log_score: Array, ratio: Array) -> Array:
    """Computes sum_y rate_y (s_y - r_y), s = exp(log_score), r = ratio: each [..., S] -> [...]."""
    return jnp.sum(rate * _excess(log_score, ratio)[0], axis=-1)


def rate_divergence(rate: Array, log_score: Array, ratio: Array) -> Array:
    """Computes sum_y rate_y (s_y - r_y - r_y log(s_y / r_y)) >= 0: each [..., S] -> [...].

    It is the divergence, in nats per time, of jump processes with the rates rate r and rate s. r
    may be 0, where the term is s.
    """
    excess, d = _excess(log_score, ratio)
    return jnp.sum(rate * (excess - ratio * d), axis=-1)


def _excess(log_score: Array, ratio: Array) -> tuple[Array, Array]:
    """Computes (s - r, log(s / r)) without cancellation if s is near r; (s, 0) where r is 0."""
    log_score, possible = widened(log_score), ratio > 0
    d = jnp.where(possible, log_score - jnp.log(jnp.where(possible, ratio, 1.0)), 0.0)
    close = possible & (jnp.abs(d) < 1.0)
    near = ratio * jnp.expm1(jnp.where(close, d, 0.0))
    return jnp.where(close, near, jnp.exp(log_score) - ratio), d


def uniform_score_nats(log_score: Array, z: Array, x: Array, log_rho: Array) -> Array:
    """Computes the score entropy of tokens on uniform noise: log_score [..., V] -> [...].

    It is (1/V) sum_{y != z} r_y g(log s_y - log r_y) with g(d) = exp(d) - 1 - d and
    r_y = q(y | x) / q(z | x), which is rho if z = x, and else 1 / rho at y = x and 1 elsewhere. No
    term is negative, and no large numbers are subtracted.
    """
    log_score = widened(log_score)
    kept, log_r = z == x, jnp.where(z == x, log_rho, 0.0)
    d, r = log_score - log_r[..., None], jnp.exp(log_r)[..., None]
    # s - r in a form that neither cancels nor overflows.
    excess = jnp.where(d < 1.0, r * jnp.expm1(jnp.minimum(d, 1.0)), jnp.exp(log_score) - r)
    apart = jnp.where(_other(z, x, d.shape[-1]), excess - r * d, 0.0)
    jump = jnp.take_along_axis(log_score, x[..., None], axis=-1)[..., 0] + log_rho
    at_x = jnp.exp(-log_rho) * (jnp.expm1(jump) - jump)
    total = jnp.sum(apart, axis=-1) + jnp.where(kept, 0.0, at_x)
    return total / log_score.shape[-1]


def two_and_others(logits: Array, z: Array, x: Array) -> tuple[Array, Array, Array]:
    """Returns softmax(logits) at z, at x and summed over all others: [..., V], [...] -> [...]."""
    logits = widened(logits)
    total = log_sum_exp(logits)

    def at(symbol: Array) -> Array:
        return jnp.exp(jnp.take_along_axis(logits, symbol[..., None], axis=-1)[..., 0] - total)

    mu = jnp.where(_other(z, x, logits.shape[-1]), jnp.exp(logits - total[..., None]), 0.0)
    return at(z), at(x), jnp.sum(mu, axis=-1)


def others_log1p(logits: Array, scale: Array, z: Array, x: Array) -> Array:
    """Sums log(1 + scale mu_y) over y other than z and x, mu the softmax: [..., V] -> [...]."""
    logits = widened(logits)
    # Above zero, where the logarithm has a gradient.
    scale = jnp.maximum(scale, float(jnp.finfo(jnp.float32).tiny))
    shift = log_sum_exp(logits) - jnp.log(scale)
    logs = jnp.where(
        _other(z, x, logits.shape[-1]), jax.nn.softplus(logits - shift[..., None]), 0.0
    )
    return jnp.sum(logs, axis=-1)


def _other(z: Array, x: Array, size: int) -> Array:
    symbols = jnp.arange(size)
    return (symbols != z[..., None]) & (symbols != x[..., None])
