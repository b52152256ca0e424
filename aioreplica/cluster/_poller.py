"""The poller: one lane goes on with the calls of all communicators of an engine in a process.

Each communicator has a queue, of which the head makes progress only; the heads of different ones do
so side by side, so a call that waits for a worker keeps no other communicator from its own. The
lane polls all of them in turn: without a pause while one of them may be about to end, then with one
pause for all, which grows to a millisecond, so a late peer costs little. New calls end the pause,
and engines do that say when something has come.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import Context
from threading import Lock
from time import monotonic
from typing import Any, Protocol, final

from ..devices import CompletionQueue, Lane, Op

SPIN_S = 150e-6  # without pauses, plus what the bytes take
SPIN_BYTES_PER_S = 1e9
FIRST_PAUSE_S, MAX_PAUSE_S = 20e-6, 1e-3
IDLE_S = 1.0  # with nothing to do, before the lane's op ends: to start one takes longer
RUNG_PAUSE_S = 0.02  # of an engine that rings, between two looks at notes and clock


class Entry(Protocol):
    """Something in the queue of a communicator, such as a call."""

    @property
    def completions(self) -> CompletionQueue:
        """Queue that brings its result to the event loop."""

    @property
    def spin_until(self) -> float:
        """Time until which it is polled without a pause."""

    def advance(self, looks: bool, /) -> bool:
        """Go on as far as that is possible; true if it is over. Raises nothing.

        Args:
            looks: Whether it is time to look at notes and the clock, if it waits.
        """

    def resolve(self) -> None:
        """Bring its result; on the event loop."""


@final
class Poller:
    """Performs the calls of all communicators of an engine, as far as each of them can go.

    Args:
        lane: Its thread, for nothing else but the start and the end of the engine.
        lock: Held during calls of the engine where the event loop's thread may make some, too.
        is_rung: Whether the engine rings when an exchange may be over.

    Attributes:
        lane: The same.
        lock: The same; None where only the lane makes calls.

    Invariants:
        * A queue is in `_queues` if and only if it has entries; both change under `_guard`.
        * `_is_running` is true from before an op of the lane is put until it has seen, under
          `_guard`, that there is nothing to do.
    """

    def __init__(self, lane: Lane, lock: Lock | None = None, *, is_rung: bool = False) -> None:
        self.lane = lane
        self.lock = lock
        self._turns = lock or nullcontext()
        self._is_rung = is_rung
        self._pauses = (RUNG_PAUSE_S, RUNG_PAUSE_S) if is_rung else (FIRST_PAUSE_S, MAX_PAUSE_S)
        self._bell = Lock()  # held by the lane, until something rings
        self._bell.acquire()
        self._idle_s = IDLE_S
        self._guard = Lock()
        self._queues: list[deque[Entry]] = []
        self._jobs: deque[Op[Any]] = deque()
        self._afterwards: list[Callable[[], object]] = []
        self._is_running = False

    def spin_s(self, num_bytes: int) -> float:
        """Return how long to poll for so many bytes without a pause, in seconds."""
        return 0.0 if self._is_rung else SPIN_S + num_bytes / SPIN_BYTES_PER_S

    @property
    def is_alone(self) -> bool:
        """True if one head has the lane for itself, so that it need not return to let others go on.

        Engines make progress in polls, with some large arrays in hundreds of them.
        """
        return len(self._queues) == 1 and not self._jobs

    @property
    def has_jobs(self) -> bool:
        """True if a call of the engine for no queue waits or is being made."""
        return bool(self._jobs)

    def ring(self) -> None:
        """End the pause, as something has come; from any thread."""
        try:
            self._bell.release()
        except RuntimeError:
            """It has rung: the lane has not begun to wait, or is about to go on."""

    def rest(self) -> None:
        """Let the lane go on to what else it was given, as soon as the queues are empty."""
        self._idle_s = 0.0
        self.ring()

    # ---- on the event loop ---------------------------------------------------------------

    def add(self, queue: deque[Entry], entry: Entry) -> None:
        """Queue an entry behind the others of its communicator."""
        with self._guard:
            was_running = self._start(entry.completions)
            queue.append(entry)
            if len(queue) == 1:
                self._queues.append(queue)
        if was_running:
            self.ring()

    def put(self, op: Op[Any]) -> None:
        """Make a call of the engine at the next opportunity, whatever waits."""
        with self._guard:
            was_running = self._start(op.completions)
            self._jobs.append(op)
        if was_running:
            self.ring()

    def _start(self, completions: CompletionQueue) -> bool:
        """Start the lane's op unless it runs; tell whether it did. First: it may be refused."""
        if self._is_running:
            return True
        # In no context of a caller: it may go on for long, and entries have their own.
        self.lane.put(Context().run(Op, completions, self._run, (), {}))
        self._is_running = True
        return False

    # ---- on the lane's thread ------------------------------------------------------------

    def call_afterwards(self, fn: Callable[[], object]) -> None:
        """Call a function when those who wait for what is over have been woken."""
        self._afterwards.append(fn)

    def _run(self) -> None:
        """Go on with all queues until they are empty, and have been for a moment."""
        with self._guard:
            """Who has started this has queued what it is for: else it would wait in vain."""
        (first_s, most_s), looks_at = self._pauses, 0.0
        pause_s, has_paused = first_s, False
        while True:
            if not (self._queues or self._jobs):
                if not self._bell.acquire(timeout=self._idle_s) and self._stops():
                    return
                continue
            now = monotonic()
            if looks := has_paused or now >= looks_at:
                looks_at = now + most_s
            has_paused = False
            ended, spin_until = self._pass(looks)
            if ended:
                for completions in ended:
                    completions.wake()
                pause_s = first_s
            elif spin_until > monotonic():
                os.sched_yield()  # workers may be more than cores
            else:
                has_paused = not self._bell.acquire(timeout=pause_s)
                pause_s = min(pause_s * 1.25, most_s)

    def _stops(self) -> bool:
        """Tell whether there is nothing to do; then the next call starts another op."""
        with self._guard:
            self._is_running = bool(self._queues or self._jobs)
            return not self._is_running

    def _pass(self, looks: bool) -> tuple[list[CompletionQueue], float]:
        """Make the calls that wait, and let each head go on.

        Returns:
            Whom to wake, and until when to go on without a pause.
        """
        ended: list[CompletionQueue] = []
        spin_until = 0.0
        with self._turns:
            while self._jobs:
                self._make(self._jobs[0])
                ended.append(self._jobs.popleft().completions)
            for queue in tuple(self._queues):
                entry = queue[0]
                if not entry.advance(looks):
                    spin_until = max(spin_until, entry.spin_until)
                    continue
                del entry
                ended.append(self._let_go(queue))
            while self._afterwards:
                for completions in ended:  # before that: it may take its time
                    completions.wake()
                self._afterwards.pop(0)()
        return ended, spin_until

    def _make(self, op: Op[Any]) -> None:
        if op.claim():
            op.run_claimed()
        op.completions.add(op)

    def _let_go(self, queue: deque[Entry]) -> CompletionQueue:
        """Bring the result of a head that is over; holds nothing of it any more then.

        Before who waits for it is woken: the memory of its arrays may be used again.
        """
        completions = queue[0].completions
        completions.add(queue[0])
        with self._guard:
            queue.popleft()
            if not queue:
                self._queues = [each for each in self._queues if each is not queue]
        return completions
