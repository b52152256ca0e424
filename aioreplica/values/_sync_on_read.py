"""Sync-on-read variables: every replica writes its own component, readers outside combine them.

For what is counted or averaged over a whole epoch: a write in a replica costs no communication.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from types import FrameType
from typing import Any, final

from ..errors import ContextError
from ..tree import Array
from ..typing import VariableAggregation
from ._indexed_slices import IndexedSlices
from ._mirrored import aggregate
from ._store import Components, Done, VariableStore
from ._variable import Variable, VariableOptions, combined, workers_of


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
                "`await metric.read()` for a metric."
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
        if array.dtype.kind not in "iu":
            return ((array / count).astype(array.dtype, copy=False),) * here
        share, rest = array // count, array % count
        workers = workers_of(self)
        first = 0 if workers is None else workers.first_replica
        return [share + (rest > first + i).astype(array.dtype) for i in range(here)]

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
