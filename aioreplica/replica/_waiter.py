"""Waiting in a meeting: what all kinds of waiters have in common, and that of tasks.

Tasks share one future per generation (the hot path); the waiters of device threads are in
`_device_waiters.py`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from asyncio import current_task
from collections.abc import Coroutine
from contextvars import copy_context
from threading import get_ident
from typing import Any, final

from ..context import PLACE, Place
from ..devices import CompletionQueue, Op, OpTracker, name_of_served_lane, require_loop
from ._meeting import Call, Generation
from ._meeting_point import MeetingPoint
from ._messages import Transfer
from ._misuse import held_by_op_error, misuse_error
from ._replica import Replica
from ._table import two_at_once_error


class Waiter(ABC):
    """Waiting of the calls of one replica.

    Attributes:
        point: Where the replicas meet.
        replica: Whose calls.
        home: The place of the replica's code; None before and after.
        place: Where calls may be made: `home`, or None while an op of the replica makes them.
        thread_id: The thread in which they may be made.
        unawaited: Calls whose coroutine has not been started; None where results come at once.
    """

    __slots__ = ("home", "place", "point", "replica", "thread_id", "unawaited")

    def __init__(self, point: MeetingPoint, replica: Replica) -> None:
        self.point = point
        self.replica = replica
        self.home: Place | None = None
        self.place: Place | None = None
        self.thread_id = 0
        self.unawaited: dict[Call | Transfer, Coroutine[Any, Any, Any]] | None = None

    def open(self, place: Place) -> None:
        """Allow calls where `place` is current, in the calling thread."""
        self.thread_id = get_ident()
        self.home = self.place = place

    def close(self) -> None:
        """Refuse everything from now on."""
        self.home = self.place = None

    @property
    def is_here(self) -> bool:
        """True if the calling code may make calls."""
        return PLACE.get() is self.place and get_ident() == self.thread_id

    @abstractmethod
    def meet(self, call: Call) -> Any:
        """Bring a call to the meeting point; return its result, or what to await for it."""

    @abstractmethod
    def exchange(self, transfer: Transfer) -> Any:
        """Send or receive; return what came, or what to await for it.

        Raises:
            ContextError: If it must not be done here.
        """

    @abstractmethod
    def elsewhere(self, call: Call) -> Any:
        """Bring a call, not numbered yet, from where `is_here` is false.

        Raises:
            ContextError: If it must not be made there.
        """


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
        self.point = point  # without super: each run makes one waiter per replica
        self.replica = replica
        self.home = self.place = None
        self.thread_id = 0
        self._completions = completions
        self._ops = ops
        self.unawaited = replica.unawaited
        self._held_by: Op[Any] | None = None  # which has started collectives from its thread

    @property
    def is_here(self) -> bool:
        """True if the calling code may make calls: the replica's own, and no op holds it."""
        if PLACE.get() is self.place and get_ident() == self.thread_id and not self._ops.pending:
            return True
        return (PLACE.get() is self.place and self.is_on_loop()) or self.is_free()

    async def meet(self, call: Call) -> Any:
        """Bring a call to the rendezvous; return its part of the merge's result."""
        replica, point = self.replica, self.point
        if get_ident() != self.thread_id:  # made here and awaited by a loop of another thread
            require_loop(point.loop or asyncio.get_running_loop(), call.describe())
        del replica.unawaited[call]
        if point.is_aborted:
            raise asyncio.CancelledError
        if replica.waiting is not None:
            raise self._two_at_once(call)
        opened = call.group.open.get(call.sequence)
        if opened is not None and opened.waiter is not None and opened.waiter.cancelled():
            point.withdrew(replica, opened)  # given up by a replica that does not know it yet
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
            await generation.unread()
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

    def exchange(self, transfer: Transfer) -> Coroutine[Any, Any, Any]:
        """Return what to await for a send or a receive."""
        if not self.is_here:
            raise self.misuse(transfer.name)
        coroutine = self.replica.unawaited[transfer] = self._exchanged(transfer)
        return coroutine

    async def _exchanged(self, transfer: Transfer) -> Any:
        replica, point = self.replica, self.point
        if get_ident() != self.thread_id:
            require_loop(point.loop or asyncio.get_running_loop(), transfer.describe())
        del replica.unawaited[transfer]
        point.bring(transfer)
        waiter = transfer.waiter
        if waiter is None:
            return transfer.result
        blocks = current_task(point.loop) is replica.work
        ended = point.wait_for_started(replica, transfer, blocks=blocks)
        try:
            await waiter
        except asyncio.CancelledError:
            point.take_back(transfer)
            raise
        finally:
            ended()
        if point.is_aborted:
            raise asyncio.CancelledError
        return transfer.result

    def _two_at_once(self, call: Call) -> Exception:
        held = self.point.rendezvous.current_call(self.replica.replica_id)
        error = two_at_once_error(call, held)
        if self.point.loop is not None:
            self.point.run.abort(error)
        return error

    def elsewhere(self, call: Call) -> Any:
        """Make a call where the replica has been held by an op until now; else a ContextError."""
        if not self.is_free():
            raise self.misuse(call.collective.name)
        call.sequence = self.replica.next_in(call.group)
        self.point.made(call)
        coroutine = self.replica.unawaited[call] = self.meet(call)
        return coroutine

    def hold(self) -> tuple[Op[Any], CompletionQueue] | None:
        """Let an op of the replica make calls from its thread until it is done.

        Returns:
            The op, and what takes the calls to the event loop, before the op's completion; None
            if no op of the replica runs, or this is the thread of the event loop.
        """
        running = self._ops.running(self.replica.replica_id)
        if self.home is None or self._completions is None or running is None or self.is_on_loop():
            return None
        self._held_by = running
        self.place = None
        return running, self._completions

    def is_on_loop(self) -> bool:
        """Tell whether the calling thread runs the event loop, and not an op."""
        if get_ident() != self.thread_id:
            return False
        return not self._ops.pending or name_of_served_lane() is None  # ops may run in this thread

    def is_free(self) -> bool:
        """Tell whether calls may be made here after all: the op that started some is done."""
        if self._held_by is None or not self._held_by.is_done:
            return False
        if PLACE.get() is not self.home or not self.is_on_loop():
            return False
        self._held_by = None
        self.place = self.home
        return True

    def misuse(self, name: str) -> Exception:
        """Build the error of a call made elsewhere."""
        step = self.point.everyone.step
        if self._held_by is not None and self.is_on_loop():
            return held_by_op_error(name, self._held_by.fn_name)
        return misuse_error(name, self.replica, step, self.home)
