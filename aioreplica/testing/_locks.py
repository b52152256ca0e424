"""Locks of `threading` inside a simulated run: waiting for one takes virtual time.

An op waits as on a real lock; the schedule decides which op takes it next. The loop is blocked by
it, as a real one is: ops go on meanwhile, and if none of them releases the lock the wait could
never end. Conditions, events, semaphores, barriers and queues are made of locks, so they follow.
"""

from __future__ import annotations

import threading
from _thread import allocate_lock
from collections.abc import Callable
from functools import partial
from types import GenericAlias, TracebackType
from typing import TYPE_CHECKING, Any, Final, final

from ._forbidden import refuse

if TYPE_CHECKING:
    from ._loop import SimLoop
    from ._participants import Participant
    from ._pools import PoolTable
    from ._simulation import Simulation
    from ._threads import OpRun

REAL_LOCK: Final[Any] = threading.Lock
REAL_RLOCK: Final[Any] = threading.RLock
MAX_BLOCKED_STEPS: Final = 10_000


def lock_classes(simulation: Simulation) -> dict[str, object]:
    """Return what stands for names of `threading` while schedules run."""
    lock = class_in_run(simulation, REAL_LOCK, partial(SimLock, simulation))
    rlock = class_in_run(simulation, REAL_RLOCK, partial(SimRLock, simulation))
    return {"Lock": lock, "_allocate_lock": lock, "RLock": rlock}  # the second of conditions


def class_in_run(
    simulation: Simulation, real: Callable[[], object], simulated: Callable[[], object]
) -> object:
    """Return what stands for a class, such as `threading.Lock`, while schedules run.

    A class too, for those who test or annotate with it; it makes a simulated one inside a run, a
    real one elsewhere.
    """

    class InRun:
        def __new__(cls) -> Any:
            return simulated() if simulation.is_here() else real()

        def __class_getitem__(cls, item: object) -> Any:
            return GenericAlias(cls, item)

    return InRun


@final
class SimLock:
    """A lock that a run has made.

    Args:
        simulation: Where it was made.

    Attributes:
        waiters: The ops that wait for it.
        holder: The participant that took it last; known only where a trace is made.
    """

    __slots__ = ("__weakref__", "_lock", "_simulation", "holder", "waiters")

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._lock = allocate_lock()
        self.waiters: list[OpRun] | None = None
        self.holder: Participant | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; time that is spent waiting is virtual."""
        self._end_sleep()
        if not self._lock.acquire(False) and not (
            blocking and self._wait(None if timeout < 0 else timeout)
        ):
            return False
        if self.waiters:
            for run in self.waiters:
                run.rest()
        self.holder = self._simulation.loop.stepping
        return True

    def release(self) -> None:
        """Give the lock back."""
        self._end_sleep()
        self._lock.release()
        if self.waiters:
            for run in self.waiters:
                run.wake()

    def locked(self) -> bool:
        """Return True if the lock is held."""
        return self._lock.locked()

    def _end_sleep(self) -> None:
        """Let the time pass that the op has slept, before others see that it goes on."""
        simulation = self._simulation
        if simulation.pools.slept_s and simulation.is_here():
            simulation.pools.catch_up()

    def _wait(self, timeout_s: float | None) -> bool:
        simulation = self._simulation
        if not simulation.is_here():
            return self._lock.acquire(True, -1 if timeout_s is None else timeout_s)
        op = simulation.pools.current_op
        if op is None:
            return _block_loop(simulation, self._lock, timeout_s)
        check_timeout(timeout_s)
        run = op.on_thread()
        if self.waiters is None:
            self.waiters = []
        self.waiters.append(run)
        try:
            return run.wait(self, timeout_s) and self._lock.acquire(False)
        finally:
            self.waiters.remove(run)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._lock = allocate_lock()


@final
class SimRLock:
    """A reentrant lock, which belongs to an op or to the loop's thread, not to whatever runs an op.

    Args:
        simulation: Where it was made.
    """

    __slots__ = ("__weakref__", "_block", "_count", "_owner", "_simulation")

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._block = SimLock(simulation)
        self._owner: object = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock, or once more."""
        me = self._simulation.who()
        if self._owner == me:
            self._count += 1
        elif self._block.acquire(blocking, timeout):
            self._owner, self._count = me, 1
        else:
            return False
        return True

    def release(self) -> None:
        """Give the lock back, once."""
        if self._owner != self._simulation.who():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._block.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def _recursion_count(self) -> int:
        return self._count if self._is_owned() else 0

    def _is_owned(self) -> bool:
        return bool(self._owner == self._simulation.who())

    def _release_save(self) -> tuple[int, object]:
        saved, self._owner, self._count = (self._count, self._owner), None, 0
        self._block.release()
        return saved

    def _acquire_restore(self, saved: tuple[int, object]) -> None:
        self._block.acquire()
        self._count, self._owner = saved

    def _at_fork_reinit(self) -> None:
        self._block._at_fork_reinit()
        self._owner, self._count = None, 0


def _block_loop(simulation: Simulation, lock: Any, timeout_s: float | None) -> bool:
    """Block the loop until it has a lock; False after the timeout."""
    if block_loop(simulation.pools, partial(lock.acquire, False), timeout_s):
        return True
    if timeout_s is None:
        refuse(
            "A thread blocked on a lock",
            "The wait could never end: what holds the lock cannot go on while the event loop "
            "is blocked. Use asyncio.Lock where a lock is held across an await, and await "
            "something instead of blocking.",
        )
    return False


def block_loop(pools: PoolTable, is_done: Callable[[], bool], timeout_s: float | None) -> bool:
    """Block the loop until something is done: ops alone go on, as the schedule chooses.

    Returns:
        False if the timeout has passed; without one, if nothing can ever be done about it.
    """
    check_timeout(timeout_s)
    loop, limit = pools.loop, _Limit()
    end = loop.now + (timeout_s or 0.0)
    if timeout_s is not None:
        loop.call_when_due(end, limit)
    was_blocked, pools.is_blocked = pools.is_blocked, True
    try:
        for _ in range(MAX_BLOCKED_STEPS):
            if is_done():
                return True
            if limit.is_over or not _go_on(pools):
                return False
    finally:
        pools.is_blocked = was_blocked
        limit.is_over = True
    if timeout_s is not None:
        loop.jump(end)
    return False


def _go_on(pools: PoolTable) -> bool:
    """Let an op take a step, as the schedule chooses, or time pass; False if neither is left."""
    loop = pools.loop
    external: list[Any] = loop.external
    options = [each for each in external if not getattr(each, "needs_loop", False)]
    when = loop.next_when()
    if not options:
        if when is not None:
            loop.jump(when)
        return when is not None
    if when is not None and all(when <= each.deadline for each in options):
        options.append(loop.clock)
    chosen = options[loop.choose(options) if len(options) > 1 else 0]
    loop.order.append(chosen.index)
    if chosen is loop.clock and when is not None:
        loop.jump(when)
        return True
    external.remove(chosen)
    slept_s, pools.slept_s = pools.slept_s, 0.0
    chosen.fire()
    pools.slept_s = slept_s
    return True


def check_timeout(timeout_s: float | None) -> None:
    """Refuse a timeout that `threading` refuses."""
    if timeout_s is not None and timeout_s > threading.TIMEOUT_MAX:
        raise OverflowError("timeout value is too large")


@final
class _Limit:
    """Moment up to which the loop is blocked at most.

    Attributes:
        is_over: Whether it has come, or nobody waits for it any more.
    """

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False

    def is_off(self) -> bool:
        """Return True if nobody waits for it."""
        return self.is_over

    def become_due(self, loop: SimLoop) -> None:
        """Note that the moment has come."""
        self.is_over = True
