"""The replica context that ops in a device process see: who they are, and what they cannot do."""

from __future__ import annotations

from typing import NoReturn, final

import numpy as np

from ..devices import Device
from ..errors import ContextError
from ..telemetry import checked_scalar
from ._replica import random_stream


@final
class ProcessContext:
    """Stands for a `ReplicaContext` in an op whose device has a process of its own.

    It knows the replica, its device and its random streams, and takes what is recorded. Whatever
    has to meet other replicas, or reach the event loop, is a ContextError that says so.

    Args:
        replica_id: Index of the replica, among those of all workers.
        local_replica_id: Its index among the replicas of its worker.
        num_replicas: How many there are, of all workers.
        device_name: Its device.
        seed: Of the run.
        step: Number of the step.
        strategy: An unopened equal of the program's strategy.
    """

    def __init__(
        self,
        replica_id: int,
        local_replica_id: int,
        num_replicas: int,
        device_name: str,
        seed: int,
        step: int,
        strategy: object,
    ) -> None:
        self.replica_id_in_sync_group = replica_id
        self.local_replica_id = local_replica_id
        self.num_replicas_in_sync = num_replicas
        self.device_name = device_name
        self.strategy = strategy
        self._seed = seed
        self._step = step
        self._recorded: list[tuple[str, float | str]] = []

    @property
    def context(self) -> ProcessContext:
        """The same object: no other stands behind it here."""
        return self

    @property
    def device(self) -> Device:
        """The device of this replica."""
        return Device(self.device_name)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices of this replica: its one device."""
        return (self.device,)

    def rng(self, name: str) -> np.random.Generator:
        """Return the replica's random stream, the same as on a thread."""
        return random_stream(self._seed, self._step, self.replica_id_in_sync_group, name)

    def shared_rng(self, name: str) -> np.random.Generator:
        """Return the random stream that all replicas share."""
        return random_stream(self._seed, self._step, None, name)

    def record(self, name: str, value: float | str) -> None:
        """Record a number or a text; it is in `strategy.events` when the op has ended.

        Raises:
            TypeError: If it is neither.
        """
        if self.replica_id_in_sync_group != 0:
            return  # as on a thread
        found = checked_scalar(name, value)
        if isinstance(found, str):  # of a subclass: its pickle may not be one
            found = str.__str__(found)
        self._recorded.append((str.__str__(name), found))

    def take_recorded(self) -> list[tuple[str, float | str]]:
        """Return what was recorded; for the library."""
        return self._recorded

    def check_running(self) -> None:
        """Do nothing: whether the run goes on is known in the program only."""

    def refusal(self, name: str) -> ContextError:
        """Return the error of a call that cannot be made in a device process."""
        return ContextError(
            f"{name} was called by replica {self.replica_id_in_sync_group} in an op on "
            f"{self.device_name}, which runs in a device process: it can neither meet other "
            "replicas nor reach the event loop. Return what it needs from the op and call it in "
            "the step, or use a device whose ops run in threads."
        )

    @property
    def blocking(self) -> NoReturn:
        """Refused."""
        raise self.refusal("A blocking call")

    @property
    def op_tracker(self) -> NoReturn:
        """Refused: no op can be made here."""
        raise self.refusal("A device op")

    def op_abandoned(self) -> NoReturn:
        """Refused, as `op_tracker`."""
        raise self.refusal("A device op")

    def stand_in(self) -> NoReturn:
        """Refused: a device process has none of its own."""
        raise self.refusal("A device op")

    def __getattr__(self, name: str) -> NoReturn:
        if name in REFUSED:
            raise self.refusal(name)
        raise AttributeError(f"A ReplicaContext in a device process has no {name!r}.", name=name)

    def __repr__(self) -> str:
        me = f"{self.replica_id_in_sync_group}/{self.num_replicas_in_sync}"
        return f"<ProcessContext {me} on {self.device_name} | step {self._step}>"


REFUSED = frozenset({
    "agree", "all", "all_gather", "all_reduce", "all_to_all", "any", "barrier", "broadcast",
    "group", "merge_call", "receive", "reduce_scatter", "run_on_device", "send",
    "start_all_reduce", "update", "variable",
})  # fmt: skip
