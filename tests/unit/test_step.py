"""The step: draws, microbatches, non-finite losses, the moving average and the eval step."""

import dataclasses

import chex
import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from md4_jax.evals.likelihood import make_eval_step
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives import OBJECTIVES
from md4_jax.objectives.draws import antithetic_times, draws, early_times, weighed
from md4_jax.options import TrainOptions
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Denoiser, Network, UserError, batch_of
from md4_jax.training import optim
from md4_jax.training.microbatches import accumulate
from md4_jax.training.optim import clipping
from md4_jax.training.step import ema_update, init_state, make_train_step

BATCH = 8
OPTIONS = TrainOptions(batch_size=BATCH, ema=0.5, seed=3)
WEIGHTS = Network(
    lambda key: {"w": jnp.zeros(BATCH)},
    lambda params, context, keys: Denoiser(None, lambda h: params["w"]),
    True,
)
ROWS = exact.batch_of(np.arange(BATCH)[:, None])  # the token of a row is its number
SGD = optax.sgd(1.0, momentum=0.9)
BAD = exact.batch_of(np.arange(BATCH)[:, None] + np.array([0] * 7 + [100])[:, None])


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Row b costs (its draws) x w_b, so that the gradient of w holds each row's draws."""

    def __call__(self, denoiser, process, batch, u, keys):
        noise = jax.vmap(jax.random.uniform)(keys)
        row = batch.tokens[:, 0] % 100
        nats = (u + noise) * denoiser.unembed(None)[row % BATCH]
        return jnp.where(batch.tokens[:, 0] >= 100, jnp.nan, nats), {"u": u}


def one_step(microbatches=1, batch=ROWS, state=None, optimizer=None, **changes):
    options = dataclasses.replace(OPTIONS, microbatches=microbatches, **changes)
    optimizer = optimizer or optax.sgd(1.0, momentum=0.9)
    state = state or init_state(jax.random.key(0), WEIGHTS, Masking(4), optimizer)
    step = jax.jit(make_train_step(WEIGHTS, Fingerprint(), optimizer, options))
    return step(state, batch)


def test_a_pace_multiplies_the_update():
    """And not the momentum: half a step, of the share of seconds that the step is told."""
    start = init_state(jax.random.key(0), WEIGHTS, Masking(4), SGD)
    step = jax.jit(
        make_train_step(
            WEIGHTS, Fingerprint(), SGD, OPTIONS, lambda step, spent: 1.0 - spent + step
        )
    )
    plain = jax.jit(make_train_step(WEIGHTS, Fingerprint(), SGD, OPTIONS))(start, ROWS)[0]
    half = step(start, ROWS, jnp.float32(0.5))[0]
    moved = np.asarray(plain.params["network"]["w"])
    assert np.abs(moved).min() > 0
    np.testing.assert_allclose(half.params["network"]["w"], 0.5 * moved, rtol=1e-6)
    chex.assert_trees_all_equal(half.opt_state, plain.opt_state)
    later = step(half, ROWS, jnp.float32(1.0))[0]
    assert not np.array_equal(later.params["network"]["w"], half.params["network"]["w"])


@pytest.mark.parametrize("power", [2.0, 3.0])
def test_early_times_have_less_weight(power):
    """u = v^p with the weight p v^(p-1), v the times without; rows draw the same noise."""
    plain, metrics = one_step()
    early, moved = one_step(time_power=power)
    v, keys = draws(OPTIONS.seed, jnp.int32(0), BATCH)
    noise = np.asarray(jax.vmap(jax.random.uniform)(keys))
    v = np.asarray(v, np.float64)
    np.testing.assert_allclose(metrics["u"], v.mean(), rtol=1e-5)
    weight = power * v ** (power - 1)
    np.testing.assert_allclose(moved["u"], (weight * v**power).mean(), rtol=1e-5)
    expected = -(weight * (v**power + noise)) / BATCH
    np.testing.assert_allclose(early.params["network"]["w"], expected, rtol=1e-4)
    assert np.abs(np.asarray(plain.params["network"]["w"]) - expected).max() > 0.01


def test_early_times_keep_the_mean():
    """Of f(u) = exp(-u), by 20,000 midpoints."""
    v = (np.arange(20_000) + 0.5) / 20_000
    for power in (1.5, 2.0, 5.0):
        u, weight = early_times(v, power)
        np.testing.assert_allclose(np.mean(weight * np.exp(-u)), 1.0 - np.exp(-1.0), rtol=1e-6)


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_microbatches_change_no_draw(microbatches):
    whole, metrics = one_step()
    parts, same = one_step(microbatches)
    w = np.asarray(whole.params["network"]["w"])
    np.testing.assert_array_equal(parts.params["network"]["w"], w)
    assert len(np.unique(w)) == BATCH and (w < 0).all()
    np.testing.assert_allclose(same["u"], metrics["u"], rtol=1e-6)


@pytest.mark.slow
def test_microbatches_of_a_network_average_to_its_gradient():
    network = Transformer(5, size=8, depth=1, heads=2, hidden=8, scan_blocks=False).build()
    optimizer, x = optax.sgd(0.1), np.random.default_rng(0).integers(0, 5, (BATCH, 6))
    first = jax.jit(lambda: init_state(jax.random.key(0), network, Masking(5), optimizer))()

    def two_steps(microbatches):
        options = dataclasses.replace(OPTIONS, microbatches=microbatches)
        step = jax.jit(make_train_step(network, OBJECTIVES["any_order"](), optimizer, options))
        state, _ = step(first, exact.batch_of(x))
        state, metrics = step(state, exact.batch_of(x))
        return state.params, state.ema, metrics

    def close(a, b):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-4)

    whole = two_steps(1)
    jax.tree.map(close, two_steps(4), whole)
    assert float(whole[2]["grad_norm"]) > 1e-3 and "masked" in whole[2]


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_loss_and_gradient_are_means_over_the_tokens_that_count(microbatches):
    """However these lie in the microbatches: 3 of 16 tokens count, so that all is 16 / 3."""
    tokens = np.repeat(ROWS.tokens, 2, axis=1)
    loss_mask = np.zeros((BATCH, 2), bool)
    loss_mask[[0, 1, 1], [0, 0, 1]] = True
    start = init_state(jax.random.key(0), WEIGHTS, Masking(4), optax.sgd(1.0))
    start = start._replace(params={**start.params, "network": {"w": jnp.ones(BATCH)}})
    steps = [
        one_step(microbatches, batch_of(tokens, loss_mask=mask), start, optax.sgd(1.0))
        for mask in (loss_mask, np.ones_like(loss_mask))
    ]
    (some, found), (every, expected) = steps
    np.testing.assert_allclose(found["nats"], expected["nats"] * 16 / 3, rtol=1e-6)
    moved = [1 - np.asarray(state.params["network"]["w"]) for state in (some, every)]
    np.testing.assert_allclose(moved[0], moved[1] * 16 / 3, rtol=1e-5)


@pytest.mark.parametrize("counted", [BATCH, BATCH // 2])
def test_a_clip_bounds_the_gradient_per_token_that_counts(counted):
    """The clip is told the norm, also if not all tokens count."""
    batch = ROWS._replace(loss_mask=jnp.arange(BATCH)[:, None] < counted)
    plain, metrics = one_step(batch=batch, optimizer=optax.sgd(1.0))
    clipped, _ = one_step(batch=batch, optimizer=optax.chain(clipping(0.05), optax.sgd(1.0)))
    w, moved = (np.asarray(state.params["network"]["w"]) for state in (plain, clipped))
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(w), rtol=1e-6)
    np.testing.assert_allclose(moved, w * 0.05 / np.linalg.norm(w), rtol=1e-5)


def test_a_microbatch_holds_every_mth_pair_of_rows():
    """So its strata are spread as the batch's are, and mirror images stay together."""

    def grad(params, rows):
        return {"range": rows.max() - rows.min(), "mean": params * rows.mean()}

    out = accumulate(grad, 4, jnp.float32(2.0), (jnp.arange(16.0),))
    np.testing.assert_allclose(out["range"], 9.0)  # rows 0, 1, 8 and 9 of the first
    np.testing.assert_allclose(out["mean"], 15.0)
    odd = accumulate(grad, 4, jnp.float32(2.0), (jnp.arange(12.0),))
    np.testing.assert_allclose(odd["range"], 8.0)  # rows 0, 4 and 8


def test_the_gradient_is_that_of_nats_per_token():
    """tokens [B, 1] and [B, 5] with the same nats: a fifth of the gradient."""
    state, _ = one_step()
    longer, metrics = one_step(batch=exact.batch_of(np.repeat(ROWS.tokens, 5, axis=1)))
    w = state.params["network"]["w"]
    np.testing.assert_allclose(longer.params["network"]["w"], w / 5, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(w) / 5, rtol=1e-6)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_non_finite_loss_changes_nothing_and_is_counted():
    before, _ = one_step()
    state, metrics = one_step(batch=BAD, state=before)
    assert_same(
        (state.params, state.ema, state.opt_state), (before.params, before.ema, before.opt_state)
    )
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (2, 1, 1)
    assert jnp.isnan(metrics["nats"]) and int(metrics["skipped"]) == 1
    state, _ = one_step(batch=BAD, state=state, microbatches=4)
    assert (int(state.step), int(state.skipped), int(state.skipped_in_a_row)) == (3, 2, 2)
    assert_same(state.params, before.params)
    state, metrics = one_step(state=state)
    assert (int(state.skipped), int(state.skipped_in_a_row)) == (2, 0)
    assert int(metrics["skipped_in_a_row"]) == 0
    assert (state.params["network"]["w"] != before.params["network"]["w"]).all()


@pytest.mark.parametrize("bounded", [False, True])
def test_a_finite_loss_with_a_non_finite_gradient_is_skipped(bounded):
    class Root:
        def __call__(self, denoiser, process, batch, u, keys):
            return jnp.sqrt(denoiser.unembed(None)), {}  # w = 0: value 0, slope infinite

    optimizer = optax.sgd(1.0)
    state = init_state(jax.random.key(0), WEIGHTS, Masking(4), optimizer)
    step = jax.jit(make_train_step(WEIGHTS, Root(), optimizer, OPTIONS, bounded=bounded))
    state, metrics = step(state, ROWS)
    assert float(metrics["nats"]) == 0.0 and int(state.skipped) == 1
    assert (state.params["network"]["w"] == 0).all()


def test_an_update_that_overflows_is_skipped():
    """Loss and gradient are finite."""
    optimizer = optax.chain(optax.scale(1e38), optax.scale(1e3), optax.sgd(1.0, momentum=0.9))
    before = init_state(jax.random.key(0), WEIGHTS, Masking(4), optimizer)
    state, metrics = one_step(state=before, optimizer=optimizer)
    assert jnp.isfinite(metrics["nats"]) and jnp.isfinite(metrics["grad_norm"])
    assert int(metrics["skipped"]) == 1
    assert_same(
        (state.params, state.ema, state.opt_state), (before.params, before.ema, before.opt_state)
    )


def test_an_update_that_overflows_in_one_array_moves_none():
    pair = WEIGHTS._replace(
        init=lambda key: {"w": jnp.zeros(BATCH), "v": jnp.ones(3)},
        bind=lambda params, context, keys: Denoiser(
            None, lambda h: params["w"] + jnp.sum(params["v"])
        ),
    )
    rates = {"w": 1.0, "v": 3e38}
    optimizer = optax.stateless(
        lambda grads, params: (
            grads
            | {"network": {name: -1e3 * g * rates[name] for name, g in grads["network"].items()}}
        )
    )
    before = init_state(jax.random.key(0), pair, Masking(4), optimizer)
    step = jax.jit(make_train_step(pair, Fingerprint(), optimizer, OPTIONS))
    state, metrics = step(before, ROWS)
    assert jnp.isfinite(metrics["nats"]) and jnp.isfinite(metrics["grad_norm"])
    assert int(metrics["skipped"]) == int(state.skipped_in_a_row) == 1
    assert_same((state.params, state.ema), (before.params, before.ema))


def test_an_optimizer_whose_state_alone_overflows_is_skipped():
    def update(grads, seen, params=None):
        return grads, jax.tree.map(lambda g, s: s + 3e38 + g, grads, seen)

    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
    optimizer = optax.chain(optax.GradientTransformation(zeros, update), optax.sgd(0.1))
    first, metrics = one_step(optimizer=optimizer)
    assert int(metrics["skipped"]) == 0
    second, metrics = one_step(state=first, optimizer=optimizer)
    assert jnp.isfinite(metrics["grad_norm"]) and int(metrics["skipped"]) == 1
    assert_same((second.params, second.opt_state), (first.params, first.opt_state))


def test_a_pace_that_is_not_finite_is_skipped_whatever_is_known_of_the_optimizer():
    before = init_state(jax.random.key(0), WEIGHTS, Masking(4), SGD)
    for pace, skipped in ((jnp.nan, 1), (1.0, 0)):
        make = make_train_step(
            WEIGHTS, Fingerprint(), SGD, OPTIONS, lambda *_, p=pace: jnp.float32(p), bounded=True
        )
        state, metrics = jax.jit(make)(before, ROWS)
        assert int(metrics["skipped"]) == skipped
        moved = (state.params["network"]["w"] != before.params["network"]["w"]).any()
        assert moved == (not skipped)


@pytest.mark.parametrize("batch", [ROWS, BAD])
def test_a_bounded_optimizer_makes_the_same_step(batch):
    before, _ = one_step()
    steps = [
        jax.jit(make_train_step(WEIGHTS, Fingerprint(), SGD, OPTIONS, bounded=bounded))
        for bounded in (False, True)
    ]
    assert_same(*(step(before, batch)[0] for step in steps))


@pytest.mark.campaign
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_types_are_the_same_where_jax_has_64_bits(optimizer):
    """Otherwise a checkpoint could be read only with the setting with which it was made."""
    network = Transformer(4, size=8, depth=1, heads=2, hidden=8, initial="torch").build()
    rule, _ = {"adamw": optim.AdamW, "muon": optim.Muon}[optimizer](warmup_steps=1).build(10)
    options = dataclasses.replace(OPTIONS, batch_size=2)

    def types(seed):
        step = make_train_step(network, OBJECTIVES["md4"](), rule, options)
        state = init_state(jax.random.key(seed), network, Masking(4), rule)
        after, _ = jax.eval_shape(step, state, exact.batch_of(np.zeros((2, 8), np.int32)))
        return [[x.dtype for x in jax.tree.leaves(s)] for s in (state, after)]

    narrow = types(0)
    with jax.enable_x64(True):
        assert types(0) == narrow
    assert narrow[0] == narrow[1]


def test_a_resumed_step_is_the_same_step():
    """Draws follow state.step, so two steps are two steps whoever makes them."""
    first, _ = one_step()
    second, _ = one_step(state=first)
    assert (
        second.params["network"]["w"] - first.params["network"]["w"]
        != first.params["network"]["w"] * 1.9
    ).any()
    copied, _ = one_step(state=jax.tree.map(jnp.array, first))
    assert_same(copied, second)


@pytest.mark.parametrize("step, weight", [(0, 0.9), (8, 0.5), (100, 9 / 110), (10**6, 1e-4)])
def test_the_moving_average_warms_up(step, weight):
    """decay = min(0.9999, (1 + step) / (10 + step))."""
    out = ema_update({"w": jnp.float32(1.0)}, {"w": jnp.float32(2.0)}, jnp.int32(step), 0.9999)
    np.testing.assert_allclose(out["w"], 1.0 + weight, rtol=1e-6)


def test_the_moving_average_follows_the_new_parameters():
    state, _ = one_step()
    np.testing.assert_allclose(
        state.ema["network"]["w"], 0.9 * state.params["network"]["w"], rtol=1e-6
    )


@pytest.mark.parametrize("size", [1, 7, 49, 64])
def test_draws_are_stratified_over_the_global_batch(size):
    u, keys = draws(0, jnp.int32(5), size)
    assert u.shape == keys.shape == (size,) and ((u >= 0) & (u < 1)).all()
    if size % 2:
        gaps = np.diff(np.sort(u))
        np.testing.assert_allclose(gaps, 1 / size, atol=1e-6)
    else:
        np.testing.assert_allclose(u[::2] + u[1::2], 1.0, atol=1e-6)
        gaps = np.diff(np.sort(u[::2]))
        np.testing.assert_allclose(gaps, 2 / size, atol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 0.3, 1.0 - 2.0**-24])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 1000])
def test_strata_stay_below_one_and_have_no_noise_in_what_is_linear(offset, count):
    u = np.asarray(antithetic_times(jnp.float32(offset), count))
    assert (u >= 0).all() and (u < 1).all() and len(np.unique(u)) == count
    if count % 2 == 0:
        assert np.mean(u) == pytest.approx(0.5, abs=1e-6)


def test_strata_integrate_smooth_functions_to_second_order():
    """Of u^2, 16 mirrored strata: never off by more than (1/16)^2, plain ones are by 1/32."""
    offsets = jnp.linspace(0.0, 0.999, 50)
    squares = jax.vmap(lambda offset: jnp.mean(antithetic_times(offset, 16) ** 2))(offsets)
    assert np.abs(squares - 1 / 3).max() < 16**-2


def test_draws_follow_seed_step_and_row():
    data = lambda keys: np.asarray(jax.random.key_data(keys))  # noqa: E731
    u, keys = draws(0, jnp.int32(5), 8)
    assert len(np.unique(data(keys), axis=0)) == 8
    np.testing.assert_array_equal(data(draws(0, jnp.int32(5), 16)[1])[:8], data(keys))
    np.testing.assert_array_equal(draws(0, jnp.int32(5), 8)[0], u)
    for other in (draws(1, jnp.int32(5), 8), draws(0, jnp.int32(6), 8)):
        assert other[0][0] != u[0]
        assert len(np.unique(np.concatenate([data(other[1]), data(keys)]), axis=0)) == 16


class Echo:
    """Returns what it is given in the place of nats."""

    def __init__(self, what):
        self._what = what

    def __call__(self, denoiser, process, batch, u, keys):
        return self._what(batch, u, keys), {}


def evaluated(what, draws_per_sequence, index=0, seed=0):
    step = make_eval_step(WEIGHTS, Echo(what), draws_per_sequence, seed)
    params = {"network": {"w": jnp.zeros(BATCH)}, "process": Masking(4)}
    return np.asarray(jax.jit(step)(params, ROWS, jnp.int32(index))["nats"])


@pytest.mark.parametrize("count", [1, 3, 4])
def test_eval_draws_are_spread_within_a_sequence_and_over_the_batch(count):
    u = evaluated(lambda batch, u, keys: u, count)
    assert u.shape == (count, BATCH) and ((u >= 0) & (u < 1)).all()
    np.testing.assert_allclose(u.mean(), 0.5, atol=1e-6 if count % 2 == 0 else 0.5 / count)
    own = np.sort(u, axis=0)
    assert count == 1 or np.diff(own, axis=0).max() <= 2.0 / count + 1e-6
    if count % 2 == 0:
        np.testing.assert_allclose(own + own[::-1], 1.0, atol=1e-6)


def test_eval_draws_have_keys_of_their_own_and_repeat():
    def noise(batch, u, keys):
        return jax.vmap(jax.random.uniform)(keys)

    found = np.stack([evaluated(noise, 3, index) for index in range(3)])
    assert len(np.unique(found)) == found.size
    np.testing.assert_array_equal(evaluated(noise, 3, 1), found[1])
    assert not np.isin(evaluated(noise, 3, seed=1), found).any()


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(batch_size=0), "train.batch_size must be at least 1, not 0"),
        (dict(microbatches=-1), "train.microbatches must be at least 0, not -1"),
        (dict(seed=-1), "train.seed must lie between 0 and 4294967295, not -1"),
        (dict(seed=2**32), "train.seed must lie .* not 4294967296"),
        (dict(ema=1.0), r"train.ema must lie in \[0, 1\), not 1.0"),
    ],
)
def test_impossible_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        TrainOptions(**options)


def test_parts_of_a_bound_are_not_weighed_with_its_times():
    """The integral and diagnostics are; a reconstruction keeps its value, beside and in the sum."""
    extra = {"reconstruction": np.array([2.0, 3.0]), "masked": np.array([0.5, 0.25])}
    extra["round"] = np.array([1.0, 1.0])  # not of the sum, nor of times
    nats, found = weighed(np.array([12.0, 23.0]), extra, np.array([0.1, 2.0]))
    np.testing.assert_allclose(nats, [3.0, 43.0])
    np.testing.assert_allclose(found["reconstruction"], [2.0, 3.0])
    np.testing.assert_allclose(found["masked"], [0.05, 0.5])
    np.testing.assert_array_equal(found["round"], [1.0, 1.0])
    assert weighed(nats, extra, None) == (nats, extra)
