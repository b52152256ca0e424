"""Errors that a schedule can show: deadlock, starvation, nondeterminism, leaks, real I/O.

As all errors of the library these carry strings and numbers only, and survive pickling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from ..errors import AioReplicaError


@final
@dataclass(frozen=True, slots=True)
class Wait:
    """One edge of the wait-for graph.

    Attributes:
        who: The task that waits, such as "task 'reader'" or "replica 2".
        awaits: What it awaits, such as "asyncio.Lock made at app.py:12".
        site: `file:line` of the await.
        owner: Who holds that or has to bring it about, where this is known; else "".
        missing: Who has yet to arrive, at a barrier or in a collective.
    """

    who: str
    awaits: str
    site: str
    owner: str = ""
    missing: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return one line."""
        text = f"{self.who} awaits {self.awaits} at {self.site}"
        if self.owner:
            text += f", held by {self.owner}"
        if self.missing:
            text += f", where {', '.join(self.missing)} {_have(self.missing)} not arrived"
        return text


def _have(names: tuple[str, ...]) -> str:
    return "has" if len(names) == 1 else "have"


@final
class DeadlockError(AioReplicaError, RuntimeError):
    """Raised if nothing can happen any more and the program has not ended.

    Attributes:
        waits: The wait-for graph, one edge for each task that waits.
        cycle: The tasks that wait for each other, in order; empty if there is no cycle.
        exceptions: Exceptions that tasks and callbacks raised and that were never retrieved.
    """

    def __init__(
        self,
        message: str,
        *,
        waits: tuple[Wait, ...] = (),
        cycle: tuple[str, ...] = (),
        exceptions: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.waits = waits
        self.cycle = cycle
        self.exceptions = exceptions


@final
class StarvationError(AioReplicaError, RuntimeError):
    """Raised if a program does not end within its steps: it spins, or a task never gets its turn.

    Attributes:
        steps: Steps that were taken.
        running: The tasks that took the last steps, busiest first.
        waits: What the other tasks wait for.
        cycle: The tasks that wait for each other, if some do.
        exceptions: Exceptions that tasks and callbacks raised and that were never retrieved.
    """

    def __init__(
        self,
        message: str,
        *,
        steps: int = 0,
        running: tuple[str, ...] = (),
        waits: tuple[Wait, ...] = (),
        cycle: tuple[str, ...] = (),
        exceptions: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.steps = steps
        self.running = running
        self.waits = waits
        self.cycle = cycle
        self.exceptions = exceptions


@final
class NondeterminismError(AioReplicaError, RuntimeError):
    """Raised if the same schedule runs otherwise a second time, so nothing can be replayed.

    Attributes:
        step: The first step that differs, from 1; 0 if only the end differs.
        first: What happened there the first time.
        second: What happened there the second time.
    """

    def __init__(self, message: str, *, step: int = 0, first: str = "", second: str = "") -> None:
        super().__init__(message)
        self.step = step
        self.first = first
        self.second = second


@final
class LeakError(AioReplicaError, RuntimeError):
    """Raised if the program returned and left something behind.

    Attributes:
        tasks: Tasks that had not ended, with what they awaited.
        generators: Asynchronous generators that were begun and not closed.
        exceptions: Exceptions that were never retrieved.
        threads: Calls in pools and on devices that waited for ever.
        connections: Connections and servers that were not closed, and where they were made.
    """

    def __init__(
        self,
        message: str,
        *,
        tasks: tuple[str, ...] = (),
        generators: tuple[str, ...] = (),
        exceptions: tuple[str, ...] = (),
        threads: tuple[str, ...] = (),
        connections: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.tasks = tasks
        self.generators = generators
        self.exceptions = exceptions
        self.threads = threads
        self.connections = connections


@final
class RealIOError(AioReplicaError, RuntimeError):
    """Raised if a program under test starts a thread or process, or opens a socket.

    Attributes:
        site: `file:line` of the call.
    """

    def __init__(self, message: str, *, site: str = "") -> None:
        super().__init__(message)
        self.site = site


@final
class StuckStepError(SystemExit):
    """Raised by the watchdog inside a step; like every `SystemExit` it leaves the loop at once."""
