"""The replica group: starts the replicas of one run and sees to their end.

Replicas are bare asyncio tasks; they meet at the group's meeting point (`_meeting_point.py`).

A run ends in one of three ways: every replica returned, a cause was found (mismatch, stall, call
never awaited), or replicas failed by themselves. In the last two all replicas are cancelled, and
cancelled again from time to time while they live: on Python 3.11 `asyncio.wait_for` can swallow a
cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, final

from ..collectives import Reducer
from ..context import PLACE, Place
from ..devices import CompletionPort, Op, OpTracker, submit_gang, wait_shielded
from ..telemetry import Recorder
from ._call import Call
from ._collective import Meeting
from ._failure import Outcome
from ._meeting_point import MeetingPoint, RunControl
from ._merge_task import error_of
from ._rendezvous import Mismatch, ReplicaState
from ._seat import Seat, warn_never_awaited
from ._stack import format_stack, format_thread_stack
from ._stall import StallWatch
from ._table import mismatch_error, never_awaited_error, stall_error, with_activities
from ._thread_point import ThreadPoint

RECANCEL_S = 0.25  # doubled each time
GIVE_UP_S = 0.25


@final
class ReplicaGroup(RunControl):
    """One run's replicas.

    Args:
        strategy: Passed to merge functions.
        merge_place: Where merge functions run.
        device_names: One per replica.
        loop: The event loop of the run; None outside every run, where one replica meets itself.
        reducer: Does the work of collectives on arrays.
        recorder: Receives one record per merge.
        step: Number of the run in its strategy.
        fn_name: Name of the step function, for notes.
        has_plain_values: Whether merge functions get plain values (the default strategy).
        is_blocking: Whether the replicas are plain functions, which meet on their device threads.

    Attributes:
        seats: The state of each replica.
        point: Where they meet.
        threads: Where plain functions meet, at the rendezvous of `point`; None for coroutines.
        ops: What counts the run's device ops in flight.

    Invariants:
        * `num_left` counts the replicas that have not ended.
        * `point.is_aborted` implies that every later library await in the run raises
          CancelledError.
    """

    def __init__(
        self,
        strategy: Any,  # Any: the strategies layer lies above this one
        merge_place: Place,
        device_names: Sequence[str],
        loop: asyncio.AbstractEventLoop | None,
        reducer: Reducer,
        recorder: Recorder,
        step: int,
        fn_name: str,
        *,
        has_plain_values: bool = False,
        is_blocking: bool = False,
    ) -> None:
        self.num_replicas = size = len(device_names)
        self.step = step
        self.ops = OpTracker()
        self.seats = [Seat(i) for i in range(size)]
        meeting = Meeting(
            strategy, merge_place, device_names, has_plain_values, reducer, self.ops,
            range(size), size, reducer.options.timeout_seconds,
        )  # fmt: skip
        self.point = MeetingPoint(self.seats, meeting, loop, recorder, step, self)
        self.threads: ThreadPoint | None = None
        if is_blocking and loop is not None:
            self.threads = ThreadPoint(self.point, loop, recorder, step, self)
        self._strategy = strategy
        self._loop = loop
        self._recorder = recorder
        self._num_left = 0
        self._finished: asyncio.Future[None] | None = None
        self._outcome = Outcome(device_names, step, fn_name)
        self._recancel: asyncio.TimerHandle | None = None
        self._gave_up = False

    @property
    def is_aborted(self) -> bool:
        """Whether the run was ended early."""
        return self.point.is_aborted

    @property
    def has_loop(self) -> bool:
        """Whether this is a run; outside every run one replica meets itself."""
        return self._loop is not None

    def running_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of the run."""
        assert self._loop is not None  # a plain function has no replica outside every run
        return self._loop

    def start_tasks(
        self, places: Sequence[Place], coroutines: Sequence[Coroutine[Any, Any, Any]]
    ) -> None:
        """Start each coroutine as a replica's task, in a copy of the caller's context."""
        loop, ended = self._loop, self._ended
        self._num_left = self.num_replicas
        context = copy_context()
        for seat, place, coroutine in zip(self.seats, places, coroutines, strict=True):
            own = context.copy()
            own.run(PLACE.set, place)
            task = asyncio.Task(coroutine, loop=loop, context=own)
            seat.work = task
            task.add_done_callback(partial(ended, seat))

    def start_ops(
        self,
        places: Sequence[Place],
        lane_names: Sequence[str],
        port: CompletionPort,
        calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]],
    ) -> None:
        """Put each call of a plain function on its replica's lane, all in one go."""
        self._num_left = self.num_replicas
        ops = []
        for seat, place, call in zip(self.seats, places, calls, strict=True):
            own = copy_context()
            own.run(PLACE.set, place)
            seat.op = seat.work = own.run(partial(Op[Any], port, *call))
            ops.append(seat.op)
        submit_gang(lane_names, ops)
        for seat, op in zip(self.seats, ops, strict=True):
            op.add_done_callback(partial(self._ended, seat))

    async def wait(self, stall_timeout: float | None) -> list[Any]:
        """Wait for all replicas and return their results.

        Raises:
            BaseException: What the run raises, see the module's text.

        Cancellation:
            Cancels the replicas, waits until they have ended, raises the same object again.
        """
        watch = None
        if stall_timeout is not None and self._loop is not None:
            watch = StallWatch(self._loop, stall_timeout, self._progress, self.stalled)
        try:
            await self._new_finished()
            if self.ops.pending:
                meanwhile = await self._drain()
                if meanwhile is not None:
                    raise meanwhile
        except asyncio.CancelledError as cancelled:
            self.abort(None)
            await self._drain()
            self._outcome.note_everything(cancelled)
            raise
        finally:
            if watch is not None:
                watch.stop()
            if self._recancel is not None:
                self._recancel.cancel()
        error = self._outcome.error()
        if error is not None:
            raise error
        for error in self.point.unseen.values():
            raise error
        warn_never_awaited(self.seats)
        return [seat.work.result() for seat in self.seats if seat.work is not None]

    def forget(self) -> None:
        """Let go of the ended tasks, so that the run's objects form no cycle."""
        self.ops.close()
        (self.threads or self.point).forget()
        for seat in self.seats:
            seat.forget()

    def abort(self, cause: BaseException | None) -> None:
        """End the run: remember why, cancel every replica wherever it waits. Idempotent."""
        if self.is_aborted:
            return
        self._outcome.cause = cause
        self.point.is_aborted = True
        self._cancel_all()
        self._cancel_again_in(RECANCEL_S)

    @property
    def is_over(self) -> bool:
        """Whether every replica has ended, or was given up under an interrupt."""
        return (self._num_left == 0 and not self.point.merging) or self._gave_up

    def _cancel_all(self) -> None:
        (self.threads or self.point).cancel()
        for seat in self.seats:
            seat.cancel()

    def _cancel_again(self, delay: float) -> None:
        self._cancel_all()
        self._cancel_again_in(2 * delay)

    def _cancel_again_in(self, delay: float) -> None:
        if not self.is_over and self._loop is not None:
            self._recancel = self._loop.call_later(delay, self._cancel_again, delay)

    def _ended(self, seat: Seat, work: asyncio.Future[Any]) -> None:
        """Take note of a replica's end, one loop cycle after it."""
        self._num_left -= 1
        error = error_of(work) or self.point.unseen_by(seat.replica_id)
        if seat.unawaited:
            self._forgotten(seat, error)
        elif error is None and not self.is_aborted:
            mismatch = self._leave(seat, ReplicaState.RETURNED)
            if mismatch is not None:
                self.abort_mismatch(mismatch)
        if error is not None:
            self._replica_failed(seat, error)
        if self.is_over:
            self._resolve_finished()

    def merge_ended(self) -> None:
        """Take note that a merge's task has ended."""
        if self.is_over:
            self._resolve_finished()

    def _replica_failed(self, seat: Seat, error: BaseException) -> None:
        if not seat.was_cancelled:
            self._outcome.failed(seat.replica_id, error)
            self._leave(seat, ReplicaState.FAILED)
            self.abort(None)
        elif not isinstance(error, asyncio.CancelledError):
            self._outcome.unwound(seat.replica_id, error)

    def _forgotten(self, seat: Seat, error: BaseException | None) -> None:
        """Close coroutines that were never started; without another error that fails the run."""
        lines, given_up = seat.not_awaited(), seat.given_up()
        seat.close_unawaited()
        if error is not None or self.is_aborted:
            return
        if given_up is None:
            self.abort(never_awaited_error(self.step, lines))
            return
        mismatch = self._leave(seat, ReplicaState.WITHDREW, given_up)
        if mismatch is not None:
            self.abort_mismatch(mismatch)

    def _leave(self, seat: Seat, state: ReplicaState, call: Call | None = None) -> Mismatch | None:
        where = self.threads or self.point.rendezvous
        return where.leave(seat.replica_id, state, call)

    async def _drain(self) -> asyncio.CancelledError | None:
        """Wait for all replicas and ops, or for a moment if the interpreter is interrupted.

        Returns the cancellation that came meanwhile, if one did.
        """
        seen: list[asyncio.CancelledError] = []

        def cancelled(error: asyncio.CancelledError) -> None:
            seen.append(error)
            self._cancel_all()

        is_over = await wait_shielded(lambda: self.is_over, self._new_finished, cancelled)
        if not is_over or not await self.ops.drain(cancelled):
            self._cancel_all()
            timer = asyncio.get_running_loop().call_later(GIVE_UP_S, self._give_up)
            while not self.is_over:
                try:
                    await self._new_finished()
                except asyncio.CancelledError as error:
                    cancelled(error)
            timer.cancel()
            self._strategy.abandon()
        return seen[0] if seen else None

    def _give_up(self) -> None:
        self._gave_up = True
        self._resolve_finished()

    def _new_finished(self) -> asyncio.Future[None]:
        self._finished = asyncio.Future(loop=self._loop)
        return self._finished

    def _resolve_finished(self) -> None:
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    def abort_mismatch(self, mismatch: Mismatch) -> None:
        """End the run because its replicas can never meet."""
        unawaited = [line for seat in self.seats for line in seat.not_awaited()]
        self.abort(
            mismatch_error(
                mismatch.reason, mismatch.rows, self.step, unawaited, self._recorder.history()
            )
        )

    def stalled(self, timeout_s: float, call: Call | None = None) -> None:
        """End the run because nothing happened for too long, at all or in one collective."""
        if self.threads is None:
            stacks = tuple(format_stack(seat.work) for seat in self.seats)
            rows = self.point.rendezvous.rows()
        else:
            stacks = tuple(format_thread_stack(seat) for seat in self.seats)
            rows = with_activities(self.threads.rows(), [seat.activity for seat in self.seats])
        self.abort(stall_error(timeout_s, self.step, rows, stacks, call, self._recorder.history()))

    async def restart_outside(self) -> None:
        """Wait for what a given-up call left, where no run does; then start afresh."""
        await self._drain()
        self.point.restart()

    def _progress(self) -> tuple[int, int, int]:
        done = self.ops.num_done + sum(seat.sequence + seat.steps_done for seat in self.seats)
        return self.point.num_merges, self._num_left, done
