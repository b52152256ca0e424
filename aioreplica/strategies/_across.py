"""Operations of a strategy across workers, other than running steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..collectives import (
    broadcast_arrays,
    gather_across,
    gather_bytes,
    join_across,
    no_data,
    reduce_across,
    reduce_over_axis,
    widen_halves,
)
from ..replica import joined_text, payload_signature
from ..tree import LEAF_SPEC, flatten
from ..typing import ReduceOp, VariableAggregation
from ..values import Variable
from ._runtime import Runtime, VariableTable

if TYPE_CHECKING:
    from ..cluster import Workers, WorkersRun

Local: TypeAlias = tuple[list[Any], Mapping[int, Any]]
"""What a worker has made of its replicas' leaves, and the dtypes of those that were widened."""

BATCHES_BYTES = 4
MAX_BATCHES = 2 ** (8 * BATCHES_BYTES) - 1


def function_name(fn: Any) -> str:
    """Return the name of a step function."""
    return getattr(fn, "__qualname__", None) or type(fn).__qualname__


async def equalize(runtime: Runtime, across: WorkersRun) -> None:
    """Give variables that were made since the last run the values of worker 0.

    Raises:
        MergeMismatchError: If workers have made different variables.
    """
    table = runtime.variable_table
    number, made = table.made_since_last()
    if not made:
        table.are_equal_up_to(number)
        return
    kinds = [(each, "" if each.is_mirrored else " on read") for each in made]
    text = "; ".join(f"{v.name!r}: {v.dtype}{list(v.shape)}{kind}" for v, kind in kinds)
    mirrored = [variable for variable in made if variable.is_mirrored]
    with across.turn("new variables", text, 0) as turn:
        arrays = await broadcast_arrays(turn, [variable.components[0] for variable in mirrored])
    changes = {}
    for variable, array in zip(mirrored, arrays, strict=True):
        if array.tobytes() != variable.components[0].tobytes():
            changes[variable] = (array,) * len(variable.components)
    if changes:
        runtime.store.write(changes)
    table.are_equal_up_to(number)


async def agree_on_names(workers: Workers, table: VariableTable) -> None:
    """Take the variables that any worker has for equal: those that others make later too.

    Workers that have put back one state may differ in slots, which an optimizer makes when it
    first needs them, with the values of that state.
    """
    import json  # a first run needs none

    names = json.dumps([variable.name for variable in table.all()]).encode()
    async with workers.operation("shrink", "variables") as turn:
        told: asyncio.Future[list[bytes]] = turn.exchange(
            b"", lambda wire, _slots: gather_bytes(wire, names)
        )
        rows = await told
    table.are_equal(name for row in rows for name in json.loads(row))


async def reduce_leaves_across(
    workers: Workers, op: ReduceOp, name: str, local: Callable[[], Awaitable[Local]]
) -> list[Any]:
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
    workers: Workers, op: ReduceOp, column: Sequence[object], axis: int | tuple[int, ...]
) -> Any:
    """Reduce one leaf over axes of each component and over the replicas of all workers."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    if op is not ReduceOp.MEAN:
        rows, halves = widen_halves(op, [[part] for part in column])
        local = reduce_over_axis(op, [part for [part] in rows], axis)
        async with workers.operation("reduce", f"{op.name} {axes}") as turn:
            return (await reduce_across(turn, op, [local], halves=halves))[0]
    wide = [np.asarray(part) for part in column]
    dtype = wide[0].dtype
    if dtype.kind in "iub" or dtype.itemsize < 4:
        wide = [part.astype(np.float64) for part in wide]
    total = np.asarray(reduce_over_axis(ReduceOp.SUM, wide, axis))
    count = sum(int(np.prod([part.shape[one] for one in axes], dtype=np.int64)) for part in wide)
    async with workers.operation("reduce", f"MEAN {axes}") as turn:
        total, count = await reduce_across(turn, ReduceOp.SUM, [total, count])
    if not count:
        raise ValueError(f"MEAN over axis {axis!r} of empty components is undefined.")
    mean = np.asarray(total / count)
    mean = mean if dtype.kind in "iub" else mean.astype(dtype, copy=False)
    mean.flags.writeable = False
    return mean[()] if mean.ndim == 0 else mean


async def read_variable(workers: Workers | None, variable: Variable, what: str) -> Any:
    """Return what a reader outside the replicas sees of a variable of all workers."""
    how = variable.aggregation
    if workers is None or variable.is_mirrored or how is VariableAggregation.NONE:
        return variable.value  # or an error that says why it has none
    return await workers.aggregate(what, variable.name, how, variable.components)


async def agreed_batches(workers: Workers, num_left: int) -> int:
    """Tell how many batches every worker has, at least: a loop ends on all of them together.

    Args:
        workers: The other workers.
        num_left: How many this one is sure to have.
    """
    own = min(num_left, MAX_BATCHES).to_bytes(BATCHES_BYTES, "little")
    async with workers.operation("next batch", "") as turn:
        slots = await turn.exchange(own, no_data)
    return min(int.from_bytes(slot, "little") for slot in slots)


async def gather_leaves_across(workers: Workers, tree: object, axis: int) -> list[Any]:
    """Join the leaves that each worker has joined."""
    leaves, spec = flatten(tree)
    text = payload_signature(leaves, spec if leaves else LEAF_SPEC, _joined(axis)) if leaves else ""
    async with workers.operation("gather", f"axis {axis}: {text}") as turn:
        return [join_across(parts, axis) for parts in await gather_across(turn, leaves, axis)]


def _joined(axis: int) -> Callable[[Any], str]:
    return lambda leaf: joined_text(leaf, axis)
