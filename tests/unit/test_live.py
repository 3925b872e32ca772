"""Sampling one step at a time: the states that a whole run passes through."""

import jax
import numpy as np
import pytest
from peer_folders import peer_folder
from playgrounds import of_images, of_text

import md4_jax
from md4_jax.evals.token_costs import splitting
from md4_jax.model.model import Model
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.autoregressive import AlongOrder
from md4_jax.objectives.draws import draws
from md4_jax.objectives.md4 import MD4, DiscreteMD4
from md4_jax.objectives.score_entropy import ScoreEntropy
from md4_jax.protocols import Denoiser, Prompt, UserError, batch_of


@pytest.fixture(scope="module")
def text():
    return of_text()


@pytest.fixture(scope="module")
def uniform():
    return of_text(name="uniform", schedule={"name": "linear"}, parametrisation="joint")


def same_path(model, sampler: str, **options) -> None:
    """Asserts that the states are the frames of the first sample, and end with it."""
    seen = list(model.watch(sampler=sampler, **options))
    drawn = model.sample(2, sampler=sampler, trace=True, **options)
    np.testing.assert_array_equal(seen[-1].z, drawn.tokens[0])
    assert seen[-1].evaluations == drawn.evaluations[0]
    assert seen[0].step == 0 and seen[-1].of >= seen[-1].step
    states = {s.step: s for s in seen}
    trace = drawn.trace
    for index, step in enumerate(trace.step):
        words = [model.domain.decode([i]) if i < model.domain.vocab_size else "·"
                 for i in states[int(step)].z]  # fmt: skip
        shown = [trace.words[i] for i in trace.symbol[index]]
        assert [w.replace("\n", "↵") for w in words] == shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler, options",
    [
        pytest.param("ancestral", dict(steps=4, temperature=0.7), marks=pytest.mark.campaign),
        ("ancestral", dict(steps=32, prompt="to be", label=1, guidance=2.0)),
        pytest.param(
            "confidence", dict(steps=8, prompt="to be", guidance=2.0), marks=pytest.mark.campaign
        ),
        ("any_order", dict(steps=8, per_step=0, order="left_to_right")),
        pytest.param("confidence", dict(steps=8, prompt="to be"), marks=pytest.mark.campaign),
        pytest.param(
            "confidence", dict(steps=2, per_step=4, prompt="to be"), marks=pytest.mark.campaign
        ),
        ("remask", dict(steps=8, eta=0.5, strategy="rescale", label=0)),
    ],
)
@pytest.mark.cases(1)
def test_the_states_of_masks_are_those_of_a_whole_run(sampler, options, text):
    same_path(text, sampler, seed=3, **options)


@pytest.mark.campaign
def test_the_states_of_uniform_noise_are_those_of_a_whole_run(uniform):
    same_path(uniform, "ancestral", seed=1, steps=4, prompt="to be")


@pytest.mark.campaign
def test_a_model_of_pairs_sees_its_prompt_clean(uniform):
    """In a batch and live; a model that was not trained on pairs sees it with noise."""
    told = uniform.experiment
    pair = {"name": "text", "path": "pairs.jsonl", "text_key": "answer", "prompt_key": "question"}
    config = {**told.config, "data": {"length": told.config["data"]["length"], **pair}}
    pairs = Model(told._replace(config=config), uniform.params, 30, "", uniform.facts)
    options = dict(seed=1, steps=4, prompt="to be or not")
    same_path(pairs, "ancestral", **options)
    one, other = (m.sample(1, sampler="ancestral", **options).tokens for m in (uniform, pairs))
    assert (one != other).any()


@pytest.mark.campaign
def test_a_bound_by_blocks_has_no_costs_of_tokens(tmp_path):
    model = md4_jax.load(peer_folder(tmp_path, "bd3lm"), {"mesh.data": 1})
    with pytest.raises(UserError, match="is not a sum over tokens"):
        model.token_costs("abc")


@pytest.mark.slow
def test_one_program_serves_all_steps_seeds_and_temperatures(text, monkeypatch):
    list(text.watch(sampler="confidence", steps=8, label=1, guidance=2.0))
    (live,) = (p for key, p in text.programs.items() if key[0] == "live")
    before = live._step._cache_size()
    for steps, seed, temperature, weight in ((4, 1, 0.5, 1.5), (16, 2, 1.5, 3.0)):
        settings = dict(steps=steps, seed=seed, temperature=temperature, guidance=weight)
        list(text.watch(sampler="confidence", label=1, **settings))
    assert live._step._cache_size() == before


@pytest.mark.slow
def test_given_symbols_stay():
    images = of_images()
    mask = np.arange(16) % 3 == 0
    prompt = Prompt(np.arange(16, dtype=np.int32) % 5, mask)
    *_, last = images.watch(prompt, steps=4)
    np.testing.assert_array_equal(last.z[mask], prompt.tokens[mask])
    assert last.z.max() < 5
    with pytest.raises(UserError, match="the prompt has 3 positions, but samples have 16"):
        images.watch(Prompt(np.zeros(3, np.int32), np.zeros(3, bool)), steps=4)


@pytest.mark.slow
def test_what_tokens_add_is_the_bound(text):
    """Draw by draw the sum is that of the objective; single tokens are -log p given others."""
    own, objective = text.experiment, AnyOrder()
    x = np.tile(text.domain.encode("to be, or not").astype(np.int32), (8, 1))
    batch = batch_of(x, loss_mask=np.arange(x.shape[1])[None] >= np.arange(8)[:, None] % 3)
    u, keys = draws(1, 2, len(x))
    denoiser = own.network.denoiser(text.params)
    arguments = denoiser, text.params["process"], batch, u, keys
    each = np.asarray(objective.of_tokens(*arguments))
    np.testing.assert_allclose(each.sum(axis=1), np.asarray(objective(*arguments)[0]), rtol=1e-6)
    assert (each[~batch.loss_mask] == 0).all()


@pytest.mark.slow
def test_costs_of_tokens_agree_with_the_score(text):
    """A text of one token has the exact cost -log mu at the mask; others agree within errors."""
    words = "to be, or not to be"
    found, score = text.token_costs(words, estimates=16), text.score(words, draws=64)
    assert len(found.bits) == len(found.bits_se) == len(words)
    assert not found.exact and found.total_se > 0
    error = np.hypot(found.total_se, score.bits_se[0])
    assert abs(found.bits.sum() - score.bits[0]) < 5 * error
    z = np.full((1, 1), text.domain.vocab_size)
    one = text.token_costs("t")
    (id,) = text.domain.encode("t")
    seen = [jax.nn.log_softmax(text.logits(z, t)[0, 0])[id] for t in np.linspace(0, 1, 5)]
    assert -max(seen) <= one.bits[0] * np.log(2) + 1e-3
    assert one.bits[0] * np.log(2) <= -min(seen) + 1e-3
    with pytest.raises(UserError, match="40 characters, but the model reads at most 32"):
        text.token_costs("a" * 40)


def test_uniform_noise_has_no_costs_of_tokens(uniform):
    assert not uniform.has_token_costs
    with pytest.raises(UserError, match="is not a sum over tokens"):
        uniform.token_costs("abc")


@pytest.mark.parametrize("objective", [DiscreteMD4(2), AlongOrder("left_to_right")])
def test_a_bound_of_another_value_has_no_costs_of_tokens(objective, text):
    """Those of `any_order` would add up to another number than the score."""
    with pytest.raises(UserError, match="is not a sum over tokens"):
        splitting(text.experiment, objective)
    assert splitting(text.experiment, MD4()) == AnyOrder()


def test_a_bound_for_outputs_of_another_meaning_is_refused(tmp_path):
    """Log scores are no logits of a mixture."""
    model = md4_jax.load(peer_folder(tmp_path, "sedd_uniform"), {"mesh.data": 1})
    with pytest.raises(UserError, match="needs process.parametrisation=.* not 'score'"):
        model.score("abc", objective="uniform_elbo")


def test_samplers_that_fit(text, uniform):
    assert "remask" in text.samplers() and "left_to_right" not in text.samplers()
    assert "remask" not in uniform.samplers() and "ancestral" in uniform.samplers()


@pytest.mark.parametrize("excess", [0.0, 0.7])
def test_tokens_of_a_score_count_what_it_lacks_of_a_distribution(excess, text, uniform):
    """With sum_j s_j / k = C each token costs C - 1 - log C more than with `any_order`."""
    own = text.experiment
    x = np.tile(text.domain.encode("to be, or not").astype(np.int32), (8, 1))
    u, keys = draws(1, 2, len(x))
    trained = own.network.denoiser(text.params)

    def outputs(z, t):
        log_mu = jax.nn.log_softmax(trained(z, t))
        return log_mu + np.log(log_mu.shape[-1]) + excess

    arguments = text.params["process"], batch_of(x), u, keys
    objective = splitting(own, ScoreEntropy())
    found = objective.of_tokens(Denoiser(outputs, lambda h: h), *arguments)
    expected = AnyOrder().of_tokens(trained, *arguments)
    more = x.shape[1] * (np.exp(excess) - 1.0 - excess)
    np.testing.assert_allclose(found.sum(axis=1), expected.sum(axis=1) + more, rtol=1e-5)
    with pytest.raises(UserError, match="ScoreEntropy of this model is not a sum over tokens"):
        splitting(uniform.experiment, ScoreEntropy())


def test_a_single_estimate_has_no_known_error(text):
    found = text.token_costs("to be", estimates=1)
    assert np.isnan(found.total_se) and np.isnan(found.bits_se).all()
    assert np.isfinite(found.bits).all() and not found.exact


def test_one_sample_is_watched(text):
    for num in (0, 2):
        with pytest.raises(
            UserError, match=f"watch draws one sample, not num={num}: leave num out"
        ):
            text.watch("to be", num=num)
    text.watch("to be", num=1)
