"""Gradient accumulation: the gradients of several batches, applied as if they were one batch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, final

import numpy as np

from ..context import LOOP, PLACE, REGISTRY, LoopStep
from ..devices import HOST, is_process_device, run_together
from ..errors import ContextError
from ..replica import CallSite, RunningReplica
from ..tree import Array, DType
from ..values import IndexedSlices, Variable, Weighted
from ._apply_gradients import (
    APPLY_ACCUMULATED,
    Contribution,
    gradient_bytes,
    gradients_text,
    optimizer_text,
    push_elsewhere,
    take_step_across,
)
from ._checks import replica_on_device, require_cross_replica_context, require_owner, written
from ._gradient import ScaledGradient, checked_pairs
from ._merged_gradient import merge_gradients
from ._optimizer import Optimizer
from ._slots import working_dtype
from ._step import INLINE_STEP_BYTES, take_step

SUM = "sum."  # begins the name of a replica's sum in a checkpoint


@final
class _Sum:
    """Gradient sum of one replica for one variable; its buffer outlives a window.

    Invariants:
        * `_kept` has the sum as it was before each step of a device loop that added to it and may
          be run again, by number. No buffer of these is written.
    """

    __slots__ = (
        "_buffer", "_kept", "_loop_step", "_owns_buffer", "_rows", "_spare", "count",
        "is_weighted", "scale", "variable", "weight",
    )  # fmt: skip

    def __init__(self, variable: Variable) -> None:
        self.variable = variable
        self._buffer: Array | None = None
        self._spare: Array | None = None
        self._owns_buffer = True
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self.weight = 0.0
        self.is_weighted = False
        self.scale: float | None = None
        self._rows: tuple[IndexedSlices, ...] = ()
        self._kept: dict[int, _Sum] = {}
        self._loop_step: LoopStep | None = None
        if not self._owns_buffer:
            self._buffer, self._owns_buffer = None, True

    def keep(self, loop_step: LoopStep) -> None:
        """Keep the sum as it is before a step of a device loop."""
        num_taken, number = loop_step.num_taken(), loop_step.number
        for done in [each for each in self._kept if each < num_taken]:
            free = self._kept.pop(done)._buffer
            in_use = [each._buffer for each in (self, *self._kept.values())]
            self._spare = None if any(free is each for each in in_use) else free
        if number not in self._kept:
            self._kept[number] = old = _Sum(self.variable)
            old._take(self)
            self._owns_buffer = False
            self._loop_step = loop_step
            loop_step.at_end[self.settle] = None

    def _take(self, other: _Sum) -> None:
        self.count, self.weight, self.is_weighted = other.count, other.weight, other.is_weighted
        self.scale, self._rows, self._buffer = other.scale, other._rows, other._buffer

    def settled(self) -> _Sum:
        """Return the sum without what was added by steps that may be run again."""
        if self._loop_step is None:
            return self
        num_taken = self._loop_step.num_taken()
        return next((old for at, old in [*self._kept.items()] if at >= num_taken), self)

    def settle(self) -> None:
        """Forget what was added by steps that are run again."""
        self._take(self.settled())
        self._kept, self._loop_step, self._owns_buffer = {}, None, True

    def add(self, gradient: object) -> None:
        total, weight = gradient, 1.0
        if isinstance(gradient, Weighted):
            total, weight = gradient.total, gradient.weight
        is_first = self.weight == 0
        self.is_weighted = isinstance(gradient, Weighted)
        self.count += 1
        if weight == 0:
            return  # contributes nothing, whatever it holds
        if is_first:
            self.scale = total.scale if isinstance(total, ScaledGradient) else None
        total = _at_scale(total, self.scale)
        self.weight += weight
        if isinstance(total, IndexedSlices):
            # As of a dense gradient: whose arrays these are may use them for the next one.
            values, indices = total.values.copy(), total.indices.copy()
            self._rows = (*self._rows, IndexedSlices(values, indices, total.dense_shape))
            return
        old = out = self._buffer
        if out is None or not self._owns_buffer:
            out, self._spare = self._spare, None
        if out is None:
            out = np.empty(self.variable.shape, working_dtype(self.variable.dtype))
        self._buffer, self._owns_buffer = out, True
        if is_first:
            np.copyto(out, total)
        else:
            assert old is not None  # the first one made it
            with np.errstate(all="ignore"):  # it is checked when it is applied
                np.add(old, total, out=out)

    def total(self, *, is_sparse: bool) -> object:
        """Return the sum; zeros if nothing counted."""
        shape, dtype = self.variable.shape, working_dtype(self.variable.dtype)
        whole: object
        if is_sparse:
            rows = [np.empty((0, *shape[1:]), dtype), *(part.values for part in self._rows)]
            indices = [np.empty(0, np.intp), *(part.indices for part in self._rows)]
            whole = IndexedSlices(np.concatenate(rows), np.concatenate(indices), shape)
        elif self.weight == 0 or self._buffer is None:
            whole = np.broadcast_to(np.zeros((), dtype), shape)
        else:
            whole = self._buffer.view()
        return whole if self.scale is None else ScaledGradient(whole, self.scale)

    @property
    def is_sparse(self) -> bool:
        return bool(self._rows)

    def state(self) -> dict[str, Any]:
        """Return what was gathered, as plain data and arrays."""
        return {
            "count": self.count,
            "weight": float(self.weight),
            "is_weighted": self.is_weighted,
            "scale": None if self.scale is None else float(self.scale),
            "rows": [[part.values, part.indices] for part in self._rows],
            "total": self._buffer if self.weight and not self._rows else None,
        }

    def gather(self, state: dict[str, Any]) -> None:
        """Add what `state` gave, of this replica or of one that no longer exists."""
        count, weight, scale = state["count"], state["weight"], state["scale"]
        shape = self.variable.shape
        parts: list[object] = [IndexedSlices(v, i, shape) for v, i in state["rows"]]
        if state["total"] is not None:
            parts.append(state["total"])
        for part in parts:
            self.add(part if scale is None else ScaledGradient(part, scale))
            self.count, self.weight = self.count - 1, self.weight - 1.0
        self.count, self.weight = self.count + count, self.weight + weight
        self.is_weighted = state["is_weighted"]


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
        TypeError: If it is not an `Optimizer`.

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

    def add(self, grads_and_vars: Iterable[tuple[object, object]]) -> Coroutine[object, None, None]:
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
        if isinstance(place.replica, RunningReplica):
            return place.replica.to_await("add", self._add, (grads_and_vars,), sys._getframe(1))
        return self._add(grads_and_vars)

    def apply(self, global_step: Variable | None = None) -> Coroutine[object, None, None]:
        """Apply what all replicas have added since the last time, and start anew.

        A collective in replica context; in cross-replica context it does the same, which suits the
        last window of an epoch. A replica that has added nothing contributes nothing. In a closure
        it pushes the sums.

        Args:
            global_step: As for `apply_gradients`.

        Raises:
            ValueError: If no replica has added anything, or all weights are 0.
            Exception: As `apply_gradients`. The sums are kept then.

        Cancellation:
            As for `apply_gradients`; the sums are kept if nothing was updated.
        """
        replica = PLACE.get().replica
        if isinstance(replica, RunningReplica):
            return replica.meet(
                APPLY_ACCUMULATED, self, self._brought(global_step), sys._getframe(1)
            )
        return self._apply_outside(global_step)

    @property
    def blocking(self) -> BlockingAccumulator:
        """The same methods for plain step functions: they wait on the device thread."""
        return BlockingAccumulator(self)

    @property
    def num_added(self) -> int:
        """Largest number of gradients in the sums of all replicas for one variable."""
        return max(
            (sum(each.count for each in own.values()) for own in self._sums.values()), default=0
        )

    def checkpoint_entries(self) -> dict[tuple[Variable | None, str], Any]:
        """Return what a checkpoint keeps: the sums of each replica."""
        return {
            (variable, f"{SUM}{replica_id}"): settled.state()
            for variable, own in self._sums.items()
            for replica_id, each in own.items()
            if (settled := each.settled()).count
        }

    def awaits_entry(self, owner: Variable | None, name: str) -> bool:
        """Tell whether a value of a checkpoint is a sum."""
        return owner is not None and name.startswith(SUM)

    def division_of(self, _owner: Variable | None, _shape: tuple[int, ...], _dtype: DType) -> None:
        """Return None: sums are whole on every worker."""

    def load_entries(self, entries: Mapping[tuple[Variable | None, str], Any]) -> None:
        """Go on with sums of a checkpoint; those of replicas that no longer exist go to others."""
        self.discard()
        for (owner, name), state in entries.items():
            if owner is None:
                continue
            own, replica_id = self._sums.setdefault(owner, {}), int(name[len(SUM) :])
            replica_id %= len(owner.components)
            own.setdefault(replica_id, _Sum(owner)).gather(state)

    def forget_entries(self, owner: Variable) -> None:
        """Do nothing: `load_entries` begins anew."""

    def discard(self) -> None:
        """Forget what was added since the last `apply`."""
        for own in self._sums.values():
            for each in own.values():
                each.clear()

    def __repr__(self) -> str:
        return f"<GradientAccumulator | {self.num_added} added for {len(self._sums)} variables>"

    async def _add(self, grads_and_vars: Iterable[tuple[object, object]]) -> None:
        replica = PLACE.get().replica
        size, work = self._addition(grads_and_vars)
        if size <= INLINE_STEP_BYTES:
            work()
        elif isinstance(replica, RunningReplica) and not is_process_device(
            replica.device_name or HOST
        ):
            await replica.context.run_on_device(work)
        else:  # a device process would add to copies of the sums
            await run_together([partial(_in_turn, work)])

    def _addition(
        self, grads_and_vars: Iterable[tuple[object, object]]
    ) -> tuple[int, Callable[[], None]]:
        """Return what adds gradients to this replica's sums, and how much it reads."""
        place = PLACE.get()
        gradients, variables = checked_pairs(grads_and_vars)
        require_owner(variables, place.strategy)
        replica_id = 0 if place.replica is None else place.replica.local_replica_id
        sums = []
        for gradient, variable in zip(gradients, variables, strict=True):
            own = self._sums.setdefault(variable, {})
            _require_one_kind(variable, gradient, tuple(own.values()))
            sums.append(own.setdefault(replica_id, _Sum(variable)))
        return sum(map(gradient_bytes, gradients)), partial(_add_all, sums, gradients, LOOP.get())

    def _brought(self, global_step: Variable | None) -> Contribution:
        return Contribution(self._optimizer, (), (), global_step)

    async def _apply_outside(self, global_step: Variable | None) -> None:
        require_cross_replica_context("GradientAccumulator.apply")
        strategy = next((variable.store.owner for variable in self._sums), None)
        reducer, optimizer = None, self._optimizer
        if strategy is not None:
            strategy.open()
            reducer = strategy.reducer
        if strategy is not None and strategy.workers is not None:
            async with strategy.workers.operation("apply_accumulated", self.text()) as turn:
                of_all = self.columns(global_step)
                await take_step_across(turn, strategy.reducer, optimizer, *of_all, global_step)
        else:
            variables, columns = self.columns(global_step)
            pairs = [(column[0], each) for each, column in zip(variables, columns, strict=True)]
            if push_elsewhere(optimizer, pairs, global_step) is None:
                merged = merge_gradients(variables, columns, is_mean=optimizer.settings.is_mean)
                pending = take_step(optimizer, merged, reducer, global_step)
                if pending is not None:
                    await pending
        self.discard()

    def text(self) -> str:
        """Describe the sums by what has to be equal on all workers; for the library."""
        merged = self._all_merged()
        variables = [variable for variable, _ in merged]
        sums = gradients_text(variables, [column for _, column in merged])
        return f"{optimizer_text(self._optimizer)}: {sums}"

    def _all_merged(self) -> list[tuple[Variable, list[Any]]]:
        return [
            (variable, self._merged(own, variable))
            for variable, own in self._sums.items()
            if any(each.count for each in own.values())
        ]

    def columns(
        self, global_step: Variable | None
    ) -> tuple[Sequence[Variable], Sequence[Sequence[Any]]]:
        """Return what is to be applied, a part per replica for each variable; for the library."""
        merged = self._all_merged()
        if not merged:
            raise ValueError(
                "GradientAccumulator.apply has nothing to apply: no replica has added a gradient "
                "since the last time. Call `await accumulator.add(grads_and_vars)` first."
            )
        variables, columns = zip(*merged, strict=True)
        in_charge = PLACE.get().strategy or variables[0].store.owner
        require_owner(written(variables, global_step), in_charge)
        return variables, columns

    def _merged(self, own: dict[int, _Sum], variable: Variable) -> list[Any]:
        """Put the sums of one variable together as one gradient of all replicas."""
        replica_ids = range(len(variable.components))
        sums = [own.get(replica_id) or _Sum(variable) for replica_id in replica_ids]
        is_sparse = any(each.is_sparse for each in sums)
        totals = [each.total(is_sparse=is_sparse) for each in sums]
        if any(each.is_weighted for each in sums) or self._optimizer.settings.is_mean:
            return [Weighted(total, each.weight) for total, each in zip(totals, sums, strict=True)]
        return totals


@final
class BlockingAccumulator:
    """A gradient accumulator as plain step functions use it; got as `accumulator.blocking`.

    ContextError elsewhere than on the device thread of a replica.
    """

    __slots__ = ("_accumulator",)

    def __init__(self, accumulator: GradientAccumulator) -> None:
        self._accumulator = accumulator

    def add(self, grads_and_vars: Iterable[tuple[object, object]]) -> None:
        """Add gradients of one batch to this replica's sums.

        Args:
            grads_and_vars: As for `GradientAccumulator.add`.

        Raises:
            Exception: As `GradientAccumulator.add`.
        """
        replica_on_device("accumulator.blocking.add")
        _, work = self._accumulator._addition(grads_and_vars)
        work()

    def apply(self, global_step: Variable | None = None) -> None:
        """Apply what all replicas have added since the last time, and start anew.

        Args:
            global_step: As for `GradientAccumulator.apply`.

        Raises:
            Exception: As `GradientAccumulator.apply`.

        Cancellation:
            As for `GradientAccumulator.apply`.
        """
        frame = sys._getframe(1)
        site = CallSite(frame.f_code, frame.f_lasti)
        replica = replica_on_device("accumulator.blocking.apply")
        brought = self._accumulator._brought(global_step)
        replica.blocking.meet(APPLY_ACCUMULATED, self._accumulator, brought, site)

    def __repr__(self) -> str:
        return f"<BlockingAccumulator of {self._accumulator!r}>"


def _add_all(sums: Sequence[_Sum], gradients: Sequence[object], loop_step: LoopStep | None) -> None:
    for each, gradient in zip(sums, gradients, strict=True):
        if loop_step is not None:
            each.keep(loop_step)
        each.add(gradient)


def _in_turn(work: Callable[[], None]) -> None:
    """Call what adds to sums; one at a time, as on the lane of a device."""
    with REGISTRY.once("adding_gradients", threading.Lock):
        work()


def _at_scale(total: Any, scale: float | None) -> Any:
    """Bring a gradient to the scale of the first one that was added."""
    if isinstance(total, ScaledGradient):
        return total.unscaled() if scale is None else total.at_scale(scale).values
    return total if scale is None else total * scale


def _require_one_kind(variable: Variable, gradient: Any, sums: Iterable[_Sum]) -> None:
    is_weighted = isinstance(gradient, Weighted)
    total = gradient.total if is_weighted else gradient
    values = total.values if isinstance(total, ScaledGradient) else total
    is_sparse = isinstance(values, IndexedSlices)
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
