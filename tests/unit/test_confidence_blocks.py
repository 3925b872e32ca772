"""The law of decoding by confidence within blocks, by enumeration of all that may be drawn."""

import functools
import itertools

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from md4_jax.networks.transformer import Transformer
from md4_jax.processes.masking import Masking
from md4_jax.samplers.blocks import Blocks
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import no_prompt
from tests import exact

V, L, P, N = 2, 4, 2, 20_000


@functools.cache
def bound(shifted: bool):
    sizes = dict(size=16, heads=2, hidden=24, depth=2, time_conditioning=False, initial="torch")
    network = Transformer(V, **sizes, shifted=shifted).build()
    rng = np.random.default_rng(3)
    params = jax.tree.map(
        lambda x: x + 0.6 * rng.normal(size=x.shape).astype(x.dtype),
        network.init(jax.random.key(0)),
    )
    return network.bind(params)


@functools.cache
def probabilities(shifted: bool) -> dict:
    """p of the tokens of every block in every state, after every clean text: one whole pass."""
    states = list(itertools.product(range(V), repeat=L))
    noisy = list(itertools.product(range(V + 1), repeat=L))
    pairs = [(z, x) for z in noisy for x in states]
    z, x = (jnp.asarray([pair[side] for pair in pairs]) for side in (0, 1))
    denoiser = bound(shifted)
    h = denoiser.blocks.features(z, jnp.zeros((len(pairs), L // P)), x, P)
    p = np.asarray(jax.nn.softmax(denoiser.unembed(h)), np.float64)
    return {pair: p[row] for row, pair in enumerate(pairs)}


def after(shifted: bool, step: Confidence, x: tuple, b: int, state: tuple) -> dict:
    """The law of block b given the blocks before it in x, from a state of its masks."""
    left = [n for n in range(P) if state[n] == V]
    if not left:
        return {state: 1.0}
    begin, law = b * P, {}
    z = (0,) * begin + state + (0,) * (L - begin - P)
    p = probabilities(shifted)[z, x][begin : begin + P]
    for drawn in itertools.product(range(V), repeat=len(left)):
        chance = np.array([p[n, token] for n, token in zip(left, drawn, strict=True)])
        order = np.argsort(-chance, kind="stable")
        count = max(1, int(np.sum(chance >= step.limit))) if step.is_adaptive else 1
        chosen = {left[i]: drawn[i] for i in order[:count]}
        then = tuple(chosen.get(n, token) for n, token in enumerate(state))
        for end, q in after(shifted, step, x, b, then).items():
            law[end] = law.get(end, 0.0) + np.prod(chance) * q
    return law


@pytest.mark.slow
@pytest.mark.parametrize(
    "shifted, step",
    [
        (False, Confidence()),
        (True, Confidence(rule="threshold", limit=0.6)),
        pytest.param(True, Confidence(), marks=pytest.mark.campaign),
        pytest.param(False, Confidence(rule="threshold", limit=0.6), marks=pytest.mark.campaign),
    ],
)
@pytest.mark.cases(1)
def test_the_law_of_samples(shifted, step):
    """Each step draws all masks of the block and keeps the surest: chi-squared, p > 1e-4."""
    expected = np.zeros((V,) * L)
    for first, p in after(shifted, step, (0,) * L, 0, (V,) * P).items():
        for second, q in after(shifted, step, (*first, 0, 0), 1, (V,) * P).items():
            expected[first + second] = p * q
    assert np.isclose(expected.sum(), 1.0)
    blocks, prompt = Blocks(P, L), no_prompt(N, L)
    draw = jax.jit(
        lambda keys: blocks(
            bound(shifted), Masking(V), step, grid=uniform(P), keys=keys, prompt=prompt
        )
    )
    chain, _ = draw(exact.keys_for(0, N))
    codes = np.ravel_multi_index(np.asarray(chain.z).T, (V,) * L)
    counts = np.bincount(codes, minlength=V**L)
    assert laws.accepted(counts, expected.ravel())
    # Positions one after another, whatever they say, have another law.
    one = np.zeros_like(expected)
    for x in itertools.product(range(V), repeat=L):
        p = 1.0
        for n in range(L):
            begin = n // P * P
            z = (0,) * begin + x[begin:n] + (V,) * (begin + P - n) + (0,) * (L - begin - P)
            p *= probabilities(shifted)[z, x[:begin] + (0,) * (L - begin)][n, x[n]]
        one[x] = p
    assert not laws.accepted(counts, one.ravel())
