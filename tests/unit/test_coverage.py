"""Times of evaluation, and standard errors that account for their strata."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tool_modules import tool_module

from md4_jax.evals.likelihood import Estimator, make_eval_step
from md4_jax.evals.metrics import Likelihood
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.objectives.d3pm import D3PM
from md4_jax.objectives.draws import antithetic_times, draws, evaluation_times
from md4_jax.objectives.genmd4 import GenMD4
from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.score_entropy import ScoreEntropy
from md4_jax.objectives.uniform_elbo import UniformELBO
from md4_jax.options import MeshOptions
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Clipped, Cosine, Geometric, Linear, LogLinear, Polynomial
from md4_jax.processes.state_dependent import StateDependent
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Network
from md4_jax.runtime.mesh import make_mesh

EVEN = exact.of_outputs(lambda z, t: jnp.zeros((*z.shape, 2)))
NETWORK = Network(lambda key: {}, lambda params, context, keys: EVEN, time_free=True)
SQUARED = (Linear(), Cosine(), LogLinear(), Clipped())
PLAIN = (Geometric(1e-4), Polynomial(2.0))


@pytest.fixture(scope="module")
def tool():
    return tool_module("coverage")


@pytest.mark.parametrize("schedule", SQUARED + PLAIN, ids=lambda s: type(s).__name__)
def test_weighted_times_have_the_mean_of_uniform_ones(schedule):
    """Integrals of u^2 and sqrt(u) are 1/3 and 2/3, by quadrature over v."""
    v, rule = exact.quadrature(nodes=60, power=2)
    for objective in (UniformELBO(), AnyOrder()):
        u, weight = evaluation_times(objective, Uniform(3, schedule), jnp.asarray(v))
        assert (weight is not None) == (schedule in SQUARED and objective != AnyOrder())
        weight = 1.0 if weight is None else weight
        assert np.sum(rule * weight * u**2) == pytest.approx(1 / 3, rel=1e-6)
        assert np.sum(rule * weight * u**0.5) == pytest.approx(2 / 3, rel=1e-6)


def test_without_masks_more_draws_are_early():
    """u = v^5, whose weight is 5 v^4; discrete steps keep v^2, as masks do."""
    v = jnp.asarray([0.3, 0.9])
    for objective, power in ((UniformELBO(), 5), (ScoreEntropy(), 5), (D3PM(), 2)):
        u, weight = evaluation_times(objective, Uniform(3), v)
        np.testing.assert_allclose(u, v**power, rtol=1e-6)
        np.testing.assert_allclose(weight, power * v ** (power - 1), rtol=1e-6)
    np.testing.assert_allclose(evaluation_times(ScoreEntropy(), Masking(3), v)[0], v**2, rtol=1e-6)


def test_weights_of_mirrored_times_add_up_to_two():
    for objective, process in ((MD4(), Masking(3)), (GenMD4(), StateDependent(3).init())):
        u, weight = evaluation_times(objective, process, antithetic_times(jnp.float32(0.3), 8))
        np.testing.assert_allclose(weight[::2] + weight[1::2], 2.0, rtol=1e-6)
        assert (np.asarray(u) < np.asarray(antithetic_times(jnp.float32(0.3), 8))).all()
    assert evaluation_times(BlockDiffusion(4), Masking(3), jnp.ones(2))[1] is None


class Constant:
    """Objective whose integral is 0 and whose prior is 3."""

    time_power = 2

    def __call__(self, denoiser, process, batch, u, keys):
        return jnp.full(len(u), 3.0), {"prior": jnp.full(len(u), 3.0)}


def test_ends_of_a_bound_have_no_weight():
    step = make_eval_step(NETWORK, Constant(), 2, seed=0)
    batch = exact.batch_of(np.zeros((4, 2), int))
    found = step({"network": {}, "process": Masking(2)}, batch, jnp.int32(0))
    np.testing.assert_array_equal(found["nats"], np.full((2, 4), 3.0))
    assert found["strata"].shape == (4,)


def estimates(trend, batch: int, batches: int) -> np.ndarray:
    """400 means of trend(v) + noise at stratified v, with their errors: [400, 2]."""
    rng = np.random.default_rng(1)
    offsets = jnp.asarray(rng.random(400 * batches), jnp.float32)
    times = np.asarray(jax.vmap(antithetic_times, (0, None))(offsets, batch), np.float64)
    found = []
    for strata in times.reshape(400, batches, batch):
        total = Likelihood()
        for v in strata:
            nats = trend(v) + rng.normal(0.0, 0.2, batch)
            total.add(nats[None], np.ones(batch), strata=v)
        result = total.result()
        found.append((result["nats_per_token"], result["nats_per_token_se"]))
    return np.array(found)


TRENDS = {
    "line": lambda v: 3.0 * v,
    "bump": lambda v: 3.0 * np.exp(-(((v - 0.7) / 0.1) ** 2)),
    "corner": lambda v: 2.0 * np.maximum(v - 0.4, 0.0),
}
# (trend, sequences of a batch, batches). 24 batches of 3, without mirror images, leave a part of a
# line in the sum of each.
CASES = (
    ("line", 64, 4),
    ("bump", 64, 4),
    ("corner", 16, 16),
    ("line", 3, 24),
    ("bump", 1, 64),
    ("line", 4, 40),
)


@pytest.mark.parametrize("name, batch, batches", CASES)
@pytest.mark.cases(3)
def test_the_error_of_stratified_draws_is_that_of_their_mean(name, batch, batches):
    """The spread of 400 is known to 3.5%; within 4 of these.

    The plain error would be 4 times as large in batches of 64.
    """
    values, errors = estimates(TRENDS[name], batch, batches).T
    assert np.mean(errors) == pytest.approx(values.std(ddof=1), rel=0.14)
    assert errors.std() < 0.25 * np.mean(errors)


def test_few_sequences_and_exact_ones_have_the_plain_error():
    nats = np.arange(8.0)
    with_strata, without = Likelihood(), Likelihood()
    with_strata.add(nats[None], np.ones(8), strata=np.linspace(0.0, 0.9, 8))
    without.add(nats[None], np.ones(8))
    assert with_strata.result() == without.result()


def test_seeds_have_strata_of_their_own():
    batch, params = exact.batch_of(np.zeros((4, 2), int)), {"network": {}, "process": Masking(2)}
    steps = [make_eval_step(NETWORK, Constant(), 2, seed) for seed in (0, 1)]
    one, other = (np.asarray(step(params, batch, jnp.int32(0))["strata"]) for step in steps)
    assert (one != other).all()


@pytest.mark.parametrize("is_exact", [False, True])
def test_an_estimator_hands_on_the_strata_unless_it_is_exact(is_exact):
    """Two batches of 32 with nats of 1 + 3 u: the numbers of `Likelihood` by hand."""
    strata = [np.asarray(draws(0, index, 32)[0]) for index in (0, 1)]

    def step(params, batch, index):
        u = jnp.asarray(strata)[index]
        return {"nats": 1.0 + 3.0 * u[None], "strata": u}

    estimator = Estimator(step, NETWORK, make_mesh(MeshOptions()), 1, exact=is_exact)
    found = estimator({}, 2 * [exact.batch_of(np.zeros((32, 2), int))])
    by_hand = {known: Likelihood() for known in (False, True)}
    for u in strata:
        for known, total in by_hand.items():
            total.add(1.0 + 3.0 * u[None], np.full(32, 2), strata=u if known else None)
    errors = {known: total.result()["nats_per_token_se"] for known, total in by_hand.items()}
    assert errors[True] < 0.5 * errors[False]
    assert found["nats_per_token_se"] == pytest.approx(errors[not is_exact], rel=1e-5)


def test_errors_per_byte_and_word_account_for_strata_too():
    """With a byte and a word for each token they are those per token."""
    v, total = np.linspace(0.0, 0.999, 64), Likelihood()
    total.add(5.0 + v[None], np.ones(64), text=np.ones((64, 2)), strata=v)
    result = total.result()
    assert result["nats_per_token_se"] < 0.01
    assert result["bits_per_byte_se"] == result["bits_per_token_se"]
    assert result["word_perplexity_se"] == result["perplexity_se"]


def test_padding_has_no_stratum():
    """64 rows that count in order of time, with a constant step: no spread around the trend."""
    v = np.linspace(0.0, 0.999, 128)
    total = Likelihood()
    total.add(np.where(v < 0.5, 5.0 + v, np.nan)[None], np.where(v < 0.5, 1, 0), strata=v)
    result = total.result()
    assert result["sequences"] == 64 and result["nats_per_token_se"] < 0.5


@pytest.mark.campaign
@pytest.mark.parametrize("family", [pytest.param("udlm", marks=pytest.mark.campaign), "d3pm"])
def test_intervals_hold_the_bound(family, tool):
    """100 repetitions: 95% within 4 standard errors of a share, 8.7; new and equal sequences."""
    found = tool.measured(*tool.FAMILIES[family], repeats=100, draws=1, plain=False)
    assert found.new > 86 and found.same > 86
    # The spread of 100 is known to 7%.
    assert found.error == pytest.approx(found.spread, rel=0.28)


@pytest.mark.campaign
def test_importance_sampling_takes_less_work_for_md4(tool):
    plain, squared = (
        tool.measured(*tool.FAMILIES["md4"], repeats=100, draws=1, plain=plain)
        for plain in (True, False)
    )
    assert squared.new > 86 and squared.same > 86
    assert squared.work < 0.5 * plain.work
