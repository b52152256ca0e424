"""Slots: what an optimizer remembers for each variable, in variables that live beside it.

A variable of half precision has one more, "master": its value in float32. The rule moves that, with
slots and gradients of float32, and the variable is its rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, final

import numpy as np

from ..tree import DType
from ..typing import VariableAggregation
from ..values import (
    DividedVariable,
    Division,
    PlainVariable,
    Variable,
    VariableOptions,
    WeakVariableDict,
    is_floating,
)

MASTER = "master"


@final
class SlotTable:
    """Finds and makes the slots of variables.

    Args:
        names: Names of the slots that every variable has.

    Attributes:
        made: The slots of each variable, in order of `names`; they go with the variable.
        restored: Values of a checkpoint for slots that are not made yet, by name; variables if
            they are divided among workers.
        in_step: Versions of a variable of half precision and of its master, of which the first is
            the rounding of the second; another version is looked at.

    Raises:
        ValueError: If a name is that of the master.
    """

    __slots__ = ("_lock", "in_step", "made", "names", "restored")

    def __init__(self, names: tuple[str, ...]) -> None:
        if MASTER in names:
            raise ValueError(
                f"No slot can be called {MASTER!r}: variables of half precision have one of that "
                "name. Choose another one."
            )
        self.names = names
        self.in_step: WeakVariableDict[tuple[int, int]] = WeakVariableDict()
        self.made: WeakVariableDict[tuple[Variable, ...]] = WeakVariableDict()
        self.restored: WeakVariableDict[dict[str, Any]] = WeakVariableDict()
        self._lock = Lock()

    def __len__(self) -> int:
        """Return the number of variables that have slots."""
        return len(self.made)

    def find(self, variable: Variable, name: str) -> Variable | None:
        """Return one slot; None if the variable has none yet, or none of that name."""
        names, slots = self.names_of(variable), self.made.get(variable)
        return None if slots is None or name not in names else slots[names.index(name)]

    def names_of(self, variable: Variable) -> tuple[str, ...]:
        """Return the names of a variable's slots, in order: a master comes first."""
        if working_dtype(variable.dtype) == variable.dtype:
            return self.names
        return MASTER, *self.names

    def all(self) -> tuple[Variable, ...]:
        """Return every slot, variable by variable in order of their first update."""
        return tuple(slot for slots in self.made.values() for slot in slots)

    def where(self) -> str:
        """Say where slots that may be divided among workers are."""
        for slots in self.made.values():
            for slot in slots:
                if isinstance(slot, DividedVariable):
                    return f"divided among {len(slot.division.ranges)} workers"
        return "whole in this process"

    def make(
        self,
        variable: Variable,
        initial: Callable[[str, Variable], object],
        division: Division | None = None,
    ) -> tuple[Variable, ...]:
        """Return the slots of a variable, in order of their names, making them the first time.

        Args:
            variable: Their owner.
            initial: Called as `initial(name, variable)`, gives a new slot's value.
            division: Of the slots among workers; None makes them whole.

        Raises:
            ContextError: If a checkpoint has brought parts, for another number of workers.
        """

        def start(name: str) -> object:
            value = np.asarray(initial(name, variable)) if name != MASTER else whole
            return value.astype(working_dtype(value.dtype), copy=False)

        whole = variable.components[0]
        is_part = division is not None and isinstance(variable, DividedVariable)
        if is_part:  # what stands for the whole, which is nowhere
            whole = np.broadcast_to(np.zeros((), working_dtype(variable.dtype)), variable.shape)

        with self._lock:  # two blocking runs may take the first step at the same time
            slots = self.made.get(variable)
            if slots is None:
                owner, prefix = variable.store.owner, variable.name
                restored = self.restored.get(variable) or {}
                for part in restored.values():
                    if isinstance(part, DividedVariable):
                        part.require_current(1 if division is None else len(division.ranges))
                names = self.names_of(variable)
                values = [
                    value_at_start(f"{prefix}/{name}", start(name), restored.get(name))
                    for name in names
                ]
                if division is not None:
                    values = [
                        value
                        if isinstance(value, DividedVariable)
                        else division.part_of(np.asarray(value))
                        for value in values
                    ]
                    if is_part and names[:1] == (MASTER,) and MASTER not in restored:
                        own = variable.components[0].reshape(-1)
                        values[0] = own.astype(working_dtype(own.dtype))
                slots = self.made[variable] = tuple(
                    value
                    if isinstance(value, DividedVariable)
                    else new_variable(owner, value, f"{prefix}/{name}", division)
                    for name, value in zip(names, values, strict=True)
                )
                self.restored.pop(variable)
            return slots


def value_at_start(name: str, initial: object, restored: Any) -> Any:
    """Return the value of a new slot: that of a checkpoint if there is one.

    Raises:
        ValueError: If it has another shape or dtype.
    """
    if restored is None:
        return initial
    fresh = np.asarray(initial)
    if restored.dtype != fresh.dtype == working_dtype(restored.dtype):
        restored = restored.astype(fresh.dtype)  # it was kept in half precision then
    if (fresh.shape, fresh.dtype) != (restored.shape, restored.dtype):
        raise ValueError(
            f"The slot {name!r} has shape {fresh.shape} and dtype {fresh.dtype}, but the "
            f"checkpoint that was restored has {restored.shape} and {restored.dtype} for it. Make "
            "the optimizer as it was when the checkpoint was saved."
        )
    return restored


def working_dtype(dtype: DType) -> DType:
    """Return the dtype that updates are computed in: float32 for float16 and bfloat16."""
    is_half = dtype.itemsize == 2 and is_floating(dtype)
    return np.dtype(np.float32) if is_half else dtype


def new_variable(
    strategy: Any, value: object, name: str, division: Division | None = None
) -> Variable:
    """Make a variable that is not trained, as `strategy` makes them; plain for None.

    With a division `value` is this worker's part.
    """
    array = np.array(value)
    array.flags.writeable = False
    options = VariableOptions(
        name, trainable=False, aggregation=VariableAggregation.NONE, division=division
    )
    if strategy is None:
        return PlainVariable(array, options)
    made: Variable = strategy.create_variable(array, options)
    return made
