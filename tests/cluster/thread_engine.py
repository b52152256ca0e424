"""An engine of one process: each worker's lane is a thread, and bytes go through shared memory.

Nothing is copied before it is sent: an exchange is over when every receiver has taken its part, as
with engines that read an array while it goes out. So what is written too early arrives wrong.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from typing import Any, final

import numpy as np

from aioreplica.cluster import Communicator
from aioreplica.cluster._communicator import Failure
from aioreplica.cluster._engine import Engine, EngineCommunicator, Link, Note
from aioreplica.cluster._exchange import Exchange, Poll
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
        self.changed = threading.Condition()
        self.sent: dict[tuple[str, int, int, int], Any] = {}
        self.notes: list[list[Note]] = [[] for _ in range(size)]
        self.num_looks = [0] * size
        self.has_ended = False


class WiresEndedError(Exception):
    """Raised by exchanges of a group that another worker has ended."""


class Messages(Exchange):
    """Exchanges between the workers of one group.

    Args:
        wires: Those of the outermost group.
        rank: Of this worker in the group.
        size: Of the group.
        name: Of the group.
    """

    def __init__(self, wires: Wires, rank: int, size: int, name: str) -> None:
        self.rank, self.size = rank, size
        self._wires, self._name = wires, name
        self._num_exchanges = 0

    def all_gather(self, send: Any, recv: Any) -> Poll:
        rows = recv.reshape(self.size, -1)
        return self._exchange(dict.fromkeys(self._others(), send), rows, self._others())

    def all_to_all(self, send: Any, recv: Any, counts: list[int]) -> Poll:
        parts = np.split(send, np.cumsum(counts)[:-1])
        rows = recv.reshape(self.size, counts[self.rank])
        return self._exchange({each: parts[each] for each in self._others()}, rows, self._others())

    def broadcast(self, buffer: Any, root: int) -> Poll:
        if self.rank == root:
            return self._exchange(dict.fromkeys(self._others(), buffer), None, ())
        return self._exchange({}, {root: buffer}, [root])

    def barrier(self) -> Poll:
        return self.all_gather(np.zeros(1, np.uint8), np.empty(self.size, np.uint8))

    def add(self, source: Any, target: Any) -> Poll | None:
        return None

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _exchange(self, parts: dict[int, Any], rows: Any, senders: Iterable[int]) -> Poll:
        wires, own, number = self._wires, self.rank, self._num_exchanges
        self._num_exchanges += 1
        going = [(self._name, number, own, each) for each in parts]
        coming = {(self._name, number, each, own): rows[each] for each in senders}
        with wires.changed:
            wires.sent.update(zip(going, parts.values(), strict=True))
            wires.changed.notify_all()

        def poll(pause_s: float) -> bool:
            with wires.changed:
                if wires.has_ended:
                    raise WiresEndedError
                for key in [key for key in coming if key in wires.sent]:
                    np.copyto(coming.pop(key), wires.sent.pop(key))
                    wires.changed.notify_all()
                if not coming and not any(key in wires.sent for key in going):
                    return True
                if pause_s:
                    wires.changed.wait(pause_s)
            if not pause_s:
                os.sched_yield()
            return False

        return poll


@final
class ThreadEngine(Messages, Engine):
    """The engine of one worker.

    Args:
        wires: What it shares with the others.
        rank: Of this worker.
    """

    def __init__(self, wires: Wires, rank: int) -> None:
        super().__init__(wires, rank, len(wires.notes), "")

    def subgroup(self, ranks: tuple[int, ...], name: str) -> Exchange:
        return Messages(self._wires, ranks.index(self.rank), len(ranks), name)

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

    def end(self) -> None:
        with self._wires.changed:
            self._wires.has_ended = True
            self._wires.changed.notify_all()

    def close(self) -> None:
        """What others wait for is on the wires already."""


@final
class ThreadCommunicator(EngineCommunicator):
    """A worker of a group whose lanes are threads of this process."""

    @staticmethod
    def group(
        size: int, *, timeout: float | None = None, wires: Wires | None = None
    ) -> tuple[ThreadCommunicator, ...]:
        wires = Wires(size) if wires is None else wires
        ranks = tuple(range(size))
        lanes = [Lane(f"worker:{rank}", nice=0) for rank in ranks]
        links = [Link(ThreadEngine(wires, rank), lanes[rank]) for rank in ranks]
        for link in links:
            weakref.finalize(link, link.lane.stop).atexit = False
        return tuple(ThreadCommunicator(link, ranks, timeout) for link in links)

    async def _shrink(self) -> Communicator:
        raise NotImplementedError
