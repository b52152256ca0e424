"""Gradient accumulation: the gradients of several batches, applied as if they were one batch."""

from __future__ import annotations

import sys
from collections.abc import Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..collectives import leaf_bytes
from ..context import PLACE, Place
from ..devices import run_together
from ..errors import ContextError
from ..replica import ReplicaContext
from ..values import IndexedSlices, PerReplica, Variable, Weighted
from ._blocking import BlockingAccumulator
from ._gradient import checked_pairs
from ._optimizer import Optimizer
from ._total import quiet
from ._whereabouts import require_owner
from ._work import fits_inline

Array = npt.NDArray[Any]


@final
class _Sum:
    """What one replica has gathered for one variable; its buffer outlives a window."""

    __slots__ = ("_buffer", "_rows", "count", "is_weighted", "variable", "weight")

    def __init__(self, variable: Variable) -> None:
        self.variable = variable
        self._buffer: Array | None = None
        self._rows: list[IndexedSlices] = []
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self.weight = 0.0
        self.is_weighted = False
        self._rows = []

    def add(self, gradient: Any) -> None:
        total, weight = gradient, 1.0
        if isinstance(gradient, Weighted):
            total, weight = gradient.total, gradient.weight
        is_first = self.weight == 0
        self.is_weighted = isinstance(gradient, Weighted)
        self.count += 1
        if weight == 0:
            return  # contributes nothing, whatever it holds
        self.weight += weight
        if isinstance(total, IndexedSlices):
            self._rows.append(total)
        elif is_first:
            if self._buffer is None:
                self._buffer = np.empty(self.variable.shape, self.variable.dtype)
            np.copyto(self._buffer, total)
        else:
            assert self._buffer is not None  # the first one made it
            with quiet():  # it is checked when it is applied
                np.add(self._buffer, total, out=self._buffer)

    def total(self, *, is_sparse: bool) -> Any:
        """Return the sum; zeros if nothing counted."""
        shape, dtype = self.variable.shape, self.variable.dtype
        if is_sparse:
            rows = [np.empty((0, *shape[1:]), dtype), *(part.values for part in self._rows)]
            indices = [np.empty(0, np.intp), *(part.indices for part in self._rows)]
            return IndexedSlices(np.concatenate(rows), np.concatenate(indices), shape)
        if self.weight == 0 or self._buffer is None:
            return np.broadcast_to(np.zeros((), dtype), shape)
        return self._buffer.view()

    @property
    def is_sparse(self) -> bool:
        return bool(self._rows)


@final
class GradientAccumulator:
    """Adds up gradients over several batches, and applies them in one update.

    `add` is local to a replica; `apply` is a collective and starts the next window. Replicas may
    add different numbers of times, and the last window may be shorter than the others: totals and
    weights of `Weighted` gradients are added up apart and divided once, so the update is exactly
    that of one large batch. Gradients without weights are added up; with
    `loss_reduction="mean"` their sum is divided by how many there were, on all replicas together.

    Use one accumulator for one loop: runs that go on at the same time need one each.

    Args:
        optimizer: What applies the gradients.

    Raises:
        TypeError: If it is no `Optimizer`.

    Example:
        >>> import asyncio
        >>> from aioreplica import Variable, Weighted
        >>> from aioreplica.optimizers import SGD
        >>> w = Variable(0.0)
        >>> window = GradientAccumulator(SGD(1.0))
        >>> async def main():
        ...     await window.add([(Weighted(2.0, 1), w)])
        ...     await window.add([(Weighted(4.0, 2), w)])
        ...     await window.apply()
        >>> asyncio.run(main())
        >>> print(w.value)  # minus (2 + 4) / (1 + 2)
        -2.0
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"GradientAccumulator needs an optimizer, got {optimizer!r} "
                f"({type(optimizer).__name__})."
            )
        self._optimizer = optimizer
        self._sums: dict[Variable, dict[int, _Sum]] = {}

    def add(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Coroutine[Any, Any, None]:
        """Add gradients of one batch to this replica's sums.

        Args:
            grads_and_vars: As for `apply_gradients`. A variable may be left out of some batches.

        Raises:
            ContextError: If called in cross-replica context.
            ValueError: As `apply_gradients`; or if a variable has gradients with and without
                weights, or dense and sparse ones, in one window.
            TypeError: As `apply_gradients`.

        Cancellation:
            Adds nothing or everything.
        """
        place = PLACE.get()
        if place.replica is None and place.strategy is not None:
            raise ContextError(
                f"GradientAccumulator.add was called in {place.describe()}, but gradients belong "
                "to replicas. Call it in the step."
            )
        if isinstance(place.replica, ReplicaContext):
            place.replica.require_awaitable("add")
        return self._add(grads_and_vars, place)

    def apply(self, global_step: Variable | None = None) -> Coroutine[Any, Any, None]:
        """Apply what all replicas have added since the last time, and start anew.

        A collective in replica context; in cross-replica context it does the same, which suits the
        last window of an epoch. A replica that has added nothing contributes nothing.

        Args:
            global_step: As for `apply_gradients`.

        Raises:
            ValueError: If no replica has added anything, or all weights are 0.
            Exception: As `apply_gradients`. The sums are kept then.

        Cancellation:
            As for `apply_gradients`; the sums are kept if nothing was updated.
        """
        place = PLACE.get()
        if isinstance(place.replica, ReplicaContext):
            args = (self._optimizer.iterations, global_step)
            return place.replica.meet_as("apply_accumulated", self._merge, args, sys._getframe(1))
        return self._apply(global_step)

    @property
    def blocking(self) -> BlockingAccumulator:
        """The same methods for plain step functions: they wait on the device thread."""
        return BlockingAccumulator(self)

    @property
    def num_added(self) -> int:
        """How many gradients the sums of all replicas hold, at most, for one variable."""
        return max(
            (sum(each.count for each in own.values()) for own in self._sums.values()), default=0
        )

    def discard(self) -> None:
        """Forget what was added since the last `apply`."""
        for own in self._sums.values():
            for each in own.values():
                each.clear()

    def __repr__(self) -> str:
        return f"<GradientAccumulator | {self.num_added} added for {len(self._sums)} variables>"

    async def _add(self, grads_and_vars: Iterable[tuple[Any, Any]], place: Place) -> None:
        gradients, variables = checked_pairs(grads_and_vars)
        require_owner(variables)
        replica_id = 0 if place.replica is None else place.replica.replica_id_in_sync_group
        sums = []
        for gradient, variable in zip(gradients, variables, strict=True):
            own = self._sums.setdefault(variable, {})
            _require_one_kind(variable, gradient, tuple(own.values()))
            sums.append(own.setdefault(replica_id, _Sum(variable)))
        work = partial(_add_all, sums, gradients)
        if fits_inline(sum(map(_num_bytes, gradients))):
            work()
        elif isinstance(place.replica, ReplicaContext):
            await place.replica.run_on_device(work)
        else:
            await run_together([work])

    def _merge(
        self, _strategy: object, _iterations: Variable, global_step: Variable | None
    ) -> Coroutine[Any, Any, None]:
        return self._apply(global_step)

    async def _apply(self, global_step: Variable | None) -> None:
        pairs = [
            (self._merged(own, variable), variable)
            for variable, own in self._sums.items()
            if any(each.count for each in own.values())
        ]
        if not pairs:
            raise ValueError(
                "GradientAccumulator.apply has nothing to apply: no replica has added a gradient "
                "since the last time. Call `await accumulator.add(grads_and_vars)` first."
            )
        await self._optimizer.distributed_apply(pairs, global_step)
        self.discard()

    def _merged(self, own: dict[int, _Sum], variable: Variable) -> Any:
        """Put the sums of one variable together as one gradient of all replicas."""
        strategy = variable.strategy
        count = 1 if strategy is None else strategy.num_replicas_in_sync
        sums = [own.get(replica_id) or _Sum(variable) for replica_id in range(count)]
        is_sparse = any(each.is_sparse for each in sums)
        totals = PerReplica([each.total(is_sparse=is_sparse) for each in sums])
        if any(each.is_weighted for each in sums) or self._optimizer.treatment.is_mean:
            return Weighted(totals, PerReplica([each.weight for each in sums]))
        return totals


def _add_all(sums: Sequence[_Sum], gradients: Sequence[Any]) -> None:
    for each, gradient in zip(sums, gradients, strict=True):
        each.add(gradient)


def _num_bytes(gradient: Any) -> int:
    return leaf_bytes(gradient.total if isinstance(gradient, Weighted) else gradient)


def _require_one_kind(variable: Variable, gradient: Any, sums: Iterable[_Sum]) -> None:
    is_weighted = isinstance(gradient, Weighted)
    is_sparse = isinstance(gradient.total if is_weighted else gradient, IndexedSlices)
    for each in sums:
        if each.count and each.is_weighted != is_weighted:
            raise ValueError(
                f"Variable {variable.name!r} got gradients with and without weights in one window. "
                "Make all of them Weighted, or none."
            )
        if each.weight and each.is_sparse != is_sparse:
            raise ValueError(
                f"Variable {variable.name!r} got dense and sparse gradients in one window. Bring "
                "one kind; `.to_dense()` makes an array of an IndexedSlices."
            )
