"""Gradients over workers: those of a worker's replicas are summed first, the sums then meet."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from ..collectives import Reducer, Turn, reduce_across, reduces_to_itself
from ..errors import NonFiniteError
from ..typing import ReduceOp
from ..values import IndexedSlices, Variable, Weighted
from ._merged_gradient import MergedGradient, merge_gradients
from ._scaled_gradient import ScaledGradient

NOBODY = sys.maxsize


async def merge_over_workers(
    turn: Turn,
    reducer: Reducer,
    variables: Sequence[Variable],
    columns: Sequence[Sequence[Any]],
    *,
    is_mean: bool,
) -> list[MergedGradient]:
    """Do what `merge_gradients` does, over the replicas of all workers.

    Args:
        turn: Of the collective.
        reducer: Sums what this worker's replicas have brought.
        variables: Whose gradients they are.
        columns: One part per replica of this worker.
        is_mean: Whether gradients without weights are averaged over the replicas.

    Raises:
        ValueError: If all weights of a gradient are 0.
    """
    sums, weights, are_lent = await _sum_here(reducer, columns)
    found = await reduce_across(turn, ReduceOp.SUM, [*sums, *weights], are_lent=are_lent)
    totals, weights = found[: len(sums)], found[len(sums) :]
    left = iter(weights)
    parts = []
    for column, total in zip(columns, totals, strict=True):
        first = column[0]
        part: Any = total
        scale = _scale_of(first)
        if scale is not None:
            part = ScaledGradient(part, scale)
        if isinstance(first, Weighted):
            part = Weighted(part, next(left))
        parts.append([part])
    merged = merge_gradients(variables, parts, is_mean=False)
    if is_mean:
        count = turn.num_workers * turn.num_local_replicas
        for gradient, column in zip(merged, columns, strict=True):
            if not isinstance(column[0], Weighted):
                gradient.divisor *= count
    return merged


async def _sum_here(
    reducer: Reducer, columns: Sequence[Sequence[Any]]
) -> tuple[list[Any], list[float], bool]:
    """Sum parts without weight 0 over this worker's replicas, and the weights.

    A single replica's are taken as they are, which the last of the results tells.
    """
    weights = [
        float(sum(part.weight for part in column))
        for column in columns
        if isinstance(column[0], Weighted)
    ]
    rows = [[_summand(part) for part in row] for row in zip(*columns, strict=True)]
    if len(rows) == 1 and all(map(reduces_to_itself, rows[0])):
        return rows[0], weights, True
    with np.errstate(all="ignore"):
        done = reducer.reduce(ReduceOp.SUM, rows, None, None, None)
        return (done if isinstance(done, list) else await done), weights, False


def _summand(part: Any) -> Any:
    """Return what is summed: an array or IndexedSlices; nothing of what has no weight."""
    total = part.total if isinstance(part, Weighted) else part
    if isinstance(total, ScaledGradient):
        total = total.values
    if not isinstance(part, Weighted) or part.weight:
        return total
    if isinstance(total, IndexedSlices):  # what has no weight may hold anything
        return IndexedSlices(total.values[:0], total.indices[:0], total.dense_shape)
    return np.zeros_like(total)


def _scale_of(part: Any) -> float | None:
    total = part.total if isinstance(part, Weighted) else part
    return total.scale if isinstance(total, ScaledGradient) else None


def gradients_text(variables: Sequence[Variable], columns: Sequence[Sequence[Any]]) -> str:
    """Describe gradients by what has to be equal on all workers."""
    texts = []
    for variable, column in zip(variables, columns, strict=True):
        first = column[0]
        total = _summand(first)
        kind = "IndexedSlices of " if isinstance(total, IndexedSlices) else ""
        weight = ", weighted" if isinstance(first, Weighted) else ""
        scale = _scale_of(first)
        scaled = "" if scale is None else f", scale {scale:g}"
        shape = list(variable.shape)
        texts.append(f"{variable.name!r}: {kind}{variable.dtype}{shape}{weight}{scaled}")
    return "; ".join(texts)


async def name_the_replica(
    turn: Turn,
    variables: Sequence[Variable],
    columns: Sequence[Sequence[Any]],
    take: Callable[[], Awaitable[None] | None],
) -> None:
    """Take a step; if a gradient is not finite, find the replica that has brought it.

    All workers have the same sums, so all find the same gradient, and ask each other.

    Raises:
        NonFiniteError: With the id of the replica among those of all workers, on all of them.
    """
    try:
        pending = take()
        if pending is not None:
            await pending
        return
    except NonFiniteError as error:
        wrong = error
    own = NOBODY
    for variable, column in zip(variables, columns, strict=True):
        if variable.name == wrong.variable:
            for replica_id, part in enumerate(column):
                total = _summand(part)
                values = total.values if isinstance(total, IndexedSlices) else total
                if not np.isfinite(values).all():
                    own = turn.rank * turn.num_local_replicas + replica_id
                    break
    [first] = await reduce_across(turn, ReduceOp.MIN, [own], what="finite check")
    if first == NOBODY:
        raise wrong
    worker = first // turn.num_local_replicas
    raise NonFiniteError(
        f"The gradient of {wrong.variable!r} is not finite: replica {first}, of worker {worker}, "
        f"brought it. The sum over all workers is not finite at index {wrong.index}. Nothing was "
        "updated. Look for a division by 0 or a learning rate that is too high, clip gradients, or "
        'pass on_non_finite="skip" to leave out such steps.',
        variable=wrong.variable,
        replica_id=first,
        index=wrong.index,
    )
