"""What all tests share. Tests run on the CPU unless JAX_PLATFORMS says otherwise."""

import gc
import os
import threading
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "")
# XLA's older way to make code of fused operations compiles in two thirds of the time, and whole
# programs compile in 0.87 of the time of programs cut into 32 parts (median of 8 pairs of runs,
# 0.78 to 0.94). Later versions may lack an option, and end at once where they are asked for it.
if version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
# The workers share the cores already; numpy's threads would wait for work, and use them up.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest
from jax._src.interpreters import mlir
from selection import covering

from md4_jax.runtime import compiling

# Tests are hundreds of small programs, so that compiling them is what takes time: all workers,
# and later runs of the tests, share what was compiled. Processes that tests start inherit it.
# JAX_ENABLE_COMPILATION_CACHE=false switches it off.
compiling.keep_programs()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
# XLA's expensive passes change no result beyond rounding.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir or ""
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
# Programs without the places in the source that operations come from: 19.3 s of processor time
# instead of 20.4 s for a file of tests (medians of 3).
jax.config.update("jax_traceback_in_locations_limit", 0)
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

# JAX makes a new MLIR context for every program that it lowers. Tests keep one for each thread and
# file: 76 s and 1.0 GiB for two files of tests, without it 101 s and 3.6 GiB (two runs each).
KEPT = threading.local()
make_context = getattr(mlir, "make_ir_context", None)


def kept_context():
    """Returns the context of this thread, made where it is first asked for."""
    if not hasattr(KEPT, "context"):
        KEPT.context = make_context()
    return KEPT.context


if make_context:
    mlir.make_ir_context = kept_context

# Tracing makes many objects that stay, which Python's garbage collector reads again and again: 79 s
# of processor time instead of 91 s for three files of tests (means of 2).
gc.set_threshold(100_000, 50, 100)

COUNT = pytest.StashKey[dict[str, int]]()
# Kinds of tests that are left out unless asked for -> how to ask for them.
LEFT_OUT = {
    "slow": "./launch/test.sh --all",
    "campaign": "./launch/test.sh --all --campaign",
}


def pytest_addoption(parser):
    parser.addoption("--campaign", action="store_true", help="also the longest tests")


def left_out(items, mark):
    """Yields all but n cases of each test with the mark cases(n) or quick(n)."""
    grids = {}
    for item in items:
        if item.get_closest_marker(mark) and not item.get_closest_marker("campaign"):
            grids.setdefault((item.path, item.originalname), []).append(item)
    for grid in grids.values():
        (number,) = grid[0].get_closest_marker(mark).args
        kept = covering([item.callspec.id.split("-") for item in grid], number)
        yield from (item for i, item in enumerate(grid) if i not in kept)


def pytest_collection_modifyitems(config, items):
    """Leaves out the tests of campaigns, which take hours together, unless asked for or named."""
    for mark, others in (("cases", "campaign"), ("quick", "slow")):
        for item in left_out(items, mark):
            item.add_marker(others)
    if config.getoption("--campaign") or any("::" in word for word in config.args):
        return
    longest = [item for item in items if item.get_closest_marker("campaign")]
    items[:] = [item for item in items if not item.get_closest_marker("campaign")]
    config.hook.pytest_deselected(items=longest)


def pytest_deselected(items):
    """Counts what is left out, by kind; a test of a campaign counts as that alone."""
    for item in items:
        kind = next((k for k in reversed(LEFT_OUT) if item.get_closest_marker(k)), None)
        if kind:
            count = item.config.stash.setdefault(COUNT, dict.fromkeys(LEFT_OUT, 0))
            count[kind] += 1


def pytest_sessionfinish(session):
    """Hands the count of a worker to the process that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(COUNT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Takes the count of a worker: all workers collect the same. One that crashed has none."""
    if left_out := getattr(node, "workeroutput", {}).get("left_out"):
        node.config.stash[COUNT] = left_out


def pytest_terminal_summary(terminalreporter, config):
    """Says at the end what was not run, and how to run it."""
    asked = config.option.keyword or any("::" in word for word in config.args)
    for kind, number in config.stash.get(COUNT, {}).items():
        if number and not asked:
            terminalreporter.write_line(f"not run: {number} tests marked {kind}; {LEFT_OUT[kind]}")


@pytest.fixture(autouse=True, scope="module")
def compile_in_full(request):
    """Gives the tests marked optimized all of XLA's passes: they look at the program itself."""
    if not request.node.get_closest_marker("optimized"):
        yield
        return
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Drops the programs that JAX keeps of a file of tests.

    873 tests on two workers, two runs each: 48 s and 2.5 GiB, without it 73 s and 4.7 GiB.
    """
    yield
    jax.clear_caches()
    vars(KEPT).clear()


@pytest.fixture
def x64():
    """Double precision inside one test."""
    with jax.enable_x64(True):
        yield
