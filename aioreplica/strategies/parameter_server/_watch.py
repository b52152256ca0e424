"""Workers as a coordinator looks after them: which there are, which hang, and what they had."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, final

from ...errors import StallError, WorkerLostError
from ._queue import GRACE_S, ScheduledClosure
from ._servers import Servers

if TYPE_CHECKING:
    from ._runner import ClosureRunner


@final
class WorkerWatch:
    """Looks after workers: which there are, which hang, and which have too much to do.

    Args:
        runner: Who sends closures.
        servers: The parameter servers; their engine tells of workers.
        max_attempts: How many workers may be lost while they run the same closure.
    """

    def __init__(self, runner: ClosureRunner, servers: Servers, max_attempts: int) -> None:
        self._runner = runner
        self._servers = servers
        self._engine = servers.engine
        self._copies = servers.copies
        self._max_attempts = max_attempts
        self._hung: set[str] = set()
        self._looks_at = math.inf
        self._look_sooner = asyncio.Event()

    def begin(self) -> None:
        """Look from now on."""
        self._engine.watch(self)
        if self._copies is not None:
            self._copies.when_promoted = self.learn_of_copy
        self.learn_workers(self._engine.workers_now)
        self._runner.start(self._keep_looking(), "watch over closures")

    def end(self) -> None:
        """Look no more."""
        self._engine.unwatch(self)
        if self._copies is not None:
            self._copies.when_promoted = bool

    def learn_workers(self, workers: Mapping[str, int]) -> None:
        """Take note of the workers that there are; what those had who have gone runs again."""
        if self._engine.lost is not None:
            self._lose_all()
            return
        self._hung &= workers.keys()
        now = {name: slots for name, slots in workers.items() if name not in self._hung}
        self._send_again(self._runner.queue.set_workers(_now(), now))

    def _lose_all(self) -> None:
        """Learn that the cluster was lost; what is not over is lost with it."""
        for closure in self._runner.queue.set_workers(_now(), {}):
            closure.submission = None
        self._fail_all(self._servers.lost_error())

    def learn_of_copy(self) -> None:
        """Send again what waits with workers: it knows the server that was lost."""
        self._send_again(self._runner.queue.take_waiting(_now()))

    def look_in_time(self) -> None:
        """Look sooner than was intended, if the queue says so."""
        if self._runner.queue.next_look() < self._looks_at:
            self._look_sooner.set()

    async def _keep_looking(self) -> None:
        """Look at the queue whenever its clocks say so."""
        queue = self._runner.queue
        while True:
            self._look_sooner.clear()
            self._looks_at = queue.next_look()
            left = None if self._looks_at == math.inf else max(0.0, self._looks_at - _now())
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._look_sooner.wait()
            now = _now()
            overdue: dict[str, list[ScheduledClosure]] = {}
            for closure in queue.overdue(now):  # before any of them is with another worker
                overdue.setdefault(closure.worker or "", []).append(closure)
            for worker, closures in overdue.items():
                self._restart_worker(worker, closures)
            alone_s = queue.alone_for(now)
            if alone_s is not None:
                self._nobody_comes(alone_s)
            self._send_again(queue.take_back(now))

    def _restart_worker(self, worker: str, overdue: list[ScheduledClosure]) -> None:
        self._hung.add(worker)
        lost = self._runner.queue.lose_worker(_now(), worker)
        for closure in overdue:
            self._runner.failed(closure, _not_answered(closure, worker))
        self._send_again([each for each in lost if each not in overdue])
        self._runner.start(self._restart(worker), f"restart of worker {worker}")

    async def _restart(self, worker: str) -> None:
        await self._engine.restart_worker(worker)

    def _nobody_comes(self, alone_s: float) -> None:
        count = self._runner.queue.depth
        error = WorkerLostError(
            f"There has been no worker for {alone_s:g} s, and {count} closures wait for one. Start "
            "workers, or give the ClusterCoordinator a longer worker_wait_s."
        )
        self._fail_all(error)

    def _fail_all(self, error: WorkerLostError) -> None:
        for closure in self._runner.queue.waiting_again():
            self._runner.failed(closure, error)
        if self._runner.queue.depth:
            self._runner.fail(error)

    def _send_again(self, closures: list[ScheduledClosure]) -> None:
        """Send closures elsewhere that were taken from their workers."""
        submissions = [closure.submission for closure in closures if closure.submission]
        for closure in closures:
            closure.submission = None
        if submissions:
            cancelling = self._engine.cancel(submissions)
            self._runner.start(cancelling, "cancel what runs elsewhere")
        for closure in closures:
            if len(closure.lost_with) >= self._max_attempts:
                self._runner.failed(closure, _given_up(closure, self._max_attempts))
        self._runner.pump()


def _not_answered(closure: ScheduledClosure, worker: str) -> StallError:
    limit = closure.timeout_s or 0.0
    return StallError(
        f"The closure {closure.fn_name} was given {limit:g} s, and its worker {worker} has "
        f"not answered for {limit + GRACE_S:g} s: it hangs, or the closure holds the GIL. "
        "It gets no closures any more, and is told to restart.",
        timeout_s=closure.timeout_s,
    )


def _given_up(closure: ScheduledClosure, max_attempts: int) -> WorkerLostError:
    return WorkerLostError(
        f"The closure {closure.fn_name} #{closure.number} was lost with each worker that ran it: "
        f"{', '.join(closure.lost_with)}. It may end their processes, as a crash or too little "
        f"memory does; otherwise raise max_attempts, which is {max_attempts}."
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
