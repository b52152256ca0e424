"""The torch backend: tensors on the host and on CUDA devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import local
from typing import Any, final

import numpy as np
from array_api_compat import is_torch_array

from ...context import REGISTRY
from ...typing import ReduceOp
from ._backend import Array, Backend
from ._discover import may_have_gpu, require_installed
from ._namespace import reduce_in_namespace


@final
class TorchBackend(Backend):
    """Tensors of PyTorch, which is imported when the first one is made or asked for.

    Raises:
        ModuleNotFoundError: If torch is not installed.
    """

    def __init__(self) -> None:
        require_installed("torch")

    @property
    def name(self) -> str:
        """The entry point's name."""
        return "torch"

    @property
    def has_streams(self) -> bool:
        """True: on CUDA devices."""
        return True

    def num_devices(self, kind: str) -> int:
        """Return the GPUs for "cuda", 0 for other kinds: the host's CPUs are NumPy's to count."""
        if kind != "cuda" or not may_have_gpu():
            return 0
        import torch

        return int(torch.cuda.device_count())

    def owns(self, value: object) -> bool:
        """Tell whether `value` is a tensor."""
        return bool(is_torch_array(value))

    def put(self, value: Array, device: str) -> Array:
        """Return `value` as a tensor on a device; a tensor that is there already is not copied.

        NumPy arrays are copied: torch has no read-only tensors, so what operations in place write
        must not be the memory of a batch or of a variable. To a CUDA device they go by way of
        pinned memory, from which the GPU copies while it computes: the calling thread's stream has
        the tensor some time later, and `value` may be written at once.
        """
        import torch

        target = _torch_device(device)
        if is_torch_array(value):
            return value.to(target)
        array = np.asarray(value)
        if target.type != "cuda":
            return torch.tensor(array, device="cpu")
        like = torch.tensor(array[(slice(0, 0),) * array.ndim], device="meta")
        pinned = torch.empty(array.shape, dtype=like.dtype, device="cpu", pin_memory=True)
        np.copyto(pinned.numpy(), array)
        return pinned.to(target, non_blocking=True)  # torch keeps what is still read

    def get(self, array: Array) -> Array:
        """Return a tensor's numbers as a NumPy array; bfloat16, which NumPy lacks, as float32."""
        tensor = array.detach().cpu()
        if str(tensor.dtype) == "torch.bfloat16":
            tensor = tensor.float()
        return tensor.numpy()

    def scope(self, device: str) -> AbstractContextManager[None]:
        """Make a CUDA device torch's current one, and a stream of the calling thread's its own."""
        return _on_own_stream(device) if device.startswith("cuda") else nullcontext()

    def synchronise(self, device: str) -> None:
        """Wait for the stream of a CUDA device that the calling thread works on."""
        if device.startswith("cuda"):
            import torch

            done = torch.cuda.Event(blocking=True)  # it does not keep a core busy meanwhile
            done.record(torch.cuda.current_stream(device))
            done.synchronize()

    def keep(self, array: Array) -> None:
        """Have the allocator wait for both streams before it hands out the memory again."""
        if array.is_cuda:
            import torch

            array.record_stream(torch.cuda.current_stream(array.device))
            array.record_stream(torch.cuda.default_stream(array.device))

    def reduce(self, op: ReduceOp, arrays: Sequence[Array]) -> Array:
        """Combine tensors left to right, on the device of the first."""
        device = arrays[0].device if arrays else None
        return reduce_in_namespace(op, [array.detach().to(device) for array in arrays])


@contextmanager
def _on_own_stream(device: str) -> Iterator[None]:
    import torch

    mine = REGISTRY.once("torch_streams", local)
    streams: dict[str, Any] = mine.__dict__
    stream = streams.get(device)
    if stream is None:
        stream = streams[device] = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def _torch_device(name: str) -> Any:
    """Return torch's device: all logical CPU devices are its one CPU."""
    import torch

    return torch.device("cpu" if name.startswith("cpu") else name)
