"""The cases of a test that are run have as many values of each parameter as possible."""

import itertools

import pytest
from selection import covering


def test_cases_of_one_parameter_are_spread_evenly():
    assert sorted(covering([[n] for n in range(9)], 3)) == [1, 4, 7]
    assert covering([["a"], ["b"]], 5) == {0, 1}


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 2), (3, 3), (2, 5)])
def test_as_many_cases_as_the_longest_parameter_have_each_value(sizes):
    grid = list(itertools.product(*map(range, sizes)))
    kept = covering(grid, max(sizes))
    assert len(kept) == max(sizes)
    for place, size in enumerate(sizes):
        assert {grid[case][place] for case in kept} == set(range(size))
