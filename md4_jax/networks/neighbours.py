"""Sets of neighbours that have a table of counts, and the tables in which a token is looked up."""

import functools
import itertools

import numpy as np

# Windows in which a masked token is looked up: neighbours to the left and to the right. All that
# are visible there choose the table.
WINDOWS = (
    (1, 1), (2, 2), (3, 3), (4, 4), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (0, 2), (0, 3), (0, 4),
    (0, 5), (0, 6), (1, 2), (2, 1), (1, 3), (3, 1), (2, 3), (3, 2), (1, 4), (4, 1), (2, 4), (4, 2),
    (1, 5), (5, 1), (2, 5), (5, 2), (3, 5), (5, 3),
)  # fmt: skip
# Two more look-ups are of the nearest visible neighbours in all of this reach, as many as make a
# set that has a table. They differ where a left and a right neighbour are equally far.
REACH = 6
LOOKUPS = len(WINDOWS) + 2
OFFSETS = (*range(-REACH, 0), *range(1, REACH + 1))


@functools.cache
def neighbour_sets() -> tuple[int, ...]:
    """Lists the sets of neighbours that have a table; bit j of a set stands for OFFSETS[j].

    They are all subsets of a window, all pairs and all triples; small sets come first.
    """
    bits = [1 << j for j in range(len(OFFSETS))]
    found = {sum(some) for count in (2, 3) for some in itertools.combinations(bits, count)}
    for window in WINDOWS:
        inside = [1 << j for j, n in enumerate(OFFSETS) if -window[0] <= n <= window[1]]
        for count in range(len(inside) + 1):
            found |= {sum(some) for some in itertools.combinations(inside, count)}
    return tuple(sorted(found, key=lambda chosen: (chosen.bit_count(), chosen)))


@functools.cache
def lookups() -> np.ndarray:
    """Tells in which tables to look for each set of visible neighbours: int32 [2^12, K]."""
    number = {chosen: n for n, chosen in enumerate(neighbour_sets())}
    windows = [
        sum(1 << j for j, n in enumerate(OFFSETS) if -left <= n <= right) for left, right in WINDOWS
    ]

    def nearest(visible: int, farthest_first: list[int]) -> int:
        for j in farthest_first:
            if visible in number:
                return visible
            visible &= ~(1 << j)
        return visible

    # Of two neighbours that are equally far the left one goes first in one order.
    orders = [
        sorted(range(len(OFFSETS)), key=lambda j: (-abs(OFFSETS[j]), side * OFFSETS[j]))
        for side in (1, -1)
    ]
    found = np.zeros((2 ** len(OFFSETS), LOOKUPS), np.int32)
    for visible in range(len(found)):
        chosen = [visible & window for window in windows]
        chosen += [nearest(visible, order) for order in orders]
        found[visible] = [number[one] for one in chosen]
    return found
