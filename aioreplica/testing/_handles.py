"""Participants that are not tasks: the queue of callbacks, timers, free callbacks, the clock."""

from __future__ import annotations

from asyncio import events
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, final

from ._participant import CALLBACKS, CLOCK
from ._task import SimTask

if TYPE_CHECKING:
    from ._loop import SimLoop


@final
class CallbackQueue:
    """Runs plain callbacks in the order of their registration.

    Invariants:
        * It is an option exactly while the loop's `waiting` holds something.
        * The head of `waiting` is a callback, except at `asyncio` fidelity.
    """

    __slots__ = ("_loop", "index")

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.index = CALLBACKS

    def fire(self) -> None:
        """Run the first callback; let go of the tasks that stood behind it."""
        loop = self._loop
        waiting, enabled = loop.waiting, loop.enabled
        head = waiting.popleft()
        if loop.fidelity == "reorder":
            while waiting and type(waiting[0]) is SimTask:
                enabled.append(waiting.popleft())
        if waiting:
            enabled.append(self)
        if type(head) is SimTask:
            head.fire()
        elif not head._cancelled:
            head._run()


@final
class Clock:
    """Moves on to the next timer although an op is still in flight."""

    __slots__ = ("_loop", "index")

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self.index = CLOCK

    def fire(self) -> None:
        """Move virtual time to the next timer."""
        when = self._loop.next_when()
        if when is not None:
            self._loop.jump(when)


@final
class SimTimer(events.TimerHandle):
    """A timer; an option of its own once it is due."""

    __slots__ = ("index", "is_due")

    def __init__(
        self,
        when: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: Any,
        context: Context | None,
    ) -> None:
        super().__init__(when, callback, args, loop, context)
        self.index = loop.new_index()
        self.is_due = False

    def is_off(self) -> bool:
        """Whether it was cancelled."""
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
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: Any,
        context: Context | None,
    ) -> None:
        super().__init__(callback, args, loop, context)
        self.index = loop.new_index()

    def cancel(self) -> None:
        """Cancel the callback, which is no option any more."""
        super().cancel()
        enabled = self._loop.enabled  # type: ignore[attr-defined]  # typeshed leaves it out
        enabled[:] = [each for each in enabled if each is not self]

    def fire(self) -> None:
        """Run the callback."""
        self._run()
