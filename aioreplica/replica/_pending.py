"""Merge that takes longer than a step of its last replica, from its begin to the release.

`Collective.perform`, and an exchange with other workers, return one where there is something to
await. The meeting point keeps it in `MeetingPoint.merging` until it has ended. Reductions that are
one exchange with other workers are one; each of them has its own generation, and its own end.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

from ..context import PLACE
from ..devices import is_interrupted
from ._failure import error_of

if TYPE_CHECKING:
    from ._meeting import Call, Generation, Parts


Outcome: TypeAlias = tuple[Any, BaseException | None]
"""A result, or the error in its place. Any: results of collectives have every type."""


class Reading(Protocol):
    """Something that reads arrays of replicas and comes to its end by itself."""

    def when_over(self, fn: Callable[[], object], /) -> None:
        """Call something at its end."""

    async def over(self) -> bool:
        """Wait for its end, through every cancellation."""


def once_over(reading: Sequence[Reading], fn: Callable[[], None]) -> None:
    """Call something once nothing is being read; at once in an interrupt."""
    if not reading or is_interrupted():
        fn()
    else:
        first, *others = reading
        first.when_over(partial(once_over, others, fn))


class MergeTurn(Protocol):
    """The turn of a merge among those of its run that meet other workers."""

    def end(self) -> None:
        """Let the next turn begin."""

    def give_back(self, call: Call | None = None) -> Reading | None:
        """Go on without the replicas' own arrays, of a call or of all; return what reads them."""


class Merging(Protocol):
    """Meeting point of a run, as a merge that takes longer sees it."""

    is_aborted: bool
    loop: asyncio.AbstractEventLoop | None
    merging: dict[Generation, bool]

    def release(self, generation: Generation, parts: Parts, error: BaseException | None) -> None:
        """Hand every member its part, or the error."""

    def wake_once_unread(self) -> None:
        """Open the gates of all threads that wait, once no merge reads arrays of theirs."""

    def merge_ended(self) -> None:
        """Tell the run that the merge has ended."""


@final
@dataclass(slots=True, eq=False)
class Pending:
    """A merge that takes longer, or several of them that go together.

    Attributes:
        awaitable: What to await.
        to_parts: Makes parts of its result, for the calls of a generation.
        turn: In which it meets other workers; None if there are none.
        task: Waits for it, or is it; None before that.
        tell: Where `awaitable` is a future: has a function called when it is done, in the same
            cycle of the event loop, or when some have ended; None if it has not got that.
        take: Where there are several: takes what those have come to that have ended, which are the
            first ones: of each its result, or the error.
        generations: What is merged and has not ended.
    """

    awaitable: Awaitable[Any]
    to_parts: Callable[[Sequence[Call], Any], Parts]
    turn: MergeTurn | None = None
    task: asyncio.Future[Any] | None = None
    tell: Callable[[Callable[[], object]], None] | None = None
    take: Callable[[], Sequence[Outcome]] | None = None
    generations: list[Generation] = field(default_factory=list)

    def end(self) -> None:
        """Let those go on who wait for their turn."""
        if self.turn is not None:
            self.turn.end()

    def reading(self, call: Call | None = None) -> Reading | None:
        """Return what still reads own arrays, of a call or all; from now on nothing else will."""
        return None if self.turn is None else self.turn.give_back(call)

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
            point.wake_once_unread()
            point.merge_ended()
            return
        context = generation.calls[0].context
        context.run(PLACE.set, generation.group.merge_place)
        generation.pending = self
        self.generations.append(generation)
        task = self.task or self.awaitable
        point.merging[generation] = isinstance(task, asyncio.Future)
        if self.task is not None:  # it goes with those before
            return
        if not isinstance(task, asyncio.Future):
            waiting = self._wait(point, generation)
            task = asyncio.Task(waiting, loop=point.loop, context=context)
        self.task = task
        if self.tell is None:
            task.add_done_callback(partial(self._ended, point))
        elif task.done():  # at once, without a cycle of the event loop
            self._ended(point, task)
        else:
            self.tell(partial(self._ended, point, task))

    async def _wait(self, point: Merging, generation: Generation) -> object:
        if point.is_aborted:  # a merge of an aborted run does not begin
            raise asyncio.CancelledError
        point.merging[generation] = True
        return await self.awaitable

    def _ended(self, point: Merging, task: asyncio.Future[object]) -> None:
        """Release the generations that have ended: the first ones, or all once the task has."""
        self.end()
        found = [] if self.take is None else list(self.take())
        if task.done():
            error = error_of(task)
            rest = len(self.generations) - len(found)
            found += [(task.result() if error is None else None, error)] * rest
        ended, self.generations = self.generations[: len(found)], self.generations[len(found) :]
        for generation, (result, error) in zip(ended, found, strict=True):
            if not point.merging.pop(generation):
                self.discard()
            waiter = generation.waiter  # if it was cancelled, those who wait say by whom
            if not (point.is_aborted or (waiter is not None and waiter.cancelled())):
                context = generation.calls[0].context
                context.run(self._hand_out, point, generation, result, error)
        point.merge_ended()

    def _hand_out(
        self,
        point: Merging,
        generation: Generation,
        result: object,
        error: BaseException | None,
    ) -> None:
        parts: Parts = ()
        if error is None:
            try:
                parts = self.to_parts(generation.calls, result)
            except Exception as wrong:  # noqa: BLE001 - every member raises it
                error = wrong
        point.release(generation, parts, error)
