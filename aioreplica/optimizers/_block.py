"""Blocks: the part of a variable that an elementwise rule takes from old to new in one go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..values import Variable
from ._scratch import ScratchPool
from ._total import Total

Array = npt.NDArray[Any]

BLOCK_BYTES = 128 * 1024
"""A rule reads and writes five to eight arrays several times over. Blocks of this size of all of
them stay in a core's L2 cache; of 16 KiB to 256 KiB it was the fastest."""


@final
class Block:
    """Elements of one component: old values and slots, new ones to be filled in, the gradient.

    All arrays are flat, equally long and of the variable's dtype.

    Attributes:
        variable: Whose elements they are; None where a rule is only tried out.
        value: The old ones; do not write.
        slots: The old slots, in order of the optimizer's slot names; do not write.
        gradient: The aggregated gradient, ready for use; do not write.
        new_value: To be filled in; holds anything before.
        new_slots: Likewise.
        scratch: Memory for whatever the rule needs.
    """

    __slots__ = ("gradient", "new_slots", "new_value", "scratch", "slots", "value", "variable")

    def __init__(
        self,
        variable: Variable | None,
        old: Sequence[Array],
        new: Sequence[Array],
        gradient: Array,
        scratch: Array,
    ) -> None:
        self.variable = variable
        self.value, *self.slots = old
        self.new_value, *self.new_slots = new
        self.gradient = gradient
        self.scratch = scratch

    def __repr__(self) -> str:
        name = None if self.variable is None else self.variable.name
        return f"<Block | {self.value.size} elements of {name}>"


@final
class BlockRange:
    """Runs a rule over a range of a component, block by block.

    Args:
        variable: Whose component it is.
        old: Its old value and slots, flat.
        new: Flat arrays for the new ones.
        total: Its gradient, not ready yet: dividing and clipping are done block by block.
        start: First element.
        stop: One past the last.
    """

    __slots__ = ("_new", "_old", "_start", "_stop", "_total", "_variable")

    def __init__(
        self,
        variable: Variable,
        old: Sequence[Array],
        new: Sequence[Array],
        total: Total,
        start: int,
        stop: int,
    ) -> None:
        self._variable = variable
        self._old = old
        self._new = new
        self._total = total
        self._start = start
        self._stop = stop

    def run(self, update: Any, prepared: Any, pool: ScratchPool) -> None:
        """Call `update(prepared, block)` for every block; gradients are checked on the way.

        Args:
            update: The rule.
            prepared: What it needs to know of the step.
            pool: Lends pieces of `BLOCK_BYTES`.
        """
        dtype = self._variable.dtype
        # What is not finite is found by the check, so NumPy need not warn of it.
        quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")
        with quiet, pool.lend(dtype) as scratch, pool.lend(dtype) as spare:
            for start in range(self._start, self._stop, scratch.size):
                part = slice(start, min(start + scratch.size, self._stop))
                update(prepared, self._block(part, scratch, spare))

    def _block(self, part: slice, scratch: Array, spare: Array) -> Block:
        total, size = self._total, part.stop - part.start
        gradient = total.values[part]
        total.check(gradient)
        if total.needs_work:
            gradient = total.ready(gradient, spare[:size])
        old = [array[part] for array in self._old]
        new = [array[part] for array in self._new]
        return Block(self._variable, old, new, gradient, scratch[:size])
