"""Items of a checkpoint: their arrays by name, and the checks against what was saved."""

import json
import math
import os
import re
import shlex
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from md4_jax.protocols import UserError
from md4_jax.runtime.checksums import checksums
from md4_jax.runtime.paths import Place, is_remote
from md4_jax.runtime.sharding import max_over_processes, same_everywhere

# Extra bytes on a device while reading back a checkpoint, part by part.
PART_BYTES = 2**28
# Longest time for which processes may see different lists; those of NFS are old for a minute.
LISTED_SECONDS = 120.0


def leaves(tree: Any) -> dict[str, Any]:
    """Returns {path: array}, so that files do not depend on Python classes."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in flat}


def attempt(read: Callable[[], Any]) -> tuple[Any, str]:
    """Returns (result, ''), or (None, reason) on all processes if reading failed on any.

    Checksums are sums over all processes, so all processes must have read the arrays.
    """
    found, wrong = None, ""
    try:
        found = read()
    except Exception as error:
        wrong = reason(error)
    if max_over_processes(int(bool(wrong))):
        return None, wrong or "another process could not read it"
    return found, ""


def check_allowed(directory: Place, *, below: bool = True) -> None:
    """Raises UserError for a part of a local directory that this user may not read.

    A checkpoint of which this is true is intact, and no reason to take an older one.

    below: whether to check everything in the directory too
    """
    if is_remote(directory):
        return
    found = [str(directory)]
    for folder, folders, files in os.walk(directory) if below else ():
        found += [os.path.join(folder, name) for name in (*folders, *files)]
    for path in found:
        wanted = os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
        if os.path.exists(path) and not os.access(path, wanted):
            raise UserError(
                f"{path} cannot be read: Permission denied. Its owner can allow it by: chmod -R "
                f"a+rX {shlex.quote(str(directory))}"
            )


def wait_for_same(listed: Callable[[], list[int]], again: Callable[[], Any], where: Place) -> None:
    """Waits until all processes list the same checkpoints; UserError if they never do.

    A process may see an old list of a shared directory for a minute. If it began with an older
    checkpoint than the others, they would train on together without an error.

    listed: returns the steps that this process sees. again: reads the list again
    """
    until = time.monotonic() + LISTED_SECONDS
    while not same_everywhere(zlib.crc32(json.dumps(listed()).encode())):
        if max_over_processes(int(time.monotonic() > until)):
            raise UserError(
                f"the processes see different checkpoints in {where}; this one sees those of the "
                f"steps {listed()}: --workdir must be a directory that all machines share"
            )
        time.sleep(1.0)
        again()


def parts(arrays: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Splits arrays into parts of at most PART_BYTES per device, or of a single array."""
    parts, size = [{}], 0
    for name, x in arrays.items():
        own = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        if parts[-1] and size + own > PART_BYTES:
            parts, size = [*parts, {}], 0
        parts[-1][name] = x
        size += own
    return parts


def read_part(directory: Place, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Reads some arrays of an item, with the given shapes and shardings."""
    shapes = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        for name, x in arrays.items()
    }
    arguments = ocp.checkpoint_utils.construct_restore_args(shapes)
    asked = ocp.args.PyTreeRestore(shapes, restore_args=arguments, partial_restore=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(directory, args=asked)


def damage(found: Any, items: Iterable[str]) -> str:
    """Names the part of a checkpoint that differs from what was saved, '' if none does."""
    record = dict(found["host"])
    if record.pop("crc32", None) != crc32(record):
        return "its host file has a wrong checksum"
    for item in items:
        kept, now = record["checksums"][item], checksums(found[item])
        for name in now:
            if kept.get(name) != now[name]:
                return f"{item} {name} has a wrong checksum"
    return ""


def other_type(directory: Place, asked: Mapping[str, Any]) -> str:
    """Names an array of an item that is stored in another type than requested, or ''.

    Orbax converts such an array, so its checksum would differ from the saved one.
    """
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        kept = leaves(reader.metadata(directory).item_metadata.tree)
    for name, x in asked.items():
        if name in kept and kept[name].dtype != x.dtype:
            return OTHER_TYPE.format(f"{directory.name} {name}", kept[name].dtype, x.dtype)
    return ""


def crc32(record: Any) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def graft(template: Any, leaves: dict[str, Any]) -> Any:
    """Inserts restored arrays into the structure of the template."""
    return jax.tree_util.tree_map_with_path(
        lambda p, _: leaves[jax.tree_util.keystr(p, simple=True, separator="/")], template
    )


# Orbax's message for an array of another shape than requested.
SHAPES = re.compile(r"Requested shape: (\(.*?\)) .* stored shape: (\(.*?\))")
OTHER_VERSION = (
    "Another version of the program may have trained it: use that version (`commit` in "
    "config.json), or train again"
)
OTHER_SHAPE = "it has an array of the shape {1} where the network of this config has {0}. "
OTHER_TYPE = (
    "it stores {0} as {1}, but the network of this config has {2}. It may have been saved "
    "with JAX_ENABLE_X64 set: it is not damaged, but only the version that trained it can read it"
)
# Orbax's message for an item without a requested array.
NAMES = "tree structures do not match"
OTHER_NAMES = "it lacks an array that the network of this config has. "
# The system's message for a full disk; the caller's message names the disk.
FULL = ("No space left on device", "Disk quota exceeded")


def reason(error: Exception) -> str:
    """Returns the first line of the innermost cause; it names the file or the errno."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    shapes = SHAPES.match(text)
    if shapes:
        return OTHER_SHAPE.format(*shapes.groups()) + OTHER_VERSION
    if NAMES in text:
        return OTHER_NAMES + OTHER_VERSION
    if full := next((said for said in FULL if said in text), None):
        return full
    # TensorStore names files first, and the system's message last.
    return text if len(text) <= 300 else f"{text[:120]} ... {text[-175:]}"
