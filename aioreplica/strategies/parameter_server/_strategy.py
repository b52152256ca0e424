"""The strategy of parameter servers: variables live there, closures run on workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, final

from ...cluster import ClosureEngine, DaskClosureEngine
from ...devices import OwnedTask
from ...errors import ContextError
from ...values import Snapshot, StepGate, Variable, VariableOptions
from .._mirrored import chosen_devices
from .._runtime import Runtime
from .._strategy import Strategy
from ._elsewhere import Elsewhere
from ._messages import CoordinatorStatistics
from ._packing import HomeSide, pack_call
from ._partition import PartitionFn, cut_rows
from ._progress import Reopened
from ._queue import ScheduledClosure
from ._servers import Servers
from ._variables import new_served

if TYPE_CHECKING:
    from ._runner import ClosureRunner


class Coordinator(Protocol):
    """Interface of the coordinator for its strategy."""

    def statistics(self) -> CoordinatorStatistics:
        """Return what it and the parameter servers have done; from any thread."""

    async def end_with_cluster(self) -> None:
        """End what was going on in a cluster that is lost."""

    def begin_with_cluster(self) -> None:
        """Run closures on a cluster that is there again."""

    async def aclose(self) -> None:
        """End what is not over, and belong to the strategy no more."""


class Manager(Protocol):
    """Interface of a `CheckpointManager` for `reopen`."""

    async def restore(self, state: object) -> int:
        """Restore the newest step; return it."""


@final
class ParameterServerStrategy(Strategy):
    """Keeps variables on parameter servers and lets a `ClusterCoordinator` run closures on workers.

    Variables made in its scope live on the servers in turn, whole or in shards of rows. Closures
    pull what they read and push what they write; optimizers update a variable where it lives, with
    their slots beside it. The values are gone when the strategy is closed: save a checkpoint.

    Args:
        resolver_or_client: The cluster: the address of a Dask scheduler, a `distributed.Client` of
            the running loop, or a `ClosureEngine`. None starts a local cluster of processes, which
            needs `if __name__ == "__main__":` in the program, as they import it.
        num_ps: How many parameter servers.
        num_workers: How many workers a local cluster has.
        variable_partitioner: Cuts variables into shards; None keeps them whole.
        max_staleness: Gradients computed from a value that was replaced more often than this are
            dropped; None drops none.
        replicate: Whether each parameter server has a copy in another of their processes, which
            takes its place when it is lost. Needs two of them at least.
        security: A `distributed.Security` for an address.

    Raises:
        ImportError: If Dask distributed is not installed.
        TypeError: If an argument is of the wrong type.
        ValueError: If a number is out of range.

    Source:
        tf.distribute.ParameterServerStrategy.
    """

    def __init__(
        self,
        resolver_or_client: object = None,
        *,
        num_ps: int = 1,
        num_workers: int = 2,
        variable_partitioner: PartitionFn | None = None,
        max_staleness: int | None = None,
        replicate: bool = False,
        security: object = None,
    ) -> None:
        if max_staleness is not None:
            check_count("max_staleness", max_staleness, 0)
        check_count("num_ps", num_ps, 1)
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise TypeError(
                "variable_partitioner must be a function of shape and dtype, such as "
                f"ar.FixedShardsPartitioner(2), got {variable_partitioner!r}."
            )
        engine = _engine_of(resolver_or_client, num_workers, security)
        self._num_ps = num_ps
        self._partitioner = variable_partitioner
        self._servers = Servers(engine, num_ps, max_staleness, replicate, self._require_open)
        self._coordinator: Coordinator | None = None
        self.runner: ClosureRunner | None = None  # the last one, which knows what still runs
        self._next_closure = 0
        self._reopening: OwnedTask[Reopened] | None = None
        super().__init__(
            chosen_devices("ParameterServerStrategy", ["cpu:0"]),
            self._new_variable,
            elsewhere=Elsewhere(self._servers),
        )

    def _require_open(self) -> None:
        self._runtime.open()

    # ---- variables -------------------------------------------------------------------------

    def _new_variable(self, runtime: Runtime, value: Any, options: VariableOptions) -> Variable:
        """Make a variable, to be placed on its servers at the next occasion."""
        cuts = cut_rows(self._partitioner, options.name, value.shape, value.dtype)

        rows_from = options.rows_from
        packed = None
        if rows_from is not None:
            what = f"The initial value of {options.name!r}"
            packed = pack_call(rows_from, (), {}, HomeSide(self), what)

        def make(name: str) -> Variable:
            spec = self._servers.places.new_spec(name, value, options.trainable, cuts)
            named = VariableOptions(
                name, options.trainable, options.aggregation, options.synchronization,
                options.constraint,
            )  # fmt: skip
            variable = new_served(spec, named, runtime.store, self._servers, value)
            self._servers.add(variable, packed)
            return variable

        return runtime.variable_table.add(options.name, make)

    @property
    def num_ps(self) -> int:
        """Number of parameter servers."""
        return self._num_ps

    @property
    def num_workers(self) -> int:
        """Number of workers, as far as is known."""
        return self.engine.num_workers

    @property
    def variable_partitioner(self) -> PartitionFn | None:
        """Function that cuts variables into shards."""
        return self._partitioner

    @property
    def engine(self) -> ClosureEngine:
        """Engine that runs servers and workers."""
        return self._servers.engine

    @property
    def servers(self) -> Servers:
        """The parameter servers; for the library."""
        return self._servers

    @property
    def lost_variables(self) -> tuple[str, ...]:
        """Names of the variables that were lost with a parameter server and not restored."""
        return tuple(variable.name for variable in self._servers.lost_variables)

    @property
    def unreplicated_servers(self) -> tuple[int, ...]:
        """Numbers of parameter servers without a copy, with `replicate=True`."""
        copies = self._servers.copies
        return () if copies is None else copies.alone

    # ---- for its coordinator -----------------------------------------------------------------

    @property
    def coordinator(self) -> Coordinator | None:
        """The open coordinator; None if there is none."""
        return self._coordinator

    def take_coordinator(self, coordinator: Coordinator) -> None:
        """Belong to a coordinator.

        Raises:
            ContextError: If the strategy belongs to another one, or is closed.
        """
        self._runtime.open()
        if self._coordinator is not None and self._coordinator is not coordinator:
            raise ContextError(
                f"{self!r} has a coordinator already: {self._coordinator!r}. Use that one, or "
                "close it first."
            )
        self._coordinator = coordinator

    def drop_coordinator(self, coordinator: Coordinator) -> None:
        """Belong to it no more."""
        if self._coordinator is coordinator:
            self._coordinator = None

    @property
    def gate(self) -> StepGate:
        """Gate that holds closures back while a checkpoint reads or replaces the variables."""
        return self._runtime.store.gate

    def new_step(self) -> int:
        """Number a closure; no number comes twice, though a checkpoint may take steps back."""
        number = max(self._next_closure, self.gate.next_step)
        self._next_closure = self.gate.next_step = number + 1
        return number

    def closure_began(self, closure: ScheduledClosure) -> None:
        """Count a closure under way."""
        self._runtime.lifecycle.started(closure)  # type: ignore[arg-type]  # it has a step and an abort

    def closure_ended(self, closure: ScheduledClosure) -> None:
        """Forget one."""
        self._runtime.lifecycle.ended(closure)  # type: ignore[arg-type]  # as above

    # ---- what needs replicas -----------------------------------------------------------------

    async def run(self, *args: Any, **kwargs: object) -> NoReturn:
        """Refuse: closures are scheduled.

        Raises:
            ContextError: Always.
        """
        raise self._use_coordinator("run")

    async def run_steps(self, *args: Any, **kwargs: object) -> NoReturn:
        """Refuse: closures are scheduled.

        Raises:
            ContextError: Always.
        """
        raise self._use_coordinator("run_steps")

    def distribute_dataset(self, *args: Any, **kwargs: object) -> NoReturn:
        """Refuse: workers have datasets of their own.

        Raises:
            ContextError: Always.
        """
        raise self._use_per_worker("distribute_dataset")

    def distribute_datasets_from_function(self, *args: Any, **kwargs: object) -> NoReturn:
        """Refuse: workers have datasets of their own.

        Raises:
            ContextError: Always.
        """
        raise self._use_per_worker("distribute_datasets_from_function")

    def snapshot(self, *variables: Variable) -> Snapshot:
        """Refuse: values are on the servers.

        Raises:
            ContextError: Always.
        """
        raise ContextError(
            f"{self!r} has no snapshots: the values of its variables live on parameter servers. "
            "Use `await variable.read()`."
        )

    def _use_per_worker(self, what: str) -> ContextError:
        return ContextError(
            f"{what} was called on {self!r}, whose steps run on workers. Use "
            "`coordinator.create_per_worker_dataset(dataset_fn)`."
        )

    def _use_coordinator(self, what: str) -> ContextError:
        return ContextError(
            f"{what} was called on {self!r}, which has no replicas here. Use `async with "
            "ar.ClusterCoordinator(strategy) as coordinator:` and `await "
            "coordinator.schedule(fn, args)`."
        )

    # ---- its life ----------------------------------------------------------------------------

    async def reopen(
        self, resolver_or_client: object = None, *, security: object = None,
        manager: Manager | None = None, state: object = None,
    ) -> Reopened:  # fmt: skip
        """Begin anew on another cluster after the loss of the scheduler, or of a server.

        Servers are made anew, and a checkpoint brings the variables back, with their slots; the
        iterators of per-worker datasets go back with it, so that each element is learned once. What
        workers have for themselves is made anew. The coordinator and the variables stay the same
        objects. Results that were not fetched are lost.

        Args:
            resolver_or_client: The cluster, as in the constructor; None connects to the same
                address again, or starts the processes of an own cluster anew. A connection that
                was not lost is kept, also for another client of its scheduler.
            security: As in the constructor, for another address.
            manager: The `CheckpointManager`, whose newest step is restored. Without it the
                variables stay lost until they are restored or assigned, and iterators have ended.
            state: The state that was saved with it.

        Returns:
            What was restored, and which closures were lost.

        Raises:
            ContextError: If the strategy is closed (meanwhile, too) or not begun, has lost nothing,
                or is being reopened already.
            TypeError: If `manager` has no method `restore`.
            ValueError: If `manager` comes without `state`, `security` without an address, or the
                cluster has too few processes.
            CheckpointError: As `CheckpointManager.restore`.
            ConnectionError: If the cluster cannot be reached.

        Cancellation:
            Leaves the cluster lost, as an error does: call it again.
        """
        self._runtime.open()
        servers = self._servers
        if (manager is None) != (state is None):
            raise ValueError("reopen takes a manager together with the state that it restores.")
        if manager is not None and not callable(getattr(manager, "restore", None)):
            raise TypeError(f"manager must be a CheckpointManager, got {manager!r}.")
        if security is not None and resolver_or_client is None:
            raise ValueError("reopen takes security together with an address.")
        if servers.is_reopening or not servers.has_lost:
            why = "is being reopened" if servers.is_reopening else "has not lost its cluster"
            raise ContextError(f"{self!r} {why}, so it cannot be reopened. Nothing was changed.")
        engine = _next_engine(servers.engine, resolver_or_client, security)
        servers.is_reopening = True
        servers.give_up()  # before the first await: cancelled from here on, all is lost
        self._reopening = OwnedTask(self._begin_anew(engine, manager, state), "reopening")
        try:
            return await self._reopening
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and not caller.cancelling():
                self._runtime.open()  # closing it was the reason: this says so
            raise
        finally:
            servers.is_reopening, self._reopening = False, None

    async def _begin_anew(
        self, engine: ClosureEngine, manager: Manager | None, state: object
    ) -> Reopened:
        step = None
        if self._coordinator is not None:
            await self._coordinator.end_with_cluster()
        await self._servers.reopen(engine)
        if manager is not None:
            step = await manager.restore(state)
        found = await self._servers.go_back(step, self.gate.next_step)
        self._runtime.open()
        self._servers.is_reopening = False
        if self._coordinator is not None:
            self._coordinator.begin_with_cluster()
        return found

    async def aclose(self) -> None:
        """End closures and the coordinator, disconnect, and end a local cluster. Idempotent."""
        try:
            await super().aclose()
        finally:
            if self._runtime.lifecycle.state == "closed":
                try:
                    if self._reopening is not None:
                        self._reopening.cancel()
                        await self._reopening.ended()
                    if self._coordinator is not None:
                        await self._coordinator.aclose()
                    if self.runner is not None:
                        await self.runner.leave()
                finally:
                    await self._servers.aclose()

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise TypeError(f"{self!r} cannot be copied: a cluster is its own. Make another one.")

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        raise TypeError(f"{self!r} cannot be pickled: a cluster is its own. Make another one.")


def _engine_of(cluster: object, num_workers: int, security: object) -> ClosureEngine:
    if isinstance(cluster, ClosureEngine):
        return cluster
    return DaskClosureEngine(cluster, num_workers=num_workers, security=security)


def _next_engine(engine: ClosureEngine, cluster: object, security: object) -> ClosureEngine:
    """Return the engine of a cluster; the one before, if that has a connection to it already.

    That connection knows what still runs on the workers, which another one could not ask.
    """
    if cluster is None or isinstance(cluster, ClosureEngine):
        return engine if cluster is None else cluster
    other = DaskClosureEngine(cluster, num_workers=engine.num_workers or 1, security=security)
    is_there = isinstance(engine, DaskClosureEngine) and engine.is_connected_for(other)
    return engine if is_there else other


def check_count(name: str, value: Any, lowest: int) -> None:
    """Check a number that was given.

    Raises:
        TypeError: If it is not an int.
        ValueError: If it is below the lowest.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}.")
    if value < lowest:
        raise ValueError(f"{name} must be at least {lowest}, got {value!r}.")
