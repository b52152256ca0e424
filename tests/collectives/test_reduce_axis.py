"""Reduction over replicas and axes: exact for unequal sizes, compared with one big array."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioreplica.collectives import reduce_over_axis
from aioreplica.typing import ReduceOp

OPS = list(ReduceOp)
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
def test_nan_wins(op: ReduceOp) -> None:
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
