"""Ops: calls that a lane runs once, each the future of its result; and the ops of one run."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Generator, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, Self, TypeAlias, TypeVar, final

from .._functions import UNFINISHED, unfinished_error
from ..context import DEFAULT_PLACE, PLACE, REGISTRY, Place
from ..errors import ContextError
from ..telemetry import Observers
from ._completion import CompletionQueue
from ._loop import is_interrupted, require_loop, wait_shielded

T = TypeVar("T")
LIBRARY = __name__.partition(".")[0] + "."
PACKAGE = str(Path(__file__).parents[1])
MAX_DEPTH = 64  # of a chain of awaits
FUTURE_INIT, FUTURE_DEL = asyncio.Future.__init__, asyncio.Future.__del__  # super() is slower
RELEASED: dict[str, object] = {}  # in place of keyword arguments that were let go


AnyOp: TypeAlias = "Op[Any]"  # of whatever result


class OpStreams(Protocol):
    """Streams of a device, on which functions only enqueue their work."""

    def synchronise(self, made: object = None) -> None:
        """Wait for what the calling thread has enqueued, and has `made` for others."""


class OpQueue(Protocol):
    """Queue of ops: a lane, or its stand-in in a test."""

    @property
    def name(self) -> str:
        """Name of the device."""

    @property
    def streams(self) -> OpStreams | None:
        """Streams that ops enqueue on; None where functions end with their work."""

    def put(self, op: AnyOp, /) -> None:
        """Enqueue an op."""


class OpProcess(Protocol):
    """Runner of ops otherwise than by a mere call: in a process, on streams."""

    def call(
        self,
        op: AnyOp,
        fn: Callable[..., Any],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        /,
    ) -> Any:
        """Return what the call returns, or raise what it raises."""


@final
class Op(asyncio.Future[T]):
    """A call for a lane: a coroutine to those who await it, a future to `asyncio.gather`.

    Args:
        completions: Brings the result back to the event loop.
        fn: The function to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        lane: Where to put the op when it is first waited for; None if the maker puts it.
        tracker: Counts the ops of the run that this one belongs to.

    The first await or done callback puts the op on its lane; without one it does not run. Being a
    future it needs no task of its own when many are gathered; having the methods of a coroutine it
    can be given to `create_task` too.

    Invariants:
        * Exactly one of `withdraw` (event loop) and `claim` (lane thread) succeeds, so an op that
          was withdrawn never starts and a started one always completes.
        * The op holds its arguments until its call has ended: their buffers are not reused under
          it. Afterwards `_args` is None.
        * `is_done` becomes true on the event loop, after the call has ended.

    Cancellation:
        A queued op is withdrawn at once. A started one is waited for, then the cancellation goes
        on; only an interrupt of the interpreter abandons it to its daemon thread, unless it
        `writes_files`.
    """

    __slots__ = (
        "_args",
        "_claim",
        "_context",
        "_fn",
        "_is_awaited",
        "_is_put",
        "_kwargs",
        "_lane",
        "_outcome",
        "completions",
        "is_done",
        "seconds",
        "tracker",
    )

    # Seldom set, so these are not slots: each of those costs every op its initialisation.
    writes_files = False  # set by those who made it
    _error: BaseException | None = None
    _was_withdrawn = False
    _cancel_when_done = False
    _drained: tuple[asyncio.Future[None], ...] = ()
    _steps: Generator[object, None, T] | None = None

    def __init__(
        self,
        completions: CompletionQueue,
        fn: Callable[..., T],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        lane: OpQueue | None = None,
        tracker: OpTracker | None = None,
    ) -> None:
        FUTURE_INIT(self, loop=completions.loop)
        self._lane = lane
        self._is_put = lane is None
        self.tracker = tracker
        self.completions = completions
        self._fn = fn
        self._args: tuple[object, ...] | None = args
        self._kwargs = kwargs
        self._context: Context = copy_context()
        self._claim = [True]
        self._is_awaited = False
        self.is_done = False
        self.seconds = 0.0

    # ---- on the lane's thread ------------------------------------------------------------

    def claim(self) -> bool:
        """Take the op, so that it cannot be withdrawn any more; False if it was."""
        try:
            self._claim.pop()
        except IndexError:
            return False
        return True

    def run_claimed(self) -> None:
        """Run the call in the calling thread, which has claimed it."""
        args = self._args
        assert args is not None  # released by `withdraw`, or below
        start = perf_counter()
        try:
            self._outcome = self._context.run(self._fn, *args, **self._kwargs)
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the awaiting task
            self._error = error
        self.seconds = perf_counter() - start
        self._args, self._kwargs = None, RELEASED  # before anyone learns that the op is done

    def run_claimed_by(self, process: OpProcess) -> None:
        """Have something else run the call, and wait for it in the calling thread."""
        args = self._args
        assert args is not None  # as in `run_claimed`
        start = perf_counter()
        try:
            self._outcome = process.call(self, self._fn, args, self._kwargs)
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the awaiting task
            self._error = error
        self.seconds = perf_counter() - start
        self._args, self._kwargs = None, RELEASED

    def fail_claimed(self, error: BaseException) -> None:
        """End the claimed op with an error instead of running it, as a lost device does."""
        self._error = error
        self._args, self._kwargs = None, RELEASED

    # ---- what it is, from any thread -----------------------------------------------------

    @property
    def fn_name(self) -> str:
        """Name of the function that the op runs; of the user's, while the library's calls one."""
        fn: object = self._fn
        if not is_of_user(fn):
            fn = next((each for each in self._args or () if is_of_user(each)), fn)
        return getattr(fn, "__qualname__", None) or type(fn).__qualname__

    @property
    def context(self) -> Context:
        """The context variables that the call runs with."""
        return self._context

    @property
    def replica_id(self) -> int | None:
        """Index of the replica that made the op; None outside steps."""
        replica = self.place.replica
        return None if replica is None else replica.local_replica_id

    @property
    def place(self) -> Place:
        """Place in which the op was made."""
        return self._context.get(PLACE) or DEFAULT_PLACE

    @property
    def device_name(self) -> str | None:
        """Name of the op's lane; None if its maker puts it."""
        return None if self._lane is None else self._lane.name

    def synchronise(self, made: object) -> None:
        """Wait for what the calling thread, one of the op's, has enqueued and `made` for others."""
        streams = None if self._lane is None else self._lane.streams
        if streams is not None:
            streams.synchronise(made)

    @property
    def is_running(self) -> bool:
        """True if its call has begun and not ended."""
        return not self._claim and self._args is not None

    @property
    def error(self) -> BaseException | None:
        """Exception that the call has raised; None if it has raised none so far."""
        return self._error

    @property
    def is_abandoned(self) -> bool:
        """True if its result is wanted no more, although its call has begun."""
        return self.done()

    def runs(self, fn: Callable[..., object]) -> bool:
        """Tell whether this is the function that the op runs."""
        return self._fn is fn

    # ---- on the event loop ---------------------------------------------------------------

    def put(self) -> None:
        """Put the op on its lane, unless it is there or was cancelled before."""
        if self._is_put:
            return
        self._is_put = True
        lane, tracker = self._lane, self.tracker
        if lane is None or self.done():
            return
        if tracker is not None:
            if tracker.is_closed:
                raise tracker.closed_error()
            tracker.pending[self] = None
        lane.put(self)

    def withdraw(self) -> bool:
        """Take the op back, once; False if it has started."""
        if not self.claim():
            return False
        self._was_withdrawn = True
        self._args, self._kwargs = None, RELEASED  # the lane may hold the op for a while
        if self.tracker is not None:
            self.tracker.forget(self)
        return True

    def resolve(self) -> None:
        """Wake those who wait for the op, whose call has ended."""
        self.is_done = True
        tracker = self.tracker
        if tracker is not None:
            tracker.forget(self)
        for waiter in self._drained:
            if not waiter.done():
                waiter.set_result(None)
        if self.done():
            return
        error = self._error
        if self._cancel_when_done:
            asyncio.Future.cancel(self)
        elif error is None:
            result = self._outcome
            if tracker is not None and type(result) in UNFINISHED:  # else it is for the library
                self.set_exception(unfinished_error(result, self._fn, "A device op"))
            else:
                self.set_result(result)
        elif isinstance(error, StopIteration):  # a future cannot carry one
            wrapped = RuntimeError(f"A device op raised StopIteration({error.value!r}).")
            wrapped.__cause__ = error
            self.set_exception(wrapped)
        else:
            self.set_exception(error)

    def cancel(self, msg: object = None) -> bool:
        """Cancel the op: at once if it has not started, else when it has ended.

        A task that awaits a started op is woken at once, and waits for its end by itself.
        """
        if self.done():
            return False
        # A started op is using its arrays. A task that awaits it wakes now and waits in
        # `_drain`; where nobody does, as in `asyncio.gather`, the future has to stay pending
        # until the call has ended (decision 5).
        if self._was_withdrawn or self.withdraw() or self._is_awaited:
            return asyncio.Future.cancel(self, msg)
        # On Ctrl-C the op is left to its daemon thread, unless its result would be a half
        # written file (decision 4).
        if is_interrupted() and not self.writes_files:
            return asyncio.Future.cancel(self, msg)
        self._cancel_when_done = True
        return True

    def add_done_callback(
        self, fn: Callable[[Self], object], /, *, context: Context | None = None
    ) -> None:
        """Call `fn` when the op is done; puts the op on its lane if it is not there."""
        if not self._is_put:
            self.put()
        asyncio.Future.add_done_callback(self, fn, context=context)

    def __await__(self) -> Generator[object, None, T]:
        self._is_awaited = True
        if not self._is_put:
            self.put()
        try:
            return (yield from asyncio.Future.__await__(self))
        except asyncio.CancelledError:
            yield from self._drain().__await__()
            raise
        except RuntimeError:  # of a task of another loop, if the function has not raised it
            require_loop(self.get_loop(), f"The call of {self._fn!r}")
            raise

    async def _drain(self) -> None:
        """Wait for the end of a started op whose await was cancelled."""
        if not self.cancelled():  # finished in the same loop cycle, or raised this itself
            if self.done():
                return
            asyncio.Future.cancel(self)
        if self._was_withdrawn or self.withdraw() or self.is_done:
            return
        if not await wait_shielded(
            lambda: self.is_done, self._new_drained, through_interrupt=self.writes_files
        ):
            # The call goes on, on a thread that nobody waits for: its strategy must not hand the
            # lane or its buffers to anyone else.
            replica = PLACE.get().replica
            if replica is not None:
                replica.op_abandoned()

    def _new_drained(self) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = asyncio.Future(loop=self.get_loop())
        self._drained = (*self._drained, waiter)
        return waiter

    def __del__(self) -> None:
        if not self._is_put and self._lane is not None and not self.done():
            warnings.warn(
                f"The call of {self._fn!r} on {self._lane.name} was never awaited, so it did not "
                "run.",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )
        if self._error is not None:  # else there is nothing that asyncio would have to report
            FUTURE_DEL(self)

    # ---- as a coroutine ------------------------------------------------------------------

    def send(self, value: None) -> object:
        """Go on to the next wait; for a task that was given the op as a coroutine."""
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.send(value)

    def throw(self, *error: Any) -> object:
        """Raise at the current wait, such as the cancellation of the op's task."""
        # `create_task(op)` cancelled before its first step: the op was never put on its lane.
        if self._steps is None:
            self.cancel()
            self._steps = self.__await__()
        return self._steps.throw(*error)

    def close(self) -> None:
        """End the wait; a queued op is withdrawn."""
        if not self.done():
            self.cancel()
        if self._steps is not None:
            self._steps.close()


@final
@dataclass(frozen=True, slots=True)
class UnfinishedOp:
    """An op in flight, in words.

    Attributes:
        fn_name: Name of the function that it runs.
        device_name: Where; None for a program that its replica's group put there.
        task_name: Name of the task that awaits it; None if it is waited for in another way, as
            `asyncio.gather` does with ops that it was given.
        where: `file:line` of that task's await in the user's code; "-" if it has none.
        is_running: Whether it has begun; else it is queued.
    """

    fn_name: str
    device_name: str | None
    task_name: str | None
    where: str
    is_running: bool

    def describe(self) -> str:
        """Return, for example, "sum on cpu:1, awaited by task 'Task-3' at step.py:12"."""
        words = self.fn_name
        if self.device_name is not None:
            words += f" on {self.device_name}"
        if self.task_name is not None:
            words += f", awaited by task {self.task_name!r}"
        return words if self.where == "-" else f"{words} at {self.where}"


@final
class OpTracker:
    """Counts the ops of a run from the moment they are put on a lane until they are done.

    Args:
        observers: Told what happens to the ops; None takes those of all strategies.

    Attributes:
        pending: Ops in flight, as the keys, in the order in which they were put. An op that was
            withdrawn is not in flight any more.
        num_done: Ops that have ended, a sign of progress.
        is_closed: Whether the run has ended, so that ops are refused.
    """

    __slots__ = ("_is_given_up", "_waiter", "is_closed", "num_done", "observers", "pending")

    def __init__(self, observers: Observers | None = None) -> None:
        self.observers = observers if observers is not None else observers_of_all()
        self.pending: dict[AnyOp, None] = {}  # ordered: a set is walked by address
        self.num_done = 0
        self.is_closed = False
        self._is_given_up = False
        self._waiter: asyncio.Future[None] | None = None

    def close(self) -> None:
        """Refuse ops from now on: the run has ended."""
        self.is_closed = True

    def closed_error(self) -> ContextError:
        """Return the error of an op that is put after the end of the run."""
        return ContextError(
            "A device op was awaited after the run that it was made in. Await it in its step."
        )

    def forget(self, op: AnyOp) -> None:
        """Count an op in flight less: it is done or was withdrawn."""
        pending = self.pending
        pending.pop(op, None)
        self.num_done += 1
        if not pending and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def running(self, replica_id: int) -> AnyOp | None:
        """Return an op of this replica whose call has begun and not ended; from any thread.

        Whatever a thread queues by `CompletionQueue.call_soon` while an op runs is called on the
        event loop before that op is done.
        """
        for op in list(self.pending):
            if op.is_running and op.replica_id == replica_id:
                return op
        return None

    def blocks(self, replica_id: int, task: asyncio.Future[object] | None) -> bool:
        """Tell whether a task can do nothing but wait for the one op of its replica in flight."""
        own = [op for op in self.pending if op.replica_id == replica_id]
        awaited = _awaited_op(task) if isinstance(task, asyncio.Task) else None
        return awaited is not None and own == [awaited[0]]

    def unfinished(self, replica_id: int) -> tuple[UnfinishedOp, ...]:
        """Return the ops of this replica in flight, in the order in which they were put."""
        ops = [op for op in self.pending if op.replica_id == replica_id]
        found = _tasks_that_await(ops)
        unfinished = []
        for op in ops:
            task_name, where = found.get(op, (None, "-"))
            name, device_name = op.fn_name, op.device_name
            unfinished.append(UnfinishedOp(name, device_name, task_name, where, op.is_running))
        return tuple(unfinished)

    def withdraw_queued(self) -> None:
        """Take back every op that has not started."""
        for op in list(self.pending):
            if op.withdraw():
                op.cancel()

    def give_up(self) -> None:
        """Wait no more for ops that have begun: they hang."""
        self._is_given_up = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def drain(self, on_cancel: Callable[[asyncio.CancelledError], None]) -> bool:
        """Wait until no op is in flight; False if they are left: interrupted, or given up.

        Cancellation:
            Handed to `on_cancel`, see `wait_shielded`.
        """
        self.withdraw_queued()
        has_waited = await wait_shielded(
            lambda: not self.pending or self._is_given_up, self._new_waiter, on_cancel
        )
        return has_waited and not self._is_given_up

    def _new_waiter(self) -> asyncio.Future[None]:
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter


def observers_of_all() -> Observers:
    """Return those who are told about ops outside every run: the observers of all strategies."""
    return REGISTRY.once("observers_of_ops", Observers)


def is_of_user(thing: object) -> bool:
    """Tell whether this is a function that is not the library's own."""
    return callable(thing) and not str(getattr(thing, "__module__", "")).startswith(LIBRARY)


def _tasks_that_await(ops: Sequence[AnyOp]) -> dict[AnyOp, tuple[str, str]]:
    """Return the name of the task that awaits each op, and `file:line` of its await.

    All tasks are searched when this is needed; recording it would cost each op 0.3 µs.
    """
    found: dict[AnyOp, tuple[str, str]] = {}
    for task in asyncio.all_tasks(ops[0].get_loop()) if ops else ():
        awaited = _awaited_op(task)
        if awaited is not None:
            found[awaited[0]] = task.get_name(), awaited[1]
    return found


def _awaited_op(task: asyncio.Task[object]) -> tuple[AnyOp, str] | None:
    """Return the op that a task awaits, itself or in its coroutines, and `file:line` of that."""
    awaited: object = task.get_coro()
    site = "-"
    for _ in range(MAX_DEPTH):
        if isinstance(awaited, Op):  # the task was made of it
            return awaited, site
        frame = getattr(awaited, "cr_frame", getattr(awaited, "gi_frame", None))
        if frame is None:
            break
        if frame.f_code is Op.__await__.__code__:
            return frame.f_locals["self"], site
        if not frame.f_code.co_filename.startswith(PACKAGE):
            site = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        awaited = getattr(awaited, "cr_await", getattr(awaited, "gi_yieldfrom", None))
    return None
