"""The rule that Adam and AdamW share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import numpy as np

from ._block import Block
from ._hyperparameter import checked_decay, checked_number


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


@final
class AdamRule:
    """Moves by the mean gradient in units of its root mean square.

    Args:
        beta_1: Decay of the running mean of gradients.
        beta_2: Decay of the running mean of squared gradients.
        epsilon: Keeps the division away from 0.

    Raises:
        ValueError: If a number is out of range.
        TypeError: If one is no number.
    """

    __slots__ = ("_beta_1", "_beta_2", "_epsilon")

    def __init__(self, beta_1: float, beta_2: float, epsilon: float) -> None:
        self._beta_1 = checked_decay("beta_1", beta_1)
        self._beta_2 = checked_decay("beta_2", beta_2)
        self._epsilon = checked_number("epsilon", epsilon, "> 0", lambda value: value > 0)

    def prepare(self, learning_rate: float, iteration: int) -> AdamStep:
        """Compute how much of each mean is still its initial 0.

        Instead of both means by their corrections, the two numbers they meet are divided.
        """
        step = iteration + 1
        first = 1 - self._beta_1**step
        root = math.sqrt(1 - self._beta_2**step)
        return AdamStep(learning_rate, learning_rate * root / first, self._epsilon * root)

    def update_block(self, prepared: AdamStep, block: Block) -> None:
        """Fill in the new means, and leave the step to subtract in the scratch memory."""
        gradient, scratch = block.gradient, block.scratch
        m, v = block.slots
        new_m, new_v = block.new_slots
        np.subtract(gradient, m, out=scratch)
        np.multiply(scratch, 1 - self._beta_1, out=scratch)
        np.add(m, scratch, out=new_m)
        np.multiply(gradient, gradient, out=scratch)
        np.subtract(scratch, v, out=scratch)
        np.multiply(scratch, 1 - self._beta_2, out=scratch)
        np.add(v, scratch, out=new_v)
        np.sqrt(new_v, out=scratch)
        np.add(scratch, prepared.epsilon, out=scratch)
        np.divide(new_m, scratch, out=scratch)
        np.multiply(scratch, prepared.size, out=scratch)

    def __repr__(self) -> str:
        return f"<AdamRule | {self._beta_1}, {self._beta_2}, {self._epsilon}>"
