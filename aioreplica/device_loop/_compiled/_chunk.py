"""Elements of several steps, stacked in memory that a program reads where it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ._narrow import require_32_bits

Array = npt.NDArray[Any]

ALIGNMENT = 64
"""Where XLA wants arrays to begin; those that do it reads where they are."""


@final
class Chunk:
    """Elements for one call, stacked for each replica where the program reads them.

    Args:
        size: How many fit.
        element: One element, a list of arrays for each replica.

    Attributes:
        elements: A row for each replica, for each leaf.
        inputs: What a program is given for all of them, if that is known already.
    """

    __slots__ = ("elements", "inputs", "num_steps", "size")

    def __init__(self, size: int, element: Sequence[Sequence[Array]]) -> None:
        self.size = size
        self.num_steps = 0
        self.inputs: Any = None
        self.elements = [
            _aligned((len(element), size, *leaf.shape), leaf.dtype) for leaf in element[0]
        ]

    def add(self, elements: Sequence[Sequence[Sequence[object]]]) -> None:
        """Put elements behind the others, for each replica its leaves of all of them.

        They look like the first one.
        """
        begun, end = self.num_steps, self.num_steps + len(elements[0])
        for i, own in enumerate(elements):
            for whole, found in zip(self.elements, zip(*own, strict=True), strict=True):
                _stack(found, whole[i, begun:end])
        self.num_steps = end

    def checked(self) -> list[Array]:
        """Return the elements, if jax has their integers in 32 bits where it may not use 64.

        Raises:
            OverflowError: If one would be cut.
        """
        found = [array[:, : self.num_steps] for array in self.elements]  # others hold anything
        require_32_bits(found, "An element")
        return self.elements


def _stack(leaves: Sequence[object], rows: Array) -> None:
    """Write one leaf into each row; arrays in a single call of NumPy."""
    arrays = [leaf for leaf in leaves if type(leaf) is np.ndarray]
    if rows.ndim > 1 and len(arrays) == len(leaves):
        np.concatenate(arrays, out=rows.reshape(len(rows) * rows.shape[1], *rows.shape[2:]))
        return
    for row, leaf in enumerate(leaves):
        rows[row] = leaf


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an empty array that XLA does not have to copy."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
