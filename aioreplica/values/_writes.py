"""The writes of a variable, awaited or at once on a device thread, and what fits it."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from functools import lru_cache
from types import FrameType
from typing import Any, Generic, TypeVar

import numpy as np

from ..errors import ContextError
from ..tree import Array, DType
from ._indexed_slices import IndexedSlices, require_no_mask

R = TypeVar("R")


class Writes(ABC, Generic[R]):
    """Writing methods of a variable. Each returns the new value, as `value` gives it there.

    An on-read variable without aggregation that is written outside the replicas gives its first
    component.
    """

    __slots__ = ()

    @abstractmethod
    def _write(self, verb: str, value: object, frame: FrameType) -> R:
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
        return self._write("assign", value, sys._getframe(1))

    def assign_add(self, value: object) -> R:
        """Add to the value; otherwise as `assign`. IndexedSlices are added row by row."""
        return self._write("assign_add", value, sys._getframe(1))

    def assign_sub(self, value: object) -> R:
        """Subtract from the value; otherwise as `assign`. IndexedSlices likewise."""
        return self._write("assign_sub", value, sys._getframe(1))

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
        return self._write(verb, slices, frame)


@lru_cache(maxsize=16)
def _limits(dtype: DType) -> tuple[int, int]:
    found = np.iinfo(dtype)
    return int(found.min), int(found.max)


def fitting_array(value: Any, name: str, shape: tuple[int, ...], dtype: DType) -> Array:
    """Return `value` in the shape and dtype of the variable called `name`.

    Raises:
        ValueError: If the shape differs, the dtype would lose its kind (floats into integers), or
            a Python number does not fit, alone or in a list.
        TypeError: If it is a masked array.
        ContextError: If it is a value of a function that jax transforms.
    """
    if type(value) is not np.ndarray:
        require_no_mask(value, f"Assigning to variable {name!r}")
    try:
        array = np.asarray(value)
    except TypeError as error:
        jax = sys.modules.get("jax")
        if jax is None or not isinstance(value, jax.core.Tracer):
            raise
        raise ContextError(
            f"Variable {name!r} is assigned in a function that jax transforms, such as a branch "
            "of jax.lax.cond, the body of a loop or a loss that is differentiated, where there are "
            "no numbers. Return the value from that function (from a loss with has_aux=True), and "
            "assign it outside."
        ) from error
    if array.shape != shape:
        raise ValueError(
            f"Variable {name!r} has shape {shape}, cannot assign a value of shape {array.shape}."
        )
    same_kind = np.can_cast(array.dtype, dtype, "same_kind")
    is_int = isinstance(value, int) and dtype.kind in "iufc"
    if not same_kind and not is_int:
        raise ValueError(
            f"Variable {name!r} has dtype {dtype}, cannot assign a value of "
            f"dtype {array.dtype}. Cast it with .astype({str(dtype)!r}) first."
        )
    if dtype.kind in "iu" and isinstance(value, (int, list, tuple)) and array.size:
        first, last = _limits(dtype)
        if isinstance(value, int):
            least = most = int(value)
        else:
            least, most = int(array.min()), int(array.max())
        if least < first or most > last:
            raise ValueError(
                f"Variable {name!r} of dtype {dtype} holds {first} to "
                f"{last}, cannot assign {least if least < first else most}."
            )
    return array.astype(dtype, copy=False)
