"""How many masks `confidence` reveals in a step, which ones, and what temperature does to it."""

import itertools

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest

from md4_jax.processes.masking import Masking
from md4_jax.protocols import Denoiser, Prompt, UserError
from md4_jax.samplers.confidence import Confidence
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.loop import no_prompt, sample
from md4_jax.samplers.orders import AnyOrder
from md4_jax.samplers.transforms import Transform
from tests import exact

# Probabilities of the more likely of two symbols, one position each.
SURE = np.array([0.6, 0.99, 0.55, 0.9, 0.7, 0.95, 0.52, 0.8])
ENTROPY = -(SURE * np.log(SURE) + (1 - SURE) * np.log(1 - SURE))


def denoiser() -> Denoiser:
    logits = jnp.log(jnp.asarray(np.stack([SURE, 1 - SURE], axis=-1)))
    return Denoiser(lambda z, t: jnp.broadcast_to(logits, (*z.shape, 2)), lambda h: h)


def first_step(step, s: float = 0.99, rows: int = 4) -> list[set[int]]:
    """The positions that each row reveals in a step from t = 1 to s, at which the grid asks for
    none of eight."""
    chain, times = exact.chain_of(np.full((rows, 8), 2)), (jnp.float32(s), jnp.float32(1.0))
    call = jax.jit(lambda keys: step(denoiser(), Masking(2), chain, *times, keys).z)
    return [set(np.flatnonzero(row != 2)) for row in np.asarray(call(exact.keys_for(0, rows)))]


@pytest.mark.parametrize("temperature", [0.0, 0.1, 1.0, 2.0])
@pytest.mark.parametrize("score", ["margin", "entropy"])
@pytest.mark.cases(4)
def test_temperature_does_not_change_the_order(score, temperature):
    step = Confidence(score, per_step=3, transform=Transform(temperature))
    assert first_step(step) == [{1, 3, 5}] * 4


def test_without_temperature_the_likeliest_tokens_come_first():
    """At temperature 0 the probability of the likeliest token decides, not 1 at every position."""
    step = Confidence(per_step=3, transform=Transform(0.0))
    assert first_step(step) == [{1, 3, 5}] * 4


@pytest.mark.parametrize("score", ["probability", "margin", "entropy"])
def test_a_temperature_of_positions_draws_them_without_replacement(score):
    """Two of six masks with odds exp(c / 0.2): ordered pairs enumerated, n = 20,000, p > 1e-4.

    The odds do not depend on the time, and Dream draws these pairs by torch.multinomial.
    """
    odds = np.exp(dict(probability=SURE, margin=2 * SURE - 1, entropy=-ENTROPY)[score] / 0.2)
    odds[:2] = 0.0  # no masks
    ordered = odds[:, None] * odds / odds.sum() / (odds.sum() - odds)[:, None]
    law = np.triu(ordered + ordered.T, 1)
    step = Confidence(score, per_step=2, position_temperature=0.2, transform=Transform(0.0))
    start = np.tile([0, 0, 2, 2, 2, 2, 2, 2], (laws.N, 1))
    z = laws.after_step(step, denoiser(), Masking(2), start, 0.5, 0.6)
    rows, places = np.nonzero(z != start)
    assert (np.bincount(rows) == 2).all()
    first, second = places.reshape(-1, 2).T
    assert laws.accepted(np.bincount(8 * first + second, minlength=64), law)


@pytest.mark.parametrize("score", ["probability", "margin"])
@pytest.mark.parametrize("late, first", [((), 3), ((2,), 1)])
def test_late_symbols_come_last(score, late, first):
    """Their share counts nowhere: of the first two, 0.5 / 0.6 is then more than 0.6 / 0.99."""
    chances = jnp.asarray([[0.6, 0.39, 0.01], [0.5, 0.1, 0.4], [0.3, 0.001, 0.699], [0.01, 0, 1]])
    logits = jnp.log(chances + 1e-9)
    fixed = Denoiser(lambda z, t: jnp.broadcast_to(logits, (*z.shape, 3)), lambda h: h)
    step = Confidence(score, per_step=1, transform=Transform(0.0, postponed=late))
    chain = exact.chain_of(np.full((2, 4), 3))
    z = np.asarray(step(fixed, Masking(3), chain, 0.5, 0.6, exact.keys_for(0, 2)).z)
    assert [np.flatnonzero(row != 3).tolist() for row in z] == [[first]] * 2


@pytest.mark.parametrize(
    "limit, places", [(0.97, {1}), (0.92, {1, 5}), (0.75, {1, 3, 5, 7}), (0.999, {1})]
)
def test_a_threshold_reveals_what_is_as_likely(limit, places):
    """One at least."""
    step = Confidence(rule="threshold", limit=limit, transform=Transform(0.0))
    assert first_step(step) == [places] * 4


@pytest.mark.parametrize("size", [0, 4])
def test_masks_whose_token_has_probability_0_are_revealed_too(size):
    """Nearly every draw at this heat is such a token, and the logarithm of 0 would not tell masks
    from other positions. A compiled program does not take it: it leaves out the log of an exp."""
    logits = jnp.full((6, 40), -200.0).at[:, 0].set(0.0)
    hot = Denoiser(lambda z, t: jnp.broadcast_to(logits, (*z.shape, 40)), lambda h: h)
    chain = exact.chain_of(np.tile([0, 1, 40, 40, 40, 40], (5, 1)))
    step = Confidence(per_step=2, transform=Transform(1e6), semi_autoregressive=size)
    with jax.disable_jit():
        z = np.asarray(step(hot, Masking(40), chain, 0.5, 0.6, exact.keys_for(0, 5)).z)
    assert ((z == 40).sum(axis=1) == 2).all() and (z[:, :2] == [0, 1]).all()


def test_a_threshold_of_margins():
    """Margins are 2 p - 1: 0.98, 0.9, 0.8, 0.6, ..."""
    assert first_step(Confidence("margin", rule="threshold", limit=0.85)) == [{1, 5}] * 4


@pytest.mark.parametrize(
    "limit, places",
    # (k + 1) (1 - c_k): 0.02, 0.15, 0.4, 1.0, 1.8, 2.8, 3.6, 4.3
    [(0.01, {1}), (0.16, {1, 5}), (0.99, {1, 3, 5}), (1.01, {1, 3, 5, 7}), (5.0, set(range(8)))],
)
def test_a_factor_asks_more_of_more_tokens(limit, places):
    step = Confidence(rule="factor", limit=limit, transform=Transform(0.0))
    assert first_step(step) == [places] * 4


@pytest.mark.parametrize("limit", [0.0, 0.05, 0.06, 0.3, 1.0, 10.0])
@pytest.mark.parametrize("score", ["margin", "entropy"])
@pytest.mark.cases(4)
def test_a_budget_of_nats(score, limit):
    """The largest set of the surest whose entropies without the largest fit into the budget."""
    best = np.argsort(ENTROPY)
    fits = [k for k in range(1, 9) if np.sum(ENTROPY[best[: k - 1]]) <= limit]
    step = Confidence(score, rule="entropy", limit=limit)
    assert first_step(step) == [set(best[: max(fits)])] * 4


def test_the_grid_is_the_least():
    """At s = 0.5 four of eight must be shown, however high the threshold."""
    step = Confidence(rule="threshold", limit=0.999, transform=Transform(0.0))
    assert first_step(step, s=0.5) == [{1, 3, 5, 7}] * 4


@pytest.mark.parametrize("steps", [2, 8])
def test_sure_tokens_save_evaluations(steps):
    """Four are likelier than 0.75; of the others one a step, or all in the second of two."""
    step = Confidence(rule="threshold", limit=0.75, transform=Transform(0.0))
    chain, _ = sample(
        denoiser(), Masking(2), step,
        grid=uniform(steps), keys=exact.keys_for(0, 3), prompt=no_prompt(3, 8),
    )  # fmt: skip
    assert (np.asarray(chain.z) == 0).all()
    assert (np.asarray(chain.evaluations) == (2 if steps == 2 else 5)).all()


def orders(step, given=(0, 1), steps: int = 6) -> np.ndarray:
    """The step at which each of eight positions is shown, in 50 rows; two of them are given."""
    mask = np.isin(np.arange(8), given)
    prompt = Prompt(np.ones((50, 8), np.int32), np.tile(mask, (50, 1)))
    _, frames = sample(
        denoiser(), Masking(2), step,
        grid=uniform(steps), keys=exact.keys_for(1, 50), prompt=prompt, trace=50,
    )  # fmt: skip
    return np.argmax(np.asarray(frames.z) != 2, axis=0)


@pytest.mark.parametrize(
    "step, shown",
    [
        # Blocks of three behind the prompt: positions 2, 3, 4 and 5, 6, 7.
        (Confidence("margin", semi_autoregressive=3), [3, 1, 2, 4, 6, 5]),
        (Confidence("margin", semi_autoregressive=6), [5, 2, 4, 1, 6, 3]),
        (Confidence("margin", rule="threshold", limit=0.3, semi_autoregressive=3),
         [2, 1, 1, 3, 4, 3]),
        (AnyOrder("left_to_right", 0, semi_autoregressive=3), [1, 2, 3, 4, 5, 6]),
    ],
)  # fmt: skip
@pytest.mark.cases(2)
def test_blocks_are_filled_from_left_to_right(step, shown):
    np.testing.assert_array_equal(orders(step)[:, 2:], np.tile(shown, (50, 1)))


def test_a_random_order_within_blocks():
    """All six orders of the first three positions occur, and none of the other three before."""
    found = orders(AnyOrder("random", semi_autoregressive=3))[:, 2:]
    assert (found[:, :3].max(axis=1) < found[:, 3:].min(axis=1)).all()
    assert {tuple(row) for row in found[:, :3]} == set(itertools.permutations((1, 2, 3)))


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(rule="sure"), "sample.rule must be one of count, threshold, factor, entropy, not"),
        (dict(limit=-0.1), "sample.limit must not be negative, not -0.1"),
        (dict(semi_autoregressive=-1), "sample.semi_autoregressive must not be negative, not -1"),
        (dict(score="entropy", rule="factor"), "set sample.score='probability' or 'margin'"),
        (dict(rule="entropy", per_step=2), "set sample.per_step=0"),
        (dict(rule="entropy", noise=0.5), "sample.noise=0.5 is only for sample.rule='count'"),
        (
            dict(rule="entropy", position_temperature=0.5),
            "sample.position_temperature=0.5 is only for sample.rule='count', not 'entropy'",
        ),
        (
            dict(noise=0.1, position_temperature=0.5),
            "sample.noise=0.1 and sample.position_temperature=0.5 both change the order",
        ),
        (dict(position_temperature=-1.0), "sample.position_temperature must not be negative"),
        (dict(rule="threshold"), "must be above 0 and at most 1, such as 0.9, not 0.0"),
        (
            dict(rule="threshold", limit=90.0),
            "must be above 0 and at most 1, such as 0.9, not 90.0",
        ),
        (dict(limit=0.9), "sample.limit=0.9 has no effect with sample.rule='count': set"),
    ],
)
def test_impossible_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Confidence(**options)


def test_blocks_from_the_right_are_refused():
    with pytest.raises(UserError, match="sample.order must not be 'right_to_left'"):
        AnyOrder("right_to_left", semi_autoregressive=4)


def test_rules_tell_the_network_the_share_of_masks():
    """Three of the six positions behind a prompt are told 0.5, the time of that share; by the grid
    all are told its time."""
    z = np.array([[0, 0, 0, 0, 0, 2, 2, 2], [0, 0, 2, 2, 2, 2, 2, 2]])
    chain = exact.chain_of(z, np.tile(np.arange(8) < 2, (2, 1)))
    for step, told in (
        (Confidence(), [0.9, 0.9]),
        (Confidence(per_step=2), [0.5, 1.0]),
        (Confidence(rule="threshold", limit=0.9), [0.5, 1.0]),
    ):
        found = step.time(Masking(2), chain, jnp.float32(0.9))
        np.testing.assert_allclose(found, told, atol=1e-6)
    schedule = AnyOrder("left_to_right", 2).schedule(
        Masking(2), chain, uniform(4), exact.keys_for(0, 2)
    )
    np.testing.assert_allclose(schedule.time[0, 5:], [0.5, 0.5, 1 / 6], atol=1e-6)
    np.testing.assert_allclose(schedule.time[1, 2:], [1, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3], atol=1e-6)
