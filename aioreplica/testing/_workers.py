"""The workers of simulated pools: who serves which queue, and all pools of one run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import Context
from inspect import CO_COROUTINE
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, final

from ._pools import MAX_LATENCY_S, STARTABLE, PoolOp

if TYPE_CHECKING:
    from ._loop import SimLoop
    from ._op_threads import OpThreads

DEFAULT_WORKERS: Final = 8
"""Size of the default pool: it must not depend on the machine, or tokens would."""
MAX_SLEEPS: Final = 100
"""How often an op may sleep before each sleep lets time pass: one that polls would never end."""


@final
class SimPool:
    """Workers that serve one queue.

    Args:
        loop: The loop of the run.
        name: For stories and faults: the device, or what kind of executor.
        num_workers: How many calls may be in flight.

    Invariants:
        * At most one call can start: the first of the queue, if a worker is free.
    """

    __slots__ = (
        "context", "is_inside", "lane", "lenders", "loop", "name", "num_running", "num_workers",
        "offered", "queue",
    )  # fmt: skip

    def __init__(self, loop: SimLoop, name: str, num_workers: int) -> None:
        self.loop = loop
        self.name = name
        self.num_workers = num_workers
        self.num_running = 0
        self.queue: deque[PoolOp] = deque()
        self.offered: PoolOp | None = None
        self.context = Context()  # threads do not see the caller's variables
        self.is_inside = False  # whether a call is in that context, so that no other can enter it
        self.lane: Any = None  # of the library, that it stands for
        self.lenders: list[Any] = []  # runs of the library with an op that lends its worker

    def put(self, op: PoolOp) -> None:
        """Enqueue a call."""
        self.loop.pools.ops.append(op)
        self.queue.append(op)
        if self.offered is None:
            self.offer()

    def offer(self) -> None:
        """Let the first call start if a worker is free."""
        if self.queue and self.offered is None and self.num_running < self.num_workers:
            op = self._next() if self.lenders else self.queue.popleft()
            if op is None:
                return
            self.offered = op
            op.state = STARTABLE
            now = self.loop.now
            op.due, op.deadline = now, now + MAX_LATENCY_S
            op.since_step = len(self.loop.order)
            self.loop.external.append(op)

    def ended(self) -> None:
        """Take note that a worker is free again."""
        self.num_running -= 1
        if self.queue:
            self.offer()

    # ---- lending a worker --------------------------------------------------------------------

    def lend(self, lender: Any) -> None:
        """Free the worker of an op that waits; ops of the same run stay behind it."""
        self.lenders.append(lender)
        self.ended()

    def take_back(self, lender: Any, give_worker: Callable[[], None]) -> bool:
        """Ask for a worker for an op that waits no longer; False if `give_worker` tells it when."""
        if self.num_running < self.num_workers and self.offered is None:
            self.num_running += 1
            return True
        self.queue.append(_Return(self, give_worker, (), lender))
        return False

    def lends_no_longer(self, lender: Any) -> None:
        """Let the ops of a run go on behind the one that had lent its worker."""
        self.lenders.remove(lender)
        self.offer()

    def _next(self) -> PoolOp | None:
        """Take the first op out of the queue that need not stay behind one that waits."""
        for at, op in enumerate(self.queue):
            if type(op) is _Return:
                del self.queue[at]
                self.num_running += 1
                op.fn()
                self.offer()
                return None
            if op.lender is None or op.lender not in self.lenders:
                del self.queue[at]
                return op
        return None


@final
class _Return(PoolOp):
    """Stands in a queue for an op that wants its worker back; never an option itself."""

    __slots__ = ()


@final
class PoolTable:
    """The pools of one run, by the executor that each stands for."""

    __slots__ = (
        "_by_executor", "_loop", "current_op", "faults", "is_given_up", "needs_threads",
        "num_sleeps", "ops", "pools", "slept_s", "threads",
    )  # fmt: skip

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._by_executor: dict[int, tuple[Any, SimPool]] = {}
        self.pools: list[SimPool] = []
        self.faults: Any = None
        self.ops: list[PoolOp] = []  # of this run, for the story
        self.slept_s = 0.0
        self.current_op: PoolOp | None = None
        self.num_sleeps = 0
        self.threads: OpThreads | None = None
        self.needs_threads = False
        self.is_given_up = False

    def sleep(self, op: PoolOp, seconds: float) -> None:
        """Let an op sleep: it is late by so much, or stands still if it sleeps all the time."""
        self.slept_s += seconds
        self.num_sleeps += 1
        if self.num_sleeps > MAX_SLEEPS:
            op.on_thread().catch_up()

    @property
    def waiting(self) -> list[PoolOp]:
        """The ops that stand still until somebody wakes them, which time alone does not."""
        if self.threads is None:
            return []
        return [op for op in self.ops if op.is_waiting and op.run and not op.run.is_timed]

    def take_step(self, at: int) -> None:
        """Let an op take its step while everything else is blocked."""
        loop = self._loop
        op: Any = loop.external.pop(at)
        loop.order.append(op.index)
        slept_s, self.slept_s = self.slept_s, 0.0
        op.fire()
        self.slept_s = slept_s

    def unwind(self) -> None:
        """End every op that has a thread."""
        self.is_given_up = True
        if self.threads is not None:
            for op in tuple(self.ops):
                op.unwind()
                self.slept_s = 0.0

    def make(self, name: str, num_workers: int) -> SimPool:
        """Make a pool that stands for no executor."""
        pool = SimPool(self._loop, name, num_workers)
        self.pools.append(pool)
        return pool

    def pool_named(self, name: str, num_workers: int) -> SimPool:
        """Return the pool of a name, making it if needed."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        return self.make(name, num_workers)

    def pool_of(self, executor: Any) -> SimPool:
        """Return the twin of an executor; None is the loop's default one."""
        found = self._by_executor.get(id(executor))
        if found is not None:
            return found[1]
        workers = DEFAULT_WORKERS
        if executor is not None:
            workers = getattr(executor, "_max_workers", DEFAULT_WORKERS)
        name = f"pool {len(self.pools)}" if executor is not None else "default pool"
        pool = self.make(name, workers)
        self._by_executor[id(executor)] = executor, pool  # kept alive: ids are used again
        return pool

    def submit_call(self, executor: Any, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Submit a call and return the asyncio future of its result."""
        if type(fn) is FunctionType and fn.__code__.co_flags & CO_COROUTINE:
            raise TypeError("coroutines cannot be used with run_in_executor()")
        if executor is not None and getattr(executor, "_shutdown", False):
            raise RuntimeError("cannot schedule new futures after shutdown")
        loop = self._loop
        future = loop.create_future()
        pool = self.pool_of(executor)
        pool.put(PoolOp(pool, fn, args, future))
        return future
