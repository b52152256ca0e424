"""The TPU model: replicas on cores of hosts, many steps per run, fed host by host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import final

from ..device_loop import DeviceAssignment, HasTopology, Topology, find_topology
from ..devices import Device, DeviceSpec, list_devices
from ..errors import DeviceError
from ..values import Done
from ._mirrored import new_mirrored
from ._run_steps import checked_count
from ._strategy import Strategy

JOB = "tpu_worker"


@final
class TPUStrategy(Strategy):
    """Runs one replica per core, with device loops as the usual way to run.

    Cores are the TPU devices of this process if it has any, else its logical CPU devices; the model
    is the same. Core after core, host after host: each host has an infeed of its own.

    Args:
        resolver: Says how many hosts and cores there are: a `TPUClusterResolver`, or anything with
            `num_hosts` and `cores_per_host`. None is one host with all devices.
        steps_per_run: How many steps `run_steps` runs unless a call says otherwise.
        num_cores: Uses only so many cores.
        device_assignment: Uses these cores, one replica on each; in place of `num_cores`.

    Raises:
        DeviceError: If there are more cores than devices.
        ValueError: If a number is below 1, `num_cores` more than the resolver has, the assignment
            has a core that there is not, or both are given.
        TypeError: If `resolver` says nothing of hosts and cores, or a number is not an int.

    Example:
        >>> strategy = TPUStrategy(num_cores=2, steps_per_run=10)
        >>> strategy.num_replicas_in_sync, strategy.num_hosts, strategy.steps_per_run
        (2, 1, 10)

    Source:
        tf.distribute.TPUStrategy.
    """

    def __init__(
        self,
        resolver: HasTopology | None = None,
        *,
        steps_per_run: int = 1,
        num_cores: int | None = None,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        steps = checked_count("steps_per_run", steps_per_run)
        if num_cores is not None and device_assignment is not None:
            raise ValueError(
                f"TPUStrategy got num_cores={num_cores} and {device_assignment!r}, which both say "
                "how many cores there are. Give one of them."
            )
        available = list_devices("tpu") or list_devices("cpu")
        topology = find_topology(resolver, num_cores, len(available))
        if topology.num_cores > len(available):
            raise _too_many_cores(topology, available)
        if device_assignment is not None:
            topology = topology.assigned(device_assignment)
        self._num_cores = num_cores
        self._assignment = device_assignment
        super().__init__(
            tuple(available[topology.core_of(i)] for i in range(topology.num_cores)),
            new_mirrored,
            topology=topology,
            steps_per_run=steps,
            resolver=resolver,
        )

    @property
    def topology(self) -> Topology:
        """Hosts and cores in use."""
        assert self._runtime.topology is not None  # the constructor gave one
        return self._runtime.topology

    @property
    def num_hosts(self) -> int:
        """Number of hosts in use."""
        return self.topology.num_hosts

    @property
    def num_replicas_per_host(self) -> int:
        """Number of replicas per host; a host with fewer cores in use has fewer."""
        return max(map(len, self._runtime.host_replicas))

    def host_of(self, replica_id: int) -> int:
        """Return the host that a replica's core belongs to.

        Raises:
            ValueError: If there is no such replica.
        """
        return self.topology.host_of(replica_id)

    @property
    def replica_names(self) -> tuple[str, ...]:
        """The full name of each replica's core, with the host as its task."""
        return tuple(
            str(
                DeviceSpec(
                    job=JOB,
                    replica=0,
                    task=self.host_of(i),
                    device_type=device.kind.upper(),
                    device_index=self.topology.core_of(i) % self.topology.cores_per_host,
                )
            )
            for i, device in enumerate(self.extended.worker_devices)
        )

    def initialize(self) -> Awaitable[None]:
        """Bind to the running event loop and take the cores' lanes. Idempotent.

        Using the strategy does it too.

        Raises:
            ContextError: If the strategy is closed.
            LoopMismatchError: If it is bound to another loop.
        """
        self._runtime.open()
        return Done()

    async def finalize(self) -> None:
        """Give the cores back; the same as `aclose`. Idempotent."""
        await self.aclose()

    def __deepcopy__(self, memo: dict[int, object]) -> TPUStrategy:
        return self._maker()(self.cluster_resolver)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._maker(), (self.cluster_resolver,)

    def _maker(self) -> partial[TPUStrategy]:
        return partial(
            TPUStrategy,
            steps_per_run=self.steps_per_run,
            num_cores=self._num_cores,
            device_assignment=self._assignment,
        )


def _too_many_cores(topology: Topology, available: tuple[Device, ...]) -> DeviceError:
    kind = available[0].kind
    hint = ""
    if kind == "cpu":
        hint = f" Call ar.set_logical_devices('cpu', {topology.num_cores}) at program start."
    return DeviceError(
        f"TPUStrategy wants {topology.num_cores} cores, but this process has {len(available)} "
        f"{kind} devices.{hint or ' Use fewer cores.'}"
    )
