"""Slots: what an optimizer remembers for each variable, in variables that live beside it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, final

import numpy as np

from ..typing import VariableAggregation
from ..values import PlainVariable, Variable, VariableOptions, WeakVariableDict


@final
class SlotTable:
    """Finds and makes the slots of variables.

    Args:
        names: Names of the slots that every variable has.

    Attributes:
        made: The slots of each variable, in order of `names`; they go with the variable.
        restored: Values of a checkpoint for slots that are not made yet, by name.
    """

    __slots__ = ("_lock", "made", "names", "restored")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.made: WeakVariableDict[tuple[Variable, ...]] = WeakVariableDict()
        self.restored: WeakVariableDict[dict[str, Any]] = WeakVariableDict()
        self._lock = Lock()

    def __len__(self) -> int:
        """How many variables have slots."""
        return len(self.made)

    def find(self, variable: Variable, name: str) -> Variable | None:
        """Return one slot, None if the variable has none yet.

        Raises:
            ValueError: If there is no slot of that name.
        """
        if name not in self.names:
            legal = ", ".join(map(repr, self.names)) or "none"
            raise ValueError(f"Unknown slot {name!r}. The slots of this optimizer are: {legal}.")
        slots = self.made.get(variable)
        return None if slots is None else slots[self.names.index(name)]

    def all(self) -> tuple[Variable, ...]:
        """Return every slot, variable by variable in order of their first update."""
        return tuple(slot for slots in self.made.values() for slot in slots)

    def make(
        self, variable: Variable, initial: Callable[[str, Variable], Any]
    ) -> tuple[Variable, ...]:
        """Return the slots of a variable, in order of `names`, making them the first time.

        Args:
            variable: Their owner.
            initial: Called as `initial(name, variable)`, gives a new slot's value.
        """
        with self._lock:  # two blocking runs may take the first step at the same time
            slots = self.made.get(variable)
            if slots is None:
                owner, prefix = variable.strategy, variable.name
                restored = self.restored.get(variable) or {}
                values = [
                    value_at_start(f"{prefix}/{name}", initial(name, variable), restored.get(name))
                    for name in self.names
                ]
                slots = self.made[variable] = tuple(
                    new_variable(owner, value, f"{prefix}/{name}")
                    for name, value in zip(self.names, values, strict=True)
                )
                self.restored.pop(variable)
            return slots


def value_at_start(name: str, initial: Any, restored: Any) -> Any:
    """Return the value of a new slot: that of a checkpoint if there is one.

    Raises:
        ValueError: If it has another shape or dtype.
    """
    if restored is None:
        return initial
    fresh = np.asarray(initial)
    if (fresh.shape, fresh.dtype) != (restored.shape, restored.dtype):
        raise ValueError(
            f"The slot {name!r} has shape {fresh.shape} and dtype {fresh.dtype}, but the "
            f"checkpoint that was restored has {restored.shape} and {restored.dtype} for it. Make "
            "the optimizer as it was when the checkpoint was saved."
        )
    return restored


def new_variable(strategy: Any, value: Any, name: str) -> Variable:
    """Make a variable that is not trained, as `strategy` makes them; plain for None."""
    array = np.array(value)
    array.flags.writeable = False
    options = VariableOptions(name, trainable=False, aggregation=VariableAggregation.NONE)
    if strategy is None:
        return PlainVariable(array, options)
    made: Variable = strategy.create_variable(array, options)
    return made
