"""Leaves of collectives, whatever library their arrays are from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import is_array_api_obj

from ..devices.backends import NumpyBackend, backend_of, share_array, trace_of


def array_like(leaf: Any) -> Any:
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


def are_of_one_library(a: Any, b: Any) -> bool:
    """Tell whether two arrays can be combined without moving one to another library."""
    return type(a) is type(b) or backend_of(a) is backend_of(b)


def require_untraced(leaf: Any, where: str) -> bool:
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


def share(value: Any, inputs: Sequence[Any]) -> list[Any]:
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
