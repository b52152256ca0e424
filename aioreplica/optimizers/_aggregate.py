"""Aggregation: the gradients of all replicas, to be summed in one go or as they are read."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ..collectives import INLINE_SUM_BYTES, Reducer, leaf_bytes
from ..typing import ReduceOp
from ..values import IndexedSlices, Variable, Weighted
from ._total import Total, quiet

Array = npt.NDArray[Any]
Column: TypeAlias = Sequence[Any]
"""The parts of one gradient, one per replica in their order: arrays, IndexedSlices, or all of them
`Weighted`. One part where there are several replicas is the total already."""

_WIDE = (np.dtype(np.float32), np.dtype(np.float64))


@final
class Aggregation:
    """The merged gradients of one step, on their way to one gradient for each variable.

    Args:
        columns: One per variable. Parts are summed; the totals and weights of Weighted ones are
            summed apart and divided once.
        variables: Theirs.
        scales: What each replica's loss was multiplied with; None without a loss scale.
        is_mean: Whether gradients without weights are averaged over the replicas.

    Invariants:
        * A part of weight 0 contributes nothing, whatever its total holds.

    Raises:
        ValueError: If all weights of a gradient are 0.
        TypeError: If a gradient is sparse on one replica and dense on another.
    """

    __slots__ = ("_divisors", "members", "rows", "variables")

    def __init__(
        self,
        columns: Sequence[Column],
        variables: Sequence[Variable],
        scales: Sequence[float] | None,
        *,
        is_mean: bool,
    ) -> None:
        self.variables = variables
        scale = 1.0 if scales is None else scales[0]
        self._divisors: list[float] = []
        parts: list[Column] = []
        weights: list[Sequence[float] | None] = []
        for variable, column in zip(variables, columns, strict=True):
            found = None
            if type(column[0]) is Weighted:
                found = [part.weight for part in column]
                column = [part.total for part in column]  # noqa: PLW2901 - what it stands for
                divisor = _sum_of(variable, found)
            else:
                divisor = float(len(column)) if is_mean else 1.0
            _require_one_kind(variable, column)
            weights.append(found)
            parts.append(column)
            self._divisors.append(divisor * scale)
        if scales is not None and any(each != scale for each in scales):
            parts = [_at_one_scale(column, scales) for column in parts]
        self.members: list[int]
        self.rows: list[list[Any]]
        self._arrange(parts, weights)

    def _arrange(
        self, columns: Sequence[Column], weights: Sequence[Sequence[float] | None]
    ) -> None:
        """Turn columns into rows, with zeros for what does not count."""
        count = max(map(len, columns))
        is_full = all(len(column) == count for column in columns)
        if is_full and all(found is None or all(found) for found in weights):
            self.members = list(range(count))
            self.rows = [list(row) for row in zip(*columns, strict=True)]
            return
        self.members = [i for i in range(count) if any(_counts(found, i) for found in weights)]
        pairs = list(zip(columns, weights, strict=True))
        self.rows = [[_part(column, w, i) for column, w in pairs] for i in self.members]

    @property
    def num_bytes(self) -> int:
        """How many bytes of gradients there are."""
        return sum(leaf_bytes(leaf) for row in self.rows for leaf in row)

    def can_wait(self, reducer: Reducer | None) -> bool:
        """Tell whether the sums can be left to whoever reads them, with the same bits."""
        if reducer is not None and reducer.options.compression is not None:
            return False
        return all(
            type(leaf) is np.ndarray and leaf.dtype in _WIDE and leaf.flags.c_contiguous
            for row in self.rows
            for leaf in row
        )

    def takes_long(self, reducer: Reducer | None) -> bool:
        """Tell whether to sum the rows off the event loop."""
        if reducer is None:
            return False
        return reducer.options.compression is not None or self.num_bytes > INLINE_SUM_BYTES

    def unsummed(self) -> list[Total]:
        """Return totals that sum their parts as they are read."""
        return self._totals(list(zip(*self.rows, strict=True)))

    def reduce(
        self, reducer: Reducer | None, *, is_blocking: bool = False
    ) -> list[Any] | Awaitable[list[Any]]:
        """Sum the rows; None as the reducer is for one row only.

        Args:
            reducer: Does the work.
            is_blocking: Whether to do all of it in the calling thread.

        Determinism:
            In ascending replica id: bitwise reproducible.
        """
        [first, *others] = self.rows
        is_coded = reducer is not None and reducer.options.compression is not None
        if reducer is None or (not others and not is_coded):
            return [_alone(leaf) for leaf in first]
        signature = None
        if all(type(leaf) is np.ndarray for leaf in first):
            signature = ([leaf.dtype for leaf in first], [leaf.shape for leaf in first])
        method = reducer.reduce_here if is_blocking else reducer.reduce
        with quiet():
            return method(ReduceOp.SUM, self.rows, members=self.members, signature=signature)

    def totals(self, reduced: Sequence[Any]) -> list[Total]:
        """Put the sums together with what they are to be divided by."""
        return self._totals([[summed] for summed in reduced])

    def _totals(self, columns: Sequence[Column]) -> list[Total]:
        return list(map(Total, self.variables, columns, self._divisors))

    def __repr__(self) -> str:
        return f"<Aggregation | {len(self.variables)} gradients of {len(self.members)} replicas>"


def _sum_of(variable: Variable, weights: Sequence[float]) -> float:
    total = 0.0
    for weight in weights:
        total += weight
    if total == 0:
        raise ValueError(
            f"The gradient of {variable.name!r} has total weight 0: the replicas brought weights "
            f"{list(weights)}, so there is no mean over any example. Leave out steps whose global "
            "batch is empty."
        )
    return total


def _require_one_kind(variable: Variable, column: Column) -> None:
    ids: dict[bool, list[int]] = {True: [], False: []}
    for replica_id, part in enumerate(column):
        ids[type(part) is IndexedSlices].append(replica_id)
    if ids[True] and ids[False]:
        raise TypeError(
            f"The gradient of {variable.name!r} is an IndexedSlices on replicas {ids[True]} and an "
            f"array on replicas {ids[False]}. Bring one kind everywhere; `.to_dense()` makes an "
            "array of the first."
        )


def _at_one_scale(column: Column, scales: Sequence[float]) -> Column:
    """Bring parts to the scale of the first: another run changed it while this one was on."""
    pairs = zip(column, scales, strict=True)
    with quiet():
        return [_times(part, scales[0] / scale) for part, scale in pairs]


def _times(part: Any, factor: float) -> Any:
    if isinstance(part, IndexedSlices):
        return IndexedSlices(part.values * factor, part.indices, part.dense_shape)
    return np.asarray(part * factor)


def _counts(weights: Sequence[float] | None, index: int) -> bool:
    return weights is None or (index < len(weights) and weights[index] != 0)


def _part(column: Column, weights: Sequence[float] | None, index: int) -> Any:
    """Return one replica's part, or zeros: what has one component only is a total already."""
    if index < len(column) and _counts(weights, index):
        return column[index]
    part = column[0]
    if isinstance(part, IndexedSlices):
        return IndexedSlices(part.values[:0], part.indices[:0], part.dense_shape)
    return np.broadcast_to(np.zeros((), part.dtype), part.shape)


def _alone(leaf: Any) -> Any:
    if isinstance(leaf, IndexedSlices):
        return leaf.combined()
    return leaf if leaf.flags.c_contiguous else np.ascontiguousarray(leaf)
