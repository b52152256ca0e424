"""What a strategy does with the variables it has made."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, final

from ..values import Snapshot, Variable, VariableOptions, VariableStore, take_snapshot


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


class VariableOwner(ABC):
    """Makes variables, and reads several of them at one version.

    Args:
        store: Where their writes are numbered and published.
    """

    def __init__(self, store: VariableStore) -> None:
        self._store = store
        self._variables = VariableTable()

    @abstractmethod
    def create_variable(self, value: Any, options: VariableOptions) -> Variable:
        """Make the strategy's kind of variable; called by `ar.Variable`."""

    def snapshot(self, *variables: Variable) -> Snapshot:
        """Return the values of variables at one version, for readers outside the step.

        Every write (an `assign`, or a whole `apply_gradients`) is in it completely or not at all.
        Cheap enough for every request, callable from any thread.

        Args:
            *variables: Variables of this strategy; none means all of them (not under the default
                strategy, which does not list its variables).

        Raises:
            TypeError: If something else than variables was given.
            ContextError: If a variable belongs to another strategy.
        """
        return take_snapshot(self._store, variables or self._variables.all())

    async def wait_for_version(self, variable: Variable, version: int) -> int:
        """Wait until a variable has seen `version` writes; return its version then.

        Raises:
            TypeError: If `variable` is no variable or `version` no int.
            ContextError: If it belongs to another strategy.

        Cancellation:
            Stops waiting; nothing else changes.
        """
        take_snapshot(self._store, (variable,))
        if isinstance(version, bool) or not isinstance(version, int):
            raise TypeError(f"wait_for_version counts writes with an int, got {version!r}.")
        return await self._store.wait_for(variable, version)

    @property
    def variable_table(self) -> VariableTable:
        """The variables this strategy has made, and their names."""
        return self._variables

    @property
    def store(self) -> VariableStore:
        """Where the writes of this strategy's variables are numbered and published."""
        return self._store

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """Trainable variables made by this strategy, in order of creation."""
        return tuple(variable for variable in self._variables.all() if variable.trainable)
