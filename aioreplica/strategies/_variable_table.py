"""The variables that a strategy has made, and their names."""

from __future__ import annotations

import threading
from typing import final

from ..values import Variable


@final
class VariableTable:
    """Lists a strategy's variables in order of creation; no two have one name."""

    __slots__ = ("_lock", "_names", "_variables")

    def __init__(self) -> None:
        self._variables: list[Variable] = []
        self._names: set[str] = set()
        self._lock = threading.Lock()  # device threads make slots and variables too

    def __len__(self) -> int:
        """How many variables there are."""
        return len(self._variables)

    def add(self, variable: Variable) -> None:
        """List a new variable; its name came from `free_name`."""
        self._variables.append(variable)

    def all(self) -> tuple[Variable, ...]:
        """Return every variable, in order of creation."""
        return tuple(self._variables)

    def has(self, name: str) -> bool:
        """Tell whether a variable has that name."""
        return name in self._names

    def free_name(self, name: str) -> str:
        """Take `name`, with a number added if it is taken, and return it."""
        free, number = name, 0
        with self._lock:
            while free in self._names:
                number += 1
                free = f"{name}_{number}"
            self._names.add(free)
        return free
