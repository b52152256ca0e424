"""Parameter servers and workers in one process: for tests, and for trying a program out.

Tasks that await run on the event loop, the others on host threads, both of which the testing kit
replaces. `lose_worker` and `lose_server` do what `kill -9` does to a process, except that a task
in a thread cannot be killed: it goes on as one of a worker that is thought dead.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

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
    WorkerInfo,
)


@final
class LocalClosureEngine(ClosureEngine):
    """An engine whose parameter servers and workers live in this process.

    Args:
        num_workers: How many tasks run at a time.

    Raises:
        ValueError: If `num_workers` is not a positive integer.
    """

    def __init__(self, num_workers: int = 2) -> None:
        if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers!r}.")
        self._states: dict[int, _LocalState] = {}
        self._num_servers = 0
        self._waiting: deque[_LocalSubmission] = deque()
        self._idle: deque[ClosureWorker] = deque()
        self._busy: dict[str, _LocalSubmission] = {}
        self._tasks: set[OwnedTask[None]] = set()
        self._next = 0
        for _ in range(num_workers):
            self.add_worker()

    # ---- workers that come and go --------------------------------------------------------

    def add_worker(self) -> str:
        """Add a worker; return its name."""
        name = f"worker-{self._next}"
        self._next += 1
        self._idle.append(ClosureWorker(name))
        self._start_waiting()
        return name

    def lose_worker(self, name: str) -> None:
        """Lose a worker: what it was doing is done again by another one.

        Raises:
            ValueError: If there is no such worker.
        """
        submission = self._busy.pop(name, None)
        idle = [worker for worker in self._idle if worker.name == name]
        if submission is None and not idle:
            raise ValueError(f"There is no worker {name!r} in {self!r}.")
        for worker in idle:
            self._idle.remove(worker)
        if submission is not None:
            submission.attempt += 1
            if submission.running is not None:
                submission.running.cancel()
            self._waiting.appendleft(submission)
            self._start_waiting()

    def lose_server(self, server: int) -> None:
        """Lose a parameter server and the states on it."""
        self._states.pop(server).is_lost = True

    # ---- the protocol --------------------------------------------------------------------

    async def start(self, num_servers: int) -> None:
        """Remember how many servers there are."""
        self._num_servers = num_servers

    async def create_state(
        self, factory: Callable[..., object], args: Sequence[Any], server: int
    ) -> StateHandle:
        """Make a state in this process."""
        self._states[server] = state = _LocalState(server, factory(*args))
        return state

    def submit(self, tasks: Sequence[ClosureTask]) -> list[Submission]:
        """Queue tasks for the next workers that are idle."""
        submissions = [_LocalSubmission(self, task) for task in tasks]
        self._waiting += submissions
        self._start_waiting()
        return [*submissions]

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the servers and workers."""
        names = sorted([*(worker.name for worker in self._idle), *self._busy])
        servers = (WorkerInfo(f"ps-{i}", PARAMETER_SERVER) for i in range(self._num_servers))
        return (*servers, *(WorkerInfo(name, WORKER) for name in names))

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self._idle) + len(self._busy)

    async def restart_worker(self, submission: Submission) -> None:
        """Put another worker in the place of one that hangs."""
        for name, held in tuple(self._busy.items()):
            if held is submission:
                del self._busy[name]
                held.attempt += 1
                self.add_worker()

    async def aclose(self) -> None:
        """End the tasks that await, and wait for those in threads."""
        self._waiting.clear()
        for task in tuple(self._tasks):
            task.cancel()
        for task in tuple(self._tasks):
            await task.ended()
        self._states.clear()

    def __repr__(self) -> str:
        waiting, busy, idle = len(self._waiting), len(self._busy), len(self._idle)
        return f"<LocalClosureEngine | {busy} workers busy, {idle} idle, {waiting} tasks waiting>"

    # ---- running -------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        while self._idle and self._waiting:
            submission = self._waiting.popleft()
            if submission.done.is_set():
                continue
            worker = self._idle.popleft()
            self._busy[worker.name] = submission
            task = OwnedTask(
                self._run(worker, submission, submission.attempt), f"closure on {worker.name}"
            )
            submission.running = task if submission.task.is_async else None
            self._tasks.add(task)
            task.when_done(lambda _error, task=task: self._tasks.discard(task))  # type: ignore[misc]

    async def _run(self, worker: ClosureWorker, submission: _LocalSubmission, attempt: int) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            if submission.task.is_async:
                result = await submission.task.run_on_loop(worker)
            else:
                result = await run_on_host(submission.task.run, worker)
        except asyncio.CancelledError:
            if self._busy.get(worker.name) is submission:  # at `aclose`
                del self._busy[worker.name]
                self._idle.append(worker)
            raise
        except Exception as failure:  # noqa: BLE001 - raised where the submission is waited for
            error = failure
        if self._busy.get(worker.name) is submission and submission.attempt == attempt:
            del self._busy[worker.name]
            self._idle.append(worker)
            submission.value, submission.error = result, error
            submission.done.set()
            self._start_waiting()


@final
class _LocalState(StateHandle):
    def __init__(self, server: int, state: object) -> None:
        self.server = server
        self.is_lost = False
        self._state = state
        self._lock = threading.Lock()  # closures in threads call it, too

    async def call(self, method: str, *args: Any) -> Any:
        return self._call(method, args)

    def begin(self, method: str, *args: Any) -> Callable[[], Any]:
        return lambda: self._call(method, args)

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        if self.is_lost:
            raise WorkerLostError(f"Parameter server {self.server} was lost.", ranks=(self.server,))
        with self._lock:
            return getattr(self._state, method)(*args)


@final
class _LocalSubmission(Submission):
    def __init__(self, engine: LocalClosureEngine, task: ClosureTask) -> None:
        self._engine = engine
        self.task = task
        self.done = asyncio.Event()
        self.running: OwnedTask[None] | None = None
        self.attempt = 0
        self.value: Any = None
        self.error: BaseException | None = None

    async def wait(self) -> None:
        await self.done.wait()
        if self.error is not None:
            raise self.error

    async def result(self) -> Any:
        await self.wait()
        return self.value

    def cancel(self) -> None:
        self.done.set()
