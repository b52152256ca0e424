"""AdamW: Adam with weight decay that is kept apart from the gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias, Unpack, final

import numpy as np
import numpy.typing as npt

from ..values import Variable
from ._adam_rule import AdamRule, AdamStep
from ._block import Block
from ._elementwise import ElementwiseOptimizer
from ._hyperparameter import LearningRate, checked_number
from ._optimizer import OptimizerOptions

Array = npt.NDArray[Any]
Mask: TypeAlias = Collection[Variable] | Callable[[Variable], bool]


@final
class AdamW(ElementwiseOptimizer):
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
        TypeError: If one is no number, or the mask is neither a collection of variables nor a
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
        self._rule = AdamRule(beta_1, beta_2, epsilon)
        self._decay = checked_number("weight_decay", weight_decay, ">= 0", lambda value: value >= 0)
        self._decays = _checked_mask(weight_decay_mask)
        super().__init__(learning_rate, ("m", "v"), **options)

    def new_slot(self, name: str, variable: Variable) -> Array:
        """Start both means at 0."""
        return np.zeros(variable.shape, variable.dtype)

    def prepare(self, learning_rate: float, iteration: int) -> AdamStep:
        """Compute how much of each mean is still its initial 0."""
        return self._rule.prepare(learning_rate, iteration)

    def update_block(self, prepared: AdamStep, block: Block) -> None:
        """Decay the values, then move as Adam does."""
        self._rule.update_block(prepared, block)
        value = block.value
        if block.variable is None or self._decays(block.variable):
            kept = 1 - prepared.learning_rate * self._decay
            value = np.multiply(value, kept, out=block.new_value)
        np.subtract(value, block.scratch, out=block.new_value)

    def finish(self, prepared: AdamStep) -> Mapping[Variable, Array]:
        """Nothing: the powers of the betas follow from `iterations`."""
        return {}


def _checked_mask(mask: Any) -> Callable[[Variable], bool]:
    if mask is None:
        return lambda variable: True
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
