"""map: a function over the items of a source, several calls at once, order kept."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable
from typing import Any, final

from ..devices import HOST, CompletionPort, Op, OwnedTask, lane_table, run_on_lane
from ._iterable_source import label_of
from ._read_ahead import ReadAheadStream
from ._stream import Item, Source, Start, Stream

_Call = Op[Any] | OwnedTask[Any]


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
        return _MapStream(self._upstream.open(start), self._fn, self._num_parallel, self.label)

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
class _CallStream(Stream):
    """Items with a started call in place of each value.

    Args:
        upstream: Gives the items.
        fn: What to call.
        calls: Where each call is put when it starts, in order; whoever takes its result removes it.
    """

    def __init__(self, upstream: Stream, fn: Callable[[Any], Any], calls: deque[_Call]) -> None:
        self._upstream = upstream
        self._fn = fn
        self._calls = calls
        self._is_async = inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(
            getattr(fn, "__call__", None)  # noqa: B004 - an object whose call is async
        )

    async def pull(self) -> Item | None:
        item = await self._upstream.pull()
        if item is None:
            return None
        call = self._start(item.value)
        self._calls.append(call)
        return item._replace(value=call)

    def _start(self, value: Any) -> _Call:
        if self._is_async:
            return OwnedTask(self._fn(value), "aioreplica input: map")
        port = CompletionPort.of_running_loop()
        op = run_on_lane(lane_table().lane(HOST), port, self._fn, (value,), {})
        op.put()
        return op

    async def aclose(self) -> None:
        await self._upstream.aclose()


@final
class _MapStream(Stream):
    """Waits for the calls in order, while a task reads on and starts the next ones.

    The task matters: an item whose call is done must not wait for the source's next item.
    """

    def __init__(
        self, upstream: Stream, fn: Callable[[Any], Any], num_parallel: int, label: str
    ) -> None:
        self._calls: deque[_Call] = deque()
        self._started: Stream = _CallStream(upstream, fn, self._calls)
        if num_parallel > 1:  # one call is waited for here, the others are in the buffer
            self._started = ReadAheadStream(self._started, num_parallel - 1, label)
        self._next: Item | None = None  # kept if a pull is cancelled

    async def pull(self) -> Item | None:
        if self._next is None:
            self._next = await self._started.pull()
        item = self._next
        if item is None:
            return None
        value = await item.value
        if inspect.isawaitable(value):
            value = await value
        self._calls.popleft()
        self._next = None
        return item._replace(value=value)

    async def aclose(self) -> None:
        self._next = None
        for call in self._calls:
            call.cancel()
        try:
            await self._started.aclose()
        finally:  # a source that does not heed its cancellation may have given one more item
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*map(_ended, self._calls), return_exceptions=True)
            self._calls.clear()


async def _ended(call: _Call) -> None:
    if isinstance(call, OwnedTask):
        await call.ended()
    else:
        await call
