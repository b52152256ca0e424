"""The infeed: one bounded queue per device, filled in step, emptied by the device threads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, unique
from threading import Lock
from typing import Any, final

from ..devices import Gate, new_gate
from ..tree import leaves

MAX_AHEAD = 64
AHEAD_BYTES = 8 * 1024 * 1024
"""How far the infeed runs ahead: up to 64 elements, fewer if they are large, at least 2."""

CHUNK_BYTES = 64 * 1024 * 1024
"""How large the elements of one compiled chunk may be; as far ahead is read for it."""


@final
@unique
class Mark(Enum):
    """Mark in a queue in place of an element."""

    END = "end"
    ABORTED = "aborted"


@final
class Infeed:
    """The queues of all devices, host by host.

    Args:
        hosts: The replica ids of each host.
        loop: The event loop of the run.
        fills_chunks: Whether to read as far ahead as one compiled chunk takes.

    Invariants:
        * Every queue gets the same number of elements: a step is there for all or for none.
        * No queue holds more than `capacity` elements.
        * A feeder that waits is woken once, by whichever device makes room or by `abort`.
    """

    def __init__(
        self,
        hosts: Sequence[Sequence[int]],
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        fills_chunks: bool = False,
    ) -> None:
        count = sum(map(len, hosts))
        self._queues = [DeviceQueue(new_gate(loop)) for _ in range(count)]
        self._in_order = [(i, self._queues[i]) for host in hosts for i in host]
        self.fills_chunks = fills_chunks
        self._taken = [0] * count
        self._ahead_bytes = CHUNK_BYTES if fills_chunks else AHEAD_BYTES
        self._lock = Lock()
        self._wake_feeder: Callable[[], None] | None = None
        self.capacity = 2
        self.num_put = 0
        self.has_failed = False
        self.is_aborted = False

    # ---- the feeder's side ---------------------------------------------------------------

    def put(self, *elements: Sequence[tuple[object, ...]]) -> None:
        """Enqueue elements, each a tuple of inputs per replica: host by host, in replica order."""
        if self.num_put == 0:
            first = leaves(elements[0])
            num_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in first)
            self.capacity = max(2, min(MAX_AHEAD, self._ahead_bytes // max(1, num_bytes)))
        if len(elements) == 1:  # eager steps read one by one
            for replica_id, queue in self._in_order:
                queue.put(elements[0][replica_id])
        else:
            for replica_id, queue in self._in_order:
                queue.put(*[parts[replica_id] for parts in elements])
        self.num_put += len(elements)

    def end(self, *, has_failed: bool = False) -> None:
        """Say that nothing comes behind the elements that are there, or could not be read."""
        self.has_failed = has_failed  # before the marks: who takes one sees this
        for _, queue in self._in_order:
            queue.put(Mark.END)

    @property
    def num_waiting(self) -> int:
        """Number of elements that some device has not taken."""
        return self.num_put - min(self._taken)

    @property
    def room(self) -> int:
        """Number of elements that may be put now."""
        return self.capacity - self.num_waiting

    @property
    def has_room(self) -> bool:
        """True if one more element may be put."""
        return self.num_put - min(self._taken) < self.capacity

    def wait_for_room(self, wake: Callable[[], None]) -> bool:
        """Have `wake` called once, from any thread, when half of the room is free.

        Returns:
            False if there is room already or the infeed is aborted: `wake` will not be called.
        """
        with self._lock:
            if self.is_aborted:
                return False
            self._wake_feeder = wake
        if not self.has_room:  # looked at behind the callback: a device takes first, then looks
            return True
        with self._lock:
            is_called, self._wake_feeder = self._wake_feeder is None, None
        return is_called

    # ---- the devices' side ---------------------------------------------------------------

    def is_empty(self, replica_id: int) -> bool:
        """Tell whether a device would have to wait."""
        return self._queues[replica_id].is_empty

    def num_ready(self, replica_id: int) -> int:
        """Wait for the inputs of a replica's next step; return how many are there, 0 at the end.

        Cancellation:
            A CancelledError once the infeed is aborted, or the event loop closed.
        """
        queue = self._queues[replica_id]
        queue.wait_for(1)
        count = queue.num_ready
        if self.is_aborted:
            raise asyncio.CancelledError
        return count

    def wait_for(self, count: int) -> None:
        """Wait until so many elements are there for all devices, or as many as fit, or an end.

        One thread that takes for all devices is woken once then, and not by each element.
        """
        _, last = self._in_order[-1]  # what is there for it is there for all
        last.wait_for(min(count, self.capacity))

    def take(self, replica_id: int) -> tuple[Any, ...] | None:
        """Return the inputs of a replica's next step, None behind the last one; may block.

        Cancellation:
            A CancelledError once the infeed is aborted, or the event loop closed.
        """
        item: Any = self._queues[replica_id].take()
        if type(item) is Mark:
            if item is Mark.ABORTED:
                raise asyncio.CancelledError
            return None
        self._taken[replica_id] += 1
        if self._wake_feeder is not None and self._is_half_empty():
            self._wake()
        return item  # type: ignore[no-any-return]  # what `put` was given

    def take_all(self, most: int) -> tuple[list[list[Any]], bool]:
        """Take the steps that are there, on the one thread that takes for all devices.

        Args:
            most: How many at most.

        Returns:
            For each device its inputs of all steps, and whether no step comes behind them.

        Cancellation:
            A CancelledError once the infeed is aborted.
        """
        _, last = self._in_order[-1]  # what is there for it is there for all
        count = min(most, last.num_items)
        found = [queue.take_all(count) for queue in self._queues]
        if self.is_aborted and any(Mark.ABORTED in items for items in found):
            raise asyncio.CancelledError
        is_end = count > 0 and found[0][-1] is Mark.END  # then it is the last of all
        if is_end:
            found = [items[:-1] for items in found]
        self._taken = [before + len(found[0]) for before in self._taken]
        if self._wake_feeder is not None and self._is_half_empty():
            self._wake()
        return found, is_end

    def abort(self) -> None:
        """Wake the feeder and all devices that wait, from any thread; idempotent."""
        self.is_aborted = True  # before the marks: who takes one sees this
        for _, queue in self._in_order:
            queue.put(Mark.ABORTED)
        self._wake()

    def _is_half_empty(self) -> bool:
        return self.num_put - min(self._taken) <= self.capacity // 2

    def _wake(self) -> None:
        with self._lock:
            wake, self._wake_feeder = self._wake_feeder, None
        if wake is not None:
            wake()

    def __repr__(self) -> str:
        counts = f"{self.num_put} put, {self.num_waiting} waiting"
        return f"<Infeed of {len(self._queues)} | {counts}>"


@final
class DeviceQueue:
    """Elements on their way to one device thread.

    Args:
        gate: Where the thread waits while there is nothing.

    Invariants:
        * `_hungry` is filled before the thread looks a last time, and `put` looks at it
          afterwards: so one of the two sees the other. The one that takes the entry out again
          decides; if that was `put`, the gate is opened.
    """

    __slots__ = ("_gate", "_hungry", "_items", "_wanted")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._items: deque[object] = deque()
        self._hungry: list[bool] = []
        self._wanted = 1  # items that the thread waits for

    @property
    def is_empty(self) -> bool:
        """True if taking would have to wait."""
        return not self._items

    @property
    def num_items(self) -> int:
        """Number of items that are there, marks included."""
        return len(self._items)

    @property
    def num_ready(self) -> int:
        """Number of items in front of a mark, where something is there."""
        items = self._items
        count = len(items)
        return count - (type(items[count - 1]) is Mark)  # what comes meanwhile is behind it

    def put(self, *items: object) -> None:
        """Enqueue something, from any thread."""
        self._items.extend(items)
        if self._hungry and self._has(self._wanted) and self._claim():
            self._gate.open()

    def wait_for(self, count: int) -> None:
        """Wait until so many items are there, or a mark, on the one thread that takes.

        Cancellation:
            A CancelledError once the event loop is closed.
        """
        self._wanted = count  # before the entry below: who sees that one sees this
        while not self._has(count):
            self._hungry.append(True)
            if not self._has(count) or not self._claim():
                self._gate.wait()
        self._wanted = 1

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

    def take_all(self, count: int) -> list[Any]:
        """Return the first items, which are there, on the one thread that takes."""
        take = self._items.popleft
        return [take() for _ in range(count)]

    def _has(self, count: int) -> bool:
        items = self._items
        return len(items) >= count or (bool(items) and type(items[-1]) is Mark)

    def _claim(self) -> bool:
        try:
            self._hungry.pop()
        except IndexError:
            return False
        return True
