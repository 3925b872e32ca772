"""The gradient of a policy by enumeration, advantages by hand, and what a step draws."""

import copy
import dataclasses
import re

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from noisy_blocks import in_blocks

from md4_jax.config import build, inputs, schema
from md4_jax.config.checks import check_training
from md4_jax.config.evaluators import tightest
from md4_jax.data.mixtures import corpus_of
from md4_jax.evals import rollouts
from md4_jax.evals.rewards import Answer, Pattern
from md4_jax.evals.rollouts import Rollouts, advantages, ended, maker, prompts_of
from md4_jax.experiment import clean_prompts
from md4_jax.networks.transformer import Transformer
from md4_jax.objectives.any_order import AnyOrder
from md4_jax.objectives.block import BlockDiffusion
from md4_jax.objectives.draws import draws
from md4_jax.objectives.policy import Policy
from md4_jax.objectives.preference import Preference
from md4_jax.processes.masking import Masking
from md4_jax.protocols import Batch, UserError
from md4_jax.runtime.commit import PACKAGE_ROOT
from md4_jax.training import back
from md4_jax.training.loop import fresh_state

LOGITS, THEN = np.array([0.4, -0.3, 0.9]), np.array([0.1, 0.5, -0.2])
LAW = np.exp(LOGITS) / np.exp(LOGITS).sum()
REWARDS = np.array([1.0, -2.0, 0.5])


def denoiser(logits):
    """Logits of each row [B, V], whatever is seen, beside those of the start."""
    student, teacher = (
        exact.of_outputs(lambda z, t, of=of: jnp.broadcast_to(of[:, None], (*z.shape, 3)))
        for of in (logits, jnp.asarray(THEN)[None])
    )
    found = exact.taught(student, teacher)
    return found._replace(rebind=lambda count: denoiser(jnp.repeat(logits, count, axis=0)))


def batch_of(tokens, advantage):
    tokens, advantage = np.asarray(tokens, np.int32), np.asarray(advantage, np.float32)
    return Batch(tokens, np.ones(tokens.shape, bool), {}, reward=advantage, advantage=advantage)


def slope(objective, batch):
    """The gradient of each text's loss, [B, V]; of one token the bound is the likelihood."""
    rows = len(batch.tokens)
    u, keys = (jnp.arange(rows) + 0.5) / rows, exact.keys_for(0, rows)

    def loss(logits):
        return jnp.sum(objective(denoiser(logits), Masking(3), batch, u, keys)[0])

    each = jnp.broadcast_to(jnp.asarray(LOGITS), (rows, 3))
    return np.asarray(jax.jit(jax.grad(loss))(each), np.float64)


def test_it_climbs_the_gradient_of_the_expected_reward():
    """That is p_k (r_k - sum p r), of which a mean over groups of G leaves (G - 1) / G."""
    group, groups = 4, 5000
    rng = np.random.default_rng(0)
    tokens = rng.choice(3, (groups * group, 1), p=LAW)
    found = advantages(REWARDS[tokens[:, 0]], group, normalised=False)
    each = -slope(Policy(group=group), batch_of(tokens, found))
    each = each.reshape(groups, group, 3).mean(axis=1)
    right = 0.75 * LAW * (REWARDS - LAW @ REWARDS)
    error = each.std(axis=0) / np.sqrt(groups)
    assert (np.abs(each.mean(axis=0) - right) < 4 * error).all() and (error < 0.02).all()
    assert (np.abs(right) > 8 * error).all()


def test_kl_is_that_from_the_start():
    """Its gradient, the mean over texts that the model draws: p_k (log p_k / p'_k - KL)."""
    each = slope(Policy(kl=0.7), batch_of(np.arange(3)[:, None], np.zeros(3)))
    then = np.exp(THEN) / np.exp(THEN).sum()
    gain = np.log(LAW / then)
    np.testing.assert_allclose(LAW @ each, 0.7 * LAW * (gain - LAW @ gain), rtol=2e-4)
    alone = slope(Policy(), batch_of(np.arange(3)[:, None], np.zeros(3)))
    assert (alone == 0).all()


def test_the_loss_is_the_bound_times_the_advantage():
    """Over several tokens, the mean over draws to 4 standard errors; a prompt counts nowhere."""
    rows, table = 3000, exact.table_logits(3, 3)
    text = np.array([[0, 2, 1]], np.int32)
    batch = batch_of(np.repeat(text, rows, axis=0), np.full(rows, -1.5))
    u, keys = (jnp.arange(rows) + 0.5) / rows, exact.keys_for(1, rows)
    model = exact.denoiser_of(table, time=0.5)

    @jax.jit
    def called(batch):
        return Policy(draws=2)(model, Masking(3), batch, u, keys)

    loss, extra = called(batch)
    bound = exact.any_order(model, Masking(3), text)[0]
    error = np.std(loss) / np.sqrt(rows)
    assert abs(np.mean(loss) + 1.5 * bound) < 4 * error < 0.2
    assert (extra["reward"] == -1.5).all() and (extra["tied"] == 0).all()
    prompt = batch._replace(loss_mask=np.zeros_like(batch.loss_mask))
    assert (np.asarray(called(prompt)[0]) == 0).all()
    # Three draws of three tokens hide one, two and three of them.
    _, extra = Policy(draws=3)(model, Masking(3), batch, u, keys)
    np.testing.assert_allclose(extra["masked"], 2 / 3, rtol=1e-6)


def test_blocks_of_one_count_their_likelihood_at_every_draw():
    """With chances of 1/2 and 1/5 of the two tokens of a text."""
    chances = (jnp.array([0.5, 0.3, 0.2]), jnp.array([0.1, 0.7, 0.2]))

    def law(clean):
        p = chances[clean.shape[1]]
        return exact.of_outputs(lambda z, t: jnp.broadcast_to(jnp.log(p), (*z.shape, 3)))

    u, keys = (jnp.arange(8) + 0.5) / 8, exact.keys_for(2, 8)
    batch = batch_of([[0, 2]] * 8, [1.0, -2.0] * 4)
    loss, extra = Policy(block=1, draws=3)(in_blocks(law), Masking(3), batch, u, keys)
    np.testing.assert_allclose(loss, np.log(10.0) * batch.advantage, rtol=1e-5)
    assert (extra["masked"] == 1.0).all()
    with pytest.raises(UserError, match="objective.block=4"):
        Policy(block=4).check_length(6)


def test_advantages_by_hand():
    rewards = np.array([1.0, 2.0, 3.0, 2.0, 5.0, 5.0, 5.0, 5.0])
    plain = advantages(rewards, 4, normalised=False)
    np.testing.assert_array_equal(plain, [-1, 0, 1, 0, 0, 0, 0, 0])
    scaled = advantages(rewards, 4, normalised=True)
    np.testing.assert_allclose(scaled[:4], [-1.4142, 0, 1.4142, 0], atol=1e-3)
    assert (scaled[4:] == 0).all()


@pytest.mark.parametrize("normalised", [False, True])
def test_equal_rewards_have_no_advantage_at_all(normalised):
    """Also where their mean is another number: that of six times 0.1 is 0.09999999999999999."""
    for equal in (0.1, 0.7, 1 / 3, 1e9 / 7):
        for group in (3, 6, 7):
            rewards = np.array([equal] * group + [1.0, *[0.0] * (group - 1)])
            found = advantages(rewards, group, normalised)
            assert (found[:group] == 0.0).all() and (found[group:] != 0.0).all()


def test_rewards_are_of_texts_up_to_their_end():
    tokens = np.array([[9, 1, 9, 2, 3], [0, 1, 2, 3, 4], [9, 9, 9, 1, 9]])
    counts = np.array([False, True, True, True, True])
    found = ended(tokens, np.broadcast_to(counts, tokens.shape), (9,))
    assert found.tolist() == [[9, 1, 9, -1, -1], [0, 1, 2, 3, 4], [9, 9, -1, -1, -1]]
    assert ended(tokens, np.broadcast_to(counts, tokens.shape), ()).tolist() == tokens.tolist()


def test_answers_are_compared_by_what_a_pattern_finds():
    expected = ["so #### 12", "#### 3 then #### 4", "7 #### 7"]
    answers = ["#### 12.", "#### 4 #### 3", "seven"]
    assert Answer(r"#### (\d+)").compared(answers, expected).tolist() == [1, 0, 0]
    assert Answer(r"\d").compared(["a1b", "", "8"], ["2 1", "x", "8"]).tolist() == [1, 0, 1]
    assert Answer().compared([" yes\n", "no"], ["yes", "yes"]).tolist() == [1, 0]
    with pytest.raises(UserError, match=r"sample.reward.pattern='\(' is not a regular expression"):
        Answer("(")


KEYS = {
    "data.name": "text", "data.length": "8", "data.prompt_key": "q", "data.text_key": "a",
    "data.padding": "end_of_text", "data.validation": "0", "data.test": "1",
    "tokenizer.name": "bytes", "network.size": "16", "network.depth": "1", "network.heads": "2",
    "network.hidden": "16", "objective.name": "policy", "objective.group": "4",
    "sample.reward.name": "answer", "sample.steps": "6", "sample.stop": "end_of_text",
    "train.batch_size": "8", "mesh.data": "1",
}  # fmt: skip


@pytest.fixture
def made(tmp_path, monkeypatch):
    """(experiment, corpus) of questions and answers."""
    monkeypatch.setenv("MD4_JAX_CACHE", str(tmp_path / "cache"))
    lines = [f'{{"q": "{n}+{n}=", "a": "{2 * n}"}}\n' for n in range(9)]
    (tmp_path / "sums.jsonl").write_text("".join(lines))

    def made(**changes):
        words = KEYS | {"data.path": str(tmp_path / "sums.jsonl")}
        words |= {key.replace("__", "."): value for key, value in changes.items()}
        if words["data.name"] == "mixture":
            own = ("name", "path", "prompt_key", "text_key", "validation", "test")
            words |= {f"data.parts.sums.{key}": words.pop(f"data.{key}") for key in own}
            words |= {"data.name": "mixture", "data.parts.sums.name": "text"}
        if words["objective.name"] != "policy":
            del words["objective.group"]
        config = schema.load_config(str(PACKAGE_ROOT / "configs" / "base.py"), words)
        domain, source = inputs.domain_and_source(config, None)
        experiment = build.experiment(config, domain)
        return experiment, corpus_of(source, domain, experiment.data)

    return made


def prompts(experiment, corpus):
    rows = prompts_of(experiment)
    return next(corpus.train_batches(batch_size=rows, seed=0, rows=np.arange(rows)))


def test_a_step_draws_several_answers_to_each_prompt(made, monkeypatch):
    experiment, corpus = made()
    asked, state = prompts(experiment, corpus), fresh_state(experiment)
    assert len(asked.tokens) == prompts_of(experiment) == 2
    compared = []

    def kept(self, answers, expected):
        compared.extend(zip(answers, expected, strict=True))
        return np.arange(len(answers)) % 3

    monkeypatch.setattr(Answer, "compared", kept)
    drawn = maker(experiment, experiment.rewarded)
    batch = drawn(state, 3, asked)
    every, counts = np.repeat(asked.tokens, 4, axis=0), np.repeat(asked.loss_mask, 4, axis=0)
    assert (batch.tokens[~counts] == every[~counts]).all() and (batch.loss_mask == counts).all()
    assert batch.tokens.min() + 1 > 0 and batch.tokens.max() < experiment.process.vocab_size
    assert len(np.unique(batch.tokens, axis=0)) == 8
    assert batch.reward.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    np.testing.assert_array_equal(batch.advantage, advantages(np.arange(8) % 3, 4, True))
    # What the data answer, without what ends it.
    numbers = [bytes(row[row < 256].tolist()).decode().partition("=")[2] for row in every]
    assert [expected for _, expected in compared] == numbers
    again, other = drawn(state, 3, asked), drawn(state, 4, asked)
    assert (again.tokens == batch.tokens).all() and (other.tokens != batch.tokens).any()


def test_a_process_rewards_the_whole_batch_and_keeps_its_rows(made, monkeypatch):
    """A judge computes on the devices of all processes, which must give it the same texts."""
    experiment, corpus = made(sample__reward__name="pattern", sample__reward__pattern=".")
    asked, seen = prompts(experiment, corpus), []

    def reward(self, tokens, domain):
        seen.append(tokens)
        return np.arange(len(tokens), dtype=float) ** 2

    monkeypatch.setattr(Pattern, "__call__", reward)
    drawn = maker(experiment, experiment.rewarded)
    whole = drawn(fresh_state(experiment), 0, asked)
    monkeypatch.setattr(rollouts, "local_rows", lambda mesh, size: np.arange(size // 2, size))
    second = drawn(fresh_state(experiment), 0, asked)
    assert len(seen[1]) == 8 and (seen[1] == seen[0]).all()
    for name in ("tokens", "reward", "advantage"):
        assert (getattr(second, name) == getattr(whole, name)[4:]).all()
    assert second.reward.tolist() == [16, 25, 36, 49]


def test_blocks_after_the_end_of_an_answer_are_filled_with_it(made):
    """With such blocks an answer of a likely end is hardly ever drawn whole."""
    experiment, corpus = made(sample__block="2", sample__steps="2")
    state, asked = fresh_state(experiment), prompts(experiment, corpus)
    head = state.params["network"]["head"]
    head["bias"] = head["bias"].at[experiment.domain.eot_id].set(8.0)
    batch = maker(experiment, experiment.rewarded)(state, 0, asked)
    stop = experiment.domain.eot_id
    assert batch.tokens.max() == stop < experiment.process.vocab_size
    assert (batch.tokens[:, -2:] == stop).all()


def test_a_reward_sees_no_more_of_a_text_than_its_end(made):
    """A text that ends at once has nothing else to count, however long its row is."""
    asked = {"sample__reward__name": "pattern", "sample__reward__pattern": "end|."}
    experiment, corpus = made(**asked)
    state, batch = fresh_state(experiment), prompts(experiment, corpus)
    head = state.params["network"]["head"]
    head["bias"] = head["bias"].at[experiment.domain.eot_id].set(100.0)
    drawn = Rollouts(experiment, experiment.rewarded)(state, 0, batch)
    assert (drawn.tokens[drawn.loss_mask] == experiment.domain.eot_id).all()
    texts = [experiment.domain.decode(row[~own]) for row, own in zip(*drawn[:2], strict=True)]
    shown = len(re.findall("end|.", "<|endoftext|>"))
    assert drawn.reward.tolist() == [len(text) + shown for text in texts]


def test_texts_are_used_again_and_drawn_again_by_the_model_that_drew_them(made):
    """Three updates with each set: that of steps 3 to 5, from its second step on after a break."""
    experiment, corpus = made(objective__updates="3")
    asked, state = prompts(experiment, corpus), fresh_state(experiment)
    drawn = maker(experiment, experiment.rewarded)
    batch, other = drawn(state, 3, asked), jax.tree.map(jnp.copy, state.params)
    head = other["network"]["head"]
    head["bias"] = head["bias"].at[97].set(50.0)
    after = state._replace(params=other, behaviour=state.params)
    assert drawn(after, 4, asked) is batch and drawn(after, 5, asked) is batch
    assert (drawn(after, 6, asked).tokens != batch.tokens).any()
    again = maker(experiment, experiment.rewarded)(after, 4, asked)
    for name in ("tokens", "reward", "advantage"):
        assert (getattr(again, name) == getattr(batch, name)).all()
    # A set that begins is drawn by the model as it is now.
    anew = maker(experiment, experiment.rewarded)
    found = anew(after, 3, asked)
    assert (found.tokens[found.loss_mask] == 97).all()


def test_prompts_of_a_set_come_again_after_a_break_within_it(made):
    experiment, corpus = made(objective__updates="3")

    def sums(data, count):
        return [int(next(data).tokens.sum()) for _ in range(count)]

    whole = rollouts.data_of(experiment, corpus, 0)
    every, places = [], []
    for _ in range(9):
        places.append(whole.get_state())
        every += sums(whole, 1)
    assert every[0] == every[1] == every[2] != every[3] == every[5] != every[6] == every[8]
    assert [place["sequences"] for place in places] == [0, 0, 0, 2, 2, 2, 4, 4, 4]
    for step in range(9):
        later = rollouts.data_of(experiment, corpus, step)
        later.set_state(places[step])
        assert later.get_state() == places[step]
        assert sums(later, 9 - step) == every[step:]
        later.close()
    whole.close()


@pytest.mark.parametrize("reached, held", [(5, 2), (6, 4)])
def test_a_return_goes_on_with_the_set_after_the_last_that_can_have_run(reached, held, tmp_path):
    """Step 10 is the last: sets of two prompts for three steps each have taken four pairs."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    newest = reached, {"data": {"sequences": held}}
    back.begin(tmp_path, "4", 4, newest, {"log": {"every": 3}, "optim": {}}, 2, 3)
    assert back.position(tmp_path, 4, {}) == {"sequences": 8}


def test_other_objectives_learn_from_the_data_as_they_are(made):
    experiment, corpus = made(objective__name="any_order", sample__reward__name="none")
    asked = prompts(experiment, corpus)
    assert len(asked.tokens) == 8 and maker(experiment, None)(None, 0, asked) is asked


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"sample__reward__name": "none"}, "learns from rewards of samples, but no reward is set"),
        ({"train__batch_size": "6"}, "train.batch_size=6 must be a multiple of 4"),
        ({"data__padding": "hidden"}, "needs data.padding='end_of_text', not 'hidden'"),
        (
            {"data__padding": "hidden", "data__name": "mixture"},
            "needs data.padding='end_of_text', not 'hidden'",
        ),
        (
            {"data__prompt_key": "", "data__windows": "documents", "data__padding": "hidden"},
            "needs data.padding='end_of_text', not 'hidden'",
        ),
        (
            {
                "data__prompt_key": "",
                "data__padding": "hidden",
                "data__windows": "grid",
                "data__separate_documents": "True",
                "sample__reward__name": "pattern",
                "sample__reward__pattern": "1",
            },
            "set data.separate_documents=False",
        ),
        (
            {
                "data__prompt_key": "",
                "data__padding": "hidden",
                "data__label_key": "q",
                "network__classes": "8",
                "sample__reward__name": "pattern",
                "sample__reward__pattern": "1",
            },
            "needs data.padding='end_of_text', not 'hidden'",
        ),
        ({"sample__length": "12"}, "sample.length=12 cannot be used: set sample.length=0"),
        (
            {"sample__min_entropy": "0.5", "sample__block": "2"},
            "sample.min_entropy=0.5 cannot be used: set sample.min_entropy=0",
        ),
        ({"train__time_power": "2"}, "train.time_power=2 cannot be used: set train.time_power=1"),
        ({"objective__group": "1"}, "objective.group must be at least 2, not 1"),
        ({"objective__kl": "-1"}, "objective.kl must not be negative, not -1"),
        ({"objective__draws": "0"}, "objective.draws must be at least 1, not 0"),
        ({"network__tables": "2000"}, "cannot train network.tables"),
        (
            {
                "process__name": "resizing",
                "process__expand": "1",
                "process__delete": "2",
                "sample__name": "resize",
                "sample__stop": "",
                "network__time_conditioning": "False",
            },
            "needs texts of a fixed length, but sample.name='resize' changes the length",
        ),
        (
            {"objective__name": "any_order"},
            "sample.reward.name='answer' compares texts with the answers",
        ),
    ],
)
def test_mistakes(changes, said, made):
    with pytest.raises(UserError, match=said):
        check_training(made(**changes)[0])


@pytest.mark.parametrize("name", ["text", "mixture"])
def test_answers_of_a_conversation_are_drawn_one_at_a_time(name, made, tmp_path):
    """A reward would see a text up to the end of its first answer."""
    (tmp_path / "plain.jinja").write_text("{{ messages }}")
    key = "data__messages_key" if name == "text" else "data__parts__sums__messages_key"
    talks = {"data__name": name, "data__prompt_key": "", "data__text_key": "text", key: "q"}
    talks["data__chat_template"] = str(tmp_path / "plain.jinja")
    with pytest.raises(UserError, match="data.turns='all' all answers of a conversation would"):
        check_training(made(**talks)[0])
    for turns in ("last", "each"):
        check_training(made(**talks, data__turns=turns)[0])


def test_a_run_goes_on_with_the_same_samples_and_reward(made):
    """What --mode sample alone uses may change."""
    experiment = made()[0]
    kept = copy.deepcopy(experiment.config)
    kept["sample"] |= {"num": 99, "trace": True}
    check_training(experiment, kept)
    for key, value in (("temperature", 0.5), ("steps", 3)):
        other = copy.deepcopy(kept)
        other["sample"][key] = value
        with pytest.raises(
            UserError, match=f"sample.{key}=.* differs from the value of this run, {value}"
        ):
            check_training(experiment, other)
    # A key that was left to its default is compared too.
    for section, key, value in (("sample", "top_k", 7), ("reward", "pattern", "(b+)")):
        asked = copy.deepcopy(experiment.config)
        (asked["sample"] if section == "sample" else asked["sample"]["reward"])[key] = value
        changed = experiment._replace(config=asked)
        check_training(changed, asked)
        without = copy.deepcopy(kept)
        without["sample"].pop("top_k", None)
        without["sample"]["reward"].pop("pattern", None)
        with pytest.raises(
            UserError, match=rf"sample.*{key}=.* differs from the value of this run"
        ):
            check_training(changed, without)
    other["sample"]["reward"]["name"] = "judge"
    with pytest.raises(
        UserError, match=r"sample.reward.name='.*' differs from the value of this run, 'judge'"
    ):
        check_training(experiment, other)


@pytest.mark.parametrize("objective", [Policy(block=4), Preference(block=4)])
def test_what_learns_in_blocks_is_evaluated_in_blocks(objective):
    """Its network reads no later block, with which a bound of whole texts would judge it."""
    network = Transformer(vocab_size=5, size=8, depth=1, heads=1).build()
    found = tightest("evals.test", objective, Masking(5), network)
    assert found == BlockDiffusion(4).for_evaluation()
    whole = tightest("evals.test", dataclasses.replace(objective, block=0), Masking(5), network)
    assert isinstance(whole, AnyOrder)


def test_one_part_of_a_mixture_with_prompts_is_enough():
    text, pairs = {"name": "text"}, {"name": "text", "prompt_key": "q"}
    talk = {"name": "text", "messages_key": "messages"}
    for parts, has in ([text], False), ([text, pairs], True), ([talk, text], True):
        data = {"name": "mixture", "parts": {f"part{n}": part for n, part in enumerate(parts)}}
        assert clean_prompts(data) == has
    assert clean_prompts(pairs) and not clean_prompts(text)


def test_samples_of_such_a_run_are_not_steered(made):
    experiment, _ = made(sample__reward__name="pattern", sample__reward__pattern="yes")
    assert experiment.steering is None and experiment.rewarded.reward.pattern == "yes"


def test_rewards_must_be_finite_numbers_one_for_each(made, monkeypatch):
    experiment, corpus = made()
    monkeypatch.setattr(Answer, "compared", lambda self, answers, expected: [1.0])
    drawn = Rollouts(experiment, experiment.rewarded)
    with pytest.raises(UserError, match=r"shape \(1,\) for 8 sequences; it must return one"):
        drawn(fresh_state(experiment), 0, prompts(experiment, corpus))


def test_a_batch_without_rewards_is_no_batch_for_it():
    batch = batch_of([[0]], [0.0])._replace(advantage=None)
    with pytest.raises(ValueError, match="needs a batch with rewards and advantages"):
        slope(Policy(), batch)


def test_the_start_is_kept_only_where_it_counts():
    assert not Policy().needs.teacher and Policy(kl=0.1).needs.teacher
    assert Policy().teacher_calls == 0 and Policy(kl=0.1, draws=3).teacher_calls == 3
    assert dataclasses.replace(Policy(), draws=5).calls == 5 and rollouts.SMALLEST < 1e-3


def test_keys_of_samples_are_those_of_no_noise():
    """Of any step: samples and noise of different steps would be correlated."""
    steps, seed, count = range(40), 3, 4

    def bits(keys):
        return [tuple(row) for row in np.asarray(jax.random.key_data(keys))]

    noise = [key for step in steps for key in bits(draws(seed, step, count)[1])]
    samples = [key for step in steps for key in bits(rollouts.sample_keys(seed, step, count))]
    assert len({*noise, *samples}) == 2 * len(steps) * count
