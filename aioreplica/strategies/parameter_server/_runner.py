"""Running closures: from the queue to the engine, and what becomes of them.

The queue decides; what is here sends, waits, tells servers and wakes who waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any, cast, final

from ...cluster import Submission
from ...devices import OwnedTask
from ...errors import ClosureCancelledError, ContextError, WorkerLostError
from ._closure import Closure, ClosureFailedError
from ._messages import CoordinatorStatistics, ServerStatistics, Stamp, summed
from ._packing import HomeSide
from ._queue import ClosureQueue, ScheduledClosure
from ._remote_value import error_of
from ._strategy import ParameterServerStrategy
from ._watch import WorkerWatch

MAX_REPAIRS = 20
"""So many times a closure is sent again because of parameter servers that it has not reached."""

REPORT_EVERY = 64
"""After so many closures the servers are asked what they have done."""

REPORT_S = 10.0
"""How long servers may take to learn of the end of closures, before an error is raised anyway."""


@final
class ClosureRunner:
    """Sends closures to the engine in order, and sees each of them to its end.

    Args:
        strategy: Whose closures.
        max_attempts: How many workers may be lost while they run the same closure.
        counts: Closures that have ended in each way before.

    Attributes:
        queue: Decides who runs what.
        is_open: Whether closures may be started.
        room: Who waits for room in the queue.
        idle: Who waits until every closure is over, for the error that there was.
    """

    def __init__(
        self, strategy: ParameterServerStrategy, queue: ClosureQueue, max_attempts: int,
        counts: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        self._strategy = strategy
        self._max_attempts = max_attempts
        self.queue = queue
        self.is_open = False
        self.room: deque[asyncio.Future[BaseException | None]] = deque()
        self.idle: list[asyncio.Future[BaseException | None]] = []
        self._tasks: set[OwnedTask[None]] = set()
        self._ends: set[OwnedTask[None]] = set()
        self._outbox: list[ScheduledClosure] = []
        self._sending: OwnedTask[None] | None = None
        self.counts = counts or dict.fromkeys(("finished", "failed", "cancelled"), 0)
        self._reports: list[ServerStatistics] = []
        self._next_report = REPORT_EVERY
        self._waits_for_gate = False
        self._watch: WorkerWatch | None = None

    def open(self, queue: ClosureQueue) -> None:
        """Begin with an empty queue, behind what still runs of the one before, whosever it was."""
        former = self._strategy.runner or self
        queue.take_over(former.queue)
        _cancel(former._tasks)
        self._strategy.runner = self
        self.queue = queue
        self.is_open = True
        self._watch = WorkerWatch(self, self._strategy.servers, self._max_attempts)
        self._watch.begin()
        for closure in queue.with_workers():
            self._start_following(closure)

    # ---- sending -------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what may run; wake who may go on."""
        if not self.is_open:
            return
        now = _now()
        for closure in self.queue.take(now, begun_only=self._is_held_back()):
            if closure.again is None:
                closure.abort = self.abort
                self._strategy.closure_began(closure)
            self._outbox.append(closure)
        if self._outbox and (self._sending is None or self._sending.is_done):
            self._sending = self.start(self._send(), "closures on their way")
        while self.room and self.queue.has_room:
            if wake(self.room.popleft()):
                break
        if self.queue.is_idle and self.idle:
            self._wake_idle()
        if self._watch is not None:
            self._watch.look_in_time()

    def _wake_idle(self) -> None:
        waiters = [waiter for waiter in self.idle if not waiter.done()]
        error = self.queue.take_error() if waiters else None  # all who wait now hear of it
        for waiter in waiters:
            waiter.set_result(error)

    def _is_held_back(self) -> bool:
        if not self._strategy.gate.is_closed:
            return False
        if not self._waits_for_gate:  # a checkpoint looks at the variables
            self._waits_for_gate = True
            self.start(self._pump_when_open(), "closures held back")
        return True

    async def _pump_when_open(self) -> None:
        try:
            await self._strategy.gate.opened()
        finally:
            self._waits_for_gate = False
        self.pump()

    def start(self, work: Any, name: str) -> OwnedTask[None]:
        """Start a task that ends with the coordinator, or follows what still runs then."""
        task = OwnedTask[None](work, name)
        self._tasks.add(task)

        def ended(error: BaseException | None) -> None:
            self._tasks.discard(task)
            if error is not None and self.is_open:
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
                    self.failed(closure, error)

    async def _submit(self, closures: list[ScheduledClosure]) -> None:
        servers, engine = self._strategy.servers, self._strategy.engine
        await servers.ready()
        for closure in closures:
            await servers.learn(closure.recipes, closure.number)
        together: dict[str, list[ScheduledClosure]] = {}
        for closure in dict.fromkeys(closures):  # meanwhile its worker may have gone
            if closure.state == "running" and closure.submission is None:
                together.setdefault(closure.worker or "", []).append(closure)
        for worker, each in together.items():
            submissions = engine.submit(worker, [self.task_of(closure) for closure in each])
            for closure, submission in zip(each, submissions, strict=True):
                closure.submission = submission
                self._start_following(closure)
            self.queue.sent(_now(), each)
        if self._watch is not None:
            self._watch.look_in_time()

    def task_of(self, closure: ScheduledClosure) -> Closure:
        """Return what is sent to the worker that a closure is with.

        Raises:
            WorkerLostError: If a parameter server is lost.
        """
        servers = self._strategy.servers
        servers.require_all()
        is_over, oldest = closure.again is not None, self.queue.oldest
        stamp = Stamp(servers.epoch, closure.number, oldest, is_over=is_over)
        return Closure(
            servers.strategy_id, closure.fn_name, closure.is_async, closure.call, stamp,
            servers.handles, closure.timeout_s, self.queue.index_of(closure.worker or ""),
            servers.copies is not None, servers.num_made,
        )  # fmt: skip

    # ---- ends ----------------------------------------------------------------------------

    def _start_following(self, closure: ScheduledClosure) -> None:
        following = self._follow(closure, cast(Submission, closure.submission))
        self.start(following, f"closure {closure.number} {closure.fn_name}")

    async def _follow(self, closure: ScheduledClosure, submission: Submission) -> None:
        """See what was sent to its end; it may not be what counts by then."""
        error: BaseException | None = None
        try:
            await submission.wait()
        except ClosureFailedError as failure:
            error = error_of(failure, closure, HomeSide(self._strategy))
        except Exception as failure:  # noqa: BLE001 - raised by the next schedule or join
            error = failure
        if error is not None and await _is_repaired(self._strategy, error, closure):
            again = [closure] if closure.submission is submission and not closure.is_over else []
            self.queue.queue_again(_now(), again)
            self.pump()
        if closure.submission is not submission:
            return
        if closure.is_over:
            closure.submission = None
            self.queue.leave(_now(), closure)
            self.pump()
        elif error is None:
            await self._finished(closure)
        else:
            self.failed(closure, error)

    async def _finished(self, closure: ScheduledClosure) -> None:
        self.queue.finished(_now(), closure)
        if closure.again is not None:
            closure.made_again()
            self.pump()
            return
        self.counts["finished"] += 1
        self._strategy.servers.progress.finished(closure)
        self._ended(closure)
        self.pump()
        if self.counts["finished"] >= self._next_report:
            self._next_report = self.counts["finished"] + REPORT_EVERY
            with suppress(WorkerLostError):
                await self.report()

    def failed(self, closure: ScheduledClosure, error: BaseException) -> None:
        """Learn that a closure has failed."""
        if isinstance(error, WorkerLostError):
            error = self._strategy.servers.noticed(error)
        if closure.again is not None:
            self.queue.drop(_now(), closure)
            closure.made_again(error)
            self.pump()
        elif not closure.is_over:
            self.counts["failed"] += 1
            self.queue.leave(_now(), closure)
            if not closure.is_isolated:
                self.fail(error, closure)
                return
            self.queue.drop(_now(), closure)
            self._end([closure], error, closure, is_alone=True)

    def fail(self, error: BaseException, failed: ScheduledClosure | None = None) -> None:
        """Cancel what is not over; the next `schedule` or `join` raises the error.

        Before it does, servers and workers know of the end of all these closures.
        """
        if isinstance(error, WorkerLostError):
            error = self._strategy.servers.noticed(error)
        self._end(self.queue.failed(_now(), error), error, failed)

    def _end(
        self, closures: list[ScheduledClosure], error: BaseException,
        failed: ScheduledClosure | None, *, is_alone: bool = False,
    ) -> None:  # fmt: skip
        self._strategy.servers.lose(closures)
        self._strategy.servers.progress.failed(each for each in closures if each.is_under_way)
        work = self._tell_and_settle(closures, error, failed, is_alone)
        task = OwnedTask[None](work, "end of closures after an error")
        self._ends.add(task)
        task.when_done(lambda _error: self._ends.discard(task))

    async def _tell_and_settle(
        self, closures: list[ScheduledClosure], error: BaseException,
        failed: ScheduledClosure | None, is_alone: bool,
    ) -> None:  # fmt: skip
        waiting = [c.submission for c in closures if c.submission and c.began_s is None]
        is_of_all = failed is None and isinstance(error, WorkerLostError)
        try:
            await self._strategy.engine.cancel(waiting)
            await self._tell_servers()
        finally:
            for closure in closures:
                if not closure.settled.done():
                    self.counts["cancelled"] += closure is not failed
                    own = is_of_all or closure is failed
                    closure.fail(error if own else _cancelled(closure, error))
                self._ended(closure)
            self.queue.ended(is_alone=is_alone)
            while self.room and not is_alone:
                wake(self.room.popleft())
            self.pump()

    async def _tell_servers(self) -> None:
        """Tell servers of the end of closures; one that does not answer has it in its queue."""
        with suppress(WorkerLostError, ContextError, TimeoutError):
            async with asyncio.timeout(REPORT_S):
                await self.report()

    def abort(self, error: BaseException) -> None:
        """End closures because their strategy is closed."""
        if not self.queue.is_ending:
            self.fail(error)

    def _ended(self, closure: ScheduledClosure) -> None:
        closure.let_go()
        self._strategy.closure_ended(closure)

    async def make_again(self, closure: ScheduledClosure) -> None:
        """Have a result made again that was lost with its worker.

        Raises:
            WorkerLostError: If there is no worker for it, or the coordinator is closed.
            Exception: What the closure raises this time.
        """
        if closure.again is None:
            if not self.is_open:
                raise _not_again(closure)
            self._strategy.servers.require_all()
            closure.again = asyncio.get_running_loop().create_future()
            self.queue.add_again(closure)
            self.pump()
        await asyncio.shield(closure.again)

    # ---- for the coordinator ---------------------------------------------------------------

    async def report(self) -> None:
        """Tell the servers which closures are over; ask what they have done."""
        queue = self.queue
        self._reports = await self._strategy.servers.report(queue.oldest, queue.newest)

    def statistics(self) -> CoordinatorStatistics:
        """Return counts of closures, and those of the servers when they were asked last."""
        return summed(self.queue.depth, self.queue.num_running, self.counts, self._reports)

    async def close(self, error: Exception, *, is_for_good: bool = True) -> None:
        """End what is not over with an error, and all that is done here.

        What runs is stopped if the engine can end it where it is. If it goes on, it keeps its place
        for who opens a coordinator again, and its result is let go when it is over, if this is for
        good.

        Cancellation:
            Raised again once closing is done.
        """
        closing = OwnedTask(self._close(error, is_for_good), "end of a coordinator")
        await closing.ended()
        await closing

    async def _close(self, error: Exception, is_for_good: bool) -> None:
        if self.queue.is_idle:
            await self._tell_servers()
        elif not self.queue.is_ending:
            self.fail(error)
        for task in tuple(self._ends):
            await task.ended()
        left = [(c, c.submission) for c in self.queue.with_workers() if c.submission]
        if is_for_good:
            await self._strategy.engine.cancel([each for c, each in left if c.began_s is None])
        self.is_open = False
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        for closure in self.queue.waiting_again():
            self.failed(closure, error)
        for closure in self.queue.with_workers():
            closure.state = "over"
            closure.made_again(error)
        for _, submission in left:
            submission.stop()
        self._outbox.clear()
        ending = _cancel(self._tasks)
        if is_for_good and self._strategy.servers.is_started:
            for closure in self.queue.with_workers():
                if closure.submission is not None:
                    self._start_following(closure)
        for task in ending:
            await task.ended()

    async def leave(self) -> None:
        """Follow what still runs no more: its strategy is closed."""
        if not self.is_open:
            for following in _cancel(self._tasks):
                await following.ended()

    def __repr__(self) -> str:
        return f"<ClosureRunner | {self.queue!r}>"


def _cancel(tasks: set[OwnedTask[None]]) -> list[OwnedTask[None]]:
    """Cancel tasks, except those of an event loop that is closed; return them."""
    living = [task for task in tasks if not task.task.get_loop().is_closed()]
    for task in living:
        task.cancel()
    return living


async def wait_among(waiters: Any, runner: ClosureRunner) -> None:
    """Wait among others for room, or until all is over.

    Raises:
        Exception: The error that there was when all was over.
    """
    future: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    waiters.append(future)
    try:
        error = await future
    except asyncio.CancelledError:
        if future.done() and not future.cancelled():
            missed = future.result()
            if missed is not None:
                runner.queue.put_error(missed)
            runner.pump()  # room that was given to this one goes to the next
        raise
    finally:
        with suppress(ValueError):
            waiters.remove(future)
    if error is not None:
        raise error


async def _is_repaired(
    strategy: ParameterServerStrategy, error: BaseException, closure: ScheduledClosure
) -> bool:
    """Have a copy take the place of a server that a closure has lost; False if there is none."""
    copies = strategy.servers.copies
    if copies is None or not isinstance(error, WorkerLostError) or not error.ranks:
        return False
    closure.num_repairs += 1
    return closure.num_repairs <= MAX_REPAIRS and await copies.repair(error.ranks[0])


def _not_again(closure: ScheduledClosure) -> WorkerLostError:
    return WorkerLostError(
        f"The result of {closure.fn_name} #{closure.number} was lost with its worker, and is not "
        "made again: the coordinator was closed, or the cluster was lost."
    )


def wake(waiter: asyncio.Future[BaseException | None]) -> bool:
    """Wake who waits; False if nobody does any more."""
    if waiter.done():
        return False
    waiter.set_result(None)
    return True


def _cancelled(closure: ScheduledClosure, error: BaseException) -> ClosureCancelledError:
    return ClosureCancelledError(
        f"The closure {closure.fn_name} #{closure.number} was cancelled because another one "
        f"failed: {type(error).__name__}: {error}"
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
