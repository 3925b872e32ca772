"""Several updates with each set of drawn texts: ratios, clips, and the model that drew."""

import exact
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from noisy_blocks import in_blocks
from tiny_networks import built

from md4_jax.evals.rollouts import advantages
from md4_jax.objectives.policy import Behaviour, Policy
from md4_jax.options import TrainOptions
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Batch, UserError
from md4_jax.training.step import init_state, make_train_step

NOW, THEN = np.array([0.4, -0.3, 0.9]), np.array([0.1, 0.5, -0.2])
OPEN = dict(clip_below=1.0, clip_above=1e9)


def law_of(logits):
    return np.exp(logits) / np.exp(logits).sum()


def batch_of(tokens, advantage):
    tokens, advantage = np.asarray(tokens, np.int32), np.asarray(advantage, np.float32)
    return Batch(tokens, np.ones(tokens.shape, bool), {}, reward=advantage, advantage=advantage)


def beside(now, then, update):
    return now._replace(behaviour=Behaviour(then, jnp.int32(update)))


def denoiser(logits, then, update):
    """Logits of each row [B, V], whatever is seen, beside those of the model that drew."""
    now, before = (
        exact.of_outputs(lambda z, t, of=of: jnp.broadcast_to(of[:, None], (*z.shape, 3)))
        for of in (logits, then)
    )
    again = lambda n: denoiser(*(jnp.repeat(x, n, axis=0) for x in (logits, then)), update)  # noqa: E731
    return beside(now, before, update)._replace(rebind=again)


def called(objective, batch, then=THEN, update=1):
    """(loss [B], diagnostics, its gradient [B, V]) of texts of one token, where L = -log p."""
    rows = len(batch.tokens)
    u, keys = (jnp.arange(rows) + 0.5) / rows, exact.keys_for(0, rows)

    def loss(logits):
        then_BxV = jnp.broadcast_to(jnp.asarray(then), (rows, 3))
        nats, extra = objective(denoiser(logits, then_BxV, update), Masking(3), batch, u, keys)
        return jnp.sum(nats), (nats, extra)

    each = jnp.broadcast_to(jnp.asarray(NOW), (rows, 3))
    slope, (nats, extra) = jax.jit(jax.grad(loss, has_aux=True))(each)
    return np.asarray(nats), extra, np.asarray(slope, np.float64)


def test_texts_of_an_earlier_model_have_the_gradient_of_the_present_one():
    """Unclipped, the mean over what the earlier one draws: p_k (A_k - sum p A), by enumeration."""
    better = np.array([1.0, -2.0, 0.5])
    batch = batch_of(np.arange(3)[:, None], better)
    _, extra, slope = called(Policy(updates=2, **OPEN), batch)
    p, q = law_of(NOW), law_of(THEN)
    np.testing.assert_allclose(-q @ slope, p * (better - p @ better), rtol=2e-5)
    np.testing.assert_allclose(extra["ratio"], p / q, rtol=2e-6)
    np.testing.assert_allclose(extra["ratio_spread"], np.abs(p / q - 1), rtol=2e-5)
    assert (extra["clipped"] == 0).all()
    # The mean gradient without ratios is another one.
    _, _, plain = called(Policy(), batch)
    assert np.abs(-q @ plain - p * (better - p @ better)).max() > 0.05


@pytest.mark.parametrize(
    "ratio, better, loss, is_clipped",
    [
        (1.5, 1.0, -1.1, True),  # a better text that is likelier by enough
        (1.5, -1.0, 1.5, False),  # a worse one that became likelier
        (0.5, 1.0, -0.5, False),  # a better one that became less likely
        (0.5, -1.0, 0.7, True),  # a worse one that is less likely by enough
        (1.05, 2.0, -2.1, False),
        (0.8, -2.0, 1.6, False),
    ],
)
@pytest.mark.cases(3)
def test_a_ratio_that_has_gone_far_enough_teaches_no_more(ratio, better, loss, is_clipped):
    """With 1 - 0.3 and 1 + 0.1, by hand; what goes the wrong way is mended however far it is."""
    p = law_of(NOW)
    then = np.log(p * [1 / ratio, 1.0, 1.0])
    then[1:] += np.log((1 - p[0] / ratio) / (1 - p[0]))  # so that they add up to 1
    objective = Policy(updates=2, clip_below=0.3, clip_above=0.1)
    nats, extra, slope = called(objective, batch_of([[0]], [better]), then)
    np.testing.assert_allclose(extra["ratio"], ratio, rtol=1e-5)
    np.testing.assert_allclose(nats, loss, rtol=1e-5)
    assert extra["clipped"][0] == is_clipped
    expected = 0.0 if is_clipped else ratio * better * (p - [1, 0, 0])
    np.testing.assert_allclose(slope[0], expected * np.ones(3), rtol=2e-5, atol=1e-7)


def test_the_first_update_is_that_of_a_set_used_once():
    """Its ratio is 1, whatever is beside it, and even a clip of nothing leaves its gradient."""
    batch = batch_of(np.arange(3)[:, None], [1.0, -2.0, 0.5])
    for clip in (0.2, 0.0):
        objective = Policy(updates=4, kl=0.0, clip_below=clip, clip_above=clip)
        nats, extra, slope = called(objective, batch, update=0)
        assert (extra["ratio"] == 1).all() and (extra["clipped"] == 0).all()
        assert (nats == -batch.advantage).all()
        np.testing.assert_allclose(slope, called(Policy(), batch)[2], rtol=1e-6)


def test_a_ratio_is_the_geometric_mean_of_the_counted_tokens():
    """Of two tokens after a prompt: 1/2 and 1/5 now, 1/4 and 1/10 before; and of none."""
    now = (jnp.array([0.5, 0.3, 0.2]), jnp.array([0.5, 0.3, 0.2]), jnp.array([0.1, 0.7, 0.2]))
    then = (jnp.array([0.1, 0.8, 0.1]), jnp.array([0.25, 0.5, 0.25]), jnp.array([0.2, 0.7, 0.1]))

    def model(chances):
        def law(clean):
            p = chances[clean.shape[1]]
            return exact.of_outputs(lambda z, t: jnp.broadcast_to(jnp.log(p), (*z.shape, 3)))

        return in_blocks(law)

    batch = batch_of([[1, 0, 2]] * 4, [3.0] * 4)
    counted = np.array([[False, True, True]] * 3 + [[False] * 3])
    batch = batch._replace(loss_mask=counted)
    u, keys = (jnp.arange(4) + 0.5) / 4, exact.keys_for(2, 4)
    objective = Policy(block=1, updates=2, draws=3, **OPEN)
    loss, extra = objective(beside(model(now), model(then), 1), Masking(3), batch, u, keys)
    np.testing.assert_allclose(extra["ratio"], [2.0, 2.0, 2.0, 1.0], rtol=1e-5)
    np.testing.assert_allclose(loss[:3], -2 * 3.0 * 2.0, rtol=1e-5)


def test_both_models_see_the_same_noise():
    """Bounds differ between draws, and the ratio of a model to itself does not."""
    rows, model = 64, exact.denoiser_of(exact.table_logits(3, 3), time=0.5)
    batch = batch_of(np.repeat([[0, 2, 1]], rows, axis=0), np.ones(rows))
    u, keys = (jnp.arange(rows) + 0.5) / rows, exact.keys_for(1, rows)
    objective = jax.jit(
        lambda o: o(beside(model, model, 3), Masking(3), batch, u, keys), static_argnums=0
    )
    assert np.std(objective(Policy(draws=1))[0]) > 0.1
    extra = objective(Policy(draws=1, updates=4))[1]
    np.testing.assert_allclose(extra["ratio"], 1.0, rtol=1e-6)


def trained(rate, steps, objective, **train):
    """States before each of the steps of one network with dropout, and the metrics after them."""
    network, params = built(vocab_size=3, dropout=0.3)
    optimizer, kept = optax.sgd(rate), objective.kl > 0
    state = init_state(
        jax.random.key(0), network, Masking(3), optimizer, taught=kept, behaving=True
    )
    # A fresh head is zero, and its model does not depend on the noise.
    whole = state.params | {"network": params}
    state = state._replace(params=whole, ema=whole, teacher=whole if kept else ())
    step = jax.jit(make_train_step(network, objective, optimizer, TrainOptions(9, 8, **train)))
    batch = batch_of(np.arange(48).reshape(8, 6) % 3, [1.0, -1.0] * 4)
    states, found = [state], []
    for _ in range(steps):
        state, metrics = step(state, batch)
        states.append(state)
        found.append({name: float(value) for name, value in metrics.items()})
    return states, found


@pytest.mark.slow
def test_the_model_before_the_first_update_stays_beside_the_others():
    """Three updates with each set; the teacher of kl is that of the start throughout."""
    states, found = trained(0.5, 5, Policy(updates=3, kl=0.1))
    for before, first in ((1, 0), (2, 0), (3, 0), (4, 3), (5, 3)):
        jax.tree.map(np.testing.assert_array_equal, states[before].behaviour, states[first].params)
        jax.tree.map(np.testing.assert_array_equal, states[before].teacher, states[0].params)
    spreads = [metrics["ratio_spread"] for metrics in found]
    assert spreads[0] == spreads[3] == 0.0 and min(spreads[1], spreads[2], spreads[4]) > 1e-4


@pytest.mark.campaign
def test_dropout_is_the_same_for_both():
    """A model that does not learn has ratios of 1 at every update."""
    _, found = trained(0.0, 3, Policy(updates=3), microbatches=2)
    assert all(metrics["ratio_spread"] < 1e-6 for metrics in found)


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"updates": 0}, "objective.updates must be at least 1, not 0"),
        ({"clip_below": 1.5}, "objective.clip_below must be between 0 and 1, not 1.5"),
        ({"clip_below": -0.1}, "objective.clip_below must be between 0 and 1, not -0.1"),
        ({"clip_above": -0.1}, "objective.clip_above must not be negative, not -0.1"),
    ],
)
def test_impossible_options(keys, said):
    with pytest.raises(UserError, match=said):
        Policy(**keys)


def test_the_work_of_a_step_counts_the_model_that_drew():
    assert Policy(draws=3).teacher_calls == 0 and Policy(draws=3, updates=2).teacher_calls == 3
    assert Policy(draws=3, updates=2, kl=0.1).teacher_calls == 6


def test_four_updates_get_more_reward_from_as_many_texts():
    """The expected reward p r of one token after 6 sets of 8 texts, over 200 seeds."""
    rewards, sets, group, seeds = np.array([0.0, 0.0, 1.0]), 6, 8, 200

    def learned(updates, seed):
        rng, logits, objective = np.random.default_rng(seed), jnp.zeros(3), Policy(updates=updates)
        for _ in range(sets):
            then = logits
            p = law_of(np.asarray(logits, np.float64))
            tokens = rng.choice(3, (group, 1), p=p)
            better = advantages(rewards[tokens[:, 0]], group, normalised=True)
            for update in range(updates):
                logits -= 0.3 * slope_of(objective, logits, then, tokens, better, update)
        return law_of(np.asarray(logits, np.float64)) @ rewards

    u, keys = (jnp.arange(group) + 0.5) / group, exact.keys_for(0, group)

    def slope_of(objective, logits, then, tokens, better, update):
        return programs[objective.updates](logits, then, tokens, better, update)

    def program(objective):
        def loss(logits, then, tokens, better, update):
            batch = Batch(tokens, jnp.ones(tokens.shape, bool), {}, reward=better, advantage=better)
            each = (jnp.broadcast_to(x, (group, 3)) for x in (logits, then))
            return jnp.mean(objective(denoiser(*each, update), Masking(3), batch, u, keys)[0])

        return jax.jit(jax.grad(loss))

    programs = {n: program(Policy(updates=n)) for n in (1, 4)}
    one, four = (np.array([learned(n, seed) for seed in range(seeds)]) for n in (1, 4))
    gain = four - one
    assert gain.mean() > 8 * gain.std() / np.sqrt(seeds)
