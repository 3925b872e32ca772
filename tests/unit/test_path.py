"""Likelihood along the path of a sampler: a law over all sequences, and that of its samples."""

import itertools

import exact
import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from md4_jax.evals.path import Path
from md4_jax.processes.capabilities import RevealsMasks
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Cosine
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Needs
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.left_to_right import LeftToRight
from md4_jax.samplers.orders import AnyOrder, FirstHitting
from md4_jax.samplers.remask import Remask
from md4_jax.samplers.transforms import Transform

LENGTH = 4
X = exact.sequences(2, LENGTH)
TABLE = exact.denoiser_of(exact.table_logits(2, LENGTH), time=0.7)


def nats_of(step, *, denoiser=TABLE, process=None, steps=LENGTH, x=X, mask=None, seed=0):
    """-log p of sequences along the path of a step, and keys of their own."""
    path = Path(step, tuple(uniform(steps).tolist()))
    batch = exact.batch_of(x)
    if mask is not None:
        batch = batch._replace(loss_mask=np.broadcast_to(mask, x.shape))
    keys = exact.keys_for(seed, len(x))
    call = jax.jit(lambda keys: path(denoiser, process or Masking(2), batch, None, keys)[0])
    return np.asarray(call(keys), np.float64)


EXACT = {
    f"{name}, {many} a step": make(many)
    for many in (1, 2, 3)
    for name, make in {
        "margin": lambda many: Confidence("margin", many),
        "entropy": lambda many: Confidence("entropy", many),
        "left to right": lambda many: AnyOrder("left_to_right", many),
        "right to left": lambda many: AnyOrder("right_to_left", many),
    }.items()
} | {
    "as the grid says": Confidence("margin"),
    "warm": Confidence("entropy", 2, 0.0, Transform(1.6)),
    "sure by margin": Confidence("margin", rule="threshold", limit=0.3),
    "sure by factor": Confidence("margin", rule="factor", limit=1.6),
    "few nats": Confidence("margin", rule="entropy", limit=0.6),
    "halves": Confidence("entropy", semi_autoregressive=2),
    "halves, sure by margin": Confidence(
        "margin", rule="threshold", limit=0.3, semi_autoregressive=2
    ),
    "halves, left to right": AnyOrder("left_to_right", 0, semi_autoregressive=2),
}


@pytest.mark.quick(5)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.cases(10)
def test_the_path_gives_a_law(name, x64):
    """Sums to 1 over all sequences; two steps for what one would not finish."""
    steps = 2 if "grid" in name else LENGTH
    total = np.exp(-nats_of(EXACT[name], steps=steps)).sum()
    np.testing.assert_allclose(total, 1.0, rtol=0, atol=1e-12)
    path = Path(EXACT[name], ())
    assert path.is_bound(Masking(2)) and path.is_exact(None)


@pytest.mark.parametrize("given", [(0,), (2,), (0, 3)])
def test_a_prompt_is_conditioned_on(given, x64):
    mask = np.ones(LENGTH, bool)
    mask[list(given)] = False
    p = np.exp(-nats_of(Confidence("margin", 2), mask=mask))
    for values in itertools.product(range(2), repeat=len(given)):
        agrees = (X[:, list(given)] == values).all(axis=1)
        np.testing.assert_allclose(p[agrees].sum(), 1.0, atol=1e-12)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "name",
    [
        "margin, 1 a step",
        "entropy, 3 a step",
        "warm",
        "sure by margin",
        "sure by factor",
        "few nats",
        "halves, sure by margin",
    ],
)
@pytest.mark.cases(2)
def test_samples_have_that_law(name):
    """Chi-squared over 16 sequences, n = 20,000, p > 1e-4."""
    keys = exact.keys_for(3, laws.N)
    z, _ = exact.drawn(TABLE, Masking(2), EXACT[name], uniform(LENGTH), keys, length=LENGTH)
    assert laws.accepted(laws.counted(np.asarray(z), 2), np.exp(-nats_of(EXACT[name])))


@pytest.mark.parametrize("many, used", [(1, 4), (2, 2), (3, 2)])
@pytest.mark.cases(1)
def test_a_number_of_tokens_per_step_takes_more_steps_than_the_grid(many, used):
    """One step is asked for: the law is that of as many as there must be."""
    step = Confidence("margin", many)
    keys = exact.keys_for(4, laws.N)
    z, evaluations = exact.drawn(TABLE, Masking(2), step, uniform(1), keys, length=LENGTH)
    assert (np.asarray(evaluations) == used).all()
    law = np.exp(-nats_of(step))
    np.testing.assert_allclose(np.exp(-nats_of(step, steps=1)), law, rtol=1e-5)
    assert laws.accepted(laws.counted(np.asarray(z), 2), law)


@pytest.mark.parametrize("step", [FirstHitting(), AnyOrder(), Ancestral()])
@pytest.mark.cases(1)
def test_what_is_drawn_beforehand_is_averaged_over(step, x64):
    """The mean of exp(-nats) over 4,000 schedules is the law of the sampler: 4 standard errors."""
    draws, x = 4000, X[[0, 6, 13]]
    rows = np.repeat(x, draws, axis=0)
    free = exact.denoiser_of(exact.table_logits(2, LENGTH))
    nats = nats_of(step, denoiser=free, x=rows, steps=3).reshape(len(x), draws)
    if isinstance(step, Ancestral):
        law = exact.ancestral_law(free, Masking(2), uniform(3), LENGTH)
        states = [int(z @ 3 ** np.arange(LENGTH)[::-1]) for z in x]
        law = law[states]
    else:
        orders = list(itertools.permutations(range(LENGTH)))
        law = [np.mean([_along(free, row, order) for order in orders]) for row in x]
    p = np.exp(-nats)
    error = p.std(axis=1) / np.sqrt(draws)
    assert (abs(p.mean(axis=1) - law) < 4 * error + 1e-9).all()
    path = Path(step, ())
    assert path.is_bound(Masking(2)) and not path.is_exact(None)


def _along(denoiser, x, order) -> float:
    z, chance = np.full(LENGTH, 2), 1.0
    for n in order:
        mu = jax.nn.softmax(denoiser(jnp.asarray(z[None]), jnp.zeros(1))[0, n])
        chance *= float(mu[x[n]])
        z[n] = x[n]
    return chance


def test_a_causal_sampler_has_the_likelihood_of_its_network(x64):
    def features(z, t):
        seen = jnp.cumsum((z + 1.0) * (jnp.arange(LENGTH) + 1.3), axis=1)
        return jnp.stack([jnp.sin(seen), jnp.cos(2.0 * seen)], axis=-1)

    denoiser = exact.of_outputs(features)
    p = np.exp(-nats_of(LeftToRight(), denoiser=denoiser))
    np.testing.assert_allclose(p.sum(), 1.0, atol=1e-12)
    assert Path(LeftToRight(), ()).is_exact(None)


class FromTheRight:
    """A sampler of a user's own: x_n given the tokens after it."""

    needs, level, transform = Needs((RevealsMasks,)), None, Transform()

    def __call__(self, denoiser, process, chain, s, t, keys):
        raise NotImplementedError

    def inputs(self, process, z):
        end = jnp.full((len(z), 1), process.mask_id, z.dtype)
        return jnp.concatenate([z[:, 1:], end], axis=1)


def test_a_sampler_of_a_users_own_has_the_likelihood_of_what_its_network_reads(x64):
    def features(z, t):
        seen = jnp.cumsum(((z + 1.0) * (jnp.arange(LENGTH) + 1.3))[:, ::-1], axis=1)[:, ::-1]
        return jnp.stack([jnp.sin(seen), jnp.cos(2.0 * seen)], axis=-1)

    step, denoiser = FromTheRight(), exact.of_outputs(features)
    p = np.exp(-nats_of(step, denoiser=denoiser)).reshape(LENGTH * (2,))
    np.testing.assert_allclose(p.sum(), 1.0, atol=1e-12)
    mu = jax.nn.softmax(denoiser(jnp.full((1, LENGTH), 2), jnp.zeros(1))[0, -1])
    np.testing.assert_allclose(p.sum((0, 1, 2)), mu, atol=1e-12)  # nothing follows the last one
    assert Path(step, ()).is_exact(None) and Path(step, ()).is_bound(Masking(2))


@pytest.mark.parametrize(
    "step, process",
    [
        (Confidence(), Masking(2)),
        (Confidence("margin", noise=0.5), Masking(2)),
        (Confidence("margin", position_temperature=0.5), Masking(2)),
        (Remask(), Masking(2, Cosine())),
        (Ancestral(), Uniform(2)),
    ],
)
def test_other_samplers_have_none(step, process):
    assert not Path(step, ()).is_bound(process)
