"""Strategies for the devices of one host: all of them or one, with variables on each or on one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, final

from ..collectives import CommunicationOptions
from ..devices import Device, list_devices, require_device
from ..typing import VariableSynchronization
from ..values import (
    CentralVariable,
    DividedVariable,
    MirroredVariable,
    SyncOnReadVariable,
    Variable,
    VariableOptions,
)
from ._runtime import Runtime
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
        super().__init__(chosen_devices("MirroredStrategy", devices), new_mirrored, options)

    def __deepcopy__(self, memo: dict[int, object]) -> MirroredStrategy:
        return MirroredStrategy(self._runtime.device_names, options=self._runtime.reducer.options)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        runtime = self._runtime
        make = partial(MirroredStrategy, options=runtime.reducer.options)
        return make, (runtime.device_names,)


@final
class CentralStorageStrategy(Strategy):
    """Runs one replica per device and keeps one copy of each variable, which all replicas read.

    An update is computed once, and not once per replica; so state that a rule keeps beside the
    variables exists once too. On-read variables have a component per replica, as everywhere.

    Args:
        compute_devices: Device names, one per replica; None takes all accelerators, or all logical
            CPU devices if there are none.
        parameter_device: Where the variables live; None takes the one compute device, or the first
            CPU device if there are several.

    Raises:
        DeviceError: If a device does not exist.
        ValueError: If there is no compute device, or one is named twice.

    Example:
        >>> from aioreplica import Variable
        >>> strategy = CentralStorageStrategy(["cpu:0", "cpu:1"])
        >>> strategy.extended.parameter_devices
        (Device('cpu:0'),)
        >>> with strategy.scope():
        ...     w = Variable([1.0, 2.0], name="w")
        >>> w.num_copies, strategy.num_replicas_in_sync
        (1, 2)

    Source:
        tf.distribute.experimental.CentralStorageStrategy.
    """

    def __init__(
        self,
        compute_devices: Sequence[Device | str] | None = None,
        parameter_device: Device | str | None = None,
    ) -> None:
        chosen = chosen_devices("CentralStorageStrategy", compute_devices)
        if parameter_device is not None:
            home = require_device(parameter_device)
        else:
            home = chosen[0] if len(chosen) == 1 else list_devices("cpu")[0]
        super().__init__(chosen, new_mirrored, parameter_devices=(home,))

    def __deepcopy__(self, memo: dict[int, object]) -> CentralStorageStrategy:
        runtime = self._runtime
        return CentralStorageStrategy(runtime.device_names, runtime.parameter_devices[0])

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        runtime = self._runtime
        return CentralStorageStrategy, (runtime.device_names, str(runtime.parameter_devices[0]))


def chosen_devices(name: str, devices: Sequence[Device | str] | None) -> tuple[Device, ...]:
    """Return the devices of a strategy's replicas; None takes all of the best kind there is.

    Raises:
        DeviceError: If a device does not exist.
        TypeError: If `devices` is not a list.
        ValueError: If there is none, or one is named twice.
    """
    if devices is None:
        # Of one kind: two libraries may serve the same accelerators under two names.
        return next(filter(None, map(list_devices, ("cuda", "gpu", "tpu", "cpu"))))
    if isinstance(devices, (str, Device)):
        raise ValueError(
            f"{name} takes a list of devices, got {devices!r}. Write [{str(devices)!r}], "
            "or use OneDeviceStrategy."
        )
    if not isinstance(devices, Iterable):
        raise TypeError(f"{name} takes a list of devices such as ['cpu:0'], got {devices!r}.")
    asked = tuple(devices)
    chosen = tuple(require_device(device, asked) for device in asked)
    if not chosen:
        raise ValueError(f"{name} needs at least one device, got none.")
    seen: set[Device] = set()
    for device in chosen:
        if device in seen:
            names = ", ".join(map(str, chosen))
            raise ValueError(
                f"{name} got device {device} twice ({names}). Use each device once; "
                f"ar.set_logical_devices('cpu', {len(chosen)}) at program start makes as many."
            )
        seen.add(device)
    return chosen


@final
class OneDeviceStrategy(Strategy):
    """Runs one replica on a device of your choice, with the same code as for many.

    Args:
        device: Name of the device.

    Raises:
        DeviceError: If there is no such device.
        ValueError: If `device` is not a device name.

    Source:
        tf.distribute.OneDeviceStrategy.
    """

    def __init__(self, device: Device | str) -> None:
        super().__init__((require_device(device),), new_mirrored)

    def __deepcopy__(self, memo: dict[int, object]) -> OneDeviceStrategy:
        return OneDeviceStrategy(self._runtime.device_names[0])

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return OneDeviceStrategy, (self._runtime.device_names[0],)


def new_mirrored(runtime: Runtime, value: Any, options: VariableOptions) -> Variable:
    """Make a variable of the kind its options ask for, under a name unique in its strategy."""
    synchronization = options.synchronization
    if synchronization is VariableSynchronization.NONE:
        raise ValueError(
            f"Variable {options.name!r} got synchronization='none', which {runtime!r} does not "
            "support. Use 'auto', 'on_write' or 'on_read'."
        )
    is_on_read = synchronization is VariableSynchronization.ON_READ
    merged = CentralVariable if runtime.parameter_devices else MirroredVariable
    kind = SyncOnReadVariable if is_on_read else merged

    def make(name: str) -> Variable:
        named = dataclasses.replace(
            options, name=name, trainable=options.trainable and not is_on_read
        )
        if options.division is not None:
            return DividedVariable(value, named, runtime.num_local_replicas, runtime.store)
        return kind(value, named, runtime.num_local_replicas, runtime.store)

    return runtime.variable_table.add(options.name, make)
