"""Synchronous data parallelism over several workers, each with the devices of its host."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import TypeVar, final

from .._functions import require_finished, require_no_yield
from ..checkpoint import Savepoint
from ..cluster import (
    ClusterResolver,
    Communicator,
    LocalCommunicator,
    Workers,
    connect,
    is_added,
    resolve,
)
from ..collectives import CommunicationOptions, gather_bytes, require_options
from ..devices import Device
from ._launch import as_int
from ._mirrored import chosen_devices, new_mirrored
from ._runtime import VariableTable
from ._strategy import Strategy

CHANGED = "shrink or grow"
RESIZE = "Do what depends on the number of workers in the function itself, without yielding."

Resize = TypeVar("Resize", bound=Callable[[], object])


@final
class MultiWorkerMirroredStrategy(Strategy):
    """Runs one replica per device of every worker and keeps variables equal on all of them.

    Every worker runs the same program. Collectives combine the values of a worker's own replicas
    first, then what the workers have, in rank order. Variables take the values of worker 0 before
    the first step that follows their making. Merge functions run once per worker, over the values
    of its replicas. `num_replicas_in_sync` and replica ids are global; `local_results` and
    components of values are this worker's.

    Args:
        resolver: Says which of how many workers this is; None asks the launcher's environment, see
            `ar.cluster.resolve`. Or a `Communicator`, which then belongs to the strategy.
        options: How collectives are carried out unless a call says otherwise.

    Raises:
        ValueError: If this process is not a worker, the launcher's variables are malformed, or
            compression is asked for.
        TypeError: If `resolver` is neither a ClusterResolver nor a Communicator, or `options` is
            neither None nor a CommunicationOptions.

    Example:
        >>> import asyncio
        >>> from aioreplica import get_replica_context
        >>> from aioreplica.cluster import LocalCommunicator
        >>> async def step():
        ...     ctx = get_replica_context()
        ...     return await ctx.all_reduce("sum", ctx.replica_id_in_sync_group)
        >>> async def worker(communicator):
        ...     async with MultiWorkerMirroredStrategy(communicator) as strategy:
        ...         result = await strategy.run(step)
        ...         return strategy.local_results(result)[0] == sum(
        ...             range(strategy.num_replicas_in_sync)
        ...         )
        >>> async def main():
        ...     return await asyncio.gather(*map(worker, LocalCommunicator.group(2)))
        >>> asyncio.run(main())
        [True, True]

    Source:
        tf.distribute.MultiWorkerMirroredStrategy.
    """

    def __init__(
        self,
        resolver: ClusterResolver | Communicator | None = None,
        *,
        options: CommunicationOptions | None = None,
    ) -> None:
        require_options(options, "MultiWorkerMirroredStrategy")
        if options is not None and options.compression is not None:
            raise ValueError(
                "MultiWorkerMirroredStrategy got options with compression, which works between the "
                "replicas of one worker only. Leave compression out."
            )
        chosen = resolve() if resolver is None else resolver
        devices = chosen_devices("MultiWorkerMirroredStrategy", None)
        if isinstance(chosen, LocalCommunicator):
            devices = _share(devices, *chosen.place)
        rank, size = _place(chosen)
        workers = Workers(
            partial(_connect, chosen, options),
            rank, size, len(devices), "MultiWorkerMirroredStrategy",
            chosen if isinstance(chosen, Communicator) else None,
            is_new=chosen.is_new if isinstance(chosen, Communicator) else is_added(chosen),
        )  # fmt: skip
        known = None if isinstance(chosen, Communicator) else chosen
        self._resize_fns: list[Callable[[], object]] = []
        super().__init__(devices, new_mirrored, options, resolver=known, workers=workers)

    async def shrink(self, savepoint: Savepoint | None = None) -> None:
        """Go on with the workers that are left, after one was lost; all of them must call this.

        For a `WorkerLostError` of an engine that can go on: MPI started as `mpirun --with-ft ulfm`,
        Gloo without `torchrun`, and a `LocalCommunicator`. Also for a `StallError`, whose workers
        are evicted: with MPI and Gloo they are killed if they are on this host, and ULFM waits
        until those elsewhere are gone; otherwise they get a `WorkerLostError` when they come back.
        Waits for the run in progress to end. Workers are numbered anew, in their order, and
        replicas with them; a `cluster_resolver` then counts those who are left, without their
        addresses. Loops over datasets are ended; with `sharding="data"` or `"off"` the next one is
        shared out among those who are left, and with `"file"` what is left of the files. Functions
        that were given to `on_resize` are called at the end.

        Args:
            savepoint: This worker's state after its newest complete step. The one of the worker
                that has done most steps is put back on all; on-read variables keep what this
                worker's own replicas have, and variables that are not in it stay as they are.
                None leaves the state to you: restore a checkpoint next.

        Raises:
            ContextError: If no worker was lost, the engine cannot go on without one, this is called
                in a step or a merge function, or the strategy was closed meanwhile.
            WorkerLostError: If another worker was lost meanwhile: call it again. Or if it is this
                one that the others have lost.
            StallError: If not all workers that are left came before the timeout. To call it again
                evicts them, but not with MPI.
            CheckpointError: If workers have savepoints of different states.
            Exception: What a function of `on_resize` raises.

        Cancellation:
            Closes the strategy for good: start this worker again.

        Source:
            Horovod's elastic training has the same cycle: commit, shrink, restore, go on.
        """
        if savepoint is not None and not isinstance(savepoint, Savepoint):
            raise TypeError(f"shrink takes an ar.checkpoint.Savepoint or None, got {savepoint!r}.")
        workers = self._between_steps("shrink")
        await workers.shrink()
        async with workers.leaving_if_cancelled("shrink"):
            await self._resized(workers, savepoint, "shrink")

    async def grow(self, num_workers: int, savepoint: Savepoint) -> None:
        """Go on with more workers, in place of those that were lost, or besides all there are.

        All workers call this between two steps, the new ones among them: they run the same program,
        and it is the first thing they do together with others. The new ones take the state of the
        others. Ranks stay, new workers come behind. Does nothing if there are as many already, so a
        program may call it before each loop. Loops over datasets are ended, and the rest of the
        epoch is shared out, as by `shrink`; functions that were given to `on_resize` are called at
        the end.

        For MPI, which starts them as this worker was; it needs as many free slots. For Gloo without
        `torchrun`, whose workers start them so, in turns. And for a `LocalCommunicator` that knows
        how to start them.

        Args:
            num_workers: How many there are to be.
            savepoint: This worker's state; on a new one, what takes the others' values.

        Raises:
            TypeError: If `savepoint` is none, or `num_workers` is not an integer.
            ValueError: If there are more workers already.
            ContextError: If the engine cannot start workers, or this is called in a step. This and
                what is above changes nothing.
            MergeMismatchError: If not all workers ask for as many. Nothing is changed.
            StallError: If a worker did not come before the timeout: names it. Call `shrink` to go
                on without. With MPI it is the end: start all again.
            WorkerLostError: If a worker was lost meanwhile, or with Gloo one could not be started,
                or has ended before it came: call `shrink`.
            CheckpointError: If workers have savepoints of different states.
            Exception: What a function of `on_resize` raises.

        Cancellation:
            Before all have come it tells the others, as that of a run. Then it closes the strategy
            for good: start this worker again. The others may go on without it.

        Source:
            Horovod's elastic training.
        """
        if not isinstance(savepoint, Savepoint):
            raise TypeError(f"grow takes an ar.checkpoint.Savepoint, got {savepoint!r}.")
        wanted = as_int(num_workers)
        if wanted is None:
            raise TypeError(f"grow takes a number of workers, got {num_workers!r}.")
        workers = self._between_steps("grow")
        num_new = wanted - workers.num_workers
        if num_new < 0:
            raise ValueError(
                f"There are {workers.num_workers} workers already, got {num_workers}; `shrink` is "
                "for workers that are lost."
            )
        if workers.is_new:  # it was started as one of as many
            workers.is_new = False
        elif num_new:
            await workers.grow(num_new)
        else:
            return
        async with workers.leaving_if_cancelled("grow"):
            await self._resized(workers, savepoint, "grow")

    def _between_steps(self, what: str) -> Workers:
        """Return the workers, whose number is about to change.

        Raises:
            ContextError: If a step calls.
        """
        self._runtime.require_cross_replica(what, None)
        self._runtime.open()
        workers = self._runtime.workers
        assert workers is not None  # this kind of strategy always has them
        return workers

    async def _resized(self, workers: Workers, savepoint: Savepoint | None, what: str) -> None:
        """Make the state, loops and numbers those of a group that has changed."""
        runtime = self._runtime
        runtime.open()  # it may have been closed meanwhile
        if self.cluster_resolver is not None:
            self._resolver = ClusterResolver(
                task_id=workers.rank, num_workers=workers.num_workers, source=CHANGED
            )
        if runtime.lifecycle.open_loops is not None:
            change = "has lost a worker" if what == "shrink" else "has got more workers"
            reason = f"The loop was ended because its strategy {change}."
            await runtime.lifecycle.open_loops.end(reason)
        if savepoint is not None:
            await savepoint.put_back_newest(workers, what)
        await agree_on_names(workers, runtime.variable_table, what)
        for fn in tuple(self._resize_fns):
            outcome = fn()
            if inspect.isawaitable(outcome):
                outcome = await outcome
            require_finished(outcome, fn, "on_resize", RESIZE)

    def on_resize(self, fn: Resize) -> Resize:
        """Have a function called whenever the number of workers has changed.

        That is on every worker, at the end of `shrink` and `grow`: `num_replicas_in_sync` is the
        new number, and the state is put back. What depends on the number is set there, such as a
        learning rate; or a dataset is distributed again whose function reads an `InputContext`.
        Functions are called in the order in which they were given. What one raises is raised there,
        and those behind it are not called.

        Args:
            fn: Called without arguments. May be async, and then call what all workers call
                together, such as `strategy.reduce`: each of them has to.

        Returns:
            The function, so that this can be a decorator.

        Raises:
            TypeError: If it is not a function, or contains `yield`.

        Cancellation:
            Of what awaits `fn` is raised in `fn`; the group has its new size by then.

        Source:
            Horovod's `State.register_reset_callbacks`.
        """
        if not callable(fn):
            raise TypeError(f"on_resize takes a function without arguments, got {fn!r}.")
        require_no_yield(fn, "on_resize", RESIZE)
        self._resize_fns.append(fn)
        return fn

    def __deepcopy__(self, memo: dict[int, object]) -> MultiWorkerMirroredStrategy:
        self._require_copyable()
        return MultiWorkerMirroredStrategy(
            self.cluster_resolver, options=self._runtime.reducer.options
        )

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        self._require_copyable()
        make = partial(MultiWorkerMirroredStrategy, options=self._runtime.reducer.options)
        return make, (self.cluster_resolver,)

    def _require_copyable(self) -> None:
        if self.cluster_resolver is None:
            raise TypeError(
                "A MultiWorkerMirroredStrategy that was given a Communicator cannot be copied: the "
                "communicator is its own. Make it from a ClusterResolver."
            )
        if self.cluster_resolver.source == CHANGED:
            raise TypeError(
                "A MultiWorkerMirroredStrategy whose workers have changed cannot be copied: no "
                "launcher knows those that there are. Make a new one from a ClusterResolver."
            )


def _place(resolver: object) -> tuple[int, int]:
    """Return the rank of this worker and how many there are."""
    if isinstance(resolver, Communicator):
        return resolver.rank, resolver.size
    if not isinstance(resolver, ClusterResolver):
        raise TypeError(
            "MultiWorkerMirroredStrategy takes an ar.cluster.ClusterResolver, a Communicator or "
            f"None, got {resolver!r} ({type(resolver).__name__})."
        )
    if resolver.rank is None:
        raise ValueError(
            f"This process is {resolver.task_type} {resolver.task_id} of the cluster, and no "
            f"worker. Make the strategy in the processes of the workers. ({resolver.source})"
        )
    return resolver.rank, resolver.num_workers


def _share(devices: tuple[Device, ...], rank: int, size: int) -> tuple[Device, ...]:
    """Return the devices of one of the workers that share a process: as many for each.

    Raises:
        ValueError: If there are fewer devices than workers.
    """
    share = len(devices) // size
    if not share:
        raise ValueError(
            f"{size} workers in one process need a device each, but there are {len(devices)}. Call "
            f"ar.set_logical_devices('cpu', {size}) at program start."
        )
    return devices[rank * share : (rank + 1) * share]


async def _connect(
    resolver: ClusterResolver | Communicator, options: CommunicationOptions | None
) -> Communicator:
    if isinstance(resolver, Communicator):
        return resolver
    implementation = "auto" if options is None else options.implementation
    return await connect(
        resolver,
        engine=None if implementation == "auto" else implementation,
        timeout=None if options is None else options.timeout_seconds,
    )


async def agree_on_names(workers: Workers, table: VariableTable, what: str) -> None:
    """Take the variables that any worker has for equal: those that others make later too.

    Workers that have put back one state may differ in slots, which an optimizer makes when it
    first needs them, with the values of that state.
    """
    import json  # a first run needs none

    names = json.dumps([variable.name for variable in table.all()]).encode()
    async with workers.operation(what, "variables") as turn:
        told: asyncio.Future[list[bytes]] = turn.exchange(
            b"", lambda wire, _slots: gather_bytes(wire, names)
        )
        rows = await told
    table.are_equal(name for row in rows for name in json.loads(row))
