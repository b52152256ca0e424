"""Server-sent events of a service: its state, now and whenever that has changed."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, final

import anyio
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse

from ..online import RecordStream, StepRecord
from ._request import HEADERS, as_json

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

NUM_STEPS = 32  # of the newest, that a client may not have seen yet
HEARTBEAT_S = 15.0


@final
class Events(StreamingResponse):  # type: ignore[misc]  # Any: Starlette need not be installed
    """The state of a service, and its newest steps, as server-sent events.

    A client has a place for one state and for the newest steps: what it misses is not kept. One
    that does not read is dropped, and all end when the service closes.

    Args:
        state: Returns what is told; it can be made JSON of.
        records: Opens the stream of steps; None without a learner.
        streams: Has this one while it is answered.
        closing: Set when the service closes.
        send_s: Seconds that the client may take to accept one event.
        interval_s: Seconds between two looks at the state.
    """

    def __init__(
        self,
        state: Callable[[], dict[str, Any]],
        records: Callable[[], RecordStream] | None,
        streams: set[Events],
        closing: asyncio.Event,
        *,
        send_s: float,
        interval_s: float,
    ) -> None:
        self._state = state
        self._records = records
        self._streams = streams
        self._closing = closing
        self._send_s = send_s
        self._interval_s = interval_s
        self._steps: deque[StepRecord] = deque(maxlen=NUM_STEPS)
        super().__init__(
            self._texts(),
            headers={**HEADERS, "x-accel-buffering": "no"},
            media_type="text/event-stream",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            with anyio.fail_after(self._send_s):
                await send(message)

        self._streams.add(self)
        try:
            async with anyio.create_task_group() as tasks:
                if self._records is not None:
                    tasks.start_soon(self._keep, self._records())
                with suppress(TimeoutError, ClientDisconnect):
                    await super().__call__(scope, receive, send_in_time)
                tasks.cancel_scope.cancel()
        finally:
            self._streams.discard(self)

    async def _keep(self, records: RecordStream) -> None:
        async for record in records:
            self._steps.append(record)

    async def _texts(self) -> AsyncIterator[str]:
        told, told_at = "", 0.0
        while not self._closing.is_set():
            state, now = as_json(self._state()), time.monotonic()
            if state != told or self._steps:  # a step is recorded after it was counted
                newest = as_json([asdict(step) for step in self._steps])
                self._steps.clear()
                told, told_at = state, now
                yield f'event: state\ndata: {state[:-1]}, "steps": {newest}}}\n\n'
            elif now - told_at >= HEARTBEAT_S:
                told_at = now
                yield ": still there\n\n"
            with anyio.move_on_after(self._interval_s):
                await self._closing.wait()
