"""The second seam to engines: states on parameter servers, and closures run at least once.

An engine knows nothing of variables. It keeps objects on servers and passes calls to them; it runs
tasks on workers, another time if a worker is lost before the result was fetched.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
        self._kept: dict[Any, Any] = {}
        self._lock = threading.RLock()

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return what is kept under a key, made at the first use in this worker."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = make()
            return self._kept[key]  # type: ignore[no-any-return]  # whoever asks knows its kind

    def __repr__(self) -> str:
        return f"<ClosureWorker {self.name} | keeps {len(self._kept)} things>"


class ClosureTask(Protocol):
    """Function that an engine runs on a worker; it can be pickled."""

    @property
    def is_async(self) -> bool:
        """True if it awaits."""

    def run(self, worker: ClosureWorker) -> Any:
        """Do it in the calling thread, which must have no running event loop."""

    async def run_on_loop(self, worker: ClosureWorker) -> Any:
        """Do it on the running event loop; for engines whose workers share it."""


class StateHandle(ABC):
    """A state on a parameter server. It can be pickled into tasks.

    Attributes:
        server: Number of the server.
    """

    server: int

    @abstractmethod
    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the state, one call at a time, and return its result.

        Raises:
            WorkerLostError: If the server is gone, and the state with it.
            Exception: What the method raises.

        Cancellation:
            Abandons the call, which may take effect.
        """

    @abstractmethod
    def begin(self, method: str, *args: Any) -> Callable[[], Any]:
        """Send a call from a task on a worker; return what blocks until the result is there.

        Raises:
            Exception: Of what is returned: as `call`.
        """


class Submission(ABC):
    """A task under way."""

    @abstractmethod
    async def wait(self) -> None:
        """Wait until it has been done once; its result stays where it is.

        Raises:
            WorkerLostError: If no worker is left that could do it, or it has lost too many.
            Exception: What the task raises.

        Cancellation:
            Stops waiting; the task goes on.
        """

    @abstractmethod
    async def result(self) -> Any:
        """Return the result; the task is done again if the worker that held it is lost.

        Raises:
            Exception: As `wait`.

        Cancellation:
            As `wait`.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Take it back if it has not begun; what has begun goes on, and is not looked at."""


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

    @abstractmethod
    async def create_state(
        self, factory: Callable[..., object], args: Sequence[Any], server: int
    ) -> StateHandle:
        """Make a state on a server by calling `factory(*args)` there."""

    @abstractmethod
    def submit(self, tasks: Sequence[ClosureTask]) -> list[Submission]:
        """Send tasks to workers, each on its own; each is done at least once."""

    @abstractmethod
    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Return parameter servers and workers, by name."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Number of workers, as far as is known."""

    @abstractmethod
    async def restart_worker(self, submission: Submission) -> None:
        """Restart the worker that a task holds, if the engine can."""

    @abstractmethod
    async def aclose(self) -> None:
        """Disconnect; end what `start` has started. Idempotent."""


def current_worker_index() -> int:
    """Return the index of the worker that the current closure runs on, from 0.

    Workers are numbered in the order in which closures first ask; a worker that was restarted
    under its name keeps its index.

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
