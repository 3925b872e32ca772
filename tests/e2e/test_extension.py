"""The example package of tests/extension: every section of a config from outside of md4_jax."""

import json
from pathlib import Path

import pytest

from md4_jax.config import foreign

CONFIG = Path(__file__).parent.parent / "extension" / "config.py"
SECTIONS = ("data", "tokenizer", "process", "objective", "network", "optim", "sample")
FEW = ("train.num_steps=60", "checkpoint.every=30", "data.lines=400", "evals.validation.every=30")


@pytest.fixture(scope="module")
def sums(run, scratch):
    """A run of sixty steps: (directory, how it ended)."""
    workdir = scratch / "sums"
    ended = run("--config", CONFIG, "--workdir", workdir, *(f"--config.{word}" for word in FEW))
    assert ended.code == 0, ended
    return workdir, ended


@pytest.mark.slow
def test_a_run_of_nothing_but_foreign_classes(sums):
    workdir, ended = sums
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    name = "validation/bits_per_token"
    bounds = [row[name] for row in rows if name in row]
    assert len(bounds) == 2 and bounds[1] < bounds[0] < 4.0  # log2(13) = 3.7 and what noise adds
    assert "sums: " in ended.out and "of them right" in ended.out
    assert set("".join(json.loads(line)["text"] for line in _samples(workdir))) <= set(
        "0123456789+=\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eval", "sample"])
def test_what_a_run_names_is_imported_if_it_is_trusted(sums, run, refused, mode, monkeypatch):
    monkeypatch.setattr(foreign, "_allowed", set())  # a process of its own knows no names
    workdir, _ = sums
    message = refused("--workdir", workdir, "--mode", mode)
    assert "extension." in message and "--trust extension" in message
    ended = run("--workdir", workdir, "--mode", mode, "--trust", "extension")
    assert ended.code == 0, ended
    assert json.loads(ended.out.splitlines()[-1])


@pytest.mark.campaign
def test_the_hybrid_noise_trains_by_a_bound_of_the_package(run, scratch):
    """D3PM's bound and ancestral sampling know nothing of the process but its methods."""
    words = (*FEW, "objective.name=d3pm", "objective.timesteps=50", "sample.name=ancestral")
    ended = run(
        "--config", CONFIG, "--workdir", scratch / "bound", *(f"--config.{word}" for word in words)
    )
    assert ended.code == 0, ended
    assert "\nstep 50/60  bound " in f"\n{ended.err}"


def test_every_section_of_the_example_is_foreign():
    text = CONFIG.read_text()
    for section in SECTIONS:
        start = text.index(f"config.{section} = dict(")
        assert 'name="extension.' in text[start : start + 80]
    assert 'name="extension.evaluator:' in text


def _samples(workdir: Path) -> list[str]:
    (file,) = (workdir / "samples").glob("*.jsonl")
    return file.read_text().splitlines()
