"""The strategy interface: scope, run, reduce, gather, and its life on event loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from ..cluster import Workers
from ..collectives import CommunicationOptions, Reducer, require_options
from ..context import PLACE, Place
from ..device_loop import KeptIterators, Topology
from ..devices import Device
from ..errors import ContextError
from ..input import OpenLoops
from ..telemetry import EventLog, Observer, Observers, Recorder, UsageCounters
from ..typing import ReduceOp
from ..values import Variable, VariableStore, default_store
from ._across import Spread, close_workers
from ._combine import Axis, gather_tree, local_results, reduce_tree
from ._device_loops import DeviceLoops
from ._distribute import Distribution
from ._extended import Extended
from ._group_view import GroupView
from ._in_sync import check_in_sync
from ._launch import DEFAULT_OPTIONS, launch, require_runnable
from ._lifecycle import Lifecycle
from ._run_options import RunOptions
from ._scope import Scope
from ._variable_owner import VariableOwner
from ._watching import Watching


class Strategy(Spread, VariableOwner, Distribution, DeviceLoops, Watching):
    """Runs a step function once per replica and combines what the replicas return.

    A strategy is an async context manager; using it without `async with` works too and leaves its
    device threads to process exit. It belongs to the event loop of its first use, and once that
    one is closed to the next one it is used on; variables keep their values. `async with` opens a
    closed strategy again.

    Args:
        devices: One device per replica, or None for the default strategy.
        options: How collectives are carried out unless a call says otherwise.
        topology: Which replica is on which host; None is one host.
        steps_per_run: How many steps `run_steps` runs unless a call says otherwise.
        resolver: What said how many replicas there are, if something did.
        parameter_devices: Where variables live, if not with the replicas.
        workers: The same strategy in other processes, if there are some.
    """

    def __init__(
        self,
        devices: tuple[Device, ...] | None,
        options: CommunicationOptions | None = None,
        *,
        topology: Topology | None = None,
        steps_per_run: int = 1,
        resolver: Any = None,  # Any: the cluster layer may say more than the topology
        parameter_devices: tuple[Device, ...] = (),
        workers: Workers | None = None,
    ) -> None:
        require_options(options, type(self).__name__)
        self._devices = devices
        self._topology = topology
        self._steps_per_run = steps_per_run
        self._resolver = resolver
        self._workers = workers
        self._parameter_devices = parameter_devices
        self._reducer = Reducer(options)
        self._recorder = Recorder()
        self._observers = Observers(Observer(merge_ended=self._recorder.merge_ended))
        self._events = EventLog(observers=self._observers)
        self._scope_place = None if devices is None else Place(self)
        self._merge_place = Place(self, in_merge=True)
        self._blocking_merge_place = Place(self, in_merge=True, holds_devices=True)
        store = default_store() if devices is None else VariableStore(self._observers)
        super().__init__(store)
        self._extended = Extended(self)
        self._open_loops = OpenLoops()
        self._iterators = KeptIterators()
        self._device_names = ("-",) if devices is None else tuple(map(str, devices))
        lane_names = () if devices is None else self._device_names
        if devices is not None:
            UsageCounters.of_process().count_strategy(type(self).__name__, len(devices))
        self._lifecycle = Lifecycle(
            f"<{type(self).__name__}>",
            lane_names,
            is_bound=devices is not None,
            store=store,
            open_loops=self._open_loops,
        )

    # ---- running -------------------------------------------------------------------------

    async def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Run `fn` once per replica, all at once, and return the regrouped results.

        Args:
            fn: `async def`: each replica is an asyncio task. Plain `def`: each replica is one op
                on its device's thread.
            args: Positional arguments, a tuple or list; distributed values anywhere in it are
                replaced by the replica's component.
            kwargs: Keyword arguments, likewise.
            options: Stall timeout and seed.

        Returns:
            The results leaf by leaf: None where every replica returned None, a variable where all
            returned that variable, else a PerReplica; a PerReplica of subtrees where structures
            differ. Under the default strategy, what `fn` returned.

        Raises:
            ValueError: If `args` is not a tuple or list, or a value has the wrong length.
            TypeError: If `fn` is not callable.
            ContextError: If called inside a replica, under another strategy's scope, on a closed
                strategy; or if a collective was never awaited.
            LoopMismatchError: If the strategy is bound to another event loop.
            MergeMismatchError: If the replicas do not meet in the same collectives.
            StallError: If `options.stall_timeout` seconds pass without progress.
            Exception: A failing replica's own exception with a note, or an ExceptionGroup of
                different ones in replica order.

        Cancellation:
            Cancels every replica, waits until all have ended (started device ops included), then
            raises the same CancelledError.

        Determinism:
            Results are in replica order, whatever order the replicas finish in.

        Source:
            tf.distribute.Strategy.run.
        """
        self.require_cross_replica("run", None)
        require_runnable(fn, args, options)
        return await launch(self, self._lifecycle, fn, args, kwargs, options or DEFAULT_OPTIONS)

    def scope(self) -> Scope[Self]:
        """Return a context manager that makes this strategy current.

        That of the default strategy changes nothing, so that code of libraries can be written
        `with ar.get_strategy().scope():`.

        Raises:
            ContextError: On entering inside a replica or another strategy's scope, and on leaving
                in another context.
        """
        return Scope(self, self._scope_place)

    # ---- combining -----------------------------------------------------------------------

    async def reduce(self, op: ReduceOp | str, value: Any, axis: Axis = None) -> Any:
        """Reduce values over replicas, and over `axis` of each component too.

        Args:
            op: SUM, MEAN, MIN or MAX, or its name in any case.
            value: Any pytree of distributed values, such as a result of `run`.
            axis: Axes of each component to reduce as well; sizes along them may differ, and MEAN
                divides by the true number of elements.

        Returns:
            The pytree with one value per leaf. MEAN, MIN and MAX of a Mirrored give its value.

        Raises:
            ValueError: If `op` is unknown, a leaf is a plain value (with several replicas), a sum
                of a Mirrored is asked for, or shapes or dtypes differ.
            TypeError: If a leaf is not numeric.
            ContextError: If called inside a replica (use `ctx.all_reduce`).

        Determinism:
            In ascending replica id; bitwise reproducible.

        Source:
            tf.distribute.Strategy.reduce.
        """
        self.require_cross_replica("reduce", "ctx.all_reduce(op, value)")
        self._lifecycle.open()
        return await reduce_tree(self, ReduceOp.parse(op), value, axis, None)

    async def gather(self, value: Any, axis: int) -> Any:
        """Join the components of distributed values along `axis`, in replica order.

        Raises:
            ValueError: If a component is a scalar or has no such axis, shapes differ outside it,
                or a leaf is a plain value (with several replicas).
            ContextError: If called inside a replica (use `ctx.all_gather`).
        """
        self.require_cross_replica("gather", "ctx.all_gather(value, axis)")
        self._lifecycle.open()
        return await gather_tree(self, value, axis)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return one entry per replica, selected through pytrees.

        A value without distributed leaves gives `(value,)`.
        """
        return local_results(value)

    async def check_in_sync(self, variables: Sequence[Variable]) -> None:
        """Check that the components of mirrored variables are equal, bit for bit.

        Sync-on-read variables are passed over.

        Raises:
            OutOfSyncError: If they are not; names variable, replica, first index and difference.
            ValueError: If there is no variable.
            TypeError: If something else than variables was given.
            ContextError: If called inside a replica, or for variables of another strategy.
        """
        self._lifecycle.open()
        await check_in_sync(self, variables)

    # ---- describing ----------------------------------------------------------------------

    @property
    def members(self) -> None:
        """None: values are those of all replicas, see `view_of`."""
        return None

    def view_of(self, members: Sequence[int]) -> Strategy | GroupView:
        """Return what combines the values of some of the replicas: of a group of a step.

        Args:
            members: Their ids, ascending; if these are all replicas the strategy itself is
                returned.
        """
        is_whole = len(members) == len(self._device_names) and self._workers is None
        return self if is_whole else GroupView(self, members)

    @property
    def cluster_resolver(self) -> Any:
        """Resolver of hosts and workers; None for a strategy that needs none."""
        return self._resolver

    @property
    def extended(self) -> Extended:
        """Devices, and updates of single components."""
        return self._extended

    @property
    def reducer(self) -> Reducer:
        """Reducer that carries out collectives on arrays."""
        return self._reducer

    @property
    def recorder(self) -> Recorder:
        """The newest merges of all runs."""
        return self._recorder

    @property
    def observers(self) -> Observers:
        """Observers of the runs of this strategy."""
        return self._observers

    @property
    def replica_devices(self) -> tuple[Device | None, ...]:
        """One device per replica; None under the default strategy."""
        return (None,) if self._devices is None else self._devices

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        """Devices of the variables; empty if each replica has a copy on its own device."""
        return self._parameter_devices

    @property
    def device_names(self) -> tuple[str, ...]:
        """One device name per replica; "-" under the default strategy."""
        return self._device_names

    @property
    def merge_place(self) -> Place:
        """Place in which merge functions of this strategy run."""
        return self._merge_place

    @property
    def blocking_merge_place(self) -> Place:
        """The same for merge functions that device threads wait for."""
        return self._blocking_merge_place

    @property
    def has_plain_values(self) -> bool:
        """True if values stay plain instead of becoming PerReplica (the default strategy)."""
        return self._devices is None

    async def aclose(self) -> None:
        """Close the strategy: end runs and loops over datasets, give threads back. Idempotent.

        A loop that was broken off outside `async with` is told with a ResourceWarning.

        Raises:
            ContextError: If called inside a replica.
            LoopMismatchError: If called on another event loop while its own is open.

        Cancellation:
            Runs in progress are waited for in any case.
        """
        try:
            await self._lifecycle.aclose()
        finally:
            if self._lifecycle.state == "closed":
                self._reducer.clear()
                self._iterators.close()
                await self._open_loops.aclose(repr(self))
                await close_workers(self._workers)

    def abandon(self) -> None:
        """Close at once because the interpreter is interrupted; started ops are left running."""
        self._lifecycle.close_now()
        if self._workers is not None:
            self._workers.abandon()

    def open(self) -> None:
        """Bind to the running loop, at the first use.

        Raises:
            ContextError: If the strategy is closed.
            LoopMismatchError: If it is bound to another loop.
        """
        self._lifecycle.open()

    async def __aenter__(self) -> Self:
        self._lifecycle.reopen()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def require_cross_replica(self, what: str, twin: str | None) -> None:
        """Check that a cross-replica method is called where this strategy may be in charge.

        Raises:
            ContextError: Inside a replica or an update, or under another strategy.
        """
        place = PLACE.get()
        if place.is_in_step:
            advice = f"Use {twin} there" if twin else "Call it outside the step"
            raise ContextError(
                f"{what} is a cross-replica method but was called in {place.describe()}. {advice}."
            )
        if place.strategy is not None and place.strategy is not self:
            raise ContextError(
                f"{what} of {self!r} was called in {place.describe()}. Leave that scope first."
            )

    def _as_strategy(self) -> Strategy:
        return self

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be shallow-copied: two objects would share one life. "
            "copy.deepcopy gives an unopened equal strategy."
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Strategy):
            return NotImplemented
        if type(self) is not type(other) or self._devices != other._devices:
            return False
        return self._settings() == other._settings()

    def _settings(self) -> tuple[object, ...]:
        return (
            self._topology, self._steps_per_run, self._reducer.options, self._parameter_devices
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((type(self), self._devices))

    def __repr__(self) -> str:
        devices = "" if self._devices is None else f" {', '.join(self._device_names[:8])}"
        more = ", ..." if len(self._device_names) > 8 else ""
        return f"<{type(self).__name__}{devices}{more} | {self._lifecycle.state}>"
