"""The benchmark scripts of tools/ run, at the smallest size, and print whole tables."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tool_modules import tool_module

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture
def table(environment):
    """Runs a script and returns the rows of its first table, cell by cell."""

    def table(script, *words):
        ended = subprocess.run(
            [sys.executable, f"tools/{script}.py", *map(str, words)],
            cwd=ROOT, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        lines = [line for line in ended.stdout.splitlines() if line.startswith("| ")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]

    return table


def test_the_gathered_head_computes_half_of_the_products(table):
    rows = table("head", *["--rows", "2", "--length", "64", "--size", "256", "--symbols", "50257"])
    work = {name: float(gflop) for name, _, _, gflop in rows}
    assert list(work) == ["plain", "chunked", "gathered"]
    assert work["gathered"] < 0.7 * work["plain"] <= 0.7 * work["chunked"]


@pytest.mark.campaign
def test_what_a_mesh_communicates_is_what_the_formula_says(table):
    words = "--meshes 2x1x1x1 -- --config.plan.random_tokens=65 --config.network.depth=1"
    ((mesh, counted, expected, ratio, kinds),) = table("scaling", *words.split())
    assert mesh == "2x1x1x1" and "all-reduce" in kinds
    assert abs(float(ratio) - 1.0) < 0.05 and float(counted) > 0.5 and float(expected) > 0.5


@pytest.mark.campaign
def test_the_noise_of_a_gradient_under_nine_ways_to_draw(table, run, tiny, tmp_path):
    keys = ("train.num_steps=4", "optim.warmup_steps=1", "evals.validation.every=0", "sample.num=1")
    assert run("--config", tiny, "--workdir", tmp_path, *(f"--config.{k}" for k in keys)).code == 0
    rows = table("variance", "--workdir", tmp_path, "--rows", "4", "--repeats", "3")
    assert [row[:2] for row in rows[:3]] == [
        ["md4", "independent"], ["md4", "offset"], ["md4", "antithetic"]
    ]  # fmt: skip
    assert len(rows) == 9 and rows[0][2].startswith("1.000 +- ")


@pytest.mark.campaign
def test_programs_are_timed_in_turn(table, tmp_path):
    keys = "train.batch_size=1 network.size=32 network.depth=1 network.heads=2 data.length=8"
    worker = f"{sys.executable} tools/versus_worker.py a train {keys}"
    words = [f"ours:1={worker}", f"twice:1={worker} train.batch_size=2"]
    rows = table("versus", "--out", tmp_path / "v.json", "--rounds", "2", *words)
    assert [row[0] for row in rows] == ["ours", "twice"]
    assert rows[0][2] == "1.00 (1.00-1.00)" and float(rows[1][2].split()[0]) > 0.3
    calls = json.loads((tmp_path / "v.json").read_text())["calls"]
    assert [len(calls[name]) for name in ("product", "ours", "twice")] == [2, 2, 2]
    assert min(seconds for answer in calls["ours"] for seconds in answer["ts"]) > 0
    assert [row[:3] for row in table("versus", "--show", tmp_path / "v.json")] == [
        row[:3] for row in rows
    ]


def test_the_first_call_of_a_turn_and_disturbed_ones_are_not_counted(table, tmp_path):
    quiet, alone = [0.0, 0.0, 0.0, 0.9], [0.0]
    turns = dict(
        product=[dict(ts=[0.1, 0.1, 0.1, 0.1], oth=quiet, rss=2**20)],
        ours=[dict(ts=[9.0, 1.0, 3.0, 8.0], oth=quiet, rss=2**20)],
        once=[dict(ts=[4.0], oth=alone, rss=2**20)],
    )
    made = dict(processor="one", facts={name: {} for name in turns}, calls=turns)
    (tmp_path / "v.json").write_text(json.dumps(made))
    rows = table("versus", "--show", tmp_path / "v.json")
    assert [row[1].split()[0] for row in rows] == ["2.0000", "4.0000"]
    assert rows[1][2].startswith("2.00 ")


@pytest.mark.campaign
def test_a_program_that_fails_is_named(environment, tmp_path):
    command = [sys.executable, "tools/versus.py", "--out", tmp_path / "v.json", "other:1=false"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1 and "error: false ended with 1 before" in ended.stderr
    command[-1] = "other:1=echo READY; kill -9 $$"
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1 and "in a round, killed, as by a system without" in ended.stderr
    command[-1] = "other=false"
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2 and "'other=false' is not NAME:CALLS=COMMAND" in ended.stderr


def test_a_step_is_lowered_for_a_gpu_that_is_not_there(environment):
    command = [sys.executable, "tools/gpu_report.py", "--dry", "--only", "MDLM"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("MDLM's network, no dropout: ")
    assert ended.stdout.endswith(" operations, 2 calls of cuDNN\n")  # forward and backward


def test_the_report_says_what_is_wrong_with_a_text(environment, tmp_path):
    command = [sys.executable, "tools/gpu_report.py", "--only", "none"]
    command += ["--out", tmp_path / "g.json", "--text8", tmp_path / "missing"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "g.json").read_text())
    assert found == {"text8": {"error": f"data.path: there is no file {tmp_path / 'missing'}"}}


def test_a_measured_run_that_was_interrupted_continues(tmp_path, monkeypatch):
    """Its evaluations are kept one by one: only the one that is asked for says that it ended."""
    program, calls = tool_module("program"), []
    kept = tmp_path / "evaluations.jsonl"
    kept.write_text('{"eval": "validation", "bits_per_token": 2.0}\n')

    def call(words, log):
        calls.append(words)
        with kept.open("a") as file:
            file.write('{"eval": "test", "bits_per_token": 3.0}\n')

    monkeypatch.setattr(program, "call", call)
    for _ in range(2):
        assert program.train(["--config=a"], tmp_path)["bits_per_token"] == 3.0
    assert calls == [["--config=a", f"--workdir={tmp_path}"]]
