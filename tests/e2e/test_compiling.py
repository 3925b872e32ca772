"""What is compiled in a run, how often, and what the next start finds in the cache."""

import os

import chex
import jax
import pytest

from md4_jax.evals import likelihood as evaluate
from md4_jax.runtime import compiling
from md4_jax.samplers import batches as sample
from md4_jax.training import loop as train

pytestmark = pytest.mark.slow

STEPS = ["eval_step", "run", "train_step"]
# The last sequence of a split is shorter than the others, a shape of its own.
SHAPES = {"eval_step": 2, "run": 1, "train_step": 1}


@pytest.fixture
def made(monkeypatch):
    """The names of the programs that a run makes; tracing a shape twice is an error."""
    names = []

    def jit(fn, mesh, network, **arguments):
        names.append(fn.__name__)
        watched = chex.assert_max_traces(fn, n=SHAPES[fn.__name__])
        return compiling.jit(watched, mesh, network, **arguments)

    for module in (train, evaluate, sample):
        monkeypatch.setattr(module, "jit", jit)
    return names


def test_each_step_is_compiled_once_in_a_run(made, run, tiny, tmp_path, monkeypatch):
    """Three evaluations while training, the final one and two batches of samples included."""
    ahead = []

    def compile_ahead(fn, *arguments):
        ahead.append(fn.__name__)
        return compiling.compile_ahead(fn, *arguments)

    for module in (train, sample):
        monkeypatch.setattr(module, "compile_ahead", compile_ahead)
    ended = run("--config", tiny, "--workdir", tmp_path, "--config.sample.batch_size=1")
    assert ended.code == 0, ended
    assert sorted(made) == STEPS
    assert ahead == ["train_step", "run"]


@pytest.mark.campaign
def test_and_once_in_a_run_that_is_resumed(made, run, tiny, tmp_path):
    at = ("--config", tiny, "--workdir", tmp_path)
    assert run(*at, "--config.train.seconds=1e-6").code == 0
    chex.clear_trace_counter()
    made.clear()
    ended = run(*at)
    assert ended.code == 0 and "resuming from step 1\n" in ended.out, ended
    assert sorted(made) == STEPS


@pytest.mark.campaign
def test_the_second_start_compiles_nothing_new(program, tiny, tmp_path):
    """The program keeps what it compiled in its cache directory."""
    words = (
        "train.num_steps=3",
        "optim.warmup_steps=1",
        "evals.validation.every=0",
        "network.depth=1",
    )
    at = ["--config", tiny, *(f"--config.{word}" for word in words)]
    own = {"MD4_JAX_CACHE": tmp_path / "cache", "JAX_COMPILATION_CACHE_DIR": ""}
    kept = tmp_path / "cache" / "compiled"
    first = program(*at, "--workdir", tmp_path / "1", **own)
    assert first.code == 0, first
    files = {file.name: file.stat().st_mtime_ns for file in kept.iterdir()}
    assert any("train_step" in name for name in files) and len(files) > 3
    second = program(*at, "--workdir", tmp_path / "2", **own)
    assert second.code == 0, second
    assert {file.name: file.stat().st_mtime_ns for file in kept.iterdir()} == files
    assert [line for line in second.err.splitlines() if "error" in line.lower()] == []


def test_what_was_used_longest_ago_goes_first(tmp_path):
    for name, used in (("old", 1), ("new", 3), ("middle", 2)):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (used, 0))
    compiling.prune(tmp_path, 25)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["middle", "new"]
    compiling.prune(tmp_path, 25)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_directory_that_the_user_chose_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("MD4_JAX_CACHE", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    assert before  # of these tests
    compiling.keep_programs()
    assert jax.config.jax_compilation_cache_dir == before
    assert not list(tmp_path.iterdir())
