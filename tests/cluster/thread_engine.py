"""An engine of one process: each worker's lane is a thread, and bytes go through shared memory.

Nothing is copied before it is sent: an exchange is over when every receiver has taken its part, as
with engines that read an array while it goes out. So what is written too early arrives wrong.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np

from aioreplica.cluster import Communicator
from aioreplica.cluster._communicator import Failure
from aioreplica.cluster._engine import EngineCommunicator
from aioreplica.cluster._poller import Poller
from aioreplica.cluster._transport import Group, Link, Note, Poll, Transport
from aioreplica.devices import Lane


@final
class Wires:
    """What the workers of a group share: arrays on their way, and notes.

    Attributes:
        sent: By group, number of the exchange, sender and receiver; until it is taken.
        notes: What was told to each worker, and not read yet.
        num_looks: How often each worker has asked for notes.
    """

    def __init__(self, size: int) -> None:
        self.changed = threading.Lock()
        self.sent: dict[tuple[str, int, int, int], Any] = {}
        self.notes: list[list[Note]] = [[] for _ in range(size)]
        self.num_looks = [0] * size
        self.has_ended = False


class WiresEndedError(Exception):
    """Raised by exchanges of a group that another worker has ended."""


@final
class ThreadTransport(Transport):
    """The transport of one worker.

    Args:
        wires: What it shares with the others.
        rank: Of this worker.
        added: The dtypes that `add` is for.

    Attributes:
        num_added: How often it was called.
        forgotten: The names of splits that all have left.
    """

    def __init__(self, wires: Wires, rank: int, *, added: Sequence[str] = ()) -> None:
        self.added, self.num_added = added, 0
        self.forgotten: list[str] = []
        self.rank, self.size = rank, len(wires.notes)
        self._wires = wires
        self._num_exchanges: Counter[str] = Counter()  # by group

    def all_gather(self, group: Group, send: Any, recv: Any) -> Poll:
        rows, others = recv.reshape(group.size, -1), group.others
        return self._exchange(group, dict.fromkeys(others, send), rows, others)

    def all_to_all(self, group: Group, sends: list[Any], recv: Any, counts: list[int]) -> Poll:
        rows, others = np.split(recv, np.cumsum(counts)[:-1]), group.others
        return self._exchange(group, {each: sends[each] for each in others}, rows, others)

    def broadcast(self, group: Group, buffer: Any, root: int) -> Poll:
        if group.rank == root:
            return self._exchange(group, dict.fromkeys(group.others, buffer), None, ())
        return self._exchange(group, {}, {root: buffer}, [root])

    def barrier(self, group: Group) -> Poll:
        return self.all_gather(group, np.zeros(1, np.uint8), np.empty(group.size, np.uint8))

    def add(self, group: Group, array: Any) -> Poll:
        rows = np.empty((group.size, array.size), array.dtype)
        poll = self.all_gather(group, array, rows)
        self.num_added += 1

        def add_once_taken() -> bool:
            is_over = poll()
            if is_over:
                np.add(array, rows[1 - group.rank], out=array)
            return is_over

        return add_once_taken

    def _exchange(
        self, group: Group, parts: dict[int, Any], rows: Any, senders: Iterable[int]
    ) -> Poll:
        wires, own, number = self._wires, group.rank, self._num_exchanges[group.name]
        self._num_exchanges[group.name] += 1
        going = [(group.name, number, own, each) for each in parts]
        coming = {(group.name, number, each, own): rows[each] for each in senders}
        with wires.changed:
            wires.sent.update(zip(going, parts.values(), strict=True))

        def poll() -> bool:
            with wires.changed:
                if wires.has_ended:
                    raise WiresEndedError
                for key in [key for key in coming if key in wires.sent]:
                    np.copyto(coming.pop(key), wires.sent.pop(key))
                return not coming and not any(key in wires.sent for key in going)

        return poll

    def tell(self, note: Note) -> None:
        with self._wires.changed:  # all at once: who reads it may end the exchanges of the others
            for rank, notes in enumerate(self._wires.notes):
                if rank != self.rank:
                    notes.append(Note.decode(note.encode()))

    def notes(self, *, at_once: bool = False, waits: bool = True) -> list[Note]:
        with self._wires.changed:
            found, self._wires.notes[self.rank] = self._wires.notes[self.rank], []
            self._wires.num_looks[self.rank] += 1
        return found

    def explain(self, error: Exception, what: str) -> Failure | None:
        return None

    def unreachable(self) -> tuple[int, ...]:
        return ()

    def forget(self, group: Group) -> None:
        self.forgotten.append(group.name)

    def end(self) -> None:
        with self._wires.changed:
            self._wires.has_ended = True

    def close(self) -> Poll:
        return lambda: True  # what others wait for is on the wires already


@final
class ThreadCommunicator(EngineCommunicator):
    """A worker of a group whose lanes are threads of this process."""

    @staticmethod
    def group(
        size: int,
        *,
        timeout: float | None = None,
        wires: Wires | None = None,
        is_attempted: bool = False,
        added: Sequence[str] = (),
        beside: Sequence[ThreadCommunicator] = (),
    ) -> tuple[ThreadCommunicator, ...]:
        """Make a group; `beside` another one, on the threads of that."""
        wires = Wires(size) if wires is None else wires
        ranks = tuple(range(size))
        pollers = [c.link.poller for c in beside] or [
            new_poller(f"worker:{rank}", is_attempted=is_attempted) for rank in ranks
        ]
        links = [Link(ThreadTransport(wires, rank, added=added), pollers[rank]) for rank in ranks]
        return tuple(ThreadCommunicator(link, ranks, timeout) for link in links)

    async def _resized(self, num_new: int) -> Communicator:
        raise NotImplementedError


def new_poller(name: str, *, is_attempted: bool) -> Poller:
    """Return a poller whose thread ends when nothing uses it."""
    lane = Lane(name, nice=0)
    poller = Poller(lane, threading.Lock() if is_attempted else None)
    weakref.finalize(poller, lane.stop).atexit = False
    return poller
