"""The NumPy backend: its reduction compared with the naive one, element by element."""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aioreplica.devices.backends import NumpyBackend, reduce_into
from aioreplica.typing import ReduceOp

Array = Any
BACKEND = NumpyBackend()
OPS = list(ReduceOp)
BLOCK = 16 * 1024  # large arrays are reduced in blocks of some such size
DTYPES = ["float16", "float32", "float64", "complex64", "complex128",
          "int8", "int32", "int64", "uint8", "uint64", "bool"]  # fmt: skip


def naive(op: ReduceOp, arrays: Sequence[Array]) -> Array:
    """Left to right; halves in float32, means of integers in float64, sums of bools in int64."""
    dtype = arrays[0].dtype
    if op is ReduceOp.MEAN and dtype.kind in "iub":
        dtype = np.dtype("float64")
    if op is ReduceOp.SUM and dtype.kind == "b":
        dtype = np.dtype("int64")
    wide = np.dtype("float32") if dtype == np.float16 else dtype
    combine = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum}.get(op, np.add)
    total = functools.reduce(combine, [array.astype(wide) for array in arrays])
    return np.asarray(total / len(arrays) if op is ReduceOp.MEAN else total).astype(dtype)


def assert_same_bits(result: Array, expected: Array) -> None:
    """Equal dtypes, shapes and bits, but one NaN is as good as another."""
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    if expected.dtype.kind in "fc":
        missing = np.isnan(expected)
        assert np.array_equal(np.isnan(result), missing)
        result, expected = result[~missing], expected[~missing]
    assert result.tobytes() == expected.tobytes()


def random_arrays(num: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    scaled = rng.standard_normal((num, *shape)) * 10.0 ** rng.integers(-3, 2, (num, *shape))
    if np.dtype(dtype).kind == "u":
        scaled = np.abs(scaled)
    return list(scaled.astype(dtype))


@st.composite
def columns(draw: st.DrawFn) -> list[Array]:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    num = draw(st.integers(1, 5))
    return [draw(hnp.arrays(dtype, shape)) for _ in range(num)]


@given(op=st.sampled_from(OPS), arrays=columns())
@example(ReduceOp.MEAN, [np.float16([60000.0]), np.float16([60000.0])])
@example(ReduceOp.SUM, [np.float64([-0.0]), np.float64([-0.0])])
@example(ReduceOp.MIN, [np.float32([np.nan]), np.float32([1.0])])
def test_reduce_is_the_naive_reduction(op: ReduceOp, arrays: list[Array]) -> None:
    with np.errstate(all="ignore"):
        assert_same_bits(BACKEND.reduce(op, arrays), naive(op, arrays))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sizes_do_not_change_a_bit(op: ReduceOp, dtype: str) -> None:
    for size in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5):
        arrays = random_arrays(3, (size,), dtype)

        assert_same_bits(BACKEND.reduce(op, arrays), naive(op, arrays))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num", [1, 2, 7])
def test_any_number_of_replicas(op: ReduceOp, num: int) -> None:
    arrays = random_arrays(num, (5, 3), "float32")

    assert_same_bits(BACKEND.reduce(op, arrays), naive(op, arrays))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("scale", [1, 100])
def test_layout_does_not_change_a_bit(op: ReduceOp, scale: int) -> None:
    arrays = random_arrays(3, (20 * scale, 30), "float32")
    expected = naive(op, arrays)
    layouts = {
        "fortran": [np.asfortranarray(array) for array in arrays],
        "strided": [np.repeat(array, 2, axis=1)[:, ::2] for array in arrays],
        "reversed": [array[::-1].copy()[::-1] for array in arrays],
        "mixed": [arrays[0], np.asfortranarray(arrays[1]), arrays[2]],
        "broadcast": None,
    }

    for given_arrays in filter(None, layouts.values()):
        assert_same_bits(BACKEND.reduce(op, given_arrays), expected)


@pytest.mark.parametrize("op", OPS)
def test_zero_strides_are_read_right(op: ReduceOp) -> None:
    row = random_arrays(2, (40,), "float64")
    arrays = [np.broadcast_to(one, (1000, 40)) for one in row]

    assert_same_bits(BACKEND.reduce(op, arrays), naive(op, arrays))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("size", [3, BLOCK + 1])
def test_inputs_are_read_only_to_the_reduction(op: ReduceOp, num: int, size: int) -> None:
    arrays = random_arrays(num, (size,), "float64")
    copies = [array.copy() for array in arrays]
    for array in arrays:
        array.flags.writeable = False

    result = BACKEND.reduce(op, arrays)

    assert not any(np.shares_memory(result, array) for array in arrays)
    for array, copy in zip(arrays, copies, strict=True):
        assert array.tobytes() == copy.tobytes()


def test_the_same_array_twice_is_two_replicas() -> None:
    array = np.array([1.0, 2.0])

    assert BACKEND.reduce(ReduceOp.SUM, [array, array, array]).tolist() == [3.0, 6.0]
    assert array.tolist() == [1.0, 2.0]


def test_the_order_is_that_of_the_replicas() -> None:
    arrays = [np.float32([value]) for value in (1e8, -1e8, 1.0)]

    assert BACKEND.reduce(ReduceOp.SUM, arrays).tolist() == [1.0]
    assert BACKEND.reduce(ReduceOp.SUM, arrays[::-1]).tolist() == [0.0]


def test_halves_are_accumulated_in_float32() -> None:
    arrays = [np.float16([2048.0]), np.float16([1.0]), np.float16([1.0])]

    result = BACKEND.reduce(ReduceOp.SUM, arrays)

    assert result.dtype == np.float16
    assert result.tolist() == [2050.0]  # in float16, 2048 + 1 is 2048


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "bool"])
def test_the_mean_of_integers_is_float64(dtype: str) -> None:
    result = BACKEND.reduce(ReduceOp.MEAN, [np.array([1], dtype), np.array([0], dtype)])

    assert result.dtype == np.float64
    assert result.tolist() == [0.5]


def test_the_mean_of_small_integers_does_not_overflow() -> None:
    arrays = [np.int8([127]), np.int8([127]), np.int8([127])]

    assert BACKEND.reduce(ReduceOp.MEAN, arrays).tolist() == [127.0]


def test_bools_are_counted() -> None:
    arrays = [np.array([True, False]), np.array([True, True])]

    assert BACKEND.reduce(ReduceOp.SUM, arrays).tolist() == [2, 1]
    assert BACKEND.reduce(ReduceOp.MIN, arrays).tolist() == [True, False]


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_nan_wins(op: ReduceOp, position: int) -> None:
    arrays = [np.float64([1.0, 2.0]) for _ in range(3)]
    arrays[position][1] = np.nan

    result = BACKEND.reduce(op, arrays)

    assert result[0] == 1.0
    assert np.isnan(result[1])


@pytest.mark.parametrize("stop", [7, 100_000, 150_001])
def test_a_range_of_elements_leaves_the_others_alone(stop: int) -> None:
    """Threads reduce neighbouring ranges of one array at the same time."""
    arrays = [np.ones(200_000) for _ in range(3)]
    total = np.full(200_000, -1.0)

    reduce_into(ReduceOp.SUM, total, arrays, 5, stop)

    assert set(total[5:stop]) == {3.0}
    assert set(total[:5]) | set(total[stop:]) == {-1.0}


def test_infinities() -> None:
    inf = np.float32([np.inf])

    assert BACKEND.reduce(ReduceOp.SUM, [inf, inf]).tolist() == [np.inf]
    assert BACKEND.reduce(ReduceOp.MIN, [inf, -inf]).tolist() == [-np.inf]
    with np.errstate(invalid="ignore"):
        assert np.isnan(BACKEND.reduce(ReduceOp.SUM, [inf, -inf]))


def test_nothing_to_reduce_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        BACKEND.reduce(ReduceOp.SUM, [])


def test_put_and_get_do_not_copy() -> None:
    array = np.arange(3)

    assert BACKEND.put(array, "cpu:0") is array
    assert BACKEND.get(array) is array
    assert BACKEND.put([1.0, 2.0], "cpu:1").tolist() == [1.0, 2.0]


def test_scope_and_synchronise_do_nothing() -> None:
    with BACKEND.scope("cpu:0"):
        BACKEND.synchronise("cpu:0")


def test_name_and_devices() -> None:
    assert BACKEND.name == "numpy"
    assert BACKEND.num_devices("cpu") >= 2
    assert BACKEND.num_devices("cuda") == 0


@pytest.mark.parametrize("value", [np.zeros(2), np.float32(1), np.zeros(())])
def test_numpy_arrays_are_its_own(value: Any) -> None:
    assert BACKEND.owns(value)


@pytest.mark.parametrize("value", [1, 2.0, [1], None, "x", sys])
def test_nothing_else_is(value: Any) -> None:
    assert not BACKEND.owns(value)
