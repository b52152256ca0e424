"""Merge that takes longer than a step of its last replica, from its begin to the release.

`Collective.perform`, and an exchange with other workers, return one where there is something to
await. The meeting point keeps it in `MeetingPoint.merging` until it has ended.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, final

from ..context import PLACE
from ..devices import is_interrupted
from ._failure import error_of

if TYPE_CHECKING:
    from ._meeting import Generation, Parts


class Reading(Protocol):
    """Something that reads arrays of replicas and comes to its end by itself."""

    def when_over(self, fn: Callable[[], object], /) -> None:
        """Call something at its end."""

    async def over(self) -> bool:
        """Wait for its end, through every cancellation."""


def once_over(reading: Reading | None, fn: Callable[[], None]) -> None:
    """Call something once nothing is being read; at once in an interrupt."""
    if reading is None or is_interrupted():
        fn()
    else:
        reading.when_over(fn)


class MergeTurn(Protocol):
    """The turn of a merge among those of its run that meet other workers."""

    def end(self) -> None:
        """Let the next turn begin."""

    def give_back(self) -> Reading | None:
        """Go on without the replicas' own arrays; return what is reading them."""


class Merging(Protocol):
    """Meeting point of a run, as a merge that takes longer sees it."""

    is_aborted: bool
    loop: asyncio.AbstractEventLoop | None
    merging: dict[Generation, bool]

    def release(self, generation: Generation, parts: Parts, error: BaseException | None) -> None:
        """Hand every member its part, or the error."""

    def wake_threads(self) -> None:
        """Open the gates of all threads that wait."""

    def merge_ended(self) -> None:
        """Tell the run that the merge has ended."""


@final
@dataclass(slots=True)
class Pending:
    """A merge that takes longer.

    Attributes:
        awaitable: What to await.
        to_parts: Makes parts of its result.
        turn: In which it meets other workers; None if there are none.
        task: Waits for it, or is it; None before that.
        tell: Where `awaitable` is a future: has a function called when it is done, in the same
            cycle of the event loop; None if it has not got that.
    """

    awaitable: Awaitable[Any]
    to_parts: Callable[[Any], Parts]
    turn: MergeTurn | None = None
    task: asyncio.Future[Any] | None = None
    tell: Callable[[Callable[[], object]], None] | None = None

    def end(self) -> None:
        """Let those go on who wait for their turn."""
        if self.turn is not None:
            self.turn.end()

    def reading(self) -> Reading | None:
        """Return what still reads the replicas' own arrays; from now on nothing else will."""
        return None if self.turn is None else self.turn.give_back()

    def discard(self) -> None:
        """Close what will never be awaited."""
        if inspect.iscoroutine(self.awaitable):
            self.awaitable.close()
        elif isinstance(self.awaitable, asyncio.Future):
            self.awaitable.cancel()
        if isinstance(self.task, asyncio.Task) and inspect.iscoroutine(self.task.get_coro()):
            self.task.get_coro().close()

    def begin(self, point: Merging, generation: Generation) -> None:
        """Wait for the rest of a merge, as replica 0: by a callback of a future, else in a task."""
        if point.is_aborted:
            self.discard()
            self.end()
            point.merging.pop(generation, None)
            point.wake_threads()
            point.merge_ended()
            return
        context = generation.calls[0].context
        context.run(PLACE.set, generation.group.merge_place)
        task = self.awaitable
        point.merging[generation] = isinstance(task, asyncio.Future)
        if not isinstance(task, asyncio.Future):
            waiting = self._wait(point, generation)
            task = asyncio.Task(waiting, loop=point.loop, context=context)
        self.task, generation.pending = task, self
        ended = partial(self._ended, point, generation)
        if self.tell is None:
            task.add_done_callback(ended, context=context)
        else:
            self.tell(partial(context.run, ended, task))

    async def _wait(self, point: Merging, generation: Generation) -> object:
        if point.is_aborted:  # a merge of an aborted run does not begin
            raise asyncio.CancelledError
        point.merging[generation] = True
        return await self.awaitable

    def _ended(self, point: Merging, generation: Generation, task: asyncio.Future[object]) -> None:
        if not point.merging.pop(generation):
            self.discard()
        self.end()
        error = error_of(task)
        if not (point.is_aborted or generation.is_given_up()):  # the tasks that wait say who did
            parts: Parts = ()
            if error is None:
                try:
                    parts = self.to_parts(task.result())
                except Exception as wrong:  # noqa: BLE001 - every member raises it
                    error = wrong
            point.release(generation, parts, error)
        point.merge_ended()
