"""Filling an infeed from an iterator: on a thread, or on the event loop if it is async."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from typing import Any, final

from ..devices import Gate, Op, OwnedTask, new_gate, wait_shielded
from ..input import SourceLane
from ._elements import Elements
from ._infeed import Infeed, Mark

GIVE_UP_S = 0.25
"""How long a loop that failed waits for an iterator that blocks its thread; then it is left."""


class Filler(ABC):
    """Takes elements from a source and puts them into an infeed, as far ahead as there is room."""

    @abstractmethod
    def start(self) -> None:
        """Begin, on the running event loop."""

    @abstractmethod
    async def aclose(self) -> None:
        """End; waits for what runs, but not for ever for a thread that the source blocks."""


@final
class ThreadFiller(Filler):
    """Advances a plain iterator on a thread of its own, as it may block."""

    def __init__(self, source: Iterator[Any], elements: Elements, infeed: Infeed) -> None:
        self._source = source
        self._elements = elements
        self._infeed = infeed
        self._lane = SourceLane()
        self._op: Op[None] | None = None
        self._gave_up = False

    def start(self) -> None:
        """Begin on the thread."""
        self._op = self._lane.run(self._fill, new_gate(asyncio.get_running_loop()))
        self._op.put()

    async def aclose(self) -> None:
        """Wait for the thread."""
        op = self._op
        cancelled: list[asyncio.CancelledError] = []
        if op is not None and not op.done():
            await wait_shielded(lambda: op.done() or self._gave_up, self._waiter, cancelled.append)
        self._lane.close()
        if cancelled:
            raise cancelled[0]

    def _waiter(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        assert self._op is not None  # it is what is waited for
        self._op.add_done_callback(lambda _op: _resolve(waiter))
        if self._infeed.is_aborted:
            loop.call_later(GIVE_UP_S, self._give_up, waiter)
        return waiter

    def _give_up(self, waiter: asyncio.Future[None]) -> None:
        self._gave_up = True
        _resolve(waiter)

    def _fill(self, room: Gate) -> None:
        elements, infeed = self._elements, self._infeed
        error: BaseException | None = None
        try:
            while not elements.are_complete:
                element = next(self._source, Mark.END)
                if element is Mark.END:
                    break
                if not infeed.has_room and infeed.wait_for_room(room.open):
                    room.wait()
                if infeed.is_aborted:
                    return
                elements.add(element)
        except BaseException as raised:  # noqa: BLE001 - it belongs to whoever runs the loop
            error = raised
        elements.end(error)


@final
class TaskFiller(Filler):
    """Advances an async iterator on the event loop.

    Args:
        source: The iterator.
        elements: Where its elements go.
        infeed: The queues.
        is_owned: Whether it was made for this loop, and is closed with it.
    """

    def __init__(
        self, source: AsyncIterator[Any], elements: Elements, infeed: Infeed, *, is_owned: bool
    ) -> None:
        self._source = source
        self._elements = elements
        self._infeed = infeed
        self._is_owned = is_owned
        self._task: OwnedTask[None] | None = None

    def start(self) -> None:
        """Begin in a task."""
        self._task = OwnedTask(self._fill(), "aioreplica infeed")

    async def aclose(self) -> None:
        """End the task, wherever it waits, and see it gone."""
        if self._task is not None:
            if self._infeed.is_aborted:
                self._task.cancel()
            await self._task.ended()
        close = getattr(self._source, "aclose", None)
        if self._is_owned and close is not None:
            await close()

    async def _fill(self) -> None:
        elements, infeed = self._elements, self._infeed
        error: BaseException | None = None
        try:
            while not elements.are_complete:
                element = await anext(self._source, Mark.END)
                if element is Mark.END:
                    break
                if not infeed.has_room:
                    await self._room()
                if infeed.is_aborted:
                    return
                elements.add(element)
        except asyncio.CancelledError as cancelled:
            if infeed.is_aborted:
                raise
            error = cancelled
        except BaseException as raised:  # noqa: BLE001 - it belongs to whoever runs the loop
            error = raised
        elements.end(error)

    async def _room(self) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(_resolve, waiter)
            except RuntimeError:  # the loop is closed: nobody waits there any more
                return

        if self._infeed.wait_for_room(wake):
            await waiter


def new_filler(
    source: Iterator[Any] | AsyncIterator[Any], elements: Elements, infeed: Infeed, given: Any
) -> Filler:
    """Return what fills the infeed from `source`, the iterator of what was `given`."""
    if isinstance(source, Iterator):
        return ThreadFiller(source, elements, infeed)
    return TaskFiller(source, elements, infeed, is_owned=source is not given)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
