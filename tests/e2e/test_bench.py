"""--mode bench: a table and a line of JSON, nothing written."""

import json

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

SMALL = ("--config.bench.windows=2", "--config.bench.seconds=0.01", "--config.sample.batch_size=2")


def test_every_part_is_timed(run, tiny, tmp_path, monkeypatch):
    ended = run("--config", tiny, "--mode", "bench", *SMALL, "--config.bench.names=3")
    assert ended.code == 0, ended.err
    *_, last = ended.out.strip().splitlines()
    result = json.loads(last)
    tokens = {"train": 8 * 16, "eval": 64 * 16, "sample": 2 * 16, "data": 8 * 16}
    for part, count in tokens.items():
        numbers = result[part]
        assert 0 < numbers["seconds_min"] <= numbers["seconds"] <= numbers["seconds_max"]
        assert numbers["tokens_per_second"] * numbers["seconds"] == pytest.approx(count)
        assert numbers["peak_rss_gib"] > 0.1 and f"| {part} |" in ended.out
    for part in ("train", "eval"):
        # The formula counts linear layers (the head with its padding) and attention.
        assert 0.5 < result[part]["compiler_gflop"] / result[part]["model_gflop"] < 3.0
        assert 0 < result[part]["model_utilisation"] < 1
        found = result[part]["names"]
        assert len(found["longest"]) == 3 and min(found["products"], found["other"]) > 0
        assert all(f"| {name} |" in ended.out for name in found["longest"])
    assert "names" not in result["data"]
    assert "data_gflop" not in result["data"] and result["train"]["temporary_mib"] > 0


@pytest.mark.campaign
def test_random_tokens_stand_for_any_vocabulary(run, tiny):
    words = ("--config.bench.random_tokens=500", "--config.bench.parts=train")
    ended = run("--config", tiny, "--mode", "bench", *SMALL, *words)
    assert ended.code == 0, ended.err
    result = json.loads(ended.out.strip().splitlines()[-1])
    assert set(result) >= {"train", "commit", "device"} and "eval" not in result


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "bench.parts=trian",
            "bench.parts contains the unknown part 'trian'. Known are train",
        ),
        ("bench.windows=0", "bench.windows must be at least 1, not 0"),
        ("bench.random_tokens=9", "remove data from bench.parts"),
    ],
)
def test_impossible_settings(run, tiny, words, message):
    ended = run("--config", tiny, "--mode", "bench", f"--config.{words}")
    assert ended.code == 2 and message in ended.err
