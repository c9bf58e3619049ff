"""Every grid of up to 40 x 40 tiles in every group of up to 16 (T21 of the specification).

The functions are those of `decode.py`, over all linear indices at once: `min` is NumPy's.
A raster is which direction is called minor, so that both are here.
"""

from __future__ import annotations

import types

import numpy as np
import pytest

from tileloom.scheduling import decode


def _of_arrays(function):
    return types.FunctionType(function.__code__, {"min": np.minimum})


TILE_OF, LINEAR_OF = _of_arrays(decode.tile_of), _of_arrays(decode.linear_of)


@pytest.mark.parametrize("group", range(1, 17))
def test_every_grid_is_covered_once_and_a_column_of_a_group_stays_together(group):
    for minor in range(1, 41):
        for major in range(1, 41):
            linear = np.arange(minor * major)
            fast, slow = TILE_OF(linear, minor, major, group)
            assert np.array_equal(np.sort(fast * major + slow), linear)
            assert np.array_equal(LINEAR_OF(fast, slow, minor, major, group), linear)
            # Group after group, in it column after column, in that tile after tile.
            order = (fast // group * major + slow) * group + fast % group
            assert np.all(np.diff(order) > 0)


def test_numpys_minimum_is_the_only_difference():
    for linear in range(7 * 5):
        one = TILE_OF(np.array(linear), 7, 5, 3)
        assert tuple(map(int, one)) == decode.tile_of(linear, 7, 5, 3)
