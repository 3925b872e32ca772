"""Exact likelihoods along an order and left to right, and the sampler that has their law."""

import itertools
import types

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from md4_jax.config import build, schema
from md4_jax.objectives.autoregressive import AlongOrder, Autoregressive
from md4_jax.processes.masking import Masking
from md4_jax.processes.schedules import Cosine, Polynomial
from md4_jax.protocols import Denoiser, UserError
from md4_jax.runtime.commit import PACKAGE_ROOT
from md4_jax.samplers.grids import cosine, uniform
from md4_jax.samplers.left_to_right import LeftToRight
from md4_jax.samplers.transforms import Transform

N = 20_000


def causal_of(p: np.ndarray) -> Denoiser:
    """Position n puts out log p(x_n | x_{<n} = z_1..z_n), p over sequences; z_0 is not used."""
    vocab, length = p.shape[0], p.ndim
    tables = [p.sum(axis=tuple(range(n + 1, length))) for n in range(length)]
    tables = [np.log(t / t.sum(axis=-1, keepdims=True)).reshape(-1, vocab) for t in tables]

    def features(z, t):
        known = jnp.minimum(z, vocab - 1)
        rows = [
            jnp.sum(known[:, 1 : n + 1] * vocab ** np.arange(n)[::-1], axis=1).astype(int)
            for n in range(length)
        ]
        return jnp.stack([jnp.asarray(tables[n])[rows[n]] for n in range(length)], axis=1)

    return Denoiser(features, lambda h: h)


@pytest.mark.slow
@pytest.mark.parametrize("p", [exact.P_V3L2, exact.P_V2L3])
def test_the_causal_factors_of_a_law_give_its_likelihood(p, x64):
    """-log p(x) for every x; log p(0, 0) and log p(1, 2) of the first are those of M05."""
    x = exact.sequences(p.shape[0], p.ndim)
    u, keys = jnp.zeros(len(x)), exact.keys_for(0, len(x))
    arguments = causal_of(p), Masking(p.shape[0]), exact.batch_of(x), u, keys
    nats, extra = Autoregressive()(*arguments)
    np.testing.assert_allclose(nats, -np.log(p.ravel()), rtol=1e-9)
    if p is exact.P_V3L2:
        np.testing.assert_allclose(nats[jnp.array([0, 5])], [1.6094379124, 2.5257286443], rtol=1e-9)
    assert extra == {} and Autoregressive().is_bound(arguments[1])


def test_the_network_reads_the_mask_and_then_the_text_without_its_last_token():
    seen = {}

    def features(z, t):
        seen.update(z=z, t=t)
        return jnp.zeros((*z.shape, 3))

    batch, denoiser = exact.batch_of([[2, 0, 1]]), Denoiser(features, lambda h: h)
    nats, _ = Autoregressive()(denoiser, Masking(3), batch, jnp.array([0.7]), exact.keys_for(0, 1))
    np.testing.assert_array_equal(seen["z"], [[3, 2, 0]])
    np.testing.assert_array_equal(seen["t"], [0.0])
    np.testing.assert_allclose(nats, 3 * np.log(3.0), rtol=1e-6)


def test_given_tokens_are_read_and_not_counted(x64):
    """-log p(x_2 | x_0, x_1) of a known law, for every x."""
    p = exact.P_V2L3
    x = exact.sequences(2, 3)
    batch = exact.batch_of(x)._replace(loss_mask=np.broadcast_to([False, False, True], x.shape))
    arguments = causal_of(p), Masking(2), batch, jnp.zeros(len(x)), exact.keys_for(0, len(x))
    nats, _ = Autoregressive()(*arguments)
    expected = -np.log(p / p.sum(axis=2, keepdims=True)).ravel()
    np.testing.assert_allclose(nats, expected, rtol=1e-9)


def orders(length: int) -> np.ndarray:
    return np.array(list(itertools.permutations(range(length))), np.int32)


def over_orders(p: np.ndarray, schedule=None, time: float = 0.0) -> np.ndarray:
    """The table denoiser's nats of every x along every order: [X, L!]."""
    vocab, length = p.shape[0], p.ndim
    denoiser = exact.denoiser_of(exact.table_logits(vocab, length), time=time)
    process = Masking(vocab, *([schedule] if schedule else []))
    x = exact.sequences(vocab, length)
    columns = []
    for order in orders(length):
        rows = jnp.broadcast_to(order, x.shape)
        given = AlongOrder().loss_along(denoiser, process, exact.batch_of(x), rows)
        columns.append(np.asarray(given, np.float64))
    return np.stack(columns, axis=1)


@pytest.mark.parametrize(
    "p, first, last, mean",
    [
        (exact.P_V3L2, 2.3487522955, 2.260325825, 2.5537893656),
        (exact.P_V2L3, 1.8263484685, 2.6368421674, 2.2885332526),
    ],
)
def test_m06_the_mean_over_orders_is_the_any_order_bound(p, first, last, mean, x64):
    values = over_orders(p).mean(axis=1)
    found = [values[0], values[-1], p.ravel() @ values]
    np.testing.assert_allclose(found, [first, last, mean], rtol=1e-9)


def test_m16_the_law_of_one_token_at_a_time(x64):
    """(1 / L!) sum over orders of exp(-nats): p_theta(0, 0) and p_theta(1, 2); it sums to one."""
    law = np.exp(-over_orders(exact.P_V3L2)).mean(axis=1)
    np.testing.assert_allclose(law[0], 0.09552560043, rtol=1e-9)
    np.testing.assert_allclose(law[5], 0.090936707774, rtol=1e-9)
    np.testing.assert_allclose(law.sum(), 1.0, rtol=1e-12)


@pytest.mark.parametrize("order", ["left_to_right", "right_to_left"])
def test_b01_a_fixed_order_is_an_exact_likelihood(order, x64):
    """Blocks of one token, x = (0, 1, 1, 0); over all x the probabilities add up to one."""
    denoiser = exact.denoiser_of(exact.table_logits(2, 4))
    x = exact.sequences(2, 4)
    arguments = denoiser, Masking(2), exact.batch_of(x), jnp.zeros(16), exact.keys_for(0, 16)
    nats, _ = AlongOrder(order)(*arguments)
    np.testing.assert_allclose(np.exp(-np.asarray(nats)).sum(), 1.0, rtol=1e-12)
    if order == "left_to_right":
        np.testing.assert_allclose(nats[6], 3.4412506329, rtol=1e-9)
    else:
        assert abs(nats[6] - 3.4412506329) > 1e-2


def test_a_random_order_is_uniform_and_follows_the_key():
    """How often each of six orders gives its number, for one x: chi-squared, n = 6,000."""
    known = over_orders(exact.P_V2L3)[3]
    n = 6000
    batch = exact.batch_of(np.tile(exact.sequences(2, 3)[3], (n, 1)))
    denoiser = exact.denoiser_of(exact.table_logits(2, 3))
    keys = exact.keys_for(4, n)
    call = jax.jit(lambda keys: AlongOrder()(denoiser, Masking(2), batch, jnp.zeros(n), keys)[0])
    distance = np.abs(np.asarray(call(keys))[:, None] - known)
    assert distance.min(axis=1).max() < 1e-5 and len(np.unique(known)) == 6
    counts = np.bincount(distance.argmin(axis=1), minlength=6)
    assert stats.chisquare(counts).pvalue > 1e-4
    np.testing.assert_array_equal(call(keys), call(keys))


@pytest.mark.parametrize("schedule", [None, Cosine(), Polynomial(2.0)])
def test_a_denoiser_of_time_gets_the_time_of_the_share_of_masks(schedule):
    seen = []

    def features(z, t):
        jax.debug.callback(lambda z, t: seen.append((np.asarray(z), np.asarray(t))), z, t)
        return jnp.zeros((*z.shape, 2))

    process = Masking(2, *([schedule] if schedule else []))
    batch = exact.batch_of([[0, 1, 1, 0]])
    arguments = process, batch, jnp.zeros(1), exact.keys_for(0, 1)
    AlongOrder()(Denoiser(features, lambda h: h), *arguments)
    jax.effects_barrier()
    assert len(seen) == 4
    masked = sorted((float((z == 2).mean()), float(t[0])) for z, t in seen)
    assert [share for share, _ in masked] == [0.25, 0.5, 0.75, 1.0]
    for share, t in masked:
        np.testing.assert_allclose(process.schedule.one_minus_alpha(t), share, rtol=1e-5)


def test_another_order_is_refused():
    with pytest.raises(UserError, match="objective.order must be 'random', .* not 'inside_out'"):
        AlongOrder("inside_out")


GRIDS = {"one step": uniform(1), "seven": uniform(7), "cosine": cosine(2), "many": uniform(100)}


def draw(p, step, grid, keys):
    return exact.drawn(causal_of(p), Masking(p.shape[0]), step, grid, keys, length=p.ndim)


@pytest.mark.slow
@pytest.mark.parametrize("p", [exact.P_V3L2, exact.P_V2L3], ids=["V3L2", "V2L3"])
@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.cases(3)
def test_samples_have_the_law_on_every_grid(p, grid):
    """Chi-squared over all sequences, n = 20,000, p > 1e-4; L network evaluations."""
    z, evaluations = draw(p, LeftToRight(), grid, exact.keys_for(3, N))
    assert (evaluations == p.ndim).all() and z.dtype == jnp.int32 and (z < p.shape[0]).all()
    digits = p.shape[0] ** np.arange(p.ndim)[::-1]
    counts = np.bincount(np.asarray(z) @ digits, minlength=p.size)
    assert stats.chisquare(counts, N * p.ravel()).pvalue > 1e-4


def test_transforms_act_on_each_token():
    """top_k = 1: first the likeliest first token (0.35, 0.35 and 0.3: both of two), then its
    likeliest follower, 0 after 0 and 1 after 1."""
    step = LeftToRight(Transform(top_k=1))
    z, _ = draw(exact.P_V3L2, step, uniform(2), exact.keys_for(3, 64))
    assert (np.asarray(z)[:, 0] == np.asarray(z)[:, 1]).all() and (np.asarray(z) < 2).all()


def test_a_sample_does_not_depend_on_its_neighbours():
    keys = exact.keys_for(2, 8)
    whole, _ = draw(exact.P_V2L3, LeftToRight(), uniform(4), keys)
    part, _ = draw(exact.P_V2L3, LeftToRight(), uniform(4), keys[5:7])
    np.testing.assert_array_equal(part, whole[5:7])


def test_a_step_fills_its_own_positions_and_no_others():
    """L = 3: from t = 2/3 to 1/3 the middle one; tokens that are there stay."""
    process, step = Masking(2), LeftToRight()
    z, keys = jnp.asarray(exact.sequences(3, 3)), exact.keys_for(1, 27)
    s, t = jnp.float32(1 / 3), jnp.float32(2 / 3)
    after = np.asarray(step(causal_of(exact.P_V2L3), process, exact.chain_of(z), s, t, keys).z)
    np.testing.assert_array_equal(after[:, [0, 2]], z[:, jnp.array([0, 2])])
    assert (after[:, 1] < 2).all() and ((after == z) | (z == 2)).all()


def test_the_objective_scores_what_the_sampler_draws():
    """The entropy of P_V3L2 is 1.9934181681 nats: n = 20,000 samples, within 5 errors."""
    z, _ = draw(exact.P_V3L2, LeftToRight(), uniform(1), exact.keys_for(6, N))
    arguments = Masking(3), exact.batch_of(z), jnp.zeros(N), exact.keys_for(0, N)
    nats, _ = Autoregressive()(causal_of(exact.P_V3L2), *arguments)
    error = float(jnp.std(nats)) / np.sqrt(N)
    assert abs(float(nats.mean()) - 1.9934181681) < 5 * error < 0.03


@pytest.mark.parametrize(
    "change, words",
    [
        ({"network.causal": "False"}, "objective.name='autoregressive' needs network.causal=True"),
        ({"objective.name": "any_order"}, "objective.name='any_order' needs network.causal=False"),
        ({"sample.name": "ancestral"}, "sample.name='ancestral' needs network.causal=False"),
        ({"evals.test.objective.name": "along_order"}, "'along_order' needs network.causal=False"),
    ],
)
def test_what_is_causal_goes_with_a_causal_network_alone(change, words):
    path = str(PACKAGE_ROOT / "configs" / "ar_text8_fast.py")
    config = schema.load_config(path, {"mesh.data": "1", **change})
    tokenizer = types.SimpleNamespace(vocab_size=27, eot_id=None, unit="character", shape=(256,))
    with pytest.raises(UserError, match=words):
        build.experiment(config, tokenizer)
