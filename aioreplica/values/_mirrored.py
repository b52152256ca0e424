"""Mirrored and sync-on-read variables: a component per replica, kept equal or combined when read.

Arrays are immutable here, so components that are equal by construction are one shared array: a
write that gives every replica the same value is computed and stored once. They become different
arrays only when a function updates each component on its own.

What is counted or averaged over a whole epoch need not be equal: every replica writes its own
component, without communication, and readers outside combine them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from types import FrameType
from typing import Any, final

import numpy as np

from ..devices.backends import backend_of, result_dtype
from ..errors import ContextError
from ..tree import Array, DType
from ..typing import ReduceOp, VariableAggregation
from ._distributed import PerReplica, new_per_replica
from ._indexed_slices import IndexedSlices
from ._store import Components, Done, VariableStore
from ._variable import Variable, VariableOptions, combined, workers_of


class MirroredVariable(Variable):
    """A variable with one component per replica of its strategy."""

    __slots__ = ()

    def __init__(
        self, value: Array, options: VariableOptions, num_components: int, store: VariableStore
    ) -> None:
        self._set_up((value,) * num_components, options, store)

    @property
    def is_mirrored(self) -> bool:
        """True: all writes are merged."""
        return True

    def _write_in_replica(
        self, verb: str, array: Array, replica: Any, frame: FrameType
    ) -> Awaitable[Array]:
        """Write the aggregate of what all replicas write; a collective."""
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"Variable {self.name!r} has aggregation 'none', so replicas cannot {verb} it. "
                "Create it with aggregation='mean', 'sum' or 'only_first_replica', or assign in "
                "cross-replica context (a merge function)."
            )
        is_sum_or_mean = self.aggregation is not VariableAggregation.ONLY_FIRST_REPLICA
        if is_sum_or_mean and verb.startswith("scatter"):
            raise ValueError(
                f"Variable {self.name!r} has aggregation {self.aggregation.value!r}, by which "
                f"replicas cannot {verb} it: rows of several replicas are added up only. Create it "
                "with aggregation='only_first_replica', or write it in a merge function."
            )
        merging: Awaitable[Array] = replica.meet_as(verb, _merge_write, (self, verb, array), frame)
        return merging


@final
class CentralVariable(MirroredVariable):
    """A variable with one copy, which all replicas read and an update computes once."""

    __slots__ = ()

    @property
    def num_copies(self) -> int:
        """One."""
        return 1


def aggregate(aggregation: VariableAggregation, arrays: Sequence[Any]) -> Any:
    """Combine one array per replica, in replica order; NONE is the caller's error."""
    if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        return arrays[0]
    if all(isinstance(array, IndexedSlices) for array in arrays):
        return _joined(aggregation, arrays)
    arrays = [a.to_dense() if isinstance(a, IndexedSlices) else a for a in arrays]
    op = ReduceOp.SUM if aggregation is VariableAggregation.SUM else ReduceOp.MEAN
    combined: Array = backend_of(arrays[0]).reduce(op, arrays)
    combined.flags.writeable = False
    return combined


def _joined(aggregation: VariableAggregation, parts: Sequence[IndexedSlices]) -> IndexedSlices:
    """Sum rows over replicas by joining them; a mean adds up those of one index and divides once.

    As of dense arrays, a mean of integers is float64, and halves are added and divided in float32.
    """
    values = np.concatenate([part.values for part in parts])
    indices, shape = np.concatenate([part.indices for part in parts]), parts[0].dense_shape
    if aggregation is not VariableAggregation.MEAN:
        return IndexedSlices(values, indices, shape)
    dtype = result_dtype(ReduceOp.MEAN, values.dtype)
    wide = np.promote_types(dtype, np.float32)
    total = IndexedSlices(values.astype(wide, copy=False), indices, shape).combined()
    mean = (total.values / len(parts)).astype(dtype, copy=False)
    return IndexedSlices(mean, total.indices, shape)


def _merge_write(
    _strategy: object, variable: MirroredVariable, verb: str, arrays: PerReplica
) -> PerReplica | Awaitable[PerReplica]:
    workers = workers_of(variable)
    if workers is not None:
        return _write_across(workers, variable, verb, arrays.values)
    return _write(variable, verb, aggregate(variable.aggregation, arrays.values))


async def _write_across(
    workers: Any, variable: MirroredVariable, verb: str, arrays: Sequence[object]
) -> PerReplica:
    """Combine what the replicas of all workers have made of their values, then write it."""
    found = await workers.aggregate(verb, variable.name, variable.aggregation, lambda: arrays)
    new = _write(variable, verb, found)
    return new if isinstance(new, PerReplica) else await new


def _write(
    variable: MirroredVariable, verb: str, combined: Any
) -> PerReplica | Awaitable[PerReplica]:
    if variable.aggregation is VariableAggregation.MEAN and variable.dtype.kind in "iu":
        combined = _rounded(combined, variable.dtype)
    new = variable._combine(verb, combined)
    return new_per_replica(new) if isinstance(new, tuple) else _own_parts(new)


def _rounded(mean: Any, dtype: DType) -> Any:
    """Round a mean of integers, once; where float64 has left the range it is the greatest one."""
    if isinstance(mean, IndexedSlices):
        return IndexedSlices(_rounded(mean.values, dtype), mean.indices, mean.dense_shape)
    greatest, whole = np.iinfo(dtype).max, np.rint(mean)
    is_over = whole >= float(greatest)  # 2.0**63 for int64; the least one is exact in float64
    return np.where(is_over, dtype.type(greatest), np.where(is_over, 0, whole).astype(dtype))


async def _own_parts(pending: Awaitable[Components]) -> PerReplica:
    return new_per_replica(await pending)


@final
class SyncOnReadVariable(Variable):
    """A variable whose components differ between replicas until they are read together.

    `value` is the local component in a replica and the aggregate elsewhere. Writing outside the
    replicas keeps what a reader there sees: with SUM every component gets its share of the value
    (whole numbers are shared out exactly), otherwise a copy.

    Source:
        tf.distribute's SyncOnReadVariable.
    """

    __slots__ = ()

    def __init__(
        self, value: Array, options: VariableOptions, num_components: int, store: VariableStore
    ) -> None:
        self._set_up((value,) * num_components, options, store)

    @property
    def is_mirrored(self) -> bool:
        """False: the components differ."""
        return False

    def _primary_of(self, components: Components) -> Array:
        """Return the aggregate of the components.

        Raises:
            ValueError: If the variable has no aggregation.
            ContextError: If other workers have components of it.
        """
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"Variable {self.name!r} has aggregation 'none', so it has no value outside the "
                "replicas. Create it with aggregation='sum', 'mean' or 'only_first_replica', or "
                "read its components with strategy.local_results(variable)."
            )
        workers = workers_of(self)
        if workers is not None and workers.has_others:
            raise ContextError(
                f"Variable {self.name!r} has components on other workers, which cannot be read "
                "without waiting. Use `await strategy.extended.read_var(variable)`, or "
                "`await metric.read()` for a metric. In a replica its own component is read: call "
                "a model, its `state_dict()` or `copy_to()` there."
            )
        combined: Array = aggregate(self.aggregation, components)
        return combined

    def _written(self, components: Components) -> Array:
        """Return the aggregate; the first component where that is not known."""
        if self.aggregation is VariableAggregation.NONE or workers_of(self) is not None:
            return components[0]
        return self._primary_of(components)

    def _shares(self, verb: str, array: Any) -> Sequence[Any]:
        """Split a value so that the aggregate of the parts is what the write makes of it."""
        if verb in {"scatter_mul", "scatter_div"}:
            return (array,) * len(self._cell.components)
        is_sum_or_mean = self.aggregation in {VariableAggregation.SUM, VariableAggregation.MEAN}
        if is_sum_or_mean and verb in {"scatter_min", "scatter_max"}:
            raise ValueError(
                f"Variable {self.name!r} has aggregation {self.aggregation.value!r}, so {verb} has "
                "no meaning outside the replicas. Call it in the step, or assign the whole value."
            )
        if isinstance(array, IndexedSlices):
            parts = self._shares(verb, array.values)
            return [IndexedSlices(part, array.indices, array.dense_shape) for part in parts]
        here = len(self._cell.components)
        if self.aggregation is not VariableAggregation.SUM:
            return (array,) * here
        count = self.store.owner.num_replicas_in_sync
        if array.dtype.kind not in "iub":
            return ((array / count).astype(array.dtype, copy=False),) * here
        share, rest = array // count, array % count  # True is 1: the first replica has it
        workers = workers_of(self)
        first = 0 if workers is None else workers.first_replica
        return [(share + (rest > first + i)).astype(array.dtype) for i in range(here)]

    def _write_in_replica(
        self, verb: str, array: Array, replica: Any, frame: FrameType
    ) -> Awaitable[Array]:
        """Write the local component at once: no other replica is asked."""
        replica.check_running()
        replica_id = replica.local_replica_id
        while True:  # replicas of a plain step function write from several threads
            old = self.components
            new = list(old)
            new[replica_id] = combined(self, verb, old[replica_id], array)
            if self.store.write({self: tuple(new)}, {self: old}, is_local=True):
                return Done(new[replica_id])
