"""The completion queue: finished ops of all lanes reach one event loop in few wake-ups."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from time import perf_counter
from typing import Protocol, final
from weakref import WeakValueDictionary

from ..context import REGISTRY
from ._loop import running_loop

BATCH = 128  # bounds how long one wake-up keeps the loop from its other callbacks


class Completion(Protocol):
    """Message of a thread to the event loop, such as an op that has ended."""

    def resolve(self) -> None:
        """Wake those who wait for it; called once, on the event loop."""


@final
class CompletionQueue:
    """Carries finished ops from lane threads to one event loop, first in, first out.

    Attributes:
        loop: The event loop.
        add: Queues a finished op, from any thread; `wake` must follow.
        is_armed: Whether a wake-up is on its way.
        lag_s: How long the loop took to answer the last wake-up, in seconds; None before one.
        max_lag_s: The longest it ever took.

    Invariants:
        * `is_armed` is cleared before the queue is emptied, so a completion appended by a thread
          that saw it set is always seen by the wake-up on its way.
        * What a thread queued while an op ran is delivered before that op's completion.
    """

    __slots__ = (
        "__weakref__",
        "_armed_at",
        "_queue",
        "add",
        "is_armed",
        "lag_s",
        "loop",
        "max_lag_s",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._queue: deque[Completion] = deque()
        self.add: Callable[[Completion], None] = self._queue.append
        self.is_armed = False
        self._armed_at = 0.0
        self.lag_s: float | None = None
        self.max_lag_s = 0.0

    @staticmethod
    def of_running_loop() -> CompletionQueue:
        """Return the queue of the running loop, making it at its first use.

        Raises:
            ContextError: If no asyncio event loop is running here.
        """
        loop = running_loop("A device op")
        queues = REGISTRY.once("completion_queues", _new_queues)
        queue = queues.get(id(loop))
        if queue is None or queue.loop is not loop:
            queue = queues[id(loop)] = CompletionQueue(loop)
        return queue

    def wake(self) -> None:
        """Wake the loop if no wake-up is on its way.

        Apart from `add`, so that a lane thread can forget the op in between: one that still held
        it while the loop goes on would keep the op's result from being used again.
        """
        if self.is_armed:
            return
        self.is_armed = True
        self._armed_at = perf_counter()
        try:
            self.loop.call_soon_threadsafe(self._deliver_batch)
        except RuntimeError:  # the loop is closed, and with it all who could wait
            self._queue.clear()
            self.is_armed = False

    def call_soon(self, fn: Callable[[], object]) -> None:
        """Call `fn` on the event loop, from any thread, with the caller's context variables.

        Calls are made in the order of `call_soon`. Those made by a thread while an op runs come
        before the delivery of that op's completion, which `loop.call_soon_threadsafe` does not
        promise: a wake-up for another op may be on its way already. What `fn` raises goes to the
        loop's exception handler.
        """
        self._queue.append(_Call(self.loop, fn))
        self.wake()

    def deliver(self) -> None:
        """Deliver everything in the queue now; on the event loop."""
        while self._queue:
            self._queue.popleft().resolve()

    def _deliver_batch(self) -> None:
        self.lag_s = lag_s = perf_counter() - self._armed_at
        self.max_lag_s = max(self.max_lag_s, lag_s)
        self.is_armed = False
        queue = self._queue
        try:
            for _ in range(BATCH):
                if not queue:
                    return
                queue.popleft().resolve()
        finally:
            if queue and not self.is_armed:
                self.is_armed = True
                self._armed_at = perf_counter()
                self.loop.call_soon(self._deliver_batch)


@final
class _Call:
    """A function to be called on the event loop, in its place among the completions."""

    __slots__ = ("_context", "_fn", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, fn: Callable[[], object]) -> None:
        self._loop = loop
        self._fn = fn
        self._context = copy_context()

    def resolve(self) -> None:
        try:
            self._context.run(self._fn)
        except Exception as error:  # noqa: BLE001 - handled as asyncio does for its callbacks
            self._loop.call_exception_handler(
                {"message": f"Exception in callback {self._fn!r}", "exception": error}
            )


def _new_queues() -> WeakValueDictionary[int, CompletionQueue]:
    """Queues by the id of their loop; their users keep them, so that a closed loop can go."""
    return WeakValueDictionary()
