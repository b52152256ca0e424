"""The one registry of the process, by name; and lists of objects for as long as they live."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, final
from weakref import WeakValueDictionary

T = TypeVar("T")


@final
class Registry:
    """Process-wide singletons, made on first use.

    Example:
        >>> Registry().once("answer", lambda: 42)
        42
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entries: dict[str, Any] = {}  # Any: whoever asks knows what the name stands for
        self._makers: dict[str, Callable[[], object]] = {}

    def once(self, name: str, factory: Callable[[], T]) -> T:
        """Return the entry called `name`, making it with `factory` if it is not there."""
        try:  # without the lock: what is there stays, unless a test replaces it meanwhile
            return self._entries[name]  # type: ignore[no-any-return]  # see above
        except KeyError:
            pass
        with self._lock:
            if name not in self._entries:
                self._entries[name] = self._makers.get(name, factory)()
            return self._entries[name]  # type: ignore[no-any-return]

    def replace(
        self, name: str, entry: object | None, make: Callable[[], object] | None = None
    ) -> object | None:
        """Put another object in an entry's place, or none; return what was there.

        This is how a test puts a simulated object where the program would find the real one.

        Args:
            name: The entry.
            entry: The object, or None.
            make: Makes the entry at its next first use, in place of the factory given then.
        """
        with self._lock:
            old: object | None = self._entries.pop(name, None)
            self._makers.pop(name, None)
            if entry is not None:
                self._entries[name] = entry
            if make is not None:
                self._makers[name] = make
            return old

    def reset_after_fork(self) -> None:
        """Give the child of a fork a lock of its own; the old one may be held by a lost thread."""
        self._lock = threading.RLock()


REGISTRY = Registry()
"""The one registry of the process."""


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
