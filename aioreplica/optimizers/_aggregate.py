"""Aggregation: the gradients of all replicas as rows of leaves, reduced in one go."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..collectives import Reducer, leaf_bytes
from ..typing import ReduceOp
from ..values import DistributedValues, IndexedSlices, Variable, Weighted
from ._total import Total

Array = npt.NDArray[Any]


@final
class Aggregation:
    """The merged gradients of one step, on their way to one gradient for each variable.

    Args:
        gradients: One per variable, as a merge regroups them: PerReplica values, which are summed,
            or a Weighted of two, whose totals and weights are summed apart and divided once. A
            plain value counts as that of one replica.
        variables: Theirs.
        scales: What each replica's loss was multiplied with; None without a loss scale.
        is_mean: Whether gradients without weights are averaged over the replicas.

    Invariants:
        * A part of weight 0 contributes nothing, whatever its total holds.

    Raises:
        ValueError: If all weights of a gradient are 0.
        TypeError: If a gradient is sparse on one replica and dense on another.
    """

    __slots__ = ("_scale", "_weights", "members", "rows", "variables")

    def __init__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Variable],
        scales: Sequence[float] | None,
        *,
        is_mean: bool,
    ) -> None:
        self.variables = variables
        columns = [_components(_total_of(gradient)) for gradient in gradients]
        weights = [_weights_of(gradient) for gradient in gradients]
        count = max(map(len, columns))
        for variable, column in zip(variables, columns, strict=True):
            _require_one_kind(variable, column)
        self._scale = 1.0 if scales is None else scales[0]
        if scales is not None and any(scale != self._scale for scale in scales):
            columns = [_at_one_scale(column, scales) for column in columns]
        self._weights = [
            _sum_of(variable, found)
            if found is not None
            else float(len(column))
            if is_mean
            else 1.0
            for variable, column, found in zip(variables, columns, weights, strict=True)
        ]
        self.members = [i for i in range(count) if any(_counts(w, i) for w in weights)]
        self.rows = [
            [_part(column, w, i) for column, w in zip(columns, weights, strict=True)]
            for i in self.members
        ]

    @property
    def num_bytes(self) -> int:
        """How many bytes of gradients there are."""
        return sum(leaf_bytes(leaf) for row in self.rows for leaf in row)

    def reduce(self, reducer: Reducer | None) -> list[Any] | Awaitable[list[Any]]:
        """Sum the rows; None as the reducer is for one row only.

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
        return reducer.reduce(ReduceOp.SUM, self.rows, members=self.members, signature=signature)

    def totals(self, reduced: Sequence[Any]) -> list[Total]:
        """Put the sums together with what they are to be divided by."""
        return [
            Total(variable, summed, weight * self._scale)
            for variable, summed, weight in zip(self.variables, reduced, self._weights, strict=True)
        ]

    def __repr__(self) -> str:
        return f"<Aggregation | {len(self.variables)} gradients of {len(self.members)} replicas>"


def _total_of(gradient: Any) -> Any:
    return gradient.total if isinstance(gradient, Weighted) else gradient


def _weights_of(gradient: Any) -> tuple[float, ...] | None:
    return _components(gradient.weight) if isinstance(gradient, Weighted) else None


def _components(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, DistributedValues):
        return leaf.values[:1] if leaf.is_mirrored else leaf.values
    return (leaf,)


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


def _require_one_kind(variable: Variable, column: Sequence[Any]) -> None:
    sparse = [isinstance(part, IndexedSlices) for part in column]
    if any(sparse) and not all(sparse):
        ids = {True: [], False: []}  # type: dict[bool, list[int]]
        for replica_id, is_sparse in enumerate(sparse):
            ids[is_sparse].append(replica_id)
        raise TypeError(
            f"The gradient of {variable.name!r} is an IndexedSlices on replicas {ids[True]} and an "
            f"array on replicas {ids[False]}. Bring one kind everywhere; `.to_dense()` makes an "
            "array of the first."
        )


def _at_one_scale(column: Sequence[Any], scales: Sequence[float]) -> tuple[Any, ...]:
    """Bring parts to the scale of the first: another run changed it while this one was on."""
    pairs = zip(column, scales, strict=True)
    return tuple(_times(part, scales[0] / scale) for part, scale in pairs)


def _times(part: Any, factor: float) -> Any:
    if isinstance(part, IndexedSlices):
        return IndexedSlices(part.values * factor, part.indices, part.dense_shape)
    return np.asarray(part * factor)


def _counts(weights: Sequence[float] | None, index: int) -> bool:
    return weights is None or (index < len(weights) and weights[index] != 0)


def _part(column: Sequence[Any], weights: Sequence[float] | None, index: int) -> Any:
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
