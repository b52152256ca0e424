"""Arrays of any library but NumPy through the array API: joined, shared out and reduced."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
from array_api_compat import (
    array_namespace,
    device,
    is_jax_array,
    is_torch_array,
    is_writeable_array,
    to_device,
)

from ...typing import ReduceOp
from ._backend import Array


def join_arrays(arrays: Sequence[Array], axis: int, like: Array | None = None) -> Array:
    """Lay arrays of one library behind each other along an axis.

    Args:
        arrays: What is joined.
        axis: Along which.
        like: The result is on the device of this one; None takes that of the first.

    Example:
        >>> import numpy as np
        >>> join_arrays([np.zeros(1), np.ones(2)], 0)
        array([0., 1., 1.])
    """
    xp, place = array_namespace(arrays[0]), device(arrays[0] if like is None else like)
    return xp.concat([to_device(untraced(array), place) for array in arrays], axis=axis)


def share_array(array: Array, inputs: Sequence[Array]) -> list[Array]:
    """Return an array once per replica, on the device of what that replica brought.

    Args:
        array: The result of a collective, referenced by no one else.
        inputs: What each replica brought.

    Returns:
        One object for all where it cannot be written, else a copy for each.
    """
    if isinstance(array, np.ndarray):
        array.flags.writeable = False
    if not is_writeable_array(array):
        return [to_device(array, device(own)) for own in inputs]
    xp = array_namespace(array)
    copies = [to_device(xp.asarray(array, copy=True), device(own)) for own in inputs[1:]]
    return [to_device(array, device(inputs[0])), *copies]


def share_parts(parts: Sequence[Array], inputs: Sequence[Array]) -> list[Array]:
    """Return parts of one array, each on the device of what its replica brought.

    Args:
        parts: One per replica.
        inputs: What each replica brought.

    Returns:
        Copies where they could be written.
    """
    if is_writeable_array(parts[0]):
        xp = array_namespace(parts[0])
        parts = [xp.asarray(part, copy=True) for part in parts]
    return [to_device(part, device(own)) for part, own in zip(parts, inputs, strict=True)]


def trace_of(array: object) -> str | None:
    """Name what an array is if it is being differentiated or compiled, else None.

    Example:
        >>> import numpy as np
        >>> trace_of(np.zeros(1)) is None
        True
    """
    if is_torch_array(array):
        return "a tensor that requires a gradient" if array.requires_grad else None
    if is_jax_array(array):
        import jax

        return "a traced jax array" if isinstance(array, jax.core.Tracer) else None
    return None


def untraced(array: Array) -> Array:
    """Return the numbers of an array without what was traced to get them."""
    return array.detach() if is_torch_array(array) else array


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


def _dtypes(op: ReduceOp, dtype: object, xp: ModuleType) -> tuple[object, object]:
    """Return in which dtype to accumulate, and that of the result."""
    if str(dtype).rpartition(".")[2] in ("float16", "bfloat16"):
        return xp.float32, dtype
    if op is ReduceOp.SUM and xp.isdtype(dtype, "bool"):
        return (_widest(xp, "int64"),) * 2
    if op is ReduceOp.MEAN and xp.isdtype(dtype, ("bool", "integral")):
        return (_widest(xp, "float64"),) * 2
    return dtype, dtype


def _widest(xp: ModuleType, name: str) -> object:
    """Return a dtype of 64 bits, or of 32 where the library is set to have no wider ones."""
    dtypes = xp.__array_namespace_info__().dtypes()
    return dtypes.get(name) or dtypes[name.replace("64", "32")]
