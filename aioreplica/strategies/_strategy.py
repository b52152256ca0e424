"""The strategy interface: scope, run, reduce, gather, and its life on event loops."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeAlias, TypeVar, overload

import numpy as np

from ..collectives import CommunicationOptions, require_options
from ..devices import Device
from ..telemetry import EventLog, Observers, Recorder, ReplicaWait, UsageCounters
from ..tree import Tree
from ..typing import OpName, ReduceOp
from ..values import PerReplica, Snapshot, Variable, VariableOptions, take_snapshot, wait_error
from ._combine import Axis, gather_tree, local_results, reduce_tree
from ._extended import Extended, GroupView
from ._launch import DEFAULT_OPTIONS, RunOptions, as_int, launch, require_runnable
from ._lifecycle import StrategyStatistics
from ._runtime import Replicas, Runtime, Scope
from ._watching import Telemetry, Tracing

if TYPE_CHECKING:  # these load when they are used
    from ..cluster import Workers
    from ..device_loop import MultiStepContext, Topology
    from ..input import DistributedDataset, InputContext, InputOptions
    from ._distribute import ValueContext
    from ._loop_watch import LoopWatch

T = TypeVar("T")
AsyncFunction: TypeAlias = Callable[..., Coroutine[object, None, T]]
Args: TypeAlias = Sequence[Tree]
Kwargs: TypeAlias = dict[str, Tree] | None
Opts: TypeAlias = RunOptions | None
L = TypeVar("L", bound=np.ndarray[Any, Any] | np.generic | complex | str | bytes)
"""Leaf of a result, which `run` puts into a PerReplica; anything else is regrouped by its type."""


class Strategy:
    """Runs a step function once per replica and combines what the replicas return.

    A strategy is an async context manager; using it without `async with` works too and leaves its
    device threads to process exit. It belongs to the event loop of its first use, and once that
    one is closed to the next one it is used on; variables keep their values. `async with` opens a
    closed strategy again.

    Args:
        devices: One device per replica, or None for the default strategy.
        new_variable: Makes its kind of variable.
        options: How collectives are carried out unless a call says otherwise.
        topology: Which replica is on which host; None is one host.
        steps_per_run: How many steps `run_steps` runs unless a call says otherwise.
        resolver: What said how many replicas there are, if something did.
        parameter_devices: Where variables live, if not with the replicas.
        workers: The same strategy in other processes, if there are some.
        elsewhere: Fetcher of values that live on parameter servers; None if they live here.
    """

    def __init__(
        self,
        devices: tuple[Device, ...] | None,
        new_variable: Callable[[Runtime, Any, VariableOptions], Variable],
        options: CommunicationOptions | None = None,
        *,
        topology: Topology | None = None,
        steps_per_run: int = 1,
        resolver: Any = None,  # Any: the cluster layer may say more than the topology
        parameter_devices: tuple[Device, ...] = (),
        workers: Workers | None = None,
        elsewhere: Any = None,  # Any: parameter servers lie above this
    ) -> None:
        require_options(options, type(self).__name__)
        self._steps_per_run = steps_per_run
        self._resolver = resolver
        self._runtime = Runtime(
            self, devices, new_variable, GroupView, options, topology=topology,
            parameter_devices=parameter_devices, workers=workers, elsewhere=elsewhere,
        )  # fmt: skip
        self._extended = Extended(Replicas(self._runtime))
        self._telemetry = Telemetry(self._runtime)
        if devices is not None:
            UsageCounters.of_process().count_strategy(type(self).__name__, len(devices))

    # ---- running -------------------------------------------------------------------------

    @overload
    async def run(
        self, fn: AsyncFunction[L], args: Args = ..., kwargs: Kwargs = ..., options: Opts = ...
    ) -> PerReplica[L]: ...
    @overload
    async def run(
        self, fn: Callable[..., L], args: Args = ..., kwargs: Kwargs = ..., options: Opts = ...
    ) -> PerReplica[L]: ...
    @overload
    async def run(
        self, fn: Callable[..., Any], args: Args = ..., kwargs: Kwargs = ..., options: Opts = ...
    ) -> Tree: ...
    async def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Tree] = (),
        kwargs: dict[str, Tree] | None = None,
        options: RunOptions | None = None,
    ) -> Tree:
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
        runtime = self._runtime
        runtime.require_cross_replica("run", None)
        require_runnable(fn, args, options)
        return await launch(runtime, fn, args, kwargs, options or DEFAULT_OPTIONS)

    async def run_steps(
        self,
        fn: Callable[..., Any],
        iterator: object,
        iterations: int | None = None,
        initial_loop_values: dict[str, Tree] | None = None,
        options: RunOptions | None = None,
        *,
        compile: Literal["jax"] | None = None,  # noqa: A002 - as the peers call it
        every: int | None = None,
    ) -> MultiStepContext:
        """Run many steps on the device threads, in one hop there and back.

        Args:
            fn: A plain function, called as `fn(ctx, *inputs)` for each step; `ctx` is the replica's
                own `MultiStepContext`. Collectives are those of
                `ar.get_replica_context().blocking`.
            iterator: Where the inputs come from, one element per step: a plain or async iterator
                or iterable. A tuple is spread over the inputs, anything else is one; distributed
                values are replaced by the replica's component. The next call on the same iterator
                goes on behind the last step that all replicas have completed, however this ends.
            iterations: How many steps; None takes the strategy's `steps_per_run`.
            initial_loop_values: What `ctx.last_step_outputs` holds in the first step.
            options: Stall timeout and seed.
            compile: "jax" records the step and runs many of it as one program for all replicas.
            every: After how many compiled steps variables are published; None for at the end.

        Returns:
            The outputs of the last step, and how many steps were run: fewer than asked for if the
            iterator of some worker was exhausted, but never half a one.

        Raises:
            TypeError: If `fn` is `async def`, `iterator` yields nothing, or cannot be compiled.
            ValueError: If a number is below 1, or an element looks unlike the first one.
            ContextError: If `fn` is to be compiled, and cannot or the strategy has several workers.
            ImportError: If the compiler is not installed.
            DeviceError: If the compiler has fewer devices than there are replicas.
            MergeMismatchError: If the replicas do not meet in the same collectives or outputs.
            StallError: If `options.stall_timeout` seconds pass without progress.
            WorkerLostError: If another worker has failed, also in reading an element.
            Exception: What a step or the iterator raises, behind the steps before it.

        Cancellation:
            Wakes every thread that waits, in a collective, for its infeed or for the host, and
            waits until all have ended. A plain iterator that blocks its thread is left behind.

        Determinism:
            The same numbers for any split of the steps into calls.

        Source:
            tf.distribute's run_steps_on_iterator, and the host training loop of TPUStrategy.
        """
        from ._run_steps import checked_plan, run_steps

        self._runtime.require_cross_replica("run_steps", None)
        plan = checked_plan(
            fn, iterator, iterations, initial_loop_values, options, self._steps_per_run,
            compile, every,
        )  # fmt: skip
        return await run_steps(self._runtime, plan)

    def scope(self) -> Scope[Self]:
        """Return a context manager that makes this strategy current.

        That of the default strategy changes nothing, so that code of libraries can be written
        `with ar.get_strategy().scope():`.

        Raises:
            ContextError: On entering inside a replica or another strategy's scope, and on leaving
                in another context.
        """
        return Scope(self._runtime)

    # ---- combining -----------------------------------------------------------------------

    async def reduce(self, op: ReduceOp | OpName, value: Tree, axis: Axis = None) -> Tree:
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
        runtime = self._runtime
        runtime.require_cross_replica("reduce", "ctx.all_reduce(op, value)")
        runtime.open()
        return await reduce_tree(Replicas(runtime), ReduceOp.parse(op), value, axis)

    async def gather(self, value: Tree, axis: int) -> Tree:
        """Join the components of distributed values along `axis`, in replica order.

        Raises:
            ValueError: If a component is a scalar or has no such axis, shapes differ outside it,
                or a leaf is a plain value (with several replicas).
            ContextError: If called inside a replica (use `ctx.all_gather`).
        """
        runtime = self._runtime
        runtime.require_cross_replica("gather", "ctx.all_gather(value, axis)")
        runtime.open()
        return await gather_tree(Replicas(runtime), value, axis)

    def local_results(self, value: Tree) -> tuple[Any, ...]:
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
        from ._in_sync import check_in_sync

        self._runtime.open()
        await check_in_sync(self._runtime, variables)

    # ---- feeding ---------------------------------------------------------------------------

    def distribute_dataset(
        self, dataset: object, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Split each global batch of a dataset over the replicas.

        Args:
            dataset: Anything that yields pytrees of arrays whose leading axis counts the examples:
                an `ar.ArrayDataset`, an `ar.Dataset`, a torch DataLoader, any other iterable or
                async iterable, or a function that returns one, called for each epoch.
            options: Reading ahead, what becomes of examples left over, sharding over workers.

        Returns:
            An async iterable of batches whose leaves are PerReplica, each component a contiguous
            part of the global batch; parts differ by one example at most, and may be empty. Use
            it in `async with`, which closes the source.

        Raises:
            TypeError: If `dataset` yields no batches, or `options` are not `ar.InputOptions`.
            ValueError: If the options cannot be met.
            ContextError: If called inside a replica.

        Source:
            tf.distribute.Strategy.experimental_distribute_dataset.
        """
        self._runtime.require_cross_replica("distribute_dataset", None)
        UsageCounters.of_process().count_input("distribute_dataset")
        from ..input import distribute_dataset
        from ._distribute import input_target

        return distribute_dataset(input_target(self._runtime), dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], object],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Feed the replicas from datasets of batches that are already of one replica's size.

        Args:
            dataset_fn: Returns a dataset. Called once per worker, and each replica takes one of its
                batches per step; or, with PER_REPLICA, once for each replica. If it returns an
                iterator, it is called again for each further epoch.
            options: As for `distribute_dataset`.

        Returns:
            An async iterable of PerReplica batches. Where batches run out before every replica has
            got one, the others get empty ones; the loop ends for all replicas together.

        Raises:
            TypeError: If `dataset_fn` is not a function, or returns no dataset.
            ValueError: If the options cannot be met.
            ContextError: If called inside a replica.

        Source:
            tf.distribute.Strategy.distribute_datasets_from_function.
        """
        self._runtime.require_cross_replica("distribute_datasets_from_function", None)
        UsageCounters.of_process().count_input("distribute_datasets_from_function")
        from ..input import distribute_from_function
        from ._distribute import input_target

        return distribute_from_function(input_target(self._runtime), dataset_fn, options)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], object]) -> Tree:
        """Call `value_fn(ValueContext)` once per replica, in order; return a PerReplica.

        Under the default strategy, the one value itself.

        Raises:
            TypeError: If `value_fn` is not a plain function.
            ContextError: If called inside a replica.
        """
        self._runtime.require_cross_replica("distribute_values_from_function", None)
        UsageCounters.of_process().count_input("distribute_values_from_function")
        from ._distribute import values_from_function

        return values_from_function(self._runtime, value_fn)

    # ---- variables -------------------------------------------------------------------------

    def snapshot(self, *variables: Variable) -> Snapshot:
        """Return the values of variables at one version, for readers outside the step.

        Every write (an `assign`, or a whole `apply_gradients`) is in it completely or not at all.
        Cheap enough for every request, callable from any thread.

        Args:
            *variables: Variables of this strategy; none means all of them (not under the default
                strategy, which does not list its variables).

        Raises:
            TypeError: If something else than variables was given.
            ContextError: If a variable belongs to another strategy.
        """
        runtime = self._runtime
        return take_snapshot(runtime.store, variables or runtime.variable_table.all())

    async def wait_for_version(self, variable: Variable, version: int) -> int:
        """Wait until a variable has seen `version` writes; return its version then.

        Raises:
            TypeError: If `variable` is not a variable or `version` not an int.
            ContextError: If it belongs to another strategy, or the strategy is closed before the
                variable has seen so many.

        Cancellation:
            Stops waiting; nothing else changes.
        """
        runtime = self._runtime
        take_snapshot(runtime.store, (variable,))
        count = as_int(version)
        if count is None:
            raise TypeError(f"wait_for_version counts writes with an int, got {version!r}.")
        if runtime.lifecycle.state == "closed" and variable.version < count:
            raise wait_error(variable, count, f"{self!r} is closed.")
        return await runtime.store.wait_for(variable, count)

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """Trainable variables made by this strategy, in order of creation."""
        return self._runtime.trainable_variables

    # ---- describing ------------------------------------------------------------------------

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas of a run."""
        return self._runtime.num_replicas_in_sync

    @property
    def num_local_replicas(self) -> int:
        """Number of replicas in this process, which is the number of components of a value."""
        return self._runtime.num_local_replicas

    @property
    def steps_per_run(self) -> int:
        """Default number of steps of `run_steps`."""
        return self._steps_per_run

    @property
    def cluster_resolver(self) -> Any:
        """Resolver of hosts and workers; None for a strategy that needs none, or got none."""
        return self._resolver

    @property
    def extended(self) -> Extended:
        """Devices, and updates of single components."""
        return self._extended

    # ---- watching --------------------------------------------------------------------------

    @property
    def telemetry(self) -> Telemetry:
        """The entry for watching it: statistics, waits, traces, records, events, observers."""
        return self._telemetry

    @property
    def recorder(self) -> Recorder:
        """The newest merges of all runs; `telemetry.recorder`."""
        return self._runtime.recorder

    @property
    def observers(self) -> Observers:
        """Observers of the runs of this strategy; `telemetry.observers`."""
        return self._runtime.observers

    @property
    def events(self) -> EventLog:
        """Events that steps and device loops recorded, newest last; `telemetry.events`."""
        return self._runtime.events

    def statistics(self) -> StrategyStatistics:
        """Return counts of runs and ops; see `telemetry.statistics`."""
        return self._telemetry.statistics()

    def waiting(self) -> tuple[ReplicaWait, ...]:
        """Return who waits for whom, and where; see `telemetry.waiting`."""
        return self._telemetry.waiting()

    def straggler_report(self) -> str:
        """Say which replica the others wait for; see `telemetry.straggler_report`."""
        return self._telemetry.straggler_report()

    def trace(self, path: str | os.PathLike[str], *, capacity: int = 65_536) -> Tracing:
        """Record a time line while an `async with` block runs; see `telemetry.trace`."""
        return self._telemetry.trace(path, capacity=capacity)

    def watch_loop(
        self, *, threshold_s: float = 0.1, logger: logging.Logger | None = None
    ) -> LoopWatch:
        """Warn of what holds the event loop or the GIL; see `telemetry.watch_loop`."""
        return self._telemetry.watch_loop(threshold_s=threshold_s, logger=logger)

    # ---- its life --------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Close the strategy: end runs and loops over datasets, give threads back. Idempotent.

        A loop that was broken off outside `async with` is told with a ResourceWarning.

        Raises:
            ContextError: If called inside a replica.
            LoopMismatchError: If called on another event loop while its own is open.

        Cancellation:
            Runs in progress are waited for in any case.
        """
        await self._runtime.aclose()

    async def __aenter__(self) -> Self:
        self._runtime.lifecycle.reopen()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._runtime.workers is not None:
            self._runtime.workers.left_by = error
        await self.aclose()

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be shallow-copied: two objects would share one life. "
            "copy.deepcopy gives an unopened equal strategy."
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Strategy):
            return NotImplemented
        return type(self) is type(other) and self._settings() == other._settings()

    def _settings(self) -> tuple[object, ...]:
        runtime = self._runtime
        return (
            runtime.replica_devices, runtime.topology, self._steps_per_run,
            runtime.reducer.options, runtime.parameter_devices,
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((type(self), self._runtime.replica_devices))

    def __repr__(self) -> str:
        runtime = self._runtime
        names = () if runtime.has_plain_values else runtime.device_names
        devices = f" {', '.join(names[:8])}" if names else ""
        more = ", ..." if len(names) > 8 else ""
        return f"<{type(self).__name__}{devices}{more} | {runtime.lifecycle.state}>"
