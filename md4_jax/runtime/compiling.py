"""What XLA is told besides the program, by platform, and where compiled programs are kept."""

import contextlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from md4_jax.runtime.paths import cache_root

# Of all programs in the cache directory; more than this and the longest unused ones go.
KEPT_BYTES = 2**30

# cpu: matrix products are left to Eigen. XLA's default, fusing them into calls of YNNPACK, made a
# step of 16 x 256 tokens at width 256 a tenth slower and its temporaries a third larger.
OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_cpu_experimental_ynn_fusion_type": ""},
    "gpu": {},
    "tpu": {},
}


def jit(fn: Callable, mesh: Mesh, **arguments: Any) -> Callable:
    """jax.jit with the options of the platform whose devices the mesh has."""
    return jax.jit(fn, compiler_options=OPTIONS[mesh.devices.flat[0].platform], **arguments)


def keep_programs() -> None:
    """Keeps compiled programs in the cache directory, so that the next start reads them.

    Programs that compile in less than a second are not kept. $JAX_COMPILATION_CACHE_DIR names
    another directory, which is then never cleaned up; JAX_ENABLE_COMPILATION_CACHE=false
    switches the cache off. JAX's keys hold the program, its options, the versions and the device.
    """
    if jax.config.jax_compilation_cache_dir:
        return
    directory = cache_root() / "compiled"
    with contextlib.suppress(OSError):  # nowhere to write: programs are compiled at each start
        directory.mkdir(parents=True, exist_ok=True)
        prune(directory, KEPT_BYTES)
        jax.config.update("jax_compilation_cache_dir", str(directory))


def prune(directory: pathlib.Path, most: int) -> None:
    """Deletes the files that were used longest ago until those left take at most `most` bytes."""
    found = []
    for entry in os.scandir(directory):
        with contextlib.suppress(FileNotFoundError):  # another process cleans up as well
            status = entry.stat()
            found.append((max(status.st_atime, status.st_mtime), status.st_size, entry.path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most:
            return
        pathlib.Path(path).unlink(missing_ok=True)
        total -= size
