"""Duo's curriculum: its integral, mixtures in the network, and where it ends."""

import dataclasses
import types

import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_networks import random_parameters

from md4_jax.config import build, schema
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.duo import Duo
from md4_jax.objectives.uniform_elbo import UniformELBO
from md4_jax.options import TrainOptions
from md4_jax.processes import duality
from md4_jax.processes.schedules import Linear, LogLinear
from md4_jax.processes.uniform import Uniform
from md4_jax.protocols import Denoiser, Mixture, UserError
from md4_jax.runtime.commit import PACKAGE_ROOT
from md4_jax.training.step import init_state, make_train_step

ROWS = 8
TOKENS = np.random.default_rng(0).integers(0, 5, (ROWS, 6)).astype(np.int32)
OPTIONS = TrainOptions(num_steps=4, batch_size=ROWS)


def mean(objective, process, x, nodes=160):
    """The mean of `loss_at` over gamma and all z, where the network reads z itself: [X]."""
    gamma, weight = exact.quadrature(objective.low, objective.high, nodes)
    denoiser = exact.uniform_outputs(process, exact.P_V3L2)

    def loss_at(batch, z, gamma):
        return objective.loss_at(denoiser, process, batch, z, z, gamma)

    at = duality.level(jnp.asarray(gamma), 3)
    alpha, noise = (np.asarray(a)[:, None, None] for a in (at.alpha, at.noise))
    same = x[:, None, None] == exact.sequences(3, 2)
    law = (alpha * same + noise / 3).prod(axis=-1)
    values = exact.over_states(loss_at, 3, x, gamma)
    return (values * law).sum(axis=2) @ weight / (objective.high - objective.low)


@pytest.mark.quick(1)
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("parametrisation", ["joint", "mixture"])
@pytest.mark.parametrize("schedule", [Linear(), LogLinear(1e-3)])
@pytest.mark.cases(1)
def test_over_all_levels_it_is_the_bound_of_a_network_that_reads_tokens(parametrisation, schedule):
    """With exact outputs -log p(x) (M05), for every schedule."""
    process, whole = Uniform(3, schedule, parametrisation), Duo(low=-4.6, high=20.0)
    values = mean(whole, process, exact.sequences(3, 2))
    np.testing.assert_allclose(values[[0, 5]], [1.6094379124, 2.5257286443], rtol=1e-6)
    assert exact.P_V3L2.ravel() @ values == pytest.approx(1.9934181681, rel=1e-6)


@pytest.mark.campaign
@pytest.mark.usefixtures("x64")
def test_a_window_has_its_part_of_the_integral():
    """The integrals over two windows add up to that over both."""
    process, x = Uniform(3), exact.sequences(3, 2)
    left, right, both = (
        mean(Duo(low=low, high=high), process, x) for low, high in ((-3, 0), (0, 3), (-3, 3))
    )
    np.testing.assert_allclose(left + right, both, rtol=1e-9)
    assert left.min() > 0.1 and right.min() > 0.1


@pytest.mark.slow
def test_a_draw_is_at_the_level_that_its_u_says():
    """The mean of all draws at one u is the mean over z: to 4 standard errors."""
    process, count = Uniform(3), 20_000
    objective, u = Duo(low=-2.0, high=2.0), 0.7
    denoiser = exact.uniform_outputs(process, exact.P_V3L2)
    tokens = Denoiser(lambda z, t: denoiser.features(duality.strongest(z), t), denoiser.unembed)
    x = np.tile([[1, 2]], (count, 1))
    call = jax.jit(lambda: objective(
        tokens, process, exact.batch_of(x), jnp.full(count, u), exact.keys_for(0, count)
    ))  # fmt: skip
    nats, extra = call()
    at = duality.level(jnp.float32(0.8), 3)
    z = exact.sequences(3, 2)
    law = (float(at.alpha) * (z == [1, 2]) + float(at.noise) / 3).prod(axis=-1)
    each = objective.loss_at(
        denoiser, process, exact.batch_of(np.tile([[1, 2]], (9, 1))), z, z, jnp.full(9, 0.8)
    )
    error = float(nats.std()) / np.sqrt(count)
    assert abs(float(nats.mean()) - law @ np.asarray(each)) < 4.0 * error < 0.1
    changed = float(extra["changed"].mean())
    assert changed == pytest.approx(float(at.noise) * 2 / 3, abs=4.0 * 0.5 / np.sqrt(2 * count))


def network(**options):
    sizes = dict(size=16, depth=1, heads=2, hidden=32, scan_blocks=False) | options
    return Transformer(5, **sizes).build()


def bound(made):
    return made.bind(random_parameters(made))


def test_a_network_reads_mixtures_of_its_vectors():
    """A pure one is the token; the order of symbols and symbols without weight change nothing."""
    denoiser, t = bound(network(embedding=8, local_width=3)), jnp.linspace(0.1, 0.9, ROWS)
    plain = denoiser(TOKENS, t)
    other = (TOKENS + 1) % 5
    pure = Mixture(jnp.stack([other, TOKENS], -1), jnp.tile(jnp.array([0.0, 1.0]), (ROWS, 6, 1)))
    np.testing.assert_allclose(denoiser(pure, t), plain, atol=1e-6)
    half = jnp.full((ROWS, 6, 2), 0.5)
    mixed = denoiser(Mixture(jnp.stack([TOKENS, other], -1), half), t)
    turned = denoiser(Mixture(jnp.stack([other, TOKENS], -1), half), t)
    np.testing.assert_allclose(mixed, turned, atol=1e-6)
    assert np.abs(mixed - plain).max() > 0.05


def test_the_vectors_of_a_mixture_are_weighed():
    """Without blocks a network is linear in its vectors up to the normalisation: by hand."""
    made = network(depth=0, time_conditioning=False, norm="layer", norm_parameters="scale")
    params = made.init(jax.random.key(0))
    seen = Mixture(jnp.array([[[1, 3], [2, 2]]]), jnp.array([[[0.25, 0.75], [0.5, 0.5]]]))
    found = made.bind(params).features(seen, jnp.zeros(1))[0]
    table = np.asarray(params["embedding"], np.float64)
    vectors = np.stack([0.25 * table[1] + 0.75 * table[3], table[2]])
    centred = vectors - vectors.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_tokens_that_do_not_count_stay_clean():
    seen = []

    def features(z, t):
        seen.append(z)
        return jnp.zeros((*z.symbols.shape[:2], 5))

    mask = np.zeros(TOKENS.shape, bool)
    mask[:, ::2] = True
    batch = exact.batch_of(TOKENS)._replace(loss_mask=mask)
    arguments = Uniform(5), batch, jnp.linspace(0, 0.99, ROWS), exact.keys_for(0, ROWS)
    Duo(low=2.0, high=4.0)(Denoiser(features, lambda h: h), *arguments)
    weights = np.asarray(seen[0].weights)
    np.testing.assert_array_equal(seen[0].symbols[..., 0], TOKENS)
    assert (weights[:, 1::2, 0] == 1.0).all() and (weights[:, ::2, 0] < 0.5).any()
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0, rtol=1e-6)


def test_the_softmax_is_that_of_all_entries_where_all_are_drawn():
    """Of a onehot(x) + s noise over tau, here with s = sqrt(1 / (1 + exp(-gamma)))."""
    gamma, heights = jnp.array([0.4]), jnp.array([[[1.2, 0.7, -0.3, 0.1]]])
    scale = np.sqrt(1.0 / (1.0 + np.exp(-0.4))) / 0.5
    expected = np.exp(scale * np.asarray(heights, np.float64))
    found = Duo(temperature=0.5).weights(heights, gamma)
    np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-6)


def steps(objective, count, microbatches=1):
    """The parameters after each of so many steps."""
    made, optimizer = network(), optax.sgd(0.1)
    process = Uniform(5)
    state = jax.jit(lambda: init_state(jax.random.key(0), made, process, optimizer))()
    options = dataclasses.replace(OPTIONS, microbatches=microbatches)
    step = jax.jit(make_train_step(made, objective, optimizer, options))
    found = []
    for _ in range(count):
        state, metrics = step(state, exact.batch_of(TOKENS))
        found.append((state.params["network"], metrics))
    return found, state


@pytest.mark.campaign
@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_the_curriculum_ends_with_its_step(microbatches):
    """Two steps of its loss, and then one of the bound, as if that had been the objective."""
    mixed, _ = steps(Duo(until=2), 3, microbatches)
    alone, _ = steps(Duo(), 3, microbatches)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6)  # noqa: E731
    jax.tree.map(close, mixed[1][0], alone[1][0])
    assert float(mixed[1][1]["nats"]) == pytest.approx(float(alone[1][1]["nats"]), rel=1e-5)
    # The third step goes on from the same parameters with the bound.
    made, optimizer = network(), optax.sgd(0.1)
    options = dataclasses.replace(OPTIONS, microbatches=microbatches)
    _, state = steps(Duo(), 2, microbatches)
    step = jax.jit(make_train_step(made, UniformELBO(), optimizer, options))
    state, metrics = step(state, exact.batch_of(TOKENS))
    jax.tree.map(close, mixed[2][0], state.params["network"])
    assert float(mixed[2][1]["nats"]) == pytest.approx(float(metrics["nats"]), rel=1e-5)
    assert "changed" in mixed[2][1]


@pytest.mark.parametrize(
    "values, words",
    [
        (dict(temperature=0.0), "objective.temperature must be above 0, not 0.0"),
        (dict(low=1.0, high=1.0), "objective.low=1.0 must be below objective.high=1.0"),
        (dict(kept=0), "objective.kept must be at least 1, not 0"),
        (dict(until=-1), "objective.until must be at least 0, not -1"),
    ],
)
def test_options_out_of_range(values, words):
    with pytest.raises(UserError, match=words):
        Duo(**values)


@pytest.mark.parametrize(
    "name, values, shape",
    [
        ("digits.py", {"process.name": "uniform"}, (8, 8, 1)),
        ("quickstart.py", {"process.name": "uniform", "network.tables": "640"}, (256,)),
    ],
)
def test_a_network_that_reads_no_mixtures_is_refused(name, values, shape):
    asked = {"mesh.data": "1", "objective.name": "duo", **values}
    config = schema.load_config(str(PACKAGE_ROOT / "configs" / name), asked)
    domain = types.SimpleNamespace(vocab_size=17, eot_id=None, unit="character", shape=shape)
    words = "objective.name='duo' needs network.name='transformer' and network.tables=0"
    with pytest.raises(UserError, match=words):
        build.experiment(config, domain, jax.devices()[:1])


def test_it_is_no_bound():
    assert Duo().is_bound(Uniform(5)) is False
