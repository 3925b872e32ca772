"""Block diffusion as users run it: other blocks, longer text, stops, a masked model before it."""

import json
import re
import shutil

import numpy as np
import pytest

pytestmark = pytest.mark.slow

LENGTH = 16  # of the tiny config
BLOCK = ("--config.objective.name=block", "--config.objective.block=4")


def said(ended) -> dict:
    """The line of numbers at the end."""
    assert ended.code == 0, ended
    return json.loads(ended.out.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def at(run, tiny, scratch):
    """The arguments of a trained run of blocks of 4."""
    free = "--config.network.time_conditioning=False"
    words = ("--config", tiny, "--workdir", scratch / "blocks", *BLOCK, free)
    ended = run(*words)
    assert ended.code == 0, ended
    assert re.search(r"test: <= \d\.\d+ \+- \d\.\d+ bits/character", ended.out)
    return words


def sample(run, at, *assignments):
    """(numbers, rows) of --mode sample."""
    flags = [f"--config.sample.{assignment}" for assignment in assignments]
    ended = run(*at, "--mode", "sample", *flags)
    numbers = said(ended)
    file = re.search(r"from step 30: (.*)\.txt$", ended.out.strip().splitlines()[-2])[1]
    with open(f"{file}.jsonl", encoding="utf-8") as lines:
        return numbers, [json.loads(line) for line in lines]


def evaluate(run, at, *assignments, limit=512) -> dict:
    flags = [f"--config.evals.test.{each}" for each in (f"limit={limit}", *assignments)]
    return said(run(*at, "--mode", "eval", *flags))


@pytest.mark.campaign
def test_the_same_run_is_evaluated_by_blocks_of_any_size(run, at):
    """Blocks of one are exact for a time-free network: other draws change nothing. Over all orders
    blocks of four are exact too, and below their bound."""
    flags = [f"--config.evals.test.objective.{key}" for key in ("name=block", "block=1")]
    flags.append("--config.evals.test.limit=512")
    ended = [run(*at, "--mode", "eval", *flags, f"--config.evals.test.seed={s}") for s in (0, 1)]
    one = [said(each) for each in ended]
    assert one[0]["exact"]
    assert one[0]["nats_per_token"] == pytest.approx(one[1]["nats_per_token"], rel=1e-6)
    assert "<=" not in next(x for x in ended[0].out.splitlines() if "perplexity" in x)
    whole = evaluate(run, at, "objective.name=block", "objective.block=16", "draws=4")
    every = evaluate(run, at, "objective.name=every_order", "objective.block=4")
    assert every["exact"] and every["tokens"] == whole["tokens"] == one[0]["tokens"]
    four = evaluate(run, at, "objective.name=block", "objective.block=4", "draws=8")
    assert not four["exact"]
    noise = 4 * four["nats_per_token_se"]
    assert every["nats_per_token"] < four["nats_per_token"] + noise
    assert abs(whole["nats_per_token"] - one[0]["nats_per_token"]) < 0.5


@pytest.mark.campaign
def test_text_before_helps_and_every_token_counts_once(run, at):
    """Windows that slide by 4: as many tokens, and no more nats than without what is before."""
    apart = evaluate(run, at, "draws=4", limit=0)
    slid = evaluate(run, at, "draws=4", "stride=4", limit=0)
    assert slid["tokens"] == apart["tokens"] and slid["sequences"] > 3 * apart["sequences"]
    noise = 3 * np.hypot(apart["nats_per_token_se"], slid["nats_per_token_se"])
    assert slid["nats_per_token"] < apart["nats_per_token"] + noise


def test_text_four_times_as_long_with_a_prompt_and_a_trace(run, at):
    numbers, rows = sample(run, at, "length=64", "prompt=ROMEO", "trace=True", "memory=8")
    assert numbers["length"] == 64 and len(rows) == 2
    assert all(row["text"].startswith("ROMEO") and len(row["tokens"]) == 64 for row in rows)
    again = sample(run, at, "length=64", "prompt=ROMEO", "memory=8", "cached=False")[1]
    assert [row["tokens"] for row in again] == [row["tokens"] for row in rows]
    other = sample(run, at, "length=64", "prompt=ROMEO", "memory=8", "block=8")[1]
    assert [row["tokens"] for row in other] != [row["tokens"] for row in rows]


def test_what_repeats_itself_ends(run, at):
    """Of 8 tokens no entropy is above log 8 = 2.08 nats, so that all end once there are 8."""
    numbers, rows = sample(run, at, "length=64", "memory=8", "min_entropy=2.1")
    assert (numbers["length_min"], numbers["length_max"]) == (8, 8)
    assert all(len(row["text"]) == len(row["tokens"]) == 8 for row in rows)


@pytest.mark.campaign
def test_a_masked_model_is_where_it_begins(run, tiny, trained, tmp_path, refused, arrays):
    """Its averaged parameters are the first: a step of rate 0 leaves them, and training resumes."""
    workdir, initial = tmp_path / "run", tmp_path / "masked"
    shutil.copytree(trained, initial)
    words = [
        *("--config", tiny, "--workdir", workdir, *BLOCK, f"--config.train.initial={initial}"),
        *("--config.optim.learning_rate=0", "--config.evals.validation.every=0"),
        *("--config.train.num_steps=1", "--config.optim.warmup_steps=0"),
    ]
    ended = run(*words)
    assert ended.code == 0, ended
    assert f"begins with the averaged parameters of step 30 of {initial}" in ended.out
    before, after = arrays(trained), arrays(workdir)
    names = [name for name in before if name.startswith("ema/network")]
    assert len(names) > 15
    for name in names:
        np.testing.assert_array_equal(before[name], after[name])
        params = name.replace("ema/", "params/", 1)
        np.testing.assert_array_equal(before[name], after[params])
    shutil.rmtree(initial)  # no longer needed
    resumed = run(*words)
    assert resumed.code == 0 and "begins with" not in resumed.out
    wrong = ("--config", tiny, "--workdir", tmp_path / "other", f"--config.train.initial={trained}")
    message = refused(*wrong, "--config.network.depth=2", "--config.network.size=48")
    assert "network.depth=1 in that run and 2 in this one, network.size=32 in that run" in message
    message = refused(*wrong[:-1], "--config.train.initial=/nowhere")
    assert "train.initial=/nowhere holds no run" in message
    assert not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def noisy(run, tiny, scratch):
    """The arguments of a trained run of blocks of 4 of uniform noise, by cross-entropy."""
    words = [
        *("objective.name=cross_entropy", "objective.block=4", "process.name=uniform"),
        *("process.parametrisation=mixture", "process.schedule.name=geometric"),
        *("process.schedule.minimum=1e-3", "process.schedule.maximum=20.0"),
    ]
    flags = [f"--config.{word}" for word in words]
    arguments = ("--config", tiny, "--workdir", scratch / "noisy blocks", *flags)
    ended = run(*arguments)
    assert ended.code == 0, ended
    assert re.search(r"test: <= \d+\.\d+ \+- \d\.\d+ bits/character", ended.out)
    return arguments


@pytest.mark.campaign
def test_blocks_of_uniform_noise_are_evaluated_and_sampled(run, noisy):
    """The bound is that of the trained blocks; text of four times the length."""
    own = evaluate(run, noisy, "draws=4")
    same = evaluate(run, noisy, "draws=4", "objective.name=uniform_elbo", "objective.block=4")
    assert own["nats_per_token"] == same["nats_per_token"] and not own["exact"]
    assert own["prior_bits_per_token"] < 0.01 < own["reconstruction_bits_per_token"]
    whole = evaluate(run, noisy, "objective.name=uniform_elbo", "objective.block=0")
    assert whole["nats_per_token"] != own["nats_per_token"]
    asked = ("length=64", "prompt=ROMEO", "trace=True", "memory=8", "grid=uniform")
    numbers, rows = sample(run, noisy, *asked)
    assert numbers["length"] == 64 and numbers["network_evaluations_max"] == 15 * 5
    assert all(row["text"].startswith("ROMEO") and len(row["tokens"]) == 64 for row in rows)
    again = sample(run, noisy, *asked, "cached=False")[1]
    assert [row["tokens"] for row in again] == [row["tokens"] for row in rows]


MISTAKES = [
    (["objective.block=5"], ["objective.block=5", "data.length=16"]),
    (["objective.block=0"], ["objective.block must be at least 1, not 0"]),
    (["objective.low=0.3"], ["low=0.3", "high=1.0", "set objective.draws='times'"]),
    (["network.local_width=3"], ["network.local_width=0"]),
    (["network.causal=True"], ["network.causal=False"]),
    (["process.name=state_dependent"], ["'masking' or 'resizing', not 'state_dependent'"]),
    (["sample.block=3"], ["sample.block=3 must divide sample.length=16"]),
    (["sample.block=8", "sample.memory=12"], ["sample.block=8 must divide sample.memory=12"]),
    (["sample.stride=4"], ["sample.stride=4", "sample.block=4", "sample.memory=16"]),
    (["sample.stop=period"], ["sample.stop='period' is not an entry of the vocabulary"]),
    (["sample.stop=end_of_text"], ["needs a tokenizer with an end-of-text token"]),
    (["sample.min_entropy=-1"], ["sample.min_entropy must not be negative, not -1"]),
    (["sample.min_entropy=2", "sample.judge=self"], ["sample.judge='self'", "min_entropy=2"]),
    (
        ["sample.min_entropy=2", "sample.memory=32"],
        ["sample.memory=32", "sample.length=16"],
    ),
    (["evals.test.stride=17"], ["evals.test.stride=17 must be at most data.length=16"]),
    (
        ["evals.test.stride=6"],
        ["evals.test.stride=6", "data.length=16", "objective.block=4"],
    ),
    (["evals.test.stride=-1"], ["evals.test.stride must not be negative, not -1"]),
    (
        [
            *("evals.test.objective.name=block", "evals.test.objective.draws=times"),
            *("evals.test.objective.low=0.3", "evals.test.objective.high=0.8"),
        ],
        ["evals.test.objective.name='block' is not a bound"],
    ),
]


@pytest.mark.parametrize("assignments, words", MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_is_named_with_its_numbers(assignments, words, tiny, tmp_path, refused):
    flags = [f"--config.{assignment}" for assignment in assignments]
    message = refused("--config", tiny, "--workdir", tmp_path / "run", *BLOCK, *flags)
    for word in words:
        assert word in message
    assert not list(tmp_path.iterdir())


@pytest.mark.campaign
def test_a_clipped_schedule_trains_and_is_not_printed_as_a_bound(run, tiny, tmp_path):
    """The reported number is that of all shares of masks, of the same blocks."""
    clipped = ("draws=times", "low=0.3", "high=0.8")
    flags = [f"--config.objective.{word}" for word in clipped]
    ended = run("--config", tiny, "--workdir", tmp_path / "run", *BLOCK, *flags)
    assert ended.code == 0 and "training loss" in ended.out + ended.err
    assert not re.search(r"<= [^\n]*training loss", ended.out + ended.err)
    assert re.search(r"test: <= \d\.\d+", ended.out)
