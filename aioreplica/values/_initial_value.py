"""Initial values of variables: arrays, functions that give one, and functions of rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..tree import Array

RowsFn: TypeAlias = Callable[[int, int], object]


def initial_array(initial_value: object, name: str, dtype: npt.DTypeLike | None) -> Array:
    """Turn an initial value, or a callable that gives one, into an array of our own."""
    value = initial_value() if callable(initial_value) else initial_value
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
    if not callable(rows_from):
        raise TypeError(
            f"Variable {name!r} was given a shape, so its initial value must be a function that "
            f"gives rows, such as lambda begin, end: ..., got {rows_from!r}."
        )
    sizes = tuple(map(operator.index, shape))
    if not sizes or min(sizes) < 0:
        raise ValueError(f"The shape of variable {name!r} needs rows, got {sizes}.")
    if is_here:
        return rows_between(rows_from, name, 0, sizes, dtype), None
    first = rows_between(rows_from, name, 0, (min(sizes[0], 1), *sizes[1:]), dtype)
    return np.broadcast_to(np.zeros((), first.dtype), sizes), rows_from


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
