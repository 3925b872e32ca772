"""Mesh axes, sharding of each parameter by its path, and global arrays of host batches.

The mesh always has the axes `data`, `fsdp`, `context` and `tensor`, of size 1 if unused, so no
other code depends on the number of devices. A batch is split over `data` and `fsdp`, each of its
sequences over `context`, and parameters over `fsdp`, `context` and `tensor`. The copies of a
parameter in the optimizer and the moving average are split in the same way, since their paths have
the same end.
"""

import functools
import math
import re
import sys
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from md4_jax.protocols import Array, Params, UserError

AXES = ("data", "fsdp", "context", "tensor")
BATCH_AXES = ("data", "fsdp")
# Axis of positions.
CONTEXT = "context"

# End of a parameter's path -> how its trailing dimensions are split. Leading dimensions (the
# layer axis of scanned blocks) are not split. `context` further splits what `fsdp` splits.
RULES = (
    (r"(query|key|value|gate|up)/kernel$", P("fsdp", "tensor")),
    (r"((attention|convolution)/out|down)/kernel$", P("tensor", "fsdp")),
    (r"convolution/taps$", P(None, "tensor")),
    # The rank axis of an adapter is not split.
    (r"(query|key|value|gate|up)/lora_a/kernel$", P("fsdp", None)),
    (r"(query|key|value|gate|up)/lora_b/kernel$", P(None, "tensor")),
    (r"((attention|convolution)/out|down)/lora_a/kernel$", P("tensor", None)),
    (r"((attention|convolution)/out|down)/lora_b/kernel$", P(None, "fsdp")),
    # The expert axis is not split, since each product takes a part of it.
    (r"router/kernel$", P("fsdp", None)),
    (r"embedding$", P("tensor", "fsdp")),
    (r"label_table$", P(None, "fsdp")),
    (r"(positions|registers)$", P(None, "fsdp")),
    (r"(missing|replaced|quality/hidden|quality/out)/kernel$", P("fsdp", None)),
    (r"class_head/kernel$", P("fsdp", None)),  # there are few classes
    (r"class_head/bias$", P(None)),
    (r"head/kernel$", P("fsdp", "tensor")),
    (r"head/bias$", P("tensor")),
    (r"head/location_scale/kernel$", P("fsdp", None)),
    # The last two dimensions of convolutions are channels; those of pixels and heads are small.
    (r"(conv_1|conv_2|conv_down_\d+|conv_up_\d+|shortcut)/kernel$", P("fsdp", "tensor")),
    (r"(embedding_in|head_in|patch_in|patch_out)/kernel$", P("fsdp", "tensor")),
    (r"conv_in/kernel$", P(None, "fsdp")),
    (r"conv_out/kernel$", P("fsdp", None)),
    (r"(modulation|time_in|time_out)/kernel$", P("fsdp", None)),
    (r"(scales?|bias|final_bias|ns_coeffs|raw_power)$", P(None)),
    (r"companion/(counts|sequences|symbols|others|shares)$", P()),
    (r"mixture/hidden/kernel$", P(None, "fsdp")),
    (r"mixture/(gates_)?of_(evidence|features)/kernel$", P("fsdp", None)),
    (r"mixture/(first|second|correction)/kernel$", P(None, None)),
)
# Largest size of a parameter without a rule, which is not split (1 MiB in float32).
SMALL = 2**18


def batch_shards(mesh: Mesh) -> int:
    """Number of pieces into which a batch is split."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def token_groups() -> tuple[int, int]:
    """Numbers of pieces into which a batch and its sequences are split on the current mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return (1, 1) if mesh.empty else (batch_shards(mesh), mesh.shape[CONTEXT])


def splits_sequences() -> bool:
    """Returns whether the current mesh splits the positions of a sequence."""
    return token_groups()[1] > 1


def splits_parameters() -> bool:
    """Returns whether the current mesh splits parameters that a layer must gather before use."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.shape["fsdp"] * mesh.shape[CONTEXT] > 1


def on_one_device() -> bool:
    """Returns whether the current mesh has one device, or there is no mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1


def path_name(path: tuple) -> str:
    """Formats a path of jax.tree_util as 'network/blocks/attention/query/kernel'."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def spec_for(name: str, shape: tuple[int, ...], mesh: Mesh) -> P:
    """Returns the PartitionSpec of one array.

    An array without a rule for its path is not split, with a warning. UserError for a large array
    without a rule on a mesh that splits parameters, and for an uneven split.
    """
    if not shape:
        return P()
    spec = next((spec for pattern, spec in RULES if re.search(pattern, name)), None)
    if spec is None:
        _check_replicated(name, shape, mesh)
        spec = P()
    full = P(*(None,) * (len(shape) - len(spec)), *(_with_context(axis, mesh) for axis in spec))
    for size, axis in zip(shape, full, strict=True):
        if size % _parts(axis, mesh):
            names = (axis,) if isinstance(axis, str) else axis
            said = " times ".join(f"mesh.{one}={mesh.shape[one]}" for one in names)
            raise UserError(
                f"{name} has a dimension of {size}, which is not a multiple of {said}: choose "
                "network sizes that are"
            )
    return full


def _with_context(axis: str | None, mesh: Mesh) -> str | tuple[str, ...] | None:
    """Returns the mesh axes for the `axis` of a rule: `context` is added to `fsdp`."""
    return ("fsdp", CONTEXT) if axis == "fsdp" and mesh.shape[CONTEXT] > 1 else axis


def _parts(axis: str | tuple[str, ...] | None, mesh: Mesh) -> int:
    """Number of pieces into which these axes of the mesh split a dimension."""
    return math.prod(mesh.shape[one] for one in ((axis,) if isinstance(axis, str) else axis or ()))


def _check_replicated(name: str, shape: tuple[int, ...], mesh: Mesh) -> None:
    """Warns about a parameter without a rule; UserError if replicating it takes too much memory."""
    parameter = name[max(0, name.find("network/"), name.find("process/")) :]
    axes = ("fsdp", "tensor") if len(shape) > 1 else (None,)
    row = f'(r"{"/".join(parameter.split("/")[-2:])}$", P({", ".join(map(repr, axes))}))'
    split = {axis: mesh.shape[axis] for axis in AXES[1:] if mesh.shape[axis] > 1}
    if split and math.prod(shape) > SMALL:
        sizes = " and ".join(f"mesh.{axis}={size}" for axis, size in split.items())
        raise UserError(
            f"no rule says how to split {parameter} {shape} over {sizes}, and it is too large to "
            "be copied to every device. Add a row to RULES in md4_jax/runtime/sharding.py: "
            f"{row}, with None for dimensions that are not split"
        )
    _warn_replicated(parameter, shape, row)


@functools.cache  # once for a parameter and its copies in the optimizer and the average
def _warn_replicated(parameter: str, shape: tuple[int, ...], row: str) -> None:
    if jax.process_index() == 0:
        print(
            f"warning: no rule says how to split {parameter} {shape} over devices, so every "
            "device holds a copy. To split it, add a row to RULES in "
            f"md4_jax/runtime/sharding.py: {row}",
            file=sys.stderr,
            flush=True,
        )


def shardings_of(tree: Params, mesh: Mesh) -> Params:
    """Returns the sharding of every array of a tree (arrays or ShapeDtypeStructs)."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, spec_for(path_name(path), leaf.shape, mesh)), tree
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P(BATCH_AXES))


def constrain(x: Array, *axes: str | tuple[str, ...] | None) -> Array:
    """Constrains the sharding of an activation on the current mesh; the identity without a mesh.

    If `context` does not divide the number of positions, they are not split.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    split = mesh.shape[CONTEXT]
    # There may be fewer axes than dimensions.
    pairs = zip(axes, x.shape[: len(axes)], strict=True)
    spec = P(*(None if axis == CONTEXT and size % split else axis for axis, size in pairs))
    return jax.lax.with_sharding_constraint(x, spec)


def dividing(shape: tuple[int, ...], *axes: str | tuple[str, ...] | None) -> P:
    """Returns P(*axes) without axes of the current mesh that do not divide their dimension."""
    mesh = jax.sharding.get_abstract_mesh()
    pairs = zip(shape, axes, strict=True)
    return P(*(None if size % _parts(axis, mesh) else axis for size, axis in pairs))


def local_rows(mesh: Mesh, batch_size: int) -> np.ndarray:
    """Returns the rows of a global batch on the devices of this process, ascending."""
    each = batch_size // batch_shards(mesh)
    return (_local_shards(mesh)[:, None] * each + np.arange(each)).ravel()


def _local_shards(mesh: Mesh) -> np.ndarray:
    """Returns the pieces of a batch on the devices of this process, some of them shared."""
    held = batch_sharding(mesh).addressable_devices_indices_map((batch_shards(mesh),))
    return np.unique([index[0].start or 0 for index in held.values()])


def to_global(tree: Params, mesh: Mesh) -> Params:
    """Makes global arrays, split over the batch axes, from the `local_rows` of each process."""
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
    """Returns global arrays as complete numpy arrays on every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(tree, tiled=True)


def max_over_processes(number: int) -> int:
    """Returns the largest of the numbers of all processes, on every process."""
    return max_of_each([number])[0]


def same_everywhere(number: int) -> bool:
    """Returns whether a number of 32 bits is equal on all processes, except for its last bit."""
    half = number >> 1  # its negative is an int32 too
    largest, smallest = max_of_each([half, -half])
    return largest == -smallest


def max_of_each(numbers: Sequence[int]) -> list[int]:
    """Returns the largest value over all processes of each number, on every process."""
    if jax.process_count() == 1:
        return list(numbers)
    return np.max(to_host(np.asarray([numbers])), axis=0).tolist()


def table(tree: Params, mesh: Mesh) -> str:
    """Lists the parameters, one per line: path, shape, sharding, MiB per device."""
    lines = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        spec = spec_for(path_name(path), leaf.shape, mesh)
        split = math.prod(_parts(axis, mesh) for axis in spec)
        mib = math.prod(leaf.shape) * leaf.dtype.itemsize / split / 2**20
        lines.append(f"  {path_name(path):<56} {leaf.shape!s:<18} {spec!s:<40} {mib:9.3f} MiB")
    return "\n".join(lines)
