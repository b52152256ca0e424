"""Element-wise reduction of one leaf: numbers stay numbers, arrays are shared and read-only."""

import functools
import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aioreplica.collectives import (
    leaf_bytes,
    leaf_difference,
    reduce_leaves,
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
