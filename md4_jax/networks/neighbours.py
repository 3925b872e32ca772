"""Sets of neighbours with a table of counts, and the tables in which a token is looked up."""

import dataclasses
import functools
import itertools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Neighbourhood:
    """Sets of neighbours of a masked token for which there are tables of counts.

    A token is looked up once for each window, in the table of all its visible neighbours in the
    window. Two more look-ups use the nearest visible neighbours within the reach, as many as form a
    set that has a table. The two differ in which of two equally near neighbours comes first.

    windows  numbers of neighbours to the left and to the right, for each window
    reach    distance of the farthest neighbour
    few      set sizes: every set of such a size within the reach has a table
    """

    windows: tuple[tuple[int, int], ...]
    reach: int
    few: tuple[int, ...]

    @property
    def lookups(self) -> int:
        """Number of tables in which a token is looked up."""
        return len(self.windows) + 2

    @property
    def offsets(self) -> tuple[int, ...]:
        """Distances of the neighbours, from left to right."""
        return (*range(-self.reach, 0), *range(1, self.reach + 1))

    def _window(self, left: int, right: int) -> int:
        """Returns the set of all neighbours in a window."""
        return sum(1 << j for j, n in enumerate(self.offsets) if -left <= n <= right)

    @functools.cached_property
    def sets(self) -> tuple[int, ...]:
        """Sets of neighbours that have a table; bit j of a set stands for offsets[j].

        They are all subsets of a window and all sets with a size in `few`, smallest first.
        """
        bits = [1 << j for j in range(len(self.offsets))]
        found = {sum(some) for count in self.few for some in itertools.combinations(bits, count)}
        for window in self.windows:
            inside = [bit for bit in bits if bit & self._window(*window)]
            for count in range(len(inside) + 1):
                found |= {sum(some) for some in itertools.combinations(inside, count)}
        return tuple(sorted(found, key=lambda chosen: (chosen.bit_count(), chosen)))

    @functools.cached_property
    def tables(self) -> np.ndarray:
        """Tables in which to look for each set of visible neighbours: int32 [2^(2 reach), K]."""
        number = {chosen: n for n, chosen in enumerate(self.sets)}
        offsets = self.offsets

        def nearest(visible: int, farthest_first: list[int]) -> int:
            for j in farthest_first:
                if visible in number:
                    return visible
                visible &= ~(1 << j)
            return visible

        # Of two equally distant neighbours the left one comes first in one of the two orders.
        orders = [
            sorted(range(len(offsets)), key=lambda j: (-abs(offsets[j]), side * offsets[j]))
            for side in (1, -1)
        ]
        found = np.zeros((2 ** len(offsets), self.lookups), np.int32)
        for visible in range(len(found)):
            chosen = [visible & self._window(*window) for window in self.windows]
            chosen += [nearest(visible, order) for order in orders]
            found[visible] = [number[one] for one in chosen]
        return found


# 692 tables, for vocabularies of which a row can count each symbol.
LETTERS = Neighbourhood(
    windows=(
        (1, 1), (2, 2), (3, 3), (4, 4), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0), (0, 2), (0, 3),
        (0, 4), (0, 5), (0, 6), (1, 2), (2, 1), (1, 3), (3, 1), (2, 3), (3, 2), (1, 4), (4, 1),
        (2, 4), (4, 2), (1, 5), (5, 1), (2, 5), (5, 2), (3, 5), (5, 3),
    ),
    reach=6,
    few=(2, 3),
)  # fmt: skip
# For larger vocabularies.
WORDS = Neighbourhood(
    windows=((1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (2, 1), (1, 2), (2, 2), (3, 0), (0, 3)),
    reach=4,
    few=(1, 2),
)
