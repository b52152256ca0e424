"""Optimizers whose rule treats every element by itself: in place, in blocks, on any thread."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Unpack, final

import numpy as np

from ..tree import Array
from ..values import Variable
from ._blocks import Block
from ._checks import LearningRate, checked_decay, checked_number
from ._kernels import (
    ACCUMULATE,
    DESCEND,
    DESCEND_WITH_MOMENTUM,
    DESCEND_WITH_NESTEROV,
    DIVIDE_BY_ROOT,
    DIVIDE_BY_ROOT_WITH_MOMENTUM,
    Kernel,
)
from ._optimizer import Optimizer
from ._settings import OptimizerOptions


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
