"""CANDI's process on problems so small that masks, sequences and Gaussian noise are integrated."""

import itertools
from typing import NamedTuple

import exact
import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from md4_jax.protocols import Denoiser, batch_of

# Trapezoid rule for the mean over a normal variable.
NODES = np.linspace(-7.0, 7.0, 41)
WEIGHTS = stats.norm.pdf(NODES) * (NODES[1] - NODES[0])
P_V3L1 = exact.P_V3L1
P_V2L2 = np.array([[0.42, 0.08], [0.15, 0.35]])
PROBLEMS = {"three symbols": P_V3L1, "two tokens": P_V2L2}


def sigma_of(process, t):
    """The deviation of the noise, from the probability that it confuses two symbols."""
    low, high = process.confusion_start, process.confusion_end
    return -1.0 / (np.sqrt(2.0) * stats.norm.ppf(low + (high - low) * np.asarray(t)))


class Noise(NamedTuple):
    """Values of standard noise [N, L, V] and their weights [N].

    All but the direction in which all symbols of a position move alike, which says nothing.
    """

    values: np.ndarray
    weight: np.ndarray


def noise(vocab: int, length: int) -> Noise:
    basis = np.linalg.svd(np.ones((1, vocab)))[2][1:]
    dimensions = (vocab - 1) * length
    which = np.array(list(itertools.product(range(len(NODES)), repeat=dimensions)))
    values = NODES[which].reshape(len(which), length, vocab - 1) @ basis
    return Noise(values, WEIGHTS[which].prod(axis=1))


class States(NamedTuple):
    """Rows of all (x, masks, noise) at a time: x [R, L], its number, z, y, q(z, y | x) [R]."""

    number: np.ndarray
    x: np.ndarray
    z: np.ndarray
    y: np.ndarray
    weight: np.ndarray


def states(process, t: float, length: int) -> States:
    vocab, every = process.vocab_size, noise(process.vocab_size, length)
    x, masks = exact.sequences(vocab, length), exact.patterns(length)
    shape = (len(x), len(masks), len(every.weight))
    number, pattern, node = (index.ravel() for index in np.indices(shape))
    hidden = float(process.schedule.one_minus_alpha(jnp.float64(t)))
    chance = np.where(masks, hidden, 1.0 - hidden).prod(axis=1)
    return States(
        number, x[number],
        np.where(masks[pattern], process.mask_id, x[number]).astype(np.int32),
        np.eye(vocab)[x[number]] + sigma_of(process, t) * every.values[node],
        chance[pattern] * every.weight[node],
    )  # fmt: skip


def posterior(process, p: np.ndarray, scale: float = 1.0) -> Denoiser:
    """The exact denoiser of data p, by Bayes over all sequences; it reads the mixture alone.

    scale multiplies its outputs: with any other than 1 it is wrong.
    """
    vocab, x = p.shape[0], jnp.asarray(exact.sequences(p.shape[0], p.ndim))
    low, high = process.confusion_start, process.confusion_end

    def features(seen, t):
        sigma = -1.0 / (np.sqrt(2.0) * jax.scipy.special.ndtri(low + (high - low) * t))
        sigma = sigma[:, None, None]
        hidden = seen.weights[..., vocab] == 0.5
        y = seen.weights[..., :vocab] * 2.0 * jnp.sqrt(1.0 + sigma**2)
        clean = jnp.where(seen.weights[..., :vocab] == 1.0, 0.0, -jnp.inf)
        each = jnp.where(hidden[..., None], y / sigma**2, clean)
        of_token = each[:, jnp.arange(p.ndim), x]
        of_text = jnp.log(p.ravel()) + jnp.sum(of_token, axis=-1)
        agrees = x.T[:, :, None] == jnp.arange(vocab)
        wide = jnp.where(agrees, of_text[:, None, :, None], -jnp.inf)
        logits = jnp.maximum(jax.nn.logsumexp(wide, axis=2), -600.0)
        if process.parametrisation == "joint":
            logits = logits - jnp.where(hidden[..., None], y / sigma**2, 0.0)
        return scale * logits

    return Denoiser(features, lambda h: h)


def integral(objective, process, p: np.ndarray, denoiser: Denoiser, nodes: int = 24) -> np.ndarray:
    """The mean of the integrand over t, masks and noise by quadrature, for each sequence."""

    @jax.jit
    def call(x, z, y, t):
        return objective.loss_at(denoiser, process, batch_of(x), z, y, t)

    total = np.zeros(p.size)
    for t, share in zip(*exact.quadrature(nodes=nodes), strict=True):
        at = states(process, t, p.ndim)
        nats = call(at.x, jnp.asarray(at.z), jnp.asarray(at.y), jnp.full(len(at.x), t))
        # Rows that have no chance are states of another text.
        total += share * np.bincount(at.number, at.weight * np.asarray(nats), p.size)
    return total


def whole(objective, process, p: np.ndarray, denoiser: Denoiser, nodes: int = 24) -> np.ndarray:
    """The same with the prior's part."""
    batch = batch_of(exact.sequences(p.shape[0], p.ndim))
    prior = np.asarray(objective.prior(process, batch), np.float64)
    return integral(objective, process, p, denoiser, nodes) + prior


def densities(process, p: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(log q(y_1 | x) [X, N, X'], log of the prior [X, N], weight [N]) at y_1 drawn given x.

    Up to a constant that both share.
    """
    vocab, sigma = p.shape[0], sigma_of(process, 1.0)
    x, every = exact.sequences(vocab, p.ndim), noise(vocab, p.ndim)
    clean = np.eye(vocab)[x]
    y = clean[:, None] + sigma * every.values
    apart = y[:, :, None] - clean
    of_text = -0.5 * (apart**2).sum(axis=(-1, -2)) / sigma**2
    centred = (y - 1.0 / vocab) ** 2
    return of_text, -0.5 * centred.sum(axis=(-1, -2)) / sigma**2, every.weight


def prior_divergence(process, p: np.ndarray) -> float:
    """KL(q(y_1) || prior), by quadrature."""
    of_text, prior, weight = densities(process, p)
    mixed = np.log(np.exp(of_text) @ p.ravel())
    return float(p.ravel() @ ((mixed - prior) @ weight))


def model_law(process, p: np.ndarray) -> np.ndarray:
    """The law of the model with the exact denoiser: the mean of q(x | y_1) over the prior."""
    of_text, prior, weight = densities(process, p)
    joint = np.exp(of_text) * p.ravel()
    # Given x' the weight of a value y is q(y | x'), and so prior / q(y) makes it the prior.
    ratio = np.exp(prior) / joint.sum(axis=-1)
    return np.einsum("x,n,xn,xnk->k", p.ravel(), weight, ratio, joint / joint.sum(-1)[..., None])
