"""Feeding an infeed from an iterator: on a thread, or on the event loop if it is async.

What was read ahead belongs to the iterator until its step is complete. So a loop that fails or is
cancelled gives the rest back, and the next call on the same iterator begins with it.
"""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from itertools import islice
from threading import Lock
from typing import Any, TypeAlias, final

from ..context import LoopStep
from ..devices import Gate, Op, OwnedTask, OwnLane, new_gate, wait_shielded
from ..input import DistributedIterator, close_iterator
from ..replica import unless_asked_for
from ..values import DistributedValues, PerReplica, split_per_replica
from ._infeed import Infeed, Mark
from ._static_shapes import StaticShapes

GIVE_UP_S = 0.25
"""How long a loop that failed waits for an iterator that blocks its thread; then it is left."""

MAX_KEPT = 8
"""How many iterators a strategy keeps that cannot be referred to weakly, such as `zip()`."""

IN_MEMORY = frozenset(map(type, (iter([]), iter(()), iter(range(0)), iter({}), iter({}.values()))))
"""Iterators that never block and need no thread."""


# ---- iterators between calls -----------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class Raised:
    """Stands for an element that could not be read: the iterator raised `error` instead."""

    error: BaseException


Reading: TypeAlias = Any
"""One look at an iterator: an element, `Mark.END` or a `Raised`."""

Kept: TypeAlias = tuple[OwnLane, deque[Reading]]
"""What is kept of an iterator from one call of run_steps to the next.

The thread that advances it, if it is a plain one; and what was read for steps that are not
complete, in order, which is taken before anything new.
"""


def new_kept() -> Kept:
    """Return what is kept of an iterator that was not read yet."""
    return OwnLane(), deque()


@final
class KeptIterators:
    """The iterators that device loops of one strategy were fed by and that have not ended.

    An iterator is forgotten, and its thread ends, when it is exhausted, when it is garbage, or when
    the strategy is closed. One without weak references is kept alive here, the newest few only.
    """

    __slots__ = ("_kept", "_strong")

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Callable[[], object], Kept]] = {}
        self._strong: list[int] = []

    def find(self, iterator: object) -> Kept:
        """Return what is kept of an iterator, newly made at its first call."""
        key = id(iterator)
        refer, kept = self._kept.get(key, (None, None))
        if refer is not None and kept is not None and refer() is iterator:
            return kept
        kept, table = new_kept(), self._kept
        try:
            refer = weakref.ref(iterator, lambda _: table.pop(key, None))
        except TypeError:

            def refer() -> object:
                return iterator

            if len(self._strong) == MAX_KEPT:
                table.pop(self._strong.pop(0), None)
            self._strong.append(key)
        table[key] = refer, kept
        return kept

    def forget(self, iterator: object) -> None:
        """End the thread of an iterator that is exhausted."""
        found = self._kept.pop(id(iterator), None)
        if id(iterator) in self._strong:
            self._strong.remove(id(iterator))
        if found is not None:
            found[1][0].close()

    def close(self) -> None:
        """End all threads; idempotent."""
        self._strong.clear()
        while self._kept:
            _, (_, (lane, _)) = self._kept.popitem()
            lane.close()

    def __repr__(self) -> str:
        return f"<KeptIterators | {len(self._kept)}>"


def open_iterator(source: object) -> Iterator[object] | AsyncIterator[object]:
    """Return the iterator of what run_steps was given; an iterator is its own.

    Raises:
        TypeError: If it is nothing that yields elements.
    """
    if isinstance(source, (Mapping, DistributedValues, str, bytes)) or hasattr(source, "__array__"):
        raise TypeError(
            f"run_steps takes an iterator of elements, one per step, but a "
            f"{type(source).__name__} is data of one piece. Pass an iterator over batches, such as "
            "aiter(strategy.distribute_dataset(...))."
        )
    if isinstance(source, Iterable):
        return iter(source)
    if isinstance(source, AsyncIterable):
        return aiter(source)
    raise TypeError(
        f"run_steps takes an iterator of elements, one per step, got {source!r} "
        f"({type(source).__name__})."
    )


# ---- one call --------------------------------------------------------------------------------


class Feeder(ABC):
    """Reads the elements of one loop, checks them, and puts their parts into the infeed.

    Args:
        iterators: What is kept of the iterator; None if it was made for this loop.
        infeed: Where they go.
        steps: Those of all replicas, which say how many are complete.
        num_wanted: How many steps the loop has: not one element more is read.

    Attributes:
        error: Why no more elements come, if the iterator failed or gave one that does not fit.
        is_exhausted: Whether the loop has come to the iterator's end, which was not closed before.

    Invariants:
        * `_unfinished` begins with the element of step `_num_complete`.
    """

    def __init__(
        self,
        iterators: KeptIterators | None,
        infeed: Infeed,
        steps: Sequence[LoopStep],
        num_wanted: int,
    ) -> None:
        self.error: BaseException | None = None
        self.is_exhausted = False
        self._iterators = iterators
        self._infeed = infeed
        self._steps = steps
        self._num_wanted = num_wanted
        self._shapes = StaticShapes(len(steps))
        self._unfinished: deque[Reading] = deque()
        self._num_complete = 0

    @abstractmethod
    def start(self) -> None:
        """Begin, on the running event loop."""

    @abstractmethod
    async def aclose(self) -> None:
        """End; waits for what runs, but not for ever for a thread that the iterator blocks."""

    @abstractmethod
    def abandon(self) -> None:
        """Leave what runs to itself: there is no event loop to wait on."""

    @abstractmethod
    def settle(self) -> None:
        """Give back to the iterator what was read for steps that are not complete."""

    @property
    def _is_complete(self) -> bool:
        """True if the loop has all it wants, or wants nothing any more."""
        return self._infeed.num_put >= self._num_wanted or self._infeed.is_aborted

    def _put(self, element: object) -> None:
        """Put one element; a tuple is spread over the inputs of the step function.

        Raises:
            ValueError: If it does not look like the first one.
        """
        if type(element) is not tuple:
            element = (element,)
        parts = _parts(element, len(self._steps))
        self._shapes.check(self._infeed.num_put, parts)
        self._infeed.put(parts)

    def _end(self, error: BaseException | None) -> None:
        """Let the loop end after the elements that are there."""
        self.error = error
        if self._infeed.num_put < self._num_wanted:
            self._infeed.end(has_failed=error is not None)

    def _take_complete(self) -> list[Reading]:
        """Remove from the unfinished elements those whose steps are not repeated."""
        num_complete = max(self._num_complete, self._steps[0].num_taken())
        count = num_complete - self._num_complete
        self._num_complete = num_complete
        return [self._unfinished.popleft() for _ in range(count)]

    def _take_told(self, unfinished: deque[Reading]) -> Reading | None:
        """Remove what the call itself tells its caller: an end, or what the iterator raises.

        What it raises behind steps that were not run is told by the call that comes to it, unless
        the iterator was made for this loop.
        """
        first = unfinished[0] if unfinished else None
        if first is Mark.END or (type(first) is Raised and first.error is self.error):
            return unfinished.popleft()
        if self._num_complete < self._infeed.num_put and self._iterators is not None:
            self.error = None  # other workers have no more elements, and it is given back
        return None


@final
class ThreadFeeder(Feeder):
    """Advances a plain iterator on the thread that is kept for it, as it may block.

    Args:
        iterator: The iterator.
        iterators: What is kept of it; None if it was made for this loop, and is closed with it, on
            the thread.
        infeed: The queues.
        steps: Those of all replicas.
        num_wanted: How many steps the loop has.
    """

    def __init__(
        self,
        iterator: Iterator[object],
        iterators: KeptIterators | None,
        infeed: Infeed,
        steps: Sequence[LoopStep],
        num_wanted: int,
    ) -> None:
        super().__init__(iterators, infeed, steps, num_wanted)
        self._iterator = iterator
        self._lane, self._unrun = new_kept() if iterators is None else iterators.find(iterator)
        self._lock = Lock()  # the thread may have been given up, and read one more element
        self._op: Op[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._gave_up = False

    def start(self) -> None:
        """Begin on the thread."""
        op = self._lane.run(self._feed, new_gate(asyncio.get_running_loop()))
        op.put()
        self._op = op

    async def aclose(self) -> None:
        """Wait for the thread; only for a moment if the loop failed or the wait is cancelled."""
        op, self._op = self._op, None  # it holds this object
        cancelled: list[asyncio.CancelledError] = []

        def was_cancelled(error: asyncio.CancelledError) -> None:
            cancelled.append(error)
            self._give_up_soon()

        if op is not None and not op.done():
            if self._infeed.is_aborted:
                self._give_up_soon()
            await wait_shielded(
                lambda: op.done() or self._gave_up, lambda: self._new_waiter(op), was_cancelled
            )
        if self._timer is not None:
            self._timer.cancel()
        if self._iterators is None:
            self._lane.close()
        if cancelled:
            raise cancelled[0]

    def abandon(self) -> None:
        """Let the thread end when the iterator lets it."""
        if self._iterators is None:
            self._lane.close()

    def settle(self) -> None:
        """Keep what was read for steps that are not complete."""
        with self._lock:
            self._take_complete()
            rest = self._unfinished
            told = self._take_told(rest)
            self._unrun.extendleft(reversed(rest))
            self._unfinished = self._unrun  # of an element that comes later
        self.is_exhausted = told is Mark.END
        if self.is_exhausted and self._iterators is not None:
            self._iterators.forget(self._iterator)

    def _new_waiter(self, op: Op[None]) -> asyncio.Future[None]:
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        op.add_done_callback(lambda _op: _resolve(waiter))
        return waiter

    def _give_up_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GIVE_UP_S, self._give_up)

    def _give_up(self) -> None:
        self._gave_up = True
        if self._waiter is not None:
            _resolve(self._waiter)

    def _feed(self, room: Gate) -> None:
        error: BaseException | None = None
        try:
            try:
                self._pass_on(room)
            finally:
                if self._iterators is None:
                    close_iterator(self._iterator)
        except BaseException as raised:  # noqa: BLE001 - raised by run_steps
            error = unless_asked_for(raised)
        self._end(error)

    def _pass_on(self, room: Gate) -> None:
        infeed, unrun = self._infeed, self._unrun
        while not self._is_complete:
            reading = unrun.popleft() if unrun else self._read()
            with self._lock:
                self._unfinished.append(reading)
                if self._unfinished is not unrun:
                    self._take_complete()
            if type(reading) is Raised:
                raise reading.error
            if reading is Mark.END:
                return
            if not infeed.has_room and infeed.wait_for_room(room.open):
                room.wait()
            if infeed.is_aborted:
                return
            self._put(reading)

    def _read(self) -> Reading:
        try:
            return next(self._iterator, Mark.END)
        except BaseException as error:  # noqa: BLE001 - raised behind the elements before it
            return Raised(error if self._infeed.is_aborted else unless_asked_for(error))


@final
class TaskFeeder(Feeder):
    """Advances an async iterator on the event loop, or a plain one that never blocks.

    Elements in memory for compiled chunks are read by the thread that makes room for them: a trip
    to the event loop and back would take longer than that.

    Args:
        iterator: The iterator. A DistributedIterator keeps by itself what belongs to it.
        iterators: What is kept of it; None if it was made for this loop, and is closed with it, in
            the same task.
        infeed: The queues.
        steps: Those of all replicas.
        num_wanted: How many steps the loop has.
    """

    def __init__(
        self,
        iterator: Iterator[object] | AsyncIterator[object],
        iterators: KeptIterators | None,
        infeed: Infeed,
        steps: Sequence[LoopStep],
        num_wanted: int,
    ) -> None:
        super().__init__(iterators, infeed, steps, num_wanted)
        self._iterator = iterator
        self._batches = iterator if isinstance(iterator, DistributedIterator) else None
        self._unrun: deque[Reading] = deque()
        if iterators is not None and self._batches is None:
            self._unrun = iterators.find(iterator)[1]
        self._lock = Lock()  # the device may read while a loop is settled that was dropped
        self._reads_many = infeed.fills_chunks and type(iterator) in IN_MEMORY
        self._has_begun = False
        self._task: OwnedTask[None] | None = None

    def start(self) -> None:
        """Begin in a task, or read as much as there is room for."""
        if self._reads_many:
            self._fill()
            return
        if self._batches is not None:
            self._batches.follow(self._report)
        self._task = OwnedTask(self._feed(), "aioreplica infeed")

    async def aclose(self) -> None:
        """End the task, wherever it waits, and see it gone."""
        if self._task is not None:
            if self._infeed.is_aborted and self._has_begun:  # else it sees that by itself
                self._task.cancel()
            await self._task.ended()

    def abandon(self) -> None:
        """Leave the task to the loop's end."""

    def settle(self) -> None:
        """Keep what was read for steps that are not complete."""
        with self._lock:
            self._report()
            rest, self._unfinished = self._unfinished, deque()
            told = self._take_told(rest)
            self.is_exhausted = told is Mark.END
            if self._batches is None:
                self._unrun.extendleft(reversed(rest))
                if self._iterators is not None and not self._unrun:  # it has no thread to keep
                    self._iterators.forget(self._iterator)
                return
        self._batches.follow(None)
        if self.is_exhausted:
            self._batches.delivered(None)
            self.is_exhausted = self._batches.is_exhausted
        errors = [reading.error for reading in rest if type(reading) is Raised]
        items = [r for r in rest if r is not Mark.END and type(r) is not Raised]
        self._batches.put_back(items, errors[0] if errors else None)

    def _report(self) -> None:
        """Tell a distributed dataset whose steps are complete."""
        complete = self._take_complete()
        if self._batches is not None:
            for item in complete:
                self._batches.delivered(item)

    async def _feed(self) -> None:
        self._has_begun = True
        error: BaseException | None = None
        try:
            try:
                await self._pass_on()
            finally:
                close = getattr(self._iterator, "aclose", None)
                if self._iterators is None and callable(close):
                    await close()
        except asyncio.CancelledError as cancelled:
            if self._infeed.is_aborted:
                raise
            error = unless_asked_for(cancelled, asyncio.current_task())
        except BaseException as raised:  # noqa: BLE001 - raised by run_steps
            error = raised
        self._end(error)

    async def _pass_on(self) -> None:
        infeed = self._infeed
        while not self._is_complete:
            reading = self._unrun.popleft() if self._unrun else await self._read()
            self._unfinished.append(reading)
            self._report()
            if type(reading) is Raised:
                raise reading.error
            if reading is Mark.END:
                return
            if not infeed.has_room:
                await self._room()
            if infeed.is_aborted:
                return
            self._put(reading if self._batches is None else reading.value)

    async def _read(self) -> Reading:
        try:
            if self._batches is None:
                if isinstance(self._iterator, Iterator):
                    return next(self._iterator, Mark.END)
                return await anext(self._iterator, Mark.END)
            item = await self._batches.read()
            return Mark.END if item is None else item
        except BaseException as error:
            if self._infeed.is_aborted and isinstance(error, asyncio.CancelledError):
                raise
            return Raised(unless_asked_for(error, asyncio.current_task()))

    def _fill(self) -> None:
        """Read as much as there is room for; on the thread that has made it, or on the loop."""
        error: BaseException | None = None
        try:
            if self._is_filled():
                return
        except BaseException as raised:  # noqa: BLE001 - raised by run_steps
            error = raised
        self._end(error)

    def _is_filled(self) -> bool:
        """Put elements while there is room; tell whether more are wanted when there is some."""
        infeed = self._infeed
        while not self._is_complete:
            if not infeed.has_room and infeed.wait_for_room(self._fill):
                return True  # from here on another thread may read
            with self._lock:
                if infeed.is_aborted:
                    break
                readings = self._read_many(min(infeed.room, self._num_wanted - infeed.num_put))
                self._unfinished.extend(readings)
                self._report()
            last = readings[-1]
            if last is Mark.END or type(last) is Raised:
                readings.pop()
            alike = self._shapes.split_alike(readings) if len(readings) > 1 else []
            if alike:
                infeed.put(*alike)
            else:
                for reading in readings:
                    self._put(reading)
            if type(last) is Raised:
                raise last.error
            if last is Mark.END:
                break
        return False

    def _read_many(self, count: int) -> list[Reading]:
        """Return the next elements of an iterator in memory, and an end or an error behind them."""
        assert isinstance(self._iterator, Iterator)
        unrun: deque[Reading] = self._unrun
        found: list[Reading] = []
        while unrun and len(found) < count:
            found.append(unrun.popleft())
            if found[-1] is Mark.END or type(found[-1]) is Raised:
                return found
        try:
            for element in islice(self._iterator, count - len(found)):
                found.append(element)  # noqa: PERF402 - those before an error are kept
        except BaseException as error:  # noqa: BLE001 - raised behind the elements before it
            return [*found, Raised(error)]
        return found if len(found) == count else [*found, Mark.END]

    async def _room(self) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(_resolve, waiter)
            except RuntimeError:  # the loop is closed: nothing waits there any more
                return

        if self._infeed.wait_for_room(wake):
            await waiter


def new_feeder(
    iterator: Iterator[object] | AsyncIterator[object],
    iterators: KeptIterators | None,
    infeed: Infeed,
    steps: Sequence[LoopStep],
    num_wanted: int,
) -> Feeder:
    """Return what feeds a loop; the arguments are those of the two kinds."""
    if isinstance(iterator, Iterator) and type(iterator) not in IN_MEMORY:
        return ThreadFeeder(iterator, iterators, infeed, steps, num_wanted)
    return TaskFeeder(iterator, iterators, infeed, steps, num_wanted)


def _parts(element: tuple[object, ...], num_replicas: int) -> Sequence[tuple[object, ...]]:
    values = []
    for leaf in element:
        if type(leaf) is not PerReplica or len(leaf.values) != num_replicas:
            return split_per_replica(element, num_replicas, "an element of the iterator")
        values.append(leaf.values)
    return list(zip(*values, strict=True)) or [()] * num_replicas


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
