"""Simulated pools: calls that are submitted, started and completed as three separate events.

A pool starts its calls first in first out, as many at a time as it has workers, and completes them
in any order: so with one worker, in order. A call runs when it completes, so whatever happens to
its arguments while it is in flight happens to it. If it has to wait for somebody it stands still
there, on a thread (`_op_threads.py`), and being woken is one more event.

An op may start, and later complete, at any moment, and does so before `MAX_LATENCY_S` of virtual
time have passed. Hence a timeout well above that is never reached because of an op, and a sleep
below it may end before or after one.
"""

from __future__ import annotations

import asyncio
import math
from asyncio import events
from collections.abc import Callable
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ._errors import RealIOError
from ._op_run import OpRun
from ._op_threads import NeedsThreads

if TYPE_CHECKING:
    from ._loop import SimLoop
    from ._workers import SimPool

LATENCY_S: Final = 0.001
"""How long an op takes where nothing competes with it."""
MAX_LATENCY_S: Final = 0.25
"""How long an op takes at most, beyond what it sleeps and what faults add."""

QUEUED, STARTABLE, IN_FLIGHT, LATE, WAITING, AWAKE = range(6)


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

    # ---- what kinds of op do in their own way ------------------------------------------------

    def claim(self) -> bool:
        """Take the call for a worker; False if it was cancelled."""
        return not self.future.cancelled()

    def perform(self, context: Context) -> None:
        """Run the call and keep what comes of it."""
        try:
            outcome = context.run(self.fn, *self.args)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - it belongs to whoever awaits the call
            self.fn, self.args = _FAILED, (error,)
        else:
            self.fn, self.args = _DONE, (outcome,)

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

    @property
    def lender(self) -> Any:
        """What ops that belong together have in common; None where the pool knows of nothing."""
        return None

    def describe(self) -> str:
        """Name the call for stories."""
        fn: Any = self.fn
        args = self.args
        if isinstance(fn, partial):
            fn, args = fn.func, (*fn.args, *args)
        if args and isinstance(getattr(fn, "__self__", None), Context):
            fn = args[0]  # what runs in a context of its own, as in asyncio.to_thread
        return getattr(fn, "__qualname__", None) or type(fn).__qualname__

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
        elif self.state == AWAKE:
            self._go_on(self.on_thread())
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
        threads = self.pool.loop.pools.threads
        assert threads is not None  # the op has one of them
        threads.give_back(run.thread)
        self.run = None

    def _end(self) -> None:
        """Deliver what came of the call, once the time that it slept is over."""
        loop = self.pool.loop
        table = loop.pools
        if table.slept_s and not table.is_given_up:
            self.state = LATE
            slept, table.slept_s = table.slept_s, 0.0
            loop.call_when_due(loop.now + slept, self)
        else:
            self.pool.ended()
            self.deliver()
            if table.needs_threads and not table.is_given_up:
                raise NeedsThreads

    # ---- waiting for others ------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether it stands still until somebody wakes it."""
        return self.state == WAITING

    @property
    def is_awake(self) -> bool:
        """Whether it may go on where it stood still."""
        return self.state == AWAKE

    def on_thread(self) -> OpRun:
        """Return the run of an op that has a thread.

        Cancellation:
            A CancelledError where it has none: the schedule is run again, with threads.
        """
        if self.run is None:
            self.pool.loop.pools.needs_threads = True
            raise asyncio.CancelledError("The op has to wait, so the schedule begins again.")
        return self.run

    def begin_wait(self) -> None:
        """Stand still."""
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
        """End an op wherever it stands still, with a CancelledError."""
        run = self.run
        if run is not None and self.state in (WAITING, AWAKE):
            if self.state == AWAKE:
                self.retract()
            run.thread.doom()
            self._go_on(run)


def _DONE() -> None:  # noqa: N802 - a mark, only compared
    """Mark a call that returned."""


def _FAILED() -> None:  # noqa: N802 - a mark, only compared
    """Mark a call that raised."""
