"""Which ops of a run are in flight, so that the run ends after them, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from ..errors import ContextError
from ._drain import wait_shielded

if TYPE_CHECKING:
    from ._op import Op


@final
class OpTracker:
    """Counts ops from the moment they are put on a lane until they are done or withdrawn.

    Attributes:
        pending: Ops in flight, as the keys.
        num_done: Ops that have ended, a sign of progress.
    """

    __slots__ = ("_is_closed", "_waiter", "num_done", "pending")

    def __init__(self) -> None:
        self.pending: dict[Op[Any], None] = {}  # ordered: a set is walked by address
        self.num_done = 0
        self._is_closed = False
        self._waiter: asyncio.Future[None] | None = None

    def add(self, op: Op[Any]) -> None:
        """Take note that an op is about to be put on its lane.

        Raises:
            ContextError: If the run has ended.
        """
        if self._is_closed:
            raise ContextError(
                "A device op was awaited after the run that it was made in. Await it in its step."
            )
        self.pending[op] = None

    def close(self) -> None:
        """Refuse ops from now on: the run has ended."""
        self._is_closed = True

    def done(self, op: Op[Any]) -> None:
        """Take note that an op has ended or was withdrawn; on the event loop."""
        self.pending.pop(op, None)
        self.num_done += 1
        if not self.pending and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def withdraw_queued(self) -> None:
        """Take back every op that has not started."""
        for op in tuple(self.pending):
            if op.withdraw():
                op.cancel()

    async def drain(self, on_cancel: Callable[[asyncio.CancelledError], None]) -> bool:
        """Wait until no op is in flight; False if the interpreter is interrupted.

        Cancellation:
            Handed to `on_cancel`, see `wait_shielded`.
        """
        self.withdraw_queued()
        return await wait_shielded(lambda: not self.pending, self._new_waiter, on_cancel)

    def _new_waiter(self) -> asyncio.Future[None]:
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter
