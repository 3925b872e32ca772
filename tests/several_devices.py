"""Functions of test modules, run where there are several CPU devices."""

import os
import subprocess
import sys
from pathlib import Path


def with_devices(number: int, *paths) -> dict[str, str]:
    """The environment of a process with so many CPU devices, which also imports from `paths`.

    It keeps the options of conftest.py, with which programs compile in half the time.
    """
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={number}"
    places = os.pathsep.join([*map(str, paths), *sys.path])
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": places}


def on_eight_devices(module: str, function: str) -> str:
    """What a function of a module of tests/unit prints in a process of its own with 8 devices."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}; {module}.{function}()"],
        env=with_devices(8, Path(__file__).parent / "unit"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
