"""Concatenation of one leaf over replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..devices.backends import join_arrays
from ._kind import are_of_one_library, array_like, require_untraced
from ._sparse import require_dense


def require_axis(leaf: Any, axis: int, where: str) -> None:
    """Check that a leaf has the axis along which it shall be joined.

    Raises:
        TypeError: If it is an IndexedSlices, or `axis` is not an int.
        ValueError: If it is a scalar, or `axis` is out of range.
    """
    require_dense(leaf, where)
    if type(leaf) is not np.ndarray:
        require_untraced(leaf, where)
    array = array_like(leaf)
    if isinstance(array, np.ndarray) and array.dtype.kind == "O":
        raise TypeError(
            f"{where} needs arrays of numbers, got {type(leaf).__name__} {leaf!r} (dtype object)."
        )
    if array.ndim == 0:
        raise ValueError(
            f"{where} cannot join scalars, got {leaf!r}. Give them an axis with "
            "np.atleast_1d, or use all_reduce."
        )
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise TypeError(f"{where} needs an int axis, got {axis!r}.")
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"{where} got axis={axis} for shape {tuple(array.shape)}: use {-array.ndim} to "
            f"{array.ndim - 1}."
        )


def gather_difference(first: Any, other: Any, axis: int) -> str | None:
    """Say why two leaves cannot be joined along `axis`, None if they can."""
    a, b = array_like(first), array_like(other)
    if not are_of_one_library(a, b):
        return f"types {type(a).__name__} and {type(b).__name__} differ"
    if a.dtype != b.dtype:
        return f"dtypes {a.dtype} and {b.dtype} differ"
    if a.ndim != b.ndim:
        return f"shapes {tuple(a.shape)} and {tuple(b.shape)} differ in rank"
    along = axis % a.ndim
    if a.shape[:along] + a.shape[along + 1 :] != b.shape[:along] + b.shape[along + 1 :]:
        return f"shapes {tuple(a.shape)} and {tuple(b.shape)} differ outside axis {axis}"
    return None


def concatenate(values: Sequence[Any], axis: int) -> Any:
    """Join one leaf of every replica along `axis`, in replica order.

    Returns:
        A new array; read-only where its library has such arrays.

    Shapes:
        values[i]: equal for all i outside `axis`.

    Example:
        >>> import numpy as np
        >>> concatenate([np.array([1]), np.array([2, 3])], 0)
        array([1, 2, 3])
    """
    arrays = [array_like(value) for value in values]
    joined = join_arrays(arrays, axis)
    if type(joined) is np.ndarray:
        joined.flags.writeable = False
    return joined
