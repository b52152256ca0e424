"""Where the GPU benchmark runs: one GPU that two replicas share, or the host for a dry run.

A strategy takes each device once, so that one GPU gives one replica. `shared_gpu` puts a backend
in place that says there are several: torch's, whose every device is the same GPU. Each device has
a thread of its own, hence a stream of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import aioreplica as ar
from aioreplica.context import REGISTRY
from aioreplica.devices.backends import Backend, NumpyBackend, TorchBackend
from aioreplica.typing import ReduceOp

GPU = "cuda:0"
NUM_CYCLES = 20_000_000
"""Of the kernel by which the clock of a GPU is measured: about 10 ms."""


@final
class SharedGpu(Backend):
    """The torch backend, of several devices that are all one GPU.

    Args:
        num_shares: How many.
    """

    def __init__(self, num_shares: int) -> None:
        self._torch = TorchBackend()
        self._num_shares = num_shares

    name = "torch"
    has_streams = True

    def num_devices(self, kind: str) -> int:
        return self._num_shares if kind == "cuda" else 0

    def owns(self, value: object) -> bool:
        return self._torch.owns(value)

    def put(self, value: Any, device: str) -> Any:
        return self._torch.put(value, GPU)

    def get(self, array: Any) -> Any:
        return self._torch.get(array)

    def scope(self, device: str) -> AbstractContextManager[None]:
        return self._torch.scope(GPU)

    def synchronise(self, device: str) -> None:
        self._torch.synchronise(GPU)

    def keep(self, array: Any) -> None:
        self._torch.keep(array)

    def reduce(self, op: ReduceOp, arrays: Sequence[Any]) -> Any:
        return self._torch.reduce(op, arrays)


@contextmanager
def shared_gpu(num_shares: int) -> Iterator[None]:
    """Have the devices `cuda:0`, `cuda:1` ... all be the first GPU, in a `with` block."""
    backends = REGISTRY.replace("backends", (NumpyBackend(), SharedGpu(num_shares)))
    devices = REGISTRY.replace("logical_devices", None)
    try:
        yield
    finally:
        REGISTRY.replace("logical_devices", devices)
        REGISTRY.replace("backends", backends)


@final
@dataclass(frozen=True, slots=True)
class Place:
    """A device, and how much is measured there.

    Attributes:
        kind: "cuda", or "cpu" for a dry run, in which a sleep stands for the work of a device.
        is_quick: Whether a smoke run is wanted.
        cycles_per_ms: How fast the clock of the GPU is.
    """

    kind: str
    is_quick: bool
    cycles_per_ms: int = 0

    @property
    def is_gpu(self) -> bool:
        """Whether there is one."""
        return self.kind == "cuda"

    @property
    def device(self) -> str:
        """The device, as torch names it."""
        return GPU if self.is_gpu else "cpu"

    @property
    def num_rounds(self) -> int:
        """Of each comparison."""
        return 1 if self.is_quick else 9

    def shared(self) -> AbstractContextManager[None]:
        """Have two replicas share the GPU, in a `with` block."""
        return shared_gpu(2) if self.is_gpu else nullcontext()

    def strategy(self, num_replicas: int = 2) -> ar.MirroredStrategy:
        """Return a strategy of replicas on the device."""
        return ar.MirroredStrategy([f"{self.kind}:{i}" for i in range(num_replicas)])

    def work(self, ms: float) -> None:
        """Enqueue work for so many milliseconds, of one of the GPU's many cores."""
        if self.is_gpu:
            import torch

            torch.cuda._sleep(int(ms * self.cycles_per_ms))
        else:
            time.sleep(ms / 1000)

    def wait(self) -> None:
        """Wait for all that the device has to do."""
        if self.is_gpu:
            import torch

            torch.cuda.synchronize()


def find_place(kind: str, *, is_quick: bool) -> Place:
    """Return the GPU, whose clock is measured, or the host.

    Raises:
        SystemExit: If there is no GPU, and torch was built for none.
    """
    if kind == "cpu":
        return Place("cpu", is_quick)
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(
            f"There is no GPU that torch {torch.__version__} can use (built for CUDA: "
            f"{torch.version.cuda}). A dry run without one: --device cpu --quick."
        )
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # at the first time it is loaded
        begin.record()
        torch.cuda._sleep(NUM_CYCLES)
        end.record()
        torch.cuda.synchronize()
    return Place("cuda", is_quick, int(NUM_CYCLES / begin.elapsed_time(end)))
