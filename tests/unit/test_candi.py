"""CANDI's bound by integration over noise, its parts, and samples of the exact denoiser."""

from types import SimpleNamespace

import candi
import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tiny_networks import random_parameters

from md4_jax.auditor import audit
from md4_jax.config import audits, schema
from md4_jax.model import inputs
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.candi import CANDI, squared_distance
from md4_jax.processes.gaussian_masking import GaussianMasking
from md4_jax.processes.schedules import Cosine, Geometric, Polynomial
from md4_jax.protocols import Mixture, UserError, batch_of

PROCESSES = {
    "as published": {},
    "another schedule": dict(schedule=Cosine()),
    "little noise at the end": dict(confusion_end=0.2, schedule=Polynomial(2.0)),
    "much noise from the start": dict(confusion_start=0.3),
    "what others tell": dict(parametrisation="joint"),
}
every_problem = pytest.mark.parametrize("p", candi.PROBLEMS.values(), ids=candi.PROBLEMS)
SLOW = ("another schedule", "much noise from the start")
every_process = pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=[pytest.mark.slow] * (name in SLOW))
        for name, options in PROCESSES.items()
    ],
)


def entropy(p) -> float:
    return -float(np.sum(p * np.log(p)))


@every_problem
@every_process
@pytest.mark.cases(2)
def test_the_mean_bound_of_the_exact_network(p, options, x64):
    """It is the entropy and what the Gaussian at the start does not know of the data."""
    process = GaussianMasking(p.shape[0], **options)
    found = candi.whole(CANDI(), process, p, candi.posterior(process, p))
    expected = entropy(p) + candi.prior_divergence(process, p)
    assert p.ravel() @ found == pytest.approx(expected, abs=1e-5)
    assert expected > entropy(p)
    # And for each text no less than -log p of the model itself.
    law = candi.model_law(process, p)
    assert law.sum() == pytest.approx(1.0, abs=1e-5)
    assert (found > -np.log(law) - 1e-5).all()


@every_problem
def test_with_much_noise_at_the_end_it_is_the_entropy(p, x64):
    process = GaussianMasking(p.shape[0], confusion_end=0.4999)
    found = candi.whole(CANDI(), process, p, candi.posterior(process, p), nodes=40)
    assert p.ravel() @ found == pytest.approx(entropy(p), abs=1e-4)


@every_problem
@pytest.mark.parametrize("scale", [0.0, 0.5, pytest.param(1.5, marks=pytest.mark.slow)])
@pytest.mark.cases(2)
def test_a_wrong_network_has_no_more_than_one_of_probability(p, scale, x64):
    process = GaussianMasking(p.shape[0])
    found = candi.whole(CANDI(), process, p, candi.posterior(process, p, scale))
    assert np.exp(-found).sum() < 1.0
    assert p.ravel() @ found > entropy(p) + candi.prior_divergence(process, p) + 0.01


@every_problem
@every_process
@pytest.mark.cases(2)
def test_cross_entropy_alone_lies_below_the_entropy(p, options, x64):
    """So that its exp(-L) are no probabilities: the noise tells the network of x for free."""
    process = GaussianMasking(p.shape[0], **options)
    found = candi.integral(CANDI("cross_entropy"), process, p, candi.posterior(process, p))
    assert p.ravel() @ found < entropy(p) - 0.02
    assert np.exp(-found).sum() > 1.05


@every_process
@pytest.mark.cases(3)
def test_cross_entropy_of_one_token(options, x64):
    """It is the entropy of x given y_t, averaged over the time at which x is revealed."""
    process, p = GaussianMasking(3, **options), candi.P_V3L1
    found = candi.integral(CANDI("cross_entropy"), process, p, candi.posterior(process, p))
    every, expected = candi.noise(3, 1), 0.0
    for t, share in zip(*exact.quadrature(nodes=24), strict=True):
        sigma = candi.sigma_of(process, t)
        y = np.eye(3)[:, None] + sigma * every.values[:, 0]
        joint = p * np.exp(y / sigma**2)
        given = -np.log(joint / joint.sum(axis=-1, keepdims=True))
        left = p @ np.einsum("n,xnx->x", every.weight, given)
        expected -= share * left * float(process.schedule.dalpha(jnp.float64(t)))
    assert p @ found == pytest.approx(expected, abs=1e-6)


def test_which_forms_are_bounds():
    assert CANDI().is_bound(GaussianMasking(3))
    assert not CANDI("cross_entropy").is_bound(GaussianMasking(3))
    assert not CANDI().is_bound(GaussianMasking(3, Geometric(0.1, 9.0)))


@pytest.mark.parametrize("form", ["bound", "cross_entropy"])
@pytest.mark.cases(1)
def test_the_mean_of_the_draws(form):
    """n = 60,000 for each of four texts: within 4.5 standard errors of the integral."""
    p, n, objective = candi.P_V2L2, 60_000, CANDI(form)
    process = GaussianMasking(2, confusion_end=0.2)  # whose prior costs much
    with jax.enable_x64(True):
        denoiser = candi.posterior(process, p)
        method = candi.integral if form == "cross_entropy" else candi.whole
        expected = method(objective, process, p, denoiser)
    denoiser = candi.posterior(process, p)
    draw = jax.jit(lambda b, u, keys: objective(denoiser, process, b, u, keys)[0])
    for number, x in enumerate(exact.sequences(2, 2)):
        u = (jnp.arange(n) + 0.5) / n
        batch = exact.batch_of(np.tile(x, (n, 1)))
        nats = np.asarray(draw(batch, u, exact.keys_for(number, n)), np.float64)
        error = nats.std() / np.sqrt(n)
        assert abs(nats.mean() - expected[number]) < 4.5 * error, (nats.mean(), expected, error)
        assert error < 0.03 * expected[number]


@pytest.mark.slow
def test_the_prior_is_told_apart():
    """Beside the rest, which evaluation weighs by the times that it draws."""
    batch = exact.batch_of(
        [[0, 1], [1, 1]],
    )
    process, u = GaussianMasking(2), jnp.array([0.3, 0.6])
    denoiser = candi.posterior(process, candi.P_V2L2)
    nats, extra = CANDI()(denoiser, process, batch, u, exact.keys_for(0, 2))
    sigma = candi.sigma_of(process, 1.0)
    np.testing.assert_allclose(extra["prior"], 2 * 0.5 / (2 * sigma**2), rtol=1e-5)
    assert (nats >= extra["prior"]).all()


def test_noise_confuses_symbols_as_often_as_it_says():
    process, t = GaussianMasking(5, confusion_start=0.1, confusion_end=0.4), np.linspace(0, 1, 5)
    precision = np.asarray(process.precision(jnp.asarray(t)), np.float64)
    confused = stats.norm.cdf(-np.sqrt(0.5 * precision))
    np.testing.assert_allclose(confused, 0.1 + 0.3 * t, rtol=1e-5)
    slope = jax.vmap(jax.grad(process.precision))(jnp.asarray(t, jnp.float32))
    np.testing.assert_allclose(process.precision_slope(jnp.asarray(t)), slope, rtol=1e-4)
    assert (slope < 0).all()


def test_the_joint_law_of_two_times():
    """y_s drawn given y_t and x: means, variances and covariance of 100,000 entries, 5 errors."""
    process, n = GaussianMasking(4), 25_000
    x, s, t = jnp.full((n, 1), 2), jnp.full(n, 0.3), jnp.full(n, 0.8)
    first, second = exact.keys_for(0, n), exact.keys_for(1, n)
    y = process.observed(first, x, t)
    before = process.earlier(second, y, x, s, t)
    clean = np.eye(4)[np.asarray(x)]
    late, early = ((np.asarray(v, np.float64) - clean).ravel() for v in (y, before))
    at_s, at_t = (candi.sigma_of(process, time) ** 2 for time in (0.3, 0.8))
    pairs = ((late, late, at_t), (early, early, at_s), (late, early, at_s))
    for one, other, expected in pairs:
        products = one * other
        error = products.std() / np.sqrt(len(products))
        assert abs(products.mean() - expected) < 5 * error
    for deviation in (late, early):
        assert abs(deviation.mean()) < 5 * deviation.std() / np.sqrt(len(deviation))


@pytest.mark.slow
def test_after_a_prompt_it_is_a_bound_of_the_rest(x64):
    """The first token is given: the mean over the second is its entropy and the start's share."""
    p, process = candi.P_V2L2, GaussianMasking(2)
    denoiser, given = candi.posterior(process, p), np.array([[False, True]])
    for first in range(2):
        law, found = p[first] / p[first].sum(), np.zeros(2)
        for t, share in zip(*exact.quadrature(nodes=24), strict=True):
            at = candi.states(process, t, 1)
            n = len(at.x)
            whole = np.concatenate([np.full((n, 1), first), at.x], axis=1).astype(np.int32)
            batch = batch_of(whole, loss_mask=np.broadcast_to(given, whole.shape))
            z = jnp.concatenate([whole[:, :1], at.z], axis=1)
            y = jnp.concatenate([jnp.zeros((n, 1, 2)), at.y], axis=1)
            nats = CANDI().loss_at(denoiser, process, batch, z, y, jnp.full(n, t))
            found += share * np.bincount(at.number, at.weight * np.asarray(nats), 2)
        found += np.asarray(CANDI().prior(process, batch))[0]
        expected = entropy(law) + candi.prior_divergence(process, law)
        assert law @ found == pytest.approx(expected, abs=1e-5)


def test_what_the_network_reads():
    """By hand: a clean token is itself, a mask half of the mask and half of the noisy token."""
    process, t = GaussianMasking(2), jnp.array([0.4])
    y = jnp.array([[[3.0, -1.0], [0.5, 2.0]]])
    symbols, weights = process.seen(jnp.array([[1, 2]]), y, t)
    np.testing.assert_array_equal(symbols, [0, 1, 2])
    scale = 0.5 / np.sqrt(1.0 + candi.sigma_of(process, 0.4) ** 2)
    expected = [[0.0, 1.0, 0.0], [0.5 * scale, 2.0 * scale, 0.5]]
    np.testing.assert_allclose(weights[0], expected, rtol=1e-5)


def test_symbols_that_all_positions_share():
    """A mixture with symbols [K] is that with the same symbols at each position, gradients too."""
    network = Transformer(5, size=16, depth=0, heads=2, hidden=24, embedding=8).build()
    params = random_parameters(network)
    weights = jax.random.normal(jax.random.key(2), (3, 4, 6))
    symbols, t = jnp.arange(6), jnp.array([0.1, 0.5, 0.9])
    wide = jnp.broadcast_to(symbols, weights.shape)

    def loss(params, symbols):
        return jnp.sum(jnp.sin(network.bind(params)(Mixture(symbols, weights), t)))

    (one, slopes), (other, expected) = (
        jax.jit(jax.value_and_grad(loss))(params, chosen) for chosen in (symbols, wide)
    )
    np.testing.assert_allclose(one, other, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), slopes, expected)


def test_the_squared_distance_keeps_its_digits():
    logits = jnp.array([[20.0, 0.0, 1.0], [0.3, -0.2, 0.9]])
    mu = np.exp(np.asarray(logits, np.float64))
    mu /= mu.sum(axis=1, keepdims=True)
    others = mu[:, 1:]
    expected = others.sum(axis=1) ** 2 + (others**2).sum(axis=1)
    np.testing.assert_allclose(squared_distance(logits, jnp.array([0, 0])), expected, rtol=1e-5)


def test_logits_of_masks_without_their_noise_are_refused():
    shown = SimpleNamespace(
        process=GaussianMasking(3),
        network=SimpleNamespace(gaps=False, parts=0),
        domain=SimpleNamespace(shape=(2,)),
    )
    inputs.checked(shown, [[0, 2]], 0.5)
    with pytest.raises(UserError, match="the token 3 is the mask, but"):
        inputs.checked(shown, [[0, 3]], 0.5)


@pytest.mark.parametrize("form", ["bound", "cross_entropy"])
def test_an_audit_is_refused(form):
    config = schema.load_config("configs/candi_text8.py", {"objective.form": form})
    with pytest.raises(UserError, match="objective.name='candi' cannot be audited: its network"):
        audits.objectives(config)
    with pytest.raises(UserError, match="^CANDI cannot be audited: its network reads Gaussian"):
        audit(CANDI(form), GaussianMasking(3))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: CANDI("paper"), "objective.form must be 'bound' or 'cross_entropy', not 'paper'"),
        (lambda: GaussianMasking(3, confusion_end=0.5), "confusion_end=0.5 must satisfy 0 < "),
        (lambda: GaussianMasking(3, confusion_start=0.0), "confusion_start=0.0 and"),
        (lambda: GaussianMasking(3, confusion_start=0.46), "confusion_start=0.46 and"),
        (lambda: GaussianMasking(3, parametrisation="score"), "mixture, joint, not 'score'"),
        (lambda: GaussianMasking(3, conditioning="never"), "process.conditioning must be one of"),
    ],
)
def test_impossible_options_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()
