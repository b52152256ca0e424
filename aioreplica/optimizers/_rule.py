"""Hooks of an optimizer's rule, which a subclass of `Optimizer` supplies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from ..values import Variable

Array = npt.NDArray[Any]


class UpdateRule(ABC):
    """Says how gradients change values; computes only, and writes nothing.

    Attributes:
        is_elementwise: Whether the rule is that of an `ElementwiseOptimizer`.
        is_joint: Whether the rule is that of a `JointOptimizer`.
    """

    is_elementwise = False
    is_joint = False

    @abstractmethod
    def new_slot(self, name: str, variable: Variable) -> Array:
        """Return the initial value of a variable's slot."""

    @abstractmethod
    def prepare(self, learning_rate: float, iteration: int) -> Any:
        """Return what `update` needs to know of this step.

        Args:
            learning_rate: That of this step.
            iteration: How many updates were done before.
        """

    @abstractmethod
    def update(
        self, prepared: Any, value: Array, gradient: Array, slots: Mapping[str, Array]
    ) -> tuple[Array, Mapping[str, Array]]:
        """Return the new value and the new slots of one component of one variable.

        Called on a host thread if the variables are large; the arrays given are read-only.

        Shapes:
            gradient and the new value: that of the value.
        """

    @abstractmethod
    def finish(self, prepared: Any) -> Mapping[Variable, Array]:
        """Return new values of variables that are not slots, if the rule has any; on the loop."""
