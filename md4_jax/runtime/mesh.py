"""The device mesh, arranged so that devices with the most communication are closest."""

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from md4_jax.options import MeshOptions
from md4_jax.protocols import UserError
from md4_jax.runtime.sharding import AXES


def make_mesh(options: MeshOptions, devices: list | None = None) -> Mesh:
    """Makes a mesh of the first data * fsdp * context * tensor devices.

    UserError if there are too few.
    """
    devices = jax.devices() if devices is None else devices
    for name in ("fsdp", "context", "tensor"):
        if getattr(options, name) < 1:
            raise UserError(f"mesh.{name} must be at least 1, not {getattr(options, name)}")
    if options.data < 0:
        raise UserError(
            f"mesh.data must not be negative, not {options.data}; 0 means all devices, divided by "
            "mesh.fsdp, mesh.context and mesh.tensor"
        )
    rest = options.fsdp * options.context * options.tensor
    data = options.data or max(1, len(devices) // rest)
    needed = data * rest
    if needed > len(devices):
        raise UserError(
            f"the mesh data={data} x fsdp={options.fsdp} x context={options.context} x "
            f"tensor={options.tensor} needs {needed} devices, but there are {len(devices)} "
            f"({devices[0].platform}): reduce mesh.data, mesh.fsdp, mesh.context or mesh.tensor"
        )
    if jax.process_count() > 1 and needed != len(devices):
        raise UserError(
            f"the mesh uses {needed} of {len(devices)} devices; with several processes "
            "it must use them all"
        )
    shape = (data, options.fsdp, options.context, options.tensor)
    # The compiler splits arrays, which newer versions of JAX no longer do by default everywhere.
    return Mesh(_arranged(devices[:needed], shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _arranged(devices: list, shape: tuple[int, ...]) -> np.ndarray:
    """Arranges devices so that neighbours along a mesh axis are neighbours in the machine.

    TPU slices, which are connected only by the data centre network, are along `data`.
    """
    is_tpu = devices[0].platform == "tpu"
    slices = len({getattr(device, "slice_index", 0) for device in devices}) if is_tpu else 1
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if shape[0] % slices:
        raise UserError(
            f"mesh.data={shape[0]} must be a multiple of the {slices} TPU slices, because only "
            "batches should be split between slices"
        )
    inner = (shape[0] // slices, *shape[1:])
    return mesh_utils.create_hybrid_device_mesh(
        inner, (slices, 1, 1, 1), devices, allow_split_physical_axes=True
    )
