"""Current simulation: the loop and pools of the schedule that runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, final

from ._loop import SimLoop
from ._network import Network
from ._pools import PoolOp, PoolTable
from ._threads import OpThreads

Patches: TypeAlias = list[tuple[Any, str, Any]]  # modules or classes, names, and what goes there


@final
class Simulation:
    """The program under test, seen by what stands in for clocks, locks and executors.

    Attributes:
        loop: The loop of the schedule that runs.
        pools: Its pools.
        threads: Where ops run that wait.
        numbers: Hashes of objects that a run made and that are walked in sets, by address.
        notes: Sentences on what programs did that is not simulated, of all schedules.
        is_running: Whether a schedule runs, and nothing real is done in between.
        thread: Identity of the thread that runs it.
    """

    def __init__(self) -> None:
        self.loop: SimLoop = None  # type: ignore[assignment]  # set by begin, for each schedule
        self.pools: PoolTable = None  # type: ignore[assignment]  # likewise
        self.threads = OpThreads(self.outside)
        self.numbers: dict[int, int] = {}
        self.notes: dict[str, None] = {}
        self._num_numbers = 0
        self.is_running = False
        self.thread = threading.get_ident()

    def begin(self, loop: SimLoop, pools: PoolTable) -> None:
        """Start a schedule."""
        self.loop, self.pools = loop, pools
        loop.make_network = self.open_network
        loop.notes = self.notes
        loop.is_here = self.is_here
        self.numbers.clear()
        self._num_numbers = 0
        self.is_running = True

    def open_network(self) -> Network:
        """Return the network of the schedule, made when something first asks for it."""
        network = self.loop.network
        if network is None:
            network = self.loop.network = Network(self.loop, self.pools)
        assert isinstance(network, Network)
        return network

    def end(self) -> None:
        """End a schedule."""
        self.is_running = False

    def is_here(self) -> bool:
        """Return True if the caller is the program under test."""
        if not self.is_running:
            return False
        ident = threading.get_ident()
        return ident == self.thread or ident in self.threads.idents

    def progress(self) -> tuple[int, int] | None:
        """Return what changes with every step of the run; None between runs."""
        return (id(self.loop), len(self.loop.order)) if self.is_running else None

    def running_thread(self) -> int:
        """Return the thread that takes the current step."""
        op = self.pools.current_op
        run = None if op is None else op.run
        return self.thread if run is None else run.thread.ident

    def who(self) -> int | PoolOp | Simulation:
        """Return what owns a lock that is taken now: an op, or this object for all tasks."""
        if not self.is_here():
            return threading.get_ident()
        op = self.pools.current_op
        return self if op is None else op

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Leave the program under test for a moment, to do something real."""
        is_running, self.is_running = self.is_running, False
        try:
            yield
        finally:
            self.is_running = is_running

    def number(self, made: object) -> None:
        """Give an object the next number of the run; an address may serve several in turn."""
        self.numbers[id(made)] = self._num_numbers
        self._num_numbers += 1
