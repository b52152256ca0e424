"""Totals: gradients summed over the replicas, and what is still to be done with them.

Adding up the replicas' parts, dividing by weights and loss scale, and clipping treat every element
by itself. They wait until the rule reads the element, so that none of them needs a pass or an
array of its own. Elements are checked when they are divided: dividing can overflow, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..values import IndexedSlices, Variable

Array = npt.NDArray[Any]

MEASURED = 32 * 1024
"""Elements whose squares are added up at a time. It is part of the result: partial sums depend on
where they are cut."""


@final
class Total:
    """The gradient of one variable over all replicas.

    Args:
        variable: Whose gradient it is.
        parts: What is to be summed, in this order: arrays of its shape that lie in rows, or one
            IndexedSlices with unique ascending indices.
        divisor: What the sum is divided by: total weight, loss scale, number of replicas.

    Attributes:
        factor: What it is multiplied with after that, to bring its norm down.
        limit: Its elements are brought down to this magnitude, None leaves them.
        is_finite: Whether all elements that were checked are finite.
        size: How many elements it has.
        num_bytes: How much has to be read to know them all.
    """

    __slots__ = (
        "_flat", "_parts", "divisor", "factor", "is_finite", "limit", "num_bytes", "size",
        "variable",
    )  # fmt: skip

    def __init__(self, variable: Variable, parts: Sequence[Any], divisor: float) -> None:
        self.variable = variable
        self._parts = parts
        rows = [part.values if isinstance(part, IndexedSlices) else part for part in parts]
        self._flat: list[Array] = [row.reshape(-1) for row in rows]
        self.size: int = self._flat[0].size
        self.num_bytes: int = self._flat[0].nbytes * len(parts)
        self.divisor = divisor
        self.factor = 1.0
        self.limit: float | None = None
        self.is_finite = True

    @property
    def is_sparse(self) -> bool:
        """Whether it has some rows of the variable only."""
        return isinstance(self._parts[0], IndexedSlices)

    @property
    def needs_work(self) -> bool:
        """Whether the sum is not the gradient yet."""
        return self.divisor != 1.0 or self.factor != 1.0 or self.limit is not None

    @property
    def summed(self) -> Any:
        """The sum as a whole, an array of the variable's shape or IndexedSlices."""
        first, *others = self._parts
        if others:
            with quiet():
                for other in others:
                    first = np.add(first, other)
        return first

    @property
    def unscaled(self) -> Any:
        """The sum divided, as a whole: what has to be finite."""
        whole = self.summed
        if self.divisor == 1.0:
            return whole
        rows = whole.values if isinstance(whole, IndexedSlices) else whole
        with quiet():
            rows = _divided(rows, self.divisor, np.empty_like(rows))
        if isinstance(whole, IndexedSlices):
            return IndexedSlices(rows, whole.indices, whole.dense_shape)
        return rows

    def gradient(self, start: int, stop: int, out: Array, scratch: Array) -> Array:
        """Return some elements of the gradient, checked.

        Args:
            start: First element, counted in C order.
            stop: One past the last.
            out: Memory for them, which the result may or may not be.
            scratch: As much memory, free again afterwards.
        """
        first, *others = self._flat
        part = first[start:stop]
        for other in others:
            part = np.add(part, other[start:stop], out=out)
        return self._ready(part, out, scratch.view(np.bool_)[: part.size])

    def rows(self, begin: int, end: int) -> Total:
        """Return some rows of a sparse one, as a total that is treated likewise."""
        width = max(1, self.size // max(1, len(self._parts[0].indices)))
        some = Total(self.variable, [self._flat[0][begin * width : end * width]], self.divisor)
        some.factor, some.limit = self.factor, self.limit
        return some

    def dense(self) -> Array:
        """Return the gradient as a new array of the variable's shape, checked; read-only."""
        whole = self.summed
        if isinstance(whole, IndexedSlices):
            whole = whole.to_dense()
        with quiet():
            out = np.empty_like(whole) if self.needs_work else whole
            result = self._ready(whole, out).view()
        result.flags.writeable = False
        return result

    def squares(self) -> float:
        """Check all elements; return the sum of the squares of the gradient before clipping.

        Determinism:
            In parts of a fixed size, one after the other, whatever runs beside it.
        """
        total = 0.0
        [values] = self._flat  # what is measured was summed before
        scratch = np.empty(min(MEASURED, self.size), values.dtype)
        with quiet():
            for begin in range(0, self.size, MEASURED):
                part = values[begin : begin + MEASURED]
                found = _sum_of_squares(_divided(part, self.divisor, scratch[: part.size]))
                if found is None:
                    self._check(_divided(part, self.divisor, scratch[: part.size]))
                    wide = part.astype(np.float64) / self.divisor
                    found = float(np.add.reduce(wide * wide))
                total += found
        return total

    def _check(self, part: Array, mask: npt.NDArray[np.bool_] | None = None) -> None:
        """Note whether some elements are finite; `mask` is memory for that."""
        if not np.isfinite(part, out=mask).all():
            self.is_finite = False  # only ever set to False, so any thread may

    def _ready(self, part: Array, out: Array, mask: npt.NDArray[np.bool_] | None = None) -> Array:
        """Turn some elements of the sum into those of the gradient, checked, perhaps in `out`."""
        if self.divisor != 1.0:
            part = _divided(part, self.divisor, out)
        self._check(part, mask)
        if self.limit is not None:
            part = np.clip(part, -self.limit, self.limit, out=out)
        if self.factor != 1.0:
            part = np.multiply(part, self.factor, out=out)
        return part

    def __repr__(self) -> str:
        kind = "sparse" if self.is_sparse else "dense"
        return f"<Total of {self.variable.name} | {kind}, divided by {self.divisor:g}>"


def quiet() -> np.errstate:
    """Keep NumPy from warning of what is not finite or 0: a step checks that by itself."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore")


def _divided(part: Array, divisor: float, out: Array) -> Array:
    """Divide; by a power of two with a multiplication, which is faster and has the same bits."""
    if part.dtype == np.float16:  # a divisor above 65504 would be infinite, its inverse 0
        return np.divide(part, divisor, out=out, dtype=np.float32, casting="same_kind")
    if math.frexp(divisor)[0] == 0.5 and 2.0**-100 < divisor < 2.0**100:
        return np.multiply(part, 1.0 / divisor, out=out)
    return np.divide(part, divisor, out=out)


def _sum_of_squares(part: Array) -> float | None:
    """Square elements in place and add them up; None if that left the range of their dtype."""
    if part.dtype == np.float16:
        return None
    found = float(np.add.reduce(np.multiply(part, part, out=part)))
    return found if math.isfinite(found) and found > 1e-30 else None
