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
from ..devices import HOST, lend_lane, name_of_served_lane, new_gate
from ._meeting import Call, CallSite, Collective, Generation, Pending, SyncGroup, new_call
from ._meeting_point import MeetingPoint
from ._misuse import blocking_misuse_error, misuse_error
from ._rendezvous import Mismatch
from ._replica import Replica
from ._table import two_at_once_error


class Waiter(ABC):
    """How the calls of one replica wait.

    Attributes:
        point: Where the replicas meet.
        replica: Whose calls.
        place: Where calls may be made; None before and after.
        thread_id: The thread in which they may be made.
    """

    __slots__ = ("place", "point", "replica", "thread_id")

    def __init__(self, point: MeetingPoint, replica: Replica) -> None:
        self.point = point
        self.replica = replica
        self.place: Place | None = None
        self.thread_id = 0

    def open(self, place: Place) -> None:
        """Allow calls where `place` is current, in the calling thread."""
        self.thread_id = get_ident()
        self.place = place

    def close(self) -> None:
        """Refuse everything from now on."""
        self.place = None

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
        port: Brings what device threads do to the event loop, in order; None outside every run.
        ops: The ops of the run that are in flight.
    """

    __slots__ = ("_held_by", "_open_place", "_ops", "_port")

    def __init__(
        self, point: MeetingPoint, replica: Replica, port: CompletionPort | None, ops: OpTracker
    ) -> None:
        super().__init__(point, replica)
        self._port = port
        self._ops = ops
        self._open_place: Place | None = None
        self._held_by: tuple[Op[Any], ...] = ()

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
        place, port = self._open_place, self._port
        running = self._running_ops()
        if place is None or port is None or get_ident() == self.thread_id or not running:
            raise self._misuse(collective.name)
        self._held_by = running
        self.place = None
        call = new_call(collective, argument, args, None, group, position, 0, frame)
        handle = Handle(self.point, self.replica, call, place)
        port.post(handle.begin)
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

    def open(self, place: Place) -> None:
        """Allow calls where `place` is current, in the calling thread."""
        super().open(place)
        self._open_place = place

    def close(self) -> None:
        """Refuse everything from now on."""
        self._open_place = None
        super().close()

    def _running_ops(self) -> tuple[Op[Any], ...]:
        """Return the ops of this replica that have started and not ended."""
        pending = tuple(self._ops.pending)
        return tuple(op for op in pending if op.place is self._open_place and op.has_started)

    def _is_free(self) -> bool:
        """Tell whether calls may be made here after all: the ops that started some are done."""
        if not self._held_by or not all(op.is_done for op in self._held_by):
            return False
        if PLACE.get() is not self._open_place or get_ident() != self.thread_id:
            return False
        self._held_by = ()
        self.place = self._open_place
        return True

    def _misuse(self, name: str) -> Exception:
        if self._held_by and get_ident() == self.thread_id:
            return held_by_op_error(name, self._held_by[0].fn_name)
        return misuse_error(name, self.replica, self.point.everyone.step, self._open_place,
                            is_thread=get_ident() != self.thread_id)  # fmt: skip
