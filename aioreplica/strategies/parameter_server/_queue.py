"""The closures of a coordinator: which may run, which are over, and what an error does.

Plain synchronous code: events in, closures to act on out.

Invariants:
    * A closure is queued, running or over; `oldest` is the least that is not over.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal, final

from ...cluster import Submission
from ._packing import Packed


@final
@dataclass(slots=True, eq=False)
class ScheduledClosure:
    """A closure as the coordinator knows it.

    Attributes:
        number: Its number in the strategy.
        fn_name: Name of its function.
        is_async: Whether that is an async function.
        call: The function with its arguments, packed; empty once it is over.
        recipes: Of the optimizers that it uses.
        timeout_s: How long it may take.
        settled: Done when it is over; its result is None, or it raises why there is none.
        state: "queued", "running" or "over".
        submission: Where its result is, once it runs.
        abort: Called with an error ends it; given by the coordinator.
    """

    number: int
    fn_name: str
    is_async: bool
    call: Packed
    recipes: dict[int, bytes]
    timeout_s: float | None
    settled: asyncio.Future[None]
    state: Literal["queued", "running", "over"] = "queued"
    submission: Submission | None = None
    abort: Any = None  # Any: Lifecycle calls it

    @property
    def step(self) -> int:
        """Its number, for who lists what is under way."""
        return self.number

    @property
    def is_over(self) -> bool:
        """True if the closure has succeeded, failed or was cancelled."""
        return self.state == "over"


@final
class ClosureQueue:
    """Decides what runs next, and what is left after an error.

    Args:
        size: How many closures may wait.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._queued: deque[ScheduledClosure] = deque()
        self._unfinished: dict[int, ScheduledClosure] = {}
        self._next = 0
        self._error: BaseException | None = None

    @property
    def has_room(self) -> bool:
        """True if another closure may be queued."""
        return len(self._queued) < self._size

    @property
    def depth(self) -> int:
        """Number of queued closures."""
        return len(self._queued)

    @property
    def num_running(self) -> int:
        """Number of closures that run."""
        return len(self._unfinished) - len(self._queued)

    @property
    def is_idle(self) -> bool:
        """True if every closure is over."""
        return not self._unfinished

    @property
    def oldest(self) -> int:
        """The least closure that is not over, or the number after the last one."""
        return next(iter(self._unfinished), self._next)

    def add(self, closure: ScheduledClosure) -> None:
        """Queue a closure."""
        self._next = closure.number + 1
        self._unfinished[closure.number] = closure
        self._queued.append(closure)

    def take(self, capacity: int) -> list[ScheduledClosure]:
        """Return closures that are to be run now, with no more than `capacity` running."""
        taken = []
        while self._queued and self.num_running < capacity:
            closure = self._queued.popleft()
            closure.state = "running"
            taken.append(closure)
        return taken

    def finished(self, closure: ScheduledClosure) -> None:
        """Learn that a closure has ended well."""
        if closure.state == "running":
            self._over(closure)

    def failed(self, error: BaseException) -> list[ScheduledClosure]:
        """Learn of an error: everything that is not over is cancelled; return it."""
        if self._error is None:
            self._error = error
        cancelled = list(self._unfinished.values())
        self._queued.clear()
        for closure in cancelled:
            self._over(closure)
        return cancelled

    @property
    def has_error(self) -> bool:
        """True if an error was not raised yet."""
        return self._error is not None

    def take_error(self) -> BaseException | None:
        """Return the first error since the last call, None if there is none."""
        error, self._error = self._error, None
        return error

    def _over(self, closure: ScheduledClosure) -> None:
        closure.state = "over"
        self._unfinished.pop(closure.number, None)

    def __repr__(self) -> str:
        return f"<ClosureQueue | {len(self._queued)} queued, {self.num_running} running>"
