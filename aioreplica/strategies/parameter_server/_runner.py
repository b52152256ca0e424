"""Running closures: from the queue to the engine, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any, final

from ...devices import OwnedTask
from ...errors import ClosureCancelledError, StallError, WorkerLostError
from ._closure import Closure, ClosureFailedError
from ._messages import CoordinatorStatistics, ServerStatistics, Stamp
from ._packing import HomeSide, Packed
from ._queue import ClosureQueue, ScheduledClosure
from ._remote_value import error_of
from ._strategy import ParameterServerStrategy

DEPTH = 16
"""Closures under way per worker: one runs while the messages of the others are on their way. Dask
sends messages every 10 ms, so that a queue of 16 keeps a worker busy with closures of 1 ms."""

GRACE_S = 10.0
"""How much longer than its timeout a closure may take before its worker is restarted."""

REPORT_EVERY = 64
"""After so many closures the servers are asked what they have done."""


@final
class ClosureRunner:
    """Sends closures to the engine in order, and sees each of them to its end.

    Args:
        strategy: Whose closures.
        queue: Decides which may run.

    Attributes:
        queue: As given.
        is_open: Whether closures may be started.
        room: Who waits for room in the queue.
        idle: Who waits until every closure is over.
    """

    def __init__(self, strategy: ParameterServerStrategy, queue: ClosureQueue) -> None:
        self._strategy = strategy
        self.queue = queue
        self.is_open = False
        self.room: deque[asyncio.Future[None]] = deque()
        self.idle: list[asyncio.Future[None]] = []
        self._tasks: set[OwnedTask[None]] = set()
        self._outbox: list[ScheduledClosure] = []
        self._sending: OwnedTask[None] | None = None
        self._counts = {"finished": 0, "failed": 0, "cancelled": 0}
        self._reports: list[ServerStatistics] = []
        self._next_report = REPORT_EVERY
        self._waits_for_gate = False

    def pump(self) -> None:
        """Start what may run."""
        if not self.is_open:
            return
        for closure in self.queue.take(self._capacity()):
            self._strategy.closure_began(closure)
            self._outbox.append(closure)
        if self._outbox and (self._sending is None or self._sending.is_done):
            self._sending = self._start(self._send(), "closures on their way")
        while self.room and self.queue.has_room:
            waiter = self.room.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break
        if self.queue.is_idle:
            for waiter in self.idle:
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
        self.pump()

    def _start(self, work: Any, name: str) -> OwnedTask[None]:
        task = OwnedTask[None](work, name)
        self._tasks.add(task)

        def ended(error: BaseException | None) -> None:
            self._tasks.discard(task)
            if error is not None:
                self.fail(error)

        task.when_done(ended)
        return task

    async def _send(self) -> None:
        """Hand over what may run, in order; closures that came together are sent together."""
        while self._outbox:
            closures, self._outbox = self._outbox, []
            try:
                await self._submit(closures)
            except Exception as error:  # noqa: BLE001 - raised by the next schedule or join
                for closure in closures:
                    self._failed(closure, error)

    async def _submit(self, closures: list[ScheduledClosure]) -> None:
        servers = self._strategy.servers
        await servers.ready()
        for closure in closures:
            await servers.learn(closure.recipes)
        running = [closure for closure in closures if closure.state == "running"]
        submissions = self._strategy.engine.submit([self._sent(closure) for closure in running])
        for closure, submission in zip(running, submissions, strict=True):
            closure.submission = submission
            self._start(self._follow(closure), f"closure {closure.number} {closure.fn_name}")

    async def _follow(self, closure: ScheduledClosure) -> None:
        """See a closure to its end."""
        try:
            await self._awaited(closure)
        except ClosureFailedError as failure:
            self._failed(closure, error_of(failure, closure, HomeSide(self._strategy)))
        except Exception as error:  # noqa: BLE001 - raised by the next schedule or join
            self._failed(closure, error)
        if closure.state != "running":
            return
        self._counts["finished"] += 1
        self.queue.finished(closure)
        self._ended(closure)
        self.pump()
        if self._counts["finished"] >= self._next_report:
            self._next_report = self._counts["finished"] + REPORT_EVERY
            with suppress(WorkerLostError):
                await self.report()

    def _failed(self, closure: ScheduledClosure, error: BaseException) -> None:
        if closure.state != "running":
            return
        if isinstance(error, WorkerLostError):
            error = self._strategy.servers.noticed(error)
        self._counts["failed"] += 1
        _settle(closure, error)
        self.fail(error)

    def _sent(self, closure: ScheduledClosure) -> Closure:
        strategy = self._strategy
        servers = strategy.servers
        return Closure(
            servers.strategy_id,
            closure.fn_name,
            closure.is_async,
            closure.call,
            Stamp(servers.epoch, closure.number, self.queue.oldest),
            servers.handles,
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

    def fail(self, error: BaseException) -> None:
        """Cancel what is not over; the next `schedule` or `join` raises the error."""
        if isinstance(error, WorkerLostError):
            error = self._strategy.servers.noticed(error)
        for closure in self.queue.failed(error):
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
        for waiter in self.room:
            if not waiter.done():
                waiter.set_result(None)
        self.room.clear()
        self.pump()

    def abort(self, closure: ScheduledClosure, error: BaseException) -> None:
        """End a closure because its strategy is closed."""
        self.fail(error)

    def _ended(self, closure: ScheduledClosure) -> None:
        closure.abort = None  # else it is a circle, which keeps the result until it is collected
        closure.call = Packed(b"", ())  # the engine has its own; a RemoteValue may live long
        if not closure.settled.done():
            closure.settled.set_result(None)
        self._strategy.closure_ended(closure)

    async def report(self) -> None:
        self._reports = await self._strategy.servers.report(self.queue.oldest)

    def raise_error(self) -> None:
        error = self.queue.take_error()
        if error is not None:
            raise error

    async def wait_in(self, waiters: Any) -> None:
        future = asyncio.get_running_loop().create_future()
        waiters.append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.pump()  # room that was given to this one goes to the next
            raise
        finally:
            with suppress(ValueError):
                waiters.remove(future)

    def statistics(self) -> CoordinatorStatistics:
        """Return counts of closures, and those of the servers when they were asked last."""
        counts, reports = self._counts, self._reports
        gradients = sum(each.gradients for each in reports)
        return CoordinatorStatistics(
            self.queue.depth,
            self.queue.num_running,
            counts["finished"],
            counts["failed"],
            counts["cancelled"],
            sum(each.retries for each in reports),
            sum(each.pulls for each in reports),
            sum(each.pushes for each in reports),
            sum(each.bytes_pulled for each in reports),
            sum(each.bytes_pushed for each in reports),
            sum(each.dropped for each in reports),
            sum(each.stale for each in reports),
            max((each.max_staleness for each in reports), default=0),
            sum(each.staleness_sum for each in reports) / gradients if gradients else 0.0,
        )

    async def end_tasks(self) -> None:
        """Cancel what still runs for closures, and wait for its end."""
        self._outbox.clear()
        for task in tuple(self._tasks):
            task.cancel()
        for task in tuple(self._tasks):
            await task.ended()

    def __repr__(self) -> str:
        return f"<ClosureRunner | {self.queue!r}>"


def _settle(closure: ScheduledClosure, error: BaseException) -> None:
    if not closure.settled.done():
        closure.settled.set_exception(error)
        closure.settled.exception()  # looked at: it need not be fetched
