"""Communicators over an engine: one thread makes their calls, each one's first in, first out.

The event loop's thread begins those that a task waits for where that is allowed, see `Link.visit`.
A call that waits for others lets those of other communicators go on meanwhile, see `Poller`.

An engine only moves bytes (`Transport`): every worker gives to all, all give to one place, or one
gives to all. Sums are made here, by the same code as those of replicas in one process, in ascending
rank, so results do not depend on the engine. Two workers exchange whole arrays and each adds up all
of it: as many bytes as in any other way, in one exchange. More workers each add up one part (an
all-to-all) and exchange the sums (an all-gather): 2 (n - 1) / n of the array go in and out of each,
which is the least there is.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from contextvars import copy_context
from time import monotonic
from typing import Any, NoReturn, TypeAlias, TypeVar, final

import numpy as np

from ..collectives import BufferPool
from ..devices import Op
from ..devices.backends import reduce_arrays, reduce_into, result_dtype
from ..tree import Array, DType
from ..typing import ReduceOp
from ._communicator import (
    AGREE,
    ALL_GATHER,
    ALL_REDUCE,
    BARRIER,
    BROADCAST,
    CLOSED_TEXT,
    COMPLETE,
    ENDED,
    OUTER_CLOSED_TEXT,
    Call,
    Communicator,
    Failure,
)
from ._local import split_shrink_error
from ._poller import Entry
from ._transport import WAITING_S, WARN_S, Group, GroupEndedError, Leave, Link, Poll, name_of

T = TypeVar("T")
Steps: TypeAlias = Generator[tuple[Poll, int], None, T]
"""Steps of a call: each yields an exchange to wait for, and its number of bytes."""

CLOSE_S = 1.0
SMALL_BYTES = 128 * 1024  # an exchange costs more than to add up so much
SEGMENT_BYTES = 4 * 1024 * 1024  # stays in the cache between the exchange and the sum
JOINED_BYTES = 64 * 1024 * 1024  # of arrays in one exchange, whose wait has a limit
MAX_BYTES = 2**31 - 1  # of one message: MPI counts in C integers


class EngineCommunicator(Communicator):
    """A worker of a group that an engine connects; its adapters differ in the transport only.

    Attributes:
        group: The members.
        link: The transport and the poller.
        queue: Calls that are not over, in order.
        buffers: Memory of large results.
        scratch: Memory of what others send, the same again and again; on the lane's thread.
        leave_by: When it waits no longer for who is late in its calls, as it was closed.
    """

    def __init__(
        self, link: Link, ranks: tuple[int, ...], timeout: float | None, name: str = ""
    ) -> None:
        worker = link.transport.rank
        super().__init__(ranks.index(worker), len(ranks), timeout, worker)
        self.link = link
        self.queue: deque[Entry] = deque()
        self.group = Group(self.rank, ranks, name)
        self.buffers = BufferPool()
        self.scratch = np.empty(0, np.uint8)
        self.leave_by = math.inf
        self._name = name
        link.members.append(self)

    # ---- on the event loop ---------------------------------------------------------------

    def _enqueue(self, call: Call) -> Callable[[], None] | None:
        return self.link.visit(Visit(self, call), self.queue)

    def performed(self, call: Call, result: Any, error: BaseException | None) -> None:
        """Learn on the event loop what a call has come to."""
        if error is None:
            self._settle(call, result)
        else:
            self._end_all(_failure_of(error))

    def _end_all(self, failure: Failure) -> None:
        for member in tuple(self.link.members):
            member._end(failure)

    def _spread(self, failure: Failure) -> None:
        link = self.link
        if link.ended is None:
            link.ended = failure  # seen at once by a lane that waits in a call
        self._end_all(failure)
        link.put(link.give_up).add_done_callback(forget)

    def _absent(self) -> tuple[int, ...] | None:
        try:
            visit = self.queue[0]
        except IndexError:  # the lane may have ended it just now
            return None
        return self.link.missing(visit) if isinstance(visit, Visit) and visit.is_late else None

    def _subgroup(self, ranks: tuple[int, ...], key: str) -> Communicator:
        outer = tuple(self.group.ranks[rank] for rank in ranks)
        return SplitCommunicator(self.link, outer, self.timeout, name_of(self._name, outer, key))

    def _alarm(self, number: int, text: str) -> None:
        self.link.alarm(self.group, number, text).add_done_callback(forget)

    async def _close(self) -> None:
        if not self.group.name:  # splits have no engine without it
            for each in tuple(self.link.members):
                if each is not self and not each.is_closed:
                    each._leave(OUTER_CLOSED_TEXT)
        await has_ended(self._leave(CLOSED_TEXT), 2 * CLOSE_S)

    def _leave(self, text: str) -> asyncio.Future[None]:
        """Make no more calls, and have the lane tell the others; does not wait."""
        self._shut(text)
        self.leave_by = monotonic() + CLOSE_S
        leave = Leave(self, self.statistics().calls)
        self.link.poller.add(self.queue, leave)
        return leave.future


@final
class SplitCommunicator(EngineCommunicator):
    """A worker of a part of a group; made by `split`."""

    async def _resized(self, num_new: int) -> Communicator:
        raise split_shrink_error()


@final
class Visit:
    """A call on its visit to the engine: exchanges and sums, and the result's way back.

    Args:
        communicator: Whose call it is.
        call: The call.

    Attributes:
        call: The same.
        completions: Bring the result to the event loop.
        group: The members of the group.
        timeout: How long it may take.
        start: Since when it waits for others.
        spin_until: When it begins to wait with pauses.
        beat_s: How often it tells the others that it waits.
        tell_at: When it does so next.
        warn_at: When it logs for whom it waits.
        is_told: Whether it has told them.
        is_late: Whether it waits with pauses.
    """

    __slots__ = (
        "_agrees", "_arrays", "_begun", "_communicator", "_context", "_error", "_link", "_poll",
        "_result", "_steps", "_transport", "beat_s", "call", "completions", "group", "is_late",
        "is_told", "spin_until", "start", "tell_at", "timeout", "warn_at",
    )  # fmt: skip

    def __init__(self, communicator: EngineCommunicator, call: Call) -> None:
        self._communicator = communicator
        self._context = copy_context()
        self._link = communicator.link
        self._transport = communicator.link.transport
        self._result: object = None
        self._error: BaseException | None = None
        self._begun: tuple[Array, Poll] | None = None
        self._arrays: tuple[Array, ...] = ()  # that the engine may use, once it has begun
        self._agrees: bool | None = None
        self._steps: Steps[object] | None = None  # once it is the head of its queue
        self._poll: Poll = _is_over  # tells whether the next step may be taken
        self.call = call
        self.completions = communicator.link.completions()
        self.group = communicator.group
        self.timeout = timeout = communicator.timeout
        self.start = self.spin_until = self.tell_at = self.warn_at = 0.0
        self.beat_s = WAITING_S if timeout is None else min(WAITING_S, timeout / 5)
        self.is_told = self.is_late = False

    def resolve(self) -> None:
        """Bring the result; on the event loop."""
        self._communicator.performed(self.call, self._result, self._error)

    @property
    def leave_by(self) -> float:
        """The time from which its communicator, which was closed, waits no longer."""
        return self._communicator.leave_by

    @property
    def has_met(self) -> bool:
        """True if the others came to the attempt, whatever is left to do."""
        return self._agrees is not None

    def attempt(self, limit_s: float) -> bool:
        """Perform the call here if the others come at once; false if the lane has to go on.

        Args:
            limit_s: How long they may take, in seconds.

        Raises:
            BaseException: That is no Exception, such as an interrupt. What is sent is not known
                then, so the lane ends the group, as after any error.
        """
        call = self.call
        assert call.agrees is not None  # no other call is attempted
        try:
            self._link.read_notes()
            rows, poll = self._begun = self._begin(call)
            stop = monotonic() + limit_s
            while not poll():
                if monotonic() >= stop:
                    return False
                os.sched_yield()  # workers may be more than cores
            self._agrees = call.agrees(rows)
        except BaseException as error:
            self._link.hold(self)
            if not isinstance(error, Exception):
                self._error = InterruptedError(f"interrupted by {error!r}")
                raise
            self._error = error  # the lane raises it, and ends the group
            return False
        self._result = rows, None
        return not self._agrees

    # ---- on the lane's thread ------------------------------------------------------------

    def advance(self, looks: bool) -> bool:
        """Go on as far as the others let it; true if it is over."""
        try:
            is_over = self._goes_on(looks)
        except BaseException as error:  # noqa: BLE001 - ends the group
            self._error, is_over = error, True
            self._link.hold(self._begun)  # an attempt, which may be under way
        if is_over and self._link.ended is not None:  # who waits knows it first
            self._link.poller.call_afterwards(self._link.give_up_quietly)
        return is_over

    def _goes_on(self, looks: bool) -> bool:
        try:
            if self._steps is None:
                self._enter()
            elif not self._has_come(looks):
                return False
            while self._takes_step():
                if not self._has_come(looks):
                    return False
            self._link.passed(self)
            return True
        except GroupEndedError:
            raise
        except Exception as error:  # noqa: BLE001 - the workers are no longer in step
            self._fail(error)

    def _enter(self) -> None:
        """Become the head of the queue."""
        self.start = now = monotonic()
        self.tell_at, self.warn_at = now + self.beat_s, now + WARN_S
        self._link.read_notes()
        self._steps = self._result_of(self.call)

    def _takes_step(self) -> bool:
        """Go on to the next exchange; false if there is none, and the result is there."""
        assert self._steps is not None  # since `_enter`
        try:
            self._poll, num_bytes = self._context.run(next, self._steps)
        except StopIteration as end:
            self._result = end.value
            return False
        self.spin_until = monotonic() + self._link.poller.spin_s(num_bytes)
        return True

    def _has_come(self, looks: bool) -> bool:
        """Tell whether the exchange is over that the next step needs; if not, look at the clock."""
        poll, poller = self._poll, self._link.poller
        try:
            while not poll():
                if monotonic() >= self.spin_until:
                    self.is_late = True
                    if looks:
                        self._link.look(self)
                    return False
                if not poller.is_alone:
                    return False
                os.sched_yield()  # workers may be more than cores
            self.start = monotonic()  # a timeout is for waiting: what came took its time
            self.is_late = False
            return True
        except BaseException:
            self._link.hold(poll)
            raise

    def _fail(self, error: Exception) -> NoReturn:
        """End the group, because of an error.

        Raises:
            GroupEndedError: Always.
        """
        link, transport = self._link, self._transport
        with suppress(RuntimeError, ValueError):  # notes may be lost with the rest, or cut
            link.look_for_gone(self, at_once=True)  # one that closes says so first
        failure = transport.explain(error, self.call.describe())
        if failure is None:
            text = f"Worker {transport.rank} failed in {self.call.describe()}: {error!r}"
            failure = Failure(ENDED, text, (transport.rank,))
        link.end(failure)

    def _result_of(self, call: Call) -> Steps[object]:
        array = call.array
        if call.kind == BARRIER or not (array.nbytes or call.brings):
            yield self._transport.barrier(self.group), 0
        if call.kind == BARRIER:
            return None
        if call.kind == BROADCAST:
            return (yield from self._broadcast(array, call.root))
        if call.kind == ALL_GATHER:
            return (yield from self._all_gather(array))
        if call.kind == COMPLETE:
            return (yield from self._complete(call, array))
        assert call.op is not None  # those that are left reduce
        if call.kind == AGREE:
            return (yield from self._agree(call, call.op))
        if call.kind == ALL_REDUCE:
            return (yield from self._all_reduce(array, call.op))
        return (yield from self._reduce_scatter(call, array, call.op))

    def _begin(self, call: Call) -> tuple[Array, Poll]:
        """Send what is looked at before anything is reduced."""
        array = call.bring()
        require_size(array.nbytes)
        rows = np.empty((self.group.size, *array.shape), array.dtype)
        rows[self.group.rank] = array
        self._arrays = array, rows
        return rows, self._transport.all_gather(self.group, as_bytes(array), as_bytes(rows))

    def _agree(self, call: Call, op: ReduceOp) -> Steps[tuple[Array, list[Array] | None]]:
        error, self._error = self._error, None
        if error is not None:  # of the attempt
            raise error
        rows, poll = self._begun or self._begin(call)
        if self._agrees is None:
            assert call.agrees is not None
            yield poll, rows.nbytes
            self._agrees = call.agrees(rows)
        if not self._agrees:
            return rows, None
        return rows, (yield from self._all_reduce_each(call.summands, op))

    def _broadcast(self, array: Array, root: int) -> Steps[Array]:
        result = array.copy() if self.group.rank == root else np.empty_like(array)
        for part in _segments(result.reshape(-1), MAX_BYTES):
            yield self._transport.broadcast(self.group, as_bytes(part), root), part.nbytes
        return result

    def _all_gather(self, array: Array) -> Steps[Array]:
        rows = np.empty((self.group.size, *array.shape), array.dtype)
        if array.nbytes:
            rows[self.group.rank] = array
            yield self._gather(array, rows)
        return rows

    def _gather(self, array: Array, rows: Array) -> tuple[Poll, int]:
        require_size(array.nbytes)
        poll = self._transport.all_gather(self.group, as_bytes(array), as_bytes(rows))
        return poll, rows.nbytes

    def _all_reduce_each(self, arrays: Sequence[Array], op: ReduceOp) -> Steps[list[Array]]:
        totals: list[Array] = []
        for run in _runs(arrays, JOINED_BYTES):
            if len(run) > 1 and self._is_added(op, run[0].dtype):
                totals += yield from self._added(run)
                continue
            for each in run:
                totals.append((yield from self._all_reduce(each, op)))
        return totals

    def _all_reduce(self, array: Array, op: ReduceOp) -> Steps[Array]:
        size = self.group.size
        if array.nbytes <= SMALL_BYTES // size:
            rows = yield from self._all_gather(array)
            total: Array = reduce_arrays(op, list(rows))
            return total
        if self._is_added(op, array.dtype):
            return (yield from self._added([array]))[0]
        buffers = self._communicator.buffers
        buffers.next_call()
        result: Array = buffers.array(array.shape, result_dtype(op, array.dtype))
        source, target = array.reshape(-1), result.reshape(-1)
        length = max(1, SEGMENT_BYTES // array.itemsize // size) * size
        whole = source.size - source.size % size  # what can be cut into equal parts
        for start in range(0, whole, length):
            part = slice(start, min(start + length, whole))
            if size <= 2:
                yield from self._reduce_whole(op, source[part], target[part])
            else:
                yield from self._reduce_parts(op, source[part], target[part])
        if whole < source.size:
            yield from self._reduce_whole(op, source[whole:], target[whole:])
        return result

    def _is_added(self, op: ReduceOp, dtype: DType) -> bool:
        """Tell whether the engine adds up: two numbers have only one sum, whoever makes it."""
        if self.group.size != 2 or op is not ReduceOp.SUM:
            return False
        return dtype.name in self._transport.added and bool(result_dtype(op, dtype) == dtype)

    def _added(self, arrays: Sequence[Array]) -> Steps[list[Array]]:
        """Have the engine add up arrays of one dtype, in one exchange."""
        buffers = self._communicator.buffers
        buffers.next_call()
        whole: Array = buffers.array((sum([each.size for each in arrays]),), arrays[0].dtype)
        totals, start = [], 0
        for array in arrays:
            total = whole[start : start + array.size].reshape(array.shape)
            np.copyto(total, array)
            totals.append(total)
            start += array.size
        yield self._transport.add(self.group, whole), whole.nbytes
        return totals

    def _reduce_whole(self, op: ReduceOp, source: Array, target: Array) -> Steps[None]:
        """Exchange everything, and add up all of it."""
        rows = self._rows(source.size, source.dtype)
        yield self._gather(source, rows)
        reduce_into(op, target, self._with_own(rows, source))

    def _reduce_parts(self, op: ReduceOp, source: Array, target: Array) -> Steps[None]:
        """Add up one part, and exchange the sums."""
        rank, size = self.group.rank, self.group.size
        length = source.size // size
        own = slice(rank * length, (rank + 1) * length)
        rows = self._rows(length, source.dtype)
        yield self._swap(list(source.reshape(size, length)), rows, [length] * size)
        reduce_into(op, target[own], self._with_own(rows, source[own]))
        yield self._gather(target[own], target)

    def _reduce_scatter(self, call: Call, array: Array, op: ReduceOp) -> Steps[Array]:
        """Exchange and add up as much at a time as stays in the cache."""
        rank, size, buffers = self.group.rank, self.group.size, self._communicator.buffers
        parts = call.parts_of(array)
        buffers.next_call()
        result: Array = buffers.array(parts[rank].shape, result_dtype(op, array.dtype))
        flat, target = [part.reshape(-1) for part in parts], result.reshape(-1)
        length = max(1, SEGMENT_BYTES // array.itemsize // size)
        for start in range(0, max(part.size for part in flat), length):
            sends = [part[start : start + length] for part in flat]
            own = sends[rank]
            rows = self._rows(own.size, array.dtype)
            yield self._swap(sends, rows, [own.size] * size)
            reduce_into(op, target[start : start + own.size], self._with_own(rows, own))
        return result

    def _complete(self, call: Call, array: Array) -> Steps[Array]:
        """Exchange the parts where they are."""
        own = call.parts_of(array)[self.group.rank]
        if array.nbytes > MAX_BYTES:
            for rank, part in enumerate(call.parts_of(array)):
                for piece in _segments(part, MAX_BYTES):
                    yield self._transport.broadcast(self.group, as_bytes(piece), rank), piece.nbytes
        elif array.nbytes:
            yield self._swap([own] * self.group.size, array, call.sizes)
        return array

    def _swap(self, sends: list[Array], recv: Array, sizes: Sequence[int]) -> tuple[Poll, int]:
        """Give each member its part, by rank; collect theirs: so many elements of each."""
        counts = [size * recv.itemsize for size in sizes]
        going = [as_bytes(each) for each in sends]
        poll = self._transport.all_to_all(self.group, going, as_bytes(recv), counts)
        return poll, max(recv.nbytes, sum(each.nbytes for each in going))

    def _with_own(self, rows: Array, own: Array) -> list[Array]:
        """Return the rows of all workers, where this one's need not have been sent."""
        arrays = list(rows)
        arrays[self.group.rank] = own
        return arrays

    def _rows(self, length: int, dtype: DType) -> Array:
        """Return memory for one row per worker, the same again and again."""
        num_bytes = self.group.size * length * dtype.itemsize
        communicator = self._communicator
        if communicator.scratch.nbytes < num_bytes:
            communicator.scratch = np.empty(num_bytes, np.uint8)
        return communicator.scratch[:num_bytes].view(dtype).reshape(self.group.size, length)


async def has_ended(done: asyncio.Future[Any], timeout: float | None) -> bool:
    """Wait for an op; False if it takes longer. Unlike awaiting it, this never cancels it."""
    future = done.get_loop().create_future()
    done.add_done_callback(lambda _: None if future.done() else future.set_result(None))
    await asyncio.wait([future], timeout=timeout)
    return done.done()


def _is_over() -> bool:
    """Stand for an exchange that nothing was sent in."""
    return True


def _failure_of(error: BaseException) -> Failure:
    if isinstance(error, GroupEndedError):
        return error.failure
    return Failure(ENDED, f"The engine's thread failed: {error!r}")


def forget(op: Op[Any]) -> None:
    """Take an error that every later call raises anyway."""
    if not op.cancelled():
        op.exception()


def as_bytes(array: Array) -> Array:
    """Return a flat view of the bytes of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


def require_size(num_bytes: int) -> None:
    """Check that an engine can count so many bytes.

    Raises:
        ValueError: If it cannot.
    """
    if num_bytes > MAX_BYTES:
        raise ValueError(
            f"A worker sends at most 2 GiB at once in all_gather and reduce_scatter; this is "
            f"{num_bytes / 2**30:.1f} GiB. Cut the array, or use all_reduce, which does."
        )


def _runs(arrays: Sequence[Array], num_bytes: int) -> list[list[Array]]:
    """Return arrays in runs of one dtype and of about so many bytes at most."""
    runs: list[list[Array]] = []
    size = 0
    for array in arrays:
        if not runs or runs[-1][0].dtype != array.dtype or size + array.nbytes > num_bytes:
            runs.append([])
            size = 0
        runs[-1].append(array)
        size += array.nbytes
    return runs


def _segments(array: Array, num_bytes: int) -> list[Array]:
    length = max(1, num_bytes // array.itemsize)
    return [array[start : start + length] for start in range(0, array.size, length)]
