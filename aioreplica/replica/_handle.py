"""The handle of a collective that was started and goes on by itself."""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import TYPE_CHECKING, Any, final

from ..context import PLACE, Place
from ..errors import ContextError

if TYPE_CHECKING:
    from ._call import Call
    from ._meeting_point import MeetingPoint
    from ._seat import Seat
    from ._sync_group import Generation


@final
class Handle(Awaitable[Any]):
    """A reduction in flight; `await handle` gives its result, as often as wanted.

    Got from `ctx.start_all_reduce`. Several may be in flight and be awaited in any order. The
    arrays that were passed must not be written before the handle has been awaited.

    Cancellation:
        A cancelled await gives up nothing: the value was handed over when the reduction was
        started, so the other replicas get theirs, and the handle can be awaited again. A handle
        that nobody awaits is a RuntimeWarning at the end of the run, naming the call.
    """

    __slots__ = ("_call", "_generation", "_place", "_point", "_seat")

    def __init__(
        self, point: MeetingPoint, seat: Seat, call: Call, generation: Generation, place: Place
    ) -> None:
        self._point = point
        self._seat = seat
        self._call = call
        self._generation = generation
        self._place = place

    def done(self) -> bool:
        """Tell whether awaiting would not have to wait."""
        waiter = self._generation.waiter
        return waiter is not None and waiter.done()

    def cancel(self) -> None:
        """Give up the result, so that no warning says it is lost; the reduction goes on."""
        self._seat.started.pop(self._call, None)

    def __await__(self) -> Generator[Any, Any, Any]:
        if PLACE.get() is not self._place or self._seat.work_is_over:
            raise ContextError(
                f"The handle of {self._call.describe()}, started at {self._call.site}, was awaited "
                f"in {PLACE.get().describe()}. Await it in the step of the replica that started it."
            )
        waiting = self._point.wait_for_started(self._seat, self._call, self._generation)
        return waiting.__await__()

    def __repr__(self) -> str:
        state = "done" if self.done() else "in flight"
        return f"<Handle of {self._call.describe()} | {state}>"
