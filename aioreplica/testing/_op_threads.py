"""Threads for ops that wait: exactly one thread of a run goes on at any time, handed over.

An op runs on the thread of the loop as long as no op of its program has ever waited for anything:
that costs nothing. Once one has, the ops of that program get threads, which pass a baton: whoever
lets an op go on stands still until the op waits, or ends. So nothing is left to the system's
scheduler, and a schedule runs alike whether its ops have threads or not.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from _thread import allocate_lock
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, final

from ._forbidden import refusal

if TYPE_CHECKING:
    from ._sandbox import Sandbox

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
        * Whoever calls `resume` and the thread itself never run at the same time.

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
        except BaseException:  # an interrupt: the op must not go on beside whoever handles it
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
        """Wait for a thread that takes long; give it up if it stands still."""
        last: Any = None
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
                    "What blocks it was not made inside the program, or is no lock of "
                    "`threading`: make it there, and write threading.Lock(), not a name imported "
                    "before.",
                    frame,
                )

    # ---- on the thread itself ----------------------------------------------------------------

    def hand_back(self) -> None:
        """Let whoever resumed the op go on, and stand still until it is resumed.

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
        """Whether the op is being ended."""
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
    """The threads of one sandbox, made when they are first needed.

    Args:
        sandbox: Whose they are.

    Attributes:
        idents: What the threads are known by.
        is_needed: Whether an op of the program has had to wait.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._idle: list[OpThread] = []
        self._num_made = 0
        self.idents: set[int] = set()
        self.is_needed = False

    def take(self) -> OpThread:
        """Return the first idle thread, making one if there is none."""
        if self._idle:
            return self._idle.pop(0)
        with self._sandbox.outside():
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
