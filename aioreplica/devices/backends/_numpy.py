"""The NumPy backend: logical CPU devices of the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

import numpy as np
from array_api_compat import is_numpy_array

from ...tree import DType
from ...typing import ReduceOp
from .._cores import num_cores
from ._backend import Array, Backend


@final
class NumpyBackend(Backend):
    """Arrays in host memory; every logical CPU device shares it, so moving is free.

    Example:
        >>> NumpyBackend().put([1.0, 2.0], "cpu:0")
        array([1., 2.])
    """

    @property
    def name(self) -> str:
        """The entry point's name."""
        return "numpy"

    @property
    def has_streams(self) -> bool:
        """False: ops end before they return."""
        return False

    def num_devices(self, kind: str) -> int:
        """Return the cores this process may use, at least 2, for "cpu"; 0 for other kinds."""
        return max(2, num_cores()) if kind == "cpu" else 0

    def owns(self, value: object) -> bool:
        """Tell whether `value` is a NumPy array or scalar."""
        return is_numpy_array(value)

    def put(self, value: Array, device: str) -> Array:
        """Return `value` as a NumPy array, without a copy if it is one."""
        return np.asarray(value)

    def get(self, array: Array) -> Array:
        """Return the array itself."""
        return np.asarray(array)

    def scope(self, device: str) -> AbstractContextManager[None]:
        """Do nothing: NumPy has no current device."""
        return nullcontext()

    def synchronise(self, device: str) -> None:
        """Do nothing: NumPy ops end before they return."""

    def keep(self, array: Array) -> None:
        """Do nothing: there is no stream."""

    def reduce(self, op: ReduceOp, arrays: Sequence[Array]) -> Array:
        """Combine the arrays left to right, so the result is bitwise reproducible.

        Raises:
            ValueError: If there is no array.
        """
        if not arrays:
            raise ValueError("reduce needs at least one array, got none.")
        return reduce_arrays(op, [np.asarray(array) for array in arrays])


BLOCK_BYTES = 256 * 1024
"""A block of the result stays in a core's L2 cache while every input's block is added to it. Of
16 KiB to 512 KiB this was among the fastest sizes for arrays of 1 to 64 MiB."""

SMALL_BYTES = 16 * 1024
"""Up to this, what is done around the sums of an array takes longer than the sums."""

_HALF = ("float16", "bfloat16")
_F4, _F8 = np.dtype(np.float32), np.dtype(np.float64)


def result_dtype(op: ReduceOp, dtype: DType) -> DType:
    """Return the dtype of a reduction: that of the input, but float64 for a mean of integers.

    A sum of bools counts, in int64, as in NumPy.
    """
    if op is ReduceOp.MEAN and dtype.kind in "iub":
        return np.dtype(np.float64)
    if op is ReduceOp.SUM and dtype.kind == "b":
        return np.dtype(np.int64)
    return dtype


def reduce_arrays(op: ReduceOp, arrays: Sequence[Array]) -> Array:
    """Combine arrays of one shape and dtype into a new one, left to right.

    Half precision is accumulated in float32 and rounded once.

    Determinism:
        Element by element in the order of `arrays`; the block size does not change a bit.
    """
    first = arrays[0]
    dtype = first.dtype
    is_float = dtype is _F8 or dtype is _F4
    if is_float and first.nbytes <= SMALL_BYTES and len(arrays) > 1:
        is_sum = op is ReduceOp.SUM or op is ReduceOp.MEAN
        if is_sum and first.ndim and first.flags.c_contiguous:  # the same sums, with less around
            total = np.add(first, arrays[1])
            for array in arrays[2:]:
                np.add(total, array, total)
            if op is ReduceOp.MEAN:
                np.divide(total, len(arrays), total)
            return total
    total = np.empty(first.shape, result_dtype(op, dtype))
    reduce_into(op, total, arrays)
    return total


def reduce_into(
    op: ReduceOp, total: Array, arrays: Sequence[Array], start: int = 0, stop: int | None = None
) -> None:
    """Combine arrays into `total`, or only its elements (in C order) from `start` to `stop`.

    Args:
        op: The operator.
        total: C-contiguous, of the arrays' shape and of `result_dtype`.
        arrays: One per replica. Those that are not C-contiguous go in rows, and need the whole
            range.
        start: First element.
        stop: One past the last element.
    """
    block = BLOCK_BYTES // total.itemsize
    count = len(arrays)
    dtype = arrays[0].dtype
    reads_again = count > 2 or op is ReduceOp.MEAN or dtype != total.dtype or _is_half(dtype)
    if stop is None and (total.size <= block or not reads_again):
        reduce_block(op, total, arrays, count)
        return
    if all(array.flags.c_contiguous for array in arrays):
        total, arrays = total.reshape(-1), [array.reshape(-1) for array in arrays]
        stop = total.size if stop is None else stop
    else:
        block = max(1, block * total.shape[0] // total.size)
        start, stop = 0, total.shape[0]
    for begin in range(start, stop, block):
        part = slice(begin, min(begin + block, stop))
        reduce_block(op, total[part], [array[part] for array in arrays], count)


def _is_half(dtype: DType) -> bool:
    return dtype.itemsize == 2 and dtype.name in _HALF


def reduce_block(op: ReduceOp, total: Array, arrays: Iterable[Array], count: int) -> None:
    """Combine `count` arrays into `total` in one go; they may be made while they are read."""
    ufunc = np.minimum if op is ReduceOp.MIN else np.maximum if op is ReduceOp.MAX else np.add
    rest = iter(arrays)
    first = next(rest)
    dtype = first.dtype
    target = total
    if _is_half(dtype):
        target = np.empty(total.shape, np.float32)
    if count == 1 or target.dtype != dtype:
        target[...] = first
    else:
        ufunc(first, next(rest), out=target)
    del first
    for array in rest:
        ufunc(target, array, out=target)
    if op is ReduceOp.MEAN:
        np.divide(target, count, out=target)
    if target is not total:
        total[...] = target
