"""Checks of what is given to a communicator, before anything is sent."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence

import numpy as np

from ..tree import Array


def as_integers(values: Iterable[object]) -> tuple[int, ...] | None:
    """Return integers, of NumPy too, as those of Python; None if something else is among them."""
    found = tuple(values)
    if any(isinstance(each, (bool, np.bool_)) for each in found):
        return None
    try:
        return tuple(operator.index(each) for each in found)  # type: ignore[arg-type]
    except TypeError:
        return None


def require_reason(reason: object) -> None:
    """Check why a group is ended.

    Raises:
        TypeError: If it is not a string.
    """
    if not isinstance(reason, str):
        raise TypeError(f"The reason is a string, got {reason!r} ({type(reason).__name__}).")


def require_root(root: object, size: int) -> int:
    """Return the rank of a worker.

    Raises:
        ValueError: If it is not one.
    """
    found = as_integers([root])
    if found is None or not 0 <= found[0] < size:
        raise ValueError(f"root must be a rank from 0 to {size - 1}, got {root!r}.")
    return found[0]


def require_timeout(timeout: object) -> float | None:
    """Check a timeout in seconds.

    Raises:
        TypeError: If it is not a number.
        ValueError: If it is not above 0.
    """
    if timeout is None:
        return None
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool):
        raise TypeError(f"timeout is a number of seconds or None, got {timeout!r}.")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be above 0 seconds, or None to wait; got {timeout!r}.")
    return float(timeout)


def require_members(ranks: Iterable[int], own: int, size: int) -> tuple[int, ...]:
    """Return the ranks of a split, ascending.

    Raises:
        TypeError: If they are not integers.
        ValueError: If one is not in the group or given twice, or this worker is left out.
    """
    given = tuple(ranks)
    members = as_integers(given)
    if members is None:
        raise TypeError(f"split takes the ranks of workers, got {given!r}.")
    if len(set(members)) != len(members) or not all(0 <= rank < size for rank in members):
        raise ValueError(f"split takes different ranks from 0 to {size - 1}, got {list(members)}.")
    if own not in members:
        raise ValueError(f"Worker {own} is not in the group {list(members)} to split.")
    return tuple(sorted(members))


def require_writable(x: object, where: str) -> Array:
    """Check that an array can be filled in where it is.

    Raises:
        ValueError: If it cannot.
    """
    array = as_array(x, where)
    if array is not x or not array.flags.writeable:
        raise ValueError(
            "all_gather with sizes fills in an array where it is: a NumPy array that is "
            "contiguous, writable and in native byte order. Pass a copy that is."
        )
    return array


def require_sizes(array: Array, sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the sizes of parts of an array; even ones of its rows where none are given.

    Raises:
        TypeError: If they are not integers.
        ValueError: If they are not those of parts of a flat array.
    """
    if not len(sizes):
        rows, more = divmod(len(array), count)
        return tuple(rows + (rank < more) for rank in range(count))
    found = as_integers(sizes)
    if found is None:
        raise TypeError(f"sizes are integers, one per worker, got {sizes!r}.")
    if len(found) != count or min(found) < 0 or array.shape != (sum(found),):
        raise ValueError(
            f"Parts of {count} workers have {count} sizes, together those of a flat array; got an "
            f"array of shape {array.shape} and sizes {list(found)}."
        )
    return found


def as_array(x: object, where: str) -> Array:
    """Return a C-contiguous NumPy array of numbers in native byte order; `x` itself if it is one.

    Raises:
        TypeError: If it holds something else.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{where} would drop the mask of {x!r}. Pass x.filled(value).")
    array = np.asarray(x)
    if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
        raise TypeError(
            f"{where} sends booleans and numbers, got {type(x).__name__} of dtype {array.dtype}."
        )
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array if array.flags.c_contiguous else array.copy(order="C")
