"""Exact laws of noise that is partly the mask and partly uniform, written out by hand in float64.

A token is x with (1 - t) / (1 + c), the mask with t / (1 + c), and one of V symbols with
c / (1 + c) / V each, c = B (t (1 - t))^(gamma / 2), B = 2^gamma p / (1 - p) (arXiv:2503.04482).
"""

import exact
import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.hybrid import Hybrid
from md4_jax.protocols import Denoiser


def spread(process: Hybrid, t: np.ndarray) -> np.ndarray:
    """c_t, like t."""
    odds = process.uniform / (1.0 - process.uniform)
    return odds * (4.0 * t * (1.0 - t)) ** (process.gamma / 2)


def token_law(process: Hybrid, t) -> np.ndarray:
    """q(z | x) of one token, float64 [..., V, V + 1]."""
    t = np.asarray(t, np.float64)[..., None, None]
    c, size = spread(process, t), process.vocab_size
    noise = np.broadcast_to(c / size, (*t.shape[:-2], 1, size + 1)).copy()
    noise[..., size] = t[..., 0]
    return ((1.0 - t) * np.eye(size, size + 1) + noise) / (1.0 + c)


def step(process: Hybrid, s: float, t: float) -> np.ndarray:
    """q(z_t | z_s) of one token, from its laws at both times: [V + 1, V + 1]."""
    early, late = (token_law(process, time) for time in (s, t))
    alpha_s, alpha_t = (law[0, 0] - law[1, 0] for law in (early, late))
    noise_s, noise_t = (
        np.append(np.full(process.vocab_size, law[1, 0]), law[0, -1]) for law in (early, late)
    )
    kept = alpha_t / alpha_s
    return kept * np.eye(process.vocab_size + 1) + noise_t - kept * noise_s


def laws(process: Hybrid, x: np.ndarray, t) -> np.ndarray:
    """q(z | x) over all (V + 1)^L states: x [X, L], t [N] -> float64 [X, N, Z]."""
    z = exact.sequences(process.vocab_size + 1, x.shape[1])
    each = token_law(process, np.asarray(t))[:, x]  # [N, X, L, S]
    chosen = [each[:, :, n][:, :, z[:, n]] for n in range(x.shape[1])]
    return np.moveaxis(np.prod(chosen, axis=0), 0, 1)


def perfect(process: Hybrid, p: np.ndarray) -> Denoiser:
    """log P(x_n = k | z without z_n) for the data law p, by sums over all sequences."""
    x = exact.sequences(p.shape[0], p.ndim)
    picks = np.eye(p.shape[0])[x]

    def features(z, t):
        rows = jnp.arange(len(z))[:, None, None]
        law = process.marginal(t)[rows, x[None], z[:, None]]  # [B, sequences, L]
        others = [jnp.delete(law, n, axis=2).prod(axis=2) for n in range(p.ndim)]
        joint = p.ravel()[None, :, None] * jnp.stack(others, axis=2)
        return jnp.log(jnp.einsum("bxl,xlk->blk", joint, picks))

    return Denoiser(features, lambda h: h)


def times(nodes: int = 40, early: int = 10, late: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Points and weights of a quadrature over t in [0, 1] that is fine at both ends."""
    (first, before), (last, after) = (exact.quadrature(0.0, 0.5, nodes, p) for p in (early, late))
    return np.concatenate([first, 1.0 - last]), np.concatenate([before, after])


def at_states(objective, denoiser: Denoiser, process: Hybrid, x: np.ndarray, t) -> np.ndarray:
    """loss_at for x [X, L], t [N] and every z of (V + 1)^L: float64 [X, N, Z]."""
    loss_at = jax.jit(exact.bind(objective, denoiser, process))
    return exact.over_states(loss_at, process.vocab_size + 1, x, t)


def integral(objective, denoiser: Denoiser, process: Hybrid, x: np.ndarray, **rule) -> np.ndarray:
    """The mean of loss_at over t ~ U(0, 1) and z by quadrature and enumeration, [X]."""
    t, weight = times(**rule)
    values = at_states(objective, denoiser, process, x, t)
    law = laws(process, x, t)
    return np.where(law > 0, law * values, 0.0).sum(axis=2) @ weight
