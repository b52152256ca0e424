"""reduce, gather and local_results: combining distributed values outside the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..collectives import (
    CommunicationOptions,
    concatenate,
    gather_difference,
    leaf_bytes,
    leaf_difference,
    reduce_over_axis,
    require_axis,
    require_dense,
    require_reducible,
)
from ..devices import INLINE_BYTES, run_together
from ..tree import TreeSpec, flatten, leaves, map_leaves, unflatten
from ..typing import ReduceOp
from ..values import DistributedValues, Variable

if TYPE_CHECKING:
    from ._strategy import Strategy

Axis = int | tuple[int, ...] | None


async def reduce_tree(
    strategy: Strategy, op: ReduceOp, value: Any, axis: Axis, options: CommunicationOptions | None
) -> Any:
    """Reduce every distributed leaf of a pytree; off the event loop if there is much to read."""
    num_replicas = strategy.num_replicas_in_sync
    if axis is not None:
        return await _maybe_in_thread(
            value,
            lambda: map_leaves(lambda leaf: _reduce_axis(op, leaf, axis, num_replicas), value),
        )
    leaves, spec = flatten(value)
    columns: list[Sequence[Any]] = []  # one per leaf of a leaf's components
    specs = [_add_columns(op, leaf, num_replicas, columns) for leaf in leaves]
    reduced: list[Any] = [None] * len(columns)
    for size in {len(column) for column in columns}:
        chosen = [i for i, column in enumerate(columns) if len(column) == size]
        rows = list(zip(*(columns[i] for i in chosen), strict=True))
        done = strategy.reducer.reduce(op, rows, options)
        for i, result in zip(chosen, done if isinstance(done, list) else await done, strict=True):
            reduced[i] = result
    results = iter(reduced)
    return unflatten(spec, [unflatten(s, list(islice(results, s.num_leaves))) for s in specs])


def _add_columns(
    op: ReduceOp, leaf: Any, num_replicas: int, columns: list[Sequence[Any]]
) -> TreeSpec:
    """Add the columns of one distributed leaf, checked; return the structure of a component."""
    flattened = [flatten(part) for part in _reduced_parts(op, leaf, num_replicas)]
    spec = _common_spec(flattened)
    for column in zip(*(part_leaves for part_leaves, _ in flattened), strict=True):
        for part in column:
            require_reducible(part, "reduce", op)
        _same(column, leaf_difference)
        columns.append(column)
    return spec


async def gather_tree(value: Any, axis: int, num_replicas: int) -> Any:
    """Join every distributed leaf of a pytree along `axis`."""
    return await _maybe_in_thread(
        value, lambda: map_leaves(lambda leaf: _gather_leaf(leaf, axis, num_replicas), value)
    )


def local_results(value: Any) -> tuple[Any, ...]:
    """Return one tree per replica, or `(value,)` if nothing in it is distributed."""
    distributed = [leaf for leaf in leaves(value) if _components(leaf) is not None]
    if not distributed:
        return (value,)
    counts = {len(_components(leaf) or ()) for leaf in distributed}
    if len(counts) > 1:
        raise ValueError(
            f"local_results got distributed values of different lengths {sorted(counts)}. "
            "All must come from one strategy."
        )
    return tuple(map_leaves(partial(_select, i), value) for i in range(counts.pop()))


def _select(index: int, leaf: Any) -> Any:
    components = _components(leaf)
    return leaf if components is None else components[index]


def _components(leaf: Any) -> tuple[Any, ...] | None:
    if isinstance(leaf, DistributedValues):
        return leaf.values
    if isinstance(leaf, Variable):
        return leaf.components
    return None


def _is_mirrored(leaf: Any) -> bool:
    return isinstance(leaf, (Variable, DistributedValues)) and leaf.is_mirrored


def _reduced_parts(op: ReduceOp, leaf: Any, num_replicas: int) -> tuple[Any, ...]:
    parts = _parts(leaf, num_replicas, "reduce")
    if not _is_mirrored(leaf):
        return parts
    if op is ReduceOp.SUM:
        raise ValueError(
            f"reduce SUM of {leaf!r} would count one mirrored value {num_replicas} times. "
            "Use MEAN, or multiply by strategy.num_replicas_in_sync if that is meant."
        )
    return parts[:1]


def _reduce_axis(op: ReduceOp, leaf: Any, axis: int | tuple[int, ...], num_replicas: int) -> Any:
    def merge(column: Sequence[Any]) -> Any:
        for part in column:
            require_reducible(part, "reduce", op)
            require_dense(part, f"reduce over axis {axis!r}")
        return reduce_over_axis(op, column, axis)

    return _merge_components(_reduced_parts(op, leaf, num_replicas), merge)


def _gather_leaf(leaf: Any, axis: int, num_replicas: int) -> Any:
    parts = _parts(leaf, num_replicas, "gather")

    def merge(column: Sequence[Any]) -> Any:
        for part in column:
            require_axis(part, axis, "gather")
        _same(column, lambda a, b: gather_difference(a, b, axis))
        return concatenate(column, axis)

    return _merge_components(parts, merge)


def _parts(leaf: Any, num_replicas: int, verb: str) -> tuple[Any, ...]:
    parts = _components(leaf)
    if parts is None:
        if num_replicas == 1:
            return (leaf,)
        raise ValueError(
            f"{verb} got a plain {type(leaf).__name__} ({leaf!r}), which is not one value per "
            f"replica. Pass what strategy.run returned, or ar.PerReplica with {num_replicas} "
            "values."
        )
    if len(parts) != num_replicas:
        raise ValueError(
            f"{verb} got {len(parts)} values, but the strategy has {num_replicas} replicas."
        )
    return parts


def _merge_components(parts: Sequence[Any], merge: Callable[[Sequence[Any]], Any]) -> Any:
    """Merge leaf by leaf where components are pytrees themselves."""
    flattened = [flatten(part) for part in parts]
    spec = _common_spec(flattened)
    columns = zip(*(part_leaves for part_leaves, _ in flattened), strict=True)
    return unflatten(spec, [merge(column) for column in columns])


def _common_spec(flattened: Sequence[tuple[list[Any], TreeSpec]]) -> TreeSpec:
    spec = flattened[0][1]
    for replica_id, (_, other) in enumerate(flattened):
        if other != spec:
            raise ValueError(
                f"Components have different structures: {spec} on replica 0, {other} on replica "
                f"{replica_id}."
            )
    return spec


def _same(column: Sequence[Any], compare: Callable[[Any, Any], str | None]) -> None:
    for replica_id, part in enumerate(column):
        difference = compare(column[0], part)
        if difference is not None:
            raise ValueError(f"Replicas 0 and {replica_id} cannot be combined: {difference}.")


async def _maybe_in_thread(value: Any, work: Callable[[], Any]) -> Any:
    total = 0
    for leaf in leaves(value):
        for part in _components(leaf) or (leaf,):
            total += sum(map(leaf_bytes, leaves(part)))
    if total <= INLINE_BYTES:
        return work()
    [result] = await run_together([work])
    return result
