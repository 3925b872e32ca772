"""Preferences, from the fine-tuned run to samples of the answer that is preferred."""

import json

import numpy as np
import pytest
import runs

import md4_jax

pytestmark = pytest.mark.slow

KEYS = {
    "data.name": "text", "data.length": 5, "data.text_key": "good", "data.prompt_key": "q",
    "data.padding": "end_of_text", "data.validation": 0, "data.test": 4, "tokenizer.name": "bytes",
    "train.num_steps": 60, "train.batch_size": 16, "optim.warmup_steps": 4, "log.every": 10,
    "evals.validation.every": 0, "evals.samples.final": False, "checkpoint.every": 0,
}  # fmt: skip


def flags(**changed) -> list[str]:
    keys = KEYS | {key.replace("__", "."): value for key, value in changed.items()}
    return [f"--config.{key}={value}" for key, value in keys.items()]


def share(run, answer) -> float:
    drawn = md4_jax.load(run).sample(num=64, prompt="q?", steps=3, seed=1)
    return np.mean([text.startswith(f"q?{answer}") for text in drawn.texts])


@pytest.mark.campaign
def test_a_run_learns_what_is_preferred(run, tiny, tmp_path):
    """Of two answers that were alike. Evaluation is by the bound of the better answers."""
    lines = [{"q": "q?", "good": text} for text in ("xx", "yy") * 20]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    pair = json.dumps({"q": "q?", "good": "yy", "bad": "xx"}) + "\n"
    (tmp_path / "pairs.jsonl").write_text(40 * pair)
    at = ("--config", tiny, "--workdir", tmp_path / "tuned")
    ended = run(*at, *flags(data__path=tmp_path / "answers.jsonl"))
    assert ended.code == 0, ended
    assert 0.2 < share(tmp_path / "tuned", "yy") < 0.8
    words = flags(
        data__path=tmp_path / "pairs.jsonl", data__rejected_key="bad", train__num_steps=20,
        train__ema=0.5, objective__name="preference", objective__beta=0.5,
        optim__learning_rate=0.003, log__every=2,
    )  # fmt: skip
    at = ("--config", tiny, "--workdir", tmp_path / "preferred")
    ended = run(*at, *words)
    assert ended.code == 2 and "'preference' needs a teacher, which is a model" in ended.err
    ended = run(*at, *words, f"--config.train.initial={tmp_path / 'tuned'}")
    assert ended.code == 0, ended
    first, last = (runs.rows(tmp_path / "preferred")[n] for n in (0, -1))
    assert first["margin"] < 1.0 < last["margin"] and last["preferred"] == 1.0
    assert "train_loss_bits" in last and "train_bits_per_token" not in last
    assert share(tmp_path / "preferred", "yy") > 0.95
    assert any(line.startswith("test: <= ") for line in ended.out.splitlines())
