"""The coordinator: schedules closures on workers, and hands out what becomes of them."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Self, TypeAlias, TypeVar, final, overload
from weakref import WeakValueDictionary

from anyio import WouldBlock

from ..._functions import is_async, require_finished, require_no_yield
from ...devices import require_loop
from ...errors import ContextError, WorkerLostError
from ...tree import map_leaves
from ._messages import CoordinatorStatistics
from ._packing import (
    DatasetOf,
    HomeSide,
    PerWorkerDataset,
    PerWorkerResource,
    SharedParts,
    pack_call,
)
from ._per_worker_variable import PerWorkerVariable, VariableOf
from ._queue import ClosureQueue, ScheduledClosure
from ._remote_value import RemoteValue
from ._runner import ClosureRunner, wait_among, wake
from ._strategy import ParameterServerStrategy, check_count

T = TypeVar("T")
AsyncFunction: TypeAlias = Callable[..., Coroutine[Any, Any, T]]
Args: TypeAlias = Sequence[Any]
Named: TypeAlias = dict[str, Any] | None
Limit: TypeAlias = float | None
ResourceT = TypeVar("ResourceT", bound=PerWorkerResource)


@final
class ClusterCoordinator:
    """Runs functions on the workers of a `ParameterServerStrategy`, in no particular order.

    A function is called at least once; if its worker is lost, another one calls it again, and what
    it pushes is applied once all the same. The first error of a closure is raised by the next
    `schedule` or `join`; what was scheduled and is not over by then is cancelled. After that the
    coordinator can be used again.

    Args:
        strategy: Whose variables closures use. It has one coordinator at a time.
        queue_size: How many closures may wait; `schedule` waits for room.
        timeout_s: How long a closure may take, in seconds, unless a call says otherwise; None sets
            no limit.
        max_attempts: How many workers may be lost while they run the same closure, before it fails
            with a `WorkerLostError`. Closures that wait with a worker lose nothing with it.
        worker_wait_s: How long closures wait, in seconds, while the cluster has no worker at all;
            then they fail with a `WorkerLostError`. None sets no limit.

    Raises:
        TypeError: If `strategy` is not a ParameterServerStrategy, or a number is not one.
        ValueError: If a number is out of range.

    Example:
        >>> import asyncio
        >>> import aioreplica as ar
        >>> def add(counter, amount):
        ...     counter.assign_add(amount)
        ...     return amount * 10
        >>> async def main():
        ...     engine = ar.cluster.LocalClosureEngine(num_workers=2)
        ...     async with ar.ParameterServerStrategy(engine) as strategy:
        ...         with strategy.scope():
        ...             counter = ar.Variable(0, name="counter")
        ...         async with ar.ClusterCoordinator(strategy) as coordinator:
        ...             results = [await coordinator.schedule(add, (counter, i)) for i in range(4)]
        ...             await coordinator.join()
        ...             return await coordinator.fetch(results), int(await counter.read())
        >>> asyncio.run(main())
        ([0, 10, 20, 30], 6)

    Source:
        tf.distribute.experimental.coordinator.ClusterCoordinator.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        *,
        queue_size: int = 256,
        timeout_s: float | None = None,
        max_attempts: int = 5,
        worker_wait_s: float | None = 60.0,
    ) -> None:
        if not isinstance(strategy, ParameterServerStrategy):
            raise TypeError(
                "A ClusterCoordinator takes an ar.ParameterServerStrategy, got "
                f"{strategy!r} ({type(strategy).__name__})."
            )
        check_count("queue_size", queue_size, 1)
        check_count("max_attempts", max_attempts, 1)
        self._strategy = strategy
        self._timeout_s = _checked_seconds("timeout_s", timeout_s)
        self._new_queue = functools.partial(
            ClosureQueue, queue_size, _checked_seconds("worker_wait_s", worker_wait_s)
        )
        self._new_runner = functools.partial(ClosureRunner, strategy, max_attempts=max_attempts)
        self._runner = self._new_runner(self._new_queue(cluster=strategy.engine))
        self._parts: SharedParts = WeakValueDictionary()
        self._results = HomeSide(strategy)
        self._state = "new"
        self._loop: asyncio.AbstractEventLoop | None = None  # of its first use

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy whose closures it runs."""
        return self._strategy

    # ---- scheduling ------------------------------------------------------------------------

    @overload
    async def schedule(
        self, fn: AsyncFunction[T], args: Args = ..., kwargs: Named = ..., *,
        timeout_s: Limit = ..., isolate: bool = ...,
    ) -> RemoteValue[T]: ...  # fmt: skip
    @overload
    async def schedule(
        self, fn: Callable[..., T], args: Args = ..., kwargs: Named = ..., *,
        timeout_s: Limit = ..., isolate: bool = ...,
    ) -> RemoteValue[T]: ...  # fmt: skip
    async def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None, *, timeout_s: float | None = None,
        isolate: bool = False,
    ) -> RemoteValue[Any]:  # fmt: skip
        """Queue a function for the next worker that is free; wait for room in the queue.

        Args:
            fn: Plain or async; an async one has an event loop of its own on its worker. It and its
                arguments are pickled; variables, optimizers and resources of this coordinator are
                found anew there.
            args: Positional arguments, a tuple or list.
            kwargs: Keyword arguments.
            timeout_s: How long it may take, in seconds; None takes the coordinator's.
            isolate: Whether an error of it is its own alone, raised by `fetch` and by nothing else:
                others go on. For searches, in which some closures may fail.

        Returns:
            What it will return.

        Raises:
            ValueError: If `args` is not a tuple or list, or `timeout_s` is not positive.
            TypeError: If `fn` is not callable or contains `yield`, or something cannot be pickled.
            ContextError: If the coordinator is closed, the strategy has another one, or a variable
                of another strategy is used.
            WorkerLostError: If a parameter server is lost.
            Exception: What an earlier closure raised.

        Cancellation:
            While it waits for room, nothing is queued.
        """
        await self._open()
        self._runner.queue.raise_error()
        try:
            while not self._runner.queue.has_room or self._runner.queue.is_ending:
                self._runner.pump()
                await wait_among(self._runner.room, self._runner)
                self._require_open()
                self._runner.queue.raise_error()
            return self._add(fn, args, kwargs, timeout_s, isolate)
        except BaseException:
            self._runner.pump()  # room that this one has not taken goes to the next
            raise

    @overload
    def schedule_nowait(
        self, fn: AsyncFunction[T], args: Args = ..., kwargs: Named = ..., *,
        timeout_s: Limit = ..., isolate: bool = ...,
    ) -> RemoteValue[T]: ...  # fmt: skip
    @overload
    def schedule_nowait(
        self, fn: Callable[..., T], args: Args = ..., kwargs: Named = ..., *,
        timeout_s: Limit = ..., isolate: bool = ...,
    ) -> RemoteValue[T]: ...  # fmt: skip
    def schedule_nowait(
        self, fn: Callable[..., Any], args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None, *, timeout_s: float | None = None,
        isolate: bool = False,
    ) -> RemoteValue[Any]:  # fmt: skip
        """Do what `schedule` does, in an `async with` block of the coordinator, without waiting.

        Raises:
            WouldBlock: If the queue is full, or servers are being told of the end of closures.
            Exception: As `schedule`.
        """
        self._require_open()
        self._runner.queue.raise_error()
        if not self._runner.queue.has_room or self._runner.queue.is_ending:
            raise WouldBlock
        return self._add(fn, args, kwargs, timeout_s, isolate)

    def _add(
        self, fn: Callable[..., T], args: Any, kwargs: Any, timeout_s: float | None, isolate: bool
    ) -> RemoteValue[T]:
        strategy = self._strategy
        strategy.servers.require_all()
        _checked_factory(fn, "schedule")
        _check_args(args)
        limit = self._timeout_s if timeout_s is None else _checked_seconds("timeout_s", timeout_s)
        side = HomeSide(strategy, self._parts)
        name = _name_of(fn)
        call = pack_call(fn, tuple(args), dict(kwargs or {}), side, f"The closure {name}")
        settled = asyncio.get_running_loop().create_future()
        closure = ScheduledClosure(
            strategy.new_step(), name, is_async(fn), call, side.recipes, limit, settled, isolate
        )
        self._runner.queue.add(closure)
        self._runner.pump()
        return RemoteValue(closure, self._results, self._runner)

    async def join(self) -> None:
        """Wait until every closure is over.

        Raises:
            WorkerLostError: If a parameter server was lost; names its variables.
            Exception: The first error of a closure since the last `schedule` or `join`.

        Cancellation:
            Stops waiting; closures go on.
        """
        await self._open()
        self._runner.pump()
        while not self._runner.queue.is_idle:
            await wait_among(self._runner.idle, self._runner)
            self._require_open()
        try:
            await self._runner.report()
        except WorkerLostError as error:
            self._runner.queue.put_error(error)
        self._runner.queue.raise_error()
        self._strategy.servers.require_all()

    def done(self) -> bool:
        """Tell whether every closure is over.

        Raises:
            Exception: The first error of a closure since the last `schedule` or `join`, if all are.
        """
        self._require_open()
        if self._runner.queue.is_idle:
            self._runner.queue.raise_error()
        return self._runner.queue.is_idle

    async def fetch(self, structure: object) -> Any:
        """Return a structure with the result in place of every `RemoteValue`.

        Raises:
            Exception: As `RemoteValue.fetch`, for the first one that has no result.

        Cancellation:
            Stops waiting; closures go on.
        """
        return await _fetched(structure)

    # ---- what workers keep -----------------------------------------------------------------

    def create_per_worker_dataset(self, dataset: object) -> PerWorkerDataset:
        """Return a dataset that each worker has for itself, made at its first use there.

        Args:
            dataset: A function that returns an iterable; one that takes an argument gets an
                `InputContext` with the worker's index. Or an iterable, of which each worker has a
                copy.

        Raises:
            TypeError: If it is neither, or cannot be pickled.
        """
        make = _dataset_of(dataset, self._strategy.num_workers)
        found = self._resource(make, PerWorkerDataset, _name_of(dataset))
        found.make = make
        return found

    def create_per_worker_resource(self, fn: Callable[[], Any]) -> PerWorkerResource:
        """Return a resource that each worker makes with `fn`, at its first use there.

        As an argument of a closure it is what `fn` returned on that worker. It need not be
        picklable: a model, a connection, a file.

        Raises:
            TypeError: If `fn` is not callable, contains `yield`, or cannot be pickled.
        """
        fn = _checked_factory(fn, "create_per_worker_resource")
        return self._resource(functools.partial(_made_by, fn), PerWorkerResource, _name_of(fn))

    def create_per_worker_variable(
        self, initial_value: object, *, name: str = "per_worker"
    ) -> PerWorkerVariable:
        """Return a variable of which each worker has one for itself, made at its first use there.

        For what workers count or keep by themselves. As an argument of a closure it is the
        worker's variable: read it by `v.value`, write it by `v.assign_add(x)` and the like.
        `await v.read_all()` gives the values of all workers.

        Args:
            initial_value: An array or number, or a function that returns one, called on the worker.
            name: For messages.

        Raises:
            TypeError: If the function contains `yield`, or cannot be pickled.
        """
        if callable(initial_value):
            _checked_factory(initial_value, "create_per_worker_variable")
        found = self._resource(VariableOf(initial_value, name), PerWorkerVariable, name)
        found.runner, found.num_gone = lambda: self._runner, self._runner.queue.num_gone
        return found

    def _resource(self, make: object, kind: type[ResourceT], label: str) -> ResourceT:
        strategy = self._strategy
        factory = pack_call(make, (), {}, HomeSide(strategy), f"The function {label}")
        return kind(strategy, strategy.servers.resources.new_number(), factory, label)

    # ---- its life --------------------------------------------------------------------------

    def statistics(self) -> CoordinatorStatistics:
        """Return counts of closures, and those of the servers when they were asked last."""
        return self._runner.statistics()

    async def _open(self) -> None:
        if self._state == "new":
            self._strategy.take_coordinator(self)
            self._state = "open"
            try:
                await self._strategy.servers.ready()
                self._runner.open(self._new_queue(cluster=self._strategy.engine))
                self._loop = asyncio.get_running_loop()
            except BaseException:
                self._state = "new"
                self._strategy.drop_coordinator(self)
                raise
        self._require_open()

    def _require_open(self) -> None:
        if self._state != "open":
            raise _not_open_error(self._strategy, is_closed=self._state == "closed")
        if self._loop is not None and not self._loop.is_closed():
            require_loop(self._loop, self)

    async def end_with_cluster(self) -> None:
        """End what is going on in a cluster that is lost; for the strategy."""
        await self._runner.close(self._strategy.servers.lost_error(), is_for_good=False)

    def begin_with_cluster(self) -> None:
        """Run closures on a cluster that is there again."""
        former = self._runner
        missed = former.queue.take_error()
        self._runner = self._new_runner(former.queue, counts=former.counts)
        self._runner.open(self._new_queue(cluster=self._strategy.engine))
        if missed is not None and not isinstance(missed, WorkerLostError):
            self._runner.queue.put_error(missed)

    async def aclose(self) -> None:
        """Cancel what is not over and give the strategy free. Idempotent.

        Cancellation:
            Raised again once closing is done.
        """
        try:
            if self._state == "open":
                self._require_open()
                await self._runner.close(ContextError("The coordinator was closed."))
        finally:
            if not self._runner.is_open:  # it is closed, even if that was cancelled
                self._strategy.drop_coordinator(self)
                self._state = "closed"
                for waiter in [*self._runner.idle, *self._runner.room]:
                    wake(waiter)

    async def __aenter__(self) -> Self:
        if self._state == "closed":
            self._state = "new"
            self._runner.queue.take_error()
        await self._open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        queue = self._runner.queue
        counts = f"{queue.depth} queued, {queue.num_running} running"
        return f"<ClusterCoordinator | {self._state}, {counts}>"


def _not_open_error(strategy: object, *, is_closed: bool) -> ContextError:
    how = "is closed" if is_closed else "is not open"
    return ContextError(
        f"The coordinator of {strategy!r} {how}. Use it in `async with "
        "ar.ClusterCoordinator(strategy) as coordinator:`."
    )


async def _fetched(structure: object) -> Any:
    found: list[RemoteValue[Any]] = []

    def note(leaf: object) -> object:
        if isinstance(leaf, RemoteValue):
            found.append(leaf)
        return leaf

    map_leaves(note, structure)
    results = {id(value): await value.fetch() for value in found}
    return map_leaves(
        lambda leaf: results[id(leaf)] if isinstance(leaf, RemoteValue) else leaf, structure
    )


def _check_args(args: object) -> None:
    if not isinstance(args, (tuple, list)):
        raise ValueError(
            f"schedule takes args as a tuple or list, got {args!r} ({type(args).__name__}). "
            "Write args=(value,) for one argument."
        )


def _innermost(fn: Any) -> object:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _name_of(fn: Any) -> str:
    inner = _innermost(fn)
    return str(getattr(inner, "__qualname__", type(inner).__name__))


def _dataset_of(dataset: object, num_splits: int) -> DatasetOf:
    if callable(dataset):
        return DatasetOf(dataset, bool(_num_positional(dataset)), num_splits)
    if not isinstance(dataset, Iterable):
        raise TypeError(
            "create_per_worker_dataset needs a function that returns an iterable, or an "
            f"iterable, got {dataset!r} ({type(dataset).__name__})."
        )
    return DatasetOf(functools.partial(_itself, dataset), False, num_splits)


def _itself(thing: T) -> T:
    return thing


def _made_by(fn: Callable[[], Any]) -> object:
    made = fn()
    require_finished(made, fn, "create_per_worker_resource")
    return made


def _checked_factory(fn: Any, what: str) -> Any:
    if not callable(fn):
        raise TypeError(f"{what} needs a function, got {fn!r} ({type(fn).__name__}).")
    require_no_yield(fn, what)
    return fn


def _num_positional(fn: Any) -> int:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return 0
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def _checked_seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds or None, got {value!r}.")
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {value!r}.")
    return float(value)
