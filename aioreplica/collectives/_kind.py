"""Leaves of collectives: arrays of any library, and the rows of IndexedSlices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_array_api_obj

from ..devices.backends import NumpyBackend, backend_of, share_array, share_parts, trace_of
from ..typing import ReduceOp
from ..values import IndexedSlices

_HALF = ("float16", "bfloat16")


def array_like(leaf: object) -> Any:
    """Return a leaf as something with shape and dtype: an array as it is, the rest by NumPy.

    Example:
        >>> array_like([1.0, 2.0]).shape
        (2,)
    """
    if type(leaf) is np.ndarray:
        return leaf
    if is_array_api_obj(leaf) and not isinstance(leaf, (np.ndarray, np.generic)):
        return leaf
    return np.asarray(leaf)


def are_of_one_library(a: object, b: object) -> bool:
    """Tell whether two arrays can be combined without moving one to another library."""
    return type(a) is type(b) or backend_of(a) is backend_of(b)


def require_untraced(leaf: object, where: str) -> bool:
    """Check that nothing is lost if only the numbers of a leaf are sent; tell if NumPy's it is.

    Raises:
        TypeError: If it is being differentiated or compiled, or no backend serves its library.
    """
    if isinstance(backend_of(leaf), NumpyBackend):
        return True
    trace = trace_of(leaf)
    if trace is not None:
        raise TypeError(
            f"{where} got {trace}, which it would cut off from its trace. Inside the function "
            "that is differentiated call the functions of ar.autodiff, such as "
            'ar.autodiff.all_reduce("sum", x); for the numbers alone, detach it first.'
        )
    return False


def half_dtype(leaf: object) -> object:
    """Return the dtype of an array or IndexedSlices of half precision, None for any other leaf."""
    dtype = getattr(leaf, "dtype", None)
    if getattr(dtype, "itemsize", 0) != 2:
        return None
    name = getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
    return dtype if name in _HALF else None


def widened(leaf: object) -> Any:
    """Return a leaf of half precision in float32."""
    if type(leaf) is IndexedSlices:
        return IndexedSlices(widened(leaf.values), leaf.indices, leaf.dense_shape)
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.astype(np.float32)
    xp = array_namespace(leaf)
    return xp.astype(leaf, xp.float32)


def narrowed(leaf: object, dtype: Any) -> Any:
    """Return a leaf that was widened in its dtype again; read-only where it is a NumPy array."""
    if type(leaf) is IndexedSlices:
        return IndexedSlices(narrowed(leaf.values, dtype), leaf.indices, leaf.dense_shape)
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return array_namespace(leaf).astype(leaf, dtype)
    with np.errstate(over="ignore"):  # as where it is rounded in one process
        rounded = leaf.astype(dtype)
    if isinstance(rounded, np.ndarray):
        rounded.flags.writeable = False
    return rounded


def share(value: object, inputs: Sequence[object]) -> list[Any]:
    """Return a result of a collective once per replica, where each replica's input lives.

    Args:
        value: The result; what is not an array is handed on as it is.
        inputs: What each replica brought.

    Returns:
        One object for all where it cannot be written, else copies.
    """
    if isinstance(value, (np.ndarray, np.generic)) or not is_array_api_obj(value):
        return [value] * len(inputs)  # NumPy's were made read-only
    return share_array(value, inputs)


def share_cut(parts: Sequence[Any], inputs: Sequence[object]) -> list[Any]:
    """Return parts of a result of a collective, each where its replica's input lives.

    Args:
        parts: One per replica, which share memory; NumPy's cannot be written.
        inputs: What each replica brought.
    """
    if isinstance(parts[0], np.ndarray):
        return list(parts)
    return share_parts(parts, inputs)


def pieces(array: Any, count: int, axis: int) -> list[Any]:
    """Cut an array along an axis into contiguous parts; earlier ones get what is left over.

    Example:
        >>> import numpy as np
        >>> pieces(np.arange(3), 2, 0)
        [array([0, 1]), array([2])]
    """
    along = axis % array.ndim
    size, extra = divmod(array.shape[along], count)
    edges = [i * size + min(i, extra) for i in range(count + 1)]
    before = (slice(None),) * along
    return [array[(*before, slice(*edges[i : i + 2]))] for i in range(count)]


def require_sum(op: ReduceOp, where: str) -> None:
    """Check that an operator is defined for IndexedSlices.

    Raises:
        ValueError: If it is MIN or MAX.
    """
    if op is not ReduceOp.SUM and op is not ReduceOp.MEAN:
        raise ValueError(
            f"{where} {op.name} takes no IndexedSlices: their rows can only be added up. Use SUM "
            "or MEAN, or reduce what .to_dense() gives."
        )


def require_dense(leaf: object, where: str) -> None:
    """Check that a leaf is not sparse.

    Raises:
        TypeError: If it is an IndexedSlices.
    """
    if type(leaf) is IndexedSlices:
        raise TypeError(
            f"{where} takes no IndexedSlices. Reduce them without an axis, or pass what "
            ".to_dense() gives."
        )


def slices_difference(first: Any, other: Any) -> str | None:
    """Say why two leaves, at least one of them sparse, cannot be reduced; None if they can."""
    if type(first) is not type(other):
        return f"types {type(first).__name__} and {type(other).__name__} differ"
    if first.dense_shape != other.dense_shape:
        return f"dense shapes {first.dense_shape} and {other.dense_shape} differ"
    if first.dtype != other.dtype:
        return f"dtypes {first.dtype} and {other.dtype} differ"
    return None


def reduce_slices(op: ReduceOp, values: Sequence[IndexedSlices]) -> IndexedSlices:
    """Join the rows of every replica, add up those of the same index, for MEAN divide.

    Args:
        op: SUM or MEAN. MEAN divides by the number of replicas, as for dense arrays: a row that
            a replica does not have counts as 0.
        values: One per replica, of one dense shape and dtype.

    Returns:
        Ascending unique indices with read-only rows, which all replicas share. A mean of integers
        is float64.

    Raises:
        ValueError: If `op` is MIN or MAX.

    Determinism:
        Rows of one index are added in replica order, and within a replica in their order. Half
        precision is accumulated in float32 and rounded once.

    Example:
        >>> from aioreplica.typing import ReduceOp
        >>> from aioreplica.values import IndexedSlices
        >>> parts = [IndexedSlices([1.0], [2], (4,)), IndexedSlices([5.0, 2.0], [0, 2], (4,))]
        >>> reduce_slices(ReduceOp.SUM, parts).to_dense()
        array([5., 0., 3., 0.])
    """
    require_sum(op, "reduce")
    first = values[0]
    dtype = wide = first.dtype
    if dtype.name in _HALF:
        wide = np.dtype(np.float32)
    elif op is ReduceOp.MEAN and dtype.kind in "iu":
        dtype = wide = np.dtype(np.float64)
    rows = np.concatenate([part.values for part in values]).astype(wide, copy=False)
    indices = np.concatenate([part.indices for part in values])
    total = IndexedSlices(rows, indices, first.dense_shape).combined()
    reduced = total.values / len(values) if op is ReduceOp.MEAN else total.values
    reduced = reduced.astype(dtype, copy=False)
    reduced.flags.writeable = False
    return IndexedSlices(reduced, total.indices, first.dense_shape)
