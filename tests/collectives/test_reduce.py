"""One leaf reduced or joined over replicas: numbers stay numbers, unequal sizes are exact."""

import functools
import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aioreplica.collectives import (
    concatenate,
    gather_difference,
    leaf_bytes,
    leaf_difference,
    reduce_leaves,
    reduce_over_axis,
    require_axis,
    require_reducible,
)
from aioreplica.typing import ReduceOp

OPS = list(ReduceOp)
finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


def naive(op: ReduceOp, values: list[Any]) -> Any:
    combine = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}.get(op, operator.add)
    total = functools.reduce(combine, values)
    return total / len(values) if op is ReduceOp.MEAN else total


@given(st.sampled_from(OPS), st.lists(finite, min_size=1, max_size=6))
def test_python_floats(op: ReduceOp, values: list[float]) -> None:
    result = reduce_leaves(op, values)

    assert type(result) is float
    assert result == float(naive(op, values))


@given(st.sampled_from(OPS), st.lists(st.integers(), min_size=1, max_size=6))
def test_python_ints_of_any_size(op: ReduceOp, values: list[int]) -> None:
    result = reduce_leaves(op, values)

    expected = {
        ReduceOp.SUM: sum(values),
        ReduceOp.MEAN: sum(values) / len(values),
        ReduceOp.MIN: min(values),
        ReduceOp.MAX: max(values),
    }[op]
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize("values", [[True], [True, False], [True, True, True]])
def test_bools_are_counted(values: list[bool]) -> None:
    assert reduce_leaves(ReduceOp.SUM, values) == sum(values)
    assert type(reduce_leaves(ReduceOp.SUM, values)) is int
    assert reduce_leaves(ReduceOp.MEAN, values) == sum(values) / len(values)
    assert reduce_leaves(ReduceOp.MIN, values) is all(values)
    assert reduce_leaves(ReduceOp.MAX, values) is any(values)


@pytest.mark.parametrize("op", OPS)
def test_complex_numbers(op: ReduceOp) -> None:
    values = [1 + 2j, 1 - 2j, 3j]

    assert reduce_leaves(op, values) == complex(naive(op, values))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_nan_wins(op: ReduceOp, position: int) -> None:
    values = [1.0, 2.0, 3.0]
    values[position] = float("nan")

    assert np.isnan(reduce_leaves(op, values))


@given(
    st.sampled_from(OPS),
    hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3).flatmap(
        lambda shape: st.lists(hnp.arrays(np.float64, shape, elements=finite), min_size=1)
    ),
)
def test_arrays(op: ReduceOp, values: list[Any]) -> None:
    result = reduce_leaves(op, values)

    assert isinstance(result, np.ndarray)
    assert result.tobytes() == np.asarray(naive(op, values)).tobytes()
    assert result.shape == values[0].shape
    assert not result.flags.writeable


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num", [1, 2])
def test_the_result_is_a_buffer_of_its_own(op: ReduceOp, num: int) -> None:
    values = [np.ones(3) for _ in range(num)]

    result = reduce_leaves(op, values)

    assert not any(np.shares_memory(result, value) for value in values)
    assert all(value.flags.writeable for value in values)


@pytest.mark.parametrize("kind", [np.float32, np.int16, np.complex64, np.float16])
@pytest.mark.parametrize("op", OPS)
def test_numpy_scalars_stay_scalars(kind: Any, op: ReduceOp) -> None:
    result = reduce_leaves(op, [kind(1), kind(3)])

    assert isinstance(result, np.generic)
    assert result == naive(op, [kind(1), kind(3)])


def test_the_order_is_that_of_the_replicas() -> None:
    assert reduce_leaves(ReduceOp.SUM, [1e20, -1e20, 1.0]) == 1.0
    assert reduce_leaves(ReduceOp.SUM, [1.0, 1e20, -1e20]) == 0.0


# --- what can be reduced ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "leaf",
    [1, 1.5, True, 1j, np.float32(1), np.zeros(0), np.zeros(2, np.int8), np.zeros(1, bool)],
)
def test_numbers_and_arrays_of_numbers_are_reducible(leaf: Any) -> None:
    require_reducible(leaf, "reduce")


@pytest.mark.parametrize(
    "leaf",
    ["a", b"a", None, object(), np.array(["a"]), np.array([None]), np.datetime64("2024-01-01")],
)
def test_nothing_else_is(leaf: Any) -> None:
    with pytest.raises(TypeError, match="all_reduce needs numbers"):
        require_reducible(leaf, "all_reduce")


@pytest.mark.parametrize(
    ("first", "other", "word"),
    [
        (np.zeros(2), np.zeros(3), "shapes"),
        (np.zeros(2), np.zeros((2, 1)), "shapes"),
        (np.zeros(2), np.zeros(2, np.float32), "dtypes"),
        (np.zeros(()), 0.0, "types"),
        (1, np.int64(1), "types"),
    ],
)
def test_differences(first: Any, other: Any, word: str) -> None:
    assert word in (leaf_difference(first, other) or "")
    assert word in (leaf_difference(other, first) or "")


@pytest.mark.parametrize(
    ("first", "other"), [(1, 2.5), (True, 3), (1.0, 1j), (np.zeros(2), np.ones(2))]
)
def test_leaves_that_can_be_reduced_together(first: Any, other: Any) -> None:
    assert leaf_difference(first, other) is None


@pytest.mark.parametrize(
    ("leaf", "expected"), [(1, 0), (1.5, 0), (None, 0), (np.zeros(3), 24), (np.zeros(0), 0)]
)
def test_leaf_bytes(leaf: Any, expected: int) -> None:
    assert leaf_bytes(leaf) == expected


NUMPY = {ReduceOp.SUM: np.sum, ReduceOp.MEAN: np.mean, ReduceOp.MIN: np.min, ReduceOp.MAX: np.max}


def parts_of(sizes: list[int], width: int = 3, dtype: str = "float64") -> list[Any]:
    rng = np.random.default_rng(len(sizes))
    return [(10 * rng.standard_normal((size, width))).astype(dtype) for size in sizes]


@given(st.sampled_from(OPS), st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_unequal_parts_are_reduced_like_one_array(op: ReduceOp, sizes: list[int]) -> None:
    parts = parts_of(sizes)
    if op is not ReduceOp.SUM and sum(sizes) == 0:
        with pytest.raises(ValueError, match="empty"):
            reduce_over_axis(op, parts, 0)
        return

    result = reduce_over_axis(op, parts, 0)

    np.testing.assert_allclose(result, NUMPY[op](np.concatenate(parts), axis=0), rtol=1e-12)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("axis", [0, 1, -1, -2, (0, 1), (-1, 0), [0, 1], np.int64(1)])
def test_axes(op: ReduceOp, axis: Any) -> None:
    parts = parts_of([4, 4])
    axes = tuple(axis) if isinstance(axis, list) else axis
    expected = NUMPY[op]([NUMPY[op](part, axis=axes) for part in parts], axis=0)

    result = reduce_over_axis(op, parts, axis)

    np.testing.assert_allclose(result, expected, rtol=1e-12)
    assert np.shape(result) == np.shape(expected)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "bool", "complex64"])
def test_dtypes_are_those_of_numpy(op: ReduceOp, dtype: str) -> None:
    parts = [np.ones((2, 2), dtype), np.ones((3, 2), dtype)]

    result = reduce_over_axis(op, parts, 0)

    expected = NUMPY[op](np.concatenate(parts), axis=0)
    assert result.dtype == expected.dtype
    assert result.tolist() == expected.tolist()


def test_halves_are_summed_in_float32() -> None:
    parts = [np.ones(2048, np.float16), np.ones(3, np.float16)]

    assert reduce_over_axis(ReduceOp.MEAN, parts, 0) == 1.0
    assert reduce_over_axis(ReduceOp.SUM, [*parts, parts[1]], 0) == 2054.0


def test_a_mean_divides_by_the_true_number_of_elements() -> None:
    parts = [np.array([1.0, 2.0, 3.0]), np.array([10.0]), np.array([])]

    assert reduce_over_axis(ReduceOp.MEAN, parts, 0) == 4.0


def test_an_empty_part_is_never_a_nan() -> None:
    parts = [np.zeros((0, 2)), np.array([[1.0, 5.0]])]

    for op in OPS:
        assert reduce_over_axis(op, parts, 0).tolist() == [1.0, 5.0]


def test_the_sum_over_nothing_is_zero() -> None:
    assert reduce_over_axis(ReduceOp.SUM, [np.zeros((0, 2))] * 2, 0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.MEAN])
def test_nan_wins_along_an_axis(op: ReduceOp) -> None:
    assert np.isnan(reduce_over_axis(op, [np.array([1.0, np.nan]), np.array([2.0])], 0))


@pytest.mark.parametrize("axis", [1, -2, (0, 1), 7, "0", None, 0.0, (0, 0), (0, -1)])
def test_an_axis_that_is_not_there_is_a_value_error(axis: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="axis"):
        reduce_over_axis(ReduceOp.SUM, [np.zeros(3), np.zeros(3)], axis)


def test_a_scalar_has_no_axis() -> None:
    with pytest.raises(ValueError, match="axis"):
        reduce_over_axis(ReduceOp.SUM, [1.0, 2.0], 0)


@pytest.mark.parametrize("op", OPS)
def test_the_result_is_read_only(op: ReduceOp) -> None:
    result = reduce_over_axis(op, parts_of([2, 3]), 0)

    assert not result.flags.writeable


def test_inputs_are_left_alone() -> None:
    parts = parts_of([2, 3])
    copies = [part.copy() for part in parts]
    for part in parts:
        part.flags.writeable = False

    for op in OPS:
        reduce_over_axis(op, parts, 0)

    assert all(np.array_equal(part, copy) for part, copy in zip(parts, copies, strict=True))


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 1, 2), (2, 1, 1), (2, 2, 0)])
def test_parts_that_differ_along_another_axis_are_refused(
    op: ReduceOp, sizes: tuple[int, ...]
) -> None:
    """NumPy would broadcast a part of one row to the others and count it twice."""
    parts = [np.ones((size, 3)) for size in sizes]
    other = next(i for i, size in enumerate(sizes) if size != sizes[0])

    text = (
        rf"differ outside axis -?1: replica 0 has \({sizes[0]}, 3\), replica {other} has "
        rf"\({sizes[other]}, 3\)\. Reduce .* axis 0"
    )
    for axis in (1, -1, (1,)):
        with pytest.raises(ValueError, match=text):
            reduce_over_axis(op, parts, axis)


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
def test_differences_of_concatenated_parts(first: Any, other: Any, axis: int, word: str) -> None:
    assert word in (gather_difference(first, other, axis) or "")


@pytest.mark.parametrize("axis", [1, -1])
def test_sizes_may_differ_along_the_axis(axis: int) -> None:
    assert gather_difference(np.zeros((2, 3)), np.zeros((2, 0)), axis) is None
