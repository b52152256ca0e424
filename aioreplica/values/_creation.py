"""Creation of variables: their initial values, and creators of the user before the factory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .._functions import require_finished
from ..context import CREATORS, PLACE
from ..tree import Array
from ._division import Division, Shard, divided_rows
from ._indexed_slices import require_no_mask

if TYPE_CHECKING:
    from ._variable import Variable

RowsFn: TypeAlias = Callable[[int, int], object]


def initial_array(initial_value: object, name: str, dtype: npt.DTypeLike | None) -> Array:
    """Turn an initial value, or a callable that gives one, into an array of our own."""
    value = initial_value() if callable(initial_value) else initial_value
    require_no_mask(value, f"Variable {name!r}")
    array = np.array(value, dtype=dtype)
    if array.dtype.kind not in "fiubc" and array.dtype.name != "bfloat16":
        raise TypeError(f"Variable {name!r} needs numbers, got {value!r} (dtype {array.dtype}).")
    array.flags.writeable = False
    return array


def initial_rows(
    rows_from: object,
    name: str,
    dtype: npt.DTypeLike | None,
    shape: Sequence[int],
    *,
    is_here: bool,
) -> tuple[Array, RowsFn | None]:
    """Return a value made of its rows; or what stands for it, and the function that makes it.

    Raises:
        ValueError: If the shape has no rows, or the function gives another one.
        TypeError: If it is no function.
    """
    rows, sizes = checked_rows(rows_from, name, shape)
    if is_here:
        return rows_between(rows, name, 0, sizes, dtype), None
    first = rows_between(rows, name, 0, (min(sizes[0], 1), *sizes[1:]), dtype)
    return np.broadcast_to(np.zeros((), first.dtype), sizes), rows


def initial_part(
    strategy: Any,  # Any: strategies lie above this layer
    initial_value: object,
    name: str,
    dtype: npt.DTypeLike | None,
    shape: Sequence[int] | None,
    sharding: object,
    *,
    is_whole: bool,
) -> tuple[Array, Division]:
    """Return this worker's rows of a new variable, and how all are divided.

    Raises:
        ValueError: If the strategy cannot divide it, something of it `is_whole`, or there are not
            enough rows.
        TypeError: If `sharding` is no Shard.
    """
    if not isinstance(sharding, Shard):
        raise TypeError(f"sharding is an ar.Shard() or None, got {sharding!r}.")
    if strategy is None or strategy.has_plain_values or strategy.elsewhere is not None:
        raise ValueError(
            f"Variable {name!r} got sharding=, which divides it among the workers of a strategy: "
            "make it in the scope of a MultiWorkerMirroredStrategy. A ParameterServerStrategy "
            "takes a variable_partitioner."
        )
    if is_whole:
        raise ValueError(
            f"Variable {name!r} got sharding= and synchronization='on_read' or a constraint, which "
            "takes a whole value. Leave one of them out."
        )
    workers = strategy.workers
    rank, count = (0, 1) if workers is None else (workers.rank, workers.num_workers)
    if shape is not None:
        rows, sizes = checked_rows(initial_value, name, shape)
        division = divided_rows(name, sizes, rank, count)
        begin, _ = division.rows
        return rows_between(rows, name, begin, division.part_shape, dtype), division
    whole = initial_array(initial_value, name, dtype)
    division = divided_rows(name, whole.shape, rank, count)
    part = division.part_of(whole)
    if count > 1:
        part = part.copy()  # and the whole is let go
        part.flags.writeable = False
    return part, division


def checked_rows(
    rows_from: object, name: str, shape: Sequence[int]
) -> tuple[RowsFn, tuple[int, ...]]:
    """Return a function that gives rows, and a shape with rows.

    Raises:
        ValueError: If the shape has no rows.
        TypeError: If it is no function.
    """
    if not callable(rows_from):
        raise TypeError(
            f"Variable {name!r} was given a shape, so its initial value must be a function that "
            f"gives rows, such as lambda begin, end: ..., got {rows_from!r}."
        )
    sizes = tuple(map(operator.index, shape))
    if not sizes or min(sizes) < 0:
        raise ValueError(f"The shape of variable {name!r} needs rows, got {sizes}.")
    return rows_from, sizes


def rows_between(
    rows_from: RowsFn, name: str, begin: int, shape: tuple[int, ...], dtype: npt.DTypeLike | None
) -> Array:
    """Return rows of a new variable from `begin` on, as many as `shape` says.

    Raises:
        ValueError: If the function gives another shape.
        TypeError: If it gives no numbers.
    """
    end = begin + shape[0]
    found = initial_array(rows_from(begin, end), name, dtype)
    if found.shape != shape:
        raise ValueError(
            f"The rows {begin} to {end} of variable {name!r} have to be of shape {shape}, but its "
            f"function gave {found.shape}."
        )
    return found


Creators: TypeAlias = "tuple[tuple[object, Callable[..., Variable]], ...]"


def create_through(
    creators: Creators, factory: Callable[..., Variable], options: dict[str, object]
) -> Variable:
    """Have the innermost creator of the current strategy make a variable.

    Args:
        creators: Outermost first, each with the strategy that it is for.
        factory: Called by the outermost.
        options: Keyword arguments of `ar.Variable`.

    Raises:
        TypeError: If a creator returns something else.
    """
    from ._variable import Variable  # the factory and what is before it need each other

    if not creators:
        return factory(**options)
    *outer, (owner, creator) = creators
    if owner is not PLACE.get().strategy:
        return create_through(tuple(outer), factory, options)

    def next_creator(**changed: object) -> Variable:
        return create_through(tuple(outer), factory, changed)

    token = CREATORS.set(tuple(outer))  # ar.Variable in a creator is not its own next one
    try:
        made = creator(next_creator, **options)
    finally:
        CREATORS.reset(token)
    require_finished(made, creator, "variable_creator_scope")
    if not isinstance(made, Variable):
        raise TypeError(
            f"The variable creator {creator!r} returned {made!r:.80} ({type(made).__name__}). "
            "Return what next_creator(**options) gives."
        )
    return made
