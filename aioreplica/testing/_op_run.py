"""One op on a thread of its own: it goes on, waits, is woken, ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from ._op_threads import OpThread

if TYPE_CHECKING:
    from ._loop import SimLoop
    from ._pools import PoolOp


@final
class OpRun:
    """The run of one op that may wait.

    Args:
        op: The participant.
        thread: Where it runs.

    Attributes:
        waits_for: The lock that it waits for; None if it only gives way, or lets time pass.

    Invariants:
        * The op is an option of the schedule, or a timer or somebody else has to wake it.
    """

    __slots__ = ("_is_expired", "_timed_out", "_timer", "op", "thread", "waits_for")

    def __init__(self, op: PoolOp, thread: OpThread) -> None:
        self.op = op
        self.thread = thread
        self.waits_for: Any = None
        self._timer: _Timer | None = None
        self._is_expired = False
        self._timed_out = False
        thread.begin(self._perform, f"aioreplica {op.pool.name}")

    @property
    def is_timed(self) -> bool:
        """Whether its wait ends by itself."""
        return self._timer is not None

    # ---- on whatever thread lets it go on ----------------------------------------------------

    def go_on(self) -> bool:
        """Let the op go on until it waits or ends; True if it has ended."""
        table = self.op.pool.loop.pools
        outer, table.current_op = table.current_op, self.op
        try:
            return self.thread.resume()
        finally:
            table.current_op = outer

    def wake(self) -> None:
        """Make the op an option: what it waits for is there."""
        if self.op.is_waiting:
            self.op.offer()

    def rest(self) -> None:
        """Take back `wake`: somebody else was first."""
        if self.op.is_awake and not self._timed_out and self.waits_for is not None:
            if self._is_expired:
                self._timed_out = True
            else:
                self.op.retract()

    def expire(self) -> None:
        """Take note that the time is over that the op was ready to wait."""
        self._is_expired = True
        if self.op.is_waiting:
            self._timed_out = True
            self.op.offer()

    # ---- on the op's thread ------------------------------------------------------------------

    def _perform(self) -> None:
        op, pool = self.op, self.op.pool
        if pool.is_inside:
            op.perform(pool.context.copy())
            return
        pool.is_inside = True
        try:
            op.perform(pool.context)
        finally:
            pool.is_inside = False

    def wait(self, lock: Any, timeout_s: float | None) -> bool:
        """Stand still until somebody wakes the op; False if that took too long."""
        loop = self.op.pool.loop
        self.op.begin_wait()
        self.waits_for = lock
        self._is_expired = self._timed_out = False
        if timeout_s is not None:
            self._timer = _Timer(self)
            loop.call_when_due(loop.now + timeout_s, self._timer)
        try:
            self.thread.hand_back()
        finally:
            self.waits_for = None
            if self._timer is not None:
                self._timer.run = None
                self._timer = None
        return not self._timed_out

    def catch_up(self) -> bool:
        """Let the time pass that the op has slept; False if it has not."""
        table = self.op.pool.loop.pools
        slept_s, table.slept_s = table.slept_s, 0.0
        if slept_s:
            self.wait(None, slept_s)
        return slept_s > 0

    def give_way(self) -> None:
        """Let the schedule decide whether this op goes on or one that it has woken."""
        if not self.thread.is_doomed and not self.catch_up():
            self.op.begin_wait()
            self.op.offer()
            self.thread.hand_back()


@final
class _Timer:
    """Wakes an op that has waited long enough."""

    __slots__ = ("run",)

    def __init__(self, run: OpRun) -> None:
        self.run: OpRun | None = run

    def is_off(self) -> bool:
        """Whether the op waits no longer."""
        return self.run is None

    def become_due(self, loop: SimLoop) -> None:
        """Wake the op."""
        if self.run is not None:
            self.run.expire()
