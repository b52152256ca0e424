"""Devices of this process: logical devices of the host, and the current device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import final

from ..context import DEVICE, PLACE, REGISTRY
from ..errors import DeviceError
from ._spec import Device
from .backends import ask_jax_for_cpus, find_backends, numpy_backend

KINDS = ("cpu", "cuda", "gpu", "tpu")


@final
class LogicalDevices:
    """The device list of the process: open to changes until its first use.

    Invariants:
        * Once `frozen` is true the list never changes, so an index stays valid for ever.
    """

    def __init__(self) -> None:
        self.frozen = False
        self._counts: dict[str, int] = {}
        self.process_names: frozenset[str] = frozenset()

    def split(self, kind: str, count: int, processes: Sequence[bool] = ()) -> None:
        """Set how many logical devices of `kind` there are, and which of them are processes."""
        chosen = (i for i, is_process in enumerate(processes) if is_process)
        names = frozenset(f"{kind}:{i}" for i in chosen)
        if self.frozen:
            if (self._count(kind), self.process_names) == (count, names):
                return
            options = f", processes={list(processes)}" if any(processes) else ""
            raise DeviceError(
                f"Cannot split {kind!r} into {count} logical devices: the device list is in use, "
                f"with {self._count(kind)}, {len(self.process_names)} of them in device "
                f"processes. Call ar.set_logical_devices({kind!r}, {count}{options}) at program "
                "start, before any strategy or ar.list_devices; in a notebook, restart the kernel.",
                device=kind,
            )
        self._counts[kind] = count
        self.process_names = names

    def has(self, device: Device) -> bool:
        """Tell whether there is such a device, and freeze the list."""
        self.frozen = True
        return device.kind in KINDS and device.index < self._count(device.kind)

    def devices(self, kind: str | None) -> tuple[Device, ...]:
        """Return the devices of `kind`, or all of them, and freeze the list."""
        self.frozen = True
        kinds = KINDS if kind is None else (kind,)
        return tuple(Device(f"{k}:{i}") for k in kinds for i in range(self._count(k)))

    def _count(self, kind: str) -> int:
        if kind not in self._counts:
            backends = (numpy_backend(),) if kind == "cpu" else find_backends()
            self._counts[kind] = max(each.num_devices(kind) for each in backends)
        return self._counts[kind]


def _logical_devices() -> LogicalDevices:
    return REGISTRY.once("logical_devices", LogicalDevices)


def set_logical_devices(kind: str, count: int, *, processes: bool | Sequence[bool] = False) -> None:
    """Split the host into `count` logical devices of `kind`, before their first use.

    jax, which is not imported for it, is asked for as many CPU devices: compiled steps run on them.

    Args:
        kind: "cpu", the only kind that can be split.
        count: How many there shall be, at least 1.
        processes: Whether their ops run in processes, one for each device, and not in
            threads: for all of them, or a sequence of `count` entries. It pays for ops that hold
            the GIL for milliseconds; everything else of a step stays as it is.

    Raises:
        ValueError: If the kind cannot be split, `count` is below 1, or `processes` has another
            length.
        TypeError: If `processes` is neither a bool nor a sequence of them.
        ImportError: If `processes` needs a package that is not installed.
        DeviceError: If a strategy or `list_devices` has looked at the devices already and they are
            others, the system has no such processes, or one that was started imports this program.

    Source:
        tf.config.set_logical_device_configuration.
    """
    if str(kind).lower() != "cpu":
        raise ValueError(f"Only 'cpu' can be split into logical devices, got {kind!r}.")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"The number of logical devices must be an int >= 1, got {count!r}.")
    chosen = _checked_processes(processes, count)
    if any(chosen):
        _require_processes()
    _logical_devices().split("cpu", count, chosen)
    ask_jax_for_cpus(count)


def is_process_device(name: str) -> bool:
    """Tell whether the ops of a device run in a device process."""
    return name in _logical_devices().process_names


def require_threads(names: Iterable[str], what: str, instead: str) -> None:
    """Check that ops of devices run in threads of this process.

    Args:
        names: The devices.
        what: What needs that.
        instead: What to do.

    Raises:
        DeviceError: If one of them has a process of its own.
    """
    for name in names:
        if is_process_device(name):
            raise DeviceError(
                f"{what} cannot run on {name}, whose ops run in a device process. {instead}, or "
                "use devices whose ops run in threads.",
                device=name,
            )


def _checked_processes(processes: bool | Sequence[bool], count: int) -> Sequence[bool]:
    if isinstance(processes, bool):
        return (processes,) * count
    is_sequence = isinstance(processes, Sequence) and not isinstance(processes, str)
    if not is_sequence or not all(isinstance(each, bool) for each in processes):
        raise TypeError(f"processes must be True, False or a sequence of them, got {processes!r}.")
    if len(processes) != count:
        raise ValueError(
            f"processes has {len(processes)} entries for {count} logical devices. Give one each."
        )
    return processes


def _require_processes() -> None:
    import multiprocessing  # no other program needs it

    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise DeviceError(
            "This program asks for devices in processes of their own while such a process imports "
            "it, so each would start more of them. Start its work under "
            "`if __name__ == '__main__':`."
        )
    if find_spec("cloudpickle") is None:
        raise ImportError(
            "Devices in processes of their own need the cloudpickle package, which is not "
            "installed. "
            'Run: pip install "aioreplica[processes]"',
            name="cloudpickle",
        )
    if not hasattr(os, "posix_fallocate") or not hasattr(os, "fork"):
        raise DeviceError(
            "Devices in processes of their own share memory in a way that this system does not "
            "have. Leave `processes` out."
        )


def list_devices(kind: str | None = None) -> tuple[Device, ...]:
    """Return the devices of this process, CPUs first, in order of index.

    The default is one logical CPU device per core, at least 2. The first call fixes the list.

    Raises:
        ValueError: If `kind` is not a device kind at all.

    Example:
        >>> list_devices("cpu")[:2]
        (Device('cpu:0'), Device('cpu:1'))
    """
    if kind is not None:
        kind = str(kind).lower()
        if kind not in KINDS:
            raise ValueError(f"Unknown device kind {kind!r}. Use one of {', '.join(KINDS)}.")
    return _logical_devices().devices(kind)


def require_device(name: Device | str, asked: Iterable[Device | str] = ()) -> Device:
    """Return the device called `name`, which must exist in this process.

    Args:
        name: Of the device.
        asked: All that were asked for, for the count in the error.

    Raises:
        DeviceError: If there is no such device; the text lists those there are.
        ValueError: If `name` is not a device name.
    """
    device = Device(name)
    if _logical_devices().has(device):
        return device
    hint = ""
    if device.kind == "cpu":
        wanted = [device, *map(Device, asked)]
        count = 1 + max(each.index for each in wanted if each.kind == "cpu")
        hint = f" Call ar.set_logical_devices('cpu', {count}) at program start for more."
    names = ", ".join(str(known) for known in list_devices())
    raise DeviceError(
        f"Unknown device {device}: this process has {names}.{hint}", device=str(device)
    )


@contextmanager
def device(name: Device | str) -> Iterator[Device]:
    """Say where ops and results of the cross-replica context go, inside a `with` block.

    Raises:
        DeviceError: If there is no such device.
        ValueError: If `name` is not a device name.

    Example:
        >>> with device("cpu:1"):
        ...     current_device()
        Device('cpu:1')
    """
    chosen = require_device(name)
    token = DEVICE.set(chosen)
    try:
        yield chosen
    finally:
        DEVICE.reset(token)


def current_device() -> Device:
    """Return the device that ops go to here.

    In replica context it is the replica's; elsewhere the innermost `device` block's, else the
    first CPU.
    """
    replica = PLACE.get().replica
    if replica is not None and replica.device_name is not None:
        return Device(replica.device_name)
    chosen = DEVICE.get()
    return chosen if isinstance(chosen, Device) else list_devices("cpu")[0]
