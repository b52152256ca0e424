"""The queue of one device: many put, one device thread takes and waits at a gate."""

from __future__ import annotations

from collections import deque
from typing import Any, final

from ..devices import Gate


@final
class DeviceQueue:
    """Elements on their way to one device thread.

    Args:
        gate: Where the thread waits while there is nothing.

    Invariants:
        * `_hungry` is filled before the thread looks a last time, and whoever puts looks at it
          afterwards: so one of the two sees the other. Whoever takes the entry out again decides;
          if that was `put`, the gate is opened.
    """

    __slots__ = ("_gate", "_hungry", "_items")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._items: deque[Any] = deque()
        self._hungry: list[bool] = []

    @property
    def is_empty(self) -> bool:
        """Whether taking would have to wait."""
        return not self._items

    def put(self, item: Any) -> None:
        """Enqueue something, from any thread."""
        self._items.append(item)
        if self._hungry and self._claim():
            self._gate.open()

    def take(self) -> Any:
        """Return the first item; waits for one, on the one thread that takes.

        Cancellation:
            A CancelledError once the event loop is closed.
        """
        while True:
            try:
                return self._items.popleft()
            except IndexError:
                self._hungry.append(True)
            if not self._items or not self._claim():
                self._gate.wait()

    def _claim(self) -> bool:
        try:
            self._hungry.pop()
        except IndexError:
            return False
        return True
