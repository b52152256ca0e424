"""Adagrad: steps scaled by all squared gradients so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack, final

import numpy as np
import numpy.typing as npt

from ..values import Variable
from ._blocks import Block
from ._elementwise import ElementwiseOptimizer
from ._hyperparameter import LearningRate, checked_number
from ._kernels import ACCUMULATE
from ._settings import OptimizerOptions

Array = npt.NDArray[Any]


@final
class Adagrad(ElementwiseOptimizer):
    """Gives elements that had small gradients larger steps; slot `accumulator`.

    Args:
        learning_rate: A number, or a function of the number of updates done before.
        initial_accumulator_value: Where the sum of squared gradients starts.
        epsilon: Added to the sum under the root.
        **options: As for `Optimizer`.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If one is not a number.
        ContextError: If made inside a replica.

    Example:
        >>> import asyncio
        >>> from aioreplica import Variable
        >>> w = Variable(3.0, name="w")
        >>> adagrad = Adagrad(0.5, initial_accumulator_value=0.0)
        >>> loss = asyncio.run(adagrad.minimize(lambda: (w.value - 1.0) ** 2))
        >>> print(round(float(w.value), 3))
        2.5

    Source:
        Duchi, Hazan and Singer, "Adaptive Subgradient Methods" (2011); defaults and the place of
        epsilon as in Keras and optax.
    """

    kernel = ACCUMULATE

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        self._start = checked_number(
            "initial_accumulator_value", initial_accumulator_value, ">= 0", lambda value: value >= 0
        )
        self._epsilon = checked_number("epsilon", epsilon, "> 0", lambda value: value > 0)
        super().__init__(learning_rate, ("accumulator",), **options)

    def new_slot(self, name: str, variable: Variable) -> Array:
        """Start the sum where it was asked for."""
        return np.full(variable.shape, self._start, variable.dtype)

    def prepare(self, learning_rate: float, iteration: int) -> float:
        """Return the learning rate."""
        return learning_rate

    def update_block(self, prepared: float, block: Block) -> None:
        """Add the squares up; move by the gradient over the root of the sum."""
        [old], [new], scratch = block.slots, block.new_slots, block.scratch
        np.multiply(block.gradient, block.gradient, out=scratch)
        np.add(old, scratch, out=new)
        np.add(new, self._epsilon, out=scratch)
        np.sqrt(scratch, out=scratch)
        np.divide(block.gradient, scratch, out=scratch)
        np.multiply(scratch, prepared, out=scratch)
        np.subtract(block.value, scratch, out=block.new_value)

    def kernel_numbers(self, prepared: float, block: Block) -> tuple[float, ...]:
        """Return epsilon and the learning rate."""
        return self._epsilon, prepared

    def finish(self, prepared: float) -> Mapping[Variable, Array]:
        """Nothing."""
        return {}
