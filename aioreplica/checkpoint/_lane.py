"""The threads that read and write files: a lane of their own, so nothing queues behind them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic, thread_time
from typing import TypeVar, final

from ..context import REGISTRY
from ..devices import CompletionQueue, lane_table, num_cores, run_on_lane, wait_until_done

T = TypeVar("T")

LANE = "checkpoint"
BEHIND = "checkpoint-behind"
"""Lanes of saves that training goes on beside: their threads leave the cores to the devices.

They write local folders only: threads that another storage starts would stay as nice for good.
"""
NICER = 10
NUM_THREADS = 4
SHARE = 1 / 6
"""Of the processor time of all cores, what a save on BEHIND takes until somebody waits for it."""
PAUSE_S = 0.02
"""Pauses are at least so long: most steps of a few ms then have all cores from end to end."""


@final
class StoppedError(Exception):
    """Raised on a thread whose work is not wanted any more."""


@final
class Stop:
    """Tells threads that their work is not wanted any more: it is set, or the loop was closed."""

    def __init__(self) -> None:
        self.is_set = False
        self._loop = asyncio.get_running_loop()

    def check(self) -> None:
        """Raise StoppedError if it is so."""
        if self.is_set or self._loop.is_closed():
            raise StoppedError


@final
class Pace:
    """Bounds the processor time that the threads of one save take, until somebody waits for it.

    Niceness does not do it: a nicer thread that has a core to itself keeps it, and the threads of
    devices share the others. Python counts as all else: it holds up every other thread. The save
    begins with a pause, so steps that its cut has held go first. Time in which a thread waits, for
    the disk for one, is a pause as well.

    Attributes:
        lane: Name of a lane of its own: the pauses of one save hold up no other one.
    """

    def __init__(self) -> None:
        self.lane = f"{BEHIND}-{next(REGISTRY.once('paces', itertools.count))}"
        self._loop: asyncio.AbstractEventLoop | None = None  # while it has the lane
        self._is_hurried = threading.Event()
        self._lock = threading.Lock()
        self._paid_s = monotonic() + 2 * PAUSE_S  # when nothing is owed to the others
        self._counted = threading.local()  # the two clocks when the thread last went on

    def take_lane(self) -> None:
        """Have the lane until it is given back; those of saves whose loops were closed are now."""
        for pace in list(_with_lanes()):
            if (loop := pace._loop) is not None and loop.is_closed():
                pace.give_lane_back()
        self._loop = asyncio.get_running_loop()
        _with_lanes().add(self)
        lane_table().acquire((self.lane,))

    def give_lane_back(self) -> None:
        """Let its threads end after what they have begun; idempotent, from any thread."""
        self.hurry()
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            _with_lanes().discard(self)
            lane_table().release((self.lane,))

    def hurry(self) -> None:
        """End all pauses, at once; from any thread."""
        self._is_hurried.set()

    def pause(self) -> None:
        """Wait for as long as is owed for what all threads have done since it began; blocks."""
        if self._is_hurried.is_set():
            return
        began_s, used_s = getattr(self._counted, "clocks", None) or (0.0, thread_time())
        with self._lock:
            owed_s = (thread_time() - used_s) / (num_cores() * SHARE)
            self._paid_s = max(self._paid_s, began_s) + owed_s
            pause_s = self._paid_s - monotonic()
        if pause_s >= PAUSE_S:
            self._is_hurried.wait(pause_s)
        self._counted.clocks = monotonic(), thread_time()

    def paced(self, items: Iterable[T], each: int = 1) -> Iterator[T]:
        """Yield items, with a pause before every `each` of them if one is owed; blocks."""
        for number, item in enumerate(items):
            if number % each == 0:
                self.pause()
            yield item


async def run_all(
    fns: Sequence[Callable[[], T]], stop: Stop, *, name: str = LANE, shielded: bool = False
) -> list[T]:
    """Call blocking functions on threads at the same time; return what they return.

    Args:
        fns: The functions.
        stop: Is set when one of them fails, or the caller is cancelled.
        name: The lane: LANE, or that of a pace, which gives it back.
        shielded: Whether cancellations have to wait: for cleaning up.

    Raises:
        Exception: What the first one raises that was not just stopped.

    Cancellation:
        Sets `stop`, waits until all have ended, then goes on; at Ctrl-C too.
    """
    table = lane_table()
    counted = (name,) if name == LANE else ()
    table.acquire(counted)
    try:
        nicer = 0 if name == LANE else NICER
        lane = table.lane(name, num_streams=NUM_THREADS, nicer=nicer)
        completions = CompletionQueue.of_running_loop()
        ops = [run_on_lane(lane, completions, _guarded, (fn, stop), {}) for fn in fns]
        waiter = asyncio.gather(*ops, return_exceptions=True)
        cancelled: list[asyncio.CancelledError] = []

        def on_cancel(error: asyncio.CancelledError) -> None:
            cancelled.append(error)
            if not shielded:
                stop.is_set = True

        await wait_until_done(waiter, on_cancel, through_interrupt=True)
        if cancelled and not shielded:
            raise cancelled[0]
        results = waiter.result()
    finally:
        table.release(counted)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda each: isinstance(each, StoppedError)):
        raise error
    if cancelled:
        raise cancelled[0]
    return results  # type: ignore[return-value]  # none is an exception


def _guarded(fn: Callable[[], T], stop: Stop) -> T:
    stop.check()
    try:
        return fn()
    except BaseException:
        stop.is_set = True
        raise


def _with_lanes() -> set[Pace]:
    """Paces that have their lanes; nothing else ends those of a loop that was closed too early."""
    return REGISTRY.once("paces_with_lanes", set[Pace])
