"""Writing a variable from a device thread: the twins of `assign` that wait there."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any, final

from ..context import PLACE
from ..errors import ContextError

if TYPE_CHECKING:
    from ._variable import Variable


@final
class BlockingVariable:
    """A variable as functions on a device write it; got as `variable.blocking`.

    Every write returns when it has taken effect. ContextError elsewhere than on a device thread.
    """

    __slots__ = ("_variable",)

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def assign(self, value: Any) -> None:
        """Replace the value with the aggregate of what all replicas assign.

        Raises:
            ValueError: If the shape or dtype does not fit, or the variable has no aggregation.
            ContextError: If called elsewhere than on the replica's device thread, or if
                another strategy is in charge here.

        Cancellation:
            Leaves the old value or the new one, the same on all replicas.
        """
        self._write("assign", value, sys._getframe(1))

    def assign_add(self, value: Any) -> None:
        """Add to the value; otherwise as `assign`."""
        self._write("assign_add", value, sys._getframe(1))

    def assign_sub(self, value: Any) -> None:
        """Subtract from the value; otherwise as `assign`."""
        self._write("assign_sub", value, sys._getframe(1))

    def _write(self, verb: str, value: Any, frame: FrameType) -> None:
        variable, place = self._variable, PLACE.get()
        if place.replica is None:
            raise ContextError(
                f"variable.blocking.{verb} of {variable.name!r} was called in {place.describe()}. "
                f"It is for functions on a device; use `await variable.{verb}(value)` here."
            )
        variable.require_owner_in_charge(place)
        blocking = place.replica.blocking
        blocking.require_device_thread(verb)
        variable.write_in_replica(verb, variable.fitting(value), blocking, frame)

    def __repr__(self) -> str:
        return f"<BlockingVariable of {self._variable!r}>"
