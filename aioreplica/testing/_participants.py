"""Participants of a schedule: tasks, the queue of callbacks, timers, free callbacks, the clock.

A set of tasks is walked in the order of their hashes, and an ordinary task hashes by its address,
which no two runs share. `SimTask` hashes by its number, so whatever walks a set of tasks (anyio's
scopes, `asyncio.TaskGroup`) does so alike in every run.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from types import CodeType
from typing import TYPE_CHECKING, Any, Protocol, final

if TYPE_CHECKING:
    from ._loop import SimLoop


CALLBACKS = 0
"""Number of the queue of plain callbacks."""
CLOCK = 1
"""Number of the clock, which may move on while an op is in flight."""
FIRST_INDEX = 2
START_S = 1000.0
"""Where virtual time begins: not at 0, with which programs initialise what they compare to it."""
JITTER_S = 0.01
"""How much time may pass from when nothing was left to do until nothing is left again."""


class Participant(Protocol):
    """A task, the queue of callbacks, a due timer, an op of a pool, or the clock.

    Attributes:
        index: Counts participants in the order of their making, so it is the same in every run
            that made the same choices.
    """

    index: int

    def fire(self) -> None:
        """Take the one step that waits."""


class KitStep(Participant, Protocol):
    """A participant whose next step changes nothing that a program can see.

    Attributes:
        loop: That of the run.
        scope: What the step changes: those of two scopes can trade places; None if it is more.
    """

    loop: SimLoop

    @property
    def scope(self) -> object | None: ...


Choose = Callable[[list[Participant]], int]
"""Picks one of two or more options, given in the order in which asyncio would take them."""


OVERDUE_STEPS = 100
"""How many steps may overtake an op in asyncio's own order."""


def fifo(options: list[Participant]) -> int:
    """Take what asyncio would take; ops and the clock in the order of their times."""
    first = options[0]
    if not hasattr(first, "deadline"):  # not an op: something is ready
        last = options[-1]
        return _overdue(options) if last.index == CLOCK or hasattr(last, "deadline") else 0
    at, soonest = 0, first.due  # type: ignore[attr-defined]
    for i, option in enumerate(options):
        if option.index == CLOCK:
            due = option._loop.next_when()  # type: ignore[attr-defined]
        else:
            due = option.due  # type: ignore[attr-defined]
        if due < soonest:
            at, soonest = i, due
    return at


def _overdue(options: list[Participant]) -> int:
    """Return the first op that others have overtaken for too long, or 0.

    Time does not pass while something is ready, but a program that spins until an op is done, on a
    real loop, sees it done sooner or later.
    """
    for i, option in enumerate(options):
        if hasattr(option, "deadline"):
            steps = len(option.pool.loop.order) - option.since_step  # type: ignore[attr-defined]
            return i if steps > OVERDUE_STEPS else 0
    return 0


RealTask = asyncio.Task  # kept: `asyncio.Task` stands for `SimTask` while a program runs
MAX_ENDED = 1000
"""How many that have ended are kept at most: a run that goes on for ever needs no more memory."""
NAMES = tuple(f"Task-{i}" for i in range(256))


class SimTask(RealTask[Any]):
    """A task that a schedule may hold.

    Invariants:
        * At most one step waits: asyncio schedules the next one from within a step, or when the
          future that the task awaits is done.
        * `function_name` is what the coroutine was called: Python 3.12.1 crashes if a task that has
          ended is asked for its coroutine.
    """

    __slots__ = (
        "args", "callback", "context", "ends_with_run", "function_name", "index", "number",
    )  # fmt: skip

    def __init__(
        self,
        coro: Coroutine[object, None, object],
        *,
        loop: Any = None,  # Any: None, a simulated loop, or another thread's real one
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if loop is None:
            loop = asyncio.get_running_loop()
        self.callback: Callable[..., object] | None = None
        self.args: tuple[Any, ...] = ()
        self.context: Context | None = None
        self.ends_with_run = False
        self.function_name: str = getattr(coro, "__qualname__", type(coro).__qualname__)
        tasks: TaskList | None = getattr(loop, "sim_tasks", None)
        if tasks is None:
            self.index = self.number = id(self) >> 4
            super().__init__(coro, loop=loop, name=name, **kwargs)
            return
        self.number = number = tasks.add(self)
        self.index = loop.new_index()
        if name is None:  # asyncio's own counter goes on from run to run
            name = name_of_task(number)
        super().__init__(coro, loop=loop, name=name, **kwargs)

    def __hash__(self) -> int:
        return self.number

    def fire(self) -> None:
        """Run the step that waits."""
        callback, self.callback = self.callback, None  # no cycle: the collector is off during a run
        self._loop.sim_tasks.last = self.index  # type: ignore[attr-defined]  # as below
        self.context.run(callback, *self.args)  # type: ignore[union-attr, arg-type]  # set together
        if self.done():
            self._loop.sim_tasks.end(self)  # type: ignore[attr-defined]  # typeshed leaves it out
        del self, callback  # a traceback may keep this frame, and the task that: a cycle


def name_of_task(number: int) -> str:
    """Return the name of a task that was given none: asyncio's own, counted from each run's start.

    Example:
        >>> name_of_task(3)
        'Task-3'
    """
    return NAMES[number] if number < 256 else f"Task-{number}"


RealFuture = asyncio.Future


@final
class SimFuture(RealFuture[Any]):
    """A future that hashes by a number: libraries for networks walk sets of futures."""

    __slots__ = ("number",)
    number: int

    def __hash__(self) -> int:
        try:
            return self.number
        except AttributeError:
            loop: SimLoop = self.get_loop()  # type: ignore[assignment]  # only such loops make one
            self.number = loop.new_index()
            return self.number


@final
class TaskList:
    """The tasks of a run in the order of their making, without those that have ended well.

    asyncio keeps no task that has ended, and programs may rely on it: what is referred to weakly is
    gone then. One that has failed is kept until its exception is retrieved.

    Attributes:
        num_made: How many tasks there were; the number of the next one.
        last: Index of the task that took a step last; -1 before the first.
    """

    __slots__ = ("_failed", "_limit", "_tasks", "last", "num_made")

    def __init__(self) -> None:
        self._tasks: dict[int, SimTask] = {}
        self._failed: list[SimTask] = []
        self.num_made = 0
        self.last = -1
        self._limit = MAX_ENDED

    def __iter__(self) -> Iterator[SimTask]:
        return iter(tuple(self._tasks.values()))

    def add(self, task: SimTask) -> int:
        """Append a task; return its number."""
        if len(self._tasks) >= self._limit:  # those of loops in threads, and eager ones
            self._failed += [each for each in self if each.done()]
            self._forget()
            self._limit = 2 * len(self._tasks) + MAX_ENDED
        number = self.num_made
        self._tasks[number] = task
        self.num_made = number + 1
        return number

    def end(self, task: SimTask) -> None:
        """Forget a task that has ended, or remember that nobody knows yet how it failed."""
        if task._log_traceback:
            self._failed.append(task)
        else:
            self._tasks.pop(task.number, None)
        if self._failed:
            self._forget()

    def get(self, number: int) -> SimTask | None:
        """Return the task of a number; None if it has ended."""
        return self._tasks.get(number)

    def _forget(self) -> None:
        """Forget the failed tasks whose exceptions were retrieved."""
        for task in self._failed:
            if not task._log_traceback:
                self._tasks.pop(task.number, None)
        self._failed[:] = [task for task in self._failed if task._log_traceback]


@final
class CallbackQueue:
    """Runs plain callbacks in the order of their registration.

    Invariants:
        * It is an option exactly while the loop's `waiting` holds something.
        * The head of `waiting` is a callback, except at `asyncio` fidelity.

    Attributes:
        task: The task whose step it took last; None if that was a callback, or the task has ended.
    """

    __slots__ = ("index", "loop", "task")

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.index = CALLBACKS
        self.task: SimTask | None = None

    @property
    def scope(self) -> CallbackQueue | None:
        """The queue itself if the first callback is bookkeeping of asyncio; else None."""
        return self if _is_bookkeeping(self.loop.waiting[0]) else None

    def fire(self) -> None:
        """Run the first callback; let go of the tasks that stood behind it."""
        loop = self.loop
        waiting, enabled = loop.waiting, loop.enabled
        head = waiting.popleft()
        if loop.fidelity != "asyncio":
            while waiting and type(waiting[0]) is SimTask:
                enabled.append(waiting.popleft())
        if waiting:
            enabled.append(self)
        self.task = None
        if type(head) is SimTask:
            self.task = head
            head.fire()
            if head.done():
                self.task = None  # asyncio keeps no task that has ended
        elif not head._cancelled:
            if loop.network is None:
                head._run()
            else:
                loop.network.run_callback(head)
        del head  # as a task does itself: a traceback may keep this frame


def who_went(chosen: Participant) -> Participant:
    """Return the task whose step the queue of callbacks has taken, or else who was chosen."""
    task = chosen.task if type(chosen) is CallbackQueue else None
    return chosen if task is None else task


def _closure_of(function: str, name: str) -> CodeType:
    """Return the code of a function that one of `asyncio.tasks` defines."""
    code: CodeType = vars(asyncio.tasks)[function].__code__
    return next(
        each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name
    )


BOOKKEEPING: frozenset[object] = frozenset(
    {_closure_of("gather", "_done_callback"), _closure_of("_wait", "_on_completion")}
)
"""Callbacks that count who is done, and wake who waits for all: they cancel nothing."""


def _is_bookkeeping(head: object) -> bool:
    """Return True for a callback of asyncio itself about a task or a plain future."""
    return (
        isinstance(head, events.Handle)
        and getattr(head._callback, "__code__", None) in BOOKKEEPING  # type: ignore[attr-defined]
        and type(head._args[0]) in (SimTask, RealFuture, SimFuture)
    )


@final
class Clock:
    """Moves on to the next timer although an op is still in flight, or a task ready."""

    __slots__ = ("_loop", "index")

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.index = CLOCK

    def fire(self) -> None:
        """Move virtual time to the next timer."""
        loop = self._loop
        when = loop.next_when()
        if when is not None:
            loop.jump(when, is_early=bool(loop.enabled))


@final
class SimTimer(events.TimerHandle):
    """A timer; an option of its own once it is due."""

    __slots__ = ("index", "is_due")

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[object, ...],
        loop: Any,
        context: Context | None,
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self.index = loop.new_index()
        self.is_due = False

    def is_off(self) -> bool:
        """Return True if it was cancelled."""
        return self._cancelled

    def become_due(self, loop: SimLoop) -> None:
        """Become an option."""
        self._scheduled = False
        self.is_due = True
        loop.num_due += 1
        loop.enabled.append(self)

    def fire(self) -> None:
        """Run the callback; at `asyncio` fidelity, put it into the queue."""
        self.is_due = False
        loop: SimLoop = self._loop  # type: ignore[attr-defined]  # typeshed leaves it out
        if loop.fidelity == "asyncio":
            loop.put_due(self)
        elif not self._cancelled:
            self._run()
        loop.no_longer_due()


@final
class SimHandle(events.Handle):
    """A plain callback that is an option of its own, at `adversarial` fidelity."""

    __slots__ = ("index",)

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[object, ...],
        loop: Any,
        context: Context | None,
    ) -> None:
        super().__init__(callback, args, loop, context)
        self.index = loop.new_index()

    def cancel(self) -> None:
        """Cancel the callback, which is not an option any more."""
        super().cancel()
        enabled = self._loop.enabled  # type: ignore[attr-defined]  # typeshed leaves it out
        enabled[:] = [each for each in enabled if each is not self]

    def fire(self) -> None:
        """Run the callback."""
        self._run()
