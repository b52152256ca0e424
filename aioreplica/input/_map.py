"""map: a function over the items of a source, several calls at once, order kept."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable
from typing import Any, final

from ..devices import HOST, CompletionPort, Op, OwnedTask, lane_table, run_on_lane
from ._iterable_source import label_of
from ._stream import Item, Source, Start, Stream


@final
class MappedSource(Source):
    """What `fn` makes of each item of another source.

    Args:
        upstream: The other source.
        fn: Plain functions run on the host's threads, async ones on the event loop.
        num_parallel: Calls in progress at once.
    """

    def __init__(self, upstream: Source, fn: Callable[[Any], Any], num_parallel: int) -> None:
        self._upstream = upstream
        self._fn = fn
        self._num_parallel = num_parallel

    @property
    def label(self) -> str:
        """The other source and the function."""
        return f"{self._upstream.label}.map({label_of(self._fn).removeprefix('function ')})"

    @property
    def identity(self) -> tuple[Any, ...]:
        """That of the other source: offsets are its own."""
        return self._upstream.identity

    def open(self, start: Start) -> Stream:
        """Return a new pass."""
        return _MapStream(self._upstream.open(start), self._fn, self._num_parallel)

    def num_items(self) -> int | None:
        """As many as the other source has."""
        return self._upstream.num_items()

    def offset_after(self, num_items: int) -> int:
        """As in the other source."""
        return self._upstream.offset_after(num_items)

    async def aclose(self) -> None:
        """Close the other source."""
        await self._upstream.aclose()


@final
class _MapStream(Stream):
    """Invariant: calls in `_window` were started in order, and their results leave in order."""

    def __init__(self, upstream: Stream, fn: Callable[[Any], Any], num_parallel: int) -> None:
        self._upstream = upstream
        self._fn = fn
        self._num_parallel = num_parallel
        self._is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
            getattr(fn, "__call__", None)  # noqa: B004 - an object whose call is async
        )
        self._window: deque[tuple[Item, Op[Any] | OwnedTask[Any]]] = deque()
        self._has_ended = False
        self._error: Exception | None = None

    async def pull(self) -> Item | None:
        while not self._has_ended and len(self._window) < self._num_parallel:
            try:
                item = await self._upstream.pull()
            except Exception as error:  # noqa: BLE001 - raised behind the items before it
                self._error = error
                item = None
            if item is None:
                self._has_ended = True
            else:
                self._window.append((item, self._start(item.value)))
        if not self._window:
            failure, self._error = self._error, None
            if failure is not None:
                raise failure
            return None
        item, call = self._window[0]
        value = await call
        if inspect.isawaitable(value):
            value = await value
        self._window.popleft()
        return item._replace(value=value)

    def _start(self, value: Any) -> Op[Any] | OwnedTask[Any]:
        if self._is_async:
            return OwnedTask(self._fn(value), "aioreplica input: map")
        port = CompletionPort.of_running_loop()
        op = run_on_lane(lane_table().lane(HOST), port, self._fn, (value,), {})
        op.put()
        return op

    async def aclose(self) -> None:
        self._has_ended = True
        calls = [call for _, call in self._window]
        self._window.clear()
        for call in calls:
            call.cancel()
        try:
            await asyncio.gather(*(_ended(call) for call in calls), return_exceptions=True)
        finally:
            await self._upstream.aclose()


async def _ended(call: Op[Any] | OwnedTask[Any]) -> None:
    if isinstance(call, OwnedTask):
        await call.ended()
    else:
        await call
