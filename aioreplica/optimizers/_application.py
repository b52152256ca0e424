"""One application of gradients: the hooks of an optimizer called in order, the writes held back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from ..values import IndexedSlices, Variable
from ._block import BLOCK_BYTES, BlockRange, UpdateBlock, run_blocks
from ._scratch import ScratchPool
from ._total import Total
from ._touched import TouchedRows
from ._update import Column, Update

if TYPE_CHECKING:
    from ._elementwise import ElementwiseOptimizer
    from ._optimizer import Optimizer

Array = npt.NDArray[Any]

RANGE_BLOCKS = 8
"""A large variable is cut into ranges of so many blocks, which threads share."""

PIECE_BYTES = 2 * 1024 * 1024
"""Small variables are put together until they read and write as much as this."""


@final
class Piece(NamedTuple):
    """Some of the arithmetic, independent of the rest.

    Attributes:
        num_bytes: How much it reads and writes.
        run: Does it; any thread may.
    """

    num_bytes: int
    run: Callable[[], None]


@final
class Application:
    """Takes totals of gradients to new values of variables, slots and counters.

    Args:
        optimizer: Whose hooks are called.
        touched: What sparse updates remember, for an `ElementwiseOptimizer`; else None.
        scratch: Lends memory for blocks.
        update: Has the old values of all that is written; made before anything was read from them.
        rate: The learning rate of this step.
        rates: That of each variable.
        groups: Each variable with its slots.
        totals: Their gradients.
        counters: What is advanced by 1: the count of updates first.
        extra: Values of other variables that are written too.

    Invariants:
        * Nothing is written before `commit`, and everything in it.
    """

    __slots__ = (
        "_counters",
        "_extra",
        "_groups",
        "_of_step",
        "_optimizer",
        "_prepared",
        "_scratch",
        "_totals",
        "_touched",
        "_update",
    )

    def __init__(
        self,
        optimizer: Optimizer,
        touched: TouchedRows | None,
        scratch: ScratchPool,
        update: Update,
        rate: float,
        rates: Sequence[float],
        groups: Sequence[tuple[Variable, ...]],
        totals: Sequence[Total],
        counters: Sequence[Variable],
        extra: Mapping[Variable, Any],
    ) -> None:
        self._optimizer = optimizer
        self._touched = touched
        self._scratch = scratch
        self._groups = groups
        self._totals = totals
        self._counters = counters
        self._extra = extra
        self._update = update
        iteration = int(counters[0].components[0])
        made = {each: optimizer.prepare(each, iteration) for each in dict.fromkeys([rate, *rates])}
        self._of_step = made[rate]
        self._prepared = [made[each] for each in rates]

    def pieces(self) -> list[Piece]:
        """Return the arithmetic of the step."""
        touched = self._touched
        if touched is None:
            size = sum(total.num_bytes for total in self._totals)
            return [Piece(size, self._run_rule)]
        pieces: list[Piece] = []
        ranges: dict[np.dtype[Any], list[BlockRange]] = {}
        for group, total, prepared in zip(self._groups, self._totals, self._prepared, strict=True):
            for column in self._update.begin(group):
                if total.is_sparse:
                    run = partial(self._run_rows, touched, group, total, column, prepared)
                    pieces.append(Piece(total.num_bytes * 2 * len(group), run))
                else:
                    known = ranges.setdefault(group[0].dtype, [])
                    known += _ranges(group[0], prepared, column, total)
        for known in ranges.values():
            pieces += self._bundled(known)
        return pieces

    def commit(self) -> bool:
        """Finish, then write everything; False if somebody else has written meanwhile."""
        for variable, value in self._optimizer.finish(self._of_step).items():
            self._update.replace(variable, value)
        for variable, value in self._extra.items():
            self._update.replace(variable, value)
        for counter in self._counters:
            self._update.compute((counter,), _count)
        return self._update.commit()

    # ---- a rule for whole arrays ---------------------------------------------------------

    def _run_rule(self) -> None:
        for group, total, prepared in zip(self._groups, self._totals, self._prepared, strict=True):
            gradient = total.dense()
            if not total.is_finite and self._optimizer.treatment.on_non_finite != "ignore":
                return  # nothing will be written, and the rule may fail at such numbers
            self._update.compute(group, partial(self._new_component, prepared, gradient))

    def _new_component(
        self, prepared: Any, gradient: Array, old: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        names = self._optimizer.slot_names
        slots = dict(zip(names, old[1:], strict=True))
        value, new_slots = self._optimizer.update(prepared, old[0], gradient, slots)
        new = (value, *(new_slots[name] for name in names))
        return tuple(_apart(each, gradient) for each in new)

    # ---- a rule for elements -------------------------------------------------------------

    @property
    def _rule(self) -> UpdateBlock:
        optimizer: ElementwiseOptimizer = self._optimizer  # type: ignore[assignment]
        return optimizer.update_block

    def _bundled(self, ranges: Sequence[BlockRange]) -> Iterator[Piece]:
        """Put ranges together until they are worth a thread's attention."""
        bundle: list[BlockRange] = []
        size = 0
        for each in ranges:
            bundle.append(each)
            size += each.num_bytes
            if size >= PIECE_BYTES or each is ranges[-1]:
                yield Piece(size, partial(run_blocks, bundle, self._rule, self._scratch))
                bundle, size = [], 0

    def _run_rows(
        self,
        touched: TouchedRows,
        group: tuple[Variable, ...],
        total: Total,
        column: Column,
        prepared: Any,
    ) -> None:
        """Update the rows that a sparse gradient has, a few of them at a time."""
        slices: IndexedSlices = total.summed
        for variable, old, new in zip(group, *column, strict=True):
            touched.bring_up_to_date(variable, old, new)
        dtype = group[0].dtype
        width = max(1, slices.values[:1].size)
        step = max(1, BLOCK_BYTES // dtype.itemsize // width)
        for begin in range(0, len(slices.indices), step):
            rows = slices.indices[begin : begin + step]
            some = total.rows(begin, begin + len(rows))
            old_rows = [array[rows] for array in column.old]
            new_rows = [np.empty_like(array) for array in old_rows]
            flat_old = [array.reshape(-1) for array in old_rows]
            flat_new = [array.reshape(-1) for array in new_rows]
            block = BlockRange(group[0], prepared, flat_old, flat_new, some, 0, some.size)
            run_blocks([block], self._rule, self._scratch)
            if not some.is_finite:
                total.is_finite = False
            for array, changed in zip(column.new, new_rows, strict=True):
                array[rows] = changed
        for variable, old, new in zip(group, *column, strict=True):
            touched.remember(variable, old, new, slices.indices)

    def __repr__(self) -> str:
        return f"<Application of {self._optimizer!r} | {len(self._groups)} variables>"


def _ranges(
    variable: Variable, prepared: Any, column: Column, total: Total
) -> Iterator[BlockRange]:
    """Cut one component into ranges, which threads share."""
    old = [array.reshape(-1) for array in column.old]
    new = [array.reshape(-1) for array in column.new]
    step = RANGE_BLOCKS * (BLOCK_BYTES // old[0].itemsize)
    for start in range(0, total.size, step):
        yield BlockRange(variable, prepared, old, new, total, start, min(start + step, total.size))


def _apart(new: Any, gradient: Array) -> Any:
    """Copy what a rule returned if it is the gradient, which the user may change later."""
    if isinstance(new, np.ndarray) and np.may_share_memory(new, gradient):
        return new.copy()
    return new


def _count(old: tuple[Array, ...]) -> tuple[Array, ...]:
    return (np.add(old[0], 1, dtype=old[0].dtype),)
