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
    """

    __slots__ = ("_lock", "made", "names")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.made: WeakVariableDict[tuple[Variable, ...]] = WeakVariableDict()
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
                slots = self.made[variable] = tuple(
                    new_variable(owner, initial(name, variable), f"{prefix}/{name}")
                    for name in self.names
                )
            return slots


def new_variable(strategy: Any, value: Any, name: str) -> Variable:
    """Make a variable that is not trained, as `strategy` makes them; plain for None."""
    array = np.array(value)
    array.flags.writeable = False
    options = VariableOptions(name, trainable=False, aggregation=VariableAggregation.NONE)
    if strategy is None:
        return PlainVariable(array, options)
    made: Variable = strategy.create_variable(array, options)
    return made
