"""Joining one leaf over replicas along an axis."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioreplica.collectives import concatenate, gather_difference, require_axis


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.sampled_from([0, 1, 2, -1, -2, -3]))
def test_parts_follow_each_other_in_replica_order(sizes: list[int], axis: int) -> None:
    shapes = [[2, 2, 2] for _ in sizes]
    for shape, size in zip(shapes, sizes, strict=True):
        shape[axis] = size
    parts = [np.full(shape, float(i)) for i, shape in enumerate(shapes)]

    joined = concatenate(parts, axis)

    along = np.moveaxis(joined, axis, 0)
    naive = [float(i) for i, size in enumerate(sizes) for _ in range(size)]
    assert along.shape == (sum(sizes), 2, 2)
    assert [row[0, 0] for row in along] == naive
    assert not joined.flags.writeable


def test_one_part_is_copied() -> None:
    part = np.zeros(2)

    joined = concatenate([part], 0)

    assert not np.shares_memory(joined, part)
    assert part.flags.writeable


def test_lists_are_arrays() -> None:
    assert concatenate([[1, 2], [3]], 0).tolist() == [1, 2, 3]


@pytest.mark.parametrize("axis", [0, 1, -1, -2, np.int32(1)])
def test_axes_that_are_there(axis: Any) -> None:
    require_axis(np.zeros((2, 3)), axis, "gather")


@pytest.mark.parametrize("axis", [2, -3, 100])
def test_an_axis_that_is_not_there(axis: int) -> None:
    with pytest.raises(ValueError, match=rf"all_gather got axis={axis} for shape \(2, 3\)"):
        require_axis(np.zeros((2, 3)), axis, "all_gather")


@pytest.mark.parametrize("axis", [0.0, None, "0", True, (0,)])
def test_an_axis_is_an_int(axis: Any) -> None:
    with pytest.raises(TypeError, match="gather needs an int axis"):
        require_axis(np.zeros((2, 3)), axis, "gather")


@pytest.mark.parametrize("leaf", [1.0, True, np.zeros(()), np.float32(2)])
def test_scalars_cannot_be_joined(leaf: Any) -> None:
    with pytest.raises(ValueError, match="gather cannot join scalars"):
        require_axis(leaf, 0, "gather")


@pytest.mark.parametrize(
    ("first", "other", "axis", "word"),
    [
        (np.zeros(2), np.zeros(2, np.float32), 0, "dtypes"),
        (np.zeros(2), np.zeros((2, 2)), 0, "rank"),
        (np.zeros((2, 3)), np.zeros((2, 4)), 0, "outside axis 0"),
        (np.zeros((2, 3)), np.zeros((1, 3)), -1, "outside axis -1"),
    ],
)
def test_differences(first: Any, other: Any, axis: int, word: str) -> None:
    assert word in (gather_difference(first, other, axis) or "")


@pytest.mark.parametrize("axis", [1, -1])
def test_sizes_may_differ_along_the_axis(axis: int) -> None:
    assert gather_difference(np.zeros((2, 3)), np.zeros((2, 0)), axis) is None
