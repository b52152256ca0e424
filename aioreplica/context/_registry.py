"""The one registry of the process: everything that must exist once, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, final

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
