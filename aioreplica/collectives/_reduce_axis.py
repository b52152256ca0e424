"""Reduction over replicas and over axes of each component, exact for unequal sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ..typing import ReduceOp
from ._kind import array_like
from ._reduce import reduce_leaves


def reduce_over_axis(op: ReduceOp, values: Sequence[Any], axis: int | tuple[int, ...]) -> Any:
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
    counts = [_num_reduced(array, axes) for array in arrays]
    if op is not ReduceOp.SUM and sum(counts) == 0:
        raise ValueError(
            f"{op.name} over axis {axis!r} of {len(arrays)} empty components is undefined."
        )
    xp, first = array_namespace(arrays[0]), arrays[0]
    if op is ReduceOp.MIN or op is ReduceOp.MAX:
        extreme = xp.min if op is ReduceOp.MIN else xp.max
        filled = [a for a, count in zip(arrays, counts, strict=True) if count]
        return _unwrap(reduce_leaves(op, [_kept(extreme(a, axis=axes)) for a in filled]))
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


def _sum_dtype(op: ReduceOp, array: Any, xp: Any) -> Any:
    if str(array.dtype).rpartition(".")[2] in ("float16", "bfloat16"):
        return xp.float32
    if op is ReduceOp.MEAN and xp.isdtype(array.dtype, ("bool", "integral")):
        return xp.float64
    return None


def _num_reduced(array: Any, axes: tuple[int, ...]) -> int:
    return int(np.prod([array.shape[axis] for axis in axes], dtype=np.int64))


def _kept(array: Any) -> Any:
    """Return an array: NumPy gives a scalar where no axis is left."""
    return np.asarray(array) if isinstance(array, np.generic) else array


def _unwrap(total: Any) -> Any:
    return total[()] if type(total) is np.ndarray and total.ndim == 0 else total
