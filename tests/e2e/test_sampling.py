"""--mode sample as users run it: what they give stands, numbers, pictures, judges."""

import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import exact
import numpy as np
import pytest
from PIL import Image
from tool_modules import TOOLS, tool_module

from md4_jax.processes.masking import Masking

pytestmark = pytest.mark.slow

LENGTH = 16  # of the tiny config
# Halton orders the masks of images, and these are texts.
SAMPLERS = sorted(set(exact.samplers_for(Masking(2))) - {"halton"})


class Drawn(NamedTuple):
    """The rows of the jsonl, the printed numbers, the file of the samples and the lines."""

    rows: list[dict]
    numbers: dict[str, Any]
    file: Path
    lines: list[str]

    @property
    def texts(self) -> list[str]:
        return [row["text"] for row in self.rows]


@pytest.fixture(scope="module")
def sample(run, tiny, trained):
    """What --mode sample writes and prints with these assignments of its section."""

    def sample(*assignments, workdir=trained, more=()) -> Drawn:
        flags = [f"--config.sample.{assignment}" for assignment in assignments]
        ended = run("--config", tiny, "--workdir", workdir, "--mode", "sample", *flags, *more)
        assert ended.code == 0, ended
        lines = ended.out.strip().splitlines()
        file = Path(re.search(r"from step 30: (.*\.txt)$", lines[-2])[1])
        rows = file.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
        return Drawn([json.loads(row) for row in rows], json.loads(lines[-1]), file, lines)

    return sample


def refuse_to_sample(refused, tiny, trained, *assignments) -> str:
    """The message when samples of the trained run are refused; none is written."""
    before = sorted((trained / "samples").iterdir())
    flags = [f"--config.sample.{assignment}" for assignment in assignments]
    message = refused("--config", tiny, "--workdir", trained, "--mode", "sample", *flags)
    assert sorted((trained / "samples").iterdir()) == before
    return message


def test_a_prompt_and_a_suffix_stand_at_both_ends(sample):
    drawn = sample("num=3", "prompt=ROMEO:\n", "suffix=night.")
    assert all(text.startswith("ROMEO:\n") and text.endswith("night.") for text in drawn.texts)
    assert all(len(text) == LENGTH for text in drawn.texts)
    assert drawn.numbers["network_evaluations_max"] <= 3  # of the 4 steps: one for each free token
    assert all(text in "\n".join(drawn.lines) for text in drawn.texts)


@pytest.fixture(scope="module")
def templates(scratch):
    """A file with a beginning and with a text to be filled in."""
    path = scratch / "templates.txt"
    path.write_text("To be,\\n\nT_ be _r _o_ to\n")
    return path


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.cases(2)
def test_what_is_given_stands_with_every_sampler(name, sample, templates):
    """`num` of each line, in order; the rest is drawn, and not alike."""
    drawn = sample(f"name={name}", f"templates={templates}", "num=3", "steps=8")
    assert [row["sample"] for row in drawn.rows] == list(range(6))
    assert all(re.fullmatch(r"(?s)To be,\n.{9}", text) for text in drawn.texts[:3])
    assert all(re.fullmatch(r"(?s)T. be .r .o. to.", text) for text in drawn.texts[3:])
    assert all(max(row["tokens"]) < 65 for row in drawn.rows)
    assert len(set(drawn.texts)) == 6
    assert drawn.numbers["sampler"] == name and drawn.numbers["samples"] == 6
    used = [row["network_evaluations"] for row in drawn.rows]
    assert all(0 < count <= 15 for count in used)
    assert drawn.numbers["network_evaluations"] == pytest.approx(np.mean(used))


def test_every_sampler_that_fits_has_a_case():
    assert {"ancestral", "tweedie", "euler", "tau_leaping", "first_hitting", "any_order"} < set(
        SAMPLERS
    )
    assert {"confidence", "remask", "predictor_corrector"} < set(SAMPLERS)


def test_a_template_shorter_than_the_sample_is_continued(sample):
    drawn = sample("num=3", "template=Wh#re", "blank=#", "length=20")
    assert all(re.fullmatch(r"(?s)Wh.re.{15}", text) for text in drawn.texts)


def test_windows_make_texts_longer_than_in_training(sample):
    drawn = sample("num=2", "prompt=ROMEO:", "length=40", "stride=8", "trace=true")
    assert all(len(text) == 40 and text.startswith("ROMEO:") for text in drawn.texts)
    assert drawn.numbers["length"] == 40
    assert 4 < drawn.numbers["network_evaluations_max"] <= 16  # 4 windows of at most 4 steps
    assert final_text(drawn.file) == drawn.texts[0].replace("\n", "↵")
    at_once = sample("num=2", "prompt=ROMEO:", "length=40")
    assert at_once.texts != drawn.texts and at_once.numbers["network_evaluations_max"] <= 4


def test_the_last_line_has_the_numbers(sample):
    asked = ("num=5", "batch_size=2", "judge=self", "grid=[1.0,0.5,0.0]")
    drawn = sample(*asked, more=["--config.evals.test.batch_size=2"])
    tokens = [tuple(row["tokens"]) for row in drawn.rows]
    found = drawn.numbers
    used = [row["network_evaluations"] for row in drawn.rows]
    assert max(used) <= 2  # the steps of the list
    assert (found["samples"], found["length"], found["step"]) == (5, LENGTH, 30)
    assert found["network_evaluations"] == pytest.approx(sum(used) / 5)
    assert found["network_evaluations_min"] == min(used)
    assert found["network_evaluations_max"] == max(used)
    assert 0 < found["seconds_per_sequence"] < 60

    entropies = [
        -sum(n / LENGTH * math.log2(n / LENGTH) for n in Counter(row).values()) for row in tokens
    ]
    assert found["unigram_entropy_bits"] == pytest.approx(np.mean(entropies))
    error = np.std(entropies, ddof=1) / math.sqrt(5)
    assert found["unigram_entropy_bits_se"] == pytest.approx(error)
    for n in (1, 2, 3, 4):
        grams = [row[i : i + n] for row in tokens for i in range(LENGTH + 1 - n)]
        assert found[f"distinct_{n}"] == pytest.approx(len(set(grams)) / len(grams))

    assert found["judge"] == "self"
    assert (found["judge_sequences"], found["judge_tokens"]) == (5, 5 * LENGTH)
    assert 1.0 < found["judge_bits_per_token"] < 10.0 and found["judge_bits_per_token_se"] > 0


@pytest.mark.campaign
def test_another_run_judges(sample, trained, run, tiny, tmp_path):
    """The run itself by its path says what `self` says; one of fewer steps finds them odder."""
    settings = ("num=64", "batch_size=64")
    more = ("--config.evals.test.draws=4", "--config.evals.test.seed=3")
    mine = sample(*settings, "judge=self", more=more).numbers
    path = sample(*settings, f"judge={trained}", more=more).numbers
    judged = {k: v for k, v in mine.items() if k.startswith("judge_")}
    assert judged["judge_draws"] == 4 and judged.items() <= path.items()
    assert path["judge"] == str(trained)
    other = tmp_path / "run"
    words = (
        "train.num_steps=1",
        "optim.warmup_steps=1",
        "evals.validation.every=0",
        "network.depth=1",
    )
    assert run("--config", tiny, "--workdir", other, *(f"--config.{w}" for w in words)).code == 0
    worse = sample(*settings, f"judge={other}").numbers
    assert worse["judge_bits_per_token"] > mine["judge_bits_per_token"] + 0.3


def test_a_judge_that_cannot_judge_is_refused(refused, tiny, trained, copy, tmp_path):
    def message(judge):
        return refuse_to_sample(refused, tiny, trained, f"judge={judge}")

    assert f"sample.judge={tmp_path / 'none'} holds no run" in message(tmp_path / "none")
    assert "holds no run; 'self' stands for the run that is sampled" in message(tiny)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    letters, _ = tokenizer["tokenizer"], tokenizer.pop("crc32")
    letters = letters | {"alphabet": letters["alphabet"][::-1]}
    changed = tokenizer | {"tokenizer": letters}
    (copy / "tokenizer.json").write_text(json.dumps(changed))
    assert f"sample.judge={copy} was trained with another tokenizer" in message(copy)
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    (copy / "checkpoints").rename(tmp_path / "checkpoints")
    assert f"{copy} holds no checkpoint yet" in message(copy)


def test_a_judge_is_looked_for_before_training(refused, tiny, tmp_path):
    workdir = tmp_path / "run"
    at = ("--config", tiny, "--workdir", workdir)
    assert "judge=/nowhere holds no run" in refused(*at, "--config.sample.judge=/nowhere")
    assert not workdir.exists()


def page_data(file: Path) -> dict:
    text = file.with_suffix(".html").read_text(encoding="utf-8")
    return json.loads(re.search(r"^const data = (.*);$", text, re.MULTILINE)[1])


def final_text(file: Path) -> str:
    """What the page of a sample ends with."""
    data = page_data(file)["samples"][0]
    return "".join(data["words"][i] for i in data["final"])


def test_a_trace_is_drawn_beside_the_samples(sample):
    drawn = sample("num=1", "prompt=ROMEO:", "steps=8", "trace=true")
    made = [line.removeprefix("trace: ") for line in drawn.lines if line.startswith("trace: ")]
    assert made == [str(drawn.file.with_suffix(kind)) for kind in (".gif", ".html")]
    page = page_data(drawn.file)
    settings = "ancestral, 8 steps, cosine grid, temperature 1, seed 0, objective md4"
    assert page["title"] == f"{drawn.file.stem}: {settings}"
    assert final_text(drawn.file) == drawn.texts[0].replace("\n", "↵")
    (data,) = page["samples"]
    steps = [frame["step"] for frame in data["frames"]]
    assert data["prompt"] == list(range(6)) and max(steps) <= 8
    assert len(steps) == drawn.rows[0]["network_evaluations"] + 1
    chances = [chance for frame in data["frames"][1:] for _, _, chance in frame["changes"]]
    assert len(chances) == 10 and all(0 < chance < 1 for chance in chances)
    with Image.open(drawn.file.with_suffix(".gif")) as image:
        assert image.n_frames == len(steps)
    assert drawn.numbers["unigram_entropy_bits_se"] is None  # one sample has no spread


def test_looking_changes_nothing(sample):
    """Neither a trace nor a judge; without them there are no pictures and no judgement."""
    drawn = sample("num=2", "steps=8", "trace=true", "judge=self")
    plain = sample("num=2", "steps=8")
    assert plain.texts == drawn.texts
    assert not plain.file.with_suffix(".gif").exists()
    assert not [key for key in plain.numbers if "judge" in key]


@pytest.mark.campaign
def test_genmd4_also_draws_its_powers(run, tiny, tmp_path, sample):
    words = ("process.name=state_dependent", "objective.name=genmd4", "optim.warmup_steps=1")
    more = [f"--config.{word}" for word in (*words, "evals.validation.every=0")]
    assert run("--config", tiny, "--workdir", tmp_path, *more).code == 0
    drawn = sample("num=1", "trace=true", workdir=tmp_path, more=more)
    picture = drawn.file.with_suffix(".power.png")
    assert f"trace: {picture}" in drawn.lines
    with Image.open(picture) as image:
        assert image.format == "PNG" and image.width > 900 and image.height > 500


def frontier(environment, workdir, *words):
    command = [sys.executable, Path(__file__).parents[2] / "tools/frontier.py", *words]
    command += ["--config", Path(__file__).with_name("tiny.py"), "--workdir", workdir]
    command += ["--", "--config.sample.num=4"]
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)


@pytest.mark.campaign
def test_the_frontier_is_drawn_and_no_point_made_twice(environment, copy):
    words = ("--steps", "2", "--temperatures", "0.5,1.0")
    first = frontier(environment, copy, *words)
    assert first.returncode == 0, first.stderr
    rows = (copy / "figures" / "frontier.jsonl").read_text().splitlines()
    assert first.stdout.splitlines() == [*rows, f"frontier: {copy / 'figures/frontier.png'}"]
    found = [json.loads(row) for row in rows]
    asked = [(row["steps"], row["temperature"]) for row in found]
    assert asked == [(2, 0.5), (2, 1.0)]
    for row in found:
        assert row["samples"] == 4 and row["judge"] == "self" and row["commit"]
        assert row["network_evaluations"] <= row["steps"] and row["judge_bits_per_token"] > 0
    assert found[0]["unigram_entropy_bits"] < found[1]["unigram_entropy_bits"]
    with Image.open(copy / "figures" / "frontier.png") as image:
        assert image.width > 900 and image.height > 400
    written = sorted(path.name for path in (copy / "samples").iterdir())
    more = frontier(environment, copy, "--steps", "2,3", "--temperatures", "0.5")
    assert more.returncode == 0, more.stderr
    lines = (copy / "figures" / "frontier.jsonl").read_text().splitlines()
    assert lines[:2] == rows and len(lines) == 3
    assert more.stdout.splitlines()[:2] == [rows[0], lines[2]]
    assert len(list((copy / "samples").iterdir())) == len(written) + 2  # a txt and a jsonl


def test_points_of_a_frontier_are_made_again_for_another_checkpoint_alone(copy, monkeypatch):
    """Also where eval.checkpoint names another one than the newest."""
    monkeypatch.syspath_prepend(TOOLS)
    tool, made = tool_module("frontier"), []
    told, steps = json.loads((copy / "config.json").read_text()), iter((7, 7, 30, 40))

    def numbers(words):
        made.append(words)
        return {"step": next(steps), "judge": "self"}

    def points(checkpoint):
        told["config"]["eval"] = {"checkpoint": checkpoint}
        (copy / "config.json").write_text(json.dumps(told))
        tool.main()
        return len(made)

    monkeypatch.setattr(tool.program, "numbers", numbers)
    monkeypatch.setattr(tool.figures, "frontier", lambda rows, path: None)
    monkeypatch.setattr(sys, "argv", ["frontier", "--workdir", str(copy), "--steps", "2"])
    assert [points("best"), points("best"), points(7), points(7)] == [1, 1, 2, 2]
    assert [points("newest"), points("newest")] == [3, 3]
    kept = copy / "figures" / "frontier.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    # A row of before: only the newest checkpoint was told.
    older = {k: v for k, v in rows[2].items() if k not in ("newest", "checkpoint")}
    kept.write_text(json.dumps(older) + "\n")
    assert points("newest") == 3
    (copy / "checkpoints" / "40").mkdir()
    assert points("newest") == 4


@pytest.mark.campaign
def test_a_frontier_of_nothing_is_refused(environment, tmp_path):
    ended = frontier(environment, tmp_path)
    assert ended.returncode == 1 and f"{tmp_path} holds no trained run" in ended.stderr
    ended = frontier(environment, tmp_path, "--steps", "8,many")
    assert ended.returncode == 2 and "8,many" in ended.stderr and "Traceback" not in ended.stderr
    assert not list(tmp_path.iterdir())


def test_a_reward_steers_samples_and_is_reported(sample):
    """More of its letter than without; `num`, file, line and figures as they are asked for."""
    pattern = ("num=8", "reward.name=pattern", "reward.pattern=e", "reward.every=1")
    plain = sample(*pattern, "reward.strength=0", "reward.particles=1")
    steered = sample(*pattern, "reward.strength=3", "reward.particles=16")
    for drawn in (plain, steered):
        counts = [text.count("e") for text in drawn.texts]
        assert counts == [row["reward"] for row in drawn.rows] and len(counts) == 8
        assert drawn.numbers["reward"] == sum(counts) / 8
        assert drawn.rows[0]["reward_options"]["pattern"] == "e"
    assert steered.numbers["reward"] > plain.numbers["reward"] + 1
    assert plain.numbers["log_mean_exp_reward"] == 0.0
    assert 1 <= steered.numbers["effective_particles"] <= 16
    assert steered.lines[-3].startswith("reward ") and "of 16 particles" in steered.lines[-3]


def test_a_reward_of_ones_own_is_imported(sample):
    """That of the example package, which counts right sums: there are none in this text."""
    drawn = sample("reward.name=extension.reward:RightSums", "reward.particles=2")
    assert drawn.numbers["reward"] == 0.0 and drawn.numbers["effective_particles"] == 2.0
