"""Time of a compiled program's operations, by their names in the source."""

import collections
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from md4_jax.protocols import UserError

CALLS = 3
OP_NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?op_name=\"([^\"]*)\"", re.MULTILINE)
WRAPPED = re.compile(r"(?:transpose|jvp|vmap|jit|checkpoint|remat)\((.*)\)")
# Disables CUDA graphs.
GRAPHS = "--xla_gpu_enable_command_buffer="
PRODUCTS = ("dot_general", "conv_general_dilated")


class Event(NamedTuple):
    """Execution of one instruction on one thread, in nanoseconds."""

    instruction: str
    start: float
    length: float


def check_shown(platform: str, flags: str) -> None:
    """Raises UserError if operations run in CUDA graphs, which hide them in a trace."""
    if platform == "gpu" and GRAPHS not in flags.split():
        raise UserError(
            f"bench.names on a GPU needs XLA_FLAGS={GRAPHS} before the command: operations in "
            "CUDA graphs have no names (without graphs a step takes a few percent longer)"
        )


def by_name(text: str, call: Callable[[], Any]) -> dict[str, float]:
    """Traces a few calls of a program; returns {name: seconds per call}, longest first.

    text: HLO text of the compiled program, with the source names of its instructions. Times of
    threads are summed.
    """
    names = {instruction: label(name) for instruction, name in OP_NAME.findall(text)}
    spent = collections.Counter()
    for line in traced(call):
        for instruction, nanoseconds in own_times(line):
            # An instruction made by the compiler has no source name; its kind is used.
            name = names.get(instruction) or re.sub(r"[.\d]+$", "", instruction)
            spent[name] += 1e-9 * nanoseconds / CALLS
    return dict(spent.most_common())


def label(name: str) -> str:
    """Shortens 'jit(f)/transpose(jvp(Net))/blocks_3/dot_general' to 'Net/blocks/dot_general, back'.

    Omits layer numbers, so that layers are summed.
    """
    parts: list[str] = []
    for part in name.split("/")[1:]:
        while match := WRAPPED.fullmatch(part):
            part = match[1]
        part = re.sub(r"_\d+$", "", part)
        if part and parts[-1:] != [part]:
            parts.append(part)
    return "/".join(parts) + (", back" if "transpose(jvp(" in name else "")


def traced(call: Callable[[], Any]) -> Iterator[list[Event]]:
    """Runs a program under JAX's profiler; yields the instructions per thread or stream."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                jax.block_until_ready(call())
        for file in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for line in plane.lines:
                    yield list(_instructions(line.events))


def _instructions(events: Iterable[Any]) -> Iterator[Event]:
    for event in events:
        instruction = dict(event.stats).get("hlo_op")
        if instruction is not None:
            yield Event(str(instruction), event.start_ns, event.duration_ns)


def own_times(line: Iterable[Event]) -> Iterator[tuple[str, float]]:
    """Yields (instruction, nanoseconds), excluding instructions that ran inside it."""
    open_: list[list] = []  # [event, nanoseconds inside of it], the innermost last

    def closed(until: float) -> Iterator[tuple[str, float]]:
        while open_ and open_[-1][0].start + open_[-1][0].length <= until:
            event, inside = open_.pop()
            yield event.instruction, event.length - inside

    for event in sorted(line, key=lambda event: (event.start, -event.length)):
        yield from closed(event.start)
        if open_:
            open_[-1][1] += event.length
        open_.append([event, 0.0])
    yield from closed(float("inf"))


def summary(seconds: dict[str, float], rows: int) -> dict[str, Any]:
    """Sums matrix products and the rest, in seconds per call; keeps the `rows` longest names."""
    products = sum(each for name, each in seconds.items() if is_product(name))
    other = sum(seconds.values()) - products
    return {"products": products, "other": other, "longest": dict(list(seconds.items())[:rows])}


def table(part: str, found: dict[str, Any]) -> str:
    """Formats a summary as a line of sums and a Markdown table."""
    products, other = found["products"], found["other"]
    lines = [
        f"{part}: {1e3 * products:.3g} ms of a call in matrix products, {1e3 * other:.3g} ms in "
        "all else, summed over threads\n",
        "| operation | ms | share |",
        "|---|---|---|",
    ]
    for name, each in found["longest"].items():
        lines.append(f"| {name} | {1e3 * each:.3g} | {each / (products + other):.1%} |")
    return "\n".join(lines)


def is_product(name: str) -> bool:
    """Returns whether an operation is a matrix product or a convolution."""
    return name.removesuffix(", back").rpartition("/")[2] in PRODUCTS
