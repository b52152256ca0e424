"""One replica on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, final

from ..devices import Device, require_device
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
