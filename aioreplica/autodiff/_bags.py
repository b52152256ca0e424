"""Bags of rows: how many rows of a table become one, and how a gradient goes back to them."""

from __future__ import annotations

from typing import Literal, TypeAlias, final, get_args

import numpy as np
import numpy.typing as npt

from ..devices.backends import backend_of
from ..tree import Array
from ..values import IndexedSlices, Variable

Combiner: TypeAlias = Literal["sum", "mean", "sqrtn"]


@final
class Bags:
    """Rows that are summed up bag by bag, each times a factor.

    Args:
        variable: The table.
        indices: Of its rows, checked.
        segments: The bag of each.
        weights: The factor of each; None for ones.
        num_segments: How many bags there are; None for one more than the last that has a row.
        combiner: What a sum is divided by: 1, the weights, or the root of their squares.

    Raises:
        ValueError: If a length or a number is wrong, or a bag would be divided by 0.
        TypeError: If segments are not integers, or weights not numbers, or a table of integers is
            weighted.
    """

    def __init__(
        self,
        variable: Variable,
        indices: npt.NDArray[np.intp],
        segments: object,
        weights: object,
        num_segments: int | None,
        combiner: str,
    ) -> None:
        if combiner not in get_args(Combiner):
            raise ValueError(f'combiner must be "sum", "mean" or "sqrtn", got {combiner!r}.')
        if (combiner != "sum" or weights is not None) and np.dtype(variable.dtype).kind in "biu":
            raise TypeError(
                f"{variable.name!r} is of dtype {variable.dtype}, which has no fractions: weights "
                f'and "{combiner}" need a table of floats. Use combiner="sum" without weights.'
            )
        self.indices = indices
        self.segments, self.size = _checked_segments(indices, segments, num_segments)
        factors = _checked_weights(indices, weights)
        if combiner != "sum" and indices.size:
            terms = factors if combiner == "mean" else factors**2
            sums = np.bincount(self.segments, terms, self.size)
            empty = np.flatnonzero(sums[self.segments] == 0)
            if empty.size:
                raise ValueError(
                    f"The weights of segment {self.segments[empty[0]]} add up to 0, so "
                    f'"{combiner}" would divide by it. Leave it out, or use combiner="sum".'
                )
            factors = factors / (sums if combiner == "mean" else np.sqrt(sums))[self.segments]
        self._factors = factors.reshape(-1, *(1,) * (len(variable.shape) - 1))
        self._shape = variable.shape

    def combined(self, rows: Array) -> Array:
        """Add up rows, in order of the indices."""
        found = np.zeros((self.size, *rows.shape[1:]), rows.dtype)
        if rows.size:
            order = np.argsort(self.segments, kind="stable")
            segments, starts = np.unique(self.segments[order], return_index=True)
            parts = (rows * self._factors.astype(rows.dtype))[order]
            found[segments] = np.add.reduceat(parts, starts, axis=0, dtype=rows.dtype)
        return found

    def slices(self, gradient: Array) -> IndexedSlices:
        """Return the gradient of the rows, from that of the bags."""
        parts = gradient[self.segments] * self._factors.astype(gradient.dtype)
        return IndexedSlices(parts, self.indices, self._shape)

    def __repr__(self) -> str:
        return f"<Bags | {self.indices.size} rows in {self.size} bags>"


def _checked_segments(
    indices: npt.NDArray[np.intp], segments: object, num_segments: int | None
) -> tuple[npt.NDArray[np.intp], int]:
    found = np.asarray(backend_of(segments).get(segments))
    if found.size == 0 and isinstance(segments, (list, tuple)):
        found = found.astype(np.intp)
    if found.dtype.kind not in "iu":
        raise TypeError(f"Segments are integers, got dtype {found.dtype}.")
    if indices.ndim != 1 or found.shape != indices.shape:
        raise ValueError(
            "embedding_lookup_sparse takes one segment per index, both with one axis; got indices "
            f"of shape {indices.shape} and segments of shape {found.shape}."
        )
    low, high = (int(found.min()), int(found.max())) if found.size else (0, -1)
    size = high + 1 if num_segments is None else num_segments
    if low < 0 or high >= size:
        raise ValueError(
            f"Segment {low if low < 0 else high} is out of range: there are {size} segments, "
            "from 0."
        )
    return found.astype(np.intp), size


def _checked_weights(indices: npt.NDArray[np.intp], weights: object) -> Array:
    if weights is None:
        return np.ones(indices.shape)
    found = np.asarray(backend_of(weights).get(weights))
    if found.dtype.kind not in "fiub":
        raise TypeError(
            f"Weights of embedding_lookup_sparse are numbers, got dtype {found.dtype}. They are "
            "not differentiated: multiply the rows of embedding_lookup where they have to be."
        )
    if found.shape != indices.shape:
        raise ValueError(
            f"There is one weight per index, got {found.shape} weights for {indices.shape} indices."
        )
    return found.astype(np.float64)
