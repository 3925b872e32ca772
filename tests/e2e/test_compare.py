"""tools/compare.py: one table of all families, from runs that it starts and does not repeat."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SMALL = [
    f"--config.{word}"
    for word in (
        "data.name=shakespeare", "data.length=16", "tokenizer.name=characters",
        "network.size=32", "network.heads=2", "network.depth=1", "train.batch_size=4",
        "evals.test.split=validation", "evals.test.draws=1", "sample.num=1",
        "sample.steps=2", "bench.windows=1", "bench.seconds=0.05", "mesh.data=1",
    )
]  # fmt: skip


def compare(environment, workdir, *words, extra=SMALL):
    command = [sys.executable, "tools/compare.py", "--workdir", workdir, *words, "--", *extra]
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.campaign
def test_a_table_at_equal_steps_and_time_and_no_run_twice(environment, tmp_path):
    words = ("--families", "md4", "--steps", "5", "--seconds", "0.2")
    first = compare(environment, tmp_path, *words)
    assert first.returncode == 0, first.stderr
    head, _, *rows = first.stdout.strip().splitlines()
    assert "bits, 5 steps" in head and [row.split()[1] for row in rows] == ["md4"]
    assert all(row.count(" +- ") == 2 for row in rows)
    logs = sorted((p.name, p.stat().st_mtime_ns) for p in tmp_path.glob("*.log"))
    assert len(logs) == 3
    assert compare(environment, tmp_path, *words).stdout == first.stdout
    assert logs == sorted((p.name, p.stat().st_mtime_ns) for p in tmp_path.glob("*.log"))


@pytest.mark.campaign
def test_speed_alone_says_which_family_a_vocabulary_is_too_large_for(environment, tmp_path):
    extra = [*SMALL, "--config.bench.random_tokens=3000"]
    words = ("--families", "any_order,tauldr_uniform", "--speed")
    ended = compare(environment, tmp_path, *words, extra=extra)
    assert ended.returncode == 0, ended.stderr
    _, _, fits, too_large = ended.stdout.strip().splitlines()
    assert fits.startswith("| any_order | 0.") and "%" in fits
    assert "refused: " in too_large and "3000" in too_large


@pytest.mark.campaign
def test_a_key_is_varied(environment, tmp_path):
    words = ("--families", "block", "--vary", "objective.block=4,5", "--speed")
    ended = compare(environment, tmp_path, *words)
    assert ended.returncode == 0, ended.stderr
    _, _, *rows = ended.stdout.strip().splitlines()
    assert [row.split()[1] for row in rows] == [f"block-block-{size}" for size in (4, 5)]
    assert "objective.block=5 must divide" in rows[1]


def test_an_unknown_family_is_named(environment, tmp_path):
    ended = compare(environment, tmp_path, "--families", "md5", "--speed")
    assert ended.returncode == 1 and "unknown family 'md5'; known are md4" in ended.stderr
