"""Objects that are listed for as long as they live."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar, final
from weakref import WeakValueDictionary

T = TypeVar("T")


@final
class Living(Generic[T]):
    """Lists objects that others keep alive, in the order in which they were added; on any thread.

    They are told apart by identity. A `WeakSet` cannot be walked while another thread drops one of
    its objects: without a GIL the walk may end with an error.

    Example:
        >>> class Thing: ...
        >>> things, one = Living(), Thing()
        >>> things.add(one)
        >>> things.add(Thing())
        >>> list(things) == [one], len(things)
        (True, 1)
    """

    __slots__ = ("_by_id",)

    def __init__(self) -> None:
        self._by_id: WeakValueDictionary[int, T] = WeakValueDictionary()

    def add(self, thing: T) -> None:
        """List an object."""
        self._by_id[id(thing)] = thing

    def __iter__(self) -> Iterator[T]:
        for reference in self._by_id.valuerefs():  # copied at once
            thing = reference()
            if thing is not None:
                yield thing

    def __len__(self) -> int:
        return len(self._by_id)
