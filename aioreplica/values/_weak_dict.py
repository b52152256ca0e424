"""A dict with variables as keys that does not keep them alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, final

from ._variable import Variable

T = TypeVar("T")


@final
class WeakVariableDict(Generic[T]):
    """Maps variables to things; an entry goes when its variable does.

    Keys are told apart by identity. `weakref.WeakKeyDictionary` compares them with `==`, which for
    variables is elementwise.

    Example:
        >>> steps = WeakVariableDict()
        >>> w = Variable([1.0, 2.0])
        >>> steps[w] = 3
        >>> w in steps, steps.get(w), len(steps)
        (True, 3, 1)
        >>> del w
        >>> len(steps)
        0
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Variable], T]] = {}

    def __setitem__(self, variable: Variable, thing: T) -> None:
        key = id(variable)
        self._entries[key] = (weakref.ref(variable, _remover(self._entries, key)), thing)

    def __contains__(self, variable: Variable) -> bool:
        return id(variable) in self._entries

    def get(self, variable: Variable) -> T | None:
        """Return the entry of a variable, None if there is none."""
        entry = self._entries.get(id(variable))
        return None if entry is None else entry[1]

    def pop(self, variable: Variable) -> T | None:
        """Take the entry of a variable out, None if there is none."""
        entry = self._entries.pop(id(variable), None)
        return None if entry is None else entry[1]

    def items(self) -> list[tuple[Variable, T]]:
        """Return the variables that live with their entries, in the order they were added."""
        return [
            (variable, thing)
            for reference, thing in list(self._entries.values())
            if (variable := reference()) is not None
        ]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Variable]:
        for reference, _ in list(self._entries.values()):
            variable = reference()
            if variable is not None:
                yield variable

    def values(self) -> list[T]:
        """Return the entries of the variables that live, in the order they were added."""
        return [thing for _, thing in list(self._entries.values())]


def _remover(
    entries: dict[int, tuple[weakref.ref[Variable], T]], key: int
) -> Callable[[weakref.ref[Variable]], None]:
    def remove(_reference: weakref.ref[Variable]) -> None:
        entries.pop(key, None)

    return remove
