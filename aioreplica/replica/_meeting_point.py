"""The meeting point of one run: the awaitable shell around its rendezvous.

This is the hot path. Replicas that have to wait in a collective share one future per generation,
which carries the results of all. The last replica to arrive runs the merge in its own step and
releases the others. Cancelling one waiting task cancels the shared future; as the others can then
never meet it, that ends the run in any case (`_wait_cancelled`). What was started with a handle
goes on without a waiting task, so there a cancelled await withdraws nothing.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from asyncio import current_task
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, final
from weakref import proxy

from ..telemetry import Recorder
from ._call import Call
from ._collective import Meeting, Parts, Pending
from ._failure import add_note_once
from ._merge_task import MergeTask, error_of
from ._reductions import STARTED_ALL_REDUCE
from ._rendezvous import Mismatch, Rendezvous, ReplicaState
from ._seat import Seat
from ._sync_group import Generation, SyncGroup, is_given_up
from ._table import two_at_once_error
from ._watch import Watch, is_blocked


class RunControl(ABC):
    """What a meeting point asks of the run it belongs to."""

    @abstractmethod
    def abort(self, cause: BaseException | None) -> None:
        """End the run, raising `cause`."""

    @abstractmethod
    def abort_mismatch(self, mismatch: Mismatch) -> None:
        """End the run because its replicas can never meet."""

    @abstractmethod
    def stalled(self, timeout_s: float, call: Call | None = None) -> None:
        """End the run because replicas waited too long in a collective."""

    @abstractmethod
    def merge_ended(self) -> None:
        """Take note that a merge's task has ended."""

    @abstractmethod
    async def restart_outside(self) -> None:
        """Clean up after a call that was given up outside every run."""


@final
class MeetingPoint:
    """Where the replicas of one run meet.

    Args:
        seats: One per replica.
        meeting: What collectives need to know of the run.
        loop: The event loop of the run; None outside every run, where one replica meets itself.
        recorder: Receives one record per merge.
        step: Number of the run in its strategy.
        run: What ends the run, see `RunControl`.

    Attributes:
        is_aborted: Set by the run when it ends early; every later await here raises
            CancelledError.
        num_merges: How many merges have ended, a sign of progress.
        merging: The merges that take longer than one step of their last replica.
        unseen: What started collectives raised and no handle has shown to anybody so far.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        meeting: Meeting,
        loop: asyncio.AbstractEventLoop | None,
        recorder: Recorder,
        step: int,
        run: RunControl,
    ) -> None:
        self.is_aborted = False
        self.num_merges = 0
        self.merging: dict[Generation, MergeTask] = {}
        self.unseen: dict[Generation, BaseException] = {}
        self.rendezvous = Rendezvous(
            meeting.device_names, lambda replica_id: is_blocked(seats[replica_id].work)
        )
        self.rendezvous.everyone.meeting = meeting
        self.everyone = self.rendezvous.everyone
        self._is_solo = len(seats) == 1
        self._seats = seats
        self._loop = loop
        self._now = recorder.now
        self._record = recorder.record
        self._step = step
        self._run: RunControl = proxy(run)  # the run holds the point: no circle

    async def meet(self, seat: Seat, call: Call) -> Any:
        """Bring one replica's call to the rendezvous; return its part of the merge's result."""
        del seat.unawaited[call]
        if self.is_aborted:
            raise asyncio.CancelledError
        if seat.waiting is not None:
            raise self._two_at_once(seat, call)
        opened = call.group.open.get(call.sequence)
        if opened is not None and is_given_up(opened):  # by a replica that does not know it yet
            self._wait_cancelled(seat, opened)
            raise asyncio.CancelledError
        generation = self.rendezvous.arrive(seat.replica_id, call, self._now())
        if type(generation) is not Generation:
            self._run.abort_mismatch(generation)
            raise asyncio.CancelledError
        waiter = generation.waiter
        if not call.position:
            call.context = copy_context()
        if not generation.missing:
            parts = self._merge(generation)
            if type(parts) is not Pending:
                if self._is_solo:
                    await asyncio.sleep(0)  # a loop of collectives must let others run
                return _take(parts, call.position)
            self._start_merge(generation, parts)
        if waiter is None:
            waiter = self._new_waiter(generation, call)
        seat.waiting = task = current_task(self._loop)
        seat.cancels_before = task.cancelling()  # type: ignore[union-attr]  # a task runs this
        try:
            parts = await waiter
        except asyncio.CancelledError:
            self._wait_cancelled(seat, generation)
            if self._loop is None:  # no run waits for the merge to end
                await self._run.restart_outside()
            raise
        finally:
            seat.waiting = None
        if self.is_aborted:
            raise asyncio.CancelledError
        return _take(parts, call.position)

    def start(self, seat: Seat, call: Call) -> Generation:
        """Bring a call to the rendezvous without waiting there."""
        if self.is_aborted:
            raise asyncio.CancelledError
        generation = self.rendezvous.arrive(seat.replica_id, call, self._now(), waits=False)
        if type(generation) is not Generation:
            self._run.abort_mismatch(generation)
            raise asyncio.CancelledError
        if not call.position:
            call.context = copy_context()
        if generation.waiter is None:
            self._new_waiter(generation, call)
        if not generation.missing:
            try:
                parts = self._merge(generation)
            except Exception:  # noqa: BLE001 - it is in the future, for those who await a handle
                return generation
            if type(parts) is Pending:
                self._start_merge(generation, parts)
        return generation

    async def wait_for_started(self, seat: Seat, call: Call, generation: Generation) -> Any:
        """Return this replica's part of what was started; a cancelled wait gives nothing up."""
        seat.started.pop(call, None)
        if self.is_aborted:
            raise asyncio.CancelledError
        waiter = generation.waiter
        assert waiter is not None  # made by `start`
        if not waiter.done():
            mismatch = self.rendezvous.wait_for_started(seat.replica_id, generation)
            if mismatch is not None:
                self._run.abort_mismatch(mismatch)
                raise asyncio.CancelledError
            try:
                await Watch(waiter)
            finally:
                mismatch = self.rendezvous.waited_for_started(seat.replica_id, generation)
                if mismatch is not None:
                    self._run.abort_mismatch(mismatch)
        elif self._is_solo:
            await asyncio.sleep(0)
        if self.is_aborted:
            raise asyncio.CancelledError
        self.unseen.pop(generation, None)
        return waiter.result()[call.position]

    def watch(
        self,
        seat: Seat,
        generation: Generation,
        finish: Callable[[Any, BaseException | None], None],
    ) -> None:
        """Call `finish` with a thread's part of what it started, or with the error, once."""
        waiter = generation.waiter
        assert waiter is not None  # made by `start`
        position = generation.group.members.index(seat.replica_id)
        if not waiter.done():
            mismatch = self.rendezvous.wait_for_started(seat.replica_id, generation)
            if mismatch is not None:
                self._run.abort_mismatch(mismatch)

        def arrived(waiter: asyncio.Future[Parts]) -> None:
            mismatch = self.rendezvous.waited_for_started(seat.replica_id, generation)
            if mismatch is not None:
                self._run.abort_mismatch(mismatch)
            error = error_of(waiter)
            if error is None and self.is_aborted:
                error = asyncio.CancelledError()
            finish(None if error is not None else waiter.result()[position], error)

        waiter.add_done_callback(arrived)

    def sub_group(self, members: tuple[int, ...]) -> SyncGroup:
        """Return the group of some replicas."""
        group = self.rendezvous.group(members)
        if not hasattr(group, "meeting"):
            group.meeting = self.everyone.meeting.of(members)
        return group

    def unseen_by(self, replica_id: int) -> BaseException | None:
        """Return what a collective raised that a replica started and nobody has looked at."""
        for generation, error in self.unseen.items():
            if replica_id in generation.group.members:
                return error
        return None

    def cancel(self) -> None:
        """Cancel what is waited for; child tasks of replicas may be among those who wait."""
        for generation in (*self.rendezvous.open_generations(), *self.merging):
            if generation.waiter is not None:
                generation.waiter.cancel()
            if generation.timer is not None:
                generation.timer.cancel()
        for task in tuple(self.merging.values()):
            task.cancel()

    def restart(self) -> None:
        """Forget a given-up call, outside every run."""
        meeting = self.everyone.meeting
        self.is_aborted = False
        self.rendezvous = Rendezvous(meeting.device_names)
        self.rendezvous.everyone.meeting = meeting
        self.everyone = self.rendezvous.everyone

    def forget(self) -> None:
        """Let go of every call."""
        self.rendezvous.forget()
        self.unseen.clear()

    # ---- merging -------------------------------------------------------------------------

    def _merge(self, generation: Generation) -> Parts | Pending:
        """Merge a complete generation; return the parts, or what is left to await."""
        if generation.timer is not None:
            generation.timer.cancel()
        call = generation.first
        try:
            parts = call.collective.perform(generation.group.meeting, generation.calls)
        except Exception as error:
            self._merge_failed(generation, error)
            if isinstance(error, StopIteration):  # would look like the end of this coroutine
                raise _without_stop(error) from error
            raise
        if type(parts) is not Pending:
            self._release(generation, parts)
        return parts

    def _release(self, generation: Generation, parts: Parts) -> None:
        """Hand every waiting replica the parts of a finished merge."""
        generation.is_merged = True
        self.num_merges += 1
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
        waiter = generation.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(parts)

    def _merge_failed(self, generation: Generation, error: BaseException) -> None:
        """Raise the merge's exception, the same object, in every replica that waits."""
        generation.is_merged = True
        first = generation.calls[0]
        add_note_once(error, f"Raised by the merge of {first.describe()}, called at {first.site}.")
        waiter = generation.waiter
        if waiter is not None and not waiter.done():
            waiter.set_exception(_without_stop(error))
            waiter.exception()  # asyncio need not say so: whoever awaits it raises it, or the run
            if generation.first.collective is STARTED_ALL_REDUCE:
                self.unseen[generation] = error

    def _start_merge(self, generation: Generation, pending: Pending) -> None:
        self.merging[generation] = MergeTask(
            pending,
            lambda: self.is_aborted,
            self._loop,
            generation.calls[0].context,
            partial(self._merge_ended, generation),
        )

    def _merge_ended(self, generation: Generation, task: asyncio.Future[Parts]) -> None:
        del self.merging[generation]
        error = error_of(task)
        if not self.is_aborted:
            if error is None:
                self._release(generation, task.result())
            else:
                self._merge_failed(generation, error)
        with suppress(ReferenceError):  # the run was given up in an interrupt
            self._run.merge_ended()

    # ---- waiting -------------------------------------------------------------------------

    def _new_waiter(self, generation: Generation, call: Call) -> asyncio.Future[Parts]:
        waiter: asyncio.Future[Parts] = asyncio.Future(loop=self._loop)
        generation.waiter = waiter
        own = call.collective.options(call.argument)
        timeout_s = generation.group.meeting.timeout_s if own is None else own.timeout_seconds
        if timeout_s is not None and generation.missing and self._loop is not None:
            generation.timer = self._loop.call_later(timeout_s, self._run.stalled, timeout_s, call)
        return waiter

    def _two_at_once(self, seat: Seat, call: Call) -> Exception:
        error = two_at_once_error(call, self.rendezvous.current_call(seat.replica_id))
        if self._loop is not None:
            self._run.abort(error)
        return error

    def _wait_cancelled(self, seat: Seat, generation: Generation) -> None:
        """Find out whose cancellation ended a wait, and end the run if that was a withdrawal."""
        waiter = generation.waiter
        assert waiter is not None  # somebody waited for it
        if self.is_aborted:
            return
        if waiter.done() and not waiter.cancelled():
            waiter.exception()  # the merge was over: nothing was withdrawn
            return
        inside = [s for s in self._seats if self.rendezvous.is_in(s.replica_id, generation)]
        seat = _who_withdrew(inside, seat)
        mismatch = self.rendezvous.leave(seat.replica_id, ReplicaState.WITHDREW)
        if mismatch is not None:
            self._run.abort_mismatch(mismatch)


def _take(parts: Parts, position: int) -> Any:
    """Take a part out, so that its memory is free as soon as the replica lets go of it.

    The future that carried the parts lives on while the task that it woke runs.
    """
    part = parts[position]
    if type(parts) is list:
        parts[position] = None
    return part


def _without_stop(error: BaseException) -> BaseException:
    """Wrap a StopIteration, which neither a future nor a coroutine can carry."""
    return RuntimeError(f"A merge raised {error!r}.") if type(error) is StopIteration else error


def _who_withdrew(seats: Sequence[Seat], woken: Seat) -> Seat:
    """Return whose cancellation cancelled the future that all waiting tasks share.

    Each of them wakes with a CancelledError. The one whose own count of cancellations has grown is
    the cause; else one that had been cancelled just before it arrived.
    """
    waiting = [(s, s.waiting.cancelling()) for s in seats if s.waiting is not None]
    grown = [seat for seat, cancels in waiting if cancels > seat.cancels_before]
    earlier = [seat for seat, cancels in waiting if cancels]
    return (grown or earlier or [woken])[0]
