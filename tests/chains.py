"""Continuous-time chains so small that every state and every jump can be enumerated."""

import exact
import jax
import jax.numpy as jnp
import numpy as np

from md4_jax.processes.rates import Rates
from md4_jax.protocols import Denoiser, batch_of


def exact_denoiser(process: Rates, p: np.ndarray) -> Denoiser:
    """Log of what the process's parametrisation asks for, by Bayes over all sequences.

    mixture: P(x_n | z); joint: P(x_n | z without z_n), for the data law p [V, ..., V].
    """
    x = exact.sequences(p.shape[0], p.ndim)

    def features(z, t):
        law = process.marginal(t)
        rows = jnp.arange(len(z))[:, None, None]
        likelihood = law[rows, x[None], z[:, None]]  # [B, sequences, L]
        if process.parametrisation == "mixture":
            product = jnp.broadcast_to(likelihood.prod(axis=2, keepdims=True), likelihood.shape)
        else:
            others = [jnp.delete(likelihood, n, axis=2).prod(axis=2) for n in range(p.ndim)]
            product = jnp.stack(others, axis=2)
        joint = p.ravel()[None, :, None] * product
        mass = [jnp.sum(joint * (x == k), axis=1) for k in range(p.shape[0])]
        mass = jnp.stack(mass, axis=2)
        return jnp.log(mass / mass.sum(axis=2, keepdims=True))

    return Denoiser(features, lambda h: h)


def states(process: Rates, length: int) -> np.ndarray:
    """All noised sequences, int32 [S^L, L], lexicographic."""
    return exact.sequences(len(process.parts.stationary), length)


def generator(process: Rates, length: int, of_state=None) -> np.ndarray:
    """The generator over all sequences [S^L, S^L] from rates of single tokens.

    of_state(z) -> [S^L, L, S] are the rates of one token to each symbol, 0 at its own;
    without it those of the forward chain, without beta.
    """
    z = states(process, length)
    each = np.asarray((of_state or process.forward_rates)(jnp.asarray(z)))
    changed = z[:, None] != z[None]
    position = changed.argmax(axis=2)
    rate = each[np.arange(len(z))[:, None], position, z[np.arange(len(z))[None], position]]
    whole = np.where(changed.sum(axis=2) == 1, rate, 0.0)
    return whole - np.diag(whole.sum(axis=1))


def law_of(process: Rates, x: np.ndarray, t) -> np.ndarray:
    """q(z | x) of the sequence x [L] over all states, [times, S^L]."""
    z, law = states(process, len(x)), np.asarray(process.marginal(jnp.asarray(t)))
    return law[:, np.asarray(x)[None], z].prod(axis=2)


def integrand(objective, denoiser: Denoiser, process: Rates, x: np.ndarray, t) -> np.ndarray:
    """The exact mean of an objective's draws for each x and t: states and jumps enumerated, [X, N].

    States that x cannot be in are left out: they have no ratio, and no weight.
    """
    t, z = np.asarray(t), states(process, x.shape[1])
    whole = generator(process, x.shape[1])
    leaving = -np.diag(whole)
    chance = np.maximum(whole, 0.0) / np.where(leaving > 0, leaving, 1.0)[:, None]
    law = np.stack([law_of(process, row, t) for row in x])
    if objective.passes == "two":
        # Where no jump is possible the pair is z and itself.
        before, after = np.nonzero(chance + np.diag(leaving == 0))
        weight = law[:, :, before] * np.where(before == after, 1.0, chance[before, after])
    else:
        before = after = np.arange(len(z))
        weight = law @ chance

    def call(tokens, before, after, times):
        batch = batch_of(tokens)
        if objective.passes == "two":
            return objective.loss_at_pair(denoiser, process, batch, before, times, jumped=after)
        return objective.loss_at(denoiser, process, batch, after, times)

    which, when, what = np.nonzero(weight)
    values = jax.jit(call)(x[which], z[before[what]], z[after[what]], t[when])
    mean = np.zeros((len(x), len(t)))
    np.add.at(mean, (which, when), weight[which, when, what] * np.asarray(values))
    return mean


def bound(objective, denoiser: Denoiser, process: Rates, x: np.ndarray, nodes=60) -> np.ndarray:
    """The whole bound of each x, by quadrature over t: [X]."""
    t, weight = exact.quadrature(objective.first_time, nodes=nodes, power=3)
    ends = objective.ends(process, exact.batch_of(x))
    total = integrand(objective, denoiser, process, x, t) @ weight / (1.0 - objective.first_time)
    return total + np.asarray(sum(ends.values()))
