"""Compiler options of each platform, compiled programs and their directory."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from md4_jax.protocols import Network
from md4_jax.runtime.heap import give_back
from md4_jax.runtime.paths import cache_root

# Size limit of all programs in the cache directory; beyond it the least recently used are deleted.
KEPT_BYTES = 2**30

# (platform, products of the network) -> compiler options, where they are not XLA's own. With
# float32 operands Eigen computes products on CPUs instead of YNNPACK, XLA's default, which keeps
# sums and maxima. On 2 cores of an Intel Xeon with AMX samples of size (a) of tools/sizes.py then
# take 1.52 s, and 1.91 s if YNNPACK computes neither; a training step of (b) 2.49 to 2.59 s, and
# 2.69 to 2.77 s with neither, 2.67 to 2.79 s with both. With bfloat16 operands YNNPACK has twice
# the rate of Eigen.
OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("cpu", "float32"): {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"},
}


def jit(fn: Callable, mesh: Mesh, network: Network, **arguments: Any) -> Callable:
    """Applies jax.jit with the compiler options for the mesh's platform and this network."""
    options = OPTIONS.get((mesh.devices.flat[0].platform, network.products), {})
    return jax.jit(fn, compiler_options=options, **arguments)


def compile_ahead(fn: Callable, *arguments: Any) -> Any:
    """Compiles a jitted function and gives back what the compiler has freed; returns the program.

    JAX keeps the program, so that a call of fn does not compile it again. Otherwise the freed
    memory would stay with the process, beside the arrays of the first call: a training step of
    size (c) of tools/sizes.py took at most 2.25 GiB, and takes 1.87 with this.
    """
    compiled = fn.lower(*arguments).compile()
    give_back()
    return compiled


@contextlib.contextmanager
def draws_as_kernels() -> Iterator[None]:
    """Lets GPUs make random bits in a kernel of JAX, in programs that are traced within.

    The bits are the same. Otherwise XLA writes out the 100 operations of each draw and puts many
    draws into one kernel, so that the initial values of a network of 12 x 768 take a minute to
    compile. Not for programs that run often: the bits then pass through memory.
    """
    before = jax.config.jax_threefry_gpu_kernel_lowering
    jax.config.update("jax_threefry_gpu_kernel_lowering", True)
    try:
        yield
    finally:
        jax.config.update("jax_threefry_gpu_kernel_lowering", before)


def keep_programs() -> None:
    """Keeps compiled programs in the cache directory, so that the next start reads them.

    Programs that compile in less than a second are not kept. $JAX_COMPILATION_CACHE_DIR names
    another directory, in which nothing is ever deleted; JAX_ENABLE_COMPILATION_CACHE=false
    switches the cache off. JAX finds a program by its code, options, versions and device.
    """
    if jax.config.jax_compilation_cache_dir:
        return
    directory = cache_root() / "compiled"
    with contextlib.suppress(OSError):  # nowhere to write: programs are compiled at each start
        directory.mkdir(parents=True, exist_ok=True)
        prune(directory, KEPT_BYTES)
        jax.config.update("jax_compilation_cache_dir", str(directory))


def prune(directory: pathlib.Path, most: int) -> None:
    """Deletes the least recently used files until the others take at most `most` bytes."""
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
