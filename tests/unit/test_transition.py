"""D3PM's matrices against identities D01, D04 and D07, the closed forms and their laws."""

import dataclasses
import types

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from md4_jax.config import build, schema
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Cosine, Geometric, Linear
from md4_jax.processes.transition import Transition
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser, UserError
from md4_jax.runtime.commit import PACKAGE_ROOT
from md4_jax.samplers.ancestral import Ancestral
from md4_jax.samplers.grids import uniform

pytestmark = pytest.mark.slow

N = 20_000
EACH = {
    "gaussian": Transition(4, timesteps=5, beta_start=0.3, beta_end=0.9),
    "uniform": Transition(4, Cosine(), 5, "uniform"),
    "absorbing": Transition(4, Cosine(), 5, "absorbing"),
}
every_kernel = pytest.mark.parametrize("process", EACH.values(), ids=EACH)


@dataclasses.dataclass(frozen=True)
class Levels:
    """A schedule that is given at i / T alone."""

    levels: tuple[float, ...]

    def alpha(self, t):
        return jnp.asarray(self.levels)[jnp.round(t * (len(self.levels) - 1)).astype(int)]

    def one_minus_alpha(self, t):
        return 1.0 - self.alpha(t)


def given_x(process: Transition, step: int) -> np.ndarray:
    """q(z_i | x) [V, S]: of a flat mu, the joint form's log p(x | z) is log q(z | x)."""
    joint = dataclasses.replace(process, parametrisation="joint")
    z = jnp.arange(process.states)[None]
    flat, t = (
        jnp.zeros((1, process.states, process.vocab_size)),
        jnp.full(1, step / joint.timesteps),
    )
    return np.exp(np.asarray(joint.clean_logits(flat, z, t))[0].T)


def back(process, mu, z: int, s: float, t: float) -> np.ndarray:
    """p(z_s | z_t = z) of one token with that mu."""
    logits = process.reverse_logits(
        jnp.log(jnp.asarray(mu))[None, None], jnp.full((1, 1), z), jnp.full(1, s), jnp.full(1, t)
    )
    return np.asarray(jax.nn.softmax(logits))[0, 0]


def test_d01_the_posterior_of_a_step(x64):
    process = Transition(4, Levels((1.0, 0.8, 0.52, 0.26)), 3, "uniform")
    logits = process.posterior_logits(jnp.array([[1]]), jnp.array([[2]]), jnp.zeros(1), jnp.ones(1))
    np.testing.assert_allclose(
        jax.nn.softmax(logits)[0, 0],
        [0.081081081081, 0.43243243243, 0.40540540541, 0.081081081081],
        rtol=1e-10,
    )


@pytest.mark.parametrize("closed", [True, False])
def test_d04_only_the_mixture_of_the_posterior_is_exact(closed, x64):
    """alpha_s = 0.6, alpha_t = 0.3, z_t = 0; mu is the posterior of x."""

    def law(parametrisation):
        process = Transition(
            3, Levels((1.0, 0.6, 0.3)), 2, "uniform", parametrisation=parametrisation
        )
        if closed:
            process = Uniform(3, process.schedule, parametrisation)
        return back(process, posterior, 0, 0.5, 1.0)

    posterior = exact.P_V3L1 * (0.3 * np.array([1, 0, 0]) + 0.7 / 3)
    posterior /= posterior.sum()
    mixture, joint = law("mixture"), law("joint")
    assert mixture[0] == pytest.approx(0.75362318841, rel=1e-10)
    assert joint[0] == pytest.approx(0.8306010929, rel=1e-10)
    assert np.sum(mixture * np.log(mixture / joint)) == pytest.approx(0.019074037546, rel=1e-9)


def test_d07_the_linear_schedule_is_d3pms_of_masks(x64):
    process = Transition(2, Linear(), 8, "absorbing")
    steps = np.arange(1, 9)
    np.testing.assert_allclose(process._tables.move[:, 0], 1 / (8 - steps + 1), rtol=1e-12)
    for i in range(9):
        np.testing.assert_allclose(given_x(process, i)[:, 2], i / 8, rtol=1e-12)
        np.testing.assert_allclose(np.diag(given_x(process, i)), 1 - i / 8, atol=1e-14)


def test_d07_a_constant_beta_multiplies_up(x64):
    process = Transition(2, Levels(tuple(0.98 ** np.arange(501))), 500, "uniform")
    np.testing.assert_allclose(process._tables.move, 0.01, rtol=1e-12)
    row = given_x(process, 500)[0]
    assert row[0] - row[1] == pytest.approx(4.1023985145e-05, rel=1e-9)


def test_the_gaussian_matrix(x64):
    """V = 3, beta = 1: weights 1, e^-1, e^-4 over distances -2..2; the diagonal is the rest."""
    process = Transition(3, timesteps=1, beta_start=1.0, beta_end=1.0)
    far, near = 0.010333864010783, 0.207561207147788
    ends, middle = 1 - near - far, 1 - 2 * near
    np.testing.assert_allclose(
        given_x(process, 1),
        [[ends, near, far], [near, middle, near], [far, near, ends]],
        rtol=1e-12,
    )


def test_gaussian_matrices_are_doubly_stochastic_and_end_near_uniform(x64):
    """D3PM's own settings at a small V: rows and columns of every product sum to 1."""
    process = Transition(64)
    for i in (1, 10, 500, 1000):
        matrix = given_x(process, i)
        np.testing.assert_allclose(matrix.sum(axis=0), 1.0, rtol=1e-12)
        np.testing.assert_allclose(matrix.sum(axis=1), 1.0, rtol=1e-12)
        np.testing.assert_allclose(matrix, matrix[::-1, ::-1], rtol=1e-9)
    prior = np.asarray(process.prior_nats(jnp.arange(64)))
    rows = given_x(process, 1000)
    np.testing.assert_allclose(prior, (rows * np.log(64 * rows)).sum(axis=1), atol=1e-14)
    assert (prior > 0).all() and prior.max() < 1e-5


def test_products_are_powers_when_beta_is_constant(x64):
    one = given_x(Transition(4, timesteps=1, beta_start=0.5, beta_end=0.5), 1)
    process = Transition(4, timesteps=3, beta_start=0.5, beta_end=0.5)
    for i in range(4):
        np.testing.assert_allclose(given_x(process, i), np.linalg.matrix_power(one, i), rtol=1e-12)


@pytest.mark.parametrize("parametrisation", ["mixture", "joint"])
def test_the_reverse_step_is_exact_for_the_posterior_or_the_prior(parametrisation, x64):
    """Mixture with the posterior of x, joint with its prior: p(z_1 | z_2) of the gaussian chain."""
    one = given_x(Transition(3, timesteps=1, beta_start=0.8, beta_end=0.8), 1)
    process = Transition(
        3, timesteps=2, beta_start=0.8, beta_end=0.8, parametrisation=parametrisation
    )
    for z in range(3):
        chain = (exact.P_V3L1[:, None, None] * one[:, :, None] * one[None])[:, :, z]
        posterior = chain.sum(axis=1) / chain.sum()
        mu = posterior if parametrisation == "mixture" else exact.P_V3L1
        np.testing.assert_allclose(
            back(process, mu, z, 0.5, 1.0), chain.sum(axis=0) / chain.sum(), rtol=1e-12
        )
        # The step to no noise at all is the posterior itself.
        logits = process.clean_logits(jnp.log(mu)[None, None], jnp.array([[z]]), jnp.ones(1))
        np.testing.assert_allclose(jax.nn.softmax(logits)[0, 0], posterior, rtol=1e-12)


@pytest.mark.parametrize("schedule", [Linear(), Cosine(), Geometric(0.1, 4.0)])
@pytest.mark.parametrize("parametrisation", ["mixture", "joint"])
def test_the_uniform_matrices_have_the_closed_form(schedule, parametrisation, x64):
    mu, steps = np.array([0.1, 0.2, 0.3, 0.4]), 6
    tables = Transition(4, schedule, steps, "uniform", parametrisation=parametrisation)
    closed = Uniform(4, schedule, parametrisation)
    for i in range(2, steps + 1):
        alpha = float(schedule.alpha(jnp.float64(i / steps)))
        np.testing.assert_allclose(
            given_x(tables, i), alpha * np.eye(4) + (1 - alpha) / 4, rtol=1e-12
        )
        ours, theirs = (back(p, mu, 2, (i - 1) / steps, i / steps) for p in (tables, closed))
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    nats = tables.prior_nats(jnp.array([[0, 3]]))
    np.testing.assert_allclose(nats, closed.prior_nats(jnp.array([[0, 3]])), atol=1e-14)
    assert back(tables, mu, 2, 0.0, 1 / steps).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("parametrisation", ["mixture", "joint"])
@pytest.mark.parametrize("schedule", [Linear(), Cosine()])
def test_the_matrices_of_masks_reveal_as_masking_does(schedule, parametrisation, x64):
    mu, steps = np.array([0.2, 0.5, 0.3]), 6
    tables = Transition(3, schedule, steps, "absorbing", parametrisation=parametrisation)
    for i in range(1, steps + 1):
        s, t = (i - 1) / steps, i / steps
        chance = float(Masking(3, schedule).reveal_probability(jnp.float64(s), jnp.float64(t)))
        expected = [*(chance * mu), 1 - chance]
        np.testing.assert_allclose(back(tables, mu, 3, s, t), expected, rtol=1e-12, atol=1e-14)
        if i < steps:
            np.testing.assert_array_equal(back(tables, mu, 1, s, t), [0, 1, 0, 0])


@every_kernel
def test_what_corrupt_draws_is_the_row_of_the_product(process):
    """Steps 2 and 5, x = 1; chi-squared, n = 20,000, p > 1e-4; and step 0 changes nothing."""
    x, keys = jnp.ones((N // 2, 2), jnp.int32), exact.keys_for(4, N // 2)
    corrupt = jax.jit(process.corrupt)
    for step in (2, 5):
        z = np.asarray(corrupt(keys, x, jnp.full(N // 2, step / 5)))
        law = given_x(process, step)[1].astype(np.float64)
        counts = np.bincount(z.ravel(), minlength=process.states)
        assert (counts[law == 0] == 0).all()
        possible = law > 0
        law = law[possible] / law[possible].sum()
        if possible.sum() > 1:
            assert stats.chisquare(counts[possible], N * law).pvalue > 1e-4
        # The two tokens of a row are independent.
        both = np.corrcoef(z.T)[0, 1] if possible.sum() > 1 else 0.0
        assert abs(both) < 5 / np.sqrt(N // 2)
    np.testing.assert_array_equal(corrupt(keys, x, jnp.zeros(N // 2)), x)


@pytest.mark.parametrize("kernel", ["uniform", "absorbing"])
@pytest.mark.cases(1)
def test_ancestral_sampling_with_the_exact_posterior_has_the_law_of_the_data(kernel):
    """One token, 4 steps, linear; chi-squared, n = 20,000, p > 1e-4; nothing is left to finish."""
    process = Transition(3, Linear(), 4, kernel, parametrisation="mixture")
    log_p = jnp.log(jnp.asarray(exact.P_V3L1, jnp.float32))

    def features(z, t):
        reach = jnp.where(jnp.arange(3) == z[..., None], 1.0 - t[:, None, None] * 2 / 3, 0.0)
        other = jnp.where(jnp.arange(3) == z[..., None], 0.0, t[:, None, None] / 3)
        known = log_p + jnp.log(reach + other)
        return jnp.where((z == 3)[..., None], log_p, known)

    denoiser, keys = Denoiser(features, lambda h: h), exact.keys_for(6, N)
    z, evaluations = exact.drawn(denoiser, process, Ancestral(), uniform(4), keys, length=1)
    counts = np.bincount(np.asarray(z)[:, 0], minlength=3)
    assert len(counts) == 3 and (evaluations == 4).all()
    assert stats.chisquare(counts, N * exact.P_V3L1).pvalue > 1e-4


@every_kernel
def test_nothing_is_learned_or_kept(process):
    """The tables are no leaves: neither parameters nor part of a checkpoint."""
    assert jax.tree.leaves(process.init()) == [] and process.learned() == {}
    assert (process.mask_id, process.states) == (
        (4, 5) if "absorbing" in str(process) else (None, 4)
    )


def test_a_symbol_that_mu_excludes_keeps_a_finite_cost():
    """Outputs 300 apart in float32: log p is low, never -inf, where a step leads there."""
    process = EACH["uniform"]
    outputs = jnp.array([[[0.0, -300.0, -300.0, -300.0]]])
    logits = process.reverse_logits(outputs, jnp.array([[2]]), jnp.zeros(1), jnp.full(1, 0.2))
    assert jnp.isfinite(logits).all() and logits[0, 0, 0] > logits[0, 0, 1] + 80


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(kernel="cosine"), "kernel must be one of gaussian, uniform, absorbing, not 'cosine'"),
        (dict(parametrisation="score"), "must be one of joint, mixture, not 'score'"),
        (dict(timesteps=0), "process.timesteps must be at least 1, not 0"),
        (dict(beta_end=0.0), "process.beta_end must be positive, not 0.0"),
        (dict(vocab_size=50257), r"timesteps=1000 and 50257 symbols needs a table of 9418\.\d GiB"),
        (dict(vocab_size=50257), "use process.name='uniform' or 'masking'"),
    ],
)
def test_impossible_processes_are_refused(arguments, words):
    with pytest.raises(UserError, match=words):
        Transition(**(dict(vocab_size=4) | arguments))


def test_the_sampler_must_take_the_steps_of_the_process():
    overrides = {
        "process.name": "transition", "process.timesteps": "20", "objective.name": "d3pm",
        "evals.test.objective.name": "d3pm", "mesh.data": "1", "sample.steps": "20",
    }  # fmt: skip
    tokenizer = types.SimpleNamespace(vocab_size=27, eot_id=None, unit="character", shape=(256,))
    base = str(PACKAGE_ROOT / "configs" / "base.py")

    def built(**changes):
        return build.experiment(schema.load_config(base, overrides | changes), tokenizer)

    assert built(**{"sample.grid": "uniform"}).grid.shape == (21,)
    for changes in ({}, {"sample.grid": "uniform", "sample.steps": "30"}):
        with pytest.raises(UserError, match="sample.steps=.. must be 20"):
            built(**changes)
    with pytest.raises(UserError, match="objective.timesteps=40 must be process.timesteps=20"):
        built(**{"sample.grid": "uniform", "objective.timesteps": "40"})
