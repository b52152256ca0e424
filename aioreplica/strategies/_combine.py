"""Combining distributed values outside the replicas, and putting results where others live.

A destination (a device, a variable or a distributed value) is never written; only its devices
count. Its kind decides the kind of the result, never a number of devices: a variable of a
one-replica strategy gives a Mirrored with one entry, so code written for several replicas runs
unchanged. Arrays are immutable once they are here, so the entries share one read-only buffer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace

from ..collectives import (
    CommunicationOptions,
    array_like,
    as_before,
    concatenate,
    extreme_over_axis,
    gather_across,
    gather_difference,
    host_array,
    join_across,
    leaf_bytes,
    leaf_difference,
    reduce_across,
    reduce_over_axis,
    require_axis,
    require_dense,
    require_options,
    require_reducible,
    widen_halves,
)
from ..devices import INLINE_BYTES, Device, require_device, run_together
from ..replica import joined_text, payload_signature
from ..tree import Tree, TreeSpec, flatten, leaves, map_leaves, unflatten
from ..typing import ReduceOp, VariableAggregation
from ..values import (
    DistributedValues,
    DividedVariable,
    Mirrored,
    Variable,
    flatten_summands,
    require_own,
    require_unmasked,
)
from ._runtime import Replicas

if TYPE_CHECKING:
    from ..cluster import Workers

Axis = int | tuple[int, ...] | None

Local: TypeAlias = tuple[list[Tree], Mapping[int, Tree]]
"""What a worker has made of its replicas' leaves, and the dtypes of those that were widened."""


async def reduce_tree(
    replicas: Replicas,
    op: ReduceOp,
    value: object,
    axis: Axis = None,
    options: CommunicationOptions | None = None,
) -> Any:
    """Reduce every distributed leaf of a pytree; off the event loop if there is much to read."""
    workers = replicas.workers
    if axis is not None and workers is not None:
        return await _reduce_axis_across(replicas, workers, op, value, axis)
    if axis is not None:
        return await _maybe_in_thread(
            value,
            lambda: map_leaves(lambda leaf: _reduce_axis(op, leaf, axis, replicas), value),
        )
    leaves, spec = flatten_summands(value)
    columns: list[Sequence[object]] = []  # one per leaf of a leaf's components
    specs = [_add_columns(op, leaf, replicas, columns) for leaf in leaves]
    pairs = zip(leaves, specs, strict=True)
    mirrored = [_is_mirrored(leaf) for leaf, own in pairs for _ in range(own.num_leaves)]
    if workers is None:
        reduced = await _reduce_columns(replicas, op, columns, mirrored, options)
    else:
        local = partial(_reduce_wide, replicas, op, columns, mirrored, options)
        reduced = await reduce_leaves_across(workers, op, "reduce", local)
    results = iter(reduced)
    return unflatten(spec, [unflatten(s, list(islice(results, s.num_leaves))) for s in specs])


async def _reduce_columns(
    replicas: Replicas,
    op: ReduceOp,
    columns: Sequence[Sequence[object]],
    mirrored: Sequence[bool],
    options: CommunicationOptions | None,
) -> list[object]:
    """Reduce columns of all replicas together, and as they are those of one mirrored value."""
    reducer = replicas.runtime.reducer
    reduced: list[object] = [None] * len(columns)
    for is_one in set(mirrored):
        chosen = [i for i, each in enumerate(mirrored) if each is is_one]
        rows = list(zip(*(columns[i] for i in chosen), strict=True))
        if is_one:
            exact = dataclasses.replace(options or reducer.options, compression=None)
            done = reducer.reduce(op, rows, exact)
        else:
            done = reducer.reduce(op, rows, options, replicas.members)
        for i, result in zip(chosen, done if isinstance(done, list) else await done, strict=True):
            reduced[i] = result
    return reduced


async def _reduce_wide(
    replicas: Replicas,
    op: ReduceOp,
    columns: Sequence[Sequence[object]],
    mirrored: Sequence[bool],
    options: CommunicationOptions | None,
) -> Local:
    """Reduce what goes to other workers next: half precision stays wide until the last sum."""
    wide, halves = [], {}
    for i, column in enumerate(columns):
        rows, dtypes = widen_halves(op, [[part] for part in column])
        wide.append([part for [part] in rows])
        if dtypes:
            halves[i] = dtypes[0]
    return await _reduce_columns(replicas, op, wide, mirrored, options), halves


async def _reduce_axis_across(
    replicas: Replicas,
    workers: Workers,
    op: ReduceOp,
    value: object,
    axis: int | tuple[int, ...],
) -> object:
    leaves, spec = flatten_summands(value)
    columns: list[Sequence[object]] = []
    specs = [_add_columns(op, leaf, replicas, columns, axis) for leaf in leaves]
    results = iter(await reduce_axis_across(workers, op, columns, axis))
    return unflatten(spec, [unflatten(s, list(islice(results, s.num_leaves))) for s in specs])


def _add_columns(
    op: ReduceOp,
    leaf: object,
    replicas: Replicas,
    columns: list[Sequence[object]],
    axis: Axis = None,
) -> TreeSpec:
    """Add the columns of one distributed leaf, checked; return the structure of a component."""
    flattened = [flatten_summands(part) for part in _reduced_parts(op, leaf, replicas)]
    spec = _common_spec(flattened)
    for column in zip(*(part_leaves for part_leaves, _ in flattened), strict=True):
        for part in column:
            require_reducible(part, "reduce", op)
            if axis is not None:
                require_dense(part, f"reduce over axis {axis!r}")
        if axis is None:
            _same(column, leaf_difference)
        columns.append(column if axis is None else _of_one_dtype(column))
    return spec


async def gather_tree(replicas: Replicas, value: object, axis: int) -> object:
    """Join every distributed leaf of a pytree along `axis`."""
    join = partial(
        _maybe_in_thread,
        value,
        lambda: map_leaves(lambda leaf: _gather_leaf(leaf, axis, replicas), value),
    )
    if replicas.workers is None:
        return await join()
    map_leaves(lambda leaf: _gather_leaf(leaf, axis, replicas, _nothing_joined), value)
    return await gather_across_workers(replicas.workers, join, axis)


async def reduce_pairs(
    replicas: Replicas,
    op: ReduceOp | str,
    pairs: Sequence[tuple[object, object]],
    what: str,
    options: CommunicationOptions | None = None,
) -> list[Any]:
    """Reduce the values of all pairs together; nothing is reduced if one destination is wrong.

    Args:
        replicas: Those whose values they are.
        op: The operator.
        pairs: A value and a destination each.
        what: Names the method in errors.
        options: Of the call.
    """
    require_options(options, what)
    counts = [_entries(destinations, replicas, what) for _, destinations in pairs]
    flattened = [flatten_summands(value) for value, _ in pairs]
    columns = [column for column, _ in flattened]
    replicas.runtime.open()
    reduced = await reduce_tree(replicas, ReduceOp.parse(op), columns, options=options)
    results = []
    for count, (_, spec), column in zip(counts, flattened, reduced, strict=True):
        placed = [leaf if count is None else _mirrored(leaf, count) for leaf in column]
        results.append(unflatten(spec, placed))
    return results


async def broadcast_value(replicas: Replicas, value: object, destinations: object) -> object:
    """Return a Mirrored of `value` with an entry per destination device."""
    what = "extended.broadcast_to"
    count = _require_destination(destinations, replicas, what) or 1
    for leaf in leaves(value):
        if isinstance(leaf, DistributedValues) and not leaf.is_mirrored:
            raise ValueError(
                f"{what} got a {type(leaf).__name__}, whose values may differ. Reduce it to the "
                "destinations instead (await strategy.extended.reduce_to(...))."
            )
    one = map_leaves(_one_value, value)
    for leaf in leaves(one):
        require_unmasked(leaf, what)
    if replicas.runtime.has_plain_values:
        return one
    if sum(map(leaf_bytes, leaves(one))) <= INLINE_BYTES:
        return _mirrored(map_leaves(_frozen, one), count)
    [frozen] = await run_together([partial(map_leaves, _frozen, one)])
    return _mirrored(frozen, count)


def local_results(value: object, members: Sequence[int] | None = None) -> tuple[object, ...]:
    """Return one tree per replica, or `(value,)` if nothing in it is distributed.

    Args:
        value: object pytree.
        members: The replicas whose components of variables are meant; None for all.
    """
    if isinstance(value, DistributedValues):
        return value.values
    found, spec = flatten(value)
    parts = [_components(leaf, members) for leaf in found]
    counts = {len(part) for part in parts if part is not None}
    if not counts:
        return (value,)
    if len(counts) > 1:
        raise ValueError(
            f"local_results got distributed values of different lengths {sorted(counts)}. "
            "All must come from one strategy."
        )
    pairs = list(zip(found, parts, strict=True))
    return tuple(
        unflatten(spec, [leaf if part is None else part[i] for leaf, part in pairs])
        for i in range(counts.pop())
    )


def _components(leaf: object, members: Sequence[int] | None = None) -> tuple[object, ...] | None:
    if isinstance(leaf, DistributedValues):
        return leaf.values
    if not isinstance(leaf, Variable):
        return None
    components = leaf.components
    if members is None or members[-1] >= len(components):
        return components
    return tuple(components[i] for i in members)


def _is_mirrored(leaf: object) -> bool:
    return isinstance(leaf, (Variable, DistributedValues)) and leaf.is_mirrored


def _reduced_parts(op: ReduceOp, leaf: object, replicas: Replicas) -> tuple[object, ...]:
    parts = _parts(leaf, replicas, "reduce")
    if not _is_mirrored(leaf):
        return parts
    if op is ReduceOp.SUM:
        raise ValueError(
            f"reduce SUM of {leaf!r} would count one mirrored value {len(parts)} times. "
            "Use MEAN, or multiply by strategy.num_replicas_in_sync if that is meant."
        )
    return parts[:1]


def _reduce_axis(
    op: ReduceOp, leaf: object, axis: int | tuple[int, ...], replicas: Replicas
) -> object:
    def merge(column: Sequence[object]) -> object:
        for part in column:
            require_reducible(part, "reduce", op)
            require_dense(part, f"reduce over axis {axis!r}")
        return reduce_over_axis(op, _of_one_dtype(column), axis)

    return _merge_components(_reduced_parts(op, leaf, replicas), merge)


def _gather_leaf(
    leaf: object,
    axis: int,
    replicas: Replicas,
    join: Callable[[Sequence[Any], int], object] = concatenate,
) -> object:
    """Join the components of one leaf, if they fit each other."""
    parts = _parts(leaf, replicas, "gather")

    def merge(column: Sequence[object]) -> object:
        for part in column:
            require_axis(part, axis, "gather")
        _same(column, lambda a, b: gather_difference(a, b, axis))
        return join(column, axis)

    return _merge_components(parts, merge)


def _nothing_joined(_column: Sequence[Any], _axis: int) -> None:
    """Stand for `concatenate` where it is only checked what is to be joined."""


def _parts(leaf: object, replicas: Replicas, verb: str) -> tuple[object, ...]:
    num_replicas = replicas.num
    if isinstance(leaf, DividedVariable):
        leaf._primary_of(leaf.components)  # refuses where workers have parts
    parts = _components(leaf, replicas.members)
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


def _merge_components(parts: Sequence[object], merge: Callable[[Sequence[Any]], object]) -> object:
    """Merge leaf by leaf where components are pytrees themselves."""
    flattened = [flatten(part) for part in parts]
    spec = _common_spec(flattened)
    columns = zip(*(part_leaves for part_leaves, _ in flattened), strict=True)
    return unflatten(spec, [merge(column) for column in columns])


def _common_spec(flattened: Sequence[tuple[list[object], TreeSpec]]) -> TreeSpec:
    spec = flattened[0][1]
    for replica_id, (_, other) in enumerate(flattened):
        if other != spec:
            raise ValueError(
                f"Components have different structures: {spec} on replica 0, {other} on replica "
                f"{replica_id}."
            )
    return spec


def _same(column: Sequence[object], compare: Callable[[Any, Any], str | None]) -> None:
    for replica_id, part in enumerate(column):
        difference = compare(column[0], part)
        if difference is not None:
            raise ValueError(f"Replicas 0 and {replica_id} cannot be combined: {difference}.")


def _of_one_dtype(column: Sequence[Any]) -> Sequence[Any]:
    """Return the components, those without elements in the dtype of the others.

    `np.array([])` of a replica without examples has floats, whatever was meant.

    Raises:
        ValueError: If dtypes of components with elements differ.
    """
    arrays = [array_like(part) for part in column]
    filled = [i for i, array in enumerate(arrays) if math.prod(array.shape)]
    if not filled:
        return column
    dtype = arrays[filled[0]].dtype
    for i in filled:
        if arrays[i].dtype != dtype:
            raise ValueError(
                f"Replicas {filled[0]} and {i} cannot be combined: dtypes {dtype} and "
                f"{arrays[i].dtype} differ."
            )
    return [
        part if array.dtype == dtype else array_namespace(array).astype(array, dtype)
        for part, array in zip(column, arrays, strict=True)
    ]


async def _maybe_in_thread(value: object, work: Callable[[], object]) -> object:
    total = 0
    for leaf in leaves(value):
        for part in _components(leaf) or (leaf,):
            total += sum(map(leaf_bytes, leaves(part)))
    if total <= INLINE_BYTES:
        return work()
    [result] = await run_together([work])
    return result


def _entries(destinations: object, replicas: Replicas, what: str) -> int | None:
    count = _require_destination(destinations, replicas, what, takes_arrays=True)
    return None if replicas.runtime.has_plain_values else count


def _mirrored(value: object, count: int) -> Mirrored:
    """Repeat a value: containers are built anew for each entry, leaves are shared."""
    structure = flatten(value)
    return Mirrored([unflatten(structure[1], structure[0]) for _ in range(count)])


def _one_value(leaf: object) -> object:
    if isinstance(leaf, Variable):
        return leaf.value
    return leaf[0] if isinstance(leaf, DistributedValues) else leaf


def _frozen(leaf: object) -> object:
    """Return the leaf as something that cannot be written, copied if it could be."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    if type(leaf) is np.ndarray and leaf.base is None and not leaf.flags.writeable:
        return leaf
    copy = np.array(leaf)
    copy.flags.writeable = False
    return copy


def _require_destination(
    destinations: object, replicas: Replicas, what: str, *, takes_arrays: bool = False
) -> int | None:
    """Check a destination; return on how many replicas it lives; None for a device or an array.

    Raises:
        TypeError: If it is a list or anything else that is not a destination.
        ValueError: If a name is malformed, or a distributed value has another number of components
            than the strategy has replicas.
        DeviceError: If there is no such device.
        ContextError: If a variable belongs to another strategy.
    """
    if isinstance(destinations, (str, Device)):
        require_device(destinations)
        return None
    if isinstance(destinations, Variable):
        require_own(destinations, replicas.runtime, f"{what} to it")
        return len(destinations.components)
    if isinstance(destinations, DistributedValues):
        if len(destinations) != replicas.num:
            raise ValueError(
                f"{what} got a {type(destinations).__name__} of {len(destinations)} values as "
                f"destinations, but {replicas!r} has {replicas.num} replicas. "
                "Pass a value of this strategy."
            )
        return len(destinations)
    kind = type(destinations).__name__
    if takes_arrays and hasattr(destinations, "__dlpack_device__"):
        return None  # one of NumPy, torch or jax
    if isinstance(destinations, (list, tuple, Set, Mapping)):
        raise TypeError(
            f"{what} takes one destination, got a {kind}. Pass one device, or a variable or "
            "distributed value that lives on all the devices."
        )
    raise TypeError(
        f"{what} cannot go to a {kind}. Pass a device or its name, a variable, or a distributed "
        "value."
    )


# ---- over several workers ------------------------------------------------------------------------


async def reduce_leaves_across(
    workers: Workers, op: ReduceOp, name: str, local: Callable[[], Awaitable[Local]]
) -> list[object]:
    """Reduce here, in the turn of the operation, then over the workers.

    Args:
        workers: The other workers.
        op: The operator.
        name: Of the operation.
        local: Reduces the values of this worker's replicas: the leaves, and which are widened.
    """
    async with workers.operation(name, op.name) as turn:
        leaves, halves = await local()
        return await reduce_across(turn, op, leaves, halves=halves)


async def reduce_axis_across(
    workers: Workers,
    op: ReduceOp,
    columns: Sequence[Sequence[object]],
    axis: int | tuple[int, ...],
) -> list[object]:
    """Reduce leaves over axes of each component and over the replicas of all workers."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    is_mean = op is ReduceOp.MEAN
    local = [
        _total_and_count(column, axes) if is_mean else _local_result(op, column, axis)
        for column in columns
    ]
    added = ReduceOp.SUM if is_mean else op
    async with workers.operation("reduce", f"{op.name} {axes}") as turn:
        found = [await reduce_across(turn, added, own, halves=halves) for own, halves in local]
    if op is not ReduceOp.SUM and not all(count for _, count in found):
        raise ValueError(f"{op.name} over axis {axis!r} of empty components is undefined.")
    if not is_mean:
        return [result for result, *_ in found]
    pairs = zip(found, columns, strict=True)
    return [_mean(total / count, column[0]) for (total, count), column in pairs]


def _local_result(op: ReduceOp, column: Sequence[object], axis: int | tuple[int, ...]) -> Local:
    """Return the result of this worker's replicas; for MIN and MAX, 0 beside it if it has none.

    The other workers may have some: whether there is one is what they combine beside the results.
    """
    if op is not ReduceOp.SUM:
        result, count = extreme_over_axis(op, column, axis)
        return [result, count if op is ReduceOp.MAX else -count], {}
    rows, halves = widen_halves(op, [[part] for part in column])
    return [reduce_over_axis(op, [part for [part] in rows], axis)], halves


def _total_and_count(column: Sequence[object], axes: tuple[int, ...]) -> Local:
    """Return the sum over the replicas of this worker, and the number of its summands."""
    wide = [host_array(part) for part in column]
    if wide[0].dtype.kind in "iub" or wide[0].dtype.itemsize < 4:
        wide = [part.astype(np.float64) for part in wide]
    total = np.asarray(reduce_over_axis(ReduceOp.SUM, wide, axes))
    count = sum(int(np.prod([part.shape[one] for one in axes], dtype=np.int64)) for part in wide)
    return [total, count], {}


def _mean(quotient: Any, leaf: object) -> object:
    """Return a mean in the library, and the precision, of a replica's leaf."""
    mean = np.asarray(quotient)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "iub":
        mean = mean.astype(leaf.dtype, copy=False)
    mean.flags.writeable = False
    found = as_before(mean, leaf)
    return found[()] if isinstance(found, np.ndarray) and found.ndim == 0 else found


async def read_variable(workers: Workers | None, variable: Variable, what: str) -> object:
    """Return what a reader outside the replicas sees of a variable of all workers."""
    how = variable.aggregation
    if workers is None or variable.is_mirrored or how is VariableAggregation.NONE:
        return variable.value  # or an error that says why it has none
    return await workers.aggregate(what, variable.name, how, lambda: variable.components)


async def gather_across_workers(
    workers: Workers, local: Callable[[], Awaitable[object]], axis: int
) -> object:
    """Join here, in the turn of the operation, then over the workers.

    Args:
        workers: The other workers.
        local: Joins the values of this worker's replicas.
        axis: Along which they are joined.
    """
    async with workers.operation("gather", f"axis {axis}") as turn:
        leaves, spec = flatten(await local())
        text = payload_signature(leaves, spec, _joined(axis)) if leaves else ""
        rows = await gather_across(turn, leaves, axis, signature=text)
    return unflatten(spec, [join_across(parts, axis) for parts in rows])


def _joined(axis: int) -> Callable[[Any], str]:
    return lambda leaf: joined_text(leaf, axis)
