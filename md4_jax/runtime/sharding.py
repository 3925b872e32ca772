"""Mesh axes, the table from parameter path to sharding, and host batches to global arrays.

The mesh always has the axes `data`, `fsdp` and `tensor`, of size 1 where unused,
so nothing else asks how many devices there are. A batch is split over `data`
and `fsdp`; parameters over `fsdp` and `tensor`; the optimizer's and the moving
average's copies lie as their parameter does, since their paths end alike.
"""

import math
import re

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from md4_jax.options import MeshOptions
from md4_jax.protocols import Array, Params, UserError

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# The end of a parameter's path -> how its trailing dimensions are split. Leading
# dimensions (the layer axis of scanned blocks) stay whole.
RULES = (
    (r"(query|key|value|gate|up)/kernel$", P("fsdp", "tensor")),
    (r"(attention/out|down)/kernel$", P("tensor", "fsdp")),
    (r"embedding$", P("tensor", "fsdp")),
    (r"label_table$", P(None, "fsdp")),
    (r"head/kernel$", P("fsdp", "tensor")),
    (r"head/bias$", P("tensor")),
    (r"head/location_scale/kernel$", P("fsdp", None)),
    (r"(modulation|time_in|time_out)/kernel$", P("fsdp", None)),
    (r"(scale|bias|ns_coeffs|raw_power)$", P(None)),
)


def make_mesh(options: MeshOptions, devices: list | None = None) -> Mesh:
    """A mesh over the first data * fsdp * tensor devices; UserError when there are too few."""
    devices = jax.devices() if devices is None else devices
    for name in ("fsdp", "tensor"):
        if getattr(options, name) < 1:
            raise UserError(f"mesh.{name} must be at least 1, not {getattr(options, name)}")
    rest = options.fsdp * options.tensor
    data = options.data or max(1, len(devices) // rest)
    needed = data * rest
    if needed > len(devices):
        raise UserError(
            f"the mesh data={data} x fsdp={options.fsdp} x tensor={options.tensor} needs "
            f"{needed} devices, but there are {len(devices)} ({devices[0].platform}); "
            "lower mesh.data, mesh.fsdp or mesh.tensor"
        )
    if jax.process_count() > 1 and needed != len(devices):
        raise UserError(
            f"the mesh uses {needed} of {len(devices)} devices; with several processes "
            "it must use them all"
        )
    return Mesh(_arranged(devices[:needed], (data, options.fsdp, options.tensor)), AXES)


def _arranged(devices: list, shape: tuple[int, ...]) -> np.ndarray:
    """The devices as an array of that shape, neighbours on an axis neighbours in the machine.

    Slices of TPUs, between which there is only the data centre's network, lie along `data`.
    """
    is_tpu = devices[0].platform == "tpu"
    slices = len({getattr(device, "slice_index", 0) for device in devices}) if is_tpu else 1
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if shape[0] % slices:
        raise UserError(
            f"mesh.data={shape[0]} must be a multiple of the {slices} slices, between which "
            "nothing but batches should be split"
        )
    inner = (shape[0] // slices, *shape[1:])
    return mesh_utils.create_hybrid_device_mesh(
        inner, (slices, 1, 1), devices, allow_split_physical_axes=True
    )


def batch_shards(mesh: Mesh) -> int:
    """How many pieces a batch is split into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def batch_groups() -> int:
    """How many pieces a batch is split into on the mesh in use; 1 where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def path_name(path: tuple) -> str:
    """'network/blocks/attention/query/kernel' for a path of jax.tree_util."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def spec_for(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """The PartitionSpec of one array; UserError for an unknown path or an uneven split."""
    if not shape:
        return P()
    spec = next((spec for pattern, spec in RULES if re.search(pattern, name)), None)
    if spec is None:
        raise UserError(f"no sharding rule matches {name} {shape}; add a row to sharding.RULES")
    full = P(*(None,) * (len(shape) - len(spec)), *spec)
    for size, axis in zip(shape, full, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise UserError(
                f"{name} has a dimension of {size}, which mesh.{axis}={mesh.shape[axis]} "
                "does not divide; choose network sizes that are multiples of it"
            )
    return full


def shardings_of(tree: Params, mesh: Mesh) -> Params:
    """The sharding of every array of a tree (arrays or ShapeDtypeStructs) by its path."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, spec_for(path_name(path), leaf.shape, mesh)), tree
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def constrain(x: Array, *axes: str | tuple[str, ...] | None) -> Array:
    """Pins an activation's sharding on the mesh in use; the identity where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, P(*axes))


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Which rows of a global batch the devices of this process hold, in ascending order."""
    each = batch_size // batch_shards(mesh)
    return (_local_shards(mesh)[:, None] * each + np.arange(each)).ravel()


def _local_shards(mesh: Mesh) -> np.ndarray:
    """The pieces of a batch that the devices of this process hold; some may be others' too."""
    held = batch_sharding(mesh).addressable_devices_indices_map((batch_shards(mesh),))
    return np.unique([index[0].start or 0 for index in held.values()])


def to_global(tree: Params, mesh: Mesh) -> Params:
    """The `local_rows` of a host batch -> global arrays split over the batch axes."""
    shards = _local_shards(mesh)

    def whole(x: np.ndarray) -> Array:
        each = len(x) // len(shards)

        def piece(index: tuple[slice, ...]) -> np.ndarray:
            first = np.searchsorted(shards, (index[0].start or 0) // each) * each
            return x[first : first + each]

        shape = (each * batch_shards(mesh), *x.shape[1:])
        return jax.make_array_from_callback(shape, batch_sharding(mesh), piece)

    return jax.tree.map(whole, tree)


def to_host(tree: Params) -> Params:
    """Global arrays -> numpy, whole, on every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


def max_over_processes(number: int, *, now: bool = True) -> int:
    """The largest of the numbers that the processes give, the same answer on all.

    With several processes they ask one another only when `now`, which must be
    alike on all of them, and the answer is 0 in between.
    """
    if jax.process_count() == 1:
        return number
    return int(np.max(to_host(np.asarray([number])))) if now else 0


def table(tree: Params, mesh: Mesh) -> str:
    """One line per kind of parameter: path, shape, how it is split, bytes on a device."""
    lines = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        spec = spec_for(path_name(path), leaf.shape, mesh)
        split = math.prod(mesh.shape[axis] for axis in spec if axis is not None)
        mib = math.prod(leaf.shape) * leaf.dtype.itemsize / split / 2**20
        lines.append(f"  {path_name(path):<56} {leaf.shape!s:<18} {spec!s:<40} {mib:9.3f} MiB")
    return "\n".join(lines)
