"""How a replica waits in a meeting: as a task, on its device thread, or through the event loop.

Collectives are written once and take one of these waiters. Each knows where calls may be made (the
current place and the thread) and turns a call into what the caller gets: an awaitable, or the
result itself.

`TaskWaiter.meet` is the hot path. Cancelling one waiting task cancels the future that all share;
as the others can then never meet it, that ends the run in any case (`MeetingPoint.withdrew`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from asyncio import current_task
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any, final

from ..context import PLACE, Place
from ..devices import (
    HOST,
    CompletionQueue,
    Op,
    OpTracker,
    lend_lane,
    name_of_served_lane,
    new_gate,
)
from ._handle import Handle
from ._meeting import Call, CallSite, Collective, Generation, SyncGroup, new_call
from ._meeting_point import MeetingPoint
from ._misuse import blocking_misuse_error, held_by_op_error, misuse_error, outlived_op_error
from ._replica import Replica
from ._table import two_at_once_error


class Waiter(ABC):
    """How the calls of one replica wait.

    Attributes:
        point: Where the replicas meet.
        replica: Whose calls.
        home: The place of the replica's code; None before and after.
        place: Where calls may be made: `home`, or None while an op of the replica makes them.
        thread_id: The thread in which they may be made.
    """

    __slots__ = ("home", "place", "point", "replica", "thread_id")

    def __init__(self, point: MeetingPoint, replica: Replica) -> None:
        self.point = point
        self.replica = replica
        self.home: Place | None = None
        self.place: Place | None = None
        self.thread_id = 0

    def open(self, place: Place) -> None:
        """Allow calls where `place` is current, in the calling thread."""
        self.thread_id = get_ident()
        self.home = self.place = place

    def close(self) -> None:
        """Refuse everything from now on."""
        self.home = self.place = None

    @property
    def is_here(self) -> bool:
        """Whether the calling code may make calls."""
        return PLACE.get() is self.place and get_ident() == self.thread_id

    @abstractmethod
    def meet(self, call: Call) -> Any:
        """Bring a call to the meeting point; return its result, or what to await for it."""

    @abstractmethod
    def elsewhere(
        self,
        collective: Collective,
        argument: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        group: SyncGroup,
        position: int,
        frame: FrameType | CallSite,
    ) -> Any:
        """Make a call from where `is_here` is false; a ContextError unless there is a way."""


@final
class TaskWaiter(Waiter):
    """Waits as a task: every call gives an awaitable.

    Args:
        point: Where the replicas meet.
        replica: Whose calls.
        completions: Brings what threads do to the event loop, in order; None outside every run.
        ops: The ops of the run that are in flight.
    """

    __slots__ = ("_completions", "_held_by", "_ops")

    def __init__(
        self,
        point: MeetingPoint,
        replica: Replica,
        completions: CompletionQueue | None,
        ops: OpTracker,
    ) -> None:
        super().__init__(point, replica)
        self._completions = completions
        self._ops = ops
        self._held_by: Op[Any] | None = None  # which has started collectives from its thread

    def meet(self, call: Call) -> Coroutine[Any, Any, Any]:
        """Return the coroutine that waits for a call's result."""
        coroutine = self._meet(call)
        self.replica.unawaited[call] = coroutine
        return coroutine

    async def _meet(self, call: Call) -> Any:
        """Bring a call to the rendezvous; return its part of the merge's result."""
        replica, point = self.replica, self.point
        del replica.unawaited[call]
        if point.is_aborted:
            raise asyncio.CancelledError
        if replica.waiting is not None:
            raise self._two_at_once(call)
        opened = call.group.open.get(call.sequence)
        if opened is not None and opened.is_given_up():  # by a replica that does not know it yet
            point.withdrew(replica, opened)
            raise asyncio.CancelledError
        decided = point.rendezvous.arrive(replica.replica_id, call, point.now())
        generation = decided if type(decided) is Generation else point.cannot_meet(decided, call)
        if not call.position:
            call.context = copy_context()
        if not generation.missing:
            point.merge(generation)
            if generation.is_merged:
                if point.is_solo:
                    await asyncio.sleep(0)  # a loop of collectives must let others run
                return generation.take(call.position)
        waiter = generation.waiter or point.new_waiter(generation, call)
        replica.waiting = task = current_task(point.loop)
        replica.cancels_before = task.cancelling()  # type: ignore[union-attr]  # a task runs this
        observers = point.observers
        if observers.wait_began is not None:
            observers.wait_began(generation)
        try:
            await waiter
        except asyncio.CancelledError:
            point.withdrew(replica, generation)
            if point.loop is None:  # no run waits for the merge to end
                await point.run.restart_outside()
            raise
        finally:
            replica.waiting = None
            if observers.wait_ended is not None:
                observers.wait_ended(generation)
        if point.is_aborted:
            raise asyncio.CancelledError
        return generation.take(call.position)

    def _two_at_once(self, call: Call) -> Exception:
        held = self.point.rendezvous.current_call(self.replica.replica_id)
        error = two_at_once_error(call, held)
        if self.point.loop is not None:
            self.point.run.abort(error)
        return error

    # ---- started calls -------------------------------------------------------------------

    def start(self, call: Call) -> Handle:
        """Make a call that needs no awaiting to go on."""
        handle = Handle(self.point, self.replica, call, self.place)
        handle.begin()
        return handle

    def start_elsewhere(
        self,
        collective: Collective,
        argument: Any,
        args: tuple[Any, ...],
        group: SyncGroup,
        position: int,
        frame: FrameType | CallSite,
    ) -> Handle:
        """Start a call from another thread, where an op of the replica runs or has started one.

        It is numbered on the event loop, in the order of the calls and before the op is done.

        Raises:
            ContextError: If no op of the replica runs.
        """
        if self._is_free():
            call = new_call(collective, argument, args, None, group, position,
                            self.replica.next_in(group), frame)  # fmt: skip
            return self.start(call)
        place, completions = self.home, self._completions
        running = self._ops.running(self.replica.replica_id)
        if place is None or completions is None or running is None or self._is_on_loop():
            raise self._misuse(collective.name)
        self._held_by = running
        self.place = None
        call = new_call(collective, argument, args, None, group, position, 0, frame)
        handle = Handle(self.point, self.replica, call, place)
        completions.call_soon(partial(self._begin, handle, running))
        return handle

    def elsewhere(
        self,
        collective: Collective,
        argument: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        group: SyncGroup,
        position: int,
        frame: FrameType | CallSite,
    ) -> Any:
        """Make a call where the replica has been held by an op until now; else a ContextError."""
        if not self._is_free():
            raise self._misuse(collective.name)
        sequence = self.replica.next_in(group)
        return self.meet(
            new_call(collective, argument, args, kwargs, group, position, sequence, frame)
        )

    def _begin(self, handle: Handle, op: Op[Any]) -> None:
        """Number and start what a thread has called, unless its op has ended before."""
        if op.is_done:
            handle.fail(outlived_op_error(handle.describe(), op.fn_name))
        else:
            handle.begin()

    def _is_on_loop(self) -> bool:
        return get_ident() == self.thread_id and name_of_served_lane() is None

    def _is_free(self) -> bool:
        """Tell whether calls may be made here after all: the op that started some is done."""
        if self._held_by is None or not self._held_by.is_done:
            return False
        if PLACE.get() is not self.home or not self._is_on_loop():
            return False
        self._held_by = None
        self.place = self.home
        return True

    def _misuse(self, name: str) -> Exception:
        step = self.point.everyone.step
        if self._held_by is not None and self._is_on_loop():
            return held_by_op_error(name, self._held_by.fn_name)
        return misuse_error(name, self.replica, step, self.home)


@final
class ThreadWaiter(Waiter):
    """Waits on the replica's device thread, which parks at a gate: every call gives its result.

    Nothing goes through the event loop, except what ends the run (a mismatch, a timeout) and the
    rest of a merge that has to be awaited. A thread that finds out why the run must end parks too
    until it was ended: whatever it raised before would look like its own failure.
    """

    __slots__ = ("_gate",)

    def __init__(self, point: MeetingPoint, replica: Replica) -> None:
        super().__init__(point, replica)
        self._gate = new_gate(point.loop)

    def meet(self, call: Call) -> Any:
        """Bring a call to the rendezvous; return its part of the merge's result."""
        if not call.position:
            call.context = copy_context()
        point, replica_id, lock = self.point, self.replica.replica_id, self.point.lock
        assert lock is not None  # threads meet here
        now_s = point.now()
        with lock:
            if point.is_aborted:
                raise asyncio.CancelledError
            decided = point.rendezvous.arrive(replica_id, call, now_s)
            is_complete = type(decided) is Generation and not decided.missing
            if not is_complete:
                point.parked[replica_id] = self._gate
        if type(decided) is not Generation:
            point.post(point.run.abort_mismatch, decided)
            self._park()
            raise asyncio.CancelledError
        if is_complete:
            point.merge(decided)
            if decided.is_merged:
                return decided.take(call.position)
            with lock:
                must_wait = not decided.is_merged and not point.is_aborted
                if must_wait:
                    point.parked[replica_id] = self._gate
            if must_wait:
                self._wait_for(decided, None, call)
        else:
            own = call.collective.options(call.argument)
            timeout_s = decided.group.timeout_s if own is None else own.timeout_seconds
            self._wait_for(decided, timeout_s, call)
        if point.is_aborted:
            raise asyncio.CancelledError
        return decided.take(call.position)

    def elsewhere(
        self,
        collective: Collective,
        argument: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        group: SyncGroup,
        position: int,
        frame: FrameType | CallSite,
    ) -> Any:
        """Refuse: a device thread has its calls to itself."""
        raise blocking_misuse_error(
            collective.name, self.replica, self.point.everyone.step, self.place, is_async=False
        )

    def _wait_for(self, generation: Generation, timeout_s: float | None, call: Call) -> None:
        """Park for as long as allowed, then until the run was ended."""
        self.point.began_to_wait(generation)
        try:
            if not self._park(timeout_s):
                self.point.post(self._stalled, timeout_s, call, generation)
                self._park()
        finally:
            self.point.ended_to_wait(generation)

    def _stalled(self, timeout_s: float, call: Call, generation: Generation) -> None:
        if generation.missing:
            self.point.run.stalled(timeout_s, call)

    def _park(self, timeout_s: float | None = None) -> bool:
        """Wait until the gate is opened; False if that took too long."""
        try:
            return self._gate.wait(timeout_s)
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

    def meet(self, call: Call) -> Any:
        """Have the event loop number a call and bring it to the rendezvous; wait for its result."""
        loop = self.point.loop
        assert loop is not None  # ops of a replica run in runs only
        waiting = _OpWait(self.point, self.replica, call, loop)
        return waiting.result()

    def elsewhere(
        self,
        collective: Collective,
        argument: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        group: SyncGroup,
        position: int,
        frame: FrameType | CallSite,
    ) -> Any:
        """Make a call in the thread of an op; a ContextError anywhere else."""
        if not self.is_in_op():
            raise self.misuse(collective.name)
        site = CallSite(frame.f_code, frame.f_lasti)
        return self.meet(new_call(collective, argument, args, kwargs, group, position, 0, site))

    def is_in_op(self) -> bool:
        """Tell whether the calling thread runs an op that the step has put on its device."""
        lane, replica = name_of_served_lane(), PLACE.get().replica
        if lane is None or replica is None or self.point.loop is None or self.replica.is_over:
            return False
        is_mine = replica.replica_id_in_sync_group == self.replica.replica_id
        return is_mine and replica.op_tracker is self._ops and lane == (replica.device_name or HOST)

    def misuse(self, name: str) -> Exception:
        """Build the error of a call made elsewhere."""
        step = self.point.everyone.step
        return blocking_misuse_error(name, self.replica, step, None, is_async=True)


@final
class _OpWait:
    """One call on its way from an op's thread to the event loop and back."""

    __slots__ = ("_call", "_error", "_gate", "_generation", "_loop", "_point", "_replica")

    def __init__(
        self, point: MeetingPoint, replica: Replica, call: Call, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._point = point
        self._replica = replica
        self._call = call
        self._loop = loop
        self._gate = new_gate(loop)
        self._generation: Generation | None = None
        self._error: BaseException | None = None

    def result(self) -> Any:
        """Make the call and wait, in the calling thread."""
        with lend_lane():
            self._loop.call_soon_threadsafe(self._begin, context=copy_context())
            self._point.began_to_wait(self)
            try:
                self._gate.wait()
            finally:
                self._point.ended_to_wait(self)
        error, self._error = self._error, None
        if error is not None:
            raise error
        assert self._generation is not None  # it has begun
        return self._generation.look(self._call.position)

    def describe(self) -> str:
        """Name the collective."""
        return f"blocking {self._call.collective.name}"

    def missing_members(self) -> tuple[int, ...]:
        """Return the replicas that have not arrived."""
        return () if self._generation is None else self._generation.missing_members()

    def awaited(self) -> None:
        """Nothing on the event loop is waited for but replicas."""

    def _begin(self) -> None:
        point = self._point
        try:
            self._call.sequence = self._replica.next_in(self._call.group)
            self._generation = generation = point.start(self._replica, self._call)
            waiter = generation.waiter
            assert waiter is not None  # made by `start`
            if waiter.done():
                self._end(None, waiter)
                return
            ended = point.wait_for_started(self._replica, generation, blocks=False)
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the thread
            self._error = error
            self._gate.open()
            return
        waiter.add_done_callback(partial(self._end, ended))

    def _end(self, ended: Callable[[], None] | None, waiter: asyncio.Future[None]) -> None:
        if ended is not None:
            ended()
        if waiter.cancelled() or self._point.is_aborted:
            self._error = asyncio.CancelledError()
        self._gate.open()
