"""What the statistical tests share: many small programs, so compiling is what takes time."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def compile_quickly():
    """XLA's expensive passes are left out; they change no result beyond rounding."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
