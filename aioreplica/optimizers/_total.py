"""Totals: gradients summed over the replicas, and what is still to be done with them.

Dividing by weights and loss scale and clipping change every element by itself. They wait until the
rule reads the element, so that none of them needs a pass or an array of its own.
"""

from __future__ import annotations

import math
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
    """The gradient of one variable, summed over the replicas.

    Args:
        variable: Whose gradient it is.
        summed: An array of its shape, or IndexedSlices with unique ascending indices.
        divisor: What the sum is divided by: total weight, loss scale, number of replicas.

    Attributes:
        factor: What it is multiplied with after that, to bring its norm down.
        limit: Its elements are brought down to this magnitude, None leaves them.
        is_finite: Whether all elements that were checked are finite.
    """

    __slots__ = ("divisor", "factor", "is_finite", "limit", "summed", "values", "variable")

    def __init__(self, variable: Variable, summed: Any, divisor: float) -> None:
        self.variable = variable
        self.summed = summed
        rows = summed.values if isinstance(summed, IndexedSlices) else summed
        self.values: Array = rows.reshape(-1)
        self.divisor = divisor
        self.factor = 1.0
        self.limit: float | None = None
        self.is_finite = True

    @property
    def is_sparse(self) -> bool:
        """Whether it has some rows of the variable only."""
        return isinstance(self.summed, IndexedSlices)

    @property
    def needs_work(self) -> bool:
        """Whether the sum is not the gradient yet."""
        return self.divisor != 1.0 or self.factor != 1.0 or self.limit is not None

    def check(self, part: Array) -> None:
        """Note whether some elements of the sum are finite."""
        if not math.isfinite(np.add.reduce(part)) and not np.isfinite(part).all():
            self.is_finite = False  # only ever set to False, so any thread may

    def ready(self, part: Array, out: Array) -> Array:
        """Turn some elements of the sum into those of the gradient, in `out`."""
        if self.divisor != 1.0:
            part = np.divide(part, self.divisor, out=out)
        if self.limit is not None:
            part = np.clip(part, -self.limit, self.limit, out=out)
        if self.factor != 1.0:
            part = np.multiply(part, self.factor, out=out)
        return part

    def dense(self) -> Array:
        """Return the gradient as a new array of the variable's shape, checked; read-only."""
        whole = self.summed.to_dense() if isinstance(self.summed, IndexedSlices) else self.summed
        with np.errstate(over="ignore", invalid="ignore"):
            self.check(self.values)
            result: Array = self.ready(whole, np.empty_like(whole)) if self.needs_work else whole
        result = result.view()
        result.flags.writeable = False
        return result

    def squares(self) -> float:
        """Check all elements; return the sum of the squares of the gradient before clipping.

        Determinism:
            In parts of a fixed size, one after the other, whatever runs beside it.
        """
        total = 0.0
        scratch = np.empty(min(MEASURED, self.values.size), self.values.dtype)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            for begin in range(0, self.values.size, MEASURED):
                part = self.values[begin : begin + MEASURED]
                self.check(part)
                total += _sum_of_squares(part, scratch[: part.size], self.divisor)
        return total

    def __repr__(self) -> str:
        kind = "sparse" if self.is_sparse else "dense"
        return f"<Total of {self.variable.name} | {kind}, divided by {self.divisor:g}>"


def _sum_of_squares(part: Array, scratch: Array, divisor: float) -> float:
    small = np.divide(part, divisor, out=scratch)
    found = float(np.add.reduce(np.multiply(small, small, out=scratch)))
    if math.isfinite(found) and found > 1e-30:
        return found
    wide = part.astype(np.float64) / divisor  # the squares left the range of a narrow dtype
    return float(np.add.reduce(wide * wide))
