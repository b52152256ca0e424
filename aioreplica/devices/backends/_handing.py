"""Arrays of any library on their way from replica to replica, through the array API."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from array_api_compat import (
    array_namespace,
    device,
    is_jax_array,
    is_torch_array,
    is_writeable_array,
    to_device,
)

from ._backend import Array


def join_arrays(arrays: Sequence[Array], axis: int) -> Array:
    """Lay arrays of one library behind each other along an axis, where the first one is.

    Example:
        >>> import numpy as np
        >>> join_arrays([np.zeros(1), np.ones(2)], 0)
        array([0., 1., 1.])
    """
    xp, place = array_namespace(arrays[0]), device(arrays[0])
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
