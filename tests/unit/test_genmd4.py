"""GenMD4's process, bound, gradient and reverse step against identities G01 to G07."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives.genmd4 import GenMD4
from md4_jax.objectives.md4 import MD4
from md4_jax.objectives.token_nats import expected
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Polynomial
from md4_jax.processes.state_dependent import StateDependent
from md4_jax.protocols import Denoiser
from md4_jax.samplers.ancestral import reveal_by_symbol

pytestmark = pytest.mark.usefixtures("x64")

W = np.array([0.8, 1.0, 1.5])
MASK = 3
X = exact.sequences(3, 2)
TABLE = exact.denoiser_of(exact.table_logits(3, 2))
FIRST = 0.05


def process_of(power) -> StateDependent:
    power = jnp.asarray(power, jnp.float64)
    return StateDependent(len(power), raw_power=jnp.log(jnp.expm1(power)))


def in_power(gradient) -> np.ndarray:
    """A gradient in raw_power as one in w = softplus(raw_power)."""
    return np.asarray(gradient) / np.asarray(jax.nn.sigmoid(process_of(W).raw_power))


def perfect(power) -> Denoiser:
    """P(x_n = k | z, t) prop sum over x that agree of p(x) prod_{masked} t^{w[x_n]}."""
    p, x = exact.P_V3L2, exact.sequences(3, 2)

    def features(z, t):
        masked = z == MASK
        agrees = jnp.all(masked[:, None] | (x[None] == z[:, None]), axis=2)
        weight = jnp.where(masked[:, None], t[:, None, None] ** jnp.asarray(power)[x], 1.0)
        mass = agrees * p.ravel() * jnp.prod(weight, axis=2)
        picks = jnp.asarray(np.eye(3)[x])
        total = jnp.einsum("bs,snk->bnk", mass, picks)
        return jnp.log(jnp.where(masked[..., None], total, 1.0))

    return Denoiser(features, lambda h: h)


def integral(denoiser, process, x, *, first=FIRST, nodes=60, power=4) -> np.ndarray:
    """The bound by quadrature over t and enumeration of mask patterns, [X]."""
    objective = GenMD4(first_time=first)
    t, weight = exact.quadrature(first, 1.0, nodes=nodes, power=power)
    values = exact.over_patterns(exact.bind(objective, denoiser, process), MASK, x, t)
    masks = exact.patterns(x.shape[1])
    hidden = t[None, :, None] ** np.asarray(process.power)[x][:, None, :]
    law = np.where(masks[None, None], hidden[:, :, None], 1.0 - hidden[:, :, None]).prod(axis=-1)
    mean = (values * law).sum(axis=2) @ weight / (1.0 - first)
    return mean + np.asarray(objective.reconstruction(process, exact.batch_of(x)))


def test_g01_the_reverse_step():
    process = process_of(W)
    chance = process.reveal_probabilities(jnp.float64(0.4), jnp.float64(0.6))
    posterior = jnp.log(jnp.asarray(exact.P_V3L1)) + jnp.asarray(W) * jnp.log(0.6)
    logits, revealed = reveal_by_symbol(posterior, chance)
    assert 1.0 - float(revealed) == pytest.approx(0.67879499841, rel=1e-9)
    np.testing.assert_allclose(
        revealed * jax.nn.softmax(logits),
        [0.15208484113, 0.099137257474, 0.069982902981],
        rtol=1e-9,
    )


def test_g02_the_integrand():
    logits = jnp.log(jnp.array([[[0.3, 0.5, 0.2]]]))
    denoiser = Denoiser(lambda z, t: logits, lambda h: h)
    objective = GenMD4(first_time=0.5)
    value = objective.loss_at(
        denoiser, process_of(W), exact.batch_of([[2]]), jnp.array([[MASK]]), jnp.array([0.6])
    )
    assert float(value[0]) / 0.5 == pytest.approx(3.2569281144, rel=1e-9)


@pytest.mark.parametrize("first", [1e-3, 0.2])
def test_g03_with_any_first_time_it_is_the_bound_of_a_model(first):
    """Its model decodes at t_1 with q alone: no more than mass 1, and never under the entropy."""
    values = integral(perfect(W), process_of(W), X, first=first)
    assert np.exp(-values).sum() < 1.0
    excess = exact.P_V3L2.ravel() @ values - 1.9934181681
    assert 0.0 < excess < {1e-3: 1e-3, 0.2: 0.5}[first]


def test_g03_numbers():
    values = integral(perfect(W), process_of(W), X, first=1e-7, nodes=400, power=6)
    np.testing.assert_allclose(
        values[[0, 5, 7]], [1.6094379124, 2.5257286443, 2.9957322736], rtol=2e-5
    )


def test_g03_the_perfect_denoiser_depends_on_time():
    z = np.array([[MASK, MASK]] * 2, np.int32)
    mu = jax.nn.softmax(perfect(W)(jnp.asarray(z), jnp.array([0.9, 0.1])))
    np.testing.assert_allclose(mu[:, 0, 2], [0.28688386, 0.097130831798], rtol=1e-7)


def test_g04_equal_powers_are_md4():
    masking, polynomial = process_of([2.0] * 3), Masking(3, Polynomial(2.0))
    t = jnp.array([0.3, 0.7])
    z = jnp.array([[MASK, 1], [MASK, MASK]])
    batch = exact.batch_of([[2, 1], [0, 2]])
    ours = GenMD4(first_time=FIRST).loss_at(TABLE, masking, batch, z, t) / (1.0 - FIRST)
    np.testing.assert_allclose(ours, MD4().loss_at(TABLE, polynomial, batch, z, t), rtol=1e-9)
    value = integral(
        TABLE, process_of([1.0] * 3), np.array([[1, 2]]), first=1e-7, nodes=400, power=6
    )
    np.testing.assert_allclose(value, 2.6044967281, rtol=2e-5)


def test_g05_the_bound():
    value = integral(TABLE, process_of(W), np.array([[1, 2]]), nodes=200, power=2)
    np.testing.assert_allclose(value, 2.3124234408, rtol=1e-9)


def pairs_gradient(t, weight, *, x=(1, 2), denoiser=TABLE) -> np.ndarray:
    """The gradient in w of what is trained on, averaged over all pairs (z_1, z_2) at each t."""
    objective, masks = GenMD4(first_time=FIRST), exact.patterns(2)
    x = np.array(x)
    hidden = t[:, None] ** W[x]
    law = np.where(masks[None], hidden[:, None], 1.0 - hidden[:, None]).prod(axis=-1)
    both = (law[:, :, None] * law[:, None, :] * weight[:, None, None]).ravel()
    z = np.where(masks, MASK, x).astype(np.int32)
    count = len(masks)
    first = np.broadcast_to(z[None, :, None], (len(t), count, count, 2)).reshape(-1, 2)
    second = np.broadcast_to(z[None, None], (len(t), count, count, 2)).reshape(-1, 2)
    times = np.repeat(t, count * count)
    batch = exact.batch_of(np.repeat(x[None], len(times), axis=0))

    def loss(process):
        nats, surrogate = objective.pair(
            denoiser, process, batch, jnp.stack([jnp.asarray(first), jnp.asarray(second)]), times
        )
        return jnp.sum(both * (nats + surrogate)) / (1.0 - FIRST)

    return in_power(jax.jit(jax.grad(loss))(process_of(W)).raw_power)


def test_g05_the_gradient_in_w_at_one_time():
    gradient = pairs_gradient(np.array([0.6]), np.array([1.0]))
    np.testing.assert_allclose(gradient, [0.6853457117, 0.51769630423, 0.31294406289], rtol=1e-9)


def test_g05_the_whole_gradient_in_w():
    t, weight = exact.quadrature(FIRST, 1.0, nodes=120, power=2)
    objective = GenMD4(first_time=FIRST)
    batch = exact.batch_of([[1, 2]])
    recon = jax.grad(lambda p: objective.reconstruction(p, batch)[0])(process_of(W))
    np.testing.assert_allclose(
        in_power(recon.raw_power), [-0.10961041908, -0.077166971542, -0.067423546812], rtol=1e-9
    )
    total = pairs_gradient(t, weight) + in_power(recon.raw_power)
    np.testing.assert_allclose(total, [0.49831985901, -0.26650926983, -0.050757421721], rtol=1e-8)


@pytest.mark.slow
def test_g06_the_expected_gradient_at_the_perfect_denoiser():
    """Not zero at one t, but its integral over t is: here at t = 0.6."""
    at_one_time = sum(
        exact.P_V3L2[tuple(x)]
        * pairs_gradient(np.array([0.6]), np.array([1.0]), x=x, denoiser=perfect(W))
        for x in X
    )
    np.testing.assert_allclose(
        at_one_time, [0.24701741193, 0.22875346902, 0.25180638394], rtol=1e-8
    )


@pytest.mark.slow
def test_g06_the_integral_over_time_is_zero():
    """To what is left out below t = 1e-8, where each sequence contributes less than 1e-5."""
    t, weight = exact.quadrature(1e-8, 1.0, nodes=80, power=5)
    each = [exact.P_V3L2[tuple(x)] * pairs_gradient(t, weight, x=x, denoiser=perfect(W)) for x in X]
    np.testing.assert_allclose(np.sum(each, axis=0), 0.0, atol=2e-5)
    assert np.abs(each).max() > 0.01


def test_g07_a_larger_power_is_revealed_earlier():
    process = process_of([0.5, 1.0, 2.0])
    chance = process.reveal_probabilities(jnp.float64(0.5), jnp.float64(1.0))
    np.testing.assert_allclose(chance, [0.29289321881, 0.5, 0.75], rtol=1e-9)


@pytest.mark.slow
def test_the_call_averages_two_draws_and_adds_no_value_by_its_surrogate():
    process, batch = process_of(W), exact.batch_of(np.tile([[1, 2]], (64, 1)))
    u, keys = jnp.arange(64) / 64, exact.keys_for(3, 64)
    total, parts = GenMD4()(TABLE, process, batch, u, keys)
    np.testing.assert_allclose(total, parts["diffusion"] + parts["reconstruction"], rtol=1e-9)
    assert np.isfinite(total).all() and float(parts["power_max"][0]) == pytest.approx(1.5)


@pytest.mark.parametrize("function", [expected, reveal_by_symbol])
def test_sums_over_symbols_are_not_rounded_by_an_accelerator(function):
    """A GPU or TPU would round the factors to 11 or 8 bits, and w by up to 0.4%.

    The bound has the sum of w_k mu_k minus w_x: a w of 1.003 would cost 0.003 nats a token less.
    """
    text = str(jax.make_jaxpr(function)(jnp.zeros((2, 3), jnp.float32), jnp.ones(3, jnp.float32)))
    assert text.count("dot_general") == 1 == text.count("Precision.HIGHEST, Precision.HIGHEST")
