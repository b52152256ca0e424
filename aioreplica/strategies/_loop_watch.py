"""A watch over the event loop: a thread that says who holds the loop or the GIL for too long.

The thread wakes up often. If it is late itself, no other thread could run: something held the GIL,
an op on a device thread or code on the loop. If it is in time but the loop does not answer, code on
the loop holds that alone.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Self, final

from ..devices import Gate, Op, OwnLane, new_gate
from ..telemetry import ObservedOp, Observer, Observers, Ring, printable

LOOKS_PER_THRESHOLD = 4
MIN_SHARE = 0.9
"""Which part of a hold an op must have run for, to be suspected of it."""
MIN_CPU_SHARE = 0.5
"""How much of a hold the process must have computed; else the machine may have been busy."""
IDLE_FILES = ("selectors.py", "base_events.py", "runners.py")
"""Where an idle loop stands; the last is all that shows of uvloop."""


@final
@dataclass(frozen=True, slots=True)
class RanOp:
    """An op that ran or still runs.

    Attributes:
        what: Its function, replica and lane, in words.
        begin_s: When it began.
        end_s: When it ended; infinite if it runs.
    """

    what: str
    begin_s: float
    end_s: float


@final
class HoldFinder:
    """Decides who held the loop or the GIL, from what a thread sees each time it wakes up.

    Args:
        threshold_s: How long a hold must be to be told.
    """

    def __init__(self, threshold_s: float) -> None:
        self._threshold_s = threshold_s
        self._held_by: str | None = None
        self._held_since = 0.0

    def gil(
        self,
        slept_s: float,
        woke_s: float,
        late_s: float,
        cpu_s: float,
        ops: Sequence[RanOp],
        on_loop: str,
    ) -> str | None:
        """Judge a wake-up of the thread.

        Args:
            slept_s: When it went to sleep.
            woke_s: When it woke up.
            late_s: How much later that was than it wanted.
            cpu_s: Processor time that the process used meanwhile.
            ops: Those that run, and that have ended of late.
            on_loop: Where the loop's thread is; empty if it is idle.

        Returns:
            What to tell; None if it is not late, or nothing that ran can have been the cause.
        """
        if late_s < self._threshold_s:
            return None
        suspects = [
            op.what
            for op in ops
            if min(op.end_s, woke_s) - max(op.begin_s, slept_s) >= MIN_SHARE * late_s
        ]
        has_computed = cpu_s >= MIN_CPU_SHARE * late_s
        if not suspects and on_loop and has_computed:
            suspects = [on_loop]
        if not suspects:
            return None
        if not has_computed:
            return (
                f"Nothing of the process ran for {late_s:.3g} s, during {' or '.join(suspects)}: "
                "that held the GIL without computing, or the machine was busy."
            )
        return (
            f"The GIL was held for {late_s:.3g} s by {' or '.join(suspects)}: no other thread "
            "could run, the event loop included. Use functions that release the GIL, or work in "
            "smaller pieces."
        )

    def loop(self, asked_s: float, now_s: float, *, is_answered: bool, on_loop: str) -> str | None:
        """Judge whether the loop answers.

        Args:
            asked_s: When it was asked.
            now_s: The time; of the answer if there is one.
            is_answered: Whether it has answered.
            on_loop: Where the loop's thread is now; empty if it is idle.

        Returns:
            What to tell, once the hold is over.
        """
        held_s = now_s - asked_s
        if not is_answered:
            if held_s >= self._threshold_s and on_loop and self._held_by is None:
                self._held_by, self._held_since = on_loop, asked_s
            return None
        held_by, self._held_by = self._held_by, None
        if held_by is None:
            return None
        return (
            f"The event loop was held for {held_s:.3g} s by {held_by}. Await it, or run it with "
            "ctx.run_on_device or ar.run_on_host."
        )


@final
class LoopWatch:
    """Watches the event loop while an `async with` block runs; got from `strategy.watch_loop`.

    Args:
        observers: Those of the strategy.
        threshold_s: How long a hold must be to be told, in seconds.
        logger: Where it is told, as a warning.

    Raises:
        ValueError: If the threshold is not positive.
    """

    def __init__(
        self, observers: Observers, threshold_s: float, logger: logging.Logger | None
    ) -> None:
        if not 0 < threshold_s < float("inf"):
            raise ValueError(f"threshold_s must be a positive number, got {threshold_s!r}.")
        self._observers = observers
        self._threshold_s = threshold_s
        self._logger = logger or logging.getLogger("aioreplica.telemetry")
        self._observer = Observer(op_started=self._op_started, op_ended=self._op_ended)
        self._running: dict[int, RanOp] = {}
        self._ended: Ring[RanOp] = Ring(64)
        self._answered_s: float | None = None
        self._gate: Gate | None = None
        self._lane = OwnLane("loop watch")
        self._work: Op[None] | None = None

    async def __aenter__(self) -> Self:
        if self._work is not None:
            raise RuntimeError("This watch is running. Make another one for another block.")
        loop = asyncio.get_running_loop()
        self._gate = gate = new_gate(loop)
        self._work = self._lane.run(self._watch, loop, gate, threading.get_ident())
        self._work.put()
        self._observers.add(self._observer)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._observers.remove(self._observer)
        assert self._gate is not None  # set on entering
        assert self._work is not None
        self._gate.open()
        try:
            await self._work
        finally:
            self._work = None
            self._lane.close()

    def _op_started(self, op: ObservedOp, lane: str) -> None:
        whose = "" if op.replica_id is None else f" of replica {op.replica_id}"
        what = f"op {printable(op.fn_name)}{whose} on {lane}"
        self._running[threading.get_ident()] = RanOp(what, time.monotonic(), float("inf"))

    def _op_ended(self, _op: ObservedOp, _lane: str) -> None:
        ran = self._running.pop(threading.get_ident(), None)
        if ran is not None:
            self._ended.add(RanOp(ran.what, ran.begin_s, time.monotonic()))

    def _watch(self, loop: asyncio.AbstractEventLoop, gate: Gate, thread_id: int) -> None:
        """Look, in the watch's own thread, until the gate is opened."""
        finder, pause_s = HoldFinder(self._threshold_s), self._threshold_s / LOOKS_PER_THRESHOLD
        asked_s = slept_s = time.monotonic()
        cpu_s = time.process_time()
        self._answered_s = asked_s
        while not gate.wait(pause_s):
            now_s = time.monotonic()
            on_loop = where_is(sys._current_frames().get(thread_id))
            ops = [*list(self._running.values()), *self._ended.copied()]
            late_s, used_s = now_s - slept_s - pause_s, time.process_time() - cpu_s
            self._tell(finder.gil(slept_s, now_s, late_s, used_s, ops, on_loop))
            answered_s = self._answered_s
            if answered_s is None:
                finder.loop(asked_s, now_s, is_answered=False, on_loop=on_loop)
            else:
                self._tell(finder.loop(asked_s, answered_s, is_answered=True, on_loop=""))
                self._answered_s, asked_s = None, time.monotonic()
                loop.call_soon_threadsafe(self._answer)
            slept_s, cpu_s = time.monotonic(), time.process_time()

    def _answer(self) -> None:
        self._answered_s = time.monotonic()

    def _tell(self, text: str | None) -> None:
        if text is not None:
            self._logger.warning("%s", text)


def where_is(frame: FrameType | None) -> str:
    """Say which function a thread runs, and where; empty if it runs none, or an idle loop."""
    if frame is None or frame.f_code.co_filename.endswith(IDLE_FILES):
        return ""
    code = frame.f_code
    return printable(f"{code.co_qualname} at {code.co_filename}:{frame.f_lineno}")
