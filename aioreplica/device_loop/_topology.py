"""Topology: the hosts of a strategy and the cores of each."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Protocol, final


class HasTopology(Protocol):
    """Interface of a resolver that knows the hardware."""

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""

    @property
    def cores_per_host(self) -> int | None:
        """Number of cores of each host; None for all that this process can use."""


@final
@dataclass(frozen=True, slots=True)
class TPUClusterResolver:
    """Says how many hosts there are and how many cores each has.

    Attributes:
        num_hosts: How many hosts.
        cores_per_host: Cores of each; None shares out the devices of this process.

    Raises:
        ValueError: If a number is below 1.
        TypeError: If it is not an int.

    Example:
        >>> TPUClusterResolver(num_hosts=2, cores_per_host=4)
        TPUClusterResolver(num_hosts=2, cores_per_host=4)

    Source:
        tf.distribute.cluster_resolver.TPUClusterResolver and its system metadata.
    """

    num_hosts: int = 1
    cores_per_host: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_hosts", checked_number("num_hosts", self.num_hosts))
        if self.cores_per_host is not None:
            cores = checked_number("cores_per_host", self.cores_per_host)
            object.__setattr__(self, "cores_per_host", cores)


@final
@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """Cores of a topology that replicas run on, one each, so that strategies can share its hosts.

    Attributes:
        cores: Numbers of the cores, ascending: those of the first host, then of the second.

    Raises:
        TypeError: If they are not ints.
        ValueError: If there is none, one is negative, or they do not ascend.

    Example:
        >>> DeviceAssignment((0, 1))
        DeviceAssignment(cores=(0, 1))
        >>> DeviceAssignment(range(2, 4)).cores
        (2, 3)

    Source:
        tf.tpu.experimental.DeviceAssignment.
    """

    cores: Sequence[int]

    def __post_init__(self) -> None:
        try:
            cores = tuple(operator.index(core) for core in self.cores)
        except TypeError:
            raise TypeError(
                f"DeviceAssignment needs a sequence of core numbers, got {self.cores!r}."
            ) from None
        if not cores or cores[0] < 0 or any(a >= b for a, b in pairwise(cores)):
            raise ValueError(
                f"DeviceAssignment needs core numbers from 0 that ascend, got {list(cores)}."
            )
        object.__setattr__(self, "cores", cores)


@final
@dataclass(frozen=True, slots=True)
class Topology:
    """Assignment of replicas to hosts: core after core, host after host.

    Attributes:
        num_cores: How many cores are used, one replica on each.
        cores_per_host: How many cores a host has; the last one in use may use fewer.
        cores: The core of each replica, ascending; empty for the first ones.

    Example:
        >>> topology = Topology(num_cores=6, cores_per_host=4)
        >>> topology.host_replicas
        ((0, 1, 2, 3), (4, 5))
        >>> topology.host_of(4)
        1
    """

    num_cores: int
    cores_per_host: int
    cores: tuple[int, ...] = ()

    @property
    def num_hosts(self) -> int:
        """Number of hosts in use."""
        return len(self.host_replicas) if self.cores else -(-self.num_cores // self.cores_per_host)

    @property
    def host_replicas(self) -> tuple[tuple[int, ...], ...]:
        """The replica ids of each host."""
        size, count = self.cores_per_host, self.num_cores
        if self.cores:
            hosts = groupby(range(count), lambda replica_id: self.cores[replica_id] // size)
            return tuple(tuple(replicas) for _, replicas in hosts)
        return tuple(tuple(range(i, min(i + size, count))) for i in range(0, count, size))

    @property
    def host_ids(self) -> tuple[int, ...]:
        """The number of each host in use, as `host_of` gives it."""
        return tuple(self.host_of(replicas[0]) for replicas in self.host_replicas)

    def host_of(self, replica_id: int) -> int:
        """Return the host of a replica.

        Raises:
            ValueError: If there is no such replica.
        """
        if not 0 <= operator.index(replica_id) < self.num_cores:
            raise ValueError(
                f"There is no replica {replica_id!r}: ids are 0 to {self.num_cores - 1}."
            )
        return self.core_of(replica_id) // self.cores_per_host

    def core_of(self, replica_id: int) -> int:
        """Return the core of a replica, among those of all hosts."""
        return self.cores[replica_id] if self.cores else replica_id

    def assigned(self, assignment: DeviceAssignment) -> Topology:
        """Return the topology of some of the cores.

        Raises:
            ValueError: If there is no such core.
        """
        cores = tuple(assignment.cores)
        if cores[-1] >= self.num_cores:
            raise ValueError(
                f"{assignment!r} has core {cores[-1]}, but cores are 0 to {self.num_cores - 1}."
            )
        return Topology(len(cores), self.cores_per_host, cores)


def find_topology(
    resolver: HasTopology | None, num_cores: int | None, num_available: int
) -> Topology:
    """Return the topology that a resolver and an override give.

    Args:
        resolver: Says hosts and cores; None is one host with every available device.
        num_cores: Uses only so many cores, from the first host on.
        num_available: How many devices there are, for what the resolver leaves open.

    Raises:
        TypeError: If the resolver has no topology, or a number is not an int.
        ValueError: If a number is below 1, the devices cannot be shared out evenly, or there are
            more cores wanted than the topology has.
    """
    if num_cores is not None:
        num_cores = checked_number("num_cores", num_cores)
    if resolver is None:
        count = num_cores or num_available
        return Topology(count, count)
    hosts, cores = _numbers_of(resolver)
    if cores is None:
        if num_available % hosts:
            raise ValueError(
                f"{num_available} devices cannot be shared out evenly over {hosts} hosts. Give the "
                "resolver cores_per_host."
            )
        cores = num_available // hosts
    if num_cores is not None and num_cores > hosts * cores:
        raise ValueError(
            f"num_cores={num_cores} is more than the {hosts * cores} cores of the topology "
            f"({hosts} hosts with {cores} each). Use at most so many, or another resolver."
        )
    return Topology(num_cores or hosts * cores, cores)


def checked_number(name: str, value: Any) -> int:
    """Return a count of hosts or cores as an int.

    Raises:
        TypeError: If it is not an int.
        ValueError: If it is below 1.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}.")
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}.")
    return number


def _numbers_of(resolver: Any) -> tuple[int, int | None]:
    try:
        hosts, cores = resolver.num_hosts, resolver.cores_per_host
    except AttributeError:
        raise TypeError(
            f"A resolver says num_hosts and cores_per_host, got {resolver!r} "
            f"({type(resolver).__name__}). Use ar.TPUClusterResolver(num_hosts, cores_per_host)."
        ) from None
    cores = None if cores is None else checked_number("cores_per_host", cores)
    return checked_number("num_hosts", hosts), cores
