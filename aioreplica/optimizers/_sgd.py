"""Stochastic gradient descent, plain or with momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack, final

import numpy as np
import numpy.typing as npt

from ..values import Variable
from ._blocks import Block
from ._elementwise import ElementwiseOptimizer
from ._hyperparameter import LearningRate, checked_decay
from ._kernels import DESCEND, DESCEND_WITH_MOMENTUM, DESCEND_WITH_NESTEROV
from ._settings import OptimizerOptions

Array = npt.NDArray[Any]


@final
class SGD(ElementwiseOptimizer):
    """Moves against the gradient, or against a running sum of gradients, slot `momentum`.

    Args:
        learning_rate: A number, or a function of the number of updates done before.
        momentum: What the running sum is multiplied with at every step; 0 keeps none.
        nesterov: Whether to look one step of the momentum ahead.
        **options: As for `Optimizer`.

    Raises:
        ValueError: If a number is out of range, or `nesterov` is asked for without momentum.
        TypeError: If one is not a number.
        ContextError: If made inside a replica.

    Example:
        >>> import asyncio
        >>> from aioreplica import Variable
        >>> w = Variable(3.0, name="w")
        >>> loss = asyncio.run(SGD(0.5).minimize(lambda: (w.value - 1.0) ** 2))
        >>> print(w.value)
        1.0

    Source:
        Sutskever et al., "On the importance of initialization and momentum in deep learning"
        (2013). The learning rate is applied after the sum, as in PyTorch and optax, so that a
        schedule acts at once.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        self._momentum = checked_decay("momentum", momentum)
        if nesterov and not self._momentum:
            raise ValueError(f"nesterov=True needs a momentum above 0, got {momentum!r}.")
        self._nesterov = bool(nesterov)
        self.kernel = DESCEND
        if self._momentum:
            self.kernel = DESCEND_WITH_NESTEROV if nesterov else DESCEND_WITH_MOMENTUM
        super().__init__(learning_rate, ("momentum",) if self._momentum else (), **options)

    def new_slot(self, name: str, variable: Variable) -> Array:
        """Start the sum at 0."""
        return np.zeros(variable.shape, variable.dtype)

    def prepare(self, learning_rate: float, iteration: int) -> float:
        """Return the learning rate."""
        return learning_rate

    def update_block(self, prepared: float, block: Block) -> None:
        """Move against the gradient, the sum, or the sum one step on."""
        direction, scratch = block.gradient, block.scratch
        if self._momentum:
            [old], [new] = block.slots, block.new_slots
            np.multiply(old, self._momentum, out=scratch)
            np.add(scratch, block.gradient, out=new)
            direction = new
            if self._nesterov:
                np.multiply(new, self._momentum, out=scratch)
                direction = np.add(scratch, block.gradient, out=scratch)
        np.multiply(direction, prepared, out=scratch)
        np.subtract(block.value, scratch, out=block.new_value)

    def kernel_numbers(self, prepared: float, block: Block) -> tuple[float, ...]:
        """Return the momentum, if there is one, and the learning rate."""
        return (self._momentum, prepared) if self._momentum else (prepared,)

    def finish(self, prepared: float) -> Mapping[Variable, Array]:
        """Nothing."""
        return {}
