"""Rewards, from the fine-tuned run to samples that have more of them."""

import json
import shutil

import numpy as np
import pytest
import runs

import md4_jax

pytestmark = pytest.mark.slow

KEYS = {
    "data.name": "text", "data.length": 5, "data.text_key": "a", "data.prompt_key": "q",
    "data.padding": "end_of_text", "data.validation": 0, "data.test": 4, "tokenizer.name": "bytes",
    "train.num_steps": 60, "train.batch_size": 16, "optim.warmup_steps": 4, "log.every": 5,
    "evals.validation.every": 0, "evals.samples.final": False, "checkpoint.every": 0,
}  # fmt: skip
POLICY = {
    "train.num_steps": 20, "train.ema": 0.5, "objective.name": "policy", "objective.kl": 0.01,
    "sample.reward.name": "pattern", "sample.reward.pattern": "y", "sample.steps": 4,
    "optim.learning_rate": 0.003,
}  # fmt: skip


def flags(**changed) -> list[str]:
    keys = KEYS | {key.replace("__", "."): value for key, value in changed.items()}
    return [f"--config.{key}={value}" for key, value in keys.items()]


@pytest.fixture(scope="module")
def tuned(run, tiny, tmp_path_factory):
    """A run that answers xx, xy, yx and yy alike."""
    folder = tmp_path_factory.mktemp("policy")
    lines = [{"q": "q?", "a": text} for text in ("xx", "xy", "yx", "yy") * 12]
    (folder / "answers.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    at = ("--config", tiny, "--workdir", folder / "tuned")
    ended = run(*at, *flags(data__path=folder / "answers.jsonl"))
    assert ended.code == 0, ended
    return folder


def words(folder, **changed) -> list[str]:
    more = {key.replace(".", "__"): value for key, value in POLICY.items()} | changed
    initial = {"train__initial": folder / "tuned", "data__path": folder / "answers.jsonl"}
    return flags(**initial, **more)


def share(run, answer) -> float:
    drawn = md4_jax.load(run).sample(num=64, prompt="q?", steps=3, seed=1)
    return np.mean([text.startswith(f"q?{answer}") for text in drawn.texts])


@pytest.mark.campaign
def test_a_run_learns_what_is_rewarded(run, tiny, tuned):
    """The last line of the log says how much it gets; evaluation is by the bound of the data."""
    assert share(tuned / "tuned", "yy") < 0.5
    at = ("--config", tiny, "--workdir", tuned / "rewarded")
    ended = run(*at, *words(tuned))
    assert ended.code == 0, ended
    first, last = (runs.rows(tuned / "rewarded")[n] for n in (0, -1))
    assert first["reward"] < 2.2 and last["reward"] > 2.6 and last["moved"] > 0.1
    assert "train_loss_bits" in last and "train_bits_per_token" not in last
    assert "step 20/20  reward " in ended.err
    assert any(line.startswith("test: <= ") for line in ended.out.splitlines())
    assert share(tuned / "rewarded", "yy") > 0.95


@pytest.mark.campaign
@pytest.mark.parametrize("updates, every", [(1, 3), (3, 4)])
def test_a_resumed_run_ends_bit_for_bit_the_same(updates, every, run, tiny, tuned):
    """It draws the same texts, also when it stopped after one of three updates with them."""
    whole, again = tuned / f"whole{updates}", tuned / f"again{updates}"
    asked = words(
        tuned, train__num_steps=2 * every, checkpoint__every=every, log__every=every,
        objective__updates=updates,
    )  # fmt: skip
    ended = run("--config", tiny, "--workdir", whole, *asked)
    assert ended.code == 0, ended
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / str(2 * every))
    ended = run("--workdir", again)
    assert ended.code == 0, ended
    assert runs.different_arrays(again, whole) == []
    last, same = runs.rows(whole)[-1], runs.rows(again)[-1]
    for name in ("reward", "ratio", "ratio_spread", "clipped") if updates > 1 else ("reward",):
        assert same[name] == last[name]


@pytest.mark.campaign
def test_several_updates_with_each_set_need_fewer_texts(run, tiny, tuned):
    """Five sets of 16 texts: of five updates, and of twenty."""
    rewards = {}
    for updates in (1, 4):
        workdir, steps = tuned / f"five{updates}", 5 * updates
        asked = words(
            tuned, train__num_steps=steps, log__every=updates, objective__updates=updates,
            optim__learning_rate=0.001,
        )  # fmt: skip
        ended = run("--config", tiny, "--workdir", workdir, *asked)
        assert ended.code == 0, ended
        rewards[updates] = [row["reward"] for row in runs.rows(workdir) if "reward" in row]
    print(rewards)
    assert rewards[4][0] == rewards[1][0] and rewards[4][-1] > rewards[1][-1] + 0.2
    row = runs.rows(tuned / "five4")[1]
    assert row["ratio_spread"] > 0 and 0 <= row["clipped"] < 1
    assert "% clipped, training loss" in ended.err and "the model that drew" in ended.out
