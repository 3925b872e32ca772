"""Functions of test modules, run where there are eight CPU devices."""

import os
import subprocess
import sys
from pathlib import Path


def on_eight_devices(module: str, function: str) -> str:
    """What a function of a module of tests/unit prints in a process of its own with 8 devices."""
    flag = "--xla_force_host_platform_device_count=8"
    paths = os.pathsep.join([str(Path(__file__).parent / "unit"), *sys.path])
    env = os.environ | {"XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}; {module}.{function}()"],
        env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
