"""Chips for ahead-of-time compilation without the hardware, and their published numbers."""

import os
import re
from typing import NamedTuple

import jax

from md4_jax.options.parts import PlanOptions
from md4_jax.protocols import UserError


class Chip(NamedTuple):
    """Published numbers of a chip.

    memory     bytes
    flops      bfloat16 FLOPs per second
    bandwidth  bytes per second that it reads or writes in its memory
    links      bytes per second that it can receive from other chips over all links together.
               Published bidirectional numbers include sending and are twice as high
    """

    memory: float
    flops: float
    bandwidth: float
    links: float


class Target(NamedTuple):
    """Facts about a GPU that XLA needs for compiling for it.

    kind     name according to CUDA
    major    major version of the compute capability
    cores    number of multiprocessors
    shared   bytes of shared memory per multiprocessor
    cache    bytes of the L2 cache
    clock    GHz
    """

    kind: str
    major: int
    cores: int
    shared: int
    cache: int
    clock: float


CHIPS = {
    # Links of TPUs: 2400, 1600, 4800 and 3584 Gbit/s per chip in one direction (published for v5e
    # and v5p: 400 and 1200 GB/s in both).
    "TPU v4": Chip(32 * 2**30, 275e12, 1228e9, 300e9),
    "TPU v5 lite": Chip(16 * 2**30, 197e12, 819e9, 200e9),
    "TPU v5": Chip(95 * 2**30, 459e12, 2765e9, 600e9),
    "TPU v6 lite": Chip(32 * 2**30, 918e12, 1640e9, 448e9),
    # GPUs without sparsity; 12 and 18 NVLinks of 25 GB/s in each direction.
    "NVIDIA A100-SXM4-80GB": Chip(80e9, 312e12, 2039e9, 300e9),
    "NVIDIA H100 80GB HBM3": Chip(80e9, 989e12, 3350e9, 450e9),
    "NVIDIA H200": Chip(141e9, 989e12, 4800e9, 450e9),
}
TARGETS = {
    "a100": Target("NVIDIA A100-SXM4-80GB", 8, 108, 167_936, 40 * 2**20, 1.41),
    "h100": Target("NVIDIA H100 80GB HBM3", 9, 132, 233_472, 50 * 2**20, 1.98),
    "h200": Target("NVIDIA H200", 9, 132, 233_472, 50 * 2**20, 1.98),
}


def devices_of(topology: str) -> list:
    """Returns the devices of 'v5e:16x16' (needs libtpu), 'h100:8' (CUDA's libraries) or 'cpu:8'.

    UserError for others, and if the library is missing.
    """
    kind, _, shape = topology.lower().partition(":")
    if kind == "cpu":
        here, count = jax.devices("cpu"), int(shape) if shape.isdecimal() else 0
        if not count:
            raise UserError(
                f"--topology {topology}: {shape or 'nothing'} is not a number of devices. To plan "
                "for 8 give cpu:8, and set the environment variable XLA_FLAGS="
                "--xla_force_host_platform_device_count=8"
            )
        if count > len(here):
            raise UserError(
                f"--topology {topology} needs {count} devices, but there are {len(here)}: set the "
                f"environment variable XLA_FLAGS=--xla_force_host_platform_device_count={count}"
            )
        return here[:count]
    # There is no chip to query; constants are computed on this machine.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    jax.config.update("jax_platforms", "cpu")
    try:
        return _gpus(TARGETS[kind], shape) if kind in TARGETS else _tpus(topology.lower())
    except Exception as error:
        first = str(error).strip().splitlines()[0][:200]
        default = " (the default)" if topology == PlanOptions.topology else ""
        known = ", ".join(f"{name}:8" for name in TARGETS)
        raise UserError(
            f"--topology {topology}{default}: {first}. A topology is given as v5e:16x16, "
            f"v5p:4x4x8, v6e:8x8, {known} or cpu:8. TPUs need pip install libtpu and GPUs pip "
            "install 'jax[cuda13]', on any machine"
        ) from error


def _tpus(topology: str) -> list:
    """Returns the TPUs of a topology; ValueError for a name of no TPU."""
    if not re.fullmatch(r"v\d+\w*:\d+(x\d+)*", topology):
        raise ValueError("this is not the name of a chip with a number of chips, or their grid")
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(topology, "tpu").devices)


def _gpus(target: Target, count: str) -> list:
    """Returns the GPUs of one machine."""
    from jax.experimental import topologies

    if not count.isdigit() or not int(count):
        raise ValueError(f"{count or 'nothing'} is not a number of GPUs")
    made = topologies.get_topology_desc(
        "", "cuda", target_config=described(target), topology=f"1x1x{count}"
    )
    return list(made.devices)


def described(target: Target) -> str:
    """Formats XLA's GpuTargetConfigProto as text."""
    chip = CHIPS[target.kind]
    numbers = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "fpus_per_core": 64 if target.major == 8 else 128,
        "core_count": target.cores,
        "clock_rate_ghz": target.clock,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_block_optin": target.shared - 1024,
        "shared_memory_per_core": target.shared,
        "l2_cache_size": target.cache,
        "memory_bandwidth": int(chip.bandwidth),
        "device_memory_size": int(chip.memory),
    }
    device = " ".join(f"{name}: {number}" for name, number in numbers.items())
    return (
        f"gpu_device_info {{ {device} cuda_compute_capability {{ major: {target.major} minor: 0 }} "
        f'}} platform_name: "CUDA" device_description_str: "{target.kind}" '
        "dnn_version_info { major: 9 minor: 10 patch: 0 } runtime_version { major: 13 }"
    )
