"""Rows that the last sparse update touched, so that the next one need not copy the others.

A new value is built in the buffer of the value before the current one. If the current one came from
that by changing some rows, then bringing those rows up to date makes the buffer equal to the
current value, however many rows there are.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from ..values import Variable

Array = npt.NDArray[Any]


@final
class _Change(NamedTuple):
    version: int  # how many writes the variable had seen before this one
    before: weakref.ref[Array]
    after: weakref.ref[Array]
    rows: Array


@final
class TouchedRows:
    """Remembers, per variable, how the current array came from the one before it.

    Invariants:
        * Arrays are known by weak references: a strong one would make a buffer look held.
        * Two writes of anybody else bring the same two arrays back with other rows changed, so what
          is remembered holds for the very next write only.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[Variable, _Change] = {}

    def bring_up_to_date(self, variable: Variable, current: Array, buffer: Array) -> None:
        """Make a buffer equal to the current array, by few rows if that is enough."""
        last = self._last.get(variable)
        if (
            last is not None
            and last.version + 1 == variable.version
            and last.before() is buffer
            and last.after() is current
        ):
            buffer[last.rows] = current[last.rows]
        else:
            np.copyto(buffer, current)

    def remember(self, variable: Variable, old: Array, new: Array, rows: Array) -> None:
        """Note that `new` is `old` but for some rows; `new` is what the next write publishes."""
        self._last[variable] = _Change(variable.version, weakref.ref(old), weakref.ref(new), rows)

    def __repr__(self) -> str:
        return f"<TouchedRows | {len(self._last)} variables>"
