"""`threading.Lock` inside a simulated run: one that would block for ever says so.

Everything runs in one thread, so a lock that is held stays held until whoever holds it goes on; and
that one cannot go on while the thread blocks.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from ._forbidden import refuse

if TYPE_CHECKING:
    from ._sandbox import Sandbox

REAL_LOCK: Final[Any] = threading.Lock


def lock_class(sandbox: Sandbox) -> type:
    """Return what stands for `threading.Lock` while schedules run."""

    class Lock:
        """A lock that a run has made; elsewhere a real one is made in its place."""

        def __new__(cls) -> Any:
            return super().__new__(cls) if sandbox.is_here() else REAL_LOCK()

        def __init__(self) -> None:
            self._lock = REAL_LOCK()

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            """Take the lock; a wait with a timeout passes in virtual time, in vain."""
            if not sandbox.is_here():
                return bool(self._lock.acquire(blocking, timeout))
            taken = self._lock.acquire(blocking=False)
            if not taken and blocking:
                if timeout < 0:
                    refuse(
                        "A thread blocked on a lock",
                        "Whoever holds the lock cannot go on meanwhile: use asyncio.Lock where a "
                        "lock is held across an await.",
                    )
                time.sleep(timeout)
            return bool(taken)

        def release(self) -> None:
            """Give the lock back."""
            self._lock.release()

        def locked(self) -> bool:
            """Whether somebody holds the lock."""
            return bool(self._lock.locked())

        def __enter__(self) -> bool:
            return self.acquire()

        def __exit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            traceback: TracebackType | None,
        ) -> None:
            self.release()

        def _at_fork_reinit(self) -> None:
            self._lock._at_fork_reinit()

    return Lock
