"""What replicas bring to a collective on arrays: the leaves of a pytree, compared leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np

from ..collectives import leaf_bytes, require_axis, require_reducible
from ..context import PLACE, Place
from ..tree import LEAF_SPEC, TreeSpec, flatten, flatten_arrays, paths, unflatten
from ..typing import ReduceOp
from ..values import flatten_summands, read_at
from ._meeting import Call

Payload: TypeAlias = tuple[list[Any], TreeSpec, Any]
"""The `args` of such a call: leaves, structure, and what `are_like` compares, or None."""


def payload_of(value: Any, where: str, place: Place | None = None) -> Payload:
    """Take a pytree apart, whose distributed values are read where the replica runs."""
    leaves, spec = flatten(_read(value, where, place))
    return leaves, spec, None


def payload_of_numbers(value: Any, op: ReduceOp, where: str, place: Place | None = None) -> Payload:
    """Take a tree of numbers apart, whose distributed values are read where the replica runs.

    Args:
        value: The tree.
        op: The operator.
        where: Names the call in errors.
        place: Where the replica runs; None takes the current place.

    Raises:
        TypeError: If a leaf is not numeric.
        ValueError: If a leaf does not go with the operator.
    """
    if type(value) is np.ndarray and value.dtype.kind in _NUMERIC:
        return [value], LEAF_SPEC, None
    known = flatten_arrays(value)
    leaves, spec = flatten_summands(_read(value, where, place)) if known is None else known
    if known is not None or (len(leaves) > 1 and set(map(type, leaves)) == _ARRAYS):
        dtypes = list(map(_dtype_of, leaves))
        few = dtypes[:1] if dtypes.count(dtypes[0]) == len(dtypes) else set(dtypes)
        if all(dtype.kind in _NUMERIC for dtype in few):
            return leaves, spec, (dtypes, list(map(_shape_of, leaves)))
    for leaf in leaves:
        require_reducible(leaf, where, op)
    return leaves, spec, None


def payload_along(value: Any, axis: int, where: str, place: Place | None = None) -> Payload:
    """Take a tree of arrays that have an axis apart; distributed values in it are read.

    Raises:
        TypeError: If a leaf is sparse.
        ValueError: If a leaf has no such axis.
    """
    leaves, spec = flatten(_read(value, where, place))
    for leaf in leaves:
        require_axis(leaf, axis, where)
    return leaves, spec, None


def _read(value: Any, where: str, place: Place | None) -> Any:
    """Read distributed values; elsewhere than in a replica the call will be refused anyway."""
    place = place or PLACE.get()
    return value if place.replica is None else read_at(value, place, where)


def payload_bytes(call: Call) -> int:
    """Return the size of a call's leaves, in bytes."""
    leaves, _, signature = call.args
    if len(leaves) == 1:
        return leaf_bytes(leaves[0])
    return sum(map(leaf_bytes if signature is None else _nbytes_of, leaves))


def are_like(first: Call, call: Call) -> bool:
    """Tell quickly whether two calls brought arrays of the same structure, shapes and dtypes.

    False says nothing: the leaves have to be compared one by one.
    """
    leaves, spec, signature = first.args
    others, other_spec, other_signature = call.args
    if spec is not other_spec and spec != other_spec:
        return False
    if signature is not None:
        return bool(signature == other_signature)
    if len(leaves) != 1 or len(others) != 1:
        return False
    (a,), (b,) = leaves, others
    if type(a) is np.ndarray and type(b) is np.ndarray:
        return (a.dtype is b.dtype or bool(a.dtype == b.dtype)) and a.shape == b.shape
    return type(a) is type(b) and type(a) in _NUMBERS


def payload_difference(
    first: Call, call: Call, compare: Callable[[Any, Any], str | None]
) -> str | None:
    """Say how structures or leaves differ, by the caller's measure; None if they do not."""
    leaves, spec, _ = first.args
    others, other_spec, _ = call.args
    if spec != other_spec:
        names, other_names = _paths(first), _paths(call)
        return f"structures differ: leaves {_short(names)} here, {_short(other_names)} there"
    for index, (a, b) in enumerate(zip(leaves, others, strict=True)):
        difference = compare(a, b)
        if difference is not None:
            return f"{difference} at {_paths(first)[index]}"
    return None


def _paths(call: Call) -> list[str]:
    leaves, spec, _ = call.args
    return paths(unflatten(spec, leaves))


def _short(names: Sequence[str]) -> str:
    if len(names) <= 8:
        return f"[{', '.join(names)}]"
    return f"[{', '.join(names[:8])} and {len(names) - 8} more]"


_ARRAYS = {np.ndarray}
_NUMERIC = frozenset("fiubc")
_NUMBERS = {float, int, bool, complex}
_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")
_nbytes_of = attrgetter("nbytes")
