"""A gate: where one device thread waits until another thread opens it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Lock
from typing import final

LOOK_S = 1.0
"""How often a waiting thread checks whether its event loop was closed."""


@final
class Gate:
    """A closed lock that lets one waiting thread pass for each time it is opened.

    Args:
        loop: The event loop of the run that the thread works for. Once it is closed the gate will
            not be opened any more, so the wait ends. None waits without that check.

    Attributes:
        open: Opens the gate, from any thread, for the thread that waits or for the next one that
            does. Must not be called under a lock that the woken thread may need.

    Invariants:
        * At most one thread waits.
        * A gate that is open is not opened again.

    Example:
        >>> gate = Gate(None)
        >>> gate.open()
        >>> gate.wait(), gate.wait(timeout_s=0.0)
        (True, False)
    """

    __slots__ = ("_lock", "_loop", "open")

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self._loop = loop
        self._lock = Lock()
        self._lock.acquire()
        self.open: Callable[[], None] = self._lock.release  # bound once: threads wait for it

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block the calling thread until the gate is open; False if that took too long.

        Cancellation:
            A CancelledError once the event loop is closed.
        """
        part_s = LOOK_S if timeout_s is None else min(timeout_s, LOOK_S)
        while not self._lock.acquire(True, part_s):
            if self._loop is not None and self._loop.is_closed():
                raise asyncio.CancelledError("The event loop was closed.")
            if timeout_s is not None:
                timeout_s -= part_s
                if timeout_s <= 0:
                    return False
                part_s = min(timeout_s, LOOK_S)
        return True

    def __repr__(self) -> str:
        return f"<Gate {'closed' if self._lock.locked() else 'open'}>"
