"""What all tests share. Tests run on the CPU unless JAX_PLATFORMS says otherwise."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest


@pytest.fixture
def x64():
    """Double precision inside one test."""
    with jax.enable_x64(True):
        yield
