"""The wheel holds all that the package needs, and works from any directory."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_directory(tmp_path):
    version = importlib.metadata.version("setuptools")
    if int(version.split(".")[0]) < 77:
        pytest.skip(f"setuptools {version} cannot build the package, which needs 77")
    source, empty, installed = (tmp_path / name for name in ("source", "empty", "installed"))
    for folder in ("md4_jax", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-c", BUILD, tmp_path], cwd=source, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(installed)
        (metadata,) = (wheel.read(n).decode() for n in names if n.endswith("/METADATA"))
        (scripts,) = (wheel.read(n).decode() for n in names if n.endswith("/entry_points.txt"))
    files = {str(p.relative_to(source)) for p in source.glob("md4_jax/**/*.*") if p.is_file()}
    files |= {f"md4_jax/{p.relative_to(source)}" for p in source.glob("configs/*.py")}
    assert files <= names
    assert "Requires-Dist: safetensors" in metadata and "Provides-Extra: cuda12" in metadata
    assert "md4_jax = md4_jax.__main__:main" in scripts
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "md4_jax", "--mode", "prepare", "--config", "quickstart"],
        cwd=empty, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True,
    )  # fmt: skip
    assert "train: " in done.stdout and done.returncode == 0, done.stderr
