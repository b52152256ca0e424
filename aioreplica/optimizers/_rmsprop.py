"""RMSprop: steps scaled by a running mean of squared gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack, final

import numpy as np
import numpy.typing as npt

from ..values import Variable
from ._blocks import Block
from ._elementwise import ElementwiseOptimizer
from ._hyperparameter import LearningRate, checked_decay, checked_number
from ._kernels import DIVIDE_BY_ROOT, DIVIDE_BY_ROOT_WITH_MOMENTUM
from ._settings import OptimizerOptions

Array = npt.NDArray[Any]


@final
class RMSprop(ElementwiseOptimizer):
    """Divides gradients by the root of their mean square; slots `rms`, `mean` and `momentum`.

    Args:
        learning_rate: A number, or a function of the number of updates done before.
        rho: Decay of the running mean of squared gradients, slot `rms`.
        momentum: What the running sum of steps is multiplied with, slot `momentum`; 0 keeps none.
        epsilon: Added to the mean square under the root.
        centered: Whether to divide by an estimate of the variance instead, which takes a running
            mean of gradients, slot `mean`.
        **options: As for `Optimizer`.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If one is not a number.
        ContextError: If made inside a replica.

    Example:
        >>> import asyncio
        >>> from aioreplica import Variable
        >>> w = Variable(3.0, name="w")
        >>> loss = asyncio.run(RMSprop(0.1, rho=0.75).minimize(lambda: (w.value - 1.0) ** 2))
        >>> print(round(float(w.value), 3))
        2.8

    Source:
        Hinton, "Neural Networks for Machine Learning", lecture 6e (2012); defaults and the place
        of epsilon as in Keras and optax. The learning rate is applied after the momentum, as in
        PyTorch.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        self._rho = checked_decay("rho", rho)
        self._momentum = checked_decay("momentum", momentum)
        self._epsilon = checked_number("epsilon", epsilon, "> 0", lambda value: value > 0)
        self._centered = bool(centered)
        if not centered:
            self.kernel = DIVIDE_BY_ROOT_WITH_MOMENTUM if self._momentum else DIVIDE_BY_ROOT
        names = ("rms", "mean" if centered else "", "momentum" if self._momentum else "")
        super().__init__(learning_rate, tuple(filter(None, names)), **options)

    def new_slot(self, name: str, variable: Variable) -> Array:
        """Start all of them at 0."""
        return np.zeros(variable.shape, variable.dtype)

    def prepare(self, learning_rate: float, iteration: int) -> float:
        """Return the learning rate."""
        return learning_rate

    def update_block(self, prepared: float, block: Block) -> None:
        """Move by the gradient over the root of its mean square, or by a running sum of that."""
        gradient, scratch = block.gradient, block.scratch
        rms, *others = block.slots
        new_rms, *new_others = block.new_slots
        # Sums of shares: a difference of two numbers near the largest one would be infinite.
        share = np.multiply(gradient, 1 - self._rho, out=scratch)
        if self._centered:
            np.multiply(others[0], self._rho, out=new_others[0])
            np.add(new_others[0], share, out=new_others[0])
        np.multiply(share, gradient, out=scratch)
        np.multiply(rms, self._rho, out=new_rms)
        np.add(new_rms, scratch, out=new_rms)
        if self._centered:
            np.multiply(new_others[0], new_others[0], out=scratch)
            np.subtract(new_rms, scratch, out=scratch)
            np.maximum(scratch, 0, out=scratch)  # rounding can make a variance of 0 negative
            np.add(scratch, self._epsilon, out=scratch)
        else:
            np.add(new_rms, self._epsilon, out=scratch)
        np.sqrt(scratch, out=scratch)
        direction = np.divide(gradient, scratch, out=scratch)
        if self._momentum:
            old, new = others[-1], new_others[-1]
            np.multiply(old, self._momentum, out=new)
            direction = np.add(new, scratch, out=new)
        np.multiply(direction, prepared, out=scratch)
        np.subtract(block.value, scratch, out=block.new_value)

    def kernel_numbers(self, prepared: float, block: Block) -> tuple[float, ...]:
        """Return the shares of old and new in the mean, epsilon, the momentum and the rate."""
        momentum = (self._momentum,) if self._momentum else ()
        return self._rho, 1 - self._rho, self._epsilon, *momentum, prepared

    def finish(self, prepared: float) -> Mapping[Variable, Array]:
        """Nothing."""
        return {}
