"""Optimizers of other libraries: one call of theirs updates all variables of a step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from ..values import Variable
from ._optimizer import Optimizer
from ._staged_write import StagedWrite

Array = npt.NDArray[Any]


class JointOptimizer(Optimizer):
    """Updates all variables of a step together; `prepare` gives what stands for each of them.

    Attributes:
        is_warm: Whether an update was made, so that the next one compiles nothing.
    """

    is_joint = True
    is_warm = False

    @abstractmethod
    def start(self, variables: Sequence[Variable]) -> Sequence[Variable]:
        """Get ready for these variables; return state of the optimizer that is not a slot.

        Called before `new_slot`, at every step.

        Args:
            variables: Those with a gradient.
        """

    @abstractmethod
    def update_all(
        self,
        prepared: Sequence[Any],
        variables: Sequence[Variable],
        groups: Sequence[tuple[Variable, ...]],
        shared: Sequence[Variable],
        gradients: Sequence[Array],
        write: StagedWrite,
    ) -> None:
        """Stage new values of all variables, slots and shared state; on any thread.

        Args:
            prepared: For each variable what `prepare` gave for its learning rate.
            variables: Those with a gradient.
            groups: Each variable, or its master, with its slots.
            shared: What `start` returned.
            gradients: Of each variable; do not write.
            write: Where the new values go.
        """

    def update(
        self, prepared: Any, value: Array, gradient: Array, slots: Mapping[str, Array]
    ) -> tuple[Array, Mapping[str, Array]]:
        """Refuse: there is no rule for one variable.

        Raises:
            TypeError: Always.
        """
        raise TypeError(f"{self!r} updates all variables together. Use `apply_gradients`.")

    def finish(self, prepared: Any) -> Mapping[Variable, Array]:
        """Return {}: `update_all` has staged everything."""
        return {}
