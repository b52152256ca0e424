"""Adam: steps scaled by running means of the gradient and of its square."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack, final

import numpy as np
import numpy.typing as npt

from ..values import Variable
from ._adam_rule import AdamRule, AdamStep
from ._block import Block
from ._elementwise import ElementwiseOptimizer
from ._hyperparameter import LearningRate
from ._optimizer import OptimizerOptions

Array = npt.NDArray[Any]


@final
class Adam(ElementwiseOptimizer):
    """The Adam optimizer, with slots `m` and `v`.

    Args:
        learning_rate: A number, or a function of the number of updates done before.
        beta_1: Decay of the running mean of gradients, slot `m`.
        beta_2: Decay of the running mean of squared gradients, slot `v`.
        epsilon: Keeps the division away from 0.
        **options: As for `Optimizer`.

    Gradients that are IndexedSlices move the means of their rows only ("lazy Adam").

    Raises:
        ValueError: If a number is out of range.
        TypeError: If one is no number.
        ContextError: If made inside a replica.

    Example:
        >>> import asyncio
        >>> from aioreplica import Variable
        >>> w = Variable(3.0, name="w")
        >>> adam = Adam(learning_rate=0.5)
        >>> async def train():
        ...     for _ in range(100):
        ...         await adam.minimize(lambda: (w.value - 1.0) ** 2)
        >>> asyncio.run(train())
        >>> print(round(float(w.value), 1), adam.iterations.value)
        1.0 100

    Source:
        Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        self._rule = AdamRule(beta_1, beta_2, epsilon)
        super().__init__(learning_rate, ("m", "v"), **options)

    def new_slot(self, name: str, variable: Variable) -> Array:
        """Start both means at 0."""
        return np.zeros(variable.shape, variable.dtype)

    def prepare(self, learning_rate: float, iteration: int) -> AdamStep:
        """Compute how much of each mean is still its initial 0."""
        return self._rule.prepare(learning_rate, iteration)

    def update_block(self, prepared: AdamStep, block: Block) -> None:
        """Move against the mean gradient, in units of its root mean square."""
        self._rule.update_block(prepared, block)
        np.subtract(block.value, block.scratch, out=block.new_value)

    def finish(self, prepared: AdamStep) -> Mapping[Variable, Array]:
        """Nothing: the powers of the betas follow from `iterations`."""
        return {}
