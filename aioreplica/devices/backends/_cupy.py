"""The cupy backend: arrays on CUDA devices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from array_api_compat import is_cupy_array

from ...typing import ReduceOp
from ._backend import Array, Backend
from ._hardware import may_have_gpu, require_installed
from ._namespace_reduce import reduce_in_namespace


@final
class CupyBackend(Backend):
    """Arrays of CuPy, which is imported when the first one is made or asked for.

    Raises:
        ModuleNotFoundError: If cupy is not installed.
    """

    def __init__(self) -> None:
        require_installed("cupy")

    @property
    def name(self) -> str:
        """The entry point's name."""
        return "cupy"

    def num_devices(self, kind: str) -> int:
        """Return the GPUs for "cuda", 0 for other kinds."""
        if kind != "cuda" or not may_have_gpu():
            return 0
        import cupy

        try:
            return int(cupy.cuda.runtime.getDeviceCount())
        except cupy.cuda.runtime.CUDARuntimeError:  # a driver without a device
            return 0

    def owns(self, value: object) -> bool:
        """Tell whether `value` is a CuPy array."""
        return bool(is_cupy_array(value))

    def put(self, value: Array, device: str) -> Array:
        """Return `value` as an array on a device."""
        import cupy

        with _cupy_device(device):
            return cupy.asarray(value)

    def get(self, array: Array) -> Array:
        """Copy an array to the host."""
        return array.get()

    def scope(self, device: str) -> AbstractContextManager[None]:
        """Make a device CuPy's current one."""
        scope: AbstractContextManager[None] = _cupy_device(device)
        return scope

    def synchronise(self, device: str) -> None:
        """Wait for everything on a device."""
        _cupy_device(device).synchronize()

    def reduce(self, op: ReduceOp, arrays: Sequence[Array]) -> Array:
        """Combine arrays left to right, on the device of the first."""
        import cupy

        if not arrays:
            return reduce_in_namespace(op, arrays)
        with arrays[0].device:
            return reduce_in_namespace(op, [cupy.asarray(array) for array in arrays])


def _cupy_device(name: str) -> Any:
    import cupy

    return cupy.cuda.Device(int(name.partition(":")[2] or 0))
