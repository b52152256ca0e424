"""The closures of a coordinator: which may run, which are over, and what an error does.

Plain synchronous code: events in, closures to act on out.

Invariants:
    * A closure is queued, running or over; `oldest` is the least that is not over.
    * In synchronous mode closures of one step run at a time, and a step ends with its commit.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal, final

from ...cluster import Submission
from ._pickles import Packed


@final
@dataclass(slots=True, eq=False)
class ScheduledClosure:
    """A closure as the coordinator knows it.

    Attributes:
        number: Its number in the strategy.
        fn_name: Name of its function.
        is_async: Whether that is an async function.
        call: The function with its arguments, packed.
        recipes: Of the optimizers that it uses.
        timeout_s: How long it may take.
        settled: Done when it is over; its result is None, or it raises why there is none.
        group: Its step, in synchronous mode.
        state: "queued", "running", "waiting" for the commit of its step, or "over".
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
    group: int = 0
    state: Literal["queued", "running", "waiting", "over"] = "queued"
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
@dataclass(frozen=True, slots=True)
class Commit:
    """A step of the synchronous mode is complete.

    Attributes:
        step: Which one.
        closures: Those whose pushes count, ascending.
        num_replicas: How many there should be.
    """

    step: int
    closures: tuple[int, ...]
    num_replicas: int


@final
@dataclass(slots=True)
class _Step:
    members: list[ScheduledClosure] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    is_committing: bool = False


@final
class ClosureQueue:
    """Decides what runs next, and what is left after an error.

    Args:
        size: How many closures may wait.
        num_replicas: How many closures make a step; 0 in asynchronous mode.
        num_needed: How many of them have to finish.
        first_step: Number of the first step.
    """

    def __init__(
        self, size: int, num_replicas: int = 0, num_needed: int = 0, first_step: int = 0
    ) -> None:
        self._size = size
        self._num_replicas = num_replicas
        self._num_needed = num_needed
        self._queued: deque[ScheduledClosure] = deque()
        self._unfinished: dict[int, ScheduledClosure] = {}
        self._num_running = 0
        self._steps: dict[int, _Step] = {}
        self._step = first_step  # the one that runs
        self._last_step = first_step  # the one that is filled
        self._flush_to = first_step - 1
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
        """Number of closures that run, or wait for the commit of their step."""
        return len(self._unfinished) - len(self._queued)

    @property
    def is_idle(self) -> bool:
        """True if every closure is over."""
        return not self._unfinished

    @property
    def oldest(self) -> int:
        """The least closure that is not over, or the number after the last one."""
        return next(iter(self._unfinished), self._next)

    @property
    def step(self) -> int:
        """The step that runs, in synchronous mode."""
        return self._step

    @property
    def next_step(self) -> int:
        """The step after all that were begun, in synchronous mode."""
        return max(self._step, self._last_step, self._flush_to) + 1

    def add(self, closure: ScheduledClosure) -> None:
        """Queue a closure."""
        self._next = closure.number + 1
        self._unfinished[closure.number] = closure
        self._queued.append(closure)
        if self._num_replicas:
            if self._last_step <= self._flush_to:
                self._last_step = self._flush_to + 1
            closure.group = self._last_step
            step = self._steps.setdefault(closure.group, _Step())
            step.members.append(closure)
            if len(step.members) == self._num_replicas:
                self._last_step += 1

    def flush(self) -> None:
        """Let a step that is not full run with what it has."""
        if self._num_replicas and self._last_step in self._steps:
            self._flush_to = self._last_step

    def take(self, capacity: int) -> list[ScheduledClosure]:
        """Return closures that are to be run now, with no more than `capacity` running."""
        taken = []
        while self._queued and self._num_running < capacity:
            if self._num_replicas and self._queued[0].group != self._step:
                break
            closure = self._queued.popleft()
            closure.state = "running"
            self._num_running += 1
            taken.append(closure)
        return taken

    def finished(self, closure: ScheduledClosure) -> Commit | None:
        """Learn that a closure has ended well; return the step that is complete with it."""
        if closure.state != "running":
            return None
        self._num_running -= 1
        step = self._steps.get(closure.group)
        if not self._num_replicas or step is None or step.is_committing:
            self._over(closure)  # or too late for its step
            return None
        closure.state = "waiting"
        step.finished.append(closure.number)
        return self.complete_step()

    def complete_step(self) -> Commit | None:
        """Return the step that runs if enough of its closures have finished."""
        step = self._steps.get(self._step)
        if step is None or step.is_committing:
            return None
        size = len(step.members)
        if size < self._num_replicas and self._step > self._flush_to:
            return None
        if len(step.finished) < min(self._num_needed, size):
            return None
        step.is_committing = True
        return Commit(self._step, tuple(sorted(step.finished)), self._num_replicas)

    def committed(self, commit: Commit) -> list[ScheduledClosure]:
        """Learn that a step was applied; return its closures that are over."""
        step = self._steps.pop(commit.step, _Step())
        over = [closure for closure in step.members if closure.state == "waiting"]
        for closure in over:
            self._over(closure)
        self._step = max(self._step, commit.step + 1)
        return over

    def failed(self, error: BaseException) -> list[ScheduledClosure]:
        """Learn of an error: everything that is not over is cancelled; return it."""
        if self._error is None:
            self._error = error
        cancelled = list(self._unfinished.values())
        self._queued.clear()
        for closure in cancelled:
            self._over(closure)
        self._num_running = 0
        self._steps.clear()
        self._step = self._last_step = max(self._last_step, self._flush_to) + 1
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
