"""Interfaces of a strategy, or of a group of its replicas, within this package."""

from __future__ import annotations

from typing import Protocol

from ..cluster import Workers
from ..collectives import Reducer
from ..context import CurrentStrategy, Place
from ..devices import Device
from ..telemetry import EventLog, Observers, Recorder
from ._across import HasVariables


class ReplicaSet(CurrentStrategy, Protocol):
    """Replicas whose values are combined outside them: all of a strategy, or a group."""

    @property
    def reducer(self) -> Reducer:
        """Reducer that carries out collectives on arrays."""

    @property
    def members(self) -> tuple[int, ...] | None:
        """Their ids in the strategy, ascending; None for all."""

    @property
    def device_names(self) -> tuple[str, ...]:
        """One device name per replica; "-" under the default strategy."""

    @property
    def workers(self) -> Workers | None:
        """The same strategy on other workers; None if there are none."""

    def require_cross_replica(self, what: str, twin: str | None) -> None:
        """Check that a cross-replica method is called where the strategy may be in charge."""

    def open(self) -> None:
        """Bind the strategy to the running loop, at the first use."""


class Runner(ReplicaSet, HasVariables, Protocol):
    """A strategy as those see it who start its replicas."""

    @property
    def recorder(self) -> Recorder:
        """The newest merges of all runs."""

    @property
    def observers(self) -> Observers:
        """Observers of runs."""

    @property
    def events(self) -> EventLog:
        """Events that device loops reported."""

    @property
    def replica_devices(self) -> tuple[Device | None, ...]:
        """One device per replica; None under the default strategy."""

    @property
    def merge_place(self) -> Place:
        """Place in which merge functions of this strategy run."""

    @property
    def blocking_merge_place(self) -> Place:
        """The same for merge functions that device threads wait for."""

    @property
    def host_replicas(self) -> tuple[tuple[int, ...], ...]:
        """The replica ids of each host."""
