"""What replicas bring to a collective on arrays: the leaves of a pytree, compared leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..collectives import leaf_bytes
from ..tree import TreeSpec, flatten, paths, unflatten

if TYPE_CHECKING:
    from ._call import Call

Payload: TypeAlias = tuple[list[Any], TreeSpec]  # the `args` of such a call


def payload_of(value: Any) -> Payload:
    """Take a pytree apart."""
    return flatten(value)


def payload_bytes(call: Call) -> int:
    """Return the size of a call's leaves, in bytes."""
    leaves = call.args[0]
    if len(leaves) == 1:
        return leaf_bytes(leaves[0])
    return sum(map(leaf_bytes, leaves))


def are_like(first: Call, call: Call) -> bool:
    """Tell quickly whether two calls brought arrays of the same structure, shapes and dtypes.

    False says nothing: the leaves have to be compared one by one.
    """
    leaves, spec = first.args
    others, other_spec = call.args
    if spec is not other_spec and spec != other_spec:
        return False
    if len(leaves) == 1:
        (a,), (b,) = leaves, others
        if type(a) is np.ndarray and type(b) is np.ndarray:
            return bool(a.dtype == b.dtype) and a.shape == b.shape
        return type(a) is type(b) and type(a) in _NUMBERS
    if set(map(type, leaves)) != _ARRAYS or set(map(type, others)) != _ARRAYS:
        return False
    return list(map(_shape_of, leaves)) == list(map(_shape_of, others)) and list(
        map(_dtype_of, leaves)
    ) == list(map(_dtype_of, others))


def payload_difference(
    first: Call, call: Call, compare: Callable[[Any, Any], str | None]
) -> str | None:
    """Say how structures or leaves differ, by the caller's measure; None if they do not."""
    leaves, spec = first.args
    others, other_spec = call.args
    if spec != other_spec:
        names, other_names = _paths(first), _paths(call)
        return f"structures differ: leaves {_short(names)} here, {_short(other_names)} there"
    for index, (a, b) in enumerate(zip(leaves, others, strict=True)):
        difference = compare(a, b)
        if difference is not None:
            return f"{difference} at {_paths(first)[index]}"
    return None


def _paths(call: Call) -> list[str]:
    leaves, spec = call.args
    return paths(unflatten(spec, leaves))


def _short(names: Sequence[str]) -> str:
    if len(names) <= 8:
        return f"[{', '.join(names)}]"
    return f"[{', '.join(names[:8])} and {len(names) - 8} more]"


_ARRAYS = {np.ndarray}
_NUMBERS = {float, int, bool, complex}
_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")
