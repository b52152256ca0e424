"""Scratch memory that is used again: fresh pages would cost more than the arithmetic in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import numpy.typing as npt


@final
class ScratchPool:
    """Lends pieces of memory of one size; as many exist as were ever in use at once.

    Args:
        num_bytes: Size of each.
    """

    __slots__ = ("_free", "_num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._free: list[npt.NDArray[Any]] = []  # list methods are safe from any thread

    @contextmanager
    def lend(self, dtype: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
        """Give an array of that size, with anything in it, for the length of a `with` block."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(self._num_bytes, np.uint8)
        try:
            yield memory.view(dtype)
        finally:
            self._free.append(memory)

    def __repr__(self) -> str:
        return f"<ScratchPool | {len(self._free)} free pieces of {self._num_bytes} bytes>"
