"""One application of gradients: the hooks of an optimizer called in order, the writes held back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from ..values import Variable
from ._gradient import aggregate
from ._update import Update

if TYPE_CHECKING:
    from ._optimizer import Optimizer

Array = npt.NDArray[Any]


@final
class Application:
    """Takes merged gradients to new values of variables, slots and counters.

    Args:
        optimizer: Whose hooks are called.
        learning_rate: That of this step.
        groups: Each variable with its slots.
        iterations: The optimizer's count of updates.
        global_step: The user's, if there is one.

    Invariants:
        * Nothing is written before `commit`, and everything in it.
    """

    __slots__ = ("_counters", "_groups", "_optimizer", "_prepared", "_update")

    def __init__(
        self,
        optimizer: Optimizer,
        learning_rate: float,
        groups: Sequence[tuple[Variable, ...]],
        iterations: Variable,
        global_step: Variable | None,
    ) -> None:
        self._optimizer = optimizer
        self._groups = groups
        self._counters = [iterations] if global_step is None else [iterations, global_step]
        self._update = Update([*(v for group in groups for v in group), *self._counters])
        self._prepared = optimizer.prepare(learning_rate, int(iterations.components[0]))

    def compute(self, gradients: Sequence[Any]) -> None:
        """Do the arithmetic: aggregate each gradient, then apply it. Any thread may."""
        for group, gradient in zip(self._groups, gradients, strict=True):
            combined = aggregate(gradient)
            combined.flags.writeable = False
            self._update.compute(group, partial(self._new_component, combined))
        for counter in self._counters:
            self._update.compute((counter,), _count)

    def commit_if_current(self) -> bool:
        """Finish, then write everything, unless somebody has written meanwhile."""
        for variable, value in self._optimizer.finish(self._prepared).items():
            self._update.replace(variable, value)
        return self._update.commit_if_current()

    def _new_component(self, gradient: Array, old: tuple[Array, ...]) -> tuple[Array, ...]:
        names = self._optimizer.slot_names
        slots = dict(zip(names, old[1:], strict=True))
        value, new_slots = self._optimizer.update(self._prepared, old[0], gradient, slots)
        return (value, *(new_slots[name] for name in names))


def _count(old: tuple[Array, ...]) -> tuple[Array, ...]:
    return (np.add(old[0], 1, dtype=old[0].dtype),)
