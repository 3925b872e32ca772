"""Compiler options of each platform, and the cache of compiled programs."""

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

# Size limit of the cache directory; above it the least recently used programs are deleted.
KEPT_BYTES = 2**30

# (platform, products of the network) -> compiler options, if they are not XLA's defaults. With
# float32 operands on CPUs, Eigen computes products instead of YNNPACK, XLA's default; YNNPACK
# still computes sums and maxima. On 2 cores of an Intel Xeon with AMX, samples of size (a) of
# tools/sizes.py then take 1.52 s, and 1.91 s if YNNPACK computes neither; a training step of (b)
# 2.49 to 2.59 s, and 2.69 to 2.77 s with neither, 2.67 to 2.79 s with both. With bfloat16 operands
# YNNPACK is twice as fast as Eigen.
OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("cpu", "float32"): {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"},
}


def jit(fn: Callable, mesh: Mesh, network: Network, **arguments: Any) -> Callable:
    """Applies jax.jit with the compiler options for the platform of the mesh and this network."""
    options = OPTIONS.get((mesh.devices.flat[0].platform, network.products), {})
    return jax.jit(fn, compiler_options=options, **arguments)


def compile_ahead(fn: Callable, *arguments: Any) -> Any:
    """Compiles a jitted function, releases the compiler's memory, and returns the program.

    JAX caches the program, so calling fn does not compile it again. Without this, memory freed by
    the compiler stays with the process in addition to the arrays of the first call: the peak of a
    training step of size (c) of tools/sizes.py was 2.25 GiB, and is 1.87 with this.
    """
    compiled = fn.lower(*arguments).compile()
    give_back()
    return compiled


@contextlib.contextmanager
def kept_with_names() -> Iterator[None]:
    """Makes programs compiled within differ in the cache if the scopes of their code do.

    Without this, the text of a program may have the scopes of an earlier version of the code.
    """
    before = jax.config.jax_compilation_cache_include_metadata_in_key
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", before)


@contextlib.contextmanager
def draws_as_kernels() -> Iterator[None]:
    """Makes programs traced within generate random bits on GPUs with a JAX kernel.

    The bits are the same. Without this, XLA inlines the 100 operations of each draw and fuses many
    draws into one kernel, so that the initialisation of a 12 x 768 network takes a minute to
    compile. Not for programs that run often, because the bits then pass through memory.
    """
    before = jax.config.jax_threefry_gpu_kernel_lowering
    jax.config.update("jax_threefry_gpu_kernel_lowering", True)
    try:
        yield
    finally:
        jax.config.update("jax_threefry_gpu_kernel_lowering", before)


def keep_programs() -> None:
    """Enables JAX's compilation cache in the cache directory, for faster starts.

    Programs that compile in less than a second are not cached. $JAX_COMPILATION_CACHE_DIR selects
    another directory, in which nothing is ever deleted; JAX_ENABLE_COMPILATION_CACHE=false disables
    the cache. JAX identifies a program by its code, options, versions and device.
    """
    if jax.config.jax_compilation_cache_dir:
        return
    directory = cache_root() / "compiled"
    with contextlib.suppress(OSError):  # not writable: programs are compiled at each start
        directory.mkdir(parents=True, exist_ok=True)
        prune(directory, KEPT_BYTES)
        jax.config.update("jax_compilation_cache_dir", str(directory))


def prune(directory: pathlib.Path, most: int) -> None:
    """Deletes the least recently used files until the rest takes at most `most` bytes."""
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
