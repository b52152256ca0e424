"""A ring that every thread adds to, and that can be copied at any moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar, final

from .._gil import has_gil

T = TypeVar("T")


@final
class Ring(Generic[T]):
    """Keeps the newest of what threads add.

    A deque is copied in one go while the GIL is held. Without a GIL, what another thread appends
    meanwhile ends the copy with an error, so that both take a lock there.

    Args:
        capacity: How many are kept.

    Attributes:
        capacity: The same.
        add: Adds one, from any thread; bound once, as every merge is added.

    Example:
        >>> ring = Ring(2)
        >>> for number in range(3):
        ...     ring.add(number)
        >>> ring.copied(), len(ring)
        ([1, 2], 2)
    """

    __slots__ = ("_kept", "_lock", "add", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: deque[T] = deque(maxlen=capacity)
        self._lock = Lock()
        self.add: Callable[[T], None] = self._kept.append if has_gil() else self._add_in_turn

    def copied(self) -> list[T]:
        """Return what is kept, oldest first."""
        with self._lock:
            return list(self._kept)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)

    def _add_in_turn(self, thing: T) -> None:
        with self._lock:
            self._kept.append(thing)
