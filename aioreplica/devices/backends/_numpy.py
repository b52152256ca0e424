"""The NumPy backend: logical CPU devices of the host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

import numpy as np
from array_api_compat import is_numpy_array

from ...typing import ReduceOp
from .._cores import num_cores
from ._backend import Array, Backend
from ._numpy_reduce import reduce_arrays


@final
class NumpyBackend(Backend):
    """Arrays in host memory; every logical CPU device shares it, so moving is free.

    Example:
        >>> NumpyBackend().put([1.0, 2.0], "cpu:0")
        array([1., 2.])
    """

    @property
    def name(self) -> str:
        """The entry point's name."""
        return "numpy"

    @property
    def has_streams(self) -> bool:
        """False: ops end before they return."""
        return False

    def num_devices(self, kind: str) -> int:
        """Return the cores this process may use, at least 2, for "cpu"; 0 for other kinds."""
        return max(2, num_cores()) if kind == "cpu" else 0

    def owns(self, value: object) -> bool:
        """Tell whether `value` is a NumPy array or scalar."""
        return is_numpy_array(value)

    def put(self, value: Array, device: str) -> Array:
        """Return `value` as a NumPy array, without a copy if it is one."""
        return np.asarray(value)

    def get(self, array: Array) -> Array:
        """Return the array itself."""
        return np.asarray(array)

    def scope(self, device: str) -> AbstractContextManager[None]:
        """Do nothing: NumPy has no current device."""
        return nullcontext()

    def synchronise(self, device: str) -> None:
        """Do nothing: NumPy ops end before they return."""

    def keep(self, array: Array) -> None:
        """Do nothing: there is no stream."""

    def reduce(self, op: ReduceOp, arrays: Sequence[Array]) -> Array:
        """Combine the arrays left to right, so the result is bitwise reproducible.

        Raises:
            ValueError: If there is no array.
        """
        if not arrays:
            raise ValueError("reduce needs at least one array, got none.")
        return reduce_arrays(op, [np.asarray(array) for array in arrays])
