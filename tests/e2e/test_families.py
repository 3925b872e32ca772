"""Every objective of the registry trains, evaluates and samples from the command line."""

import json
import math

import numpy as np
import pytest

from md4_jax.objectives import OBJECTIVES
from md4_jax.processes import PROCESSES

SHORT = (
    "network.depth=1",
    "train.num_steps=6",
    "log.every=3",
    "eval.every=0",
    "eval.split=validation",
)
EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}


def words(objective: str) -> list[str]:
    """The overrides that make an objective the one that trains and is reported."""
    fits = {cls: name for name, cls in PROCESSES.items()}
    process = fits[OBJECTIVES[objective]().needs.processes[0]]
    chosen = (f"objective.name={objective}", f"eval.objective.name={objective}")
    return [f"--config.{word}" for word in (*chosen, f"process.name={process}", *SHORT)]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_each_trains_evaluates_and_samples(objective, run, tiny, rows, tmp_path):
    workdir = tmp_path / "run"
    ended = run("--config", tiny, "--workdir", workdir, *words(objective))
    assert ended.code == 0, ended.err
    lines = rows(workdir)
    assert [line["step"] for line in lines] == [3, 6]
    assert all(0 < line["train_bits_per_token"] < 12 for line in lines)
    kept = json.loads((workdir / "evaluations.jsonl").read_text())
    # Six steps away from uniform: near log2 of the vocabulary, and a real number.
    assert math.isfinite(kept["bits_per_token_se"]) and 3 < kept["bits_per_token"] < 9
    assert "4 network evaluations" in ended.out
    if objective == "genmd4":
        assert "power by symbol: min" in ended.out
        assert lines[-1]["power_min"] < 1.0 < lines[-1]["power_max"]


@pytest.mark.slow
def test_a_learned_schedule_is_the_same_on_eight_devices(start, tiny, rows, arrays, scratch):
    """Six steps of GenMD4, REINFORCE included, on one device and on 2 x 2 x 2: to rounding."""
    runs = {"one": ("mesh.data=1",), "mixed": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")}
    arguments = [tiny.with_name("driver.py"), "runs"]
    for name, mesh in runs.items():
        extra = [f"--config.{word}" for word in mesh]
        workdir = scratch / f"genmd4 {name}"
        arguments += ["--config", tiny, "--workdir", workdir, *words("genmd4"), *extra, "--"]
    process = start(*arguments, **EIGHT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    one, mixed = (rows(scratch / f"genmd4 {name}") for name in runs)
    for key in ("train_bits_per_token", "grad_norm", "power_mean"):
        np.testing.assert_allclose([r[key] for r in one], [r[key] for r in mixed], rtol=1e-4)
    power = "params/process/raw_power"
    np.testing.assert_allclose(
        *(arrays(scratch / f"genmd4 {name}")[power] for name in runs), atol=1e-4
    )
