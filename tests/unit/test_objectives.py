"""What holds for every objective of the registry."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.concrete_score import ConcreteScore
from md4_jax.objectives.d3pm import D3PM
from md4_jax.objectives.md4 import DiscreteMD4
from md4_jax.objectives.radd import TDCE
from md4_jax.objectives.token_nats import token_nats
from md4_jax.processes import PROCESSES
from md4_jax.processes.hybrid import Hybrid
from md4_jax.protocols import Denoiser, UserError

CASES = exact.OBJECTIVE_CASES
every_objective = pytest.mark.parametrize("objective", CASES.values(), ids=CASES)
# Variants of a process or of an objective are among the slow tests.
every_pair = pytest.mark.parametrize(
    "objective, make_process",
    [
        pytest.param(*pair, id=name, marks=[pytest.mark.campaign] * (name.count(",") > 1))
        for name, pair in exact.FITTING.items()
    ],
)
BFLOAT16 = pytest.param(jnp.bfloat16, id="bfloat16", marks=pytest.mark.campaign)
ROWS = 12
TABLE = exact.denoiser_of(exact.table_logits(2, 3), time=0.5)
TOKENS = np.tile(exact.sequences(2, 3), (2, 1))[:ROWS]
U = (0.37 + np.arange(ROWS) / ROWS).astype(np.float32) % 1.0
KEYS = exact.keys_for(3, ROWS)


def constant(outputs) -> Denoiser:
    return exact.of_outputs(lambda z, t: jnp.broadcast_to(outputs, (*z.shape, 2)))


@pytest.mark.cases(10)
@every_pair
def test_one_finite_number_a_sequence_also_when_compiled(objective, make_process):
    process = make_process(vocab_size=2)
    call = jax.jit(lambda b, u, k: objective(TABLE, process, b, u, k))
    nats, extra = call(exact.labelled(TOKENS), U, KEYS)
    assert nats.shape == (ROWS,) and nats.dtype == jnp.float32
    assert jnp.isfinite(nats).all()
    # Concrete score matching leaves out the constant that would make it a squared error, RADD's
    # constant has both signs, and those of texts that grow take one away.
    signed = isinstance(objective, ConcreteScore | TDCE) or objective.needs.gaps
    assert (nats >= 0).all() or signed
    assert all(value.shape == (ROWS,) for value in extra.values())
    plain, _ = objective(TABLE, process, exact.labelled(TOKENS), jnp.asarray(U), KEYS)
    # The length of a step of a thousand is rounded otherwise where XLA fuses it.
    fused = isinstance(objective, D3PM) and isinstance(process, Hybrid)
    np.testing.assert_allclose(nats, plain, rtol=1e-4 if fused else 1e-5)
    assert isinstance(objective.is_bound(process), bool)


@pytest.mark.quick(12)
@every_objective
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, id="float32"), BFLOAT16])
@pytest.mark.cases(12)
def test_the_ends_of_the_unit_interval_are_finite(objective, dtype):
    """Losses and gradients, also where the network computes in bfloat16."""
    u = jnp.asarray(np.repeat([0.0, 1.0 - 2.0**-24], ROWS // 2), jnp.float32)
    for make_process in [make for other, make in exact.FITTING.values() if other is objective]:
        process = make_process(vocab_size=2)

        def loss(table, process=process):
            outputs = table.astype(dtype)
            denoiser = constant(outputs)
            nats, _ = objective(denoiser, process, exact.labelled(TOKENS), u, KEYS)
            return nats.sum(), nats

        (_, nats), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.asarray([0.3, -0.2]))
        assert nats.dtype == jnp.float32
        assert jnp.isfinite(nats).all() and jnp.isfinite(gradient).all()


def told(labels) -> Denoiser:
    """A denoiser with a number bound to each row, which its outputs follow."""

    def features(z, t):
        assert len(z) == len(labels)
        return TABLE.features(z, t) + jnp.sin(labels)[:, None, None] * jnp.arange(2)

    denoiser = exact.of_outputs(features)
    return denoiser._replace(rebind=lambda count: told(jnp.repeat(labels, count)))


@pytest.mark.quick(4)
@pytest.mark.cases(8)
@every_pair
def test_what_is_bound_to_a_row_stays_with_it(objective, make_process):
    """The loss of a row does not depend on other rows, however often each of them is noised."""
    process, labels = make_process(vocab_size=2), jnp.arange(1.0, ROWS + 1)
    whole, _ = objective(told(labels), process, exact.labelled(TOKENS), jnp.asarray(U), KEYS)
    rows = np.array([7, 2, 9])
    part, _ = objective(
        told(labels[rows]), process, exact.labelled(TOKENS[rows]), jnp.asarray(U[rows]), KEYS[rows]
    )
    np.testing.assert_array_equal(part, whole[rows])
    plain, _ = objective(TABLE, process, exact.labelled(TOKENS), jnp.asarray(U), KEYS)
    assert (np.asarray(plain) != whole).mean() > 0.5


@pytest.mark.quick(12)
@every_pair
@pytest.mark.cases(20)
def test_the_gradient_of_the_logits_is_finite_and_not_zero(objective, make_process):
    process = make_process(vocab_size=2)

    def loss(table):
        arguments = constant(table), process, exact.labelled(TOKENS), jnp.asarray(U), KEYS
        return objective(*arguments)[0].sum()

    gradient = jax.grad(loss)(jnp.asarray([0.3, -0.2]))
    assert jnp.isfinite(gradient).all() and jnp.abs(gradient).min() > 1e-3


def test_which_objectives_are_bounds():
    process = PROCESSES["masking"](vocab_size=2)
    assert {name for name, objective in CASES.items() if not objective.is_bound(process)} == {
        "masked language model",
        "few masks",
        "candi, cross entropy",
        "classifier",
        "concrete_score",
        "concrete score, one level",
        "concrete score, denoising",
        "cross-entropy in blocks",
        "cross_entropy",
        "dcd",
        "dreamon",
        "duo",
        "gidd, clip",
        "gidd, dynamic",
        "policy",
        "policy, near the start",
        "preference",
        "prime, joint",
        "prism",
        "proseco",
        "reparameterized",
        "sdlm",
        "sdtt",
        "sdtt, three steps",
        "wedlm",
    }


def test_any_order_masks_as_many_tokens_as_u_says():
    """Length 3: u in thirds masks 1, 2 and 3 tokens, so that a stratified u is stratified in k."""
    process = PROCESSES["masking"](vocab_size=2)
    u = jnp.asarray([0.0, 0.33, 0.34, 0.66, 0.67, 0.999])
    _, extra = AnyOrder()(TABLE, process, exact.labelled(TOKENS[:6]), u, KEYS[:6])
    np.testing.assert_allclose(extra["masked"] * 3, [1, 1, 2, 2, 3, 3], rtol=1e-6)


@pytest.mark.parametrize("share, most", [(0.7, 2), (0.4, 1), (0.01, 1), (1.0, 3)])
def test_any_order_can_leave_out_the_masks_of_most_tokens(share, most):
    """The largest u masks that share; the mean over the counts costs L log V all the same."""
    process, objective = PROCESSES["masking"](vocab_size=2), AnyOrder(0.5, max_masked=share)
    u = jnp.linspace(0.0, 0.9999, ROWS)
    uniform = Denoiser(lambda z, t: jnp.zeros((*z.shape, 2)), lambda h: h)
    nats, extra = objective(uniform, process, exact.labelled(TOKENS), u, KEYS)
    np.testing.assert_allclose(extra["masked"].max() * 3, most, rtol=1e-6)
    np.testing.assert_allclose(nats.mean(), 3 * np.log(2.0), rtol=1e-5)


@pytest.mark.parametrize("power", [0.0, 0.3, 1.0])
def test_any_order_weights_cost_the_same_when_every_token_does(power):
    """Uniform logits cost log V a token: the mean over k is L log V for every weighting."""
    uniform = Denoiser(lambda z, t: jnp.zeros((*z.shape, 2)), lambda h: h)
    x, process = exact.sequences(2, 3)[:1], PROCESSES["masking"](vocab_size=2)
    value = exact.any_order(uniform, process, x, AnyOrder(weight_power=power))
    np.testing.assert_allclose(value, 3 * np.log(2.0), rtol=1e-6)


def test_the_plain_masked_language_model_weighs_every_masked_token_alike():
    uniform = Denoiser(lambda z, t: jnp.zeros((*z.shape, 2)), lambda h: h)
    process, x = PROCESSES["masking"](vocab_size=2), np.zeros((3, 3), np.int32)
    z = jnp.asarray([[2, 0, 0], [2, 2, 0], [2, 2, 2]])
    nats = AnyOrder(0.0).loss_at(uniform, process, exact.labelled(x), z, jnp.zeros(3))
    np.testing.assert_allclose(nats / nats[0], [1, 2, 3], rtol=1e-6)


def test_unmasked_tokens_cost_nothing_and_masked_ones_their_cross_entropy():
    logits = np.log(np.array([0.25, 0.75]))
    denoiser = Denoiser(
        lambda z, t: jnp.broadcast_to(jnp.asarray(logits), (*z.shape, 2)), lambda h: h
    )
    process, x = PROCESSES["masking"](vocab_size=2), np.array([[0, 1, 1]])
    z = jnp.asarray([[2, 1, 2]])
    nats = AnyOrder().loss_at(denoiser, process, exact.labelled(x), z, jnp.zeros(1))
    np.testing.assert_allclose(nats, 1.5 * (np.log(4.0) + np.log(4 / 3)), rtol=1e-6)


def test_logits_are_reduced_in_float32():
    logits = jnp.asarray([[12.0, 12.0625, 11.9375]], jnp.bfloat16)
    nats = token_nats(logits, jnp.asarray([2]))
    wide = np.asarray(logits, np.float64)[0]
    assert nats.dtype == jnp.float32
    np.testing.assert_allclose(nats, np.log(np.exp(wide).sum()) - wide[2], rtol=1e-6)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: DiscreteMD4(0), "timesteps must be at least 1, not 0"),
        (lambda: DiscreteMD4(2, "none"), "'model' or 'uniform', not 'none'"),
        (lambda: AnyOrder(max_masked=0.0), r"max_masked must lie in \(0, 1\], not 0.0"),
        (lambda: AnyOrder(1.5), r"weight_power must lie in \[0, 1\], not 1.5"),
    ],
)
def test_impossible_objectives_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()
