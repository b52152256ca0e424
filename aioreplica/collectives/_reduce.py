"""Element-wise reduction of one leaf over replicas, in ascending replica order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold
from operator import add
from typing import Any

import numpy as np

from ..devices.backends import backend_of, reduce_arrays
from ..typing import ReduceOp
from ..values import IndexedSlices
from ._kind import are_of_one_library, array_like, require_untraced
from ._sparse import reduce_slices, require_sum, slices_difference

_PYTHON_NUMBERS = (bool, int, float, complex)


def leaf_bytes(leaf: Any) -> int:
    """Return the size of a leaf in bytes, 0 for what is not an array."""
    if type(leaf) is np.ndarray:
        return leaf.nbytes
    size = getattr(leaf, "nbytes", 0)
    return size if isinstance(size, int) else 0  # that of a class is a descriptor


def require_reducible(leaf: Any, where: str, op: ReduceOp = ReduceOp.SUM) -> None:
    """Check that a leaf can be reduced with an operator.

    Raises:
        TypeError: If it is not a number, an array of numbers or an IndexedSlices.
        ValueError: If it is an IndexedSlices and the operator is MIN or MAX.
    """
    if type(leaf) is np.ndarray and leaf.dtype.kind in "fiubc":
        return
    if isinstance(leaf, _PYTHON_NUMBERS):
        return
    if type(leaf) is IndexedSlices:
        require_sum(op, where)
        return
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"{where} would drop the mask of {leaf!r}. Pass leaf.filled(value).")
    if not require_untraced(leaf, where):
        return  # the other libraries have arrays of numbers only
    dtype = np.asarray(leaf).dtype
    if dtype.kind in "OUSMmV" and dtype.name != "bfloat16":
        raise TypeError(
            f"{where} needs numbers or arrays of numbers, got {type(leaf).__name__} "
            f"{leaf!r} (dtype {dtype})."
        )


def leaf_difference(first: Any, other: Any) -> str | None:
    """Say why two leaves cannot be reduced together, None if they can."""
    if type(first) is IndexedSlices or type(other) is IndexedSlices:
        return slices_difference(first, other)
    a, b = array_like(first), array_like(other)
    if a.shape != b.shape:
        return f"shapes {tuple(a.shape)} and {tuple(b.shape)} differ"
    if not are_of_one_library(a, b):
        return f"types {type(a).__name__} and {type(b).__name__} differ"
    numbers = isinstance(first, _PYTHON_NUMBERS), isinstance(other, _PYTHON_NUMBERS)
    if numbers[0] != numbers[1]:
        return f"types {type(first).__name__} and {type(other).__name__} differ"
    if a.dtype != b.dtype and not all(numbers):
        return f"dtypes {a.dtype} and {b.dtype} differ"
    return None


def reduce_leaves(op: ReduceOp, values: Sequence[Any]) -> Any:
    """Combine one leaf of every replica.

    Args:
        op: The operator.
        values: One per replica, in replica order; all numbers, all arrays or all IndexedSlices.

    Returns:
        A Python number for Python numbers, else an array (or IndexedSlices); read-only where its
        library has such arrays.

    Determinism:
        Left to right by replica id, so bitwise the same for every arrival order.

    Example:
        >>> from aioreplica.typing import ReduceOp
        >>> reduce_leaves(ReduceOp.MEAN, [1, 2])
        1.5
    """
    first = values[0]
    if type(first) is np.ndarray:
        total = reduce_arrays(op, values)
        total.flags.writeable = False
        return total
    if isinstance(first, _PYTHON_NUMBERS):
        return _reduce_numbers(op, values)
    if type(first) is IndexedSlices:
        return reduce_slices(op, values)
    total = backend_of(first).reduce(op, values)
    if isinstance(first, np.generic):
        return total[()]
    if type(total) is np.ndarray:
        total.flags.writeable = False
    return total


def _reduce_numbers(op: ReduceOp, values: Sequence[Any]) -> Any:
    if op is ReduceOp.MIN or op is ReduceOp.MAX:
        nans = (value for value in values if value != value)  # noqa: PLR0124 - only NaN does
        nan = next(nans, None)  # which wins, as in NumPy
        if nan is not None:
            return nan
        if any(isinstance(value, complex) for value in values):
            return np.min(values).item() if op is ReduceOp.MIN else np.max(values).item()
        return min(values) if op is ReduceOp.MIN else max(values)
    total = fold(add, values) if len(values) > 1 or type(values[0]) is not bool else int(values[0])
    return total / len(values) if op is ReduceOp.MEAN else total
