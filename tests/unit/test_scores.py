"""Scores of texts equal the bounds by enumeration of masks and states, within their errors."""

import itertools
import math

import jax
import numpy as np
import pytest
from peer_folders import peer_folder

import md4_jax
from md4_jax.evals.likelihood import LikelihoodBound
from md4_jax.evals.texts import Row, bucket, score_rows
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.protocols import UserError

pytestmark = pytest.mark.slow

ERRORS = 4  # standard errors


def costs(logits: np.ndarray, x: np.ndarray) -> np.ndarray:
    """-log softmax(logits)[x] in float64: [B, L]."""
    logits = logits.astype(np.float64)
    total = np.log(np.exp(logits).sum(axis=-1))
    return (
        total
        - np.take_along_axis(logits, np.broadcast_to(x, logits.shape[:2])[..., None], -1)[..., 0]
    )


def by_masks(model, x: np.ndarray, nodes: int = 40) -> float:
    """int_0^1 du / u sum over masks of u^k (1 - u)^(L - k) costs at masks, u = 1 - alpha."""
    patterns = np.array(list(itertools.product([False, True], repeat=len(x))))[1:]
    points, weights = np.polynomial.legendre.leggauss(nodes)
    u, weights = (points + 1) / 2, weights / 2
    z = np.where(patterns, model.domain.vocab_size, x)
    t = np.asarray(model.experiment.process.schedule.inverse(u))
    logits = model.logits(np.tile(z, (nodes, 1)), np.repeat(t, len(z)))
    each = np.where(np.tile(patterns, (nodes, 1)), costs(logits, x), 0.0).sum(axis=1)
    k = patterns.sum(axis=1)
    chance = u[:, None] ** k * (1 - u[:, None]) ** (len(x) - k)
    return float(np.sum(weights[:, None] * chance / u[:, None] * each.reshape(nodes, -1)))


def by_states(model, x: np.ndarray, nodes: int = 60) -> float:
    """Score entropy over all states of uniform noise and its two ends, by quadrature over t."""
    symbols, schedule = model.domain.vocab_size, model.experiment.process.schedule
    z = np.array(list(itertools.product(range(symbols), repeat=len(x))))
    points, weights = np.polynomial.legendre.leggauss(nodes)
    # t = s^2 puts more points near 0, where the integrand has a logarithm.
    s = (points + 1) / 2
    t, weights = s**2, weights * s
    alpha = np.asarray(schedule.alpha(t), np.float64)
    rate = -np.asarray(schedule.dalpha(t), np.float64) / alpha
    at = np.repeat(t, len(z)).astype(np.float32)
    tiled = np.tile(z, (nodes, 1))
    logits = model.logits(tiled, at)
    log_s = np.asarray(model.experiment.process.log_score(logits, tiled, at), np.float64)
    same = alpha + (1 - alpha) / symbols
    total = 0.0
    for number in range(nodes):
        kept, moved = same[number], (1 - alpha[number]) / symbols
        chance = np.where(z == x, kept, moved)
        log_score = log_s[number * len(z) : (number + 1) * len(z)]
        q = np.where(np.arange(symbols) == x[None, :, None], kept, moved)
        r = q / chance[..., None]
        term = np.exp(log_score) - r * log_score + r * (np.log(r) - 1)
        others = np.arange(symbols) != z[..., None]
        inside = np.where(others, term, 0.0).sum(axis=(1, 2)) * rate[number] / symbols
        total += weights[number] * np.sum(chance.prod(axis=1) * inside)
    return total + len(x) * sum(ends(schedule, symbols))


def ends(schedule, symbols: int) -> tuple[float, float]:
    """Nats of the prior and of the reconstruction, for each token."""
    found = []
    for t in (1.0, 0.0):
        alpha = float(schedule.alpha(np.float32(t)))
        q = np.full(symbols, (1 - alpha) / symbols)
        q[0] += alpha
        found.append(float(np.sum(np.where(q > 0, q * np.log(np.where(q > 0, q, 1.0)), 0.0))))
    return found[0] + math.log(symbols), -found[1]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """name -> the model, for sequences of four tokens."""
    directory, found = tmp_path_factory.mktemp("peers"), {}

    def load(name):
        if name not in found:
            found[name] = md4_jax.load(peer_folder(directory, name), {"data.length": 4})
        return found[name]

    return load


def agree(scores, expected) -> None:
    assert np.all(scores.nats_se < 0.06 * scores.nats)
    assert np.all(np.abs(scores.nats - expected) < ERRORS * scores.nats_se), (scores, expected)


@pytest.mark.parametrize("name", ["mdlm", "sedd_absorb", "md4_text"])
@pytest.mark.cases(1)
def test_masked_models(name, loaded):
    """Texts that are shorter and longer than the model in one call."""
    model = loaded(name)
    texts = ["abcd", "kc", "abcdkcjiab"]
    exact = {
        text: by_masks(model, model.domain.encode(text)) for text in ("abcd", "kc", "kcji", "ab")
    }
    scores = model.score(texts, draws=256)
    agree(scores, [exact["abcd"], exact["kc"], exact["abcd"] + exact["kcji"] + exact["ab"]])
    assert scores.tokens.tolist() == scores.bytes.tolist() == [4, 2, 10]
    assert not scores.exact and scores.objective == "AnyOrder"
    np.testing.assert_allclose(scores.bits_per_token, scores.nats / math.log(2) / [4, 2, 10])


@pytest.mark.parametrize("name", ["sedd_uniform", "duo"])
@pytest.mark.cases(1)
def test_models_of_uniform_noise(name, tmp_path):
    """Noise at t = 0 keeps the variance finite: rare states cost a random network much."""
    noise = {"name": "geometric", "minimum": 0.1, "maximum": 20.0}
    changes = {f"process.schedule.{key}": value for key, value in noise.items()}
    model = md4_jax.load(peer_folder(tmp_path, name), {"data.length": 4, **changes})
    texts = ["ak", "f"]
    exact = [by_states(model, model.domain.encode(text)) for text in texts]
    agree(model.score(texts, draws=1024), exact)


@pytest.mark.campaign
def test_blocks_of_one_without_time_are_exact(loaded, tmp_path):
    model = md4_jax.load(peer_folder(tmp_path, "bd3lm", block_size=1), {"data.length": 4})
    scores = model.score(["abcd", "abc"])
    x = model.domain.encode("abcd").astype(np.int32)[None]
    denoiser = model.experiment.network.denoiser(model.params)
    masks, t = np.full((1, 4), 11), np.zeros((1, 4))
    h = jax.jit(lambda z, x: denoiser.unembed(denoiser.blocks.features(z, t, x, 1)))(masks, x)
    chain = costs(np.asarray(h), x)[0]
    np.testing.assert_allclose(scores.nats, [chain.sum(), chain[:3].sum()], rtol=1e-5)
    assert scores.exact and scores.nats_se.tolist() == [0.0, 0.0]


def test_the_error_is_that_of_independent_draws(loaded):
    """The spread of many estimates is what each of them says."""
    found = [loaded("mdlm").score("abcd", draws=16, seed=seed) for seed in range(40)]
    spread = np.std([score.nats[0] for score in found], ddof=1)
    said = np.sqrt(np.mean([score.nats_se[0] ** 2 for score in found]))
    assert 0.6 < said / spread < 1.6


class Known:
    """Estimator of which each call says the next of these numbers, for every row and draw."""

    def __init__(self, *numbers):
        self.numbers, self.asked = iter(numbers), []

    def nats(self, params, batch, index):
        self.asked.append(index)
        return {"nats": np.full((2, len(batch.tokens)), next(self.numbers))}


def test_the_error_of_two_estimates_is_half_of_their_distance(loaded, monkeypatch):
    """Two batches, the first of two texts; each call has a number of noise of its own."""
    known, model = Known(3.0, 7.0, 2.0, 2.5), loaded("mdlm")
    monkeypatch.setattr(LikelihoodBound, "estimator", lambda *_: known)
    rows = [Row(i, np.zeros(4, np.int32), np.ones(4, bool), np.zeros(4, int)) for i in range(3)]
    bound = LikelihoodBound(AnyOrder(), draws=4, batch_size=2)
    nats, error = score_rows(model.experiment, model.params, rows, bound, {})
    np.testing.assert_array_equal(nats, [5.0, 5.0, 2.25])
    np.testing.assert_allclose(error, [2.0, 2.0, 0.25], rtol=1e-12)
    np.testing.assert_array_equal(np.subtract(known.asked, known.asked[0]), [0, 1, 2, 3])


def test_a_longer_text_may_be_conditioned_on_what_is_before(loaded):
    """With a stride of 2, the first window of 4 counts whole and the next ones 2 tokens each."""
    model = loaded("mdlm")
    scores = model.score(["abcdef"], stride=2, draws=256)
    x = model.domain.encode("cdef")
    z = np.where([[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 1, 1]], 11, x)
    each = np.where(z == 11, costs(model.logits(z), x), 0.0).sum(axis=1)
    # With one of two tokens masked, at random, the weight is 2; with both it is 1.
    last = np.mean([2 * each[:2].mean(), each[2]])
    agree(scores, [by_masks(model, model.domain.encode("abcd")) + last])


def test_texts_that_have_no_likelihood(loaded):
    with pytest.raises(UserError, match="text 1 is empty"):
        loaded("mdlm").score(["a", ""])
    with pytest.raises(UserError, match="objective='score_entropy' is not a bound"):
        loaded("mdlm").score("a", objective="score_entropy")
    assert len(loaded("mdlm").score([]).nats) == 0


def test_no_token_sees_the_padding(loaded):
    model = loaded("mdlm")
    x = np.array([3, 11, 1, 11], np.int32)
    row = Row(0, x, np.ones(4, bool), np.zeros(4, np.int32)).padded(16)
    found = model.logits(row.tokens[None], context={"segments": row.segments[None]})
    np.testing.assert_allclose(found[0, :4], model.logits(x), atol=1e-5)
    assert row.counted.sum() == 4


def test_lengths_are_rounded_up_to_few():
    assert [bucket(n, 100) for n in (1, 16, 17, 33, 64, 65, 100)] == [16, 16, 32, 64, 64, 100, 100]
    assert bucket(3, 4) == 4
