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

    @abstractmethod
    def abandon(self) -> None:
        """Leave what runs to itself: there is no event loop to wait on."""


@final
class ThreadFiller(Filler):
    """Advances a plain iterator on a thread of its own, as it may block.

    Args:
        source: The iterator.
        elements: Where its elements go.
        infeed: The queues.
        is_owned: Whether it was made for this loop, and is closed with it, on the thread.
    """

    def __init__(
        self, source: Iterator[Any], elements: Elements, infeed: Infeed, *, is_owned: bool
    ) -> None:
        self._source = source
        self._elements = elements
        self._infeed = infeed
        self._is_owned = is_owned
        self._lane = SourceLane()
        self._op: Op[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._gave_up = False

    def start(self) -> None:
        """Begin on the thread."""
        op = self._lane.run(self._fill, new_gate(asyncio.get_running_loop()))
        op.put()
        self._op = op

    async def aclose(self) -> None:
        """Wait for the thread; only for a moment if the loop failed or the wait is cancelled."""
        op, self._op = self._op, None  # it holds this object
        cancelled: list[asyncio.CancelledError] = []

        def was_cancelled(error: asyncio.CancelledError) -> None:
            cancelled.append(error)
            self._give_up_soon()

        if op is not None and not op.done():
            if self._infeed.is_aborted:
                self._give_up_soon()
            await wait_shielded(
                lambda: op.done() or self._gave_up, lambda: self._new_waiter(op), was_cancelled
            )
        if self._timer is not None:
            self._timer.cancel()
        self._lane.close()
        if cancelled:
            raise cancelled[0]

    def abandon(self) -> None:
        """Let the thread end when the source lets it."""
        self._lane.close()

    def _new_waiter(self, op: Op[None]) -> asyncio.Future[None]:
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        op.add_done_callback(lambda _op: _resolve(waiter))
        return waiter

    def _give_up_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GIVE_UP_S, self._give_up)

    def _give_up(self) -> None:
        self._gave_up = True
        if self._waiter is not None:
            _resolve(self._waiter)

    def _fill(self, room: Gate) -> None:
        error: BaseException | None = None
        try:
            try:
                self._pass_on(room)
            finally:
                close = getattr(self._source, "close", None)
                if self._is_owned and callable(close):
                    close()
        except BaseException as raised:  # noqa: BLE001 - it belongs to whoever runs the loop
            error = raised
        self._elements.end(error)

    def _pass_on(self, room: Gate) -> None:
        elements, infeed = self._elements, self._infeed
        while not elements.are_complete:
            element = next(self._source, Mark.END)
            if element is Mark.END:
                return
            if not infeed.has_room and infeed.wait_for_room(room.open):
                room.wait()
            if infeed.is_aborted:
                return
            elements.add(element)


@final
class TaskFiller(Filler):
    """Advances an async iterator on the event loop.

    Args:
        source: The iterator.
        elements: Where its elements go.
        infeed: The queues.
        is_owned: Whether it was made for this loop, and is closed with it, in the same task.
    """

    def __init__(
        self, source: AsyncIterator[Any], elements: Elements, infeed: Infeed, *, is_owned: bool
    ) -> None:
        self._source = source
        self._elements = elements
        self._infeed = infeed
        self._is_owned = is_owned
        self._has_begun = False
        self._task: OwnedTask[None] | None = None

    def start(self) -> None:
        """Begin in a task."""
        self._task = OwnedTask(self._fill(), "aioreplica infeed")

    async def aclose(self) -> None:
        """End the task, wherever it waits, and see it gone."""
        if self._task is not None:
            if self._infeed.is_aborted and self._has_begun:  # else it sees that by itself
                self._task.cancel()
            await self._task.ended()

    def abandon(self) -> None:
        """Leave the task to the loop's end."""

    async def _fill(self) -> None:
        self._has_begun = True
        error: BaseException | None = None
        try:
            try:
                await self._pass_on()
            finally:
                close = getattr(self._source, "aclose", None)
                if self._is_owned and callable(close):
                    await close()
        except asyncio.CancelledError as cancelled:
            if self._infeed.is_aborted:
                raise
            error = cancelled
        except BaseException as raised:  # noqa: BLE001 - it belongs to whoever runs the loop
            error = raised
        self._elements.end(error)

    async def _pass_on(self) -> None:
        elements, infeed = self._elements, self._infeed
        while not elements.are_complete:
            element = await anext(self._source, Mark.END)
            if element is Mark.END:
                return
            if not infeed.has_room:
                await self._room()
            if infeed.is_aborted:
                return
            elements.add(element)

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
    is_owned = source is not given
    if isinstance(source, Iterator):
        return ThreadFiller(source, elements, infeed, is_owned=is_owned)
    return TaskFiller(source, elements, infeed, is_owned=is_owned)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
