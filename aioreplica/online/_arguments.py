"""Checks of the numbers that are given when things are made."""

from __future__ import annotations

import math
from typing import Any


def checked_count(name: str, value: Any) -> int:
    """Return a count of at least 1; ValueError or TypeError if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}.")
    return value


def checked_seconds(name: str, value: Any) -> float:
    """Return a finite number of seconds, not negative; ValueError or TypeError if it is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, got {value!r}.")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and not negative, got {value!r}.")
    return float(value)
