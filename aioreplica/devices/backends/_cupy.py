"""The cupy backend: arrays on CUDA devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import local
from typing import Any, final

from array_api_compat import is_cupy_array

from ...context import REGISTRY
from ...typing import ReduceOp
from ._backend import Array, Backend
from ._discover import may_have_gpu, require_installed
from ._namespace import reduce_in_namespace


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

    @property
    def has_streams(self) -> bool:
        """True."""
        return True

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
        """Make a device CuPy's current one, and a stream of the calling thread's its own."""
        return _on_own_stream(device)

    def synchronise(self, device: str) -> None:
        """Wait for the stream of a device that the calling thread works on."""
        import cupy

        with _cupy_device(device):
            cupy.cuda.get_current_stream().synchronize()

    def keep(self, array: Array) -> None:
        """Wait until the calling thread's stream is done: CuPy's pools keep nothing for others."""
        import cupy

        with array.device:
            cupy.cuda.get_current_stream().synchronize()

    def reduce(self, op: ReduceOp, arrays: Sequence[Array]) -> Array:
        """Combine arrays left to right, on the device of the first."""
        import cupy

        if not arrays:
            return reduce_in_namespace(op, arrays)
        with arrays[0].device:
            return reduce_in_namespace(op, [cupy.asarray(array) for array in arrays])


@contextmanager
def _on_own_stream(device: str) -> Iterator[None]:
    import cupy

    mine = REGISTRY.once("cupy_streams", local)
    streams: dict[str, Any] = mine.__dict__
    with _cupy_device(device):
        stream = streams.get(device)
        if stream is None:
            stream = streams[device] = cupy.cuda.Stream(non_blocking=True)
        stream.wait_event(cupy.cuda.Stream.null.record())
        with stream:
            yield


def _cupy_device(name: str) -> Any:
    import cupy

    return cupy.cuda.Device(int(name.partition(":")[2] or 0))
