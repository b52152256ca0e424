"""The closures of a coordinator: which worker runs which, what runs again, and what an error does.

Plain synchronous code: events and the time in, closures to act on out.

Invariants:
    * A closure waits in the queue, or is with one worker, or is over; `oldest` is the least that
      is not over.
    * The first closures of a worker run there, as many as it runs at a time; the clock of one
      starts when it was sent and there is a place for it. One that was cancelled while it ran
      keeps its place until it has ended.
    * Only closures that run lose an attempt with their worker.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

from ...cluster import Submission
from ._packing import Packed

FIRST_WAITING, MIN_WAITING, MAX_WAITING = 4, 2, 64
"""Closures that wait with a worker before it is known how long they take, at least and at most."""

FILL_S = 0.2
"""How long a full worker has work. It gets more when half is left, which is enough while messages
are on their way (Dask sends some every 10 ms), and makes fewer of them: one costs more than a short
closure in it."""

LONG_S = 1.0
"""A closure that takes as long has one closure wait behind it."""

SLOW_S = 0.1
"""Work behind a closure that has run for so long goes to a worker that has none; as does work that
takes longer, behind any."""

GRACE_S = 10.0
"""How much longer than its timeout a closure may take before its worker is restarted."""


@final
@dataclass(slots=True, eq=False)
class ScheduledClosure:
    """A closure as the coordinator knows it.

    Attributes:
        number: Its number in the strategy.
        fn_name: Name of its function.
        is_async: Whether that is an async function.
        call: The function with its arguments, packed; empty once nobody can want it again.
        recipes: Of the optimizers that it uses.
        timeout_s: How long it may take.
        is_isolated: Whether an error of it is its own alone.
        settled: Done when it is over; its result is None, or it raises why there is none.
        state: "queued", "running" or "over"; one that is made again is not "over" meanwhile.
        worker: With which worker it is.
        began_s: Since when it runs there; None if it waits.
        lost_with: The workers that were lost while they ran it.
        submission: Where its result is, or will be.
        is_under_way: Whether it was with a worker before.
        num_repairs: How often it was sent again because a server was lost.
        again: Done when it was made again, after its result was lost.
        abort: Called with an error ends it; there from the time on at which it is with a worker.
    """

    number: int
    fn_name: str
    is_async: bool
    call: Packed
    recipes: dict[int, tuple[int, bytes]]
    timeout_s: float | None
    settled: asyncio.Future[None]
    is_isolated: bool = False
    state: Literal["queued", "running", "over"] = "queued"
    worker: str | None = None
    began_s: float | None = None
    lost_with: list[str] = field(default_factory=list)
    submission: Submission | None = None
    is_under_way: bool = False
    num_repairs: int = 0
    again: asyncio.Future[None] | None = None
    abort: Any = None  # Any: Lifecycle calls it

    @property
    def step(self) -> int:
        """Its number, for who lists what is under way."""
        return self.number

    @property
    def is_over(self) -> bool:
        """True if the closure has succeeded, failed or was cancelled."""
        return self.state == "over"

    def fail(self, error: BaseException) -> None:
        """Have an error in place of a result, unless it is settled."""
        if not self.settled.done():
            self.settled.set_exception(error)
            self.settled.exception()  # looked at: it need not be fetched

    def let_go(self) -> None:
        """Keep, once it is over, what its RemoteValue needs, which may live long."""
        self.abort = None  # else it is a circle, which keeps the result until it is collected
        if not self.settled.done():
            self.settled.set_result(None)
        elif self.settled.exception() is not None:
            self.call = Packed(b"", ())
            if self.began_s is None:
                self.submission = None

    def made_again(self, error: BaseException | None = None) -> None:
        """Tell who waits that it was made again, or why it was not."""
        again, self.again = self.again, None
        if again is None or again.done():
            return
        if error is None:
            again.set_result(None)
        else:
            again.set_exception(error)
            again.exception()  # looked at: who asked may have gone


@final
class _Worker:
    """A worker, and the closures that are with it, in the order in which it runs them."""

    __slots__ = ("closures", "index", "slots")

    def __init__(self, index: int, slots: int) -> None:
        self.index = index
        self.slots = slots
        self.closures: list[ScheduledClosure] = []

    def start_clocks(self, now: float) -> None:
        for closure in self.closures[: self.slots]:
            if closure.began_s is None and closure.submission is not None:
                closure.began_s = now


@final
class ClosureQueue:
    """Decides what runs where, what runs again, and what is left after an error.

    Args:
        size: How many closures may wait for a worker.
        worker_wait_s: How long they may wait while there is no worker; None sets no limit.
        cluster: Whose workers it has.

    Attributes:
        num_gone: Workers that have gone so far.
        last_gone: Names of the last ones.
    """

    def __init__(
        self, size: int, worker_wait_s: float | None = None, cluster: object = None
    ) -> None:  # fmt: skip
        self.num_gone = 0
        self.last_gone: deque[str] = deque(maxlen=8)
        self._size = size
        self._worker_wait_s = worker_wait_s
        self._cluster = cluster
        self._queued: deque[ScheduledClosure] = deque()
        self._unfinished: dict[int, ScheduledClosure] = {}
        self._workers: dict[str, _Worker] = {}
        self._alone_since: float | None = 0.0  # since when there is no worker
        self._mean_s: float | None = None  # how long the last closures took
        self._next = 0
        self._num_ending = 0
        self._num_ending_alone = 0
        self._error: BaseException | None = None

    # ---- counts --------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """True if another closure may be queued."""
        return len(self._queued) < self._size

    @property
    def depth(self) -> int:
        """Number of queued closures; from any thread."""
        return sum(each.state == "queued" for each in list(self._unfinished.values()))

    @property
    def num_running(self) -> int:
        """Number of closures that are with workers."""
        return len(self._unfinished) - self.depth

    @property
    def is_idle(self) -> bool:
        """True if every closure is over, and whoever had to be told of it knows."""
        return not (self._unfinished or self._num_ending or self._num_ending_alone)

    @property
    def is_ending(self) -> bool:
        """True while closures end because of an error, which nobody sees before that is done."""
        return self._num_ending > 0

    @property
    def oldest(self) -> int:
        """The least closure that is not over, or the number after the last one."""
        return next(iter(self._unfinished), self._next)

    @property
    def newest(self) -> int:
        """The number after the last closure."""
        return self._next

    @property
    def workers(self) -> list[str]:
        """Names of the workers, by their index."""
        return sorted(self._workers, key=lambda name: self._workers[name].index)

    def index_of(self, worker: str) -> int:
        """Return the index of a worker; the next free one if it has just gone."""
        known = self._workers.get(worker)
        return self._free_index() if known is None else known.index

    # ---- workers -------------------------------------------------------------------------

    def set_workers(self, now: float, workers: Mapping[str, int]) -> list[ScheduledClosure]:
        """Learn which workers there are; return the closures of those that have gone.

        They are queued again, before all others. What has run there has lost an attempt.
        """
        lost: list[ScheduledClosure] = []
        for name in [name for name in self._workers if name not in workers]:
            gone = self._workers.pop(name)
            self.num_gone += 1
            self.last_gone.append(name)
            for closure in gone.closures:
                if closure.began_s is not None:
                    closure.lost_with.append(name)
            lost += [closure for closure in gone.closures if closure.state == "running"]
        self._put_back(lost)
        for name, slots in workers.items():
            if name not in self._workers:
                self._workers[name] = _Worker(self._free_index(), slots)
        if self._workers:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        return lost

    def take_over(self, former: ClosureQueue) -> None:
        """Know the workers of a queue that was closed, what still runs there, and which have gone.

        What was cancelled while it ran keeps its place here, too. The workers of another cluster
        have all gone, even if some have the same names.
        """
        if self._cluster is not former._cluster:
            former.set_workers(0.0, {})
        self.num_gone, self.last_gone = former.num_gone, former.last_gone
        for name, worker in former._workers.items():
            self._workers[name] = _Worker(worker.index, worker.slots)
            begun = [closure for closure in worker.closures if closure.began_s is not None]
            self._workers[name].closures += begun

    def _free_index(self) -> int:
        taken = {worker.index for worker in self._workers.values()}
        return next(i for i in range(len(taken) + 1) if i not in taken)

    def lose_worker(self, now: float, name: str) -> list[ScheduledClosure]:
        """Give a worker nothing any more; return its closures, as `set_workers`."""
        left = {each: w.slots for each, w in self._workers.items() if each != name}
        return self.set_workers(now, left)

    def _put_back(self, closures: Iterable[ScheduledClosure]) -> None:
        for closure in sorted(closures, key=lambda each: -each.number):
            closure.state, closure.worker, closure.began_s = "queued", None, None
            self._queued.appendleft(closure)

    # ---- what runs where -----------------------------------------------------------------

    def add(self, closure: ScheduledClosure) -> None:
        """Queue a closure."""
        self._next = closure.number + 1
        self._unfinished[closure.number] = closure
        self._queued.append(closure)

    def add_again(self, closure: ScheduledClosure) -> None:
        """Queue a closure that is over, because its result was lost; its pushes count no more."""
        closure.lost_with.clear()
        self._put_back([closure])

    def take(self, now: float, *, begun_only: bool = False) -> list[ScheduledClosure]:
        """Give closures to workers, to the ones that have least first; return them.

        Args:
            now: The time.
            begun_only: Whether only those are given that were with a worker before.
        """
        taken: list[ScheduledClosure] = []
        if not self._queued:
            return taken
        waiting = self._num_waiting()
        few = waiting - (1 if self._mean_s is None else max(1, waiting // 2))
        takers = [(n, w) for n, w in self._workers.items() if len(w.closures) <= w.slots + few]
        while self._queued and takers:
            if begun_only and not self._queued[0].is_under_way:
                break
            name, worker = min(takers, key=lambda item: (_load(item[1]), item[1].index))
            if len(worker.closures) >= worker.slots + waiting:
                break
            closure = self._queued.popleft()
            closure.state, closure.worker, closure.is_under_way = "running", name, True
            worker.closures.append(closure)
            taken.append(closure)
        return taken

    def sent(self, now: float, closures: Iterable[ScheduledClosure]) -> None:
        """Learn that closures have a submission."""
        for name in dict.fromkeys(closure.worker for closure in closures):
            worker = self._workers.get(name or "")
            if worker is not None:
                worker.start_clocks(now)

    def _num_waiting(self) -> int:
        """Return how many closures may wait with a worker, by how long the last ones took."""
        if self._mean_s is None:
            return FIRST_WAITING
        if self._mean_s >= LONG_S:
            return 1
        return max(MIN_WAITING, min(MAX_WAITING, math.ceil(FILL_S / max(self._mean_s, 1e-6))))

    def finished(self, now: float, closure: ScheduledClosure) -> None:
        """Learn that a closure has ended well."""
        if closure.state != "running":
            return
        if closure.began_s is not None:
            took_s = now - closure.began_s
            mean_s = took_s if self._mean_s is None else self._mean_s
            self._mean_s = mean_s + 0.2 * (took_s - mean_s)
        self.leave(now, closure)
        self._over(closure)

    def leave(self, now: float, closure: ScheduledClosure) -> None:
        """Learn that a worker is done with a closure, in whatever way."""
        worker = self._workers.get(closure.worker or "")
        if worker is not None and closure in worker.closures:
            worker.closures.remove(closure)
            worker.start_clocks(now)

    def take_back(self, now: float) -> list[ScheduledClosure]:
        """Queue again what waits behind a slow closure, if other workers have nothing to do."""
        idle = sum(not worker.closures for worker in self._workers.values())
        if not idle or self._queued:
            return []
        slow = [worker for worker in self._workers.values() if self._slow_at(worker) <= now]
        slow.sort(key=lambda worker: (-len(worker.closures), worker.index))
        # The last first: of the others some may have begun, which is told with the next message.
        back = [each for worker in slow for each in worker.closures[: worker.slots - 1 : -1]][:idle]
        for closure in back:
            self.leave(now, closure)
        self._put_back(back)
        return back

    def take_waiting(self, now: float) -> list[ScheduledClosure]:
        """Queue again what waits with workers and has not begun there; return it."""
        waiting = [each for w in self._workers.values() for each in w.closures[w.slots :]]
        waiting = [each for each in waiting if each.state == "running" and each.submission]
        for closure in waiting:
            self.leave(now, closure)
        self._put_back(waiting)
        return waiting

    def queue_again(self, now: float, closures: Iterable[ScheduledClosure]) -> None:
        """Queue closures again whose workers are done with them, before all others."""
        for closure in closures:
            closure.submission = None
            self.leave(now, closure)
        self._put_back(closures)

    # ---- the clock -----------------------------------------------------------------------

    def next_look(self) -> float:
        """Return when there may be something to decide although nothing has happened."""
        times = [_due(closure) for closure in self._running()]
        if not self._workers and self._worker_wait_s is not None and self._queued:
            times.append((self._alone_since or 0.0) + self._worker_wait_s)
        if not self._queued and any(not worker.closures for worker in self._workers.values()):
            times += map(self._slow_at, self._workers.values())
        return min(times, default=math.inf)

    def _slow_at(self, worker: _Worker) -> float:
        """Return when what waits with a worker may go to another one."""
        waiting = worker.closures[worker.slots :]
        running = worker.closures[: worker.slots]
        began = [each.began_s for each in running if waiting and each.began_s is not None]
        is_long = len(waiting) * (self._mean_s or 0.0) > SLOW_S * worker.slots
        return min(began, default=math.inf) + (0.0 if is_long else SLOW_S)

    def overdue(self, now: float) -> list[ScheduledClosure]:
        """Return closures whose timeout has passed and was not answered by their workers."""
        return [closure for closure in self._running() if _due(closure) <= now]

    def alone_for(self, now: float) -> float | None:
        """Return for how long there has been no worker, if that is too long for what waits."""
        if self._workers or self._worker_wait_s is None or not self._queued:
            return None
        waited_s = now - (self._alone_since or 0.0)
        return waited_s if waited_s >= self._worker_wait_s else None

    def _running(self) -> list[ScheduledClosure]:
        return [each for w in self._workers.values() for each in w.closures[: w.slots]]

    # ---- errors --------------------------------------------------------------------------

    def drop(self, now: float, closure: ScheduledClosure) -> None:
        """Learn that a closure has ended badly, which is its own affair; then comes `ended`."""
        self._num_ending_alone += closure.again is None
        self.leave(now, closure)
        if closure in self._queued:
            self._queued.remove(closure)
        self._over(closure)

    def failed(self, now: float, error: BaseException) -> list[ScheduledClosure]:
        """Learn of an error: everything that is not over is cancelled; return it.

        The error is to be seen after `ended`, when all who have to know of the end do.
        """
        if self._error is None:
            self._error = error
        cancelled = list(self._unfinished.values())
        self._queued = deque(closure for closure in self._queued if closure.again is not None)
        for closure in cancelled:
            if closure.began_s is None:
                self.leave(now, closure)
            self._over(closure)
        self._num_ending += 1
        return cancelled

    def ended(self, *, is_alone: bool = False) -> None:
        """Learn that servers and workers know of the end of what `failed` or `drop` has ended."""
        if is_alone:
            self._num_ending_alone -= 1
        else:
            self._num_ending -= 1

    def take_error(self) -> BaseException | None:
        """Return the first error since the last call; None if there is none to be seen."""
        if self._num_ending:
            return None
        error, self._error = self._error, None
        return error

    def raise_error(self) -> None:
        """Raise what `take_error` returns, if it does."""
        error = self.take_error()
        if error is not None:
            raise error

    def put_error(self, error: BaseException) -> None:
        """Keep an error that nobody has seen yet, unless there is one."""
        if self._error is None:
            self._error = error

    def with_workers(self) -> list[ScheduledClosure]:
        """Return the closures that are with workers, cancelled ones that still run too."""
        return [closure for worker in self._workers.values() for closure in worker.closures]

    def waiting_again(self) -> list[ScheduledClosure]:
        """Return closures that wait to be made again."""
        return [closure for closure in self._queued if closure.again is not None]

    def _over(self, closure: ScheduledClosure) -> None:
        closure.state = "over"
        self._unfinished.pop(closure.number, None)

    def __repr__(self) -> str:
        return f"<ClosureQueue | {len(self._queued)} queued, {self.num_running} running>"


def _load(worker: _Worker) -> float:
    return len(worker.closures) / worker.slots


def _due(closure: ScheduledClosure) -> float:
    if closure.timeout_s is None or closure.began_s is None:
        return math.inf
    return closure.began_s + closure.timeout_s + GRACE_S
