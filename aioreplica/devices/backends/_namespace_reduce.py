"""Reductions written against the array API: one code path for every library but NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from array_api_compat import array_namespace

from ...typing import ReduceOp
from ._backend import Array


def reduce_in_namespace(op: ReduceOp, arrays: Sequence[Array]) -> Array:
    """Combine arrays of one library, shape and dtype into a new one, left to right.

    Accumulates and rounds as `reduce_arrays` does for NumPy: half precision in float32, a mean
    of integers in float64 (or the widest there is), a sum of bools in int64.

    Raises:
        ValueError: If there is no array.

    Determinism:
        Element by element in the order of `arrays`.
    """
    if not arrays:
        raise ValueError("reduce needs at least one array, got none.")
    first = arrays[0]
    xp = array_namespace(first)
    wide, narrow = _dtypes(op, first.dtype, xp)
    combine = xp.minimum if op is ReduceOp.MIN else xp.maximum if op is ReduceOp.MAX else xp.add
    if op in (ReduceOp.MIN, ReduceOp.MAX) and xp.isdtype(first.dtype, "bool"):
        combine = xp.logical_and if op is ReduceOp.MIN else xp.logical_or
    total = xp.astype(first, wide, copy=True)
    for array in arrays[1:]:
        total = combine(total, xp.astype(array, wide, copy=False))
    if op is ReduceOp.MEAN:
        total = total / len(arrays)
    return xp.astype(total, narrow, copy=False)


def _dtypes(op: ReduceOp, dtype: Any, xp: Any) -> tuple[object, object]:
    """Return in which dtype to accumulate, and that of the result."""
    if str(dtype).rpartition(".")[2] in ("float16", "bfloat16"):
        return xp.float32, dtype
    if op is ReduceOp.SUM and xp.isdtype(dtype, "bool"):
        return (_widest(xp, "int64"),) * 2
    if op is ReduceOp.MEAN and xp.isdtype(dtype, ("bool", "integral")):
        return (_widest(xp, "float64"),) * 2
    return dtype, dtype


def _widest(xp: Any, name: str) -> object:
    """Return a dtype of 64 bits, or of 32 where the library is set to have no wider ones."""
    dtypes = xp.__array_namespace_info__().dtypes()
    return dtypes.get(name) or dtypes[name.replace("64", "32")]
