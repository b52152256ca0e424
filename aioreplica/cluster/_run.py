"""A run as it meets the same run of the other workers, and the turns of its collectives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, final

from ..collectives import (
    SLOT_BYTES,
    Carry,
    Summands,
    Turn,
    broadcast_arrays,
    gather_bytes,
    no_data,
    reduce_across,
    widen_halves,
)
from ..context import AWAITED_BY, PLACE
from ..errors import ContextError, ReplicaRow, WorkerLostError
from ..replica import STARTED_ALL_REDUCE, Generation, Pending, Reducing
from ..replica import Call as ReplicaCall
from ..typing import ReduceOp, VariableAggregation
from ..values import IndexedSlices, aggregate
from ._communicator import Communicator
from ._exchange import NOTHING_AHEAD, Exchange, Part
from ._frame import Alarm, Closed, Differs, Failed, Frame, FrameKind, cut_text, digest_of
from ._rows import WorkerRows, cause_of, workers_closed_error, workers_mismatch_error
from ._transport import LOGGER

if TYPE_CHECKING:
    from ._workers import Workers

T = TypeVar("T")

CLOSING_S = 30.0
"""How long `aclose` waits for the other workers, unless the communicator has a timeout."""


@final
class WorkersRun:
    """One run as it meets the same run of the other workers.

    Args:
        workers: Whose run it is.
        function: Name of the step function.
        step: Number of the step, for errors.
        outer: The run of all workers, of which this is the part of a group; None if it is that.

    Attributes:
        workers: The same.
        function: The same.
        step: The same.
        outer: The same.
        number: Of the run, equal on all workers; None before the first operation.
        is_over: Whether it has ended, or was ended by another worker.
        ended_by: What another worker has ended it with, or None.
        local_rows: Describe the replicas of this worker, for errors.
        abort: Ends it on this worker.
        alarm: Of a worker that never comes, by which it was ended; or None.
        tail: The newest turn, if it has not ended.
    """

    __slots__ = (
        "_newest", "abort", "alarm", "ended_by", "function", "is_over", "local_rows", "number",
        "outer", "step", "tail", "workers",
    )  # fmt: skip

    def __init__(
        self, workers: Workers, function: str, step: int | None, outer: WorkersRun | None = None
    ) -> None:
        self.workers = workers
        self.function = function
        self.step = step
        self.outer = outer
        self.number: int | None = None
        self.is_over = False
        self.ended_by: Exception | None = None
        self.local_rows: Callable[[], Sequence[ReplicaRow]] | None = (
            None if outer is None else outer.local_rows
        )
        self.abort: Callable[[BaseException], None] | None = None
        self.alarm: Alarm | None = None
        self.tail: OpenTurn | None = None
        # Reductions that no other operation has come behind.
        self._newest: tuple[Exchange[None], Pending] | None = None

    @property
    def first_replica(self) -> int:
        """The id of this worker's first replica among those of all."""
        return self.workers.first_replica

    @property
    def num_replicas(self) -> int:
        """Number of replicas of all workers."""
        return self.workers.num_replicas

    def raise_if_over(self) -> None:
        """Raise what the run was ended with, if it is over.

        Raises:
            CancelledError: If it was this worker that ended it.
            Exception: What another worker has ended it with.
        """
        if self.ended_by is not None:
            raise self.ended_by
        if self.is_over:
            raise asyncio.CancelledError
        if self.outer is not None:
            self.outer.raise_if_over()

    def begin(
        self,
        step: int,
        local_rows: Callable[[], Sequence[ReplicaRow]],
        abort: Callable[[BaseException], None],
    ) -> None:
        """Learn of the replicas that have been made for it.

        Args:
            step: Number of the step.
            local_rows: Describes the replicas.
            abort: Ends them, because of an error.
        """
        self.step = step
        self.local_rows = local_rows
        self.abort = abort

    def group(self, ids: tuple[int, ...]) -> WorkersRun:
        """Return the part of it of some replicas, of several workers.

        Raises:
            ValueError: If there are more of them on one worker than on another.
        """
        return WorkersRun(self.workers.groups.workers_of(ids), self.function, self.step, self)

    def merge(self, generation: Generation) -> Pending:
        """Take a turn for a generation that is complete here; return what to await."""
        call = generation.calls[0]
        collective = call.collective
        across = collective.across
        if isinstance(collective, Reducing):
            local = collective.combine(generation.group, generation.calls)
            if type(local) is Summands and local.is_whole:
                return self._reduce(call, collective, local)
            across = partial(collective.across_later, local)
        turn = self.turn(collective.name, collective.signature(call), call.sequence, call.describe)
        turn.is_awaited = collective is not STARTED_ALL_REDUCE
        try:
            merging = across(generation.group, generation.calls, turn)
        except BaseException:
            turn.end()
            raise
        return Pending(merging, lambda _calls, parts: parts, turn)

    def _reduce(self, call: ReplicaCall, collective: Reducing, summands: Summands) -> Pending:
        """Reduce over all workers, with the reductions that were started just before if it can."""
        name, signature = collective.name, collective.signature(call)
        digest = digest_of(name, signature, summands.layout, self.function)
        of_it = FrameKind.COLLECTIVE, 0, self.function, call.sequence, 0, digest, summands.slot
        part: Part = tuple.__new__(Frame, of_it), summands, call  # as `Frame(*of_it)`, quicker
        if self._newest is not None:
            exchange, pending = self._newest
            if pending.to_parts is collective.hand_out and exchange.join(part):
                return pending
        turn = self.turn(name, signature, call.sequence)  # it names no call, and keeps none
        is_awaited = collective is not STARTED_ALL_REDUCE
        parts: list[Part] = [part]
        told = partial(_told_of_first, parts)
        exchange = Exchange(self, parts, told, can_fuse=True, is_awaited=is_awaited)
        pending = Pending(
            exchange, collective.hand_out, turn, tell=exchange.tell, take=exchange.take
        )
        self._newest = exchange, pending
        turn.enter(exchange, is_last=True)
        return pending

    def forget(self, exchange: Exchange[Any]) -> None:
        """Learn that an exchange is over: nothing joins it any more."""
        if self._newest is not None and self._newest[0] is exchange:
            self._newest = None

    def absent_workers(self) -> tuple[int, ...] | None:
        """Return the workers that have not come to where this one waits; None if not known."""
        found = None
        for workers in (self.workers, *self.workers.groups):
            communicator = workers.connected
            absent = None if communicator is None else communicator._absent()
            found = absent or (absent if found is None else found)
        return found

    def turn(
        self,
        what: str,
        signature: str,
        sequence: int,
        describe: Callable[[], str] | None = None,
    ) -> OpenTurn:
        """Take the turn after those that were taken before."""
        turn = OpenTurn(self, what, signature, sequence, self.tail, describe)
        self.tail, self._newest = turn, None
        return turn

    async def agreed_step(self, next_step: int) -> int:
        """Return the number that a step has on all workers, which a failure may have set apart.

        Who fails in a run may be told of to others in their next one: they are a step ahead.

        Args:
            next_step: The number that it would have on this worker.
        """
        with self.turn("step number", "", 0) as turn:
            slots = await turn.exchange(next_step.to_bytes(8, "little"), no_data)
        self.workers.counts_anew = False
        found = [int.from_bytes(each, "little") for each in slots]
        if min(found) < max(found):
            LOGGER.warning(
                "Since a run has failed, workers are at steps %s, in rank order: what some have "
                "done others have not, and variables and datasets may be as far apart (see "
                "check_in_sync). Worker %d goes on with step %d, as all do.",
                found, self.workers.rank, max(found),
            )  # fmt: skip
        return max(found)

    def fail(self, error: BaseException) -> None:
        """Tell the other workers that the run has failed here, unless they know."""
        if self.is_over:
            return
        self.is_over = True
        alarm, workers = self.alarm, self.workers
        origin, function, cause = workers.rank, self.function, cause_of(error)
        if alarm is not None:
            origin, function, cause = alarm.origin, alarm.function, alarm.cause
        stage = 0 if alarm is None else origin + 1
        slot = cut_text(cause or "it has closed its strategy", SLOT_BYTES)
        frame = Frame(FrameKind.FAILED, 0, self.function, stage=stage, slot=slot)
        if not workers.is_broken:
            workers.counts_anew = True
            workers.groups.raise_alarm(origin, function, cause)
            Exchange(self, [(frame, NOTHING_AHEAD, None)], _told("the failure"), no_data).enter()

    def end_by(self, alarm: Alarm) -> None:
        """End it on this worker, which waits for one that does not come."""
        if self.abort is not None and not self.is_over:
            self.alarm, workers = alarm, self.workers
            if alarm.function:
                error = failed_error(alarm.origin, alarm.function, alarm.cause)
            else:
                ranks = (alarm.origin,)
                error = workers_closed_error(ranks, alarm.cause, workers.rank, workers.label)
            self.abort(error)

    def void(self) -> None:
        """Answer a frame that another member of the group has sent in a run that has failed."""
        frame = Frame(FrameKind.FAILED, 0, self.function)
        Exchange(self, [(frame, NOTHING_AHEAD, None)], _told("a failure"), no_data).enter()

    def leave(self, error: BaseException | None) -> Exchange[list[bytes]]:
        """Tell the other workers that this one is closed, and why: the last operation there is."""
        cause = b"" if error is None else cut_text(cause_of(error), SLOT_BYTES)
        frame = Frame(FrameKind.CLOSED, 0, slot=cause)
        goodbye = Exchange(self, [(frame, NOTHING_AHEAD, None)], _told("the end"), no_data)
        goodbye.enter()
        return goodbye

    def numbered(self, frame: Frame) -> Frame:
        """Return a frame of this run with its number, which the first operation gives it."""
        if self.number is None:
            self.number = self.workers.new_run_number()
        return frame if frame.run == self.number else frame._replace(run=self.number)

    async def end(
        self,
        communicator: Communicator,
        frames: Sequence[Frame],
        decision: Closed | Failed | Differs,
        where: Callable[[], WorkerRows],
    ) -> Exception:
        """End the run, as the workers are not in the same collective; return what ends it.

        Args:
            communicator: Over which rows are exchanged where they differ.
            frames: Of all workers.
            decision: What follows from them.
            where: Describes where this worker is.
        """
        workers, outer = self.workers, self.outer
        rows: list[WorkerRows] = []
        if isinstance(decision, Differs):
            told = await gather_bytes(communicator, where().encode())
            rows = list(map(WorkerRows.decode, told))
        workers.runs_until(max(each.run for each in frames))
        workers.counts_anew = True
        if isinstance(decision, Closed):
            ended_by = workers.closed_error(decision)
        elif isinstance(decision, Differs):
            ended_by = workers_mismatch_error(rows, self.step, workers.ranks)
        elif outer is not None and outer.ended_by is not None:  # see `Groups.settle`
            ended_by = outer.ended_by
        else:
            which = f"run {decision.run} ({decision.function})"
            ended_by = failed_error(decision.rank, which, decision.cause)
        self.is_over = True
        self.ended_by = ended_by
        return ended_by

    def where(self, frame: Frame, what: str, signature: str) -> WorkerRows:
        """Describe where this worker is."""
        first = self.first_replica
        rows: Sequence[ReplicaRow] = () if self.local_rows is None else self.local_rows()
        if not rows:
            rows = [
                ReplicaRow(first + i, "-", "outside", what, "-")
                for i in range(self.workers.num_local_replicas)
            ]
        return WorkerRows(frame.run, self.function, what, signature, tuple(rows))


@final
class OpenTurn:
    """The turn of one collective.

    Args:
        run: Of the run.
        what: Names the kind of collective.
        signature: What has to be equal on all workers.
        sequence: Number of the collective.
        before: The turn before; None for the first.
        describe: Names the collective in errors; None if `what` does.
        outer: The turn of a merge function, in which this is an operation.

    Attributes:
        rank: The number of this worker, from 0.
        num_workers: How many workers meet.
        num_local_replicas: How many replicas each of them has.
        has_ended: Whether the next turn may begin.
        is_awaited: Whether its collective was called to be awaited, and not started.
    """

    __slots__ = (
        "_before", "_describe", "_inner", "_lent", "_next", "_outer", "_run", "_sequence",
        "_signature", "_stage", "_what", "has_ended", "is_awaited", "num_local_replicas",
        "num_workers", "rank",
    )  # fmt: skip

    def __init__(
        self,
        run: WorkersRun,
        what: str,
        signature: str,
        sequence: int,
        before: OpenTurn | None = None,
        describe: Callable[[], str] | None = None,
        outer: OpenTurn | None = None,
    ) -> None:
        workers = run.workers
        self.rank, self.num_workers = workers.rank, workers.num_workers
        self.num_local_replicas = workers.num_local_replicas
        self._run = run
        self._what = what
        self._signature = signature
        self._sequence = sequence
        self._stage = 0
        self._before = before
        self._describe = describe
        self._outer = outer
        self.has_ended = False
        self.is_awaited = True
        self._next: Callable[[], object] | None = None
        self._lent: Exchange[Any] | None = None  # what replicas' own arrays were given to
        self._inner: asyncio.Lock | None = None  # of a merge function's operations

    def exchange(
        self,
        slot: bytes,
        carry: Carry[T],
        *,
        what: str = "",
        signature: str = "",
        layout: str = "",
        ahead: Summands | None = None,
        is_last: bool = False,
    ) -> Exchange[T]:
        """Send a frame to all workers; if all agree, carry larger data."""
        if self._outer is not None:
            return self._outer.exchange(
                slot, carry, what=what or self._what,
                signature=f"{signature} {self._signature}" if signature else self._signature,
                layout=layout, ahead=ahead,
            )  # fmt: skip
        run = self._run
        name = f"{what} in {self._what}" if what else self._what
        signature = f"{signature} {self._signature}" if signature else self._signature
        stage, self._stage = self._stage, self._stage + 1
        digest = digest_of(name, signature, layout, run.function)
        frame = Frame(
            FrameKind.COLLECTIVE, run.number or 0, run.function, self._sequence, stage, digest, slot
        )
        exchange = Exchange(
            run, [(frame, ahead or NOTHING_AHEAD, None)],
            partial(self._told, what, signature, layout), carry,
            can_fuse=is_last and ahead is not None and ahead.is_whole,
            is_awaited=self.is_awaited,
        )  # fmt: skip
        self.enter(exchange, is_last=is_last)
        return exchange

    def enter(self, exchange: Exchange[Any], *, is_last: bool) -> None:
        """Let an exchange begin when the turns before have ended."""
        if exchange.parts[0][1] is not NOTHING_AHEAD:
            self._lent = exchange
        before, self._before = self._before, None
        if before is None or before.has_ended:
            self._begin(exchange, is_last)
        else:
            begin = partial(self._begin, exchange, is_last)
            before._next = partial(exchange.get_loop().call_soon, begin)

    def _told(self, what: str, signature: str, layout: str) -> tuple[str, str]:
        name = self._what if self._describe is None else self._describe()
        return f"{what} in {name}" if what else name, _with_layout(signature, layout)

    def _begin(self, exchange: Exchange[Any], is_last: bool) -> None:
        exchange.enter()
        if is_last:
            self.end()

    @asynccontextmanager
    async def inner(self, what: str, signature: str) -> AsyncIterator[OpenTurn]:
        """Wait for the operations before, and give one in this turn, that of a merge function."""
        assert self._inner is not None  # in `merging`
        async with self._inner:
            yield OpenTurn(self._run, what, signature, self._sequence, outer=self)

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Let cross-replica methods of the strategy be exchanges of this turn meanwhile."""
        workers = self._run.workers
        workers.merging, self._inner = self, asyncio.Lock()
        try:
            yield
        finally:
            workers.merging = None

    def give_back(self, call: ReplicaCall | None = None) -> Exchange[Any] | None:
        """Go on without the replicas' own arrays, of a call or of all; return what reads them."""
        lent = self._lent
        return None if lent is None or lent.give_back(call) else lent

    def end(self) -> None:
        """Let the next turn begin."""
        if not self.has_ended:
            self.has_ended = True
            if self._run.tail is self:
                self._run.tail = None
            then, self._next = self._next, None
            if then is not None:
                then()

    def __enter__(self) -> OpenTurn:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


async def take_leave(workers: Workers) -> None:
    """Let the operations before end, and say goodbye; others may be late, or gone."""
    run, is_alone = WorkersRun(workers, "-", None), False
    left_by, last = workers.left_by, workers.before()

    def limit() -> asyncio.TimerHandle:
        communicator = workers._communicator
        timeout = None if communicator is None else communicator.timeout
        # A stall, which names who is missing, is told up to half a second behind its timeout.
        limit_s = CLOSING_S if timeout is None else timeout + 1.0
        return asyncio.get_running_loop().call_later(limit_s, give_up, limit_s)

    def give_up(limit_s: float) -> None:
        nonlocal is_alone
        is_alone = True
        error: BaseException = left_by or TimeoutError(
            f"The other workers did not come to close their strategies within {limit_s:g} s. If "
            "they have steps left that this one has no part in, let all meet behind them, or set "
            "a timeout that is longer."
        )
        workers.break_off(error)
        if workers._communicator is None and last is not None:  # no engine ends its wait
            last._fail(error)

    timer = limit()
    try:
        if last is not None:
            await last.over()
            timer.cancel()
            timer = limit()  # now there may be a timeout
        communicator = workers._communicator
        if workers._broken is None and communicator is not None:
            workers.groups.leave(communicator, "" if left_by is None else cause_of(left_by))
            await workers.groups.over()
            await workers.groups.aclose()  # who waits for this worker in one is told now
            is_over = await run.leave(left_by).over()
            is_alone |= is_over and run.ended_by is None  # no frame of the others has ended it
    finally:
        timer.cancel()
    if is_alone:
        text = f"{workers.label} of worker {workers.rank} was closed without the others"
        LOGGER.warning("%s: %s", text, workers._broken)


def failed_error(rank: int, which: str, cause: str) -> WorkerLostError:
    """Return the error of a run that has failed on another worker."""
    return WorkerLostError(
        f"Worker {rank} failed in {which}: {cause}. The run was ended on all workers; see that "
        "worker's traceback.",
        ranks=(rank,),
    )


def require_not_awaited(run: WorkersRun | None, what: str) -> None:
    """Check that what waits for the end of a run is not what that run waits for.

    Raises:
        ContextError: If it is.
    """
    if run is not None and run in AWAITED_BY.get():
        raise ContextError(
            f"{what!r} has to meet the other workers, but was called by what the device loop of "
            f"{run.function} waits for: its iterator, or an outside function. It would wait for "
            "that loop, and the loop for it. Pass aiter(batches) itself to run_steps, and change "
            "batches in the dataset or in the step; read metrics and variables between loops."
        )


def require_runnable(workers: Workers, what: str) -> None:
    """Check that a run is not one which would wait for itself, or that others do not wait for.

    Raises:
        ContextError: If a merge function would wait for the end of its own run, it goes to a group,
            whose view works in merge functions only, or this worker has not come to `grow`.
    """
    if workers.is_new:
        raise ContextError(
            f"Worker {workers.rank} was started by `strategy.grow`, and the others wait for it "
            "there. Call `await strategy.grow(num_workers, savepoint)` first, as they do."
        )
    place, has_run = PLACE.get(), workers._running is not None
    is_own = place.strategy is not None and place.strategy.workers is workers
    if (place.in_merge and is_own and has_run) or workers.outer is not None:
        raise ContextError(
            f"{what} was to run in a merge function of {workers.label}, whose run it would wait "
            "for. Call it outside the step; or in the merge function of a group, call the method "
            "of the view that it gets."
        )


async def aggregated(
    operation: Callable[[], AbstractAsyncContextManager[Turn]],
    aggregation: VariableAggregation,
    take: Callable[[], Sequence[object]],
) -> Any:
    """Combine components in an operation, in whose turn they are taken; see `Workers.aggregate`."""
    is_mean = aggregation is VariableAggregation.MEAN
    op = ReduceOp.MEAN if is_mean else ReduceOp.SUM
    async with operation() as turn:
        arrays = take()
        if aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
            rows, halves = widen_halves(op, [[array] for array in arrays])
            value = aggregate(aggregation, [array for [array] in rows])
            return (await reduce_across(turn, op, [value], halves=halves))[0]
        value = aggregate(aggregation, arrays[:1])
        if isinstance(value, IndexedSlices):  # each brings other rows: those of one count
            nothing = IndexedSlices(value.values[:0], value.indices[:0], value.dense_shape)
            brought = value if turn.rank == 0 else nothing
            return (await reduce_across(turn, ReduceOp.SUM, [brought]))[0]
        return (await broadcast_arrays(turn, [value]))[0]


def _told_of_first(parts: Sequence[Part]) -> tuple[str, str]:
    """Name the first of some reductions that were started, and say what has to be equal."""
    _, summands, call = parts[0]
    assert call is not None  # who joins others has a call
    return call.describe(), _with_layout(call.collective.signature(call), summands.layout)


def _with_layout(signature: str, layout: str) -> str:
    """Return what has to be equal on all workers, for errors; a layout that is in it is not new."""
    return signature if layout in signature else f"{signature} sent as {layout}"


def _told(what: str) -> Callable[[], tuple[str, str]]:
    return lambda: (what, "")
