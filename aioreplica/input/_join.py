"""Parts of all replicas become one batch of distributed values, on their devices if asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, final

from ..devices import CompletionPort, lane_table, run_on_lane
from ..devices.backends import Backend, find_backends
from ..tree import TreeSpec, unflatten
from ..values import new_per_replica
from ._arrays import Array
from ._spec import spec_of


@final
class Joiner:
    """Makes batches of distributed values.

    Args:
        device_names: One per local replica.
        has_plain_values: Whether batches stay plain (the default strategy).
        to_devices: Whether arrays are brought to their devices.

    Attributes:
        element_spec: Of the first batch, once that was read.
        places: Whether anything has to be brought to a device.
    """

    __slots__ = ("_backends", "_device_names", "_has_plain_values", "element_spec", "places")

    def __init__(
        self, device_names: Sequence[str], *, has_plain_values: bool, to_devices: bool
    ) -> None:
        self._device_names = tuple(device_names)
        self._has_plain_values = has_plain_values
        self._backends: list[Backend | None] = [None] * len(self._device_names)
        if to_devices and not has_plain_values:
            self._backends = [_backend_of_device(name) for name in self._device_names]
        self.element_spec: Any = None
        self.places = any(backend is not None for backend in self._backends)

    def note(self, arrays: list[Array], spec: TreeSpec) -> None:
        """Take note of what a batch looks like on the host."""
        if self.element_spec is None:
            self.element_spec = spec_of(unflatten(spec, arrays))

    async def place(self, parts: list[list[Array]]) -> list[list[Any]]:
        """Return the parts on their devices; each copy is an op on the device's lane."""
        port = CompletionPort.of_running_loop()
        placed: list[list[Any]] = list(parts)
        waiting = {
            i: run_on_lane(lane_table().lane(name), port, _put_all, (backend, parts[i], name), {})
            for i, (name, backend) in enumerate(
                zip(self._device_names, self._backends, strict=True)
            )
            if backend is not None
        }
        for i, leaves in zip(waiting, await asyncio.gather(*waiting.values()), strict=True):
            placed[i] = leaves
        return placed

    def join(self, parts: Sequence[Sequence[Any]], spec: TreeSpec) -> Any:
        """Return the batch: PerReplica leaves, or the plain parts of the only replica."""
        if self._has_plain_values:
            return unflatten(spec, list(parts[0]))
        names = self._device_names
        columns = zip(*parts, strict=True)
        return unflatten(spec, [new_per_replica(column, names) for column in columns])


def _backend_of_device(name: str) -> Backend | None:
    """Return who brings arrays to a device; None for the host's own, where they are already."""
    kind = name.partition(":")[0]
    for backend in find_backends():
        if backend.num_devices(kind) > 0:
            return None if backend.name == "numpy" else backend
    return None


def _put_all(backend: Backend, leaves: list[Array], device: str) -> list[Any]:
    with backend.scope(device):
        return [backend.put(leaf, device) for leaf in leaves]
