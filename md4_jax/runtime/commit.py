"""Commit of the running code."""

import functools
import importlib.metadata
import subprocess
import zlib
from pathlib import Path
from typing import Any

import md4_jax

PACKAGE_ROOT = Path(md4_jax.__file__).resolve().parent.parent


@functools.cache  # the run started from it, even if the checkout moves on meanwhile
def commit() -> str:
    """Returns the commit of the package's checkout, with '+' if it has uncommitted changes."""
    git = ["git", "-C", str(PACKAGE_ROOT)]
    try:
        run = lambda *a: subprocess.run(  # noqa: E731
            [*git, *a], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
        if run("rev-parse", "--show-toplevel") != str(PACKAGE_ROOT):
            return "unknown"
        return run("rev-parse", "HEAD") + ("+" if run("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def code() -> dict[str, Any]:
    """Returns {'md4_jax': CRC-32 of the package's source files, 'jax': its version}."""
    found = 0
    for path in sorted(Path(md4_jax.__file__).parent.rglob("*.py")):
        found = zlib.crc32(path.read_bytes(), found)
    return {"md4_jax": found, "jax": importlib.metadata.version("jax")}
