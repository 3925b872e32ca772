"""Laws of single steps and of whole runs, by enumeration, and draws held against them."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from md4_jax.protocols import Denoiser

N = 20_000
# Generators of gap 1 over three symbols, and over these and the mask.
UNIFORM = np.full((3, 3), 1 / 3) - np.eye(3)
ABSORBING = np.eye(4)[[3] * 4] - np.eye(4)


def fixed(logits) -> Denoiser:
    """A denoiser that puts out the same numbers at every state."""
    logits = jnp.asarray(logits, jnp.float32)
    return Denoiser(lambda z, t: jnp.broadcast_to(logits, (*z.shape, logits.size)), lambda h: h)


def after_step(step, denoiser, process, z, s, t, *, seed=0, confidence=1.0):
    """z [B, L] after one step from t to s, compiled."""
    keys, times = exact.keys_for(seed, len(z)), (jnp.float32(s), jnp.float32(t))
    chain = exact.chain_of(z)._replace(confidence=jnp.full(np.shape(z), confidence, jnp.float32))
    call = jax.jit(lambda keys, chain: step(denoiser, process, chain, *times, keys).z)
    return np.asarray(call(keys, chain))


def accepted(counts, law) -> bool:
    """Chi-squared over what has a chance, p > 1e-4, and nothing else was drawn."""
    counts, law = np.ravel(counts), np.ravel(law) / np.sum(law)
    possible = law > 1e-12
    assert (counts[~possible] == 0).all()
    return stats.chisquare(counts[possible], counts.sum() * law[possible]).pvalue > 1e-4


def drawn_from(law: np.ndarray, seed: int) -> np.ndarray:
    """N states of a law over [S, ..., S], int32 [N, L]."""
    rng = np.random.default_rng(seed)
    flat = rng.choice(law.size, N, p=law.ravel() / law.sum())
    return np.stack(np.unravel_index(flat, law.shape), axis=1).astype(np.int32)


def counted(z: np.ndarray, symbols: int) -> np.ndarray:
    return np.bincount(z @ symbols ** np.arange(z.shape[1])[::-1], minlength=symbols ** z.shape[1])


def generators(law: np.ndarray, each: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(forward, reverse) rates of single tokens to each symbol [Z, L, S] for p_s = law [S, S]."""
    size = len(each)
    z = exact.sequences(size, 2)
    off = np.where(np.eye(size, dtype=bool), 0.0, each)
    moved = np.stack([law[:, z[:, 1]].T, law[z[:, 0]]], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        score = moved / law[z[:, 0], z[:, 1]][:, None, None]
    reverse = off.T[z] * np.where(law[z[:, 0], z[:, 1]][:, None, None] > 0, score, 0.0)
    return off[z], reverse


def moved_by(law: np.ndarray, rates: np.ndarray, leave) -> np.ndarray:
    """The law [S, S] after each token jumps with probability leave(its rate)."""
    z = exact.sequences(len(law), 2)
    total = rates.sum(axis=2, keepdims=True)
    stay = 1.0 - leave(total)
    kernel = leave(total) * rates / np.where(total > 0, total, 1.0)
    kernel = kernel + stay * np.eye(len(law))[z]
    whole = kernel[:, 0][:, z[:, 0]] * kernel[:, 1][:, z[:, 1]]
    return (law.ravel() @ whole).reshape(law.shape)


def noised(p: np.ndarray, alpha: float, each: np.ndarray) -> np.ndarray:
    """p_t over [S, S], of noise with the generator `each` whose gap is 1."""
    size = len(each)
    clean = np.zeros((size, size))
    clean[:3, :3] = p
    law = np.eye(size) + (1.0 - alpha) * each
    return law.T @ clean @ law
