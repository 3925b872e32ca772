"""A trace of chosen steps by JAX's profiler."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from md4_jax.runtime.paths import place
from md4_jax.training.profile import Profile


def traced(directory, steps, numbers) -> tuple[list[int], list[str]]:
    """Runs steps under a profile; returns the steps in its trace, and what was said."""
    said = []
    profile = Profile(steps, place(directory), said.append)
    state = jnp.zeros(3)
    for number in numbers:
        with profile.step(number):
            state = jax.jit(lambda x: x + 1)(state)
        profile.after_step(number, state)
    profile.close()
    files = directory.rglob("*.trace.json.gz")
    traces = [json.loads(gzip.decompress(file.read_bytes())) for file in files]
    events = [event for trace in traces for event in trace["traceEvents"]]
    named = (e["args"]["step_num"] for e in events if "step_num" in e.get("args", {}))
    return sorted({int(n) for n in named}), said


@pytest.mark.parametrize(
    "steps, numbers, expected",
    [
        ((3, 4), range(1, 7), [3, 4]),
        ((3, 9), range(5, 7), [5, 6]),  # resumed at 5, ended at 6
    ],
)
def test_a_trace_has_the_steps_that_were_asked_for(steps, numbers, expected, tmp_path):
    found, (said,) = traced(tmp_path / "profile", steps, numbers)
    assert found == expected
    assert said.startswith(f"profile of steps {expected[0]} to {expected[-1]}: ")


@pytest.mark.parametrize("steps, numbers", [((), range(1, 4)), ((1, 2), range(3, 5))])
def test_no_trace(steps, numbers, tmp_path):
    assert traced(tmp_path / "profile", steps, numbers) == ([], [])
    assert not (tmp_path / "profile").exists()


def test_a_trace_that_fails_is_given_up_with_one_warning(tmp_path, monkeypatch):
    def start_trace(directory):
        raise RuntimeError("one is running already")

    monkeypatch.setattr(jax.profiler, "start_trace", start_trace)
    found, (said,) = traced(tmp_path / "profile", (1, 2), range(1, 4))
    assert found == [] and said.startswith("warning: log.profile failed: RuntimeError: one is")
