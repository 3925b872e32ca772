"""Training on texts of classes: padding and labels from the file to the reported bound."""

import json
import random

import pytest

TEXTS = 200


@pytest.fixture
def texts(tmp_path):
    """Words of two alphabets, which the class tells; the last tenth is the test split."""
    letters, path = random.Random(0), tmp_path / "texts.jsonl"
    rows = [
        {"kind": kind, "text": "".join(letters.choices(kind, k=letters.randrange(2, 14)))}
        for kind in letters.choices(["ab", "yz"], k=TEXTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path, rows


@pytest.mark.campaign
def test_texts_of_classes(texts, run, tiny, tmp_path):
    path, rows = texts
    data = dict(name="text", path=path, label_key="kind", length=12, test=0.1)
    flags = [f"--config.data.{key}={value}" for key, value in data.items()]
    flags += ["--config.tokenizer.name=bytes", "--config.network.classes=2"]
    workdir = tmp_path / "run"
    ended = run("--config", tiny, "--workdir", workdir, *flags)
    assert ended.code == 0, ended
    assert json.loads((workdir / "tokenizer.json").read_text())["labels"] == ["ab", "yz"]
    evaluated = run("--workdir", workdir, "--mode", "eval", "--evals", "test")
    result = json.loads(evaluated.out.strip().splitlines()[-1])
    held_out = [row["text"] for row in rows[-TEXTS // 10 :]]
    assert result["sequences"] == TEXTS // 10
    assert result["tokens"] == sum(min(len(text) + 1, 12) for text in held_out)
    assert result["bytes"] == sum(min(len(text), 12) for text in held_out)
    # Far below log2(257) = 8 and not below one bit a letter, but for the end of a text.
    assert 0.9 < result["bits_per_token"] < 4
    for name in ("network.classes=3", "data.label_key=other"):
        refused = run("--config", tiny, "--workdir", tmp_path / "no", *flags, f"--config.{name}")
        assert refused.code == 2 and not (tmp_path / "no").exists()
        assert name.split("=")[0] in refused.err
