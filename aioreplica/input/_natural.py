"""Sizes and seeds that users give: any integer, NumPy's too, within its bounds."""

from __future__ import annotations

from operator import index
from typing import Any


def as_natural(name: str, value: Any, *, least: int = 0, advice: str = "") -> int:
    """Return `value` as an int; bools are no numbers here.

    Raises:
        ValueError: If it is no integer, or below `least`.

    Example:
        >>> import numpy as np
        >>> as_natural("batch_size", np.int64(3), least=1)
        3
    """
    number = natural_or_none(value)
    if number is None or number < least:
        raise ValueError(f"{name} must be an int >= {least}, got {value!r}.{advice}")
    return number


def natural_or_none(value: Any) -> int | None:
    """Return an integer of any kind, NumPy's too, as an int >= 0; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        number = index(value)
    except TypeError:
        return None
    return number if number >= 0 else None
