"""Simulated pools: calls that are submitted, started and completed as three separate events.

A pool starts its calls first in first out, as many at a time as it has workers, and completes them
in any order: so with one worker, in order. A call runs when it completes, so whatever happens to
its arguments while it is in flight happens to it.

An op may start, and later complete, at any moment, and does so before `MAX_LATENCY_S` of virtual
time have passed. Hence a timeout well above that is never reached because of an op, and a sleep
below it may end before or after one.
"""

from __future__ import annotations

import math
from asyncio import events
from collections import deque
from collections.abc import Callable
from contextvars import Context
from inspect import CO_COROUTINE
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, final

if TYPE_CHECKING:
    from ._loop import SimLoop

LATENCY_S: Final = 0.001
"""How long an op takes where nothing competes with it."""
MAX_LATENCY_S: Final = 0.25
"""How long an op takes at most, beyond what it sleeps and what faults add."""
DEFAULT_WORKERS: Final = 8
"""Size of the default pool: it must not depend on the machine, or tokens would."""

QUEUED, STARTABLE, IN_FLIGHT, LATE = range(4)


class PoolOp:
    """One call in a pool; a participant while it can start or complete.

    Attributes:
        due: When it starts or completes if nothing holds it back.
        deadline: When it has to have done so.
        since_step: After how many steps of the run it could start or complete.
    """

    __slots__ = (
        "args", "deadline", "due", "fn", "future", "index", "pool", "since_step", "state"
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
        self.index = pool.loop.new_index()

    # ---- what kinds of op do in their own way ------------------------------------------------

    def claim(self) -> bool:
        """Take the call for a worker; False if it was cancelled."""
        return not self.future.cancelled()

    def perform(self) -> None:
        """Run the call and keep what comes of it."""
        context = self.pool.context
        loop = self.pool.loop
        events._set_running_loop(None)
        try:
            outcome = context.run(self.fn, *self.args)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever awaits the call
            self.fn, self.args = _FAILED, (error,)
        else:
            self.fn, self.args = _DONE, (outcome,)
        finally:
            events._set_running_loop(loop)

    def fail(self, error: BaseException) -> None:
        """End the call with an error, without running it."""
        self.fn, self.args = _FAILED, (error,)

    def deliver(self) -> None:
        """Hand the outcome to whoever awaits it."""
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

    def describe(self) -> str:
        """Name the call for stories."""
        name = getattr(self.fn, "__qualname__", None)
        return name or type(self.fn).__qualname__

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
            when = loop.next_when()
            loop.now = self.due if when is None or when > self.due else max(when, loop.now)
        if self.state == STARTABLE:
            self._start(pool, loop)
        elif self.state == IN_FLIGHT:
            self._complete(pool, loop)
        else:
            pool.ended()
            self.deliver()

    def _start(self, pool: SimPool, loop: SimLoop) -> None:
        pool.offered = None
        if not self.claim():
            pool.offer()
            return
        pool.num_running += 1
        self.state = IN_FLIGHT
        if pool.queue:
            pool.offer()
        extra = 0.0
        if loop.pools.faults is not None:
            extra = loop.pools.faults.extra_latency_s(self)
        if extra:
            if extra < math.inf:
                loop.call_when_due(loop.now + extra, self)
            return
        self.due = loop.now + LATENCY_S
        self.deadline = loop.now + MAX_LATENCY_S
        self.since_step = len(loop.order)
        loop.external.append(self)

    def _complete(self, pool: SimPool, loop: SimLoop) -> None:
        table = loop.pools
        error = table.faults.error_of(self) if table.faults is not None else None
        if error is not None:
            self.fail(error)
        else:
            table.slept_s = 0.0
            table.current_op = self
            try:
                self.perform()
            finally:
                table.current_op = None
            if table.slept_s:
                self.state = LATE
                slept, table.slept_s = table.slept_s, 0.0
                loop.call_when_due(loop.now + slept, self)
                return
        pool.ended()
        self.deliver()


def _DONE() -> None:  # noqa: N802 - a mark, only compared
    """Mark a call that returned."""


def _FAILED() -> None:  # noqa: N802 - a mark, only compared
    """Mark a call that raised."""


@final
class SimPool:
    """Workers that serve one queue.

    Args:
        loop: The loop of the run.
        name: For stories and faults: the device, or what kind of executor.
        num_workers: How many calls may be in flight.

    Invariants:
        * At most one call can start: the first of the queue, if a worker is free.
    """

    __slots__ = ("context", "loop", "name", "num_running", "num_workers", "offered", "queue")

    def __init__(self, loop: SimLoop, name: str, num_workers: int) -> None:
        self.loop = loop
        self.name = name
        self.num_workers = num_workers
        self.num_running = 0
        self.queue: deque[PoolOp] = deque()
        self.offered: PoolOp | None = None
        self.context = Context()  # threads do not see the caller's variables

    def put(self, op: PoolOp) -> None:
        """Enqueue a call."""
        self.loop.pools.ops.append(op)
        self.queue.append(op)
        if self.offered is None:
            self.offer()

    def offer(self) -> None:
        """Let the first call start if a worker is free."""
        if self.queue and self.offered is None and self.num_running < self.num_workers:
            self.offered = op = self.queue.popleft()
            op.state = STARTABLE
            now = self.loop.now
            op.due, op.deadline = now, now + MAX_LATENCY_S
            op.since_step = len(self.loop.order)
            self.loop.external.append(op)

    def ended(self) -> None:
        """Take note that a worker is free again."""
        self.num_running -= 1
        if self.queue:
            self.offer()


@final
class PoolTable:
    """The pools of one run, by the executor that each stands for."""

    __slots__ = ("_by_executor", "_loop", "current_op", "faults", "ops", "pools", "slept_s")

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._by_executor: dict[int, tuple[Any, SimPool]] = {}
        self.pools: list[SimPool] = []
        self.faults: Any = None
        self.ops: list[PoolOp] = []  # of this run, for the story
        self.slept_s = 0.0
        self.current_op: PoolOp | None = None

    def make(self, name: str, num_workers: int) -> SimPool:
        """Make a pool that stands for no executor."""
        pool = SimPool(self._loop, name, num_workers)
        self.pools.append(pool)
        return pool

    def pool_named(self, name: str, num_workers: int) -> SimPool:
        """Return the pool of a name, making it if needed."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        return self.make(name, num_workers)

    def pool_of(self, executor: Any) -> SimPool:
        """Return the twin of an executor; None is the loop's default one."""
        found = self._by_executor.get(id(executor))
        if found is not None:
            return found[1]
        workers = DEFAULT_WORKERS
        if executor is not None:
            workers = getattr(executor, "_max_workers", DEFAULT_WORKERS)
        name = f"pool {len(self.pools)}" if executor is not None else "default pool"
        pool = self.make(name, workers)
        self._by_executor[id(executor)] = executor, pool  # kept alive: ids are used again
        return pool

    def submit_call(self, executor: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Submit a call and return the asyncio future of its result."""
        if type(fn) is FunctionType and fn.__code__.co_flags & CO_COROUTINE:
            raise TypeError("coroutines cannot be used with run_in_executor()")
        if executor is not None and getattr(executor, "_shutdown", False):
            raise RuntimeError("cannot schedule new futures after shutdown")
        loop = self._loop
        future = loop.create_future()
        pool = self.pool_of(executor)
        pool.put(PoolOp(pool, fn, args, future))
        return future
