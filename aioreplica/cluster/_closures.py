"""The second seam to engines: states on parameter servers, and tasks on workers.

An engine knows nothing of variables, and decides nothing. It keeps objects on servers and passes
calls to them; it runs each task once, on the worker that it is sent to, one after the other; and it
tells which workers there are. Who runs what, and what runs again, is decided by who sends tasks.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, final

from ..context import CLOSURE
from ..errors import ContextError

T = TypeVar("T")

PARAMETER_SERVER, WORKER = "PS", "W"


@final
class ClosureWorker:
    """A worker as its closures see it: its name, and what they keep there.

    Args:
        name: Unique among the workers.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        # What was made, once it was, and the lock of those who want it.
        self._kept: dict[str, dict[Hashable, tuple[AbstractContextManager[object], list[Any]]]] = {}
        self._gone: set[str] = set()
        self._lock = threading.Lock()  # of the tables

    def once(self, owner: str, key: Hashable, make: Callable[[], T]) -> T:
        """Return what an owner keeps under a key, made at the first use in this worker."""
        with self._lock:
            # Not kept for a closure that goes on although nobody wants it.
            kept = {} if owner in self._gone else self._kept.setdefault(owner, {})
            lock, made = kept.setdefault(key, (threading.RLock(), []))
        with lock:
            if not made:
                made.append(make())
            return made[0]  # type: ignore[no-any-return]  # whoever asks knows its kind

    def release(self, owner: str, keys: Sequence[Hashable] | None = None) -> None:
        """Let go of what an owner keeps under some keys; without keys of all, for ever.

        It waits for nobody: what is being made goes to those who want it, and is not kept.
        """
        with self._lock:
            if keys is None:
                self._gone.add(owner)
                gone = list(self._kept.pop(owner, {}).values())
            else:
                kept = self._kept.get(owner, {})
                gone = [kept.pop(key) for key in keys if key in kept]
        del gone  # outside the lock, as it may have finalizers

    def __repr__(self) -> str:
        count = sum(map(len, self._kept.values()))
        return f"<ClosureWorker {self.name} | keeps {count} things>"


class ClosureTask(Protocol):
    """Function that an engine runs on a worker; it can be pickled."""

    @property
    def is_async(self) -> bool:
        """True if it awaits."""

    def run(self, worker: ClosureWorker) -> Any:
        """Do it in the calling thread, which must have no running event loop."""

    async def run_on_loop(self, worker: ClosureWorker) -> Any:
        """Do it on the running event loop; for engines whose workers share it."""


class Watcher(Protocol):
    """Interface of who wants to know of workers that come and go."""

    def learn_workers(self, workers: Mapping[str, int]) -> None:
        """Take note of the workers that there are, and how many tasks each runs at a time."""


class StateHandle(ABC):
    """A state on a parameter server. It can be pickled into tasks.

    Attributes:
        server: Number of the server.
    """

    server: int

    @property
    @abstractmethod
    def is_lost(self) -> bool:
        """True if the engine knows that the server is gone; asked in the program."""

    @abstractmethod
    def when_lost(self, tell: Callable[[], object]) -> None:
        """Call something on the event loop once the server is gone; asked in the program."""

    @abstractmethod
    async def call(self, method: str, *args: Any, is_wait: bool = False) -> Any:
        """Call a method of the state, one call at a time, and return its result.

        Args:
            method: Its name.
            args: What it takes; handles of other states may be among them.
            is_wait: Whether the method is quick, safe beside other calls, and returns a
                `concurrent.futures.Future`, whose end is waited for beside them.

        Raises:
            WorkerLostError: If the server is gone, and the state with it.
            Exception: What the method raises.

        Cancellation:
            Abandons the call, which may take effect.
        """

    @abstractmethod
    def begin(self, method: str, *args: Any, is_wait: bool = False) -> Callable[[], Any]:
        """Send a call from a task or a state; return what blocks until the result is there.

        Raises:
            Exception: Of what is returned: as `call`.
        """


class Submission(ABC):
    """A task that was sent to a worker."""

    @abstractmethod
    async def wait(self) -> None:
        """Wait until it has been done; its result stays where it is.

        Raises:
            WorkerLostError: If its worker is gone, or it was cancelled.
            Exception: What the task raises.

        Cancellation:
            Stops waiting; the task goes on.
        """

    def stop(self) -> None:  # noqa: B027 - what runs on a thread or elsewhere has no such end
        """Have it end if it has begun and the engine can end it; `wait` ends when it has."""

    @abstractmethod
    async def result(self) -> Any:
        """Return the result.

        Raises:
            Exception: As `wait`.

        Cancellation:
            As `wait`.
        """


@final
@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One process of a cluster.

    Attributes:
        name: As the engine calls it.
        role: "PS" of a parameter server, "W" of a worker.
        address: Where it listens; "" in this process.
        pid: Its process id.
    """

    name: str
    role: str
    address: str = field(default="", compare=False)
    pid: int = field(default=0, compare=False)


class ClosureEngine(ABC):
    """Keeps states on parameter servers and runs tasks on workers."""

    @abstractmethod
    async def start(self, num_servers: int) -> None:
        """Connect, or start the cluster; does nothing if it is started.

        Raises:
            ImportError: If the engine's library is not installed.
            ValueError: If there are too few parameter servers, or no worker.
            ConnectionError: If the cluster cannot be reached.

        Cancellation:
            Ends what was begun.
        """

    @property
    @abstractmethod
    def lost(self) -> str | None:
        """Sentence that says that the cluster is gone, with all states and results; None if not.

        Then there are no workers, and whatever needs the cluster raises a `WorkerLostError`.
        """

    @abstractmethod
    async def reopen(self, num_servers: int) -> None:
        """Connect anew, or start the cluster anew, if it is lost; it has no states then.

        Raises:
            Exception: As `start`; it is lost then.

        Cancellation:
            Leaves it lost.
        """

    @abstractmethod
    async def create_state(
        self, owner: str, factory: Callable[..., object], args: Sequence[Any], server: int, *,
        apart_from: Sequence[StateHandle] = (),
    ) -> StateHandle:  # fmt: skip
        """Make a state on a server by calling `factory(*args)` there; `owner` is whose it is.

        Args:
            owner: Whose it is.
            factory: Makes it.
            args: Of the factory.
            server: Number of the server.
            apart_from: States that must not be lost with this one: none of their processes.

        Raises:
            WorkerLostError: If there is no process for it.
        """

    @abstractmethod
    def submit(self, worker: str, tasks: Sequence[ClosureTask]) -> list[Submission]:
        """Send tasks to a worker, which does them in this order, each once."""

    @abstractmethod
    async def cancel(self, submissions: Sequence[Submission]) -> None:
        """Take tasks back that have not begun; let others go on, and look at them no more."""

    @abstractmethod
    def release(self, owner: str, keys: Sequence[Hashable] | None = None) -> None:
        """Have all workers let go of what an owner keeps there; see `ClosureWorker.release`."""

    @abstractmethod
    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Return parameter servers and workers, by name."""

    @property
    @abstractmethod
    def workers_now(self) -> Mapping[str, int]:
        """Workers that there are, as far as is known, and how many tasks each runs at a time."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Number of workers, as far as is known."""

    @abstractmethod
    def watch(self, watcher: Watcher) -> None:
        """Tell somebody of the workers whenever one has come or gone, and when the cluster is lost.

        One that goes and comes again under its name is told as gone first.
        """

    @abstractmethod
    def unwatch(self, watcher: Watcher) -> None:
        """Tell it no more."""

    @abstractmethod
    async def restart_worker(self, worker: str) -> bool:
        """Restart a worker that hangs; False if the engine cannot."""

    @abstractmethod
    async def aclose(self) -> None:
        """Disconnect; end what `start` has started. Idempotent."""


def current_worker_index() -> int:
    """Return the index of the worker that the current closure runs on, from 0.

    Workers are numbered as they come; a new one takes the least index that no other worker has, so
    that of a lost one.

    Raises:
        ContextError: If called outside a closure of a `ClusterCoordinator`.
    """
    closure = CLOSURE.get()
    if closure is None:
        raise ContextError(
            "current_worker_index was called outside a closure. Call it in a function that "
            "`await coordinator.schedule(fn)` runs."
        )
    index: int = closure.worker_index()
    return index
