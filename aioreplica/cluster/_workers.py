"""The workers of a strategy: runs that queue, turns in the order of the collectives, failures told.

Everything that crosses workers is one operation at a time, in the same order on all of them: runs
queue; the collectives of a run take turns in the order of their numbers; an operation begins with a
frame (`_frame.py`). Operations are tasks of their own that are never cancelled: a worker that gave
one up halfway would leave the others waiting in it.

Invariants:
    * An operation begins when the one before has ended, in the order in which they were queued.
    * A run that is over sends no frame any more.
    * Once an engine has failed, or a worker has closed, nothing is sent any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar, final

from ..collectives import SLOT_BYTES, Turn, Wire, broadcast_arrays, gather_bytes, reduce_across
from ..context import PLACE
from ..devices import OwnedTask
from ..errors import ContextError, ReplicaRow, WorkerLostError
from ..replica import Call, Generation, Parts, Pending, summand_text
from ..typing import ReduceOp, VariableAggregation
from ..values import IndexedSlices
from ._communicator import Communicator
from ._frame import (
    Agreed,
    Closed,
    Differs,
    Failed,
    Frame,
    FrameKind,
    cut_text,
    decide,
    digest_of,
)
from ._rows import WorkerRows, workers_mismatch_error

T = TypeVar("T")

CLOSING_S = 30.0
"""How long `aclose` waits for the other workers, unless the communicator has a timeout."""


@final
class Workers:
    """What a strategy does together with the same strategy of other workers.

    Args:
        connect: Gives the communicator, at the first operation.
        rank: The number of this worker.
        num_workers: How many there are.
        num_local_replicas: How many replicas each of them has.
        label: Names the strategy in errors.
        given: The communicator that `connect` gives, if it is there already.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Communicator]],
        rank: int,
        num_workers: int,
        num_local_replicas: int,
        label: str,
        given: Communicator | None = None,
    ) -> None:
        self.rank = rank
        self.num_workers = num_workers
        self.num_local_replicas = num_local_replicas
        self._connect = connect
        self._label = label
        self._given = given
        self._communicator: Communicator | None = None
        self._queue_of_runs: asyncio.Lock | None = None
        self._last: OwnedTask[Any] | None = None
        self._next_run = 0
        self._has_greeted = False
        self._num_closed = 0
        self._broken: BaseException | None = None
        self.merging: OpenTurn | None = None

    @property
    def first_replica(self) -> int:
        """The id of this worker's first replica among those of all."""
        return self.rank * self.num_local_replicas

    @property
    def num_replicas(self) -> int:
        """How many replicas all workers have together."""
        return self.num_workers * self.num_local_replicas

    @property
    def has_others(self) -> bool:
        """Whether there are other workers than this one."""
        return self.num_workers > 1

    @property
    def is_broken(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._broken is not None

    # ---- runs ----------------------------------------------------------------------------

    @asynccontextmanager
    async def run(self, function: str, step: int | None = None) -> AsyncIterator[WorkersRun]:
        """Wait for the runs before, and be the run in progress; what it raises is told to all.

        Args:
            function: Name of the step function.
            step: Number of the step, for errors.

        Cancellation:
            Tells the other workers, once the run has begun.
        """
        self._raise_if_broken()
        if self.merging is not None and PLACE.get().in_merge:
            raise ContextError(
                f"{function} was to run in a merge function of {self._label}, whose run it would "
                "wait for. Call it outside the step."
            )
        if self._queue_of_runs is None:
            self._queue_of_runs = asyncio.Lock()
        num_closed = self._num_closed
        async with self._queue_of_runs:
            if self._num_closed != num_closed:
                raise ContextError(
                    f"{self._label} was closed while {function} waited for the runs before."
                )
            self._raise_if_broken()
            run = WorkersRun(self, function, step)
            try:
                yield run
            except BaseException as error:
                run.fail(error)
                raise
            finally:
                run.is_over = True

    @asynccontextmanager
    async def operation(self, what: str, signature: str) -> AsyncIterator[Turn]:
        """Give a turn outside the steps: a run of its own, or in a merge function its turn.

        Args:
            what: Names the operation, such as "reduce".
            signature: What has to be equal on all workers.
        """
        merging = self.merging
        if merging is not None and PLACE.get().in_merge:
            yield _InnerTurn(merging, what, signature)
            return
        async with self.run(what) as run:
            with run.turn(what, signature, 1) as turn:
                yield turn

    async def aggregate(
        self, what: str, name: str, aggregation: VariableAggregation, value: Any
    ) -> Any:
        """Combine what each worker has made of a variable's components, as its aggregation says.

        Args:
            what: Names the operation.
            name: Of the variable.
            aggregation: "sum", "mean" or "only_first_replica".
            value: An array, or an IndexedSlices.
        """
        is_mean = aggregation is VariableAggregation.MEAN
        op = ReduceOp.MEAN if is_mean else ReduceOp.SUM
        signature = f"{name!r} {aggregation.value} {summand_text(value)}"
        async with self.operation(what, signature) as turn:
            if aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
                return (await reduce_across(turn, op, [value]))[0]
            if isinstance(value, IndexedSlices):  # each brings other rows: those of one count
                nothing = IndexedSlices(value.values[:0], value.indices[:0], value.dense_shape)
                brought = value if turn.rank == 0 else nothing
                return (await reduce_across(turn, ReduceOp.SUM, [brought]))[0]
            return (await broadcast_arrays(turn, [value]))[0]

    # ---- operations ----------------------------------------------------------------------

    def queue(self, work: Callable[[], Coroutine[Any, Any, T]], name: str) -> OwnedTask[T]:
        """Do something with the communicator once what was queued before has ended."""
        before = self._last

        async def operate() -> T:
            nonlocal before
            if before is not None:
                await before.done_or_cancelled()
                before = None
            return await work()

        task = self._last = OwnedTask(operate(), f"aioreplica workers: {name}")
        task.when_done(lambda _error: None)  # looked at: who waited for it may have been cancelled
        return task

    async def operate(
        self,
        run: WorkersRun,
        frame: Frame,
        where: Callable[[Frame], WorkerRows],
        carry: Callable[[Wire, list[bytes]], Awaitable[T]],
    ) -> T:
        """Exchange frames and do what follows from them; only what was queued may call it."""
        if frame.kind is FrameKind.COLLECTIVE:
            run.raise_if_over()
        self._raise_if_broken()
        rows: list[bytes] = []
        try:
            communicator = await self._connected()
            if run.number is None:
                run.number = self._next_run
                self._next_run += 1
            frame = replace(frame, run=run.number)
            frames = _decoded(await communicator.all_gather(frame.encode()))
            decision = decide(frames)
            if isinstance(decision, Agreed):
                return await carry(communicator, decision.slots)
            if isinstance(decision, Differs):
                rows = await gather_bytes(communicator, where(frame).encode())
        except BaseException as error:
            self._break(error)
            raise
        run.is_over = True
        self._next_run = 1 + max(each.run for each in frames)
        if isinstance(decision, Closed):
            run.ended_by = self._closed_error(decision)
        elif isinstance(decision, Failed):
            run.ended_by = _failed_error(decision)
        else:
            run.ended_by = workers_mismatch_error(list(map(WorkerRows.decode, rows)), run.step)
        raise run.ended_by

    def _closed_error(self, decision: Closed) -> Exception:
        others = [rank for rank in decision.ranks if rank != self.rank]
        names = ", ".join(map(str, others or decision.ranks))
        error = WorkerLostError(
            f"Worker {names} has closed its strategy, so {self._label} of worker {self.rank} can "
            "meet it no more. Let all workers do the same number of steps, and close together.",
            ranks=tuple(others) or decision.ranks,
        )
        self._broken = error
        return error

    def _break(self, error: BaseException) -> None:
        """Remember what made every further operation impossible, and tell the other workers."""
        self._broken = error
        if self._communicator is not None:
            self._communicator.abort(f"worker {self.rank}: {type(error).__name__}: {error}")

    def _raise_if_broken(self) -> None:
        error = self._broken
        if error is not None:
            raise WorkerLostError(
                f"{self._label} of worker {self.rank} cannot meet the other workers any more: "
                f"{error} Start all workers again, from the newest checkpoint.",
                ranks=getattr(error, "ranks", ()),
            ) from error

    async def _connected(self) -> Communicator:
        if self._communicator is None:
            self._communicator = await self._connect()
        communicator = self._communicator
        if not self._has_greeted:
            self._has_greeted = True
            hello = Frame(
                FrameKind.COLLECTIVE, -1, slot=self.num_local_replicas.to_bytes(4, "little")
            )
            frames = _decoded(await communicator.all_gather(hello.encode()))
            counts = [int.from_bytes(frame.slot, "little") for frame in frames]
            if len(set(counts)) > 1:
                raise ValueError(
                    f"The workers have {counts} replicas, in rank order, but all must have as "
                    "many. Give each worker the same number of devices."
                )
        return communicator

    # ---- closing -------------------------------------------------------------------------

    async def aclose(self) -> None:
        """Tell the other workers that this one leaves, wait for them, and disconnect. Idempotent.

        Cancellation:
            Raised again once the communicator is closed.
        """
        self._num_closed += 1
        last = self._last
        if last is None:
            if self._given is not None:  # the others may wait in the first operation
                await self._given.aclose()
            return
        if self._broken is None:
            last = self.queue(self._say_goodbye, "closing")
        try:
            await last.ended()
        finally:
            communicator, self._communicator = self._communicator, None
            self._last = self._queue_of_runs = self._broken = None
            self._has_greeted = False
            self._next_run = 0
            if communicator is not None:
                await communicator.aclose()

    async def _say_goodbye(self) -> None:
        if self._broken is not None:
            return
        try:
            communicator = await self._connected()
            timeout_s = communicator.timeout or CLOSING_S
            frame = Frame(FrameKind.CLOSED, self._next_run)
            async with asyncio.timeout(timeout_s):
                await communicator.all_gather(frame.encode())
        except Exception as error:  # noqa: BLE001 - who leaves does not mind who has left already
            self._break(error)

    def abandon(self) -> None:
        """Give up at once, as the interpreter is interrupted."""
        if self._communicator is not None and self._broken is None:
            self._break(RuntimeError("the program was interrupted."))


@final
class WorkersRun:
    """One run as it meets the same run of the other workers.

    Args:
        workers: Whose run it is.
        function: Name of the step function.
        step: Number of the step, for errors.

    Attributes:
        workers: The same.
        function: The same.
        step: The same.
        number: Of the run, equal on all workers; None before the first operation.
        is_over: Whether it has ended, or was ended by another worker.
        ended_by: What another worker has ended it with, or None.
        local_rows: Describe the replicas of this worker, for errors.
    """

    __slots__ = (
        "_loop",
        "_tail",
        "ended_by",
        "function",
        "is_over",
        "local_rows",
        "number",
        "step",
        "workers",
    )

    def __init__(self, workers: Workers, function: str, step: int | None) -> None:
        self.workers = workers
        self.function = function
        self.step = step
        self.number: int | None = None
        self.is_over = False
        self.ended_by: Exception | None = None
        self.local_rows: Callable[[], Sequence[ReplicaRow]] | None = None
        self._tail: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()  # device threads take turns too

    @property
    def first_replica(self) -> int:
        """The id of this worker's first replica among those of all."""
        return self.workers.first_replica

    @property
    def num_replicas(self) -> int:
        """How many replicas all workers have together."""
        return self.workers.num_replicas

    def raise_if_over(self) -> None:
        """Raise what the run was ended with, if it is over.

        Raises:
            CancelledError: If it was this worker that ended it.
            Exception: What another worker has ended it with.
        """
        if self.ended_by is not None:
            raise self.ended_by
        if self.is_over:
            raise asyncio.CancelledError

    def begin(self, step: int, local_rows: Callable[[], Sequence[ReplicaRow]]) -> None:
        """Learn of the replicas that have been made for it.

        Args:
            step: Number of the step.
            local_rows: Describes the replicas.
        """
        self.step = step
        self.local_rows = local_rows

    def merge(self, generation: Generation) -> Pending:
        """Take a turn for a generation that is complete here; return what to await."""
        call = generation.calls[0]
        turn = self.turn(call.describe(), call.collective.signature(call), call.sequence)
        return Pending(_perform(turn, generation), _as_they_are)

    def turn(self, what: str, signature: str, sequence: int) -> OpenTurn:
        """Take the turn after those that were taken before."""
        before, self._tail = self._tail, asyncio.Future(loop=self._loop)
        return OpenTurn(self, what, signature, sequence, before, self._tail)

    def fail(self, error: BaseException) -> None:
        """Tell the other workers that the run has failed here, unless they know."""
        if self.is_over:
            return
        self.is_over = True
        text = str(error) or repr(error)
        cause = cut_text(f"{type(error).__name__}: {text}", SLOT_BYTES)
        frame = Frame(FrameKind.FAILED, 0, self.function, slot=cause)
        workers = self.workers
        if not workers.is_broken:
            workers.queue(lambda: workers.operate(self, frame, self.where, _nothing), "failure")

    def where(self, frame: Frame, what: str = "-", signature: str = "") -> WorkerRows:
        """Describe where this worker is."""
        first = self.first_replica
        rows: Sequence[ReplicaRow] = () if self.local_rows is None else self.local_rows()
        if not rows:
            rows = [
                ReplicaRow(first + i, "-", "outside", what, "-")
                for i in range(self.workers.num_local_replicas)
            ]
        return WorkerRows(frame.run, self.function, what, signature, tuple(rows))


@final
class OpenTurn(Turn):
    """The turn of one collective.

    Args:
        run: Of the run.
        what: Names the collective.
        signature: What has to be equal on all workers.
        sequence: Number of the collective.
        before: Done when the turn before has ended; None for the first.
        ended: To be done when this one has.
    """

    __slots__ = ("_before", "_ended", "_run", "_sequence", "_signature", "_stage", "_what")

    def __init__(
        self,
        run: WorkersRun,
        what: str,
        signature: str,
        sequence: int,
        before: asyncio.Future[None] | None,
        ended: asyncio.Future[None],
    ) -> None:
        self._run = run
        self._what = what
        self._signature = signature
        self._sequence = sequence
        self._stage = 0
        self._before = before
        self._ended = ended

    @property
    def rank(self) -> int:
        """The number of this worker, from 0."""
        return self._run.workers.rank

    @property
    def num_workers(self) -> int:
        """How many workers meet."""
        return self._run.workers.num_workers

    @property
    def num_local_replicas(self) -> int:
        """How many replicas each of them has."""
        return self._run.workers.num_local_replicas

    async def exchange(
        self,
        slot: bytes,
        carry: Callable[[Wire, list[bytes]], Awaitable[T]],
        *,
        what: str = "",
        signature: str = "",
    ) -> T:
        """Send a frame to all workers; if all agree, carry larger data and return what came."""
        before, self._before = self._before, None
        if before is not None:
            await before
        run = self._run
        run.raise_if_over()
        name = f"{what} in {self._what}" if what else self._what
        signature = f"{signature} {self._signature}" if signature else self._signature
        stage, self._stage = self._stage, self._stage + 1
        digest = digest_of(name, signature)
        frame = Frame(FrameKind.COLLECTIVE, 0, run.function, self._sequence, stage, digest, slot)

        def where(sent: Frame) -> WorkerRows:
            return run.where(sent, name, signature)

        task = run.workers.queue(lambda: run.workers.operate(run, frame, where, carry), name)
        await task.done_or_cancelled()
        return task.task.result()

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Let cross-replica methods of the strategy be exchanges of this turn meanwhile."""
        workers = self._run.workers
        workers.merging = self
        try:
            yield
        finally:
            workers.merging = None

    def __enter__(self) -> OpenTurn:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


@final
class _InnerTurn(Turn):
    """An operation in the turn of a merge function."""

    __slots__ = ("_outer", "_signature", "_what")

    def __init__(self, outer: OpenTurn, what: str, signature: str) -> None:
        self._outer = outer
        self._what = what
        self._signature = signature

    @property
    def rank(self) -> int:
        """The number of this worker, from 0."""
        return self._outer.rank

    @property
    def num_workers(self) -> int:
        """How many workers meet."""
        return self._outer.num_workers

    @property
    def num_local_replicas(self) -> int:
        """How many replicas each of them has."""
        return self._outer.num_local_replicas

    async def exchange(
        self,
        slot: bytes,
        carry: Callable[[Wire, list[bytes]], Awaitable[T]],
        *,
        what: str = "",
        signature: str = "",
    ) -> T:
        """Send a frame to all workers; if all agree, carry larger data and return what came."""
        return await self._outer.exchange(
            slot,
            carry,
            what=what or self._what,
            signature=signature or self._signature,
        )

    def merging(self) -> AbstractContextManager[None]:
        """Do what the turn of the merge function does."""
        return self._outer.merging()


async def _perform(turn: OpenTurn, generation: Generation) -> Parts:
    with turn:
        calls: list[Call] = generation.calls
        return await calls[0].collective.across(generation.group, calls, turn)


def _as_they_are(parts: Any) -> Any:
    return parts


async def _nothing(_wire: Wire, _slots: list[bytes]) -> None:
    return None


def _decoded(rows: Any) -> list[Frame]:
    return [Frame.decode(row) for row in rows]


def _failed_error(failed: Failed) -> WorkerLostError:
    return WorkerLostError(
        f"Worker {failed.rank} failed in run {failed.run} ({failed.function}): {failed.cause}. The "
        "run was ended on all workers; see that worker's traceback.",
        ranks=(failed.rank,),
    )
