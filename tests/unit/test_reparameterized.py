"""Reparameterized diffusion: what DPLM's own generate draws, and DPLM's loss."""

import json

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from peer_folders import INSTANCES, peer_folder

import md4_jax
from md4_jax.objectives.reparameterized import Reparameterized as Loss
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Denoiser, UserError
from md4_jax.samplers import SAMPLERS, reparameterized
from md4_jax.samplers.grids import uniform
from md4_jax.samplers.reparameterized import Reparameterized
from md4_jax.samplers.transforms import Transform

MASK, LENGTH, ROWS = 32, 12, 4
# What DPLM never draws, and two entries that the recording kept for draws at both marks.
NEVER = (0, 1, 2, 24, 3, 31)
TOLD = json.loads((INSTANCES / "dplm_samples.json").read_text())
# The noise with which DPLM's code drew: of each step, and of what it drew again in it.
_RANDOM = np.random.RandomState(0)
FIRST = _RANDOM.random_sample((TOLD["steps"], ROWS, LENGTH, MASK))
AGAIN = _RANDOM.random_sample((TOLD["steps"], LENGTH, MASK))


def gumbel(u: np.ndarray) -> jnp.ndarray:
    u = u.astype(np.float32)
    return jnp.asarray(-np.log(-np.log(u + np.float32(1e-8)) + np.float32(1e-8)))


@pytest.fixture(scope="module")
def denoiser(tmp_path_factory):
    """The network of the recording, whose logits were multiplied by a number."""
    model = md4_jax.load(peer_folder(tmp_path_factory.mktemp("esm"), "esm"))
    own = model.experiment.network.denoiser(model.params)
    outputs = jax.jit(lambda z, t: TOLD["scale"] * own(z, t))
    return Denoiser(outputs, lambda h: h)


@pytest.mark.parametrize(
    "name, options",
    [
        ("plain", dict(resample=0.0)),
        ("prompted", dict(resample=0.0)),
        ("argmax", dict(resample=0.0, score="logit", temperature=0.0)),
        # DPLM counts among its tokens both marks, where the recording has tokens of their own.
        ("resampled", dict(resample=TOLD["ratio"] * (LENGTH + 2) / LENGTH)),
    ],
)
@pytest.mark.cases(2)
def test_each_step_is_that_of_dplm(name, options, denoiser, monkeypatch):
    steps, calls = TOLD["steps"], []

    def noise(keys, logits):
        calls.append(None)
        return gumbel(FIRST[now] if len(calls) == 1 else AGAIN[now][None])

    monkeypatch.setattr(reparameterized, "gumbel", noise)
    transform = Transform(temperature=options.pop("temperature", 1.0), excluded=NEVER)
    step, process = Reparameterized(transform=transform, **options), Masking(MASK)
    given = np.array(TOLD["given"] if name == "prompted" else [MASK] * LENGTH)
    z = np.tile(given, (ROWS, 1))
    chain = exact.chain_of(z, z != MASK)
    redrawn, left = np.zeros(ROWS, int), []
    for now in range(steps):
        calls.clear()
        times = (jnp.float32(1 - (now + 1) / steps), jnp.float32(1 - now / steps))
        before = chain
        chain = step(denoiser, process, chain, *times, exact.keys_for(0, ROWS))
        assert np.array_equal(chain.z, TOLD[name]["states"][now]), now
        redrawn += np.asarray(chain.evaluations - before.evaluations) - 1
        left.append((np.asarray(before.z) != MASK) & (np.asarray(chain.z) == MASK))
        assert np.array_equal(chain.confidence == 0, chain.z == MASK)
    assert redrawn.sum() == sum(count for _, count in TOLD[name]["redrawn"])
    # The recordings would tell an order in which tokens stay from this one.
    assert np.any(left) or name == "argmax"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ancestral", "confidence", "remask"])
@pytest.mark.cases(2)
def test_what_is_excluded_is_never_drawn(name):
    logits = jnp.asarray([9.0, 0.0, 0.0])
    table = Denoiser(lambda z, t: jnp.tile(logits, (*z.shape, 1)), lambda h: h)
    step = SAMPLERS[name](transform=Transform(excluded=(0,)))
    z, _ = exact.drawn(table, Masking(3), step, uniform(3), exact.keys_for(0, 50))
    assert np.unique(z).tolist() == [1, 2]


@pytest.mark.parametrize("keys", [{}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.5}])
def test_excluded_symbols_leave_the_others_as_they_are(keys):
    logits = np.array([5.0, 1.0, 2.0, -1.0])
    found = Transform(**keys, excluded=(0, 3))(jnp.asarray(logits))
    np.testing.assert_array_equal(found[1:3], Transform(**keys)(jnp.asarray(logits[1:3])))
    assert np.isneginf(found[jnp.array([0, 3])]).all()


def test_the_score_is_that_of_what_was_drawn():
    """Of a token with probability 0.8 or 0.2, both drawn often."""
    logits = jnp.log(jnp.array([0.8, 0.2]))[None, None]
    keys, many = exact.keys_for(1, 1), jnp.tile(logits, (1, 500, 1))
    tokens, score = Reparameterized("probability")._drawn(keys, many, Transform())
    assert 50 < tokens.sum() < 150
    np.testing.assert_allclose(jnp.exp(score), jnp.where(tokens == 0, 0.8, 0.2), rtol=1e-5)


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(score="margin"), "sample.score must be one of noised, probability, logit, not"),
        (dict(resample=1.5), r"sample.resample must lie in \[0, 1\], not 1.5"),
    ],
)
def test_impossible_options_of_the_sampler(options, said):
    with pytest.raises(UserError, match=said):
        Reparameterized(**options)


def enumerated(loss, x: np.ndarray) -> float:
    """The loss of DPLM's equation: steps, patterns and masks one after another."""
    table, steps, total = exact.table_logits(2, 3), loss.timesteps, 0.0
    for i in range(1, steps + 1):
        weight = 1 - (i - 1) / steps if loss.weights == "linear" else 1.0
        for pattern in exact.patterns(3):
            z = np.where(pattern, 2, x)
            logits = table[int(z @ [9, 3, 1])]
            nats = np.log(np.exp(logits).sum(axis=1)) - logits[range(3), x]
            chance = (i / steps) ** pattern.sum() * (1 - i / steps) ** (3 - pattern.sum())
            total += weight * chance * nats[pattern].sum() / steps
    return total / ((steps + 1) / (2 * steps))


@pytest.mark.parametrize("loss", [Loss(4), Loss(3, "constant")], ids=["linear", "constant"])
def test_the_loss_is_that_of_all_steps_and_masks(loss):
    x, process = exact.sequences(2, 3), Masking(2)
    denoiser, steps = exact.denoiser_of(exact.table_logits(2, 3)), 1 + np.arange(loss.timesteps)
    loss_at = jax.jit(exact.bind(loss, denoiser, process))
    found = exact.expected(loss_at, 2, x, steps, steps / loss.timesteps).mean(axis=1)
    np.testing.assert_allclose(found, [enumerated(loss, row) for row in x], rtol=1e-5)


def test_a_draw_of_the_loss():
    """Uniform logits: i is 1 + floor(T u), all is masked at T, and a mask costs log V."""
    denoiser = Denoiser(lambda z, t: jnp.zeros((*z.shape, 2)), lambda h: h)
    u, batch = jnp.asarray([0.0, 0.26, 0.6, 0.999999]), exact.batch_of(np.zeros((4, 400)))
    nats, extra = Loss(4)(denoiser, Masking(2), batch, u, exact.keys_for(2, 4))
    shares = np.asarray(extra["masked"])
    assert np.all(np.abs(shares - [0.25, 0.5, 0.75, 1.0]) < 4 * 0.5 / 20)
    expected = np.array([1.0, 0.75, 0.5, 0.25]) / 0.625 * shares * 400 * np.log(2)
    np.testing.assert_allclose(nats, expected, rtol=1e-5)


def test_only_tokens_that_count_are_masked():
    denoiser = Denoiser(lambda z, t: jnp.zeros((*z.shape, 2)), lambda h: h)
    batch = exact.batch_of(np.zeros((2, 6)))
    batch = batch._replace(loss_mask=jnp.arange(6)[None] < jnp.asarray([[6], [2]]))
    nats, extra = Loss(1)(denoiser, Masking(2), batch, jnp.zeros(2), exact.keys_for(2, 2))
    np.testing.assert_allclose(extra["masked"], [1.0, 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(nats, np.array([6, 2]) * np.log(2), rtol=1e-6)


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(timesteps=0), "objective.timesteps must be at least 1, not 0"),
        (dict(weights="bound"), "objective.weights must be linear or constant, not 'bound'"),
    ],
)
def test_impossible_options_of_the_loss(options, said):
    with pytest.raises(UserError, match=said):
        Loss(**options)
