"""Synchronous data parallelism on the devices of one host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

from ..collectives import CommunicationOptions
from ..devices import Device, list_devices, require_device
from ..values import Variable, VariableOptions
from ._one_device import new_mirrored
from ._strategy import Strategy


@final
class MirroredStrategy(Strategy):
    """Runs one replica per device and keeps variables equal on all of them.

    Args:
        devices: Device names, one per replica; None takes all accelerators, or all logical CPU
            devices if there are none.
        options: How collectives are carried out unless a call says otherwise.

    Raises:
        DeviceError: If a device does not exist.
        ValueError: If there is no device, or one is named twice.
        TypeError: If `options` is neither None nor a CommunicationOptions.

    Example:
        >>> import asyncio
        >>> async def step(x):
        ...     replica = get_replica_context()
        ...     return await replica.all_reduce("sum", x)
        >>> async def main():
        ...     async with MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        ...         return await strategy.run(step, args=(PerReplica([1.0, 2.0]),))
        >>> from aioreplica import PerReplica, get_replica_context
        >>> asyncio.run(main())
        PerReplica({cpu:0: 3.0, cpu:1: 3.0})

    Source:
        tf.distribute.MirroredStrategy.
    """

    def __init__(
        self,
        devices: Sequence[Device | str] | None = None,
        *,
        options: CommunicationOptions | None = None,
    ) -> None:
        super().__init__(_chosen(devices), options)

    def create_variable(self, value: Any, options: VariableOptions) -> Variable:
        """Make a mirrored variable."""
        return new_mirrored(self, value, options)

    def __deepcopy__(self, memo: dict[int, object]) -> MirroredStrategy:
        return MirroredStrategy(self.device_names, options=self.reducer.options)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return partial(MirroredStrategy, options=self.reducer.options), (self.device_names,)


def _chosen(devices: Sequence[Device | str] | None) -> tuple[Device, ...]:
    if devices is None:
        # Of one kind: two libraries may serve the same accelerators under two names.
        return next(filter(None, map(list_devices, ("cuda", "gpu", "tpu", "cpu"))))
    if isinstance(devices, (str, Device)):
        raise ValueError(
            f"MirroredStrategy takes a list of devices, got {devices!r}. Write [{str(devices)!r}], "
            "or use OneDeviceStrategy."
        )
    chosen = tuple(require_device(device) for device in devices)
    if not chosen:
        raise ValueError("MirroredStrategy needs at least one device, got none.")
    seen: set[Device] = set()
    for device in chosen:
        if device in seen:
            names = ", ".join(map(str, chosen))
            raise ValueError(
                f"MirroredStrategy got device {device} twice ({names}). Use each device once; "
                "ar.set_logical_devices('cpu', n) makes more of them."
            )
        seen.add(device)
    return chosen
