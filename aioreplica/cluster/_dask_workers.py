"""Workers of a Dask cluster, as the scheduler's answers and events tell of them.

Plain synchronous code. Answers may overtake each other and events: an older one counts no more, and
a worker that has gone while an answer was on its way is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from ._closures import WORKER, Watcher


@final
class Look(NamedTuple):
    """A question to the scheduler: which one it is, and who has gone since it was asked."""

    number: int
    gone: set[str]


@final
class DaskWorkers:
    """Workers that there are, and who is told of them.

    Args:
        forget: Called with a worker that has gone, before that is told.

    Attributes:
        now: How many tasks each runs at a time, by address.
    """

    def __init__(self, forget: Callable[[str], object]) -> None:
        self._forget = forget
        self.now: dict[str, int] = {}
        self.watchers: list[Watcher] = []
        self._looks: list[Look] = []
        self._num_looks = self._newest = 0  # the newest one of those that were answered

    def begin_look(self) -> Look:
        """Learn that the scheduler is asked."""
        self._num_looks += 1
        look = Look(self._num_looks, set())
        self._looks.append(look)
        return look

    def end_look(self, look: Look, infos: Sequence[tuple[str, Any]] | None) -> None:
        """Take its answer; None if there is none."""
        self._looks.remove(look)
        if infos is None or look.number < self._newest:  # it may lack a worker that has come
            return
        self._newest = look.number
        now = {
            address: int(min(info["nthreads"], info["resources"][WORKER]))
            for address, info in infos
            if WORKER in info["resources"] and address not in look.gone
        }
        if now != self.now:
            lost, self.now = self.now.keys() - now.keys(), now
            for worker in sorted(lost):
                self._forget(worker)
            self.tell()

    def has_gone(self, worker: str) -> None:
        """Learn that one has gone."""
        for look in self._looks:
            look.gone.add(worker)
        if self.now.pop(worker, None) is not None:
            self._forget(worker)
            self.tell()

    def all_gone(self) -> None:
        """Learn that there is none any more."""
        self.now = {}
        self.tell()

    def tell(self) -> None:
        """Tell everybody who wants to know."""
        for watcher in tuple(self.watchers):
            watcher.learn_workers(dict(self.now))

    def __repr__(self) -> str:
        return f"<DaskWorkers | {len(self.now)} workers, {len(self._looks)} looks>"
