"""IndexedSlices: checked when made, summed like the naive loop, a leaf that pickles."""

import copy
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import optree
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioreplica as ar
from aioreplica.tree import leaves


def naive_dense(slices: ar.IndexedSlices) -> np.ndarray:
    dense = np.zeros(slices.dense_shape, slices.dtype)
    for index, row in zip(slices.indices, slices.values, strict=True):
        dense[index] += row
    return dense


def random_slices(num_rows: int, size: int, *widths: int, dtype: str = "f4") -> ar.IndexedSlices:
    rng = np.random.default_rng(num_rows + size)
    values = rng.normal(scale=9, size=(num_rows, *widths)).astype(dtype)
    return ar.IndexedSlices(values, rng.integers(0, max(size, 1), num_rows), (size, *widths))


# --- construction -----------------------------------------------------------------------------


def test_slices_hold_the_arrays_that_were_given() -> None:
    values = np.ones((2, 3), "f4")
    indices = np.array([4, 1], np.uint8)

    slices = ar.IndexedSlices(values, indices, (np.int64(5), 3))

    assert slices.values is values
    assert slices.indices.tolist() == [4, 1]
    assert slices.indices.dtype == np.intp
    assert slices.dense_shape == (5, 3)
    assert type(slices.dense_shape[0]) is int
    assert slices.dtype == np.float32
    assert slices.nbytes == values.nbytes + slices.indices.nbytes
    assert repr(slices) == "<IndexedSlices 2 rows | float32 (5, 3)>"


def test_it_is_immutable_and_keeps_its_own_indices() -> None:
    indices = np.array([0, 1])
    slices = ar.IndexedSlices([1.0, 2.0], indices, (2,))

    indices[0] = 99

    assert slices.indices.tolist() == [0, 1]
    with pytest.raises(ValueError, match="read-only"):
        slices.indices[0] = 1
    with pytest.raises(FrozenInstanceError):
        slices.dense_shape = (3,)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "indices", "shape", "text"),
    [
        ([1.0], [[0]], (2,), r"one axis, got shape \(1, 1\)"),
        ([1.0], [2], (2,), "Index 2 at position 0 .* rows 0 to 1"),
        ([1.0, 2.0, 3.0], [0, -1, -1], (2,), "Index -1 at position 1"),
        ([1.0], [np.uint64(2**63)], (2,), "Index 9223372036854775808"),
        ([1.0], [0], (0,), "has no rows"),
        ([1.0, 2.0], [0], (2,), "got 1 for 2 rows"),
        ([1.0], [0], (2, 3), r"shape \(1,\), but dense_shape is \(2, 3\).*\(num_rows, 3\)"),
        ([[1.0, 2.0]], [0], (2, 3), r"shape \(1, 2\)"),
        ([[1.0]], [0], (2,), r"shape \(1, 1\)"),
        (1.0, [0], (2,), r"shape \(\)"),
        ([1.0], [0], (), "at least one axis"),
        ([1.0], [0], (-2,), r"negative size, got \(-2,\)"),
    ],
)
def test_values_that_do_not_fit(values: Any, indices: Any, shape: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ar.IndexedSlices(values, indices, shape)


@pytest.mark.parametrize(
    ("values", "indices", "shape", "text"),
    [
        ([1.0], [0.0], (2,), "integers, got dtype float64"),
        ([1.0], [True], (2,), "integers, got dtype bool"),
        (np.zeros(0), np.zeros(0), (2,), "integers, got dtype float64"),
        ([1.0], ["0"], (2,), "integers"),
        ([1.0], [0], [2], r"tuple of ints, got \[2\]"),
        ([1.0], [0], 2, "tuple of ints, got 2"),
        ([1.0], [0], (2.0,), "tuple of ints"),
        ([1.0], [0], (True,), "tuple of ints"),
        ([1.0], [0], None, "tuple of ints"),
        (["a"], [0], (2,), "dtype <U1"),
        ([True], [0], (2,), "dtype bool"),
        ([None], [0], (2,), "dtype object"),
        (np.ma.array([1.0], mask=[True]), [0], (2,), "would drop the mask"),
    ],
)
def test_types_that_do_not_fit(values: Any, indices: Any, shape: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        ar.IndexedSlices(values, indices, shape)


@pytest.mark.parametrize("shape", [(0,), (3,), (3, 2), (3, 0)])
def test_no_rows_at_all(shape: tuple[int, ...]) -> None:
    slices = ar.IndexedSlices(np.zeros((0, *shape[1:])), [], shape)

    assert slices.combined() is slices
    np.testing.assert_array_equal(slices.to_dense(), np.zeros(shape))


# --- sums -------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 12), st.sampled_from([(), (0,), (3,), (2, 2), (600,)]))
def test_dense_is_the_naive_loop(num_rows: int, size: int, widths: tuple[int, ...]) -> None:
    slices = random_slices(num_rows, size, *widths)
    dense = slices.to_dense()

    assert dense.tobytes() == naive_dense(slices).tobytes()
    assert dense.dtype == slices.dtype


@given(st.integers(0, 40), st.integers(1, 12))
def test_combined_is_ascending_unique_and_means_the_same(num_rows: int, size: int) -> None:
    slices = random_slices(num_rows, size, 2)
    once = slices.combined()

    assert once.indices.tolist() == sorted(set(slices.indices.tolist()))
    assert once.to_dense().tobytes() == slices.to_dense().tobytes()
    assert once.combined() is once


@pytest.mark.parametrize("dtype", ["i1", "u8", "f8", "c8"])
def test_every_dtype_stays(dtype: str) -> None:
    slices = ar.IndexedSlices(np.array([1, 2, 3], dtype), [1, 1, 0], (3,))

    assert slices.to_dense().dtype == dtype
    assert slices.to_dense().tolist() == [3, 3, 0]


def test_half_precision_is_rounded_once() -> None:
    slices = ar.IndexedSlices(np.ones(5000, "f2"), np.zeros(5000, int), (1,))

    assert slices.to_dense().tolist() == [5000.0]
    assert slices.to_dense().dtype == np.float16


def test_many_rows_in_blocks_and_odd_layouts() -> None:
    slices = random_slices(3000, 50, 17, dtype="f8")
    turned = ar.IndexedSlices(np.asfortranarray(slices.values), slices.indices, (50, 17))

    assert slices.to_dense().tobytes() == naive_dense(slices).tobytes()
    assert turned.to_dense().tobytes() == slices.to_dense().tobytes()


def test_rows_whose_axes_were_moved_are_added_up() -> None:
    values = np.arange(24.0).reshape(4, 3, 2).transpose(1, 2, 0)
    moved = ar.IndexedSlices(values, [1, 1, 0], (2, 2, 4))

    assert moved.to_dense().tobytes() == naive_dense(moved).tobytes()


def test_minus_zero_and_nan_are_kept() -> None:
    slices = ar.IndexedSlices([-0.0, np.nan], [1, 0], (2,))

    assert np.signbit(slices.combined().values[1])
    assert np.isnan(slices.to_dense()[0])


# --- as an object -----------------------------------------------------------------------------


def test_it_is_a_leaf_for_users_and_inside() -> None:
    slices = random_slices(3, 4)

    assert leaves({"a": [slices]}) == [slices]
    assert optree.tree_leaves(slices, namespace="aioreplica") == [slices]


def test_it_pickles_and_copies() -> None:
    slices = random_slices(5, 4, 2)

    for made in (pickle.loads(pickle.dumps(slices)), copy.copy(slices), copy.deepcopy(slices)):
        np.testing.assert_array_equal(made.values, slices.values)
        np.testing.assert_array_equal(made.indices, slices.indices)
        assert made.dense_shape == slices.dense_shape
        assert not made.indices.flags.writeable


def test_it_is_not_taken_for_an_array() -> None:
    with pytest.raises(TypeError, match="to_dense"):
        np.asarray(random_slices(3, 4))


def test_rows_are_multiplied_and_divided_by_numbers() -> None:
    slices = ar.IndexedSlices([[2.0], [4.0]], [1, 0], (3, 1))

    for made in (slices * 2, 2 * slices, np.float64(2) * slices, slices / 0.5, -slices * -2):
        assert made.values[:, 0].tolist() == [4.0, 8.0]
        assert (made.indices.tolist(), made.dense_shape) == ([1, 0], (3, 1))
    for wrong in (np.ones(2), "2", slices):
        with pytest.raises(TypeError):
            slices * wrong
