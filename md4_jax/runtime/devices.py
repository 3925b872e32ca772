"""Checks that JAX uses the devices of the machine, or those that the user requested."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from md4_jax.protocols import UserError

# File of a driver -> the device, and the command for installing JAX for it.
DRIVERS = {
    "/proc/driver/nvidia/version": ("an NVIDIA GPU", "pip install -e '.[cuda13]'"),
    "/dev/nvidia0": ("an NVIDIA GPU", "pip install -e '.[cuda13]'"),
    "/dev/accel0": ("a TPU", "pip install -e '.[tpu]'"),
}


def platform() -> str:
    """Returns cpu, gpu or tpu; UserError if JAX_PLATFORMS requests devices that do not exist."""
    asked = os.environ.get("JAX_PLATFORMS", "")
    try:
        return jax.devices()[0].platform
    except (RuntimeError, AssertionError) as error:  # an AssertionError without a plug-in
        first = (str(error).strip().splitlines() or ["no plug-in of JAX provides it"])[0][:200]
        raise UserError(
            f"JAX_PLATFORMS={asked} asks for devices that JAX does not find on this machine "
            f"({first}). Unset JAX_PLATFORMS to use the available devices. For a GPU run pip "
            "install -e '.[cuda13]', for a TPU pip install -e '.[tpu]'"
        ) from error


def remarks(network: Mapping[str, Any]) -> list[str]:
    """Lists remarks about the devices, and about a network's options for training on them.

    UserError as from `platform`.
    """
    said = {"warning": warning(), "note": slower(network.get("dtype", ""))}
    return [f"{kind}: {sentence}" for kind, sentence in said.items() if sentence]


def warning() -> str:
    """Returns a warning if the CPU is used although there is an accelerator, else ''.

    UserError as from `platform`. No warning if JAX_PLATFORMS selects the CPU.
    """
    if platform() != "cpu" or "cpu" in os.environ.get("JAX_PLATFORMS", ""):
        return ""
    for path, (device, remedy) in DRIVERS.items():
        if Path(path).exists():
            return (
                f"this machine has {device}, but JAX runs on the CPU: {remedy}, or set "
                "JAX_PLATFORMS=cpu to use the CPU"
            )
    return ""


def slower(dtype: str) -> str:
    """Returns a warning if this dtype is slow on the accelerator, else ''."""
    if dtype != "float32" or platform() not in ("gpu", "tpu"):
        return ""
    return (
        "the network computes in float32. --config.network.dtype=bfloat16 lets it use the fast "
        f"matrix products and attention of a {platform().upper()} (docs/speed.md)"
    )
