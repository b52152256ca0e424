"""Which devices this process has, splitting the host into logical ones, and the current one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from ..context import DEVICE, PLACE, REGISTRY
from ..errors import DeviceError
from ._spec import Device
from .backends import find_backends

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

    def split(self, kind: str, count: int) -> None:
        """Set how many logical devices of `kind` there are."""
        if self.frozen:
            raise DeviceError(
                f"Cannot split {kind!r} into {count} logical devices: the device list is in use. "
                "Call ar.set_logical_devices at program start, before any strategy or "
                "ar.list_devices.",
                device=kind,
            )
        self._counts[kind] = count

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
            self._counts[kind] = max(b.num_devices(kind) for b in find_backends())
        return self._counts[kind]


def _logical_devices() -> LogicalDevices:
    return REGISTRY.once("logical_devices", LogicalDevices)


def set_logical_devices(kind: str, count: int) -> None:
    """Split the host into `count` logical devices of `kind`, before their first use.

    Args:
        kind: "cpu", the only kind that can be split.
        count: How many there shall be, at least 1.

    Raises:
        ValueError: If the kind cannot be split, or `count` is below 1.
        DeviceError: If a strategy or `list_devices` has looked at the devices already.

    Source:
        tf.config.set_logical_device_configuration.
    """
    if str(kind).lower() != "cpu":
        raise ValueError(f"Only 'cpu' can be split into logical devices, got {kind!r}.")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"The number of logical devices must be an int >= 1, got {count!r}.")
    _logical_devices().split("cpu", count)


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


def require_device(name: Device | str) -> Device:
    """Return the device called `name`, which must exist in this process.

    Raises:
        DeviceError: If there is no such device; the text lists those there are.
        ValueError: If `name` is not a device name.
    """
    device = Device(name)
    if _logical_devices().has(device):
        return device
    hint = ""
    if device.kind == "cpu":
        hint = f" Call ar.set_logical_devices('cpu', {device.index + 1}) at program start for more."
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
