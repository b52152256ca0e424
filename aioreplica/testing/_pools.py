"""Simulated pools: calls that are submitted, started and completed as three separate events.

A pool starts its calls first in first out, as many at a time as it has workers, and completes them
in any order: so with one worker, in order. A call runs when it completes, so whatever happens to
its arguments while it is in flight happens to it. If it has to wait it does so on a thread
(`_threads.py`), and being woken is one more event.

An op may start, and later complete, at any moment, and does so before `MAX_LATENCY_S` of virtual
time have passed. Hence a timeout well above that is never reached because of an op, and a sleep
below it may end before or after one.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import events
from collections import deque
from collections.abc import Callable
from contextvars import Context
from functools import partial
from inspect import CO_COROUTINE
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, final

from ._errors import RealIOError, StuckStepError
from ._forbidden import wait_in_c
from ._participants import JITTER_S, MAX_ENDED
from ._threads import NeedsThreads, OpRun, OpThreads

if TYPE_CHECKING:
    from ._faults import FaultRun
    from ._loop import SimLoop


LATENCY_S: Final = 0.001
"""How long an op takes where nothing competes with it."""
MAX_LATENCY_S: Final = 0.25
"""How long an op takes at most, beyond what it sleeps and what faults add."""

QUEUED, STARTABLE, IN_FLIGHT, LATE, WAITING, AWAKE, OVER = range(7)


class PoolOp:
    """One call in a pool; a participant while it can start or complete.

    Attributes:
        due: When it starts or completes if nothing holds it back.
        deadline: When it has to have done so.
        since_step: After how many steps of the run it could start or complete.
        run: The thread that it runs on; None before it completes, and where it needs none.
    """

    __slots__ = (
        "args", "deadline", "due", "fn", "future", "index", "pool", "run", "since_step",
        "state",
    )  # fmt: skip

    def __init__(
        self, pool: SimPool, fn: Callable[..., Any], args: tuple[Any, ...], future: Any
    ) -> None:
        self.pool = pool
        self.fn = fn
        self.args = args
        self.future = future
        self.state = QUEUED
        self.due = self.deadline = 0.0
        self.since_step = 0
        self.run: OpRun | None = None
        self.index = pool.loop.new_index()

    @property
    def loop(self) -> SimLoop:
        """The loop of the run."""
        return self.pool.loop

    @property
    def scope(self) -> SimPool | None:
        """The pool, where the op starts next and no fault may strike; else None.

        Its call runs when it completes, so that it has started is known to the pool alone. One
        that was cancelled may tell those who wait for it. While a task blocks the loop, what
        follows the step may be the rest of that task.
        """
        table = self.pool.table
        is_known = self.state != STARTABLE or self.future.cancelled() or table.is_blocked
        return None if is_known or table.faults is not None else self.pool

    # ---- what kinds of op do in their own way ------------------------------------------------

    def claim(self) -> bool:
        """Take the call for a worker; False if it was cancelled."""
        return not self.future.cancelled()

    def perform(self, context: Context) -> None:
        """Run the call and keep what comes of it."""
        try:
            outcome = context.run(self.fn, *self.args)
        except (KeyboardInterrupt, StuckStepError):
            raise
        except BaseException as error:  # noqa: BLE001 - raised where the call is awaited
            self.fn, self.args = _FAILED, (error,)
        else:
            self.fn, self.args = _DONE, (outcome,)

    def fail(self, error: BaseException) -> None:
        """End the call with an error, without running it."""
        self.fn, self.args = _FAILED, (error,)

    def deliver(self) -> None:
        """Set the result or the exception of the future."""
        future, fn = self.future, self.fn
        (outcome,), self.args = self.args, ()
        if future.done():
            return
        if fn is _DONE:
            future.set_result(outcome)
        elif isinstance(outcome, StopIteration):
            wrapped = RuntimeError(f"The call raised {outcome!r}, which a future cannot carry.")
            wrapped.__cause__ = outcome
            future.set_exception(wrapped)
        else:
            future.set_exception(outcome)

    @property
    def lender(self) -> Any:
        """Object shared by ops that belong together; None if the pool knows of none."""
        return None

    def describe(self) -> str:
        """Name the call for stories."""
        return name_of_call(self.fn, self.args)

    # ---- the three events --------------------------------------------------------------------

    def is_off(self) -> bool:
        """A call is never taken out of the timers."""
        return False

    def become_due(self, loop: SimLoop) -> None:
        """Become an option: the time that was added to the call is over."""
        self.due = loop.now
        self.deadline = loop.now + (0.0 if self.state == LATE else MAX_LATENCY_S)
        self.since_step = len(loop.order)
        loop.external.append(self)

    def fire(self) -> None:
        """Start, or complete."""
        pool = self.pool
        loop = pool.loop
        if not loop.enabled and self.due > loop.now:  # nothing else to do: time passes
            let_time_pass(loop, self.due)
            loop.early_until = loop.now + JITTER_S
        if self.state == STARTABLE:
            self._start(pool, loop)
        elif self.state == IN_FLIGHT:
            self._complete(pool, loop)
        elif self.state == AWAKE:
            self._go_on(self.on_thread())
        else:
            pool.ended()
            self.state = OVER
            self.deliver()

    def _start(self, pool: SimPool, loop: SimLoop) -> None:
        pool.offered = None
        if not self.claim():
            pool.offer()
            pool.wake_if_idle()
            return
        pool.num_running += 1
        self.state = IN_FLIGHT
        if pool.queue:
            pool.offer()
        extra = 0.0
        if pool.table.faults is not None:
            extra = pool.table.faults.extra_latency_s(self)
        if extra:
            if extra < math.inf:
                loop.call_when_due(loop.now + extra, self)
            return
        self.due = loop.now + LATENCY_S
        self.deadline = loop.now + MAX_LATENCY_S
        self.since_step = len(loop.order)
        loop.external.append(self)

    def _complete(self, pool: SimPool, loop: SimLoop) -> None:
        table = pool.table
        error = table.faults.error_of(self) if table.faults is not None else None
        if error is not None:
            self.fail(error)
        elif table.threads is not None:
            table.num_sleeps = 0
            self.run = OpRun(self, table.threads.take())
            self._go_on(self.run)
            return
        else:
            outer, table.current_op = table.current_op, self
            table.slept_s = 0.0
            table.num_sleeps = 0
            events._set_running_loop(None)
            try:
                self.perform(pool.context)
            finally:
                if outer is None:
                    events._set_running_loop(loop)
                table.current_op = outer
            if not table.slept_s and not table.needs_threads:
                pool.ended()
                self.state = OVER
                self.deliver()
                return
        self._end()

    def _go_on(self, run: OpRun) -> None:
        """Let the op go on where it waits, until it waits again or ends."""
        try:
            if not run.go_on():
                return
        except RealIOError as error:
            self.fail(error)
        except BaseException:
            self._leave_thread(run)
            raise
        else:
            if run.thread.is_lost:
                self.fail(asyncio.CancelledError())
        self._leave_thread(run)
        self._end()

    def _leave_thread(self, run: OpRun) -> None:
        threads = self.pool.table.threads
        assert threads is not None  # the op has one of them
        threads.give_back(run.thread)
        self.run = None

    def _end(self) -> None:
        """Deliver what came of the call, once the time that it slept is over."""
        loop, table = self.pool.loop, self.pool.table
        if table.slept_s and not (table.is_given_up or table.needs_threads):
            self.state = LATE
            loop.call_when_due(loop.now + table.take_slept(), self)
        else:
            self.pool.ended()
            self.state = OVER
            self.deliver()
            if table.needs_threads and not table.is_given_up:
                raise NeedsThreads

    # ---- waiting for others ------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """True if it is suspended until another participant wakes it."""
        return self.state == WAITING

    @property
    def is_awake(self) -> bool:
        """True if it may go on where it stood still."""
        return self.state == AWAKE

    def on_thread(self) -> OpRun:
        """Return the run of an op that has a thread.

        Cancellation:
            A CancelledError where it has none: the schedule is run again, with threads.
        """
        if self.run is None:
            self.pool.table.needs_threads = True
            raise asyncio.CancelledError("The op has to wait, so the schedule begins again.")
        return self.run

    def begin_wait(self) -> None:
        """Suspend the op."""
        self.state = WAITING

    def offer(self) -> None:
        """Become an option: the op may go on."""
        loop = self.pool.loop
        self.state = AWAKE
        self.due, self.deadline = loop.now, loop.now + MAX_LATENCY_S
        self.since_step = len(loop.order)
        loop.external.append(self)

    def retract(self) -> None:
        """Be no option any more."""
        self.state = WAITING
        self.pool.loop.external.remove(self)

    def unwind(self) -> None:
        """End a suspended op with a CancelledError."""
        run = self.run
        if run is not None and self.state in (WAITING, AWAKE):
            if self.state == AWAKE:
                self.retract()
            run.thread.doom()
            self._go_on(run)


def let_time_pass(loop: SimLoop, due: float) -> None:
    """Move the clock on to `due`, or to the next timer if that comes before."""
    when = loop.next_when()
    loop.now = due if when is None or when > due else max(when, loop.now)
    if loop.moved is not None:
        loop.moved(loop.now)


def called_by(fn: Any, args: tuple[object, ...]) -> object:
    """Return what a call calls, inside `partial` and contexts of its own."""
    if isinstance(fn, partial):
        fn, args = fn.func, (*fn.args, *args)
    if args and isinstance(getattr(fn, "__self__", None), Context):
        return args[0]  # what runs in a context of its own, as in asyncio.to_thread
    return fn


def name_of_call(fn: object, args: tuple[object, ...]) -> str:
    """Return the name of what a call calls."""
    fn = called_by(fn, args)
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


def _DONE() -> None:  # noqa: N802 - a mark, only compared
    """Mark a call that returned."""


def _FAILED() -> None:  # noqa: N802 - a mark, only compared
    """Mark a call that raised."""


DEFAULT_WORKERS: Final = 8
"""Size of the default pool: it must not depend on the machine, or tokens would."""
MAX_SLEEPS: Final = 100
"""How often an op may sleep before each sleep lets time pass: one that polls would never end."""


@final
class SimPool:
    """Workers that serve one queue.

    Args:
        table: The pools of the run.
        name: For traces and faults: the device, or what kind of executor.
        num_workers: How many calls may be in flight.

    Invariants:
        * At most one call can start: the first of the queue, if a worker is free.
    """

    __slots__ = (
        "context", "is_inside", "lenders", "loop", "name", "num_running", "num_workers", "offered",
        "queue", "table", "waiters",
    )  # fmt: skip

    def __init__(self, table: PoolTable, name: str, num_workers: int) -> None:
        self.table = table
        self.loop = table.loop
        self.name = name
        self.num_workers = num_workers
        self.num_running = 0
        self.queue: deque[PoolOp] = deque()
        self.offered: PoolOp | None = None
        self.context = Context()  # threads do not see the caller's variables
        self.is_inside = False  # whether a call is in that context, so that no other can enter it
        self.lenders: list[Any] = []  # runs of the library with an op that lends its worker
        self.waiters: list[OpRun] = []  # ops that wait until no call is left

    @property
    def is_busy(self) -> bool:
        """True if a call is in flight or waits for its start."""
        return bool(self.queue or self.num_running or self.offered)

    def put(self, op: PoolOp) -> None:
        """Enqueue a call."""
        self.table.note(op)
        if self.loop.observer is not None and (told := wait_in_c(called_by(op.fn, op.args))):
            self.loop.notes[told] = None  # C that calls C is seen by no profiler
        self.queue.append(op)
        if self.offered is None:
            self.offer()

    def offer(self) -> None:
        """Let the first call start if a worker is free."""
        if self.queue and self.offered is None and self.num_running < self.num_workers:
            op = self._next() if self.lenders else self.queue.popleft()
            if op is None:
                return
            self.offered = op
            op.state = STARTABLE
            now = self.loop.now
            op.due, op.deadline = now, now + MAX_LATENCY_S
            op.since_step = len(self.loop.order)
            self.loop.external.append(op)

    def ended(self) -> None:
        """Free a worker."""
        self.num_running -= 1
        if self.queue:
            self.offer()
        self.wake_if_idle()

    def wait_until_idle(self, run: OpRun) -> None:
        """Let an op, of another pool, wait until no call is left."""
        run.catch_up()
        while self.is_busy:
            self.waiters.append(run)
            try:
                run.wait(None, None)
            finally:
                self.waiters.remove(run)

    def wake_if_idle(self) -> None:
        """Wake the ops that wait until no call is left, if none is."""
        if self.waiters and not self.is_busy:
            for run in self.waiters:
                run.wake()

    # ---- lending a worker --------------------------------------------------------------------

    def lend(self, lender: object) -> None:
        """Free the worker of an op that waits; ops of the same run stay behind it."""
        self.lenders.append(lender)
        self.ended()

    def take_back(self, lender: object, give_worker: Callable[[], None]) -> bool:
        """Ask for a worker for an op that goes on; False if `give_worker` is called later."""
        if self.num_running < self.num_workers and self.offered is None:
            self.num_running += 1
            return True
        self.queue.append(_Return(self, give_worker, (), lender))
        return False

    def lends_no_longer(self, lender: object) -> None:
        """Let the ops of a run go on behind the one that had lent its worker."""
        self.lenders.remove(lender)
        self.offer()

    def _next(self) -> PoolOp | None:
        """Take the first op out of the queue that need not stay behind one that waits."""
        for at, op in enumerate(self.queue):
            if type(op) is _Return:
                del self.queue[at]
                self.num_running += 1
                op.fn()
                self.offer()
                return None
            if op.lender is None or op.lender not in self.lenders:
                del self.queue[at]
                return op
        return None


@final
class _Return(PoolOp):
    """Stands in a queue for an op that wants its worker back; never an option itself."""

    __slots__ = ()


@final
class PoolTable:
    """The pools of one run, by the executor that each stands for."""

    __slots__ = (
        "_by_executor",
        "_limit",
        "current_op",
        "faults",
        "is_blocked",
        "is_given_up",
        "loop",
        "needs_threads",
        "num_sleeps",
        "ops",
        "pools",
        "slept_s",
        "threads",
    )  # fmt: skip

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self._by_executor: dict[int, tuple[object, SimPool]] = {}
        self.pools: list[SimPool] = []
        self.faults: FaultRun | None = None
        self.ops: list[PoolOp] = []  # of this run, but for old ones that are over
        self._limit = MAX_ENDED
        self.slept_s = 0.0
        self.current_op: PoolOp | None = None
        self.num_sleeps = 0
        self.threads: OpThreads | None = None
        self.needs_threads = False
        self.is_given_up = False
        self.is_blocked = False  # while a task blocks the loop

    def note(self, op: PoolOp) -> None:
        """Keep an op; forget old ones that are over."""
        ops = self.ops
        if len(ops) >= self._limit:
            ops[:] = [each for each in ops if each.state != OVER]
            self._limit = 2 * len(ops) + MAX_ENDED
        ops.append(op)

    def sleep(self, op: PoolOp, seconds: float) -> None:
        """Let an op sleep: it is late by so much, or suspended if it sleeps very often."""
        self.slept_s += seconds
        self.num_sleeps += 1
        if self.loop.moved is not None:
            self.loop.moved(self.loop.now + self.slept_s)
        if self.num_sleeps > MAX_SLEEPS:
            op.on_thread().catch_up()

    def catch_up(self) -> None:
        """Let the time pass that the op has slept that runs: others see what it does next."""
        if self.slept_s and self.current_op is not None and not self.is_given_up:
            self.current_op.on_thread().catch_up()

    def take_slept(self) -> float:
        """Return for how long the op has slept that runs, and count that no longer."""
        slept_s, self.slept_s = self.slept_s, 0.0
        if slept_s and self.loop.moved is not None:
            self.loop.moved(self.loop.now)
        return slept_s

    @property
    def waiting(self) -> list[PoolOp]:
        """The suspended ops that no timeout wakes."""
        if self.threads is None:
            return []
        return [op for op in self.ops if op.is_waiting and op.run and not op.run.is_timed]

    def unwind(self) -> None:
        """End every op that has a thread."""
        self.is_given_up = True
        if self.threads is not None:
            for op in tuple(self.ops):
                op.unwind()
                self.slept_s = 0.0

    def close(self) -> None:
        """Let go of everything: these close cycles, which only the collector could free."""
        self.pools, self.ops, self._by_executor = [], [], {}

    def make(self, name: str, num_workers: int) -> SimPool:
        """Make a pool that stands for no executor."""
        pool = SimPool(self, name, num_workers)
        self.pools.append(pool)
        return pool

    def pool_named(self, name: str, num_workers: int) -> SimPool:
        """Return the pool of a name, making it if needed."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        return self.make(name, num_workers)

    def pool_of(self, executor: object, *, is_default: bool = False) -> SimPool:
        """Return the twin of an executor; None is the loop's default one.

        Args:
            executor: The executor.
            is_default: Whether it is what the program has made a loop's default one.
        """
        found = self._by_executor.get(id(executor))
        if found is not None:
            return found[1]
        workers = DEFAULT_WORKERS
        if executor is not None:
            workers = getattr(executor, "_max_workers", DEFAULT_WORKERS)
        is_default = is_default or executor is None
        name = "default pool" if is_default else f"pool {len(self.pools)}"
        pool = self.make(name, workers)
        self._by_executor[id(executor)] = executor, pool  # kept alive: ids are used again
        return pool

    def submit_call(
        self,
        executor: object,
        fn: Callable[..., object],
        args: tuple[object, ...],
        waits: Any = None,
    ) -> asyncio.Future[Any]:
        """Submit a call; return the asyncio future of its result, of the loop that waits for it."""
        if type(fn) is FunctionType and fn.__code__.co_flags & CO_COROUTINE:
            raise TypeError("coroutines cannot be used with run_in_executor()")
        loop: Any = waits or self.loop
        is_default = executor is None
        if is_default:
            executor = loop._default_executor  # None unless the program has set one
        if getattr(executor, "_shutdown", False):
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: asyncio.Future[Any] = loop.create_future()
        pool = self.pool_of(executor, is_default=is_default)
        pool.put(PoolOp(pool, fn, args, future))
        return future
