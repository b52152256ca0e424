"""The state of a service as server-sent events: bounded for each client, none waits for another."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, final

import anyio

from ..online import OnlineLearner, RecordStream, SnapshotReader, StepRecord
from ._request import Limits, Receive, RefusedError, Scope, Send, as_json, send_head

HEARTBEAT_S = 15.0
NUM_STEPS = 32


@final
class Closing:
    """Event of a service that closes. It may run several times, each time on another event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def clear(self) -> None:
        """Begin anew, for the loop that waits next."""
        self._event = asyncio.Event()

    def is_set(self) -> bool:
        """Return True if it closes."""
        return self._event.is_set()

    def set(self) -> None:
        """End all streams."""
        self._event.set()

    async def wait(self) -> None:
        """Wait until it closes."""
        await self._event.wait()


@final
class EventStreams:
    """Sends the state to each client that follows, now and whenever it has changed.

    A client has a place for one state and for the newest steps: what it misses is not kept. One
    that does not read is dropped, and all end when the service closes.

    Args:
        learner: Whose steps go with the state.
        state: Returns the state as JSON.
        closing: Set when the service closes.
        limits: How many may follow, and how slowly they may read.
        interval_s: Seconds from one look at the state to the next.
    """

    def __init__(
        self,
        learner: OnlineLearner | SnapshotReader,
        state: Callable[[], dict[str, Any]],
        closing: Closing,
        limits: Limits,
        *,
        interval_s: float,
    ) -> None:
        self._learner = learner
        self._state = state
        self._closing = closing
        self._limits = limits
        self._interval_s = interval_s
        self._count = 0

    async def follow(self, _scope: Scope, receive: Receive, send: Send) -> int:
        """Answer a client until it or the service goes.

        Raises:
            RefusedError: If there are too many, or there is no version yet.
        """
        if self._count >= self._limits.streams:
            raise RefusedError(
                503, f"{self._count} clients follow already.", headers={"retry-after": "5"}
            )
        self._state()  # raises before the answer has begun, if there is none yet
        self._count += 1
        steps: deque[StepRecord] = deque(maxlen=NUM_STEPS)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_until_gone, receive, tasks.cancel_scope)
                if isinstance(self._learner, OnlineLearner):
                    tasks.start_soon(_keep, self._learner.records(), steps)
                head = {"content-type": "text/event-stream", "x-accel-buffering": "no"}
                await send_head(send, 200, head)
                await self._tell(send, steps)
                tasks.cancel_scope.cancel()
        finally:
            self._count -= 1
        return 200

    async def _tell(self, send: Send, steps: deque[StepRecord]) -> None:
        told, told_at = "", 0.0
        while not self._closing.is_set():
            state, now, text = as_json(self._state()), time.monotonic(), ""
            if state != told:
                newest = as_json([asdict(step) for step in steps])
                steps.clear()
                text = f'event: state\ndata: {state[:-1]}, "steps": {newest}}}\n\n'
            elif now - told_at >= HEARTBEAT_S:
                text = ": still there\n\n"
            if text:
                told, told_at = state, now
                with anyio.move_on_after(self._limits.send_s) as scope:
                    await send(
                        {"type": "http.response.body", "body": text.encode(), "more_body": True}
                    )
                if scope.cancelled_caught:
                    return
            with anyio.move_on_after(self._interval_s):
                await self._closing.wait()
        await send({"type": "http.response.body", "body": b""})


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _keep(records: RecordStream, newest: deque[StepRecord]) -> None:
    async for record in records:
        newest.append(record)
