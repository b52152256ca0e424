"""A collective called by a plain function, on the device thread of its replica.

The thread hands the call to the event loop, which brings it to the rendezvous like any other, and
waits for the result. While it waits its lane serves other ops: a replica that waits for others
must not hold what those need, or two runs could hold each other's devices for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from functools import lru_cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ..devices import lend_lane, new_gate
from ..errors import ContextError
from ._collective import Collective

if TYPE_CHECKING:
    from ._meeting_point import MeetingPoint
    from ._seat import Seat
    from ._sync_group import Generation


@final
class CallSite(NamedTuple):
    """Where a call was made; can stand in for the frame, which would keep its variables alive."""

    f_code: CodeType
    f_lasti: int

    @staticmethod
    def of(frame: FrameType) -> CallSite:
        """Remember where a frame is now."""
        return CallSite(frame.f_code, frame.f_lasti)


def collective_named(kind: Callable[[str], Collective], name: str) -> Collective:
    """Return the one collective of a kind that tables show as `name`."""
    return _named(kind, name)


@lru_cache(maxsize=256)
def _named(kind: Callable[[str], Collective], name: str) -> Collective:
    return kind(name)


@final
class BridgedCall:
    """One call on its way from a device thread to the rendezvous and back.

    Args:
        point: Where the replicas meet.
        seat: The caller's.
        arrive: Makes the call and brings it to the rendezvous, on the event loop.
        loop: The event loop of the run.

    Cancellation:
        The end of the run wakes the thread with CancelledError. Cancelling only the await of the
        op does not: a started op runs to its end.
    """

    __slots__ = ("_arrive", "_error", "_gate", "_loop", "_point", "_result", "_seat")

    def __init__(
        self,
        point: MeetingPoint,
        seat: Seat,
        arrive: Callable[[], Generation],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._point = point
        self._seat = seat
        self._arrive = arrive
        self._loop = loop
        self._gate = new_gate(loop)
        self._result: Any = None
        self._error: BaseException | None = None

    def wait(self) -> Any:
        """Make the call and wait, in the calling thread."""
        with lend_lane():
            self._loop.call_soon_threadsafe(self._begin, context=copy_context())
            self._gate.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result

    def _begin(self) -> None:
        try:
            generation = self._arrive()
            self._point.watch(self._seat, generation, self._finish)
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the thread
            self._finish(None, error)

    def _finish(self, result: Any, error: BaseException | None) -> None:
        self._result, self._error = result, error
        self._gate.open()


def require_no_loop(name: str) -> None:
    """Check that the calling thread may wait.

    Raises:
        ContextError: If an event loop runs in it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ContextError(
        f"{name} was called on the event loop, which it would block. Call it in a plain function "
        "on a device, `await ctx.run_on_device(fn)`, or in a loss; on the loop use the awaitable "
        "collectives of ar.get_replica_context()."
    )
