"""The replica group: starts the replicas of one run and waits for their end.

Replicas are bare asyncio tasks; they meet at the group's meeting point (`_meeting_point.py`).

A run ends in one of three ways: every replica returned, a cause was found (mismatch, stall, call
never awaited), or replicas failed by themselves. In the last two all replicas are cancelled, and
cancelled again from time to time while they live: on Python 3.11 `asyncio.wait_for` can swallow a
cancellation.

A failure beats a mismatch. So a replica that withdrew from a collective is left to end by itself:
it may be unwinding because a child task of it failed, and that is the failure then. And what
follows from a replica's return is carried out a cycle of the loop later, after the replicas that
fail in the same cycle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from functools import partial
from itertools import chain
from typing import Any, final

from ..context import PLACE, CurrentStrategy, Place
from ..devices import CompletionQueue, Op, OpTracker, lane_table, submit_gang, wait_shielded
from ..telemetry import ReplicaWait
from ._errors import (
    left_behind_error,
    mismatch_error,
    never_awaited_error,
    replica_cancelled_error,
    stall_error,
)
from ._failure import Failures, cause_of_unwinding, error_of
from ._meeting import AcrossWorkers, Call, SyncGroup
from ._meeting_point import MeetingPoint
from ._messages import Transfer
from ._rendezvous import Mismatch, ReplicaState
from ._replica import Replica, warn_never_awaited
from ._stall import StallWatch, format_stack, format_thread_stack, rows_of

RECANCEL_S = 0.25  # doubled each time
GIVE_UP_S = 0.25
UNWIND_S = 1.0
"""How long a replica that withdrew may take to end by itself and say why, in loop time."""


@final
class ReplicaGroup:
    """One run's replicas.

    Args:
        runtime: The strategy.
        loop: The event loop of the run; None outside every run, where one replica meets itself.
        step: Number of the run in its strategy.
        fn_name: Name of the step function, for notes.
        is_blocking: Whether the replicas are plain functions, which meet on their device threads.
        across: The same run of other workers; None if there are none.

    Attributes:
        replicas: The state of each replica.
        point: Where they meet.
        fn_name: Name of the step function.
        ops: What counts the run's device ops in flight.

    Invariants:
        * `num_left` counts the replicas that have not ended.
        * `point.is_aborted` implies that every later library await in the run raises
          CancelledError.
    """

    def __init__(
        self, runtime: CurrentStrategy, loop: asyncio.AbstractEventLoop | None, step: int,
        fn_name: str, *, is_blocking: bool = False, across: AcrossWorkers | None = None,
    ) -> None:  # fmt: skip
        device_names, observers = runtime.device_names, runtime.observers
        self.num_replicas = size = len(device_names)
        self.step = step
        self.is_blocking = is_blocking and loop is not None
        self.ops = OpTracker(observers)
        self.replicas = [Replica(i) for i in range(size)]
        everyone = SyncGroup(
            range(size), device_names, runtime,
            runtime.blocking_merge_place if is_blocking else runtime.merge_place,
            runtime.reducer, step, has_plain_values=runtime.has_plain_values,
            is_blocking=self.is_blocking, across=across,
        )  # fmt: skip
        self._recorder = recorder = runtime.recorder
        self.point = MeetingPoint(self.replicas, everyone, loop, observers, recorder.now, self)
        self._runtime = runtime
        self._loop = loop
        self._num_left = 0
        self._finished: asyncio.Future[None] | None = None
        self._failures = Failures(device_names, step, fn_name, everyone.global_id(0))
        self.fn_name = fn_name
        self._observers = observers
        self._withdrawn: Replica | None = None  # and has not ended
        self._unwind_timer: asyncio.TimerHandle | None = None
        self._recancel: asyncio.TimerHandle | None = None
        self._gave_up = False

    @property
    def is_aborted(self) -> bool:
        """True if the run was ended early."""
        return self.point.is_aborted

    @property
    def works(self) -> list[asyncio.Future[object] | None]:
        """The task of each replica, or the op of its plain function."""
        return [replica.work for replica in self.replicas]

    def start_tasks(
        self, places: Sequence[Place], coroutines: Sequence[Coroutine[object, None, object]]
    ) -> None:
        """Start each coroutine as a replica's task, in a copy of the caller's context."""
        loop, ended = self._loop, self._ended
        self._num_left = self.num_replicas
        context = copy_context()
        began = self._observers.replica_began
        for replica, place, coroutine in zip(self.replicas, places, coroutines, strict=True):
            own = context.copy()
            own.run(PLACE.set, place)
            if began is not None:
                began(self, replica.replica_id, own)
            task = asyncio.Task(coroutine, loop=loop, context=own)
            replica.work = task
            task.add_done_callback(partial(ended, replica))
        if (tell := self._observers.run_began) is not None:
            tell(self)

    def start_ops(
        self,
        places: Sequence[Place],
        lane_names: Sequence[str],
        completions: CompletionQueue,
        calls: Sequence[tuple[Callable[..., object], tuple[object, ...], dict[str, object]]],
    ) -> None:
        """Put each call of a plain function on its replica's lane, all in one go."""
        self._num_left = self.num_replicas
        ops = []
        told = OpTracker(self._observers)  # not `self.ops`: these are the replicas themselves
        began = self._observers.replica_began
        for replica, place, call in zip(self.replicas, places, calls, strict=True):
            own = copy_context()
            own.run(PLACE.set, place)
            if began is not None:
                began(self, replica.replica_id, own)
            replica.op = replica.work = own.run(partial(Op[Any], completions, *call, tracker=told))
            ops.append(replica.op)
        try:
            submit_gang(lane_names, ops)
        except BaseException:
            self.point.is_aborted = True  # one that has begun already meets nobody
            self._cancel_all()
            raise
        for replica, op in zip(self.replicas, ops, strict=True):
            op.add_done_callback(partial(self._ended, replica))
        if (tell := self._observers.run_began) is not None:
            tell(self)

    async def wait(self, stall_timeout: float | None) -> list[Any]:
        """Wait for all replicas and return their results.

        Raises:
            BaseException: What the run raises, see the module's text.

        Cancellation:
            Cancels the replicas, waits until they have ended, raises the same object again.
        """
        watch = None
        if stall_timeout is not None and self._loop is not None:
            watch = StallWatch(self._loop, stall_timeout, self.progress, self.stalled)
        try:
            await self._new_finished()
            if self.ops.pending:
                meanwhile = await self._drain()
                if meanwhile is not None:
                    raise meanwhile
            error = self._failures.error()
            # Before the end of the run is told: who draws it knows then how it ended.
            if error is not None and (tell_fault := self._observers.fault) is not None:
                tell_fault(self.step, error)
        except asyncio.CancelledError as cancelled:
            self.abort(None)
            self._cancel_withdrawn()
            self._cancel_all()
            await self._drain()
            self._failures.note_everything(cancelled)
            raise
        finally:
            if watch is not None:
                watch.stop()
            for timer in (self._recancel, self._unwind_timer):
                if timer is not None:
                    timer.cancel()
            if (tell := self._observers.run_ended) is not None:
                tell(self)
        if error is not None:
            raise error
        for error in self.point.unseen.values():  # of reductions whose handle nobody has read
            raise error
        warn_never_awaited(self.replicas, self.point.everyone)
        return [replica.work.result() for replica in self.replicas if replica.work is not None]

    def forget(self) -> None:
        """Let go of the ended tasks, so that the run's objects form no cycle."""
        self.ops.close()
        self.point.forget()
        for replica in self.replicas:
            replica.forget()

    def abort(self, cause: BaseException | None) -> None:
        """End the run: remember why, cancel every replica wherever it waits. Idempotent."""
        if self.is_aborted:
            return
        self._failures.cause = cause
        self.point.is_aborted = True
        self._cancel_all()
        self._cancel_again_in(RECANCEL_S)

    @property
    def is_over(self) -> bool:
        """True if every replica has ended, or was given up under an interrupt."""
        return (self._num_left == 0 and not self.point.merging) or self._gave_up

    def _cancel_all(self) -> None:
        self.point.cancel()
        for replica in self.replicas:
            if replica is not self._withdrawn:
                replica.cancel()

    def _cancel_withdrawn(self) -> None:
        """Cancel the replica that withdrew, too: why it did is not waited for any more."""
        replica, self._withdrawn = self._withdrawn, None
        if replica is not None:
            replica.cancel()

    def _cancel_again(self, delay: float) -> None:
        self._cancel_all()
        self._cancel_again_in(2 * delay)  # a task may swallow one cancellation and wait on

    def _cancel_again_in(self, delay: float) -> None:
        if not self.is_over and self._loop is not None:
            self._recancel = self._loop.call_later(delay, self._cancel_again, delay)

    def _ended(self, replica: Replica, work: asyncio.Future[object]) -> None:
        """Record a replica's end, one loop cycle after it."""
        self._num_left -= 1
        point = self.point
        error = error_of(work)
        if error is None and point.unseen:  # by identity: an exception of the user may be false
            error = point.unseen_by(replica.replica_id)
        if (tell := self._observers.replica_ended) is not None:
            tell(self, replica.replica_id, error)
        # In this order: calls that a failed replica never awaited are a consequence.
        if self._withdrawn is replica:
            self._has_unwound(replica, error)
        elif error is not None:
            self._replica_failed(replica, error)
        if replica.unawaited:
            self._forgotten(replica, error)
        elif error is None and not point.is_aborted:
            self._returned(replica)
        if not self._num_left and self.is_over:
            self._resolve_finished()

    def _returned(self, replica: Replica) -> None:
        ops, who = self.ops, replica.replica_id
        if ops.pending and not self.is_blocking and (left := ops.unfinished(who)):
            self._call_soon(self.abort, left_behind_error(who, self.step, left))
            return
        # A cycle later: a sibling that fails in this one explains it better (decision 3).
        mismatch = self.point.leave(who, ReplicaState.RETURNED)
        if mismatch is not None:
            self._call_soon(self.abort_mismatch, mismatch)

    def _call_soon(self, fn: Callable[..., None], *args: object) -> None:
        if self._loop is not None:
            self._loop.call_soon(fn, *args)

    def merge_ended(self) -> None:
        """Record that the task of a merge has ended."""
        if self.is_over:
            self._resolve_finished()

    def _replica_failed(self, replica: Replica, error: BaseException) -> None:
        is_cancelled = isinstance(error, asyncio.CancelledError)
        if not replica.was_cancelled:
            # As a CancelledError it would look like the end of the caller's own task.
            if is_cancelled:
                error = replica_cancelled_error(error, self.step, self.fn_name)
            self._failures.failed(replica.replica_id, error)
            self.point.leave(replica.replica_id, ReplicaState.FAILED)
            self.abort(None)
        elif not is_cancelled:
            self._failures.unwound(replica.replica_id, error)

    def _has_unwound(self, replica: Replica, error: BaseException | None) -> None:
        """Find out whether the replica that withdrew did so because it was failing."""
        self._withdrawn = None
        failure = cause_of_unwinding(error)
        if failure is not None:
            self._failures.failed(replica.replica_id, failure)
            self.point.leave(replica.replica_id, ReplicaState.FAILED)

    def _forgotten(self, replica: Replica, error: BaseException | None) -> None:
        """Close coroutines that were never started; without another error that fails the run."""
        lines, given_up = replica.not_awaited(self.point.everyone), replica.given_up()
        replica.close_unawaited()
        if error is not None or self.is_aborted:
            return
        if given_up is not None:
            mismatch = self.point.leave(replica.replica_id, ReplicaState.WITHDREW, given_up)
            if mismatch is not None:
                self.abort_mismatch(mismatch)
        elif lines:
            self._call_soon(self.abort, never_awaited_error(self.step, lines))
        else:
            self._returned(replica)

    async def _drain(self) -> asyncio.CancelledError | None:
        """Wait for all replicas and ops, or for a moment if the interpreter is interrupted.

        Returns the cancellation that came meanwhile, if one did.
        """
        seen: list[asyncio.CancelledError] = []

        def cancelled(error: asyncio.CancelledError) -> None:
            seen.append(error)
            self._cancel_all()

        is_over = await wait_shielded(lambda: self.is_over, self._new_finished, cancelled)
        if not is_over or not await self.ops.drain(cancelled) or self._gave_up:
            self._cancel_all()
            timer = asyncio.get_running_loop().call_later(GIVE_UP_S, self._give_up)
            while not self.is_over:
                try:
                    await self._new_finished()
                except asyncio.CancelledError as error:
                    cancelled(error)
            timer.cancel()
            self._runtime.abandon()
        return seen[0] if seen else None

    def give_up(self) -> None:
        """End the run although ops of it hang: they keep their threads, which get no more ops."""
        for name, _ in running_ops(self):
            if name in self._runtime.device_names:  # lanes of the library have several threads
                lane_table().retire(name)
        self.ops.give_up()
        self._cancel_all()
        self._give_up()

    def _give_up(self) -> None:
        self._gave_up = True
        self._resolve_finished()

    def _new_finished(self) -> asyncio.Future[None]:
        self._finished = asyncio.Future(loop=self._loop)
        return self._finished

    def _resolve_finished(self) -> None:
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    def abort_mismatch(self, mismatch: Mismatch, withdrew: Replica | None = None) -> None:
        """End the run because its replicas can never meet.

        A replica that `withdrew` is left to end by itself, for a while: cancelled once more it
        could not say why (`asyncio.timeout` would not make its TimeoutError).
        """
        if self.is_aborted:
            return
        lines = chain.from_iterable(each.not_awaited(self.point.everyone) for each in self.replicas)
        error = mismatch_error(mismatch, self.step, [*lines], self._recorder.history())
        if withdrew is not None and self._loop is not None:
            self._withdrawn = withdrew
            self._unwind_timer = self._loop.call_later(UNWIND_S, self._cancel_withdrawn)
        self.abort(error)

    def stalled(self, timeout_s: float, call: Call | Transfer | None = None) -> None:
        """End the run because nothing happened for too long, at all or in one collective."""
        format_one = format_thread_stack if self.is_blocking else format_stack
        rows, stacks = rows_of(self), tuple(map(format_one, self.replicas))
        self.abort(stall_error(timeout_s, self.step, rows, stacks, call, self._recorder.history()))

    async def restart_outside(self) -> None:
        """Wait for what a given-up call left behind, outside every run; then start again."""
        await self._drain()
        self.point.restart()

    def progress(self) -> tuple[int, int, int, object]:
        """Return what changes whenever something happens, and while that cannot be seen."""
        done = self.ops.num_done + sum(r.sequence + r.steps_done for r in self.replicas)
        if (messages := self.point.rendezvous.messages) is not None:
            done += messages.num_moved
        return self.point.num_merges, self._num_left, done, self.point.is_busy and object()


def running_ops(group: ReplicaGroup) -> list[tuple[str, str]]:
    """Return the device and the description of each op of a run that has begun and not ended."""
    found: list[tuple[str, str]] = []
    for replica, device in zip(group.replicas, group.point.everyone.device_names, strict=True):
        who = replica.replica_id
        if replica.op is not None and replica.op.is_running:
            found.append((device, f"replica {who}: {group.fn_name} on {device}"))
        running = [op for op in group.ops.unfinished(who) if op.is_running]
        found += [(op.device_name or "-", f"replica {who}: {op.describe()}") for op in running]
    return found


def waits_of(group: ReplicaGroup) -> Iterator[ReplicaWait]:
    """Yield what each replica of a run waits for: collectives, then ops, then what else."""
    point = group.point
    devices = point.everyone.device_names
    for replica, device in zip(group.replicas, devices, strict=True):
        replica_id = replica.replica_id
        with point.lock or nullcontext():
            waits = point.rendezvous.waits(replica_id)
        for generation in waits:
            yield ReplicaWait(
                group.step,
                replica_id,
                device,
                generation.describe(),
                generation.missing_members(),
                generation.call_of(replica_id).site,
            )
        for op in group.ops.unfinished(replica_id):
            state = "runs" if op.is_running else "is queued"
            what = f"{op.fn_name}, which {state} on {op.device_name or device}"
            yield ReplicaWait(group.step, replica_id, device, what, (), op.where)
        if group.is_blocking and replica.activity is not None:
            yield ReplicaWait(group.step, replica_id, device, replica.activity, (), "-")
