"""Parser for the HLO text of a compiled program."""

import math
import re
from typing import NamedTuple

# Bits of types without a number in their name.
BITS = {"pred": 8, "token": 0, "opaque": 0}


class Instruction(NamedTuple):
    """Instruction `name = shape op(operands), more`."""

    name: str
    shape: str
    op: str
    operands: list[str]
    more: str


def computations(text: str) -> dict[str, dict[str, Instruction]]:
    """Parses {name: {instruction's name: instruction}}; the entry is called ENTRY."""
    bodies: dict[str, dict[str, Instruction]] = {}
    body: dict[str, Instruction] = {}
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith(" "):
            body = bodies.setdefault("ENTRY" if head[1] else head[2], {})
            continue
        match = re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)", line)
        if match:
            inside, _, more = match[5].partition("), ")
            operands = re.findall(r"%?([a-zA-Z_][\w.\-]*)(?=[,)]|$)", inside)
            if match[4] in ("parameter", "constant"):
                operands = [inside.rstrip(")")]
            more = ("ROOT " if match[1] else "") + more
            body[match[2]] = Instruction(match[2], match[3], match[4], operands, more)
    return bodies


def size_of(shape: str) -> float:
    """Returns the bytes of a shape, or of a tuple, in main memory.

    Arrays that S(1) marks lie in the vector memory of a TPU and do not count.
    """
    size = 0.0
    for kind, numbers, layout in re.findall(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?", shape):
        if "S(1)" not in layout:
            width = re.search(r"\d+", kind)
            bits = BITS.get(kind, int(width[0]) if width else 32)
            size += bits / 8 * math.prod(map(int, filter(None, numbers.split(","))))
    return size


def sides(shape: str) -> list[int]:
    """Returns the sizes of the axes of a shape: [2, 3] of 'f32[2,3]{1,0}'."""
    return [int(side) for side in re.search(r"\[([\d,]*)\]", shape)[1].split(",") if side]
