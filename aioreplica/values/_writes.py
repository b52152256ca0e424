"""The writes of a variable: awaited, or carried out at once on a device thread."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from ..context import PLACE
from ..errors import ContextError
from ._indexed_slices import Array, IndexedSlices
from ._store import Done

if TYPE_CHECKING:
    from ._variable import Variable

R = TypeVar("R")


class Writes(ABC, Generic[R]):
    """Writing methods of a variable. Each returns the new value, as `value` gives it there.

    An on-read variable without aggregation that is written outside the replicas gives its first
    component.
    """

    __slots__ = ()

    @abstractmethod
    def write(self, verb: str, value: object, frame: FrameType) -> R:
        """Carry out a write, called at `frame`."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name, for errors."""

    def assign(self, value: object) -> R:
        """Replace the value; in a replica, with the aggregate of what all replicas assign.

        Raises:
            ValueError: If the shape or dtype does not fit; or, inside a replica, if the variable
                has no aggregation.
            ContextError: If another strategy is in charge here, or if a blocking write is called
                elsewhere than on the replica's device thread.

        Cancellation:
            Leaves the old value or the new one, the same on all replicas.
        """
        return self.write("assign", value, sys._getframe(1))

    def assign_add(self, value: object) -> R:
        """Add to the value; otherwise as `assign`. IndexedSlices are added row by row."""
        return self.write("assign_add", value, sys._getframe(1))

    def assign_sub(self, value: object) -> R:
        """Subtract from the value; otherwise as `assign`. IndexedSlices likewise."""
        return self.write("assign_sub", value, sys._getframe(1))

    def scatter_update(self, slices: IndexedSlices) -> R:
        """Replace rows; of several for one index the last one counts.

        Raises:
            TypeError: If `slices` are not IndexedSlices.
            ValueError: If they do not fit; or, inside a replica, unless the aggregation is
                "only_first_replica" or the variable is on-read.
            ContextError: As `assign`.

        Cancellation:
            As `assign`.

        Source:
            tf.Variable.scatter_update.
        """
        return self._scatter("scatter_update", slices, sys._getframe(1))

    def scatter_min(self, slices: IndexedSlices) -> R:
        """Replace rows by the minimum of theirs and the given ones; as `scatter_update`."""
        return self._scatter("scatter_min", slices, sys._getframe(1))

    def scatter_max(self, slices: IndexedSlices) -> R:
        """Replace rows by the maximum of theirs and the given ones; as `scatter_update`."""
        return self._scatter("scatter_max", slices, sys._getframe(1))

    def scatter_mul(self, slices: IndexedSlices) -> R:
        """Multiply rows by the given ones; as `scatter_update`."""
        return self._scatter("scatter_mul", slices, sys._getframe(1))

    def scatter_div(self, slices: IndexedSlices) -> R:
        """Divide rows by the given ones; as `scatter_update`."""
        return self._scatter("scatter_div", slices, sys._getframe(1))

    def _scatter(self, verb: str, slices: object, frame: FrameType) -> R:
        if not isinstance(slices, IndexedSlices):
            raise TypeError(
                f"{verb} of variable {self.name!r} takes ar.IndexedSlices, got {slices!r} "
                f"({type(slices).__name__})."
            )
        return self.write(verb, slices, frame)


@final
class BlockingVariable(Writes[Array]):
    """A variable as functions on a device write it; got as `variable.blocking`.

    Every write returns when it has taken effect. ContextError elsewhere than on a device thread.
    """

    __slots__ = ("_variable",)

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    @property
    def name(self) -> str:
        """Name of the variable."""
        return self._variable.name

    def write(self, verb: str, value: object, frame: FrameType) -> Array:
        """Carry out a write, called at `frame`."""
        variable, place = self._variable, PLACE.get()
        if place.replica is None:
            raise ContextError(
                f"variable.blocking.{verb} of {variable.name!r} was called in {place.describe()}. "
                f"It is for functions on a device; use `await variable.{verb}(value)` here."
            )
        variable.require_owner_in_charge(place)
        blocking = place.replica.blocking
        blocking.require_device_thread(verb)
        written: Any = variable.write_in_replica(verb, variable.fitting(value), blocking, frame)
        new: Array = written.result if isinstance(written, Done) else written  # it has waited
        return new

    def __repr__(self) -> str:
        return f"<BlockingVariable of {self._variable!r}>"
