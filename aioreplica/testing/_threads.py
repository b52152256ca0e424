"""Threads for ops that wait: exactly one thread of a run goes on at any time, handed over.

An op runs on the thread of the loop as long as no op of its program has ever waited for anything:
that costs nothing. Once one has, the ops of that program get threads, which pass a baton: what
lets an op go on waits until the op waits, or ends. So nothing is left to the system's scheduler,
and a schedule runs alike whether its ops have threads or not.
"""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from _thread import allocate_lock
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Final, Protocol, final

from ._forbidden import refusal

if TYPE_CHECKING:
    from ._loop import SimLoop
    from ._participants import Participant
    from ._pools import PoolOp


LOOK_S: Final = 1.0
STUCK_LOOKS: Final = 20
"""Seconds of real time that a thread may stand at one instruction before it counts as blocked."""
MAX_UNWINDINGS: Final = 1000
"""How often an op may catch the error that is to end it; then its thread is given up."""
JOIN_S: Final = 5.0


@final
class NeedsThreads(BaseException):
    """Ends a run in which an op had to wait: the schedule begins again, its ops on threads."""


@final
class OpThread:
    """A thread that runs one op after the other.

    Invariants:
        * The caller of `resume` and the thread itself never run at the same time.

    Attributes:
        ident: The thread's.
        is_lost: Whether it cannot be used again: it is blocked for real, or refuses to end.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._go, self._back = allocate_lock(), allocate_lock()
        self._go.acquire()
        self._back.acquire()
        self._call: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._is_done = False
        self._num_unwound = 0
        self._is_doomed = False
        self.is_lost = False
        self._thread = threading.Thread(
            target=self._serve, name=f"aioreplica simulated {number}", daemon=True
        )
        self._thread.start()
        self.ident = self._thread.ident or 0

    # ---- on the thread that lets the op go on ------------------------------------------------

    def begin(self, call: Callable[[], None], name: str) -> None:
        """Prepare for an op; `resume` starts it."""
        self._call = call
        self._is_done = self._is_doomed = False
        self._num_unwound = 0
        self._thread.name = name

    def doom(self) -> None:
        """Let every wait of the op raise CancelledError from now on."""
        self._is_doomed = True

    def resume(self) -> bool:
        """Let the op go on until it waits or ends; True if it has ended.

        Raises:
            RealIOError: If the thread is blocked by something real; it is lost then.
            BaseException: What has to leave the loop at once, from the op.
        """
        self._go.release()
        try:
            if not self._back.acquire(True, LOOK_S):
                self._watch()
        except BaseException:  # an interrupt: the op must not go on beside what handles it
            if not self.is_lost:
                self._is_doomed = True
                self._back.acquire()
            raise
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._is_done

    def frame(self) -> FrameType | None:
        """Return the innermost frame of the op while it waits."""
        return sys._current_frames().get(self.ident)

    def stop(self) -> None:
        """End the thread, which runs nothing."""
        self._call = None
        self._go.release()
        self._thread.join(JOIN_S)

    def _watch(self) -> None:
        """Wait for a thread that takes long; give it up if it makes no progress."""
        last: object = None
        num_same = 0
        while not self._back.acquire(True, LOOK_S):
            frame = self.frame()
            here = frame and (id(frame), frame.f_lasti)
            num_same = num_same + 1 if here == last else 0
            last = here
            if num_same >= STUCK_LOOKS:
                self.is_lost = True
                raise refusal(
                    "A device thread that blocked",
                    "What blocks it was not made inside the program, or is not a lock of "
                    "`threading`: make it there, and write threading.Lock(), not a name imported "
                    "before.",
                    frame,
                )

    # ---- on the thread itself ----------------------------------------------------------------

    def hand_back(self) -> None:
        """Let the caller of `resume` go on, and wait to be resumed.

        Cancellation:
            A CancelledError once the op is doomed: its schedule was given up.
        """
        if self._is_doomed:
            self._unwind()
        self._back.release()
        self._go.acquire()
        if self._is_doomed:
            self._unwind()

    def _unwind(self) -> None:
        self._num_unwound += 1
        if self._num_unwound > MAX_UNWINDINGS:
            self.is_lost = self._is_done = True
            self._back.release()
            self._go.acquire()  # for ever
        raise asyncio.CancelledError("The schedule was given up while the op waited.")

    @property
    def is_doomed(self) -> bool:
        """True if the op is being ended."""
        return self._is_doomed

    def _serve(self) -> None:
        while True:
            self._go.acquire()
            call = self._call
            if call is None:
                return
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - raised where the op was resumed
                self._error = error
            self._call = call = None
            self._is_done = True
            self._back.release()


@final
class OpThreads:
    """The threads of one exploration, made when they are first needed.

    Args:
        outside: Leaves the program under test for a moment, so that a real thread can start.

    Attributes:
        idents: What the threads are known by.
        is_needed: Whether an op of the program has had to wait.
    """

    def __init__(self, outside: Callable[[], AbstractContextManager[None]]) -> None:
        self._outside = outside
        self._idle: list[OpThread] = []
        self._num_made = 0
        self.idents: set[int] = set()
        self.is_needed = False

    def take(self) -> OpThread:
        """Return the first idle thread, making one if there is none."""
        if self._idle:
            return self._idle.pop(0)
        with self._outside():
            thread = OpThread(self._num_made)
        self._num_made += 1
        self.idents.add(thread.ident)
        return thread

    def give_back(self, thread: OpThread) -> None:
        """Take back a thread whose op has ended."""
        if thread.is_lost:
            self.idents.discard(thread.ident)
            return
        self._idle.append(thread)
        self._idle.sort(key=lambda each: each.number)

    def close(self) -> None:
        """End all threads, and see them gone."""
        idle, self._idle = self._idle, []
        for thread in idle:
            thread.stop()


class HeldLock(Protocol):
    """Lock that an op waits for.

    Attributes:
        holder: The participant that took it last; known only where a trace is made.
    """

    holder: Participant | None


@final
class OpRun:
    """The run of one op that may wait.

    Args:
        op: The participant.
        thread: Where it runs.

    Attributes:
        waits_for: The lock that it waits for; None if it only gives way, or lets time pass.

    Invariants:
        * The op is an option of the schedule, or waits for a timer or for another op to wake it.
    """

    __slots__ = ("_is_expired", "_timed_out", "_timer", "op", "thread", "waits_for")

    def __init__(self, op: PoolOp, thread: OpThread) -> None:
        self.op = op
        self.thread = thread
        self.waits_for: HeldLock | None = None
        self._timer: _Timer | None = None
        self._is_expired = False
        self._timed_out = False
        thread.begin(self._perform, f"aioreplica {op.pool.name}")

    @property
    def is_timed(self) -> bool:
        """True if its wait ends by itself."""
        return self._timer is not None

    # ---- on whatever thread lets it go on ----------------------------------------------------

    def go_on(self) -> bool:
        """Let the op go on until it waits or ends; True if it has ended."""
        table = self.op.pool.table
        outer, table.current_op = table.current_op, self.op
        try:
            return self.thread.resume()
        finally:
            table.current_op = outer

    def wake(self) -> None:
        """Make the op an option: what it waits for is there."""
        if self.op.is_waiting:
            self.op.offer()

    def rest(self) -> None:
        """Undo `wake`: another op has taken the lock."""
        if self.op.is_awake and not self._timed_out and self.waits_for is not None:
            if self._is_expired:
                self._timed_out = True
            else:
                self.op.retract()

    def expire(self) -> None:
        """End the wait of an op: its timeout has passed."""
        self._is_expired = True
        if self.op.is_waiting:
            self._timed_out = True
            self.op.offer()

    # ---- on the op's thread ------------------------------------------------------------------

    def _perform(self) -> None:
        op, pool = self.op, self.op.pool
        if pool.is_inside:
            op.perform(pool.context.copy())
            return
        pool.is_inside = True
        try:
            op.perform(pool.context)
        finally:
            pool.is_inside = False

    def wait(self, lock: HeldLock | None, timeout_s: float | None) -> bool:
        """Wait until the op is woken; False if that took longer than `timeout_s`."""
        loop = self.op.pool.loop
        self.op.begin_wait()
        self.waits_for = lock
        self._is_expired = self._timed_out = False
        if timeout_s is not None and timeout_s < math.inf:
            self._timer = _Timer(self)
            loop.call_when_due(loop.now + timeout_s, self._timer)
        try:
            self.thread.hand_back()
        finally:
            self.waits_for = None
            if self._timer is not None:
                self._timer.run = None
                self._timer = None
        return not self._timed_out

    def catch_up(self) -> bool:
        """Let the time pass that the op has slept; False if it has not."""
        slept_s = self.op.pool.table.take_slept()
        if slept_s:
            self.wait(None, slept_s)
        return slept_s > 0

    def give_way(self) -> None:
        """Let the schedule decide whether this op goes on or one that it has woken."""
        if not self.thread.is_doomed and not self.catch_up():
            self.op.begin_wait()
            self.op.offer()
            self.thread.hand_back()


@final
class _Timer:
    """Wakes an op that has waited long enough."""

    __slots__ = ("run",)

    def __init__(self, run: OpRun) -> None:
        self.run: OpRun | None = run

    def is_off(self) -> bool:
        """Return True if the op waits no longer."""
        return self.run is None

    def become_due(self, loop: SimLoop) -> None:
        """Wake the op."""
        if self.run is not None:
            self.run.expire()
