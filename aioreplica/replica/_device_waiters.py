"""Waiting of device threads in a meeting: at a gate, or by way of the event loop.

In a plain step function and a device loop the threads meet by themselves (`ThreadWaiter`). An op
of an `async def` step meets through the event loop (`OpWaiter`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any, TypeAlias, final

from ..context import LOOP, PLACE
from ..devices import (
    HOST,
    OpTracker,
    follow_others,
    lend_lane,
    name_of_served_lane,
    new_gate,
    synchronise_lane,
)
from ._errors import blocking_misuse_error
from ._meeting import Call, Generation, WaitedFor
from ._meeting_point import MeetingPoint, Waiter
from ._messages import Transfer
from ._replica import Replica

Bring: TypeAlias = Callable[[MeetingPoint, Transfer], None]
"""Brings a send or a receive to the rendezvous, on the event loop."""


@final
class ThreadWaiter(Waiter):
    """Waits on the replica's device thread, which parks at a gate: every call gives its result.

    Nothing goes through the event loop, except what ends the run (a mismatch, a timeout) and the
    rest of a merge that has to be awaited. A thread that finds out why the run must end parks too
    until it was ended: whatever it raised before would look like its own failure.
    """

    __slots__ = ("gate",)

    def __init__(self, point: MeetingPoint, replica: Replica) -> None:
        super().__init__(point, replica)
        self.gate = new_gate(point.loop)

    def meet(self, call: Call) -> object:
        """Bring a call to the rendezvous; return its part of the merge's result."""
        if not call.position:
            call.context = copy_context()
            if call.group.is_partial:
                call.context.run(LOOP.set, None)  # the others may be in another step
        point, replica_id, lock = self.point, self.replica.replica_id, self.point.lock
        assert lock is not None  # threads meet here
        if point.has_streams:
            synchronise_lane((call.args, call.kwargs))
        now_s = point.now()
        with lock:
            if point.is_aborted:
                raise asyncio.CancelledError
            decided = point.rendezvous.arrive(replica_id, call, now_s)
            is_complete = type(decided) is Generation and not decided.missing
            # What crosses workers reads this array, and opens the gate when it does no more.
            must_wait = not is_complete or call.group.across is not None
            if must_wait:
                point.parked[replica_id] = self.gate
        if type(decided) is not Generation:
            point.post(point.run.abort_mismatch, decided)
            self._park()
            raise asyncio.CancelledError
        if is_complete:
            point.merge(decided)
            if not must_wait:
                if decided.is_merged:
                    part = decided.take(call.position)
                    return follow_others(part) if point.has_streams else part
                with lock:
                    must_wait = not decided.is_merged and not point.is_aborted
                    if must_wait:
                        point.parked[replica_id] = self.gate
            if must_wait:
                self.wait_for(decided, None, call)
        else:
            own = call.collective.options(call.argument)
            timeout_s = decided.group.timeout_s if own is None else own.timeout_seconds
            self.wait_for(decided, timeout_s, call)
        if point.is_aborted and not decided.is_merged:  # else what was written is kept: finish
            raise asyncio.CancelledError
        part = decided.take(call.position)
        return follow_others(part) if point.has_streams else part

    def elsewhere(self, call: Call) -> object:
        """Raise a ContextError: only the device thread makes the calls of its replica."""
        raise self.misuse(call.collective.name)

    def misuse(self, name: str) -> Exception:
        """Build the error of a call made elsewhere."""
        step = self.point.everyone.step
        return blocking_misuse_error(name, self.replica, step, self.place, is_async=False)

    def wait_for(
        self, generation: WaitedFor, timeout_s: float | None, call: Call | Transfer
    ) -> None:
        """Park for as long as allowed, then until the run was ended."""
        self.point.observers.began_to_wait(generation)
        try:
            if not self._park(timeout_s):
                # Ending a run is the loop's. The thread parks until it has done so, or its own
                # unwinding would be taken for a failure (decision 14).
                self.point.post(self._stalled, timeout_s, call, generation)
                self._park()
        finally:
            self.point.observers.ended_to_wait(generation)

    def _stalled(self, timeout_s: float, call: Call | Transfer, generation: WaitedFor) -> None:
        if generation.missing:
            self.point.run.stalled(timeout_s, call)

    def _park(self, timeout_s: float | None = None) -> bool:
        """Wait until the gate is opened; False if that took too long."""
        try:
            return self.gate.wait(timeout_s)
        except asyncio.CancelledError:
            self.point.abandon()
            raise


@final
class OpWaiter(Waiter):
    """Waits in an op of an `async def` step: the event loop makes the call, the thread waits.

    While it waits its lane serves other ops: a replica that waits for others must not hold what
    those need, or two runs could hold each other's devices for ever.

    Cancellation:
        The end of the run wakes the thread with CancelledError. Cancelling only the await of the
        op does not: a started op runs to its end.
    """

    __slots__ = ("_ops",)

    def __init__(self, point: MeetingPoint, replica: Replica, ops: OpTracker) -> None:
        super().__init__(point, replica)
        self._ops = ops

    def meet(self, call: Call) -> object:
        """Have the event loop number a call and bring it to the rendezvous; wait for its result."""
        # Not the rendezvous itself: it belongs to the event loop in a run of tasks, which has no
        # lock.
        loop = self.point.loop
        assert loop is not None  # ops of a replica run in runs only
        waiting = _OpWait(self.point, self.replica, call, loop, self._ops)
        return waiting.result()

    def exchange(self, transfer: Transfer, bring: Bring) -> object:
        """Have the event loop send or receive, by `bring`; wait for what comes."""
        loop = self.point.loop
        assert loop is not None  # ops of a replica run in runs only
        return _OpWait(self.point, self.replica, transfer, loop, self._ops, bring).result()

    def elsewhere(self, call: Call) -> object:
        """Make a call in the thread of an op; a ContextError anywhere else."""
        if not self.is_in_op():
            raise self.misuse(call.collective.name)
        return self.meet(call)

    def is_in_op(self) -> bool:
        """Tell whether the calling thread runs an op that the step has put on its device."""
        lane, replica = name_of_served_lane(), PLACE.get().replica
        if lane is None or replica is None or self.point.loop is None or self.replica.is_over:
            return False
        is_mine = replica.local_replica_id == self.replica.replica_id
        return is_mine and replica.op_tracker is self._ops and lane == (replica.device_name or HOST)

    def misuse(self, name: str) -> Exception:
        """Build the error of a call made elsewhere."""
        step = self.point.everyone.step
        return blocking_misuse_error(name, self.replica, step, None, is_async=True)


@final
class _OpWait:
    """One call, or one message, on its way from an op's thread to the event loop and back."""

    __slots__ = (
        "_bring", "_call", "_error", "_found", "_gate", "_loop", "_ops", "_point", "_replica",
    )  # fmt: skip

    def __init__(
        self,
        point: MeetingPoint,
        replica: Replica,
        call: Call | Transfer,
        loop: asyncio.AbstractEventLoop,
        ops: OpTracker,
        bring: Bring | None = None,
    ) -> None:
        self._bring = bring
        self._ops = ops
        self._point = point
        self._replica = replica
        self._call = call
        self._loop = loop
        self._gate = new_gate(loop)
        self._found: Generation | Transfer | None = None
        self._error: BaseException | None = None

    def result(self) -> Any:
        """Make the call and wait, in the calling thread."""
        brought = self._call
        args = brought.value if isinstance(brought, Transfer) else (brought.args, brought.kwargs)
        synchronise_lane(args)
        with lend_lane():
            self._loop.call_soon_threadsafe(self._begin, context=copy_context())
            self._point.observers.began_to_wait(self)
            try:
                self._gate.wait()
            finally:
                self._point.observers.ended_to_wait(self)
        error, self._error = self._error, None
        if error is not None:
            raise error
        found, call = self._found, self._call
        if isinstance(call, Transfer):
            return follow_others(call.result)
        assert isinstance(found, Generation)  # it has begun
        return follow_others(found.look(call.position))

    def describe(self) -> str:
        """Name the collective."""
        call = self._call
        return f"blocking {call.name if isinstance(call, Transfer) else call.collective.name}"

    def missing_members(self) -> tuple[int, ...]:
        """Return the replicas that have not arrived."""
        return () if self._found is None else self._found.missing_members()

    def awaited(self) -> None:
        """Return None: only replicas are waited for."""

    def _begin(self) -> None:
        point, replica = self._point, self._replica
        try:
            self._found = found = self._arrive(self._call)
            waiter = found.waiter
            if waiter is None or waiter.done():
                self._end(None, waiter)
                return
            blocks = self._ops.blocks(replica.replica_id, replica.work)
            ended = point.wait_for_started(replica, found, blocks=blocks)
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the thread
            self._error = error
            self._gate.open()
            return
        waiter.add_done_callback(partial(self._end, ended))

    def _arrive(self, call: Call | Transfer) -> Generation | Transfer:
        if isinstance(call, Transfer):
            assert self._bring is not None  # given with it
            self._bring(self._point, call)
            return call
        call.sequence = self._replica.next_in(call.group)
        self._point.observers.made(call)
        generation = self._point.start(self._replica, call)
        if generation.waiter is None and not generation.is_merged:
            self._point.new_waiter(generation, call)
        return generation

    def _end(self, ended: Callable[[], None] | None, waiter: asyncio.Future[None] | None) -> None:
        if ended is not None:
            ended()
        is_cancelled = waiter is not None and waiter.cancelled()
        if is_cancelled and isinstance(self._found, Generation):  # by a task that gave up its call
            self._point.withdrew(self._replica, self._found)
        if is_cancelled or self._point.is_aborted:
            self._error = asyncio.CancelledError()
        self._gate.open()
