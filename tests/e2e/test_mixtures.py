"""A run on a mixture goes on where it stopped, and is evaluated on all of its parts."""

import json

import pytest

from md4_jax import main

pytestmark = pytest.mark.slow


def trained(tiny, workdir, parts, steps):
    keys = {
        "data.name": "mixture", **parts, "train.num_steps": steps, "optim.decay": "constant",
        "optim.warmup_steps": 0, "log.every": 1, "checkpoint.every": 0, "train.batch_size": 4,
        "evals.validation.every": 0, "evals.samples.final": False, "evals.ngrams.final": True,
    }  # fmt: skip
    flags = [f"--config.{key}={value}" for key, value in keys.items()]
    assert main.run(["--config", str(tiny), "--workdir", str(workdir), *flags]) == 0
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row["train_bits_per_token"] for row in rows if "train_bits_per_token" in row]


@pytest.mark.campaign
def test_a_run_on_a_mixture_goes_on_to_the_bit(tiny, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("so it goes on and on\n" * 200)
    parts = {
        "data.parts.plays.name": "shakespeare",
        "data.parts.plays.weight": 0.5,
        "data.parts.mine.name": "text",
        "data.parts.mine.path": tmp_path / "mine.txt",
        "data.parts.mine.weight": 1.5,
    }
    whole = trained(tiny, tmp_path / "whole", parts, 8)
    trained(tiny, tmp_path / "halves", parts, 4)
    assert len(whole) == 8 and trained(tiny, tmp_path / "halves", parts, 8) == whole
    capsys.readouterr()
    assert (
        main.run(["--workdir", str(tmp_path / "whole"), "--mode", "eval", "--evals", "test"]) == 0
    )
    assert "bits/character" in capsys.readouterr().out
    assert main.run(["--workdir", str(tmp_path / "whole"), "--mode", "prepare"]) == 0
    assert "whole sequences" in capsys.readouterr().out
