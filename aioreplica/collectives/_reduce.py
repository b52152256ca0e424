"""Reduction and concatenation of one leaf over replicas, in ascending replica order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold
from operator import add
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from array_api_compat import device as device_of

from ..devices.backends import backend_of, join_arrays, reduce_arrays
from ..typing import ReduceOp
from ..values import IndexedSlices, require_unmasked
from ._kind import (
    are_of_one_library,
    array_like,
    half_dtype,
    reduce_slices,
    require_dense,
    require_sum,
    require_untraced,
    slices_difference,
)

_PYTHON_NUMBERS = (bool, int, float, complex)


def leaf_bytes(leaf: object) -> int:
    """Return the size of a leaf in bytes, 0 for what is not an array."""
    if type(leaf) is np.ndarray:
        return leaf.nbytes
    size = getattr(leaf, "nbytes", 0)
    return size if isinstance(size, int) else 0  # that of a class is a descriptor


def require_reducible(leaf: object, where: str, op: ReduceOp = ReduceOp.SUM) -> None:
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
    require_unmasked(leaf, where)
    if not require_untraced(leaf, where):
        return  # the other libraries have arrays of numbers only
    dtype = np.asarray(leaf).dtype
    if dtype.kind in "OUSMmV" and dtype.name != "bfloat16":
        raise TypeError(
            f"{where} needs numbers or arrays of numbers, got {type(leaf).__name__} "
            f"{leaf!r} (dtype {dtype})."
        )


def leaf_difference(first: object, other: object) -> str | None:
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


def _reduce_numbers(op: ReduceOp, values: Sequence[Any]) -> object:
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


def reduce_over_axis(op: ReduceOp, values: Sequence[object], axis: int | tuple[int, ...]) -> Any:
    """Reduce each component over `axis`, then the components over replicas.

    Args:
        op: The operator.
        values: One array per replica; sizes along `axis` may differ, 0 included.
        axis: Axis or axes of each component, negative ones counted from the end.

    Returns:
        An array without the reduced axes. MEAN divides the sum over everything by the true
        number of elements; a component without elements contributes nothing.

    Raises:
        ValueError: If an axis is out of range, sizes along other axes differ, or nothing is left to
            take MEAN, MIN or MAX of.

    Shapes:
        values[i]: any, equal for all i outside `axis`.

    Example:
        >>> import numpy as np
        >>> from aioreplica.typing import ReduceOp
        >>> reduce_over_axis(ReduceOp.MEAN, [np.array([1.0, 2.0]), np.array([6.0])], 0)
        np.float64(3.0)
    """
    arrays, axes = _checked_components(values, axis)
    counts = [_num_reduced(array, axes) for array in arrays]
    if op is not ReduceOp.SUM and sum(counts) == 0:
        raise ValueError(
            f"{op.name} over axis {axis!r} of {len(arrays)} empty components is undefined."
        )
    xp, first = array_namespace(arrays[0]), arrays[0]
    if op is ReduceOp.MIN or op is ReduceOp.MAX:
        filled = [a for a, count in zip(arrays, counts, strict=True) if count]
        return _extreme(op, filled, axes)
    wide = _sum_dtype(op, first, xp)
    sums = [_kept(xp.sum(a, axis=axes, dtype=wide)) for a in arrays]
    total = reduce_leaves(ReduceOp.SUM, sums)
    if op is ReduceOp.MEAN:
        total = _kept(total / sum(counts))
    narrow = first.dtype if xp.isdtype(first.dtype, "real floating") else total.dtype
    result = xp.astype(total, narrow, copy=False)
    if type(result) is np.ndarray:
        result.flags.writeable = False
    return _unwrap(result)


def extreme_over_axis(
    op: ReduceOp, values: Sequence[object], axis: int | tuple[int, ...]
) -> tuple[Any, int]:
    """Take MIN or MAX as `reduce_over_axis` does, of a part of all components.

    Returns:
        The result, and of how many elements it is. Of none it is what no element is worse than.

    Example:
        >>> import numpy as np
        >>> from aioreplica.typing import ReduceOp
        >>> extreme_over_axis(ReduceOp.MAX, [np.zeros((0, 2))], 0)
        (array([-inf, -inf]), 0)
    """
    arrays, axes = _checked_components(values, axis)
    counts = [_num_reduced(array, axes) for array in arrays]
    filled = [a for a, count in zip(arrays, counts, strict=True) if count]
    return _extreme(op, filled or [_worst(op, arrays[0], axes)], axes), sum(counts)


def _extreme(op: ReduceOp, arrays: Sequence[Any], axes: tuple[int, ...]) -> Any:
    xp = array_namespace(arrays[0])
    extreme = xp.min if op is ReduceOp.MIN else xp.max
    return _unwrap(reduce_leaves(op, [_kept(extreme(array, axis=axes)) for array in arrays]))


def _worst(op: ReduceOp, array: Any, axes: tuple[int, ...]) -> Any:
    """Return an array like one without elements, but of size 1 along the axes."""
    xp, is_min = array_namespace(array), op is ReduceOp.MIN
    reduced = {axis % array.ndim for axis in axes}
    shape = tuple(1 if i in reduced else size for i, size in enumerate(array.shape))
    value: Any = np.inf if is_min else -np.inf
    if half_dtype(array) is not None:
        pass  # bfloat16 is no dtype of NumPy's
    elif xp.isdtype(array.dtype, "bool"):
        value = is_min
    elif xp.isdtype(array.dtype, "integral"):
        limits = xp.iinfo(array.dtype)
        value = limits.max if is_min else limits.min
    elif xp.isdtype(array.dtype, "complex floating"):
        value = complex(value, value)
    return xp.full(shape, value, dtype=array.dtype, device=device_of(array))


def _checked_components(
    values: Sequence[object], axis: int | tuple[int, ...]
) -> tuple[list[Any], tuple[int, ...]]:
    """Return the components as arrays, and the axes.

    Raises:
        ValueError: If an axis is out of range, or sizes along other axes differ.
    """
    arrays = [array_like(value) for value in values]
    axes = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    for array in arrays:
        for one in axes:
            if not isinstance(one, (int, np.integer)) or not -array.ndim <= one < array.ndim:
                raise ValueError(
                    f"axis={axis!r} does not fit a component of shape {tuple(array.shape)}: use "
                    f"axes from {-array.ndim} to {array.ndim - 1}."
                )
    _require_same_outside(arrays, axes)
    return arrays, axes


def _require_same_outside(arrays: Sequence[Any], axes: tuple[int, ...]) -> None:
    """Refuse components that NumPy would broadcast against each other, or complain of.

    Raises:
        ValueError: If sizes along an axis that stays differ.
    """
    first = arrays[0]
    for i, array in enumerate(arrays):
        if _left(array, axes) != _left(first, axes):
            shown = axes[0] if len(axes) == 1 else axes
            raise ValueError(
                f"The shapes of the components differ outside axis {shown}: replica 0 has "
                f"{tuple(first.shape)}, replica {i} has {tuple(array.shape)}. Reduce over the "
                "axis of different sizes too (parts of an uneven batch: axis 0), or gather the "
                "parts along it first."
            )


def _left(array: Any, axes: tuple[int, ...]) -> list[int]:
    """Return the sizes along the axes that are not reduced."""
    reduced = {axis % array.ndim for axis in axes}
    return [size for axis, size in enumerate(array.shape) if axis not in reduced]


def _sum_dtype(op: ReduceOp, array: Any, xp: Any) -> object:
    if str(array.dtype).rpartition(".")[2] in ("float16", "bfloat16"):
        return xp.float32
    if op is ReduceOp.MEAN and xp.isdtype(array.dtype, ("bool", "integral")):
        return xp.float64
    return None


def _num_reduced(array: Any, axes: tuple[int, ...]) -> int:
    return int(np.prod([array.shape[axis] for axis in axes], dtype=np.int64))


def _kept(array: object) -> Any:
    """Return an array: NumPy gives a scalar where no axis is left."""
    return np.asarray(array) if isinstance(array, np.generic) else array


def _unwrap(total: object) -> object:
    return total[()] if type(total) is np.ndarray and total.ndim == 0 else total


def require_axis(leaf: object, axis: int, where: str) -> None:
    """Check that a leaf has the axis along which it shall be joined.

    Raises:
        TypeError: If it is an IndexedSlices or a masked array, or `axis` is not an int.
        ValueError: If it is a scalar, or `axis` is out of range.
    """
    require_dense(leaf, where)
    if type(leaf) is not np.ndarray:
        require_unmasked(leaf, where)
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


def gather_difference(first: object, other: object, axis: int) -> str | None:
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


def concatenate(values: Sequence[object], axis: int, like: object = None) -> object:
    """Join one leaf of every replica along `axis`, in replica order.

    Args:
        values: One per replica.
        axis: Along which.
        like: The result is on the device of this one; None takes that of the first.

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
    joined = join_arrays(arrays, axis, None if like is None else array_like(like))
    if type(joined) is np.ndarray:
        joined.flags.writeable = False
    return joined
