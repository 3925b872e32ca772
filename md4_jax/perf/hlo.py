"""Analysis of a compiled program's HLO text: FLOPs, and traffic in memory and over links.

The body of a loop counts once per iteration, unlike in the compiler's own count. For a conditional
only the cheapest branch counts, since the others handle rare overflows of a capacity; right in the
scope `LIKELY` it is the most expensive one, since the others handle rare faults.
"""

import collections
import functools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from md4_jax.perf.hlo_text import Instruction, computations, sides, size_of
from md4_jax.runtime.scopes import LIKELY, TURNS

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# Instructions that move no bytes themselves.
FREE = (
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "while",
    "conditional", "call", "async-start", "async-update", "partition-id", "replica-id",
)  # fmt: skip


class Traffic(NamedTuple):
    """Work of one device: bytes read and written in memory, {collective: (count, bytes)}.

    products: FLOPs of the instructions `dot` and `convolution`, which CPU programs contain.
    """

    moved: float
    collectives: dict[str, tuple[int, float]]
    products: float = 0.0


def traffic(text: str, unknown: int = 1) -> Traffic:
    """Sums the traffic of a program; a loop with unknown length counts `unknown` times.

    Bytes that a device receives for a result of n bytes over g devices: all-gather and
    all-to-all n (g - 1) / g, reduce-scatter n (g - 1), all-reduce 2 n (g - 1) / g, permute n.
    """
    bodies = computations(text)

    @functools.cache
    def visit(name: str) -> Traffic:
        moved, products, found = 0.0, 0.0, collections.Counter()
        for line in bodies.get(name, {}).values():
            moved += _moved(line, bodies[name], bodies)
            products += _product(line, bodies[name])
            kind, size = _collective(line, name)
            if kind and not _continues(name, bodies[name]):
                found[kind, "count"] += 1
                found[kind, "bytes"] += size
            for times, others in _called(line, bodies, unknown):
                parts = [visit(other) for other in others]
                choose = max if f'/{LIKELY}/cond"' in line.more else min
                taken = choose(parts, key=lambda part: (part.moved, _received(part)))
                moved += times * taken.moved if line.op != "fusion" else 0.0
                products += times * taken.products
                for kind, (count, size) in taken.collectives.items():
                    found[kind, "count"] += times * count
                    found[kind, "bytes"] += times * size
        kinds = dict.fromkeys(kind for kind, _ in found)
        received = {k: (found[k, "count"], float(found[k, "bytes"])) for k in kinds}
        return Traffic(moved, received, products)

    return visit("ENTRY")


def _received(part: Traffic) -> float:
    return sum(size for _, size in part.collectives.values())


def _product(line: Instruction, body: Mapping[str, Instruction]) -> float:
    """FLOPs of a `dot` or `convolution`: two for each entry of the result and each summed index.

    For a convolution this includes neighbours outside the image.
    """
    if line.op == "convolution" and line.operands[1] in body:
        axes = re.search(r"dim_labels=\w+?_(\w+?)->", line.more)[1]
        kernel = dict(zip(axes, sides(body[line.operands[1]].shape), strict=True))
        return 2.0 * math.prod(sides(line.shape)) * math.prod(kernel.values()) / kernel["o"]
    if line.op != "dot" or line.operands[0] not in body:
        return 0.0
    summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.more)
    left = sides(body[line.operands[0]].shape)
    count = math.prod(left[int(axis)] for axis in summed[1].split(",") if axis)
    return 2.0 * math.prod(sides(line.shape)) * count


def _called(line: Instruction, bodies: Mapping, unknown: int) -> list[tuple[int, list[str]]]:
    """Lists (count, alternative computations) called by an instruction."""
    if line.op == "while":
        body = re.search(r"body=%?([\w.\-]+)", line.more)
        count = _trips(line, bodies)
        return [(unknown if count is None else count, [body[1]])]
    if line.op == "conditional":
        listed = re.search(r"branch_computations=\{([^}]*)\}", line.more)
        both = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line.more)
        return [(1, re.findall(r"[\w.\-]+", listed[1]) if listed else both)]
    called = re.search(r"(?:calls|to_apply)=%?([\w.\-]+)", line.more)
    return [(1, [called[1]])] if called and line.op in ("call", "fusion", "async-start") else []


def _trips(line: Instruction, bodies: Mapping) -> int | None:
    """Returns the trip count of a loop, or None if the text does not state it.

    A number from `runtime.scopes.turns`, which is an estimate, takes precedence.
    """
    said = re.search(rf'/{TURNS}(\d+)/while"', line.more)
    if said:
        return int(said[1])
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', line.more)
    if known:
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", line.more)
    lines = bodies.get(condition[1], {}) if condition else {}
    compared = [i for i in lines.values() if i.op == "compare" and "direction=LT" in i.more]
    limits = [lines[o] for i in compared for o in i.operands if lines.get(o, i).op == "constant"]
    return int(limits[0].operands[0]) if len(limits) == 1 else None


def _moved(line: Instruction, body: Mapping, bodies: Mapping) -> float:
    """Bytes that an instruction reads and writes; for a slice, only the slice."""
    if line.op in FREE or line.op.endswith("-done"):
        return 0.0
    if line.op == "slice-start":  # ((operand), result, ...)
        result = line.shape.split("), ")[1]
        return size_of(result) + size_of(result.replace("S(1)", ""))
    if line.op.endswith("-start"):
        return size_of(line.shape)  # (operand, result)
    if "AllocateBuffer" in line.more:
        return 0.0
    sizes = [size_of(body[name].shape) if name in body else 0.0 for name in line.operands]
    if line.op in ("dynamic-slice", "slice", "gather"):
        return 2.0 * size_of(line.shape)
    if line.op == "dynamic-update-slice":
        return 2.0 * sizes[1]
    inside = _inside(line, bodies)
    if line.op != "fusion" or not inside:
        return size_of(line.shape) + sum(sizes)
    if _ends(inside):
        return 0.0
    if _continues(_callee(line), inside):
        inside = _beside_collective(inside)
    read = sum(
        min(size, _read(_parameter(n, inside), inside, bodies)) for n, size in enumerate(sizes)
    )
    return read + min(size_of(line.shape), _written(inside))


def _inside(line: Instruction, bodies: Mapping) -> Mapping[str, Instruction]:
    """Returns the instructions of a fusion."""
    return bodies.get(_callee(line), {})


def _callee(line: Instruction) -> str:
    """Returns the name of the computation of a fusion."""
    called = re.search(r"calls=%?([\w.\-]+)", line.more)
    return called[1] if called else ""


def _ends(inside: Mapping[str, Instruction]) -> bool:
    """Returns whether a fusion ends a collective that another fusion has started."""
    return any("AsyncCollectiveDone" in line.more for line in inside.values())


def _continues(name: str, inside: Mapping[str, Instruction]) -> bool:
    """Returns whether a fusion continues or ends a collective that another fusion has started.

    On TPUs the fusions between the first and the last one overlap other computations with the
    collective. All of them contain it.
    """
    return name.startswith("async_collective_fusion") or _ends(inside)


def _beside_collective(inside: Mapping[str, Instruction]) -> dict[str, Instruction]:
    """Returns the instructions of a fusion other than a collective that was started elsewhere.

    Omits the collective and values that are only passed through.
    """
    passed = [i.name for i in inside.values() if i.op in ("parameter", *COLLECTIVES)]
    kept = {i.name: i for i in inside.values() if i.op not in COLLECTIVES}
    for name, line in kept.items():
        if line.op == "tuple" and line.more.startswith("ROOT "):
            made = [one for one in line.operands if one not in passed]
            kept[name] = line._replace(operands=made)
    return kept


def _parameter(number: int, inside: Mapping[str, Instruction]) -> str:
    """Returns the name of a fusion's operand by its index, '' if there is none."""
    found = (i.name for i in inside.values() if i.op == "parameter" and i.operands == [str(number)])
    return next(found, "")


def _read(name: str, inside: Mapping[str, Instruction], bodies: Mapping) -> float:
    """Bytes that a fusion reads from an array: only slices, if it uses nothing else."""
    read = 0.0
    for user in [i for i in inside.values() if name in i.operands]:
        first = user.operands[0] == name
        if user.op in ("slice", "dynamic-slice", "gather") and first:
            read += size_of(user.shape)
        elif user.op == "bitcast":
            read += _read(user.name, inside, bodies)
        elif user.op == "fusion":
            nested = _inside(user, bodies)
            read += _read(_parameter(user.operands.index(name), nested), nested, bodies)
        elif not (user.op == "dynamic-update-slice" and first):
            return math.inf
    return read


def _written(inside: Mapping[str, Instruction]) -> float:
    """Bytes that a fusion writes: only the update, if it updates an array in place."""
    root = next((i for i in inside.values() if i.more.startswith("ROOT ")), None)
    if root is None:
        return math.inf
    roots = [inside.get(n) for n in root.operands] if root.op == "tuple" else [root]
    written = 0.0
    for each in roots:
        while each is not None and each.op == "bitcast":
            each = inside.get(each.operands[0])
        if each is None:
            return math.inf
        update = inside.get(each.operands[1]) if each.op == "dynamic-update-slice" else None
        written += size_of((update or each).shape)
    return written


def _collective(line: Instruction, computation: str) -> tuple[str, float]:
    """Returns (kind, bytes received by a device) of a collective, else ('', 0)."""
    kind = line.op.removesuffix("-start")
    if kind not in COLLECTIVES:
        return "", 0.0
    shape = line.shape.replace("S(1)", "")
    if line.op.endswith("-start") and kind != "all-reduce":  # (operands, results, ...)
        arrays = re.findall(r"\w+\[[\d,]*\](?:\{[^}]*\})?", shape)
        arrays = [a for a in arrays if not re.match(r"[us]32\[\]", a)]
        shape = " ".join(arrays[len(arrays) // 2 :])
    size, group = size_of(shape), _group(line.more)
    share = (group - 1) / group
    if kind == "all-reduce" and computation.startswith("all-reduce-scatter"):
        return "reduce-scatter", size * share  # a fusion that keeps a part of the sum
    factor = {"all-reduce": 2 * share, "reduce-scatter": group - 1, "collective-permute": 1.0}
    return kind, size * factor.get(kind, share)


def _group(more: str) -> int:
    """Number of devices in a group of a collective."""
    tiled = re.search(r"replica_groups=\[(\d+),(\d+)\]", more)
    if tiled:
        return int(tiled[2])
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", more)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", more)
    return len(listed[1].split(",")) if listed else 2
