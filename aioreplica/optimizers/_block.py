"""Blocks: the part of a variable that an elementwise rule takes from old to new in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ..values import Variable
from ._scratch import ScratchPool
from ._total import Total, quiet

Array = npt.NDArray[Any]
UpdateBlock: TypeAlias = Callable[[Any, "Block"], None]

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
        prepared: What the rule needs to know of the step.
        old: Its old value and slots, flat.
        new: Flat arrays for the new ones.
        total: Its gradient, not ready yet: all that is to be done with it is done block by block.
        start: First element.
        stop: One past the last.

    Attributes:
        num_bytes: How much it reads and writes.
    """

    __slots__ = ("_new", "_old", "_prepared", "_start", "_stop", "_total", "_variable", "num_bytes")

    def __init__(
        self,
        variable: Variable,
        prepared: Any,
        old: Sequence[Array],
        new: Sequence[Array],
        total: Total,
        start: int,
        stop: int,
    ) -> None:
        self._variable = variable
        self._prepared = prepared
        self._old = old
        self._new = new
        self._total = total
        self._start = start
        self._stop = stop
        count, gradients = stop - start, total.num_bytes // max(1, total.size)
        self.num_bytes = count * (2 * len(old) * old[0].itemsize + gradients)

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the variable."""
        return self._variable.dtype

    def run(self, update: UpdateBlock, scratch: Array, spare: Array) -> None:
        """Call the rule for every block.

        Args:
            update: The rule.
            scratch: Memory for it, `BLOCK_BYTES` of the variable's dtype.
            spare: As much memory for gradients.
        """
        for start in range(self._start, self._stop, scratch.size):
            stop = min(start + scratch.size, self._stop)
            size = stop - start
            gradient = self._total.gradient(start, stop, spare[:size], scratch)
            old = [array[start:stop] for array in self._old]
            new = [array[start:stop] for array in self._new]
            update(self._prepared, Block(self._variable, old, new, gradient, scratch[:size]))


def run_blocks(ranges: Sequence[BlockRange], update: UpdateBlock, pool: ScratchPool) -> None:
    """Run a rule over some ranges; gradients are checked on the way.

    Args:
        ranges: Of variables of one dtype.
        update: The rule.
        pool: Lends pieces of `BLOCK_BYTES`.
    """
    dtype = ranges[0].dtype
    with quiet(), pool.lend(dtype) as scratch, pool.lend(dtype) as spare:
        for each in ranges:
            each.run(update, scratch, spare)
