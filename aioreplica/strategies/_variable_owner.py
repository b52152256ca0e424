"""Bookkeeping of the variables that a strategy has made."""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, final
from weakref import WeakValueDictionary

from ..values import (
    Snapshot,
    Variable,
    VariableOptions,
    VariableStore,
    take_snapshot,
    wait_error,
)
from ._lifecycle import Lifecycle


@final
class VariableTable:
    """Lists a strategy's living variables in order of creation; no two have one name.

    Variables are held weakly: one that the program has dropped is gone, and its name is free.
    """

    __slots__ = ("_by_name", "_by_number", "_equal_names", "_lock", "_next", "_num_equal")

    def __init__(self) -> None:
        self._by_number: WeakValueDictionary[int, Variable] = WeakValueDictionary()
        self._by_name: WeakValueDictionary[str, Variable] = WeakValueDictionary()
        self._next = self._num_equal = 0
        self._equal_names: set[str] = set()
        self._lock = threading.Lock()  # device threads make slots and variables too

    def __len__(self) -> int:
        """Return the number of variables."""
        return len(self._by_number)

    def all(self) -> tuple[Variable, ...]:
        """Return every variable, in order of creation."""
        with self._lock:
            return tuple(self._by_number.values())

    def made_since_last(self) -> tuple[int, tuple[Variable, ...]]:
        """Return the variables that are not known to be equal on all workers, and a number."""
        with self._lock:
            if self._next == self._num_equal:
                return self._next, ()
            found = [(i, variable) for i, variable in self._by_number.items()]
            known = self._equal_names
            made = (v for i, v in found if i >= self._num_equal and v.name not in known)
            return self._next, tuple(made)

    def are_equal_up_to(self, number: int) -> None:
        """Record that the variables made before the number was given are equal on all workers."""
        self._num_equal = number

    def are_equal(self, names: Iterable[str]) -> None:
        """Record that all variables of now, and any of these names, are equal on all workers."""
        self._equal_names = set(names)
        self._num_equal = self._next

    def has(self, name: str) -> bool:
        """Tell whether a variable has that name."""
        return name in self._by_name

    def add(self, name: str, make: Callable[[str], Variable]) -> Variable:
        """Make a variable under `name`, with a number added if it is taken, and list it."""
        with self._lock:
            variable = make(self._free(name))
            self._by_number[self._next] = variable
            self._by_name[variable.name] = variable
            self._next += 1
        return variable

    def require_free(self, name: str, strategy: object) -> None:
        """Check that a name that was asked for is free.

        In an interactive session a cell that runs again makes its variables again while the old
        ones still live: there the new one gets the name, and the old one a number.

        Raises:
            ValueError: If a variable has the name.
        """
        with self._lock:
            old = self._by_name.get(name)
            if old is None:
                return
            if "ps1" not in vars(sys):  # set in interactive sessions only, Jupyter included
                raise ValueError(
                    f"There is a variable named {name!r} in {strategy!r} already. Choose another "
                    "name, or leave it out to get a free one."
                )
            old.rename(self._free(name))
            del self._by_name[name]
            self._by_name[old.name] = old

    def _free(self, name: str) -> str:
        free, number = name, 0
        while free in self._by_name:
            number += 1
            free = f"{name}_{number}"
        return free


class VariableOwner(ABC):
    """Makes variables, and reads several of them at one version.

    Args:
        store: Where their writes are numbered and published.
    """

    _lifecycle: Lifecycle

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
            TypeError: If `variable` is not a variable or `version` not an int.
            ContextError: If it belongs to another strategy, or the strategy is closed before the
                variable has seen so many.

        Cancellation:
            Stops waiting; nothing else changes.
        """
        take_snapshot(self._store, (variable,))
        if isinstance(version, bool) or not isinstance(version, int):
            raise TypeError(f"wait_for_version counts writes with an int, got {version!r}.")
        if self._lifecycle.state == "closed" and variable.version < version:
            raise wait_error(variable, version, f"{self!r} is closed.")
        return await self._store.wait_for(variable, version)

    @property
    def elsewhere(self) -> Any:
        """Fetcher of values that live on parameter servers; None if they live here."""
        return None

    @property
    def variable_table(self) -> VariableTable:
        """The variables this strategy has made, and their names."""
        return self._variables

    @property
    def store(self) -> VariableStore:
        """Store that numbers and publishes the writes of this strategy's variables."""
        return self._store

    @property
    def trainable_variables(self) -> tuple[Variable, ...]:
        """Trainable variables made by this strategy, in order of creation."""
        return tuple(variable for variable in self._variables.all() if variable.trainable)
