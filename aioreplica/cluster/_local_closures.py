"""Parameter servers and workers in one process: for tests, and for trying a program out.

Tasks that await run on the event loop, the others on host threads, both of which the testing kit
replaces. `lose_worker`, `lose_server` and `lose_cluster` do what `kill -9` does to processes,
except that a task in a thread cannot be killed: it goes on as one of a worker that is thought dead.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, final
from weakref import WeakSet, WeakValueDictionary

from ..devices import OwnedTask, run_on_host
from ..errors import WorkerLostError
from ._closures import (
    PARAMETER_SERVER,
    WORKER,
    ClosureEngine,
    ClosureTask,
    ClosureWorker,
    StateHandle,
    Submission,
    Watcher,
    WorkerInfo,
)


@final
class LocalClosureEngine(ClosureEngine):
    """An engine whose parameter servers and workers live in this process.

    Several strategies may use one; it ends what runs when the last of them is closed.

    Args:
        num_workers: How many tasks run at a time.

    Raises:
        ValueError: If `num_workers` is not a positive integer.
    """

    def __init__(self, num_workers: int = 2) -> None:
        if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers!r}.")
        # By a number, which is the order to tell them in; handles alone keep them.
        self._states: dict[int, WeakValueDictionary[int, _LocalState]] = {}
        self._num_states = 0
        self._num_servers = 0
        self._num_users = 0
        self._workers: dict[str, _LocalWorker] = {}
        self._watchers: list[Watcher] = []
        self._tasks: set[OwnedTask[None]] = set()
        self._next = 0
        self._lost: str | None = None
        self._num_new_workers = num_workers
        self._add_workers()

    def _add_workers(self) -> None:
        for _ in range(self._num_new_workers):
            self.add_worker()

    # ---- workers that come and go --------------------------------------------------------

    def add_worker(self) -> str:
        """Add a worker; return its name."""
        name = f"worker-{self._next}"
        self._next += 1
        self._workers[name] = _LocalWorker(name)
        self._tell()
        return name

    def lose_worker(self, name: str) -> None:
        """Lose a worker, and what it was doing.

        Raises:
            ValueError: If there is no such worker.
        """
        lost = self._workers.pop(name, None)
        if lost is None:
            raise ValueError(f"There is no worker {name!r} in {self!r}.")
        lost.drop(f"Worker {name} was lost.")
        self._tell()

    def lose_server(self, server: int) -> None:
        """Lose the process of a parameter server and the states on it."""
        for state in tuple(self._states.pop(server, {}).values()):
            state.lose()

    def lose_cluster(self) -> None:
        """Lose all servers and workers, as when the scheduler of a cluster is lost."""
        self._lost = "The cluster was lost."
        for server in tuple(self._states):
            self.lose_server(server)
        for name in tuple(self._workers):
            self._workers.pop(name).drop(self._lost)
        self._tell()

    @property
    def lost(self) -> str | None:
        """Sentence that says that the cluster is gone; None while it is there."""
        return self._lost

    async def reopen(self, num_servers: int) -> None:
        """Have as many new workers as at the start."""
        self._num_servers = max(self._num_servers, num_servers)
        if self._lost is not None:
            self._lost = None
            self._add_workers()

    def watch(self, watcher: Watcher) -> None:
        """Tell somebody whenever a worker was added or lost."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """Tell it no more."""
        self._watchers.remove(watcher)

    def _tell(self) -> None:
        for watcher in tuple(self._watchers):
            watcher.learn_workers(self.workers_now)

    # ---- the protocol --------------------------------------------------------------------

    async def start(self, num_servers: int) -> None:
        """Remember how many servers there are."""
        await self.reopen(num_servers)
        self._num_users += 1

    async def create_state(
        self, owner: str, factory: Callable[..., object], args: Sequence[object], server: int, *,
        apart_from: Sequence[StateHandle] = (),
    ) -> StateHandle:  # fmt: skip
        """Make a state in this process, as if in that of a server."""
        if self._lost is not None:
            raise WorkerLostError(self._lost, ranks=(server,))
        place = server
        others = [each.place for each in apart_from if isinstance(each, _LocalState)]
        if others:
            after = (others[0] + i for i in range(1, self._num_servers))
            free = [each % self._num_servers for each in after]
            free = [each for each in free if each not in others]
            if not free:
                raise WorkerLostError(
                    f"There is no other process for a copy of parameter server {server}.",
                    ranks=(server,),
                )
            place = free[0]
        state = _LocalState(server, place, factory(*args))
        self._states.setdefault(place, WeakValueDictionary())[self._num_states] = state
        self._num_states += 1
        return state

    def submit(self, worker: str, tasks: Sequence[ClosureTask]) -> list[Submission]:
        """Queue tasks for a worker."""
        submissions = [_LocalSubmission(task) for task in tasks]
        place = self._workers.get(worker)
        if place is None:
            for submission in submissions:
                submission.drop(f"Worker {worker} was lost.")
        else:
            place.waiting += submissions
            self._start_next(place)
        return [*submissions]

    async def cancel(self, submissions: Sequence[Submission]) -> None:
        """Take tasks back; those that await are ended where they are."""
        for submission in submissions:
            assert isinstance(submission, _LocalSubmission)
            submission.drop("The closure was cancelled.")

    def release(self, owner: str, keys: Sequence[Hashable] | None = None) -> None:
        """Let go of what the workers keep."""
        for place in self._workers.values():
            place.worker.release(owner, keys)

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the servers and workers."""
        servers = (WorkerInfo(f"ps-{i}", PARAMETER_SERVER) for i in range(self._num_servers))
        return (*servers, *(WorkerInfo(name, WORKER) for name in sorted(self._workers)))

    @property
    def workers_now(self) -> Mapping[str, int]:
        """The workers."""
        return dict.fromkeys(self._workers, 1)

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self._workers)

    async def restart_worker(self, worker: str) -> bool:
        """Put another worker in the place of one that hangs."""
        if worker in self._workers:
            self.lose_worker(worker)
            self.add_worker()
        return True

    async def aclose(self) -> None:
        """End the tasks that await, and wait for those in threads, if nobody else uses it."""
        self._num_users -= 1
        if self._num_users > 0:
            return
        self._num_users = 0
        for place in self._workers.values():
            place.drop("The engine was closed.")
        for task in tuple(self._tasks):
            await task.ended()
        for place in self._workers.values():
            place.running = None
        self._states.clear()

    def __repr__(self) -> str:
        busy = sum(place.running is not None for place in self._workers.values())
        waiting = sum(len(place.waiting) for place in self._workers.values())
        idle = len(self._workers) - busy
        return f"<LocalClosureEngine | {busy} workers busy, {idle} idle, {waiting} tasks waiting>"

    # ---- running -------------------------------------------------------------------------

    def _start_next(self, place: _LocalWorker) -> None:
        while place.waiting and place.running is None:
            submission = place.waiting.popleft()
            if submission.done.is_set():
                continue
            place.running = submission
            place.had.add(submission)
            task = OwnedTask(self._run(place, submission), f"closure on {place.worker.name}")
            submission.running = task if submission.task.is_async else None
            self._tasks.add(task)

            task.when_done(partial(self._has_ended, task, place, submission))

    def _has_ended(
        self,
        task: OwnedTask[None],
        place: _LocalWorker,
        submission: _LocalSubmission,
        _error: BaseException | None,
    ) -> None:
        self._tasks.discard(task)
        if place.running is submission:
            place.running = None
        self._start_next(place)

    async def _run(self, place: _LocalWorker, submission: _LocalSubmission) -> None:
        try:
            if submission.task.is_async:
                result = await submission.task.run_on_loop(place.worker)
            else:
                result = await run_on_host(submission.task.run, place.worker)
        except asyncio.CancelledError:
            if submission.done.is_set():
                raise
            submission.settle(error=submission.why_cancelled)
        except Exception as failure:  # noqa: BLE001 - raised where the submission is waited for
            submission.settle(error=failure)
        else:
            submission.settle(result)


@final
class _LocalWorker:
    """A worker, what it does and what it will do."""

    def __init__(self, name: str) -> None:
        self.worker = ClosureWorker(name)
        self.running: _LocalSubmission | None = None
        self.waiting: deque[_LocalSubmission] = deque()
        self.had: WeakSet[_LocalSubmission] = WeakSet()

    def drop(self, why: str) -> None:
        """Have nothing more to do, and no results."""
        for submission in (*self.had, *self.waiting):
            submission.drop(why)
        self.waiting.clear()


@final
class _LocalState(StateHandle):
    def __init__(self, server: int, place: int, state: object) -> None:
        self.server = server
        self.place = place
        self._is_lost = False
        self._state = state
        self._lock = threading.Lock()  # closures in threads call it, too
        self._when_lost: list[Callable[[], object]] = []

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    def when_lost(self, tell: Callable[[], object]) -> None:
        self._when_lost.append(tell)

    def lose(self) -> None:
        """Be gone, which is told."""
        self._is_lost = True
        for tell in self._when_lost:
            tell()

    async def call(self, method: str, *args: Any, is_wait: bool = False) -> Any:
        found = self._call(method, args)
        if is_wait:
            found = await asyncio.wrap_future(found)
            self._require_there()
        return found

    def begin(self, method: str, *args: object, is_wait: bool = False) -> Callable[[], object]:
        def finish() -> object:
            found = self._call(method, args)
            if is_wait:
                found = found.result()
                self._require_there()
            return found

        return finish

    def _call(self, method: str, args: tuple[object, ...]) -> Any:
        self._require_there()
        with self._lock:
            return getattr(self._state, method)(*args)

    def _require_there(self) -> None:
        if self._is_lost:
            raise WorkerLostError(f"Parameter server {self.server} was lost.", ranks=(self.server,))


@final
class _LocalSubmission(Submission):
    def __init__(self, task: ClosureTask) -> None:
        self.task = task
        self.done = asyncio.Event()
        self.running: OwnedTask[None] | None = None
        self.why_cancelled: Exception = RuntimeError("The closure has cancelled its own task.")
        self._value: object = None
        self._error: Exception | None = None

    def settle(self, value: object = None, error: Exception | None = None) -> None:
        """Have a result, unless it was dropped before."""
        if not self.done.is_set():
            self._value, self._error = value, error
            self.done.set()

    def drop(self, why: str) -> None:
        """Have no result any more; end it if it awaits."""
        if self._error is None:
            self._value, self._error = None, WorkerLostError(why)
        self.done.set()
        if self.running is not None:
            self.running.cancel()

    def stop(self) -> None:
        if self.running is not None:
            self.why_cancelled = WorkerLostError("The closure was cancelled.")
            self.running.cancel()

    async def wait(self) -> None:
        await self.done.wait()
        if self._error is not None:
            raise self._error

    async def result(self) -> Any:
        await self.wait()
        return self._value
