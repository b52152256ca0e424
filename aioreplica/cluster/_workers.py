"""The workers of a strategy: runs that queue, operations one by one, failures told to all.

Everything that crosses workers is one operation at a time, in the same order on all of them: runs
queue; the collectives of a run take turns in the order of their numbers; an operation begins with a
frame (`_frame.py`). An operation goes on if those who wait for it are cancelled: a worker that gave
one up halfway would leave the others waiting in it.

Invariants:
    * An operation begins when the one before has ended, in the order in which they were queued.
    * A run that is over sends no frame any more.
    * Once an engine has failed, or a worker has closed, nothing is sent any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, final

from ..collectives import (
    Turn,
    broadcast_arrays,
    no_data,
    reduce_across,
    widen_halves,
)
from ..context import AWAITED_BY, PLACE
from ..devices import OwnedTask, is_ctrl_c
from ..errors import ContextError, LoopMismatchError, WorkerLostError
from ..typing import ReduceOp, VariableAggregation
from ..values import IndexedSlices, aggregate
from ._communicator import Communicator
from ._engine import SMALL_BYTES
from ._exchange import Exchange
from ._frame import Closed, Frame, FrameKind, digest_of
from ._rows import cause_of_interrupt, workers_closed_error
from ._run import OpenTurn, WorkersRun
from ._transport import LOGGER

CLOSING_S = 30.0
"""How long `aclose` waits for the other workers, unless the communicator has a timeout."""

ROOM_MEMORY = 8
"""Exchanges that the room behind a frame is for: those of one training step, or two."""


@final
class Workers:
    """Connection of a strategy with the same strategy of other workers.

    Args:
        connect: Gives the communicator, at the first operation.
        rank: The number of this worker.
        num_workers: How many there are.
        num_local_replicas: How many replicas each of them has.
        label: Names the strategy in errors.
        given: The communicator that `connect` gives, if it is there already.
        is_new: Whether others have started this worker, and wait for it in `grow`.

    Attributes:
        is_new: The same, until it has come to `grow` too.
        queue: Exchanges that have begun or wait for those before, the first one under way.
        left_by: What the block of the strategy is being left by; told to the others at its end.
        room: Bytes behind each frame, for arrays that are reduced if all frames agree.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Communicator]],
        rank: int,
        num_workers: int,
        num_local_replicas: int,
        label: str,
        given: Communicator | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        self.is_new = is_new
        self.rank = rank
        self.num_workers = num_workers
        self.num_local_replicas = num_local_replicas
        self._connect = connect
        self._label = label
        self._given = given
        self._communicator: Communicator | None = None
        self._queue_of_runs: asyncio.Lock | None = None
        self._running: WorkersRun | None = None
        self.queue: deque[Exchange[Any]] = deque()
        self._num_closed = 0
        self._forget_others()
        self._broken: BaseException | None = None
        self.left_by: BaseException | None = None
        self.merging: OpenTurn | None = None

    @property
    def first_replica(self) -> int:
        """The id of this worker's first replica among those of all."""
        return self.rank * self.num_local_replicas

    @property
    def num_replicas(self) -> int:
        """Number of replicas of all workers."""
        return self.num_workers * self.num_local_replicas

    @property
    def has_others(self) -> bool:
        """True if there are other workers than this one."""
        return self.num_workers > 1

    @property
    def is_broken(self) -> bool:
        """True if nothing can be sent any more."""
        return self._broken is not None

    # ---- runs ----------------------------------------------------------------------------

    @asynccontextmanager
    async def run(self, function: str, step: int | None = None) -> AsyncIterator[WorkersRun]:
        """Wait for the runs before, and be the run in progress; what it raises is told to all.

        Args:
            function: Name of the step function.
            step: Number of the step, for errors.

        Raises:
            ContextError: If the run in progress waits for the caller, or others have started this
                worker, and it did not come to `grow`.

        Cancellation:
            Tells the other workers, once the run has begun.
        """
        if self.is_new:
            raise ContextError(
                f"Worker {self.rank} was started by `strategy.grow`, and the others wait for it "
                "there. Call `await strategy.grow(num_workers, savepoint)` first, as they do."
            )
        self.raise_if_broken()
        if self.merging is not None and PLACE.get().in_merge:
            raise ContextError(
                f"{function} was to run in a merge function of {self._label}, whose run it would "
                "wait for. Call it outside the step."
            )
        _require_not_awaited(self._running, function)
        if self._queue_of_runs is None:
            self._queue_of_runs = asyncio.Lock()
        num_closed = self._num_closed
        async with self._queue_of_runs:
            if self._num_closed != num_closed:
                raise ContextError(
                    f"{self._label} was closed while {function} waited for the runs before."
                )
            self.raise_if_broken()
            self._running = run = WorkersRun(self, function, step)
            try:
                yield run
            except BaseException as error:
                run.fail(error)
                raise
            finally:
                run.is_over = True
                self._running = None

    @asynccontextmanager
    async def operation(self, what: str, signature: str) -> AsyncIterator[Turn]:
        """Give a turn outside the steps: a run of its own, or in a merge function its turn.

        Args:
            what: Names the operation, such as "reduce".
            signature: What has to be equal on all workers.
        """
        merging = self.merging
        if merging is not None and PLACE.get().in_merge:
            yield merging.inner(what, signature)
            return
        async with self.run(what) as run:
            with run.turn(what, signature, 1) as turn:
                yield turn

    async def aggregate(
        self, what: str, name: str, aggregation: VariableAggregation, arrays: Sequence[object]
    ) -> Any:
        """Combine a variable's components, or values for them, as its aggregation says.

        Args:
            what: Names the operation.
            name: Of the variable.
            aggregation: "sum", "mean" or "only_first_replica".
            arrays: One array or IndexedSlices per replica of this worker.
        """
        operation = partial(self.operation, what, f"{name!r} {aggregation.value}")
        return await _aggregated(operation, aggregation, arrays)

    # ---- for operations ------------------------------------------------------------------

    @property
    def connected(self) -> Communicator | None:
        """The communicator, once all workers have met; before that `connect` gives it."""
        return self._communicator if self._has_greeted else None

    def before(self) -> Exchange[Any] | None:
        """Return the last operation, which others wait for; None if its event loop has ended."""
        if not self.queue:
            return None
        last = self.queue[-1]
        if last.get_loop() is asyncio.get_running_loop():
            return last
        self.queue = deque()
        if self._broken is None:
            self.break_off(RuntimeError("its event loop ended while it met the others."))
        return None

    def new_run_number(self) -> int:
        """Count a run, at its first operation."""
        self._next_run += 1
        return self._next_run - 1

    def runs_until(self, number: int) -> None:
        """Learn which runs any worker has begun."""
        self._next_run = number + 1

    def closed_error(self, decision: Closed) -> Exception:
        """Return the error of a worker that others have left; nothing is sent after it."""
        ranks, cause = decision.ranks, decision.cause
        self._broken = error = workers_closed_error(ranks, cause, self.rank, self._label)
        return error

    def break_off(self, error: BaseException) -> None:
        """Remember what made every further operation impossible, and tell the other workers."""
        self._broken = error
        if self._communicator is not None:
            with suppress(LoopMismatchError):  # a group of one loop, which has ended with it
                self._communicator.abort(f"worker {self.rank}: {type(error).__name__}: {error}")

    def raise_if_broken(self) -> None:
        """Check that something can be sent.

        Raises:
            WorkerLostError: If not.
        """
        error = self._broken
        if error is not None:
            raise WorkerLostError(
                f"{self._label} of worker {self.rank} cannot meet the other workers any more: "
                f"{error} Start all workers again, from the newest checkpoint; or go on without "
                "the lost one by `await strategy.shrink()`, where the engine can.",
                ranks=getattr(error, "ranks", ()),
            ) from error

    def agreed(self, num_bytes: int) -> None:
        """Learn how many bytes of arrays an exchange had, on which all workers have agreed.

        A frame has as much room behind it as one of the last exchanges needed: of a training step
        that repeats, gradients and frame are one message. What all have agreed on is the same on
        all, and so is the room.
        """
        most = SMALL_BYTES // self.num_workers
        self._needed.append(-(-num_bytes // 64) * 64 if num_bytes <= most else 0)
        self.room = max(self._needed)

    def _forget_others(self) -> None:
        self._has_greeted = False
        self._next_run = 0
        self.room = 0
        self._needed: deque[int] = deque(maxlen=ROOM_MEMORY)

    async def connect(self) -> Communicator:
        """Connect, and meet the other workers for the first time.

        Raises:
            ValueError: If they have not as many replicas each.
            Exception: As `ar.cluster.connect`.
        """
        if self._communicator is None:
            self._communicator = await self._connect()
        communicator = self._communicator
        if not self._has_greeted:
            self._has_greeted = True
            await _greet(communicator, self._label, self.rank, self.num_local_replicas)
        return communicator

    # ---- going on with fewer, or with more ------------------------------------------------

    async def shrink(self) -> None:
        """Go on with the workers that are left; all of them have to call this.

        Waits for the run in progress to end. Ranks keep their order and close up.

        Raises:
            ContextError: If no worker was lost, the engine cannot go on without one, or the run in
                progress waits for the caller.
            StallError: If not all workers that are left came before the timeout.
            WorkerLostError: If another worker was lost meanwhile, or it is this one that is gone.
        """
        _require_not_awaited(self._running, "shrink")
        if self._queue_of_runs is None:
            self._queue_of_runs = asyncio.Lock()
        async with self._queue_of_runs:
            last, communicator = self.before(), self._communicator
            if last is not None:
                await last.over()
            if communicator is None or not communicator.has_failed:
                raise ContextError(
                    f"{self._label} of worker {self.rank} has lost no worker, so there is nothing "
                    f"to shrink. {self._broken or ''}".rstrip()
                )
            await self._go_on(communicator)

    async def grow(self, num_new: int) -> None:
        """Go on with so many more workers; all of them have to call this.

        Waits for the runs before to end. Ranks stay, the new ones come behind.

        Raises:
            ContextError: If the engine cannot start workers, or as `run`.
            MergeMismatchError: If the workers do not all ask for as many.
            StallError: If a worker did not come before the timeout.
            WorkerLostError: If a worker was lost meanwhile.

        Cancellation:
            Tells the others, as that of a run; once they have agreed, leaves them for good.
        """
        async with self.run("grow") as run:
            with run.turn("grow", f"{self.num_workers} + {num_new}", 1) as turn:
                await turn.exchange(b"", no_data)
            await self._go_on(await self.connect(), num_new)

    async def _go_on(self, before: Communicator, num_new: int = 0) -> None:
        """Go on with those who are left, or with so many new ones."""
        async with self.leaving_if_cancelled():
            after = self._communicator = await before._resized(num_new)
            self.rank, self.num_workers = after.rank, after.size
            self._broken = None
            self._forget_others()
            await before.aclose()

    @asynccontextmanager
    async def leaving_if_cancelled(self) -> AsyncIterator[None]:
        """Leave the others for good if cancelled in what they could not be told of otherwise."""
        try:
            yield
        except asyncio.CancelledError as error:
            self._broken = error
            assert self._communicator is not None  # which is about to change, or has
            await self._communicator.aclose()
            raise

    # ---- closing -------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Tell the other workers that this one leaves, wait for them, and disconnect. Idempotent.

        Cancellation:
            Raised again once the communicator is closed.
        """
        self._num_closed += 1
        if is_ctrl_c():
            self.abandon()
        if not self.queue and self._communicator is None and self._broken is None:
            if self._given is not None:  # the others may wait in the first operation
                await self._given.aclose()
            return
        leaving = OwnedTask(self._leave(), "aioreplica workers: closing")
        try:
            await leaving.ended()
        finally:
            communicator, self._communicator = self._communicator, None
            self._queue_of_runs = self._broken = self.left_by = None
            self.queue = deque()
            self._forget_others()
            if communicator is not None:
                await communicator.aclose()

    async def _leave(self) -> None:
        """Let the operations before end, and say goodbye; others may be late, or gone."""
        last = self.before()
        if last is not None:
            await last.over()
        communicator = self._communicator
        if self._broken is not None or communicator is None:
            return
        late = TimeoutError("The other workers did not come to close their strategies.")
        loop = asyncio.get_running_loop()
        timer = loop.call_later(communicator.timeout or CLOSING_S, self.break_off, late)
        run = WorkersRun(self, "-", None)
        try:
            is_over = await run.leave(self.left_by).over()
        finally:
            timer.cancel()
        if is_over and run.ended_by is None:  # no frame of the others has ended it
            text = f"{self._label} of worker {self.rank} was closed without the others"
            LOGGER.warning("%s: %s", text, self._broken)

    def abandon(self) -> None:
        """Give up at once, as the interpreter is interrupted; tell the others by what."""
        if self._communicator is not None and self._broken is None:
            self.break_off(cause_of_interrupt())


async def _aggregated(
    operation: Callable[[], AbstractAsyncContextManager[Turn]],
    aggregation: VariableAggregation,
    arrays: Sequence[object],
) -> Any:
    """Combine components in an operation; see `Workers.aggregate`."""
    is_mean = aggregation is VariableAggregation.MEAN
    op = ReduceOp.MEAN if is_mean else ReduceOp.SUM
    is_sum = aggregation is not VariableAggregation.ONLY_FIRST_REPLICA
    rows, halves = widen_halves(op, [[array] for array in arrays] if is_sum else [arrays[:1]])
    value = aggregate(aggregation, [array for [array] in rows])
    async with operation() as turn:
        if is_sum:
            return (await reduce_across(turn, op, [value], halves=halves))[0]
        if isinstance(value, IndexedSlices):  # each brings other rows: those of one count
            nothing = IndexedSlices(value.values[:0], value.indices[:0], value.dense_shape)
            brought = value if turn.rank == 0 else nothing
            return (await reduce_across(turn, ReduceOp.SUM, [brought]))[0]
        return (await broadcast_arrays(turn, [value]))[0]


async def _greet(communicator: Communicator, label: str, rank: int, num_replicas: int) -> None:
    """Meet the other workers for the first time; see `Workers.connect`."""
    slot = num_replicas.to_bytes(4, "little")
    group = digest_of(communicator._name)  # whose messages these are
    hello = Frame(FrameKind.COLLECTIVE, -1, digest=group, slot=slot)
    communicator._what = f"the first meeting of {label}"
    rows = await communicator.all_gather(hello.encode())
    frames = list(map(Frame.decode, rows))
    if any(frame.digest != group for frame in frames):
        raise ContextError(
            f"{label} of worker {rank} has met a strategy of another group of workers. Split the "
            "communicator in the same order on all workers."
        )
    counts = [int.from_bytes(frame.slot, "little") for frame in frames]
    if len(set(counts)) > 1:
        raise ValueError(
            f"The workers have {counts} replicas, in rank order, but all must have as many. Give "
            "each worker the same number of devices."
        )


def _require_not_awaited(run: WorkersRun | None, what: str) -> None:
    """Check that what waits for the end of a run is not what that run waits for.

    Raises:
        ContextError: If it is.
    """
    if run is not None and run in AWAITED_BY.get():
        raise ContextError(
            f"{what!r} has to meet the other workers, but was called by what the device loop of "
            f"{run.function} waits for: its iterator, or an outside function. It would wait for "
            "that loop, and the loop for it. Pass aiter(batches) itself to run_steps, and change "
            "batches in the dataset or in the step; read metrics and variables between loops."
        )
