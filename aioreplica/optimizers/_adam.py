"""Adam and AdamW: steps scaled by running means of the gradient and of its square."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, Unpack, final

import numpy as np

from ..tree import Array
from ..values import Variable
from ._blocks import Block
from ._checks import LearningRate, checked_decay, checked_number
from ._elementwise import ElementwiseOptimizer
from ._kernels import ADAPT
from ._settings import OptimizerOptions

Mask: TypeAlias = Collection[Variable] | Callable[[Variable], bool]


@final
@dataclass(frozen=True, slots=True)
class AdamStep:
    """Numbers of one step.

    Attributes:
        learning_rate: That of the step.
        size: What the ratio of the two means is multiplied with.
        epsilon: What the root of the second one is kept away from 0 by.
    """

    learning_rate: float
    size: float
    epsilon: float


class AdamRule(ElementwiseOptimizer):
    """Moves by the mean gradient in units of its root mean square; a subclass says from where.

    Args:
        learning_rate: As for `Adam`, and so the others.
        beta_1: Decay of the running mean of gradients.
        beta_2: Decay of the running mean of squared gradients.
        epsilon: Keeps the division away from 0.
        **options: As for `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        self._beta_1 = checked_decay("beta_1", beta_1)
        self._beta_2 = checked_decay("beta_2", beta_2)
        self._epsilon = checked_number("epsilon", epsilon, "> 0", lambda value: value > 0)
        super().__init__(learning_rate, ("m", "v"), **options)

    kernel = ADAPT

    @abstractmethod
    def kept(self, prepared: AdamStep, block: Block) -> float:
        """Return what part of the values is left before they move."""

    def new_slot(self, name: str, variable: Variable) -> Array:
        """Start both means at 0."""
        return np.zeros(variable.shape, variable.dtype)

    def prepare(self, learning_rate: float, iteration: int) -> AdamStep:
        """Compute how much of each mean is still its initial 0.

        Instead of both means by their corrections, the two numbers they meet are divided.
        """
        step = iteration + 1
        first = 1 - self._beta_1**step
        root = math.sqrt(1 - self._beta_2**step)
        return AdamStep(learning_rate, learning_rate * root / first, self._epsilon * root)

    def update_block(self, prepared: AdamStep, block: Block) -> None:
        """Fill in the new means, then move."""
        gradient, scratch = block.gradient, block.scratch
        m, v = block.slots
        new_m, new_v = block.new_slots
        # Sums of shares: a difference of two numbers near the largest one would be infinite.
        np.multiply(m, self._beta_1, out=new_m)
        np.multiply(gradient, 1 - self._beta_1, out=scratch)
        np.add(new_m, scratch, out=new_m)
        np.multiply(gradient, 1 - self._beta_2, out=scratch)
        np.multiply(scratch, gradient, out=scratch)
        np.multiply(v, self._beta_2, out=new_v)
        np.add(new_v, scratch, out=new_v)
        np.sqrt(new_v, out=scratch)
        np.add(scratch, prepared.epsilon, out=scratch)
        np.divide(new_m, scratch, out=scratch)
        np.multiply(scratch, prepared.size, out=scratch)
        value, kept = block.value, self.kept(prepared, block)
        if not isinstance(kept, float) or kept != 1.0:  # a number that is only recorded is no float
            value = np.multiply(value, kept, out=block.new_value)
        np.subtract(value, scratch, out=block.new_value)

    def kernel_numbers(self, prepared: AdamStep, block: Block) -> tuple[float, ...]:
        """Return the shares of old and new in both means, and how to move."""
        kept, first, second = self.kept(prepared, block), self._beta_1, self._beta_2
        return first, 1 - first, second, 1 - second, prepared.epsilon, prepared.size, kept

    def finish(self, prepared: AdamStep) -> Mapping[Variable, Array]:
        """Return nothing: the powers of the betas follow from `iterations`."""
        return {}


@final
class Adam(AdamRule):
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
        TypeError: If one is not a number.
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
        super().__init__(learning_rate, beta_1, beta_2, epsilon, **options)

    def kept(self, prepared: AdamStep, block: Block) -> float:
        """All of it."""
        return 1.0


@final
class AdamW(AdamRule):
    """Adam, and every step brings the values a little nearer to 0; slots `m` and `v`.

    Args:
        learning_rate: A number, or a function of the number of updates done before.
        beta_1: Decay of the running mean of gradients, slot `m`.
        beta_2: Decay of the running mean of squared gradients, slot `v`.
        epsilon: Keeps the division away from 0.
        weight_decay: Which part of a value, times the learning rate, is taken off at every step.
        weight_decay_mask: The variables that decay: a collection, or a function that tells of a
            variable; None means all. Biases are usually left out.
        **options: As for `Optimizer`.

    Gradients that are IndexedSlices move and decay their rows only.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If one is not a number, or the mask is neither a collection of variables nor a
            function.
        ContextError: If made inside a replica.

    Example:
        >>> import asyncio
        >>> from aioreplica import Variable
        >>> w, bias = Variable(2.0, name="w"), Variable(2.0, name="bias")
        >>> adamw = AdamW(0.5, weight_decay=0.1, weight_decay_mask=[w])
        >>> asyncio.run(adamw.apply_gradients([(0.0, w), (0.0, bias)]))
        >>> print(w.value, bias.value)
        1.9 2.0

    Source:
        Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), as PyTorch and Keras
        write it.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.004,
        weight_decay_mask: Mask | None = None,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, **options)
        self._decay = checked_number("weight_decay", weight_decay, ">= 0", lambda value: value >= 0)
        self._decays = _checked_mask(weight_decay_mask)

    def attributes_of_rule(self, variables: Sequence[Variable]) -> Mapping[str, Any]:
        """Return what the rule keeps in the object, with the names of what decays as the mask."""
        kept = super().attributes_of_rule(variables)
        if self._decays is _is_any:
            return kept
        names = [each.name for each in variables if each.trainable and self._decays(each)]
        return {**kept, "_decays": partial(_is_named, tuple(names))}

    def kept(self, prepared: AdamStep, block: Block) -> float:
        """Return the weights that remain after decay."""
        if block.variable is not None and not self._decays(block.variable):
            return 1.0
        return 1 - prepared.learning_rate * self._decay


def _checked_mask(mask: object) -> Callable[[Variable], bool]:
    if mask is None:
        return _is_any
    if callable(mask):
        return lambda variable: bool(mask(variable))
    if isinstance(mask, Variable) or not isinstance(mask, Collection):
        raise TypeError(
            f"weight_decay_mask must be a list of variables or a function, got {mask!r}."
        )
    for variable in mask:
        if not isinstance(variable, Variable):
            raise TypeError(
                f"weight_decay_mask must hold variables, got {variable!r} "
                f"({type(variable).__name__})."
            )
    chosen = frozenset(mask)
    return lambda variable: variable in chosen


def _is_any(variable: Variable) -> bool:
    return True


def _is_named(names: Collection[str], variable: Variable) -> bool:
    return variable.name in names
