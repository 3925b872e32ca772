"""What a run leaves behind and prints, and what --mode eval and --mode sample make of it."""

import json
import math
import re
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from events import events_of

import md4_jax
from md4_jax.config import build, inputs, runs, schema
from md4_jax.data.corpus import Corpus
from md4_jax.experiment import rows_of
from md4_jax.options.data import DataOptions
from md4_jax.training.writers import tag


def lines(ended) -> list[str]:
    return ended.out.strip().splitlines()


@pytest.fixture(scope="module")
def evaluated(run, tiny, trained):
    """The JSON object of --mode eval."""
    ended = run("--config", tiny, "--workdir", trained, "--mode", "eval")
    assert ended.code == 0, ended
    return json.loads(lines(ended)[-1])


def test_what_the_workdir_holds(trained):
    kept = {path.name for path in trained.iterdir()}
    expected = ("config.json", "tokenizer.json", "metrics.jsonl", "tensorboard")
    assert kept >= {*expected, "checkpoints", "samples", "figures"}
    assert not [path for path in trained.rglob("*") if "tmp" in path.name or "partial" in path.name]


def test_config_json(trained):
    stored = json.loads((trained / "config.json").read_text())
    assert stored["package"] == "md4_jax"
    assert stored["version"] == md4_jax.__version__
    assert re.fullmatch(r"[0-9a-f]{40}\+?|unknown", stored["commit"])
    assert set(stored["config"]) >= {"data", "network", "train", "mesh", "sample"}
    schema.check_keys(stored["config"])


def test_metrics_are_finite_numbers(trained, rows):
    for row in rows(trained):
        assert isinstance(row["step"], int)
        assert all(isinstance(v, (int, float)) and math.isfinite(v) for v in row.values())


def test_tensorboard_has_the_numbers_of_metrics_jsonl(trained, rows):
    (file,) = (trained / "tensorboard").glob("events.*")
    events = events_of(file)
    scalars = {(e.step, v.tag): v.simple_value for e in events for v in e.summary.value}
    wanted = [(r["step"], k, v) for r in rows(trained) for k, v in r.items() if k != "step"]
    assert len(wanted) > 50
    for step, name, value in wanted:
        np.testing.assert_allclose(scalars[step, tag(name)], value, rtol=1e-6)


def test_the_picture(trained):
    """A PNG with a curve in it: valid checksums, and more than a handful of different rows."""
    raw, at, chunks = (trained / "figures" / "loss.png").read_bytes(), 8, {}
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    while at < len(raw):
        (size,), kind = struct.unpack_from(">I", raw, at), raw[at + 4 : at + 8]
        body = raw[at + 8 : at + 8 + size]
        (crc,) = struct.unpack_from(">I", raw, at + 8 + size)
        assert zlib.crc32(kind + body) == crc
        chunks[kind] = chunks.get(kind, b"") + body
        at += 12 + size
    width, height = struct.unpack_from(">II", chunks[b"IHDR"])
    assert width > 600 and height > 400 and b"IEND" in chunks
    pixels = zlib.decompress(chunks[b"IDAT"])
    stride = len(pixels) // height
    assert len({pixels[i * stride : (i + 1) * stride] for i in range(height)}) > 100


@pytest.mark.campaign
def test_a_run_too_short_to_log_says_so(run, tiny, tmp_path):
    words = (
        "train.num_steps=2",
        "optim.warmup_steps=1",
        "evals.validation.every=0",
        "network.depth=1",
    )
    ended = run("--config", tiny, "--workdir", tmp_path, *(f"--config.{w}" for w in words))
    assert ended.code == 0, ended.err
    assert "loss curve    none: nothing was logged" in ended.out
    assert not (tmp_path / "figures").exists()
    # Parameters, their moving average and two moments, in float32.
    count = int(re.search(r"parameters  ([\d,]+) in the network", ended.out)[1].replace(",", ""))
    held = float(re.search(r"memory      ([\d.]+) MiB on a device", ended.out)[1])
    assert held == pytest.approx(4 * 4 * count / 2**20, abs=0.06) and held > 0.2


def test_eval_prints_one_json_object(evaluated):
    units = ("nats_per_token", "bits_per_token", "bits_per_character", "perplexity")
    units += ("bits_per_byte", "word_perplexity")
    expected = {"step", "split", "sequences", "tokens", "draws", "exact", "bytes", "words"}
    expected |= {"diffusion_bits_per_token", *units}
    assert set(evaluated) == expected | {f"{unit}_se" for unit in units}
    assert (evaluated["step"], evaluated["split"], evaluated["draws"]) == (30, "test", 1)
    assert evaluated["exact"] is False
    nats = evaluated["nats_per_token"]
    assert evaluated["bits_per_token"] == evaluated["bits_per_character"]
    assert evaluated["bits_per_token"] == pytest.approx(nats / math.log(2), rel=1e-12)
    assert evaluated["bits_per_byte"] == evaluated["bits_per_token"]  # the text is ASCII
    per_word = nats * evaluated["tokens"] / evaluated["words"]
    assert evaluated["word_perplexity"] == pytest.approx(math.exp(per_word), rel=1e-9)
    assert evaluated["perplexity"] == pytest.approx(math.exp(nats), rel=1e-12)
    assert 0 < evaluated["nats_per_token_se"] < 0.1 * nats
    assert nats < math.log(65) + 0.5  # no worse than guessing one of 65 characters


def test_eval_is_the_final_evaluation_of_training(copy, run, tiny, evaluated):
    """Started again, the finished run says the same in words, without evaluating again."""
    ended = run("--config", tiny, "--workdir", copy)
    assert "step 30 was evaluated before, with the same settings: test, samples" in ended.out
    assert "evaluating step" not in ended.out
    (line,) = [line for line in lines(ended) if line.startswith("trained to step 30; test: ")]
    value = f"{evaluated['bits_per_character']:.4f} +- {evaluated['bits_per_character_se']:.4f}"
    assert f"<= {value} bits/character" in line
    assert f"({evaluated['sequences']} sequences, 1 draw each)" in line


def test_validation_is_of_the_average_of_the_parameters(trained, tiny, rows):
    """The last line of validation is what the kept average has on the same sequences."""
    asked = schema.load_config(str(tiny), {})
    domain, source = inputs.domain_and_source(asked, trained)
    experiment = build.experiment(asked, domain)
    _, params = runs.averaged(experiment, trained)
    bound = experiment.evals["validation"]
    batches = Corpus(source, domain, experiment.data).eval_batches(
        "validation", **rows_of(experiment, bound.sequences(experiment))
    )
    result = bound.of_batches(experiment, params, batches, {})
    name = "validation/nats_per_token"
    last = [row[name] for row in rows(trained) if name in row][-1]
    assert last == pytest.approx(result["nats_per_token"], rel=1e-6)


@pytest.mark.campaign
def test_no_line_says_a_bound_without_its_error(run, tiny, tmp_path):
    words = (
        "train.num_steps=6",
        "log.every=3",
        "evals.validation.every=3",
        "evals.ngrams.final=True",
    )
    settings = (*words, "optim.warmup_steps=1", "network.depth=1", "checkpoint.every=3")
    ended = run("--config", tiny, "--workdir", tmp_path, *(f"--config.{w}" for w in settings))
    assert ended.code == 0, ended.err
    text = (ended.out + ended.err).replace(str(tmp_path), "DIR")
    said = [line for line in text.splitlines() if re.search("bound|<=", line)]
    # Two windows, two evaluations, the final one twice, and the model among n-grams.
    assert len(said) == 7 and all("+-" in line for line in said), said


def test_eval_adds_its_result_and_changes_nothing_else(copy, run, tiny, snapshot):
    before, kept = snapshot(copy), copy / "evaluations.jsonl"
    first = kept.read_text()
    ended = run(
        "--config", tiny, "--workdir", copy, "--mode", "eval", "--config.evals.test.draws=3"
    )
    assert ended.code == 0
    after = snapshot(copy)
    assert after.pop(kept.name) != before.pop(kept.name) and after == before
    assert kept.read_text().startswith(first)
    row, printed = (
        json.loads(kept.read_text()[len(first) :]),
        json.loads(ended.out.splitlines()[-1]),
    )
    assert row["eval"] == "test" and "--config.evals.test.draws=3" in row["command"]
    assert {key: row[key] for key in printed} == printed


@pytest.mark.slow
@pytest.mark.parametrize("split", ["validation", "test"])
@pytest.mark.cases(1)
def test_the_whole_split_is_evaluated_for_any_batch_size(split, run, tiny, trained):
    """One sequence of what is left over included; the draws differ, so the values nearly agree."""
    config = schema.load_config(str(tiny), {})
    domain, source = inputs.domain_and_source(config, trained)
    size = Corpus(source, domain, DataOptions(length=16)).sizes([split])[split]
    assert size.tokens > size.sequences * 16
    found = {}
    for batch in (7, 64, 1000):
        ended = run(
            *("--config", tiny, "--workdir", trained, "--mode", "eval"),
            *(f"--config.evals.test.split={split}", f"--config.evals.test.batch_size={batch}"),
        )
        found[batch] = json.loads(lines(ended)[-1])
        assert found[batch]["split"] == split
        assert found[batch]["sequences"] == size.sequences + 1
        assert found[batch]["tokens"] == size.tokens
    for result in found.values():  # 4 standard errors of a difference
        error = math.hypot(result["nats_per_token_se"], found[64]["nats_per_token_se"])
        assert abs(result["nats_per_token"] - found[64]["nats_per_token"]) < 4 * error


@pytest.mark.campaign
def test_more_draws_have_a_smaller_error(run, tiny, trained, evaluated):
    ended = run(
        *("--config", tiny, "--workdir", trained, "--mode", "eval", "--config.evals.test.draws=4"),
    )
    four = json.loads(lines(ended)[-1])
    assert four["draws"] == 4
    assert four["nats_per_token_se"] < 0.95 * evaluated["nats_per_token_se"]
    error = math.hypot(four["nats_per_token_se"], evaluated["nats_per_token_se"])
    assert abs(four["nats_per_token"] - evaluated["nats_per_token"]) < 4 * error


@pytest.fixture(scope="module")
def sample(run, tiny, trained, scratch):
    """Rows of the jsonl that --mode sample writes, and what it prints."""

    def sample(*assignments):
        flags = [f"--config.sample.{assignment}" for assignment in assignments]
        ended = run("--config", tiny, "--workdir", trained, "--mode", "sample", *flags)
        assert ended.code == 0, ended
        path = re.search(r"from step \d+: (.*)\.txt$", lines(ended)[-2])[1]
        with open(f"{path}.jsonl", encoding="utf-8") as file:
            return [json.loads(line) for line in file], ended

    return sample


def tokens(rows) -> list[list[int]]:
    return [row["tokens"] for row in rows]


def test_samples_of_a_run(sample, trained):
    rows, ended = sample()
    assert len(rows) == 2 and [row["sample"] for row in rows] == [0, 1]
    for row in rows:
        assert row["step"] == 30 and len(row["tokens"]) == 16 == len(row["text"])
        assert max(row["tokens"]) < 65  # no mask is left
        assert row["text"] in ended.out
    assert "2 samples of 16 characters from step 30" in lines(ended)[-2]
    assert 1 <= json.loads(lines(ended)[-1])["network_evaluations_max"] <= 4
    written = (trained / "samples" / "step_00000030.jsonl").read_text().splitlines()
    assert tokens(rows) == tokens(map(json.loads, written))  # those of the training run


@pytest.mark.slow
def test_a_sample_does_not_depend_on_its_neighbours(sample):
    (five, _), (batched, _), (one, _) = (
        sample("num=5"),
        sample("num=5", "batch_size=2"),
        sample("num=1"),
    )
    assert tokens(five) == tokens(batched)
    assert tokens(five)[:1] == tokens(one)
    assert tokens(five)[:2] == tokens(sample()[0])
    assert len(set(map(tuple, tokens(five)))) == 5


@pytest.mark.campaign
def test_what_changes_a_sample(sample):
    default = tokens(sample("num=4")[0])
    assert tokens(sample("num=4", "seed=1")[0]) != default
    assert tokens(sample("num=4", "grid=uniform")[0]) != default
    assert tokens(sample("num=4", "temperature=0.5")[0]) != default
    assert tokens(sample("num=4", "top_p=0.3")[0]) != default
    rows, ended = sample("num=4", "steps=9", "length=24")
    used = [row["network_evaluations"] for row in rows]
    assert max(used) <= 9 and json.loads(lines(ended)[-1])["network_evaluations_max"] == max(used)
    assert all(len(row["tokens"]) == 24 for row in rows)


@pytest.mark.campaign
def test_temperature_zero_is_the_most_likely_token(sample):
    """With one step every position is the mode of the same first distribution."""
    zero, _ = sample("num=3", "steps=1", "temperature=0")
    top, _ = sample("num=3", "steps=1", "top_k=1")
    assert tokens(zero) == tokens(top)
    assert len(set(map(tuple, tokens(zero)))) == 1


@pytest.mark.slow
def test_the_default_workdir_is_made_and_printed(run, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = run("--config", tiny, "--config.train.num_steps=4", "--config.evals.validation.every=0")
    assert ended.code == 0, ended
    (workdir,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"tiny-\d{8}-\d{6}", workdir.name)
    assert f"workdir     {workdir}\n" in ended.out
    assert (workdir / "checkpoints" / "4").is_dir()


def documents(path, count: int) -> None:
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "ünïcode"]
    draw = np.random.default_rng(0)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            text = " ".join(draw.choice(words, draw.integers(3, 12)))
            file.write(json.dumps({"text": text}) + "\n")


@pytest.mark.campaign
@pytest.mark.parametrize("separate", [pytest.param(False, marks=pytest.mark.campaign), True])
def test_documents_of_bytes(separate, run, tiny, tmp_path, rows):
    documents(tmp_path / "some.jsonl", 100)
    workdir = tmp_path / "run"
    ended = run(
        *("--config", tiny, "--workdir", workdir, "--config.data.name=text"),
        *(f"--config.data.path={tmp_path}/*.jsonl", f"--config.data.separate_documents={separate}"),
        *("--config.tokenizer.name=bytes", "--config.train.num_steps=10"),
    )
    assert ended.code == 0, ended
    assert "bits/token" in ended.out and "bits/character" not in ended.out
    (row,) = [row for row in rows(workdir) if "validation/bits_per_token" in row]
    assert not any("character" in key for key in row)
    assert row["validation/bits_per_token"] < 9


def test_separate_documents_is_another_run(copy, tiny, refused):
    message = refused("--config", tiny, "--workdir", copy, "--config.data.length=32")
    assert "data.length: 16 in the workdir, 32 asked for" in message


@pytest.mark.campaign
@pytest.mark.slow
def test_gpt2_tokens_of_real_text(run, tiny, tmp_path):
    shared = tiny.parents[3] / "shared" / "data"
    if not (shared / "gpt2_bpe").exists() or not (shared / "openwebtext").exists():
        pytest.skip("needs the real data ../shared/data/gpt2_bpe and openwebtext")
    arguments = (
        *("--config", tiny, "--workdir", tmp_path / "run", "--config.data.name=text"),
        *(f"--config.data.path={shared}/openwebtext/*.jsonl", "--config.data.test=8.0"),
        *("--config.tokenizer.name=bpe", f"--config.tokenizer.path={shared}/gpt2_bpe"),
        *("--config.train.num_steps=10", "--config.train.batch_size=4"),
    )
    ended = run(*arguments)
    assert ended.code == 0, ended
    ended = run(*arguments, "--mode", "eval")
    result = json.loads(lines(ended)[-1])
    assert not any("character" in key for key in result)
    assert result["bits_per_token"] < math.log2(50257) + 1
    # A GPT-2 token of this text is four to five bytes, and a word a token and a bit.
    assert 3.5 < result["bytes"] / result["tokens"] < 5.5
    assert 1.1 < result["tokens"] / result["words"] < 1.6
    pooled = result["bits_per_token"] * result["tokens"] / result["bytes"]
    assert result["bits_per_byte"] == pytest.approx(pooled, rel=1e-12)


def test_another_sampler_may_be_asked_for_later(run, tiny, trained):
    ended = run(
        *("--config", tiny, "--workdir", trained, "--mode", "sample"),
        *("--config.sample.num=1", "--config.sample.steps", "3"),  # the value as a word of its own
        *("--config.sample.seed=7", "--config.sample.temperature=0.5"),
    )
    assert ended.code == 0
    file = Path(lines(ended)[-2].partition(": ")[2]).with_suffix(".jsonl")
    row = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    assert [row[k] for k in ("step", "seed", "steps", "temperature")] == [30, 7, 3, 0.5]
    assert row["sampler"] == "ancestral" and row["grid"] == "cosine"
    assert "1 sample of 16 characters from step 30" in lines(ended)[-2]
    assert json.loads(lines(ended)[-1])["network_evaluations"] <= 3


def test_a_run_is_evaluated_by_its_own_config(run, trained, evaluated):
    ended = run("--workdir", trained, "--mode", "eval")
    assert ended.code == 0, ended
    assert json.loads(lines(ended)[-1]) == evaluated


def test_a_run_is_sampled_by_its_own_config(run, trained):
    ended = run("--workdir", trained, "--mode", "sample", "--config.sample.num=1")
    assert ended.code == 0, ended
    assert "1 sample of 16 characters from step 30" in lines(ended)[-2]


@pytest.mark.slow
def test_a_run_goes_on_by_its_own_config(run, copy, tiny, trained, same_run):
    shutil.rmtree(copy / "checkpoints" / "30")
    stored = (copy / "config.json").read_bytes()
    ended = run("--workdir", copy)
    assert ended.code == 0, ended
    assert "resuming from step 28" in ended.out
    assert json.loads((copy / "config.json").read_text())["config"] == json.loads(stored)["config"]
    same_run(copy, trained)


@pytest.mark.campaign
def test_a_run_is_timed_and_planned_by_its_own_config(run, copy):
    """Also one whose version did not have those modes yet."""
    content = json.loads((copy / "config.json").read_text())
    del content["config"]["bench"], content["config"]["plan"]
    (copy / "config.json").write_text(json.dumps(content))
    bench = ("--mode", "bench", "--config.bench.parts=eval", "--config.bench.windows=1")
    ended = run("--workdir", copy, *bench, "--config.bench.seconds=0.1")
    assert ended.code == 0, ended
    assert f"--mode=bench --workdir={copy}" in ended.out and "eval" in json.loads(lines(ended)[-1])
    ended = run("--workdir", copy, "--mode", "plan", "--topology=cpu:1", "--config.plan.parts=eval")
    assert ended.code == 0, ended
    assert "eval" in json.loads(lines(ended)[-1])


def test_resuming_for_longer_is_refused_with_the_key(copy, tiny, refused):
    message = refused("--config", tiny, "--workdir", copy, "--config.train.num_steps=40")
    assert "train.num_steps: 30 in the workdir, 40 asked for" in message
