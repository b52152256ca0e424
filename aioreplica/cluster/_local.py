"""A group of workers in one process: ranks are tasks, messages are ops of lanes.

Each worker has a lane named "worker:RANK", and what it brings to a collective is an op there: in
`aioreplica.testing` lanes are simulated, so messages of different workers overtake each other as
the schedule decides, and its faults lose, delay and hang workers by the names of their lanes.

Nothing else goes on in those threads: the last message to be delivered makes the results, on the
event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import final

import numpy as np

from .._functions import is_async, require_finished, require_no_yield
from ..devices import CompletionQueue, Op, lane_table, running_loop
from ..devices.backends import reduce_arrays
from ..errors import ContextError, LoopMismatchError, WorkerLostError
from ..tree import Array
from ._arguments import as_integers
from ._communicator import (
    AGREE,
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    CLOSED_TEXT,
    COMPLETE,
    ENDED,
    LOST,
    OUTER_CLOSED_TEXT,
    REDUCE_SCATTER,
    STALLED,
    Call,
    Communicator,
    Failure,
    nothing_lost_error,
)
from ._rows import closed_text, crossed_failure, difference_of, group_in_words, stall_text


@final
class LocalCommunicator(Communicator):
    """One worker of a group that lives in a single process, on one event loop.

    For tests and for programs that are not distributed: `LocalCommunicator.group(size)` makes
    them. All that a `Communicator` promises holds here too.

    Under `aioreplica.testing` the messages of worker 1 are ops of the pool "worker:1":
    `art.Faults().lose_worker("worker:1")` loses it, `slow_device` delays its messages and `hang_op`
    keeps one for ever.
    """

    def __init__(self, group: _Group, rank: int, *, is_new: bool = False) -> None:
        super().__init__(rank, group.size, group.timeout, group.ranks[rank])
        self.is_new = is_new
        self._group = group
        self._lane_name = group.lane_names[rank]
        group.members.append(self)
        lane_table().acquire((self._lane_name,))

    @staticmethod
    def group(
        size: int,
        *,
        timeout: float | None = None,
        spawn: Callable[[LocalCommunicator], object] | None = None,
    ) -> tuple[LocalCommunicator, ...]:
        """Make the communicators of a new group, by rank.

        Args:
            size: How many workers.
            timeout: How long a collective may wait for the others, in seconds; None waits for ever.
            spawn: Starts the task of a worker that `strategy.grow` adds, given its communicator;
                called on the event loop, in the context of this call, and must not wait.

        Raises:
            TypeError: If `timeout` is not a number, or `spawn` is not a plain function.
            ValueError: If `size` is not a positive integer, or `timeout` is not above 0.
        """
        if spawn is not None and (not callable(spawn) or is_async(spawn)):
            raise TypeError(f"spawn must be a plain function, which starts a task; got {spawn!r}.")
        require_no_yield(spawn, "LocalCommunicator.group")
        found = as_integers([size])
        if found is None or found[0] < 1:
            raise ValueError(f"A group has at least 1 worker, got {size!r}.")
        (size,) = found
        lane_names = tuple(f"worker:{rank}" for rank in range(size))
        origin = _Origin(size, size, spawn, copy_context())
        group = _Group(tuple(range(size)), lane_names, timeout, [], origin)
        return tuple(LocalCommunicator(group, rank) for rank in range(size))

    @property
    def place(self) -> tuple[int, int]:
        """The share of the process that is this worker's, of as many as the first workers were."""
        size = self._group.origin.first_size
        return int(self._lane_name.removeprefix("worker:")) % size, size

    def _enqueue(self, call: Call) -> None:  # it is never over at once
        self._group.expect(call.number)
        self._send(partial(self._group.deliver, self.rank, call))

    def _absent(self) -> tuple[int, ...] | None:
        return self._group.absent()

    def _subgroup(self, ranks: tuple[int, ...], key: str) -> Communicator:
        group = self._group.subgroup(ranks, key)
        return LocalCommunicator(group, ranks.index(self.rank))

    def _alarm(self, number: int, text: str) -> None:
        self._send(partial(self._group.alarm, self.rank, number, text))

    async def _resized(self, num_new: int) -> Communicator:
        group, what = self._group, "grow" if num_new else "shrink"
        if num_new:
            group.require_growable()
        else:
            group.require_shrinkable(self._worker)
        come: asyncio.Future[LocalCommunicator] = running_loop(what).create_future()
        come.add_done_callback(_known)
        self._send(
            partial(group.come, self.rank, num_new, come), partial(group.lose, self.rank, come)
        )
        try:
            async with asyncio.timeout(self.timeout):
                return await come
        except TimeoutError:
            if come.done() and not come.cancelled():  # they came just now
                return come.result()
            raise group.late(what) from None
        except asyncio.CancelledError:
            if come.done() and not come.cancelled() and come.exception() is None:
                await come.result().aclose()  # of which nobody else knows
            raise

    def left_behind(self) -> None:
        """Learn that the others have gone on without this worker."""
        text = (
            f"The others have gone on without worker {self._worker}, which was lost, was cancelled "
            "or came too late. Start it again."
        )
        self._failure = None  # which said what the others were told
        self._end(Failure(LOST, text, (self._worker,)))

    def _spread(self, failure: Failure) -> None:
        self._send(partial(self._group.end, failure))

    async def _close(self) -> None:
        closing = [self, *self._group.splits_of(self._worker)]
        told = [each for each in closing if each._group.has_loop]
        for each in told:
            each._group.bind()  # first: it may be refused
        for each in reversed(closing):
            each._shut(CLOSED_TEXT if each is self else OUTER_CLOSED_TEXT)
            if each in told:
                each._send(partial(each._group.left, each.rank, each._num_calls))
            lane_table().release((each._lane_name,))

    def _send(self, deliver: Callable[[], None], lose: Callable[[], None] = lambda: None) -> None:
        """Put a message on this worker's lane; `deliver` is called on the loop when it arrives.

        If it does not, as the worker is gone, `lose` is called, and the group has ended.
        """
        self._group.bind()
        op: Op[None] = Op(
            CompletionQueue.of_running_loop(), message, (), {}, lane_table().lane(self._lane_name)
        )
        op.add_done_callback(partial(self._arrived, deliver, lose))

    def _arrived(self, deliver: Callable[[], None], lose: Callable[[], None], op: Op[None]) -> None:
        error = None if op.cancelled() else op.exception()
        if error is None:
            deliver()
            return
        worker = f"Worker {self._worker}"
        what = "is gone" if isinstance(error, WorkerLostError) else "could not send"
        text = f"{worker} {what}: {error} Restart from the newest checkpoint."
        self._group.end(Failure(LOST, text, (self._worker,)))
        lose()


def message() -> None:
    """Stand for the sending of a message, which the lane orders and the testing kit delays."""


def _known(come: asyncio.Future[LocalCommunicator]) -> None:
    """Look at the error, which nobody may wait for any more."""
    if not come.cancelled():
        come.exception()


@final
@dataclass(slots=True)
class _Origin:
    """A group and all those that it becomes.

    Attributes:
        first_size: How many workers it had when it was made.
        num_lanes: How many workers there have ever been: each has a lane of its own.
        spawn: Starts a worker that is added; None if none can be.
        context: In which it is called.
    """

    first_size: int
    num_lanes: int
    spawn: Callable[[LocalCommunicator], object] | None
    context: Context

    def new_lane(self, used: Sequence[str]) -> str:
        """Name the lane of a worker that is added: in the place of one that is gone, if any is."""
        places = {int(name.removeprefix("worker:")) % self.first_size for name in used}
        while len(places) < self.first_size and self.num_lanes % self.first_size in places:
            self.num_lanes += 1
        self.num_lanes += 1
        return f"worker:{self.num_lanes - 1}"

    def start(self, group: _Group, rank: int) -> None:
        """Make the communicator of a worker that is added, and start its task."""
        assert self.spawn is not None  # as `require_growable` has checked
        communicator = LocalCommunicator(group, rank, is_new=True)
        try:
            outcome = self.context.run(self.spawn, communicator)
            require_finished(outcome, self.spawn, "LocalCommunicator.group")
        except BaseException:
            lane_table().release((communicator._lane_name,))
            raise


@final
@dataclass(slots=True)
class _Meeting:
    """Arrivals of the members at one call of the group."""

    calls: dict[int, Call] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


@final
class _Group:
    """State shared by the members of a group.

    Invariants:
        * A meeting is in `_meetings` from the first call with its number until all have come.
        * `_failure` is set once; then nothing is delivered any more.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        lane_names: tuple[str, ...],
        timeout: float | None,
        family: list[_Group],
        origin: _Origin,
    ) -> None:
        self.ranks = ranks  # in the outermost group
        self.lane_names = lane_names
        self._family = family  # that group and all splits, which end together
        family.append(self)
        self.size = len(ranks)
        self.timeout = timeout
        self.members: list[LocalCommunicator] = []
        self._meetings: dict[int, _Meeting] = {}
        self._left: dict[int, int] = {}  # the number of calls that a worker made before it left
        self._subgroups: dict[tuple[tuple[int, ...], str], _Group] = {}
        self._failure: Failure | None = None
        self._lost: set[int] = set()
        self.origin = origin
        self._coming: dict[int, asyncio.Future[LocalCommunicator]] = {}  # to another group
        self._num_new = 0  # workers that are added to it
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self) -> None:
        """Belong to the running loop.

        Raises:
            LoopMismatchError: If the group was used on another one.
        """
        loop = running_loop("A LocalCommunicator")
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise LoopMismatchError(
                "The workers of a LocalCommunicator run on one event loop, and this is another "
                "one. Make a group per loop."
            )

    @property
    def has_loop(self) -> bool:
        """False if its loop is closed, and with it all who could wait."""
        return self._loop is None or not self._loop.is_closed()

    def splits_of(self, worker: int) -> list[LocalCommunicator]:
        """Return what a worker has open of the splits of this group, if it is the outermost one."""
        splits = self._family[1:] if self is self._family[0] else ()
        members = (member for group in splits for member in group.members)
        return [each for each in members if each._worker == worker and not each.is_closed]

    def subgroup(self, ranks: tuple[int, ...], name: str) -> _Group:
        """Return the group that the split of this name into these ranks makes."""
        key = ranks, name
        group = self._subgroups.get(key)
        if group is None:
            outer = tuple(self.ranks[rank] for rank in ranks)
            lane_names = tuple(self.lane_names[rank] for rank in ranks)
            group = _Group(outer, lane_names, self.timeout, self._family, self.origin)
            left = self._family[0]._left
            group._left = {rank: 0 for rank, each in enumerate(outer) if each in left}
            self._subgroups[key] = group
        if len(group.members) == group.size - 1:  # this worker is the last to ask for it
            del self._subgroups[key]
        return group

    def expect(self, number: int) -> None:
        """Take note of a call that someone has made; its time counts from when those before end."""
        self.bind()
        if number not in self._meetings:
            self._meetings[number] = _Meeting()
            if len(self._meetings) == 1:
                self._count_time()

    def _count_time(self) -> None:
        if self._meetings and self.timeout is not None and self._loop is not None:
            number, oldest = next(iter(self._meetings.items()))
            oldest.timer = self._loop.call_later(self.timeout, self._time_is_up, number)

    def deliver(self, rank: int, call: Call) -> None:
        """Take what a worker brings to a call; the last one lets all of them go on."""
        if self._failure is not None:
            return
        meeting = self._meetings[call.number]
        meeting.calls[rank] = call
        if len(meeting.calls) < self.size:
            self._check_left(call)
            if self._coming and self._failure is None:  # it was cancelled on its way to grow
                self._let_go()
            return
        del self._meetings[call.number]
        if meeting.timer is not None:
            meeting.timer.cancel()
        self._count_time()
        calls = [meeting.calls[each] for each in range(self.size)]
        try:
            for each in calls:
                each.bring()
            difference = difference_of(calls, self.ranks)
            if difference is not None:
                self.end(Failure(ENDED, difference, self.ranks))
                return
            results = _results(calls)
        except Exception as error:  # noqa: BLE001 - nobody gets a result: it ends the group
            text = f"{calls[0].describe()} failed: {error!r}"
            self.end(Failure(ENDED, text, self.ranks))
            return
        for member in self.members:
            call = calls[member.rank]
            if call.then is None:
                member._settle(call, results[member.rank])
            else:  # it may end the group, in which the others are not settled yet
                asyncio.get_running_loop().call_soon(member._settle, call, results[member.rank])

    def left(self, rank: int, num_calls: int) -> None:
        """Take note that a worker has closed its communicator after so many calls."""
        self._left[rank] = num_calls
        if self._coming:
            self._let_go()
        for meeting in tuple(self._meetings.values()):
            for call in meeting.calls.values():
                self._check_left(call)
        if self is self._family[0]:  # and makes none of splits that it has not asked for
            for group in tuple(self._family[1:]):
                if rank in group.ranks and group.ranks.index(rank) not in group._left:
                    group.left(group.ranks.index(rank), 0)
        elif len(self._left) == self.size:
            self._family.remove(self)  # a split that is over: the group may make many

    def alarm(self, rank: int, number: int, text: str) -> None:
        """Tell the other members of an alarm."""
        if self._failure is not None:  # of one that the others have gone on without
            return
        for member in self.members:
            if member.rank != rank and member._on_alarm is not None:
                member._on_alarm(rank, number, text)

    def end(self, failure: Failure) -> None:
        """Let every call of every member fail, and those of all groups of the same workers."""
        for group in tuple(self._family):
            if group._failure is None:
                group._end(failure)

    # ---- going on with fewer, or with more ------------------------------------------------

    def require_growable(self) -> None:
        """Check that workers can be added.

        Raises:
            ContextError: If the group is a split, or was not told how to start them.
            Exception: What the group has ended with.
        """
        if self is not self._family[0]:
            raise split_shrink_error()
        if self.origin.spawn is None:
            raise ContextError(
                "This group cannot start workers. Make it with LocalCommunicator.group(size, "
                "spawn=fn), where fn(communicator) starts the task of one."
            )
        if self._failure is not None:
            raise self._failure.error()

    def require_shrinkable(self, rank: int) -> None:
        """Check that a worker may go on without some of the others.

        Raises:
            ContextError: If the group works, or is a split.
            WorkerLostError: If it is this one that was lost.
        """
        failure = self._failure
        if self is not self._family[0]:
            raise split_shrink_error()
        if failure is not None and failure.kind in (LOST, STALLED):  # who did not come is evicted
            self._lost.update(failure.ranks)
        if rank in self._lost:
            why = "" if failure is None else f" ({failure.text})"
            raise WorkerLostError(
                f"Worker {rank} is the one that was lost: the others go on without it.{why}",
                ranks=(rank,),
            )
        if failure is None:
            raise nothing_lost_error()

    def absent(self) -> tuple[int, ...] | None:
        """Return the workers that have not come to the oldest call; None if none is open."""
        if not self._meetings:
            return None
        calls = self._meetings[min(self._meetings)].calls
        return tuple(worker for rank, worker in enumerate(self.ranks) if rank not in calls)

    def missing(self) -> tuple[int, ...]:
        """Return the workers that are left and have not come to shrink or grow."""
        gone = {*self._lost, *self._left}
        if self._failure is None:  # who tells that it was cancelled does not grow
            gone.update(rank for meeting in self._meetings.values() for rank in meeting.calls)
        return tuple(rank for rank in self.ranks if rank not in gone and rank not in self._coming)

    def late(self, what: str) -> Exception:
        """Wait no longer for who does not come: the others may shrink without; return the error."""
        missing = self.missing()
        failure = Failure(STALLED, stall_text(missing, what, self.timeout), missing, self.timeout)
        self._lost.update(missing)
        self.end(failure)
        self._let_fail(failure.error)
        return failure.error()

    def lose(self, rank: int, come: asyncio.Future[LocalCommunicator]) -> None:
        """Take note that a worker was lost on its way to another group."""
        self._lost.add(rank)
        if not come.done():
            text = f"Worker {rank} was lost while the group changed."
            come.set_exception(WorkerLostError(text, ranks=(rank,)))
        self._let_go()

    def come(self, rank: int, num_new: int, come: asyncio.Future[LocalCommunicator]) -> None:
        """Take note that a worker has come for another group; the last one lets all go on."""
        if num_new and self._failure is not None:  # one was lost on its way
            if not come.done():
                come.set_exception(self._failure.error())
            return
        self._coming[rank], self._num_new = come, num_new
        self._let_go()

    def _let_go(self) -> None:
        if self.missing():
            return
        left = sorted(r for r, come in self._coming.items() if not come.done())  # or was cancelled
        lane_names = [self.lane_names[rank] for rank in left]
        for _ in range(self._num_new if left else 0):
            lane_names.append(self.origin.new_lane(lane_names))
        size = len(lane_names)
        group = _Group(tuple(range(size)), tuple(lane_names), self.timeout, [], self.origin)
        for number in range(len(left), size):
            try:
                self.origin.start(group, number)
            except BaseException as error:
                text = f"Worker {number} could not be started: {error!r}"
                group.end(Failure(ENDED, text, (number,)))
                kind = TypeError if isinstance(error, TypeError) else ContextError
                self._let_fail(partial(kind, text))
                if not isinstance(error, Exception):
                    raise
                return  # for those who wait; this group goes on
        coming, self._coming = self._coming, {}
        for number, rank in enumerate(left):
            coming[rank].set_result(LocalCommunicator(group, number))
        self._lost = {*self.ranks} - {*left}
        for member in self.members:
            if member.rank in self._lost and not member.is_closed:
                member.left_behind()

    def _end(self, failure: Failure) -> None:
        self._failure = failure
        for meeting in self._meetings.values():
            if meeting.timer is not None:
                meeting.timer.cancel()
        self._meetings.clear()
        for member in self.members:
            member._end(failure)
        self._let_fail(failure.error)  # who has come to grow: a group that shrinks ended before

    def _let_fail(self, error: Callable[[], Exception]) -> None:
        """Let all who have come to shrink or grow fail; they may come again."""
        coming, self._coming = self._coming, {}
        for come in coming.values():
            if not come.done():
                come.set_exception(error())

    def _check_left(self, call: Call) -> None:
        left = sorted(rank for rank, count in self._left.items() if count <= call.number)
        gone = tuple(self.ranks[rank] for rank in left)
        if gone:
            self.end(Failure(LOST, closed_text(gone, call), gone))

    def _time_is_up(self, number: int) -> None:
        calls = self._meetings[number].calls
        missing = tuple(each for rank, each in enumerate(self.ranks) if rank not in calls)
        what = next((call.describe() for call in calls.values()), f"call #{number}")
        elsewhere = {
            worker: (call.describe(), group.in_words())
            for group in self._family
            if group is not self
            for worker, call in group.waiting().items()
            if worker in missing
        }
        absent = tuple(each for each in missing if each not in elsewhere)
        if absent or not elsewhere:
            text = stall_text(absent, what, self.timeout)
            self.end(Failure(STALLED, text, absent, self.timeout))
            return
        own = min(self.waiting())
        self.end(crossed_failure(own, (what, self.in_words()), elsewhere, self.timeout))

    def waiting(self) -> dict[int, Call]:
        """Return the oldest call of each worker that waits here."""
        found: dict[int, Call] = {}
        for number in sorted(self._meetings):
            for rank, call in self._meetings[number].calls.items():
                found.setdefault(self.ranks[rank], call)
        return found

    def in_words(self) -> str:
        """Return, for example, "the split of workers 0 and 2"."""
        return group_in_words(() if self is self._family[0] else self.ranks)


def split_shrink_error() -> ContextError:
    """Return the error of `shrink` for a part of a group."""
    return ContextError("This is a split of a communicator. Shrink the one that was connected.")


def _results(calls: list[Call]) -> Sequence[object]:
    """Compute what each worker gets; read-only arrays, shared where they are the same."""
    first, size = calls[0], len(calls)
    arrays = [call.array for call in calls]
    if first.kind == AGREE:
        return _agreements(calls, _frozen(np.stack(arrays)))
    if first.kind == BROADCAST:
        return [_frozen(arrays[first.root].copy())] * size
    if first.kind == ALL_GATHER:
        return [_frozen(np.stack(arrays))] * size
    if first.kind in (ALL_REDUCE, REDUCE_SCATTER) and first.op is not None:
        total = _frozen(reduce_arrays(first.op, arrays))
        if first.kind == ALL_REDUCE:
            return [total] * size
        return first.parts_of(total)
    if first.kind == COMPLETE:
        for root, column in enumerate(zip(*map(first.parts_of, arrays), strict=True)):
            for rank, part in enumerate(column):
                if rank != root:
                    part[...] = column[root]
        return arrays
    return [None] * size


def _agreements(calls: list[Call], rows: Array) -> list[object]:
    said = [call.agrees is not None and call.agrees(rows) for call in calls]
    totals = None
    op = calls[0].op
    if all(said) and op is not None:
        columns = zip(*(call.summands for call in calls), strict=True)
        totals = [_frozen(reduce_arrays(op, column)) for column in columns]
    return [(rows, totals)] * len(calls)


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array
