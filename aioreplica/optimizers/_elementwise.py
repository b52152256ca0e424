"""Optimizers whose rule treats every element by itself: in place, in blocks, on any thread."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ._blocks import Block
from ._kernels import Kernel
from ._optimizer import Optimizer

Array = npt.NDArray[Any]


class ElementwiseOptimizer(Optimizer):
    """Updates every element from its own gradient and slots, which all have the variable's shape.

    New values are built in the variables' older buffers, block by block, so that a step allocates
    nothing large; large variables are shared out to several threads; gradients that are
    IndexedSlices change their rows and the slots of those, and nothing else.

    A subclass supplies `new_slot`, `prepare` and `finish` as for `Optimizer`, and `update_block`.

    Example:
        >>> import asyncio
        >>> import numpy as np
        >>> from aioreplica import Variable
        >>> class Descent(ElementwiseOptimizer):
        ...     def __init__(self, learning_rate):
        ...         super().__init__(learning_rate, slot_names=())
        ...
        ...     def new_slot(self, name, variable):
        ...         raise AssertionError("there are no slots")
        ...
        ...     def prepare(self, learning_rate, iteration):
        ...         return learning_rate
        ...
        ...     def update_block(self, prepared, block):
        ...         np.multiply(block.gradient, prepared, out=block.scratch)
        ...         np.subtract(block.value, block.scratch, out=block.new_value)
        ...
        ...     def finish(self, prepared):
        ...         return {}
        >>> w = Variable([1.0, 2.0])
        >>> asyncio.run(Descent(0.5).apply_gradients([(np.array([2.0, 0.0]), w)]))
        >>> w.value
        array([0., 2.])
    """

    is_elementwise = True
    kernel: Kernel | None = None

    @abstractmethod
    def update_block(self, prepared: Any, block: Block) -> None:
        """Fill in the new values and slots of some elements.

        Called by several threads at once for different blocks of one step.

        Args:
            prepared: What `prepare` returned.
            block: Old values, slots and gradient, and where the new ones go: every element of
                `block.new_value` and `block.new_slots` has to be written, nothing else may be.

        Determinism:
            How elements are divided into blocks must not change the result.
        """

    def kernel_numbers(self, prepared: Any, block: Block) -> tuple[float, ...]:
        """Return the numbers that the kernel takes behind the arrays, if the rule has a kernel."""
        return ()

    def update(
        self, prepared: Any, value: Array, gradient: Array, slots: Mapping[str, Array]
    ) -> tuple[Array, Mapping[str, Array]]:
        """Return the new value and the new slots as new arrays; for trying out a rule.

        Args:
            prepared: What `prepare` returned.
            value: The old value.
            gradient: Its gradient.
            slots: The old slots.

        Shapes:
            All of one shape.
        """
        old = [value, *(slots[name] for name in self.slot_names)]
        new = [np.empty(value.shape, value.dtype) for _ in old]
        flat = [array.reshape(-1) for array in (*old, *new, gradient)]
        block = Block(None, flat[: len(old)], flat[len(old) : -1], flat[-1], np.empty_like(flat[0]))
        self.update_block(prepared, block)
        return new[0], dict(zip(self.slot_names, new[1:], strict=True))
