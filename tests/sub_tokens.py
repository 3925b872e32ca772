"""Partly masked tokens on problems so small that all states are enumerated, by plain Python."""

import itertools

import exact
import jax.numpy as jnp
import numpy as np

from md4_jax.protocols import Denoiser, batch_of


def symbols_of(process) -> dict[int, tuple]:
    """The sub-tokens of every symbol that can occur, None where hidden."""
    found = {}
    for x, digits in enumerate(process.digits.tolist()):
        for hidden in itertools.product([False, True], repeat=process.parts):
            seen = tuple(None if h else d for h, d in zip(hidden, digits, strict=True))
            code = 0
            for digit in seen:
                code = code * (process.base + 1) + (0 if digit is None else digit + 1)
            found[x if None not in seen else process.vocab_size + code] = seen
    return found


def agreeing(process) -> np.ndarray:
    """Whether a token has the visible sub-tokens of a symbol: bool [states, V]."""
    agrees = np.zeros((process.states, process.vocab_size), bool)
    for symbol, seen in symbols_of(process).items():
        for x, digits in enumerate(process.digits.tolist()):
            agrees[symbol, x] = all(s in (None, d) for s, d in zip(seen, digits, strict=True))
    return agrees


def posterior(process, p: np.ndarray, scale: float = 1.0) -> Denoiser:
    """The exact denoiser of data p, by Bayes; scale multiplies its outputs: it is wrong with any
    other than 1. It says nothing of what contradicts a token itself.
    """
    agrees, x = jnp.asarray(agreeing(process)), exact.sequences(p.shape[0], p.ndim)

    def features(z, t):
        each = [agrees[z[:, n]][:, x[:, n]] for n in range(p.ndim)]
        others = [
            p.ravel() * jnp.prod(jnp.stack([e for m, e in enumerate(each) if m != n] or [1.0]), 0)
            for n in range(p.ndim)
        ]
        mass = [jnp.broadcast_to(w, (len(z), len(x))) @ np.eye(p.shape[0])[x[:, n]]
                for n, w in enumerate(others)]  # fmt: skip
        return scale * jnp.log(jnp.maximum(jnp.stack(mass, axis=1), 1e-300))

    return Denoiser(features, lambda h: h)


def integral(objective, process, denoiser: Denoiser, length: int, nodes: int = 12) -> np.ndarray:
    """The mean over lambda and hidden sub-tokens, by quadrature and enumeration: [V^L]."""
    x = exact.sequences(process.vocab_size, length)
    patterns = exact.patterns(length * process.parts).reshape(-1, length, process.parts)
    which, pattern = (index.ravel() for index in np.indices((len(x), len(patterns))))
    z = hidden_by_hand(process, x[which], patterns[pattern])
    total = np.zeros(len(x))
    for masked, share in zip(*exact.quadrature(nodes=nodes), strict=True):
        weight = np.where(patterns, masked, 1.0 - masked).prod(axis=(1, 2))[pattern]
        nats = objective.loss_at(
            denoiser, process, batch_of(x[which]), jnp.asarray(z), jnp.full(len(z), masked)
        )
        total += share * np.bincount(which, weight * np.asarray(nats), len(x))
    return total


def hidden_by_hand(process, x: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """The symbols of tokens x [N, L] with hidden sub-tokens [N, L, parts]."""
    symbol_of = {seen: symbol for symbol, seen in symbols_of(process).items()}
    digits = process.digits
    rows = [
        [
            symbol_of[tuple(None if h else int(d) for h, d in zip(own, digits[k], strict=True))]
            for k, own in zip(tokens, of_row, strict=True)
        ]
        for tokens, of_row in zip(x.tolist(), hidden.tolist(), strict=True)
    ]
    return np.asarray(rows, np.int32)


def law(process, denoiser: Denoiser, grid: np.ndarray, length: int) -> np.ndarray:
    """The law over all V^L texts of the chain that draws tokens along the grid, from all masks.

    In a step each position draws a token among those that agree, and shows each hidden sub-token
    of it with the chance that one becomes visible.
    """
    known, agrees = symbols_of(process), agreeing(process)
    symbol_of = {seen: symbol for symbol, seen in known.items()}
    chances = {(process.mask_id,) * length: 1.0}
    for s, t in zip(grid[-2::-1].tolist(), grid[:0:-1].tolist(), strict=True):
        at_s, at_t = (float(process.schedule.alpha(jnp.float32(time))) for time in (s, t))
        shown = (at_s - at_t) / (1.0 - at_t)
        z = np.asarray(list(chances), np.int32)
        outputs = np.asarray(denoiser(jnp.asarray(z), jnp.full(len(z), t)), np.float64)
        after: dict[tuple, float] = {}
        for row, chance, logits in zip(z.tolist(), chances.values(), outputs, strict=True):
            each = []
            for symbol, out in zip(row, logits, strict=True):
                mu = np.where(agrees[symbol], np.exp(out - out.max()), 0.0)
                moves: dict[int, float] = {}
                for x in np.flatnonzero(mu):
                    for seen, share in _shown(known[symbol], process.digits[x].tolist(), shown):
                        to = symbol_of[seen]
                        moves[to] = moves.get(to, 0.0) + share * mu[x] / mu.sum()
                each.append(moves.items())
            for ends in itertools.product(*each):
                to = tuple(symbol for symbol, _ in ends)
                after[to] = after.get(to, 0.0) + chance * np.prod([share for _, share in ends])
        chances = after
    texts = exact.sequences(process.vocab_size, length)
    return np.array([chances.get(tuple(x), 0.0) for x in texts.tolist()])


def _shown(seen: tuple, digits: list[int], chance: float):
    """(sub-tokens afterwards, probability) for all ways to show hidden ones."""
    hidden = [part for part, digit in enumerate(seen) if digit is None]
    for ways in itertools.product([False, True], repeat=len(hidden)):
        after, share = list(seen), 1.0
        for part, way in zip(hidden, ways, strict=True):
            share *= chance if way else 1.0 - chance
            after[part] = digits[part] if way else None
        yield tuple(after), share
