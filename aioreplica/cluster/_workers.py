"""The workers of a strategy: runs that queue, operations one by one, failures told to all.

Everything that crosses workers is one operation at a time, in the same order on all of them: runs
queue; the collectives of a run take turns in the order of their numbers; an operation begins with a
frame (`_frame.py`). An operation goes on if those who wait for it are cancelled: a worker that gave
one up halfway would leave the others waiting in it.

Invariants:
    * An operation begins when the one before has ended, in the order in which they were queued.
    * A run that is over sends no frame any more.
    * Once an engine has failed, or a worker has closed, nothing is sent any more.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from operator import itemgetter
from typing import Any, final

from ..collectives import Turn, gather_bytes, no_data
from ..context import PLACE
from ..devices import OwnedTask, is_ctrl_c
from ..errors import ContextError, LoopMismatchError
from ..typing import VariableAggregation
from ._communicator import Communicator
from ._engine import SMALL_BYTES
from ._exchange import Exchange
from ._frame import Alarm, Closed, FrameKind, digest_of
from ._rows import (
    broken_error,
    cause_of,
    cause_of_interrupt,
    closed_meanwhile_error,
    greet,
    no_loss_error,
    workers_closed_error,
)
from ._run import (
    OpenTurn,
    WorkersRun,
    aggregated,
    require_not_awaited,
    require_runnable,
    take_leave,
)

ROOM_MEMORY = 8
"""Exchanges that the room behind a frame is for: those of one training step, or two."""


@final
class Workers:
    """Connection of a strategy with the same strategy of other workers.

    Args:
        connect: Gives the communicator, at the first operation.
        rank: The number of this worker.
        num_workers: How many there are.
        num_local_replicas: How many replicas each of them has.
        label: Names the strategy in errors.
        given: The communicator that `connect` gives, if it is there already.
        is_new: Whether others have started this worker, and wait for it in `grow`.
        outer: All workers, of which these are those of a group of replicas; None if they are all.
        ranks: The numbers of these among all.
        key: Of a group: tells it from others.

    Attributes:
        is_new: The same, until it has come to `grow` too.
        groups: Those of some replicas of several workers.
        num_sent: Number of frames that this worker has sent.
        queue: Exchanges that have begun or wait for those before, the first one under way.
        left_by: What the block of the strategy is being left by; told to the others at its end.
        counts_anew: Whether the next run agrees on its step number first, as one has failed.
        room: Bytes behind each frame, for arrays that are reduced if all frames agree.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Communicator]],
        rank: int,
        num_workers: int,
        num_local_replicas: int,
        label: str,
        given: Communicator | None = None,
        outer: Workers | None = None,
        ranks: Sequence[int] = (),
        key: str = "",
        *,
        is_new: bool = False,
    ) -> None:
        self.is_new = is_new
        self.outer = outer
        self.ranks = ranks or range(num_workers)
        self.key = key
        self.groups: Groups = Groups(self, given) if outer is None else outer.groups
        self.num_sent = 0
        self.rank = rank
        self.num_workers = num_workers
        self.num_local_replicas = num_local_replicas
        self._connect = connect
        self.label = label
        self._given = given
        self._communicator: Communicator | None = None
        self._queue_of_runs: asyncio.Lock | None = None
        self._running: WorkersRun | None = None
        self.queue: deque[Exchange[Any]] = deque()
        self._num_closed = 0
        self._forget_others()
        self.counts_anew = is_new
        self._resizing: asyncio.Task[Any] | None = None  # which shrinks or grows
        self._broken: BaseException | None = None
        self.left_by: BaseException | None = None
        self.merging: OpenTurn | None = None

    @property
    def first_replica(self) -> int:
        """The id of this worker's first replica among those of all."""
        return self.rank * self.num_local_replicas

    @property
    def num_replicas(self) -> int:
        """Number of replicas of all workers."""
        return self.num_workers * self.num_local_replicas

    @property
    def has_others(self) -> bool:
        """True if there are other workers than this one."""
        return self.num_workers > 1

    @property
    def is_broken(self) -> bool:
        """True if nothing can be sent any more."""
        return (self.outer or self)._broken is not None

    # ---- runs ----------------------------------------------------------------------------

    @asynccontextmanager
    async def run(self, function: str, step: int | None = None) -> AsyncIterator[WorkersRun]:
        """Wait for the runs before, and be the run in progress; what it raises is told to all.

        Args:
            function: Name of the step function.
            step: Number of the step, for errors.

        Raises:
            ContextError: If the run in progress waits for the caller, others have started this
                worker and it did not come to `grow`, or the strategy is closed meanwhile.

        Cancellation:
            Tells the other workers, once the run has begun.
        """
        self.raise_if_broken()
        async with self._behind_runs(function):
            self.raise_if_broken()
            self._running = run = WorkersRun(self, function, step)
            try:
                yield run
            except BaseException as error:
                run.fail(error)
                raise
            finally:
                run.is_over = True
                self._running = None

    @asynccontextmanager
    async def _behind_runs(self, what: str) -> AsyncIterator[None]:
        """Wait for the runs before, and let those behind wait meanwhile."""
        require_runnable(self, what)
        require_not_awaited(self._running, what)
        if self._queue_of_runs is None:
            self._queue_of_runs = asyncio.Lock()
        num_closed = self._num_closed
        async with self._queue_of_runs:
            if self._num_closed != num_closed:
                raise closed_meanwhile_error(self.label, what)
            yield

    @asynccontextmanager
    async def operation(self, what: str, signature: str) -> AsyncIterator[Turn]:
        """Give a turn outside the steps: a run of its own, or in a merge function its turn."""
        merging = self.merging
        if merging is not None and PLACE.get().in_merge:
            async with merging.inner(what, signature) as inner:
                yield inner
            return
        async with self.run(what) as run:
            with run.turn(what, signature, 1) as turn:
                yield turn

    async def aggregate(
        self, what: str, name: str, how: VariableAggregation, take: Callable[[], Sequence[object]]
    ) -> Any:
        """Combine a variable's components, or values for them, which are taken in the turn."""
        operation = partial(self.operation, what, f"{name!r} {how.value}")
        return await aggregated(operation, how, take)

    # ---- for operations ------------------------------------------------------------------

    @property
    def connected(self) -> Communicator | None:
        """The communicator, once all workers have met; before that `connect` gives it."""
        return self._communicator if self._has_greeted else None

    def before(self) -> Exchange[Any] | None:
        """Return the last operation, which others wait for; None if its event loop has ended."""
        if not self.queue:
            return None
        last = self.queue[-1]
        if last.get_loop() is asyncio.get_running_loop():
            return last
        self.queue = deque()
        if not self.is_broken:
            self.break_off(RuntimeError("its event loop ended while it met the others."))
        return None

    def new_run_number(self) -> int:
        """Count a run, at its first operation."""
        self._next_run += 1
        return self._next_run - 1

    def runs_until(self, number: int) -> None:
        """Learn which runs any worker has begun."""
        self._next_run = number + 1

    def closed_error(self, decision: Closed) -> Exception:
        """Return the error of a worker that others have left; nothing is sent after it."""
        ranks, cause = decision.ranks, decision.cause
        self._broken = error = workers_closed_error(ranks, cause, self.rank, self.label)
        return error

    def break_off(self, error: BaseException) -> None:
        """Remember what made every further operation impossible, and tell the other workers."""
        if self.outer is not None:
            if self in self.groups:  # and not closed
                self.outer.break_off(error)
            return
        self._broken = error
        if self._communicator is not None:
            with suppress(LoopMismatchError):  # a group of one loop, which has ended with it
                self._communicator.abort(f"worker {self.rank}: {type(error).__name__}: {error}")

    def raise_if_broken(self) -> None:
        """Check that something can be sent.

        Raises:
            WorkerLostError: If not.
        """
        outer = self.outer or self
        if (error := outer._broken) is not None:
            rank = self.ranks[self.rank]
            raise broken_error(error, self.label, rank, can_shrink=outer._has_lost) from error

    @property
    def _has_lost(self) -> bool:
        """True if workers may be left that have not closed, after a failure."""
        communicator = self._communicator
        return communicator is not None and communicator.has_failed and not communicator.is_closed

    def agreed(self, num_bytes: int) -> None:
        """Learn how many bytes of arrays an exchange had, on which all workers have agreed.

        A frame has as much room behind it as one of the last exchanges needed: of a training step
        that repeats, gradients and frame are one message. What all have agreed on is the same on
        all, and so is the room.
        """
        most = SMALL_BYTES // self.num_workers
        self._needed.append(-(-num_bytes // 64) * 64 if num_bytes <= most else 0)
        self.room = max(self._needed)

    def _forget_others(self) -> None:
        self._has_greeted = self.counts_anew = False
        self._next_run = 0
        self._reaching = asyncio.Lock()
        self.room = 0
        self._needed: deque[int] = deque(maxlen=ROOM_MEMORY)

    async def connect(self) -> Communicator:
        """Connect, and meet the other workers for the first time, who have as many replicas."""
        communicator = await self.reach()
        if not self._has_greeted:
            self._has_greeted = True
            await greet(communicator, self.label, self.ranks, self.num_local_replicas)
        return communicator

    async def reach(self) -> Communicator:
        """Return the communicator, connected now if that was not done before."""
        async with self._reaching:
            if self._communicator is None:
                self._communicator = await self._connect()
                self.groups.listen(self._communicator)
        return self._communicator

    # ---- going on with fewer, or with more ------------------------------------------------

    async def shrink(self) -> None:
        """Go on with the workers that are left; see `MultiWorkerMirroredStrategy.shrink`.

        Waits for the run in progress to end. Ranks keep their order and close up.
        """
        async with self._behind_runs("shrink"):
            last, communicator = self.before(), self._communicator
            if last is not None:
                await last.over()
            if communicator is not None and communicator.is_closed:  # as this was cancelled before
                self.raise_if_broken()
            if communicator is None or not communicator.has_failed:
                raise no_loss_error(self._broken, self.label, self.rank)
            await self._go_on(communicator, "shrink")

    async def grow(self, num_new: int) -> None:
        """Go on with so many more workers; see `MultiWorkerMirroredStrategy.grow`.

        Waits for the runs before to end. Ranks stay, the new ones come behind.
        """
        async with self.run("grow") as run:
            with run.turn("grow", f"{self.num_workers} + {num_new}", 1) as turn:
                await turn.exchange(b"", no_data)
            await self._go_on(await self.connect(), "grow", num_new)

    async def _go_on(self, before: Communicator, what: str, num_new: int = 0) -> None:
        """Go on with those who are left, or with so many new ones."""
        async with self.leaving_if_cancelled(what):
            after = self._communicator = await before._resized(num_new)
            self.rank, self.num_workers = after.rank, after.size
            self._broken = None
            self._forget_others()
            self.counts_anew, self.ranks = True, range(after.size)
            try:
                await self.groups.aclose()
                self.groups.listen(after)
            finally:
                await before.aclose()

    @asynccontextmanager
    async def leaving_if_cancelled(self, what: str) -> AsyncIterator[None]:
        """Leave the others for good if cancelled in what they could not be told of otherwise.

        Raises:
            ContextError: If the strategy is closed meanwhile.
        """
        num_closed, task = self._num_closed, asyncio.current_task()
        assert task is not None  # a task runs this
        self._resizing, num_cancels = task, task.cancelling()
        try:
            yield
        except asyncio.CancelledError:
            if self._num_closed != num_closed and task.uncancel() <= num_cancels:
                if self._running is not None:
                    self._running.is_over = True  # the others are told by the close
                raise closed_meanwhile_error(self.label, what) from None
            if self._communicator is not None:  # else it was closed
                self._broken = ContextError(f"{what} was cancelled here, which left the others.")
                await self._communicator.aclose()
            raise
        finally:
            self._resizing = None

    # ---- closing -------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Tell the other workers that this one leaves, wait for them, and disconnect. Idempotent.

        Cancellation:
            Raised again once the communicator is closed.
        """
        self._num_closed += 1
        if self._resizing is not None and self._resizing is not asyncio.current_task():
            self._resizing.cancel()
            self._broken = ContextError("It was closed.")  # no goodbye, which none comes to
        if is_ctrl_c():
            self.abandon()
        if not self.queue and self._communicator is None and self._broken is None:
            left_by, self.left_by = self.left_by, None
            if self._given is not None and not self._given.is_closed:  # the others may wait
                if left_by is not None:
                    self._given.abort(f"it has left its strategy by {cause_of(left_by)}")
                self.groups.leave(self._given, "")
                await self._given.aclose()
            return
        leaving = OwnedTask(take_leave(self), "aioreplica workers: closing")
        try:
            await leaving.ended()
        finally:
            communicator, self._communicator = self._communicator, None
            self._queue_of_runs = self._broken = self.left_by = None
            self.queue = deque()
            self._forget_others()
            await self.groups.aclose()
            if communicator is not None:
                await communicator.aclose()

    def abandon(self) -> None:
        """Give up at once, as the interpreter is interrupted; tell the others by what."""
        if self._communicator is not None and self._broken is None:
            self.break_off(cause_of_interrupt())


@final
class Groups:
    """Groups of replicas of several workers, under one strategy.

    A group has a split of the communicator, kept for later runs, where members meet as all workers
    do. A run that fails is told by a frame on the communicator of all, which who waits in a group
    does not see: so who fails raises an alarm first, and those end their runs who wait for it in a
    group. Once all have come to the frame, they tell each other how many frames they have sent in
    each group, and who has sent less sends the rest: then every frame has its counterparts.

    Args:
        workers: All of them.
        given: Their communicator, if it is there already.

    Invariants:
        * From the frame of a failure until all have told these numbers nothing is sent in a group.
    """

    def __init__(self, workers: Workers, given: Communicator | None) -> None:
        self._workers = workers
        self._of: dict[tuple[int, ...], Workers] = {}
        self._num_ends = 0  # of runs, that all workers know of
        self._is_ending = False
        self._alarms: dict[tuple[int, int], Alarm] = {}  # by the number, and whose it is
        self._held: defaultdict[Workers, deque[Exchange[Any]]] = defaultdict(deque)
        self._unsaid: Alarm | None = None  # as there is no connection yet
        if given is not None:
            self.listen(given)

    def __iter__(self) -> Iterator[Workers]:
        return iter(list(self._of.values()))  # a device thread may make another

    def workers_of(self, ids: tuple[int, ...]) -> Workers:
        """Return the workers of a group; made at the first use.

        Raises:
            ValueError: If there are more of its replicas on one worker than on another.
        """
        workers = self._of.get(ids)
        return self._of.setdefault(ids, self._new(ids)) if workers is None else workers

    def _new(self, ids: tuple[int, ...]) -> Workers:
        outer = self._workers
        counts = Counter(i // outer.num_local_replicas for i in ids)
        if len(set(counts.values())) > 1:
            shown = ", ".join(f"{count} of worker {rank}" for rank, count in counts.items())
            raise ValueError(
                f"group got {list(ids)}, which are {shown}. A group of several workers has as many "
                "replicas of each of them."
            )
        ranks, key = tuple(counts), digest_of(str(ids)).hex()[:16]

        async def connect() -> Communicator:
            if workers not in self:
                raise ContextError(f"{outer.label} was closed.")
            communicator = await outer.reach()
            communicator._require_open()
            return communicator._subgroup(ranks, key)

        label = f"group {ids} of {outer.label}"
        workers = Workers(
            connect, ranks.index(outer.rank), len(ranks), counts[outer.rank], label, None,
            outer, ranks, key,
        )  # fmt: skip
        return workers

    # ---- alarms --------------------------------------------------------------------------

    def listen(self, communicator: Communicator) -> None:
        """Hear the alarms of the other workers; raise the one that could not be raised so far."""
        communicator._on_alarm = self._heard
        alarm, self._unsaid = self._unsaid, None
        if alarm is not None:
            communicator._alarm(alarm.number, alarm.encode())

    def raise_alarm(self, origin: int, function: str, cause: str) -> None:
        """Tell the other workers that a run has failed here, before the frame that says so."""
        alarm, communicator = self._alarm(origin, function, cause), self._workers._communicator
        if communicator is None:
            self._unsaid = alarm
        else:
            self._tell(communicator, alarm)

    def leave(self, communicator: Communicator, cause: str) -> None:
        """Tell those who wait in a group, or are about to, that this worker does not come to it."""
        self._tell(communicator, self._alarm(self._workers.rank, "", cause))

    def _alarm(self, origin: int, function: str, cause: str) -> Alarm:
        counts = {each.key: each.num_sent for each in self}
        return Alarm(self._num_ends + self._num_ending, origin, function, cause, counts)

    def _tell(self, communicator: Communicator, alarm: Alarm) -> None:
        if self._workers.has_others:
            with suppress(LoopMismatchError):  # a group of one loop, which has ended with it
                communicator._alarm(alarm.number, alarm.encode())

    def _heard(self, rank: int, number: int, text: str) -> None:
        if number < self._num_ends + self._num_ending:
            return  # that is known here
        self._alarms[number, rank] = Alarm.decode(rank, number, text)
        if self._workers._running is not None:
            self.heed(self._workers._running)

    def heed(self, run: WorkersRun) -> None:
        """End a run, soon, if it waits in a group for a worker that does not come to it."""
        known = self._num_ends + self._num_ending
        for (number, rank), alarm in sorted(self._alarms.items(), key=itemgetter(0)):
            for workers in self if number >= known else ():
                is_waiting = rank in workers.ranks and workers.queue
                split = workers.connected
                has_met = split is not None and split.statistics().calls > 1  # they have greeted
                if is_waiting and not alarm.comes_to(workers.key, workers.num_sent, has_met):
                    asyncio.get_running_loop().call_soon(run.end_by, alarm)
                    return

    # ---- ends of runs --------------------------------------------------------------------

    @property
    def _failures(self) -> list[Exchange[Any]]:
        """The frames of failure that are to meet those of all workers, as these do not know yet."""
        return [
            each
            for each in self._workers.queue
            if each.parts
            and each.parts[0][0].kind is FrameKind.FAILED
            and each.run.ended_by is None
        ]

    @property
    def _num_ending(self) -> int:
        """Number of ends of runs that are known here, and have not been settled."""
        return len(self._failures) + self._is_ending

    def hold(self, exchange: Exchange[Any]) -> bool:
        """Keep an exchange if nothing may be sent in its group now; it enters as soon as it may.

        Exchanges of a group enter in the order in which they come, so one waits as well if others
        do that came before it.
        """
        held = self._held[exchange.run.workers]
        if not held and not self.holds(partial(self._let_in, held)):
            return False
        held.append(exchange)
        return True

    def _let_in(self, held: deque[Exchange[Any]]) -> None:
        if not self.holds(partial(self._let_in, held)):
            while held:
                held.popleft().enter(was_held=True)

    def holds(self, fn: Callable[[], object]) -> bool:
        """Tell whether nothing may be sent in a group now; then something is called later."""
        queue = self._workers.queue
        last = self._failures[-1:] or ([queue[0]] if self._is_ending and queue else [])
        for each in last:
            each.when_over(fn)
        return bool(last)

    async def settle(self, communicator: Communicator) -> None:
        """See to it that all members of each group have sent as many frames, as a run has ended."""
        self._is_ending = True
        try:
            groups = list(self._of.items())
            own = {json.dumps(ids): workers.num_sent for ids, workers in groups}
            told = await gather_bytes(communicator, json.dumps(own).encode())
        finally:
            self._is_ending = False
        self._num_ends += 1
        self._alarms = {n: a for n, a in self._alarms.items() if n[0] >= self._num_ends}
        rows: list[dict[str, int]] = list(map(json.loads, told))
        first = self._workers.first_replica
        mine = range(first, first + self._workers.num_local_replicas)
        for text in sorted({text for row in rows for text in row}):
            ids = tuple(json.loads(text))
            if any(i in mine for i in ids):
                workers = self.workers_of(ids)
                for _ in range(max(row.get(text, 0) for row in rows) - workers.num_sent):
                    WorkersRun(workers, "-", None).void()

    async def over(self) -> None:
        """Wait until nothing is under way."""
        await _over(self)

    async def aclose(self) -> None:
        """Close the splits, and forget the groups."""
        groups, self._of = self._of, {}
        self._num_ends, self._alarms, self._unsaid = 0, {}, None
        self._held.clear()
        for workers in groups.values():
            if workers._communicator is not None:
                await workers._communicator.aclose()
        await _over(groups.values())  # what was under way has failed by that


async def _over(groups: Iterable[Workers]) -> None:
    for workers in groups:
        if (last := workers.before()) is not None:
            await last.over()
