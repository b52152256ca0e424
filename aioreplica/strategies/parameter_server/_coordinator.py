"""The coordinator: schedules closures on workers, and hands out what becomes of them."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, final

from anyio import WouldBlock

from ...devices import OwnedTask, run_on_host
from ...errors import ClosureCancelledError, ContextError, StallError, WorkerLostError
from ...tree import map_leaves
from ._closure import Closure, ClosureFailedError
from ._messages import ServerStatistics, Stamp
from ._packing import DatasetOf, HomeSide, PerWorkerDataset, PerWorkerResource, pack_call
from ._pickles import Packed, unpack
from ._queue import ClosureQueue, Commit, ScheduledClosure
from ._strategy import ParameterServerStrategy

T = TypeVar("T")
ResourceT = TypeVar("ResourceT", bound=PerWorkerResource)

DEPTH = 16
"""Closures under way per worker: one runs while the messages of the others are on their way. Dask
sends messages every 10 ms, so that a queue of 16 keeps a worker busy with closures of 1 ms."""

GRACE_S = 10.0
"""How much longer than its timeout a closure may take before its worker is restarted."""

UNPACK_HERE_BYTES = 256 * 1024
"""Results up to this size are unpickled on the event loop, which takes less than a thread does."""

REPORT_EVERY = 64
"""After so many closures the servers are asked what they have done."""


@final
@dataclass(frozen=True, slots=True)
class CoordinatorStatistics:
    """What a coordinator and its parameter servers have done.

    Numbers from `pulls` on are those of the servers, as they were asked last: at a `join`, and
    after every few closures.

    Attributes:
        queue_depth: Closures that wait.
        num_running: Closures under way.
        num_finished: Closures that ended well.
        num_failed: Closures that raised.
        num_cancelled: Closures that were cancelled because another one had failed.
        num_steps: Steps applied, in synchronous mode.
        num_retries: Runs of closures that had pushed before.
        pulls: Shards that were asked for.
        pushes: Writes and gradients that took effect.
        bytes_pulled: Sent by the servers.
        bytes_pushed: Received by them.
        pushes_dropped: Pushes that had been seen before, or whose closure was over.
        pushes_late: Pushes of an older step, in synchronous mode.
        pushes_stale: Gradients older than `max_staleness` allows.
        max_staleness: How many versions old a gradient was at most.
        mean_staleness: The same on average.
    """

    queue_depth: int
    num_running: int
    num_finished: int
    num_failed: int
    num_cancelled: int
    num_steps: int
    num_retries: int
    pulls: int
    pushes: int
    bytes_pulled: int
    bytes_pushed: int
    pushes_dropped: int
    pushes_late: int
    pushes_stale: int
    max_staleness: int
    mean_staleness: float


@final
class RemoteValue(Generic[T]):
    """What a closure will return; it stays on the worker until it is fetched.

    `ClusterCoordinator.schedule` gives it. A result that is lost with its worker is computed again
    by another one; what the closure pushes then is dropped.
    """

    __slots__ = ("_closure", "_fetched", "_side")

    def __init__(self, closure: ScheduledClosure, side: HomeSide) -> None:
        self._closure = closure
        self._side = side
        self._fetched: tuple[T] | None = None

    async def fetch(self) -> T:
        """Wait for the closure and return its result, each time the same object.

        Raises:
            ClosureCancelledError: If it was cancelled because another one had failed, or because
                the coordinator was closed.
            WorkerLostError: If no worker is left, or a parameter server is gone.
            Exception: What the closure raised.

        Cancellation:
            Stops waiting; the closure goes on.
        """
        await _without_cancelling(self._closure.settled)
        submission = self._closure.submission
        if self._fetched is not None:
            return self._fetched[0]
        assert submission is not None
        try:
            packed: Packed = await submission.result()
        except ClosureFailedError as failure:  # in another run, after its worker was lost
            raise _error_of(failure, self._closure, self._side) from failure
        found: T = await _unpacked(packed, self._side)
        if self._fetched is None:  # somebody else may have fetched it meanwhile
            self._fetched = (found,)
            self._closure.submission = None  # the worker may let it go
        return self._fetched[0]

    def done(self) -> bool:
        """Tell whether the closure is over, in whatever way."""
        return self._closure.settled.done()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be an argument of a closure. Pass `await remote.fetch()`."
        )

    def __repr__(self) -> str:
        state = "over" if self.done() else self._closure.state
        return f"<RemoteValue of {self._closure.fn_name} #{self._closure.number} | {state}>"


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

    Raises:
        TypeError: If `strategy` is no ParameterServerStrategy, or a number is none.
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
    ) -> None:
        if not isinstance(strategy, ParameterServerStrategy):
            raise TypeError(
                "A ClusterCoordinator takes an ar.ParameterServerStrategy, got "
                f"{strategy!r} ({type(strategy).__name__})."
            )
        if not isinstance(queue_size, int) or isinstance(queue_size, bool):
            raise TypeError(f"queue_size must be an int, got {queue_size!r}.")
        if queue_size < 1:
            raise ValueError(f"queue_size must be at least 1, got {queue_size!r}.")
        self._strategy = strategy
        self._timeout_s = _checked_timeout(timeout_s)
        self._queue_size = queue_size
        self._queue = ClosureQueue(queue_size)
        self._state = "new"
        self._tasks: set[OwnedTask[None]] = set()
        self._submitting = asyncio.Lock()
        self._room: deque[asyncio.Future[None]] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._counts = {"finished": 0, "failed": 0, "cancelled": 0, "steps": 0}
        self._reports: list[ServerStatistics] = []
        self._next_report = REPORT_EVERY
        self._waits_for_gate = False

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy whose closures it runs."""
        return self._strategy

    # ---- scheduling ------------------------------------------------------------------------

    async def schedule(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> RemoteValue[T]:
        """Queue a function for the next worker that is free; wait for room in the queue.

        Args:
            fn: Plain or async; an async one has an event loop of its own on its worker. It and its
                arguments are pickled; variables, optimizers and resources of this coordinator are
                found anew there.
            args: Positional arguments, a tuple or list.
            kwargs: Keyword arguments.
            timeout_s: How long it may take, in seconds; None takes the coordinator's.

        Returns:
            What it will return.

        Raises:
            ValueError: If `args` is no tuple or list, or `timeout_s` is not positive.
            TypeError: If `fn` is not callable, or something cannot be pickled.
            ContextError: If the coordinator is closed, the strategy has another one, or a variable
                of another strategy is used.
            WorkerLostError: If a parameter server is lost.
            Exception: What an earlier closure raised.

        Cancellation:
            While it waits for room, nothing is queued.
        """
        await self._open()
        self._raise_error()
        while not self._queue.has_room:
            self._pump()
            await self._wait_in(self._room)
            self._require_open()
            self._raise_error()
        return self._add(fn, args, kwargs, timeout_s)

    def schedule_nowait(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> RemoteValue[T]:
        """Do what `schedule` does, in an `async with` block of the coordinator, without waiting.

        Raises:
            WouldBlock: If the queue is full.
            Exception: As `schedule`.
        """
        self._require_open()
        self._raise_error()
        if not self._queue.has_room:
            raise WouldBlock
        return self._add(fn, args, kwargs, timeout_s)

    def _add(
        self, fn: Callable[..., T], args: Any, kwargs: Any, timeout_s: float | None
    ) -> RemoteValue[T]:
        strategy = self._strategy
        strategy.servers.require_all()
        if not callable(fn):
            raise TypeError(f"schedule needs a function, got {fn!r} ({type(fn).__name__}).")
        if not isinstance(args, (tuple, list)):
            raise ValueError(
                f"schedule takes args as a tuple or list, got {args!r} ({type(args).__name__}). "
                "Write args=(value,) for one argument."
            )
        limit = self._timeout_s if timeout_s is None else _checked_timeout(timeout_s)
        side = HomeSide(strategy)
        name = _name_of(fn)
        call = pack_call(fn, tuple(args), dict(kwargs or {}), side, f"The closure {name}")
        closure = ScheduledClosure(
            strategy.new_step(),
            name,
            inspect.iscoroutinefunction(_innermost(fn)),
            call,
            side.recipes,
            limit,
            asyncio.get_running_loop().create_future(),
        )
        closure.abort = functools.partial(self._abort, closure)
        self._queue.add(closure)
        self._pump()
        return RemoteValue(closure, side)

    async def join(self) -> None:
        """Wait until every closure is over.

        Raises:
            WorkerLostError: If a parameter server was lost; names its variables.
            Exception: The first error of a closure since the last `schedule` or `join`.

        Cancellation:
            Stops waiting; closures go on.
        """
        await self._open()
        self._queue.flush()
        self._complete(self._queue.complete_step())
        self._pump()
        while not self._queue.is_idle:
            await self._wait_in(self._idle)
            self._require_open()
        try:
            await self._report()
        except WorkerLostError as error:
            if not self._queue.has_error:
                self._queue.failed(error)
        self._raise_error()
        self._strategy.servers.require_all()

    def done(self) -> bool:
        """Tell whether every closure is over.

        Raises:
            Exception: The first error of a closure since the last `schedule` or `join`, if all are.
        """
        self._require_open()
        if self._queue.is_idle:
            self._raise_error()
        return self._queue.is_idle

    async def fetch(self, structure: Any) -> Any:
        """Return a structure with the result in place of every `RemoteValue`.

        Raises:
            Exception: As `RemoteValue.fetch`, for the first one that has no result.

        Cancellation:
            Stops waiting; closures go on.
        """
        found: list[RemoteValue[Any]] = []

        def note(leaf: Any) -> Any:
            if isinstance(leaf, RemoteValue):
                found.append(leaf)
            return leaf

        map_leaves(note, structure)
        results = {id(value): await value.fetch() for value in found}
        return map_leaves(
            lambda leaf: results[id(leaf)] if isinstance(leaf, RemoteValue) else leaf, structure
        )

    # ---- what workers keep -----------------------------------------------------------------

    def create_per_worker_dataset(self, dataset: Any) -> PerWorkerDataset:
        """Return a dataset that each worker has for itself, made at its first use there.

        Args:
            dataset: A function that returns an iterable; one that takes an argument gets an
                `InputContext` with the worker's index. Or an iterable, of which each worker has a
                copy.

        Raises:
            TypeError: If it is neither, or cannot be pickled.
        """
        if not callable(dataset) and not isinstance(dataset, Iterable):
            raise TypeError(
                "create_per_worker_dataset needs a function that returns an iterable, or an "
                f"iterable, got {dataset!r} ({type(dataset).__name__})."
            )
        make = DatasetOf(
            dataset if callable(dataset) else functools.partial(_itself, dataset),
            callable(dataset) and bool(_num_positional(dataset)),
            self._strategy.num_workers,
        )
        found = self._resource(make, PerWorkerDataset, _name_of(dataset))
        found.make = make
        return found

    def create_per_worker_resource(self, fn: Callable[[], Any]) -> PerWorkerResource:
        """Return a resource that each worker makes with `fn`, at its first use there.

        As an argument of a closure it is what `fn` returned on that worker. It need not be
        picklable: a model, a connection, a file.

        Raises:
            TypeError: If `fn` is not callable, or cannot be pickled.
        """
        fn = _checked_factory(fn, "create_per_worker_resource")
        return self._resource(fn, PerWorkerResource, _name_of(fn))

    def _resource(self, make: Any, kind: type[ResourceT], label: str) -> ResourceT:
        strategy = self._strategy
        factory = pack_call(make, (), {}, HomeSide(strategy), f"The function {label}")
        return kind(strategy, strategy.servers.next_resource(), factory, label)

    # ---- running ---------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start what may run."""
        if self._state != "open":
            return
        for closure in self._queue.take(self._capacity()):
            self._strategy.closure_began(closure)
            self._start(self._work(closure), f"closure {closure.number} {closure.fn_name}")
        while self._room and self._queue.has_room:
            waiter = self._room.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break
        if self._queue.is_idle:
            for waiter in self._idle:
                if not waiter.done():
                    waiter.set_result(None)

    def _capacity(self) -> int:
        if self._strategy.gate.is_closed:  # a checkpoint looks at the variables
            if not self._waits_for_gate:
                self._waits_for_gate = True
                self._start(self._pump_when_open(), "closures held back")
            return 0
        return DEPTH * max(1, self._strategy.num_workers)

    async def _pump_when_open(self) -> None:
        try:
            await self._strategy.gate.opened()
        finally:
            self._waits_for_gate = False
        self._pump()

    def _start(self, work: Any, name: str) -> None:
        task = OwnedTask[None](work, name)
        self._tasks.add(task)

        def ended(error: BaseException | None) -> None:
            self._tasks.discard(task)
            if error is not None:
                self._fail(error)

        task.when_done(ended)

    async def _work(self, closure: ScheduledClosure) -> None:
        """See a closure to its end."""
        strategy, error = self._strategy, None
        try:
            async with self._submitting:  # one after the other, in order
                await strategy.servers.ready()
                await strategy.servers.learn(closure.recipes)
                if closure.state != "running":
                    return
                closure.submission = strategy.engine.submit(self._sent(closure))
            await self._awaited(closure)
        except ClosureFailedError as failure:
            error = _error_of(failure, closure, HomeSide(strategy))
        except Exception as failure:  # noqa: BLE001 - raised by the next schedule or join
            error = failure
        if closure.state != "running":
            return
        if isinstance(error, WorkerLostError):
            error = strategy.servers.noticed(error)
        if error is not None:
            self._counts["failed"] += 1
            _settle(closure, error)
            self._fail(error)
            return
        self._counts["finished"] += 1
        commit = self._queue.finished(closure)
        if closure.is_over:
            self._ended(closure)
        self._complete(commit)
        self._pump()
        if self._counts["finished"] >= self._next_report:
            self._next_report = self._counts["finished"] + REPORT_EVERY
            with suppress(WorkerLostError):
                await self._report()

    def _sent(self, closure: ScheduledClosure) -> Closure:
        strategy = self._strategy
        servers = strategy.servers
        return Closure(
            servers.strategy_id,
            closure.fn_name,
            closure.is_async,
            closure.call,
            Stamp(servers.epoch, closure.number, self._queue.oldest, closure.group),
            servers.handles,
            strategy.mode == "sync",
            closure.timeout_s,
        )

    async def _awaited(self, closure: ScheduledClosure) -> None:
        """Wait for a closure; restart its worker if not even its timeout is answered."""
        submission = closure.submission
        assert submission is not None
        if closure.timeout_s is None:
            await submission.wait()
            return
        limit = (DEPTH + 1) * closure.timeout_s + GRACE_S
        try:
            async with asyncio.timeout(limit):
                await submission.wait()
        except TimeoutError as error:
            if isinstance(error, StallError):
                raise
            await self._strategy.engine.restart_worker(submission)
            raise StallError(
                f"The closure {closure.fn_name} was given {closure.timeout_s:g} s, and its worker "
                f"has not answered for {limit:g} s: it hangs, or the closure holds the GIL. The "
                "worker is restarted.",
                timeout_s=closure.timeout_s,
            ) from None

    def _complete(self, commit: Commit | None) -> None:
        if commit is not None:
            self._start(self._commit(commit), f"commit of step {commit.step}")

    async def _commit(self, commit: Commit) -> None:
        servers = self._strategy.servers
        await servers.commit(commit.step, commit.closures, commit.num_replicas)
        self._counts["steps"] += 1
        for closure in self._queue.committed(commit):
            self._ended(closure)
        self._complete(self._queue.complete_step())
        self._pump()

    def _fail(self, error: BaseException) -> None:
        """Cancel what is not over; the next `schedule` or `join` raises the error."""
        if isinstance(error, WorkerLostError):
            error = self._strategy.servers.noticed(error)
        for closure in self._queue.failed(error):
            if closure.submission is not None:
                closure.submission.cancel()
            if not closure.settled.done():
                self._counts["cancelled"] += 1
                _settle(
                    closure,
                    ClosureCancelledError(
                        f"The closure {closure.fn_name} #{closure.number} was cancelled because "
                        f"another one failed: {type(error).__name__}: {error}"
                    ),
                )
            self._ended(closure)
        for waiter in self._room:
            if not waiter.done():
                waiter.set_result(None)
        self._room.clear()
        self._pump()

    def _abort(self, closure: ScheduledClosure, error: BaseException) -> None:
        """End a closure because its strategy is closed."""
        self._fail(error)

    def _ended(self, closure: ScheduledClosure) -> None:
        if not closure.settled.done():
            closure.settled.set_result(None)
        self._strategy.closure_ended(closure)

    async def _report(self) -> None:
        self._reports = await self._strategy.servers.report(self._queue.oldest, self._queue.step)

    def _raise_error(self) -> None:
        error = self._queue.take_error()
        if error is not None:
            raise error

    async def _wait_in(self, waiters: Any) -> None:
        future = asyncio.get_running_loop().create_future()
        waiters.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._pump()  # room that was given to this one goes to the next
            raise
        finally:
            with suppress(ValueError):
                waiters.remove(future)

    # ---- its life --------------------------------------------------------------------------

    def statistics(self) -> CoordinatorStatistics:
        """Return counts of closures, and those of the servers when they were asked last."""
        counts, reports = self._counts, self._reports
        gradients = sum(each.gradients for each in reports)
        return CoordinatorStatistics(
            self._queue.depth,
            self._queue.num_running,
            counts["finished"],
            counts["failed"],
            counts["cancelled"],
            counts["steps"],
            sum(each.retries for each in reports),
            sum(each.pulls for each in reports),
            sum(each.pushes for each in reports),
            sum(each.bytes_pulled for each in reports),
            sum(each.bytes_pushed for each in reports),
            sum(each.dropped for each in reports),
            sum(each.late for each in reports),
            sum(each.stale for each in reports),
            max((each.max_staleness for each in reports), default=0),
            sum(each.staleness_sum for each in reports) / gradients if gradients else 0.0,
        )

    async def _open(self) -> None:
        if self._state == "new":
            self._strategy.take_coordinator(self)
            self._state = "open"
            try:
                await self._strategy.servers.ready()
                self._queue = self._strategy.new_queue(self._queue_size)
            except BaseException:
                self._state = "new"
                self._strategy.drop_coordinator(self)
                raise
        self._require_open()

    def _require_open(self) -> None:
        if self._state != "open":
            how = "is closed" if self._state == "closed" else "is not open"
            raise ContextError(
                f"The coordinator of {self._strategy!r} {how}. Use it in `async with "
                "ar.ClusterCoordinator(strategy) as coordinator:`."
            )

    async def aclose(self) -> None:
        """Cancel what is not over and give the strategy free. Idempotent.

        Cancellation:
            Raised again once closing is done.
        """
        if self._state == "open":
            error = ContextError("The coordinator was closed.")
            if not self._queue.is_idle:
                self._fail(error)
            with suppress(WorkerLostError, ContextError):
                await self._report()
            for task in tuple(self._tasks):
                task.cancel()
            for task in tuple(self._tasks):
                await task.ended()
            self._strategy.drop_coordinator(self, self._queue.next_step)
        self._state = "closed"
        for waiter in [*self._idle, *self._room]:
            if not waiter.done():
                waiter.set_result(None)

    async def __aenter__(self) -> Self:
        if self._state == "closed":
            self._state = "new"
            self._queue.take_error()
        await self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        queue = self._queue
        return (
            f"<ClusterCoordinator | {self._state}, {queue.depth} queued, "
            f"{queue.num_running} running>"
        )


def _settle(closure: ScheduledClosure, error: BaseException) -> None:
    if not closure.settled.done():
        closure.settled.set_exception(error)
        closure.settled.exception()  # looked at: it need not be fetched


def _error_of(
    failure: ClosureFailedError, closure: ScheduledClosure, side: HomeSide
) -> BaseException:
    """Return what a closure raised, with its traceback there and where that was."""
    from ...devices.processes import RemoteTracebackError  # it needs cloudpickle

    error: BaseException
    try:
        if failure.error is None:
            raise ValueError
        error = unpack(failure.error, side)
    except Exception:  # noqa: BLE001 - what was raised can be told in words only
        error = RuntimeError(failure.words)
    error.__cause__ = RemoteTracebackError(failure.text)
    with suppress(Exception):
        error.add_note(f"Raised in closure #{closure.number} ({closure.fn_name}).")
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    reason = (
        "An iterator has ended" if isinstance(error, Exception) else "That would end this program"
    )
    wrapped = RuntimeError(
        f"The closure {closure.fn_name} #{closure.number} raised {failure.words}. {reason}; catch "
        "it in the closure."
    )
    wrapped.__cause__ = error
    return wrapped


async def _unpacked(packed: Packed, side: HomeSide) -> Any:
    if packed.num_bytes <= UNPACK_HERE_BYTES:
        return unpack(packed, side)
    return await run_on_host(unpack, packed, side)


async def _without_cancelling(future: asyncio.Future[None]) -> None:
    """Wait for a future that others wait for, too."""
    await asyncio.shield(future)


def _innermost(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _name_of(fn: Any) -> str:
    inner = _innermost(fn)
    return str(getattr(inner, "__qualname__", type(inner).__name__))


def _itself(thing: T) -> T:
    return thing


def _checked_factory(fn: Any, what: str) -> Any:
    if not callable(fn):
        raise TypeError(f"{what} needs a function, got {fn!r} ({type(fn).__name__}).")
    return fn


def _num_positional(fn: Any) -> int:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return 0
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def _checked_timeout(timeout_s: Any) -> float | None:
    if timeout_s is None:
        return None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise TypeError(f"timeout_s must be a number of seconds or None, got {timeout_s!r}.")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be above 0, got {timeout_s!r}.")
    return float(timeout_s)
