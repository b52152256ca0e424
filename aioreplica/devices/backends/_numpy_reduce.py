"""Summing NumPy arrays of several replicas: accumulation dtypes and cache-sized blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...typing import ReduceOp

BLOCK_BYTES = 256 * 1024
"""A block of the result stays in a core's L2 cache while every input's block is added to it. Of
16 KiB to 512 KiB this was among the fastest sizes for arrays of 1 to 64 MiB."""

_HALF = ("float16", "bfloat16")
_UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def result_dtype(op: ReduceOp, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of a reduction: that of the input, but float64 for a mean of integers.

    A sum of bools counts, in int64, as in NumPy.
    """
    if op is ReduceOp.MEAN and dtype.kind in "iub":
        return np.dtype(np.float64)
    if op is ReduceOp.SUM and dtype.kind == "b":
        return np.dtype(np.int64)
    return dtype


def reduce_arrays(op: ReduceOp, arrays: Sequence[Any]) -> Any:
    """Combine arrays of one shape and dtype into a new one, left to right.

    Half precision is accumulated in float32 and rounded once.

    Determinism:
        Element by element in the order of `arrays`; the block size does not change a bit.
    """
    arrays = [np.asarray(array) for array in arrays]
    first = arrays[0]
    total = np.empty(first.shape, result_dtype(op, first.dtype))
    reduce_into(op, total, arrays)
    return total


def reduce_into(
    op: ReduceOp, total: Any, arrays: Sequence[Any], start: int = 0, stop: int | None = None
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
    dtype = arrays[0].dtype
    wide = np.dtype(np.float32) if dtype.name in _HALF else total.dtype
    ufunc = _UFUNCS[op]
    count = len(arrays) if op is ReduceOp.MEAN else 0
    block = BLOCK_BYTES // wide.itemsize
    if stop is None and total.size <= block:
        _reduce_block(ufunc, total, arrays, wide, count)
        return
    if all(array.flags.c_contiguous for array in arrays):
        total, arrays = total.reshape(-1), [array.reshape(-1) for array in arrays]
        stop = total.size if stop is None else stop
    else:
        block = max(1, block * total.shape[0] // total.size)
        start, stop = 0, total.shape[0]
    for begin in range(start, stop, block):
        part = slice(begin, min(begin + block, stop))
        _reduce_block(ufunc, total[part], [array[part] for array in arrays], wide, count)


def _reduce_block(
    ufunc: np.ufunc, total: Any, arrays: Sequence[Any], wide: np.dtype[Any], count: int
) -> None:
    """Combine one block; `count` is what a mean divides by, 0 for the rest."""
    target = total if wide == total.dtype else np.empty(total.shape, wide)
    if len(arrays) == 1 or wide != arrays[0].dtype:
        target[...] = arrays[0]
        rest = arrays[1:]
    else:
        ufunc(arrays[0], arrays[1], out=target)
        rest = arrays[2:]
    for array in rest:
        ufunc(target, array, out=target)
    if count:
        np.divide(target, count, out=target)
    if target is not total:
        total[...] = target
