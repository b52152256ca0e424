"""Sizes, seeds and epochs that users give: integers of any kind, NumPy's too, within bounds."""

from __future__ import annotations

from operator import index
from typing import Any


def as_count(name: str, value: Any, *, least: int = 0, advice: str = "") -> int:
    """Return `value` as an int; a bool is refused.

    Raises:
        ValueError: If it is not an integer, or below `least`.

    Example:
        >>> import numpy as np
        >>> as_count("batch_size", np.int64(3), least=1)
        3
    """
    number = count_or_none(value)
    if number is None or number < least:
        raise ValueError(f"{name} must be an int >= {least}, got {value!r}.{advice}")
    return number


def count_or_none(value: Any) -> int | None:
    """Return an integer of any kind as an int >= 0; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        number = index(value)
    except TypeError:
        return None
    return number if number >= 0 else None
