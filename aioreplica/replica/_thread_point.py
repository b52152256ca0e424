"""Where the device threads of one run meet: the same rendezvous, with locks instead of a future.

Each replica has a gate, which is closed. A thread that has to wait parks: it waits at its gate.
Whoever completes the generation merges it in its own thread and opens the gates of the
others. Nothing goes through the event loop, except what ends the run (a mismatch, a timeout) and
the rest of a merge that has to be awaited.

Invariants:
    * The rendezvous is touched under the lock only, by threads and by the event loop alike; no
      merge and no user's function runs under it.
    * A gate is opened once for each time its replica is listed as parked, by whoever takes it off
      the list. So a thread never passes by mistake, and none stays behind.
    * A thread that found out why the run must end parks too until the run was ended: whatever it
      raised before would look like its own failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from threading import Lock
from typing import Any, final
from weakref import proxy

from ..devices import new_gate
from ..errors import ReplicaRow
from ..telemetry import Recorder
from ._call import Call
from ._collective import Parts, Pending
from ._failure import add_note_once
from ._host_call import HostCall
from ._meeting_point import MeetingPoint, RunControl
from ._merge_task import MergeTask, error_of
from ._rendezvous import Mismatch, ReplicaState
from ._seat import Seat
from ._sync_group import Generation, SyncGroup


@final
class ThreadPoint:
    """Lets the device threads of one run meet.

    Args:
        point: The run's meeting point, whose rendezvous is used.
        loop: The event loop of the run.
        recorder: Receives one record per merge.
        step: Number of the run in its strategy.
        run: What ends the run.

    Attributes:
        everyone: The group of all replicas.
    """

    def __init__(
        self,
        point: MeetingPoint,
        loop: asyncio.AbstractEventLoop,
        recorder: Recorder,
        step: int,
        run: RunControl,
    ) -> None:
        point.everyone.meeting.is_blocking = True
        self.everyone = point.everyone
        self._point = point
        self._loop = loop
        self._now = recorder.now
        self._record = recorder.record
        self._step = step
        self._run: RunControl = proxy(run)  # the run holds this: no circle
        self._timeout_s = point.everyone.meeting.timeout_s
        self._lock = Lock()
        self._gates = [new_gate(loop) for _ in point.everyone.members]
        self._parked: set[int] = set()
        self._host_calls: dict[HostCall, None] = {}  # ordered: a set is walked by address
        self._wakers: list[Callable[[], None]] = []

    # ---- on device threads ---------------------------------------------------------------

    def meet(self, seat: Seat, call: Call) -> Any:
        """Bring one replica's call to the rendezvous; return its part of the merge's result."""
        if not call.position:
            call.context = copy_context()
        point, replica_id = self._point, seat.replica_id
        now_s = self._now()
        with self._lock:
            if point.is_aborted:
                raise asyncio.CancelledError
            generation = point.rendezvous.arrive(replica_id, call, now_s)
            is_complete = type(generation) is Generation and not generation.missing
            if not is_complete:
                self._parked.add(replica_id)
        if is_complete:
            parts = self._merge(generation)  # type: ignore[arg-type]  # it is one
            if type(parts) is list:
                part, parts[call.position] = parts[call.position], None  # free once it is let go
                return part
            if type(parts) is not Pending:
                return parts[call.position]
            self._hand_over(replica_id, generation, parts)  # type: ignore[arg-type]
        elif type(generation) is not Generation:
            self._end_run(self._run.abort_mismatch, generation)
            self._park(replica_id)
            raise asyncio.CancelledError
        own = call.collective.options(call.argument)
        timeout_s = self._timeout_s if own is None else own.timeout_seconds
        if timeout_s is None or not generation.missing:  # type: ignore[union-attr]
            self._park(replica_id)
        else:
            self._park_for(timeout_s, replica_id, call, generation)  # type: ignore[arg-type]
        if point.is_aborted:
            raise asyncio.CancelledError
        error = generation.error  # type: ignore[union-attr]
        if error is not None:
            raise error
        parts = generation.parts  # type: ignore[union-attr]
        part = parts[call.position]
        if type(parts) is list:
            parts[call.position] = None
        return part

    def sub_group(self, members: tuple[int, ...]) -> SyncGroup:
        """Return the group of some replicas."""
        with self._lock:
            return self._point.sub_group(members)

    def call_on_host(
        self, fn: Callable[..., Any], args: tuple[Any, ...], context: Context, name: str
    ) -> Any:
        """Have the event loop run a plain or async function; return what it returns."""
        call = HostCall(fn, args, context, name, new_gate(self._loop))
        with self._lock:
            if self._point.is_aborted:
                raise asyncio.CancelledError
            self._host_calls[call] = None
        try:
            self._loop.call_soon_threadsafe(call.begin)
        except RuntimeError:
            self._abandon()
            raise asyncio.CancelledError from None
        try:
            call.wait()
        except asyncio.CancelledError:
            self._abandon()
            raise
        finally:
            with self._lock:
                self._host_calls.pop(call, None)
        if self._point.is_aborted:
            raise asyncio.CancelledError
        return call.result()

    def look(self) -> None:
        """Raise CancelledError if the run was aborted, or if nobody is left to end it."""
        if self._loop.is_closed():
            self._abandon()
        if self._point.is_aborted:
            raise asyncio.CancelledError

    # ---- on the event loop ---------------------------------------------------------------

    def when_aborted(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when the run is aborted, from any thread and perhaps repeatedly."""
        self._wakers.append(wake)

    def leave(
        self, replica_id: int, state: ReplicaState, call: Call | None = None
    ) -> Mismatch | None:
        """Record that a replica ended; see `Rendezvous.leave`."""
        with self._lock:
            return self._point.rendezvous.leave(replica_id, state, call)

    def rows(self) -> tuple[ReplicaRow, ...]:
        """Describe every replica, in replica order."""
        with self._lock:
            return self._point.rendezvous.rows()

    def cancel(self) -> None:
        """Wake every parked thread, and cancel what the host does for others."""
        self._wake_all()
        for task in tuple(self._point.merging.values()):
            task.cancel()
        with self._lock:
            calls = tuple(self._host_calls)
        for call in calls:
            call.cancel()

    def forget(self) -> None:
        """Let go of every call."""
        with self._lock:
            self._point.forget()

    # ---- merging -------------------------------------------------------------------------

    def _merge(self, generation: Generation) -> Parts | Pending:
        """Merge a complete generation in this thread; return the parts, or what is to await."""
        try:
            parts = generation.first.collective.perform(generation.group.meeting, generation.calls)
        except Exception as error:
            self._release(generation, (), _noted(error, generation))
            raise
        if type(parts) is not Pending:
            self._release(generation, parts, None)
        return parts

    def _release(
        self,
        generation: Generation,
        parts: Parts,
        error: BaseException | None,
    ) -> None:
        """Hand out a merge's result, and open the gates of those who wait for it."""
        generation.parts = parts
        generation.error = error
        gates, parked, group = self._gates, self._parked, generation.group
        with self._lock:
            generation.is_merged = True
            self._point.num_merges += 1
            if group.is_partial:
                woken = [member for member in group.members if member in parked]
                parked.difference_update(woken)
            else:  # all others wait for this merge
                woken = list(parked)
                parked.clear()
        for member in woken:  # outside the lock, which they may need
            gates[member].open()
        if error is None:  # recorded while the others wake up, which takes them longer
            calls = generation.calls
            first: Call = calls[0]
            collective = first.collective
            if collective.is_uneven:
                sizes = tuple(map(collective.num_bytes, calls))
            else:
                sizes = (collective.num_bytes(first),)
            self._record(self._now(), self._step, first.sequence, collective.name,
                         collective.op_name(first.argument), sizes, generation.group.members,
                         generation.visits)  # fmt: skip

    def _hand_over(self, replica_id: int, generation: Generation, pending: Pending) -> None:
        """Let the event loop await the rest of a merge."""
        with self._lock:
            self._parked.add(replica_id)
        if not self._end_run(self._start_merge, generation, pending):
            pending.discard()

    def _start_merge(self, generation: Generation, pending: Pending) -> None:
        if self._point.is_aborted:
            pending.discard()
            self._wake_all()
            return
        self._point.merging[generation] = MergeTask(
            pending,
            lambda: self._point.is_aborted,
            self._loop,
            generation.calls[0].context,
            partial(self._merge_ended, generation),
        )

    def _merge_ended(self, generation: Generation, task: asyncio.Future[Parts]) -> None:
        del self._point.merging[generation]
        error = error_of(task)
        if error is not None:
            self._release(generation, (), _noted(error, generation))
        else:
            self._release(generation, task.result(), None)
        self._run.merge_ended()

    # ---- waiting -------------------------------------------------------------------------

    def _park(self, replica_id: int, timeout_s: float | None = None) -> bool:
        """Wait until the generation is merged or the run ended; False if that took too long."""
        try:
            return self._gates[replica_id].wait(timeout_s)
        except asyncio.CancelledError:
            self._abandon()
            raise

    def _park_for(
        self, timeout_s: float, replica_id: int, call: Call, generation: Generation
    ) -> None:
        """Park for as long as allowed, then until the run was ended."""
        if not self._park(replica_id, timeout_s):
            self._end_run(self._stalled, timeout_s, call, generation)
            self._park(replica_id)

    def _stalled(self, timeout_s: float, call: Call, generation: Generation) -> None:
        if generation.missing:
            self._run.stalled(timeout_s, call)

    def _wake_all(self) -> None:
        with self._lock:
            woken = list(self._parked)
            self._parked.clear()
        for replica_id in woken:
            self._gates[replica_id].open()
        if self._point.is_aborted:
            for wake in self._wakers:
                wake()

    def _end_run(self, fn: Callable[..., None], *args: Any) -> bool:
        """Have the event loop call something; False if there is none any more."""
        try:
            self._loop.call_soon_threadsafe(fn, *args)
        except RuntimeError:
            self._abandon()
            return False
        return True

    def _abandon(self) -> None:
        """End the run from a thread: its event loop is closed, so nobody else will."""
        self._point.is_aborted = True
        self._wake_all()


def _noted(error: BaseException, generation: Generation) -> BaseException:
    first = generation.calls[0]
    add_note_once(error, f"Raised by the merge of {first.describe()}, called at {first.site}.")
    return error
