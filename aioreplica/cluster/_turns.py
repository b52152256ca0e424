"""A run as it meets the same run of other workers: its collectives take turns, in their order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, final

from ..collectives import SLOT_BYTES, Ahead, Carry, Turn, no_data
from ..devices import is_ctrl_c
from ..errors import ReplicaRow
from ..replica import Generation, Pending
from ._frame import Frame, FrameKind, cut_text, digest_of
from ._operation import NOTHING_AHEAD, Operation
from ._rows import WorkerRows

if TYPE_CHECKING:
    from ._workers import Workers

T = TypeVar("T")


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
        """Number of replicas of all workers."""
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
        try:
            merging = call.collective.across(generation.group, generation.calls, turn)
        except BaseException:
            turn.end()
            raise
        pending = merging if type(merging) is Pending else Pending(merging, _as_they_are)
        pending.turn = turn
        return pending

    def absent_workers(self) -> tuple[int, ...] | None:
        """Return the workers that have not come to where this one waits; None if not known."""
        communicator = self.workers.connected
        return None if communicator is None else communicator._absent()

    def turn(self, what: str, signature: str, sequence: int) -> OpenTurn:
        """Take the turn after those that were taken before."""
        before, self._tail = self._tail, asyncio.Future(loop=self._loop)
        return OpenTurn(self, what, signature, sequence, before, self._tail)

    def fail(self, error: BaseException) -> None:
        """Tell the other workers that the run has failed here, unless they know."""
        if self.is_over:
            return
        self.is_over = True
        cause = cut_text(cause_of(error), SLOT_BYTES)
        frame = Frame(FrameKind.FAILED, 0, self.function, slot=cause)
        if not self.workers.is_broken:
            Operation(self, frame, "the failure", self.where, no_data).enter()

    def leave(self, error: BaseException | None) -> Operation[list[bytes]]:
        """Tell the other workers that this one is closed, and why: the last operation there is."""
        cause = b"" if error is None else cut_text(cause_of(error), SLOT_BYTES)
        frame = Frame(FrameKind.CLOSED, 0, slot=cause)
        goodbye = Operation(self, frame, "the end", self.where, no_data)
        goodbye.enter()
        return goodbye

    def numbered(self, frame: Frame) -> Frame:
        """Return a frame of this run with its number, which the first operation gives it."""
        if self.number is None:
            self.number = self.workers.new_run_number()
        return frame if frame.run == self.number else replace(frame, run=self.number)

    def end(self, error: Exception) -> None:
        """End the run with what another worker has made of it."""
        self.is_over = True
        self.ended_by = error

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

    __slots__ = ("_before", "_ended", "_lent", "_run", "_sequence", "_signature", "_stage", "_what")

    def __init__(
        self,
        run: WorkersRun,
        what: str,
        signature: str,
        sequence: int,
        before: asyncio.Future[None] | None,
        ended: asyncio.Future[None],
    ) -> None:
        workers = run.workers
        super().__init__(workers.rank, workers.num_workers, workers.num_local_replicas)
        self._run = run
        self._what = what
        self._signature = signature
        self._sequence = sequence
        self._stage = 0
        self._before = before
        self._ended = ended
        self._lent: Operation[Any] | None = None  # what replicas' own arrays were given to

    def exchange(
        self,
        slot: bytes,
        carry: Carry[T],
        *,
        what: str = "",
        signature: str = "",
        layout: str = "",
        ahead: Ahead | None = None,
    ) -> Operation[T]:
        """Send a frame to all workers; if all agree, carry larger data."""
        run = self._run
        name = f"{what} in {self._what}" if what else self._what
        signature = f"{signature} {self._signature}" if signature else self._signature
        stage, self._stage = self._stage, self._stage + 1
        digest = digest_of(name, signature, layout)
        frame = Frame(
            FrameKind.COLLECTIVE, run.number or 0, run.function, self._sequence, stage, digest, slot
        )

        def where(sent: Frame) -> WorkerRows:
            known = layout in signature  # nothing new for an error
            return run.where(sent, name, signature if known else f"{signature} sent as {layout}")

        operation = Operation(run, frame, name, where, carry, ahead or NOTHING_AHEAD)
        if ahead is not None:
            self._lent = operation
        before, self._before = self._before, None
        if before is None or before.done():
            operation.enter()
        else:
            before.add_done_callback(operation.enter)
        return operation

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Let cross-replica methods of the strategy be exchanges of this turn meanwhile."""
        workers = self._run.workers
        workers.merging = self
        try:
            yield
        finally:
            workers.merging = None

    def give_back(self) -> Operation[Any] | None:
        """Go on without the replicas' own arrays; return what is reading them."""
        lent = self._lent
        return None if lent is None or lent.give_back() else lent

    def end(self) -> None:
        """Let the next turn begin."""
        if not self._ended.done():
            self._ended.set_result(None)

    def __enter__(self) -> OpenTurn:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@final
class InnerTurn(Turn):
    """An operation in the turn of a merge function."""

    __slots__ = ("_outer", "_signature", "_what")

    def __init__(self, outer: OpenTurn, what: str, signature: str) -> None:
        super().__init__(outer.rank, outer.num_workers, outer.num_local_replicas)
        self._outer = outer
        self._what = what
        self._signature = signature

    def exchange(
        self,
        slot: bytes,
        carry: Carry[T],
        *,
        what: str = "",
        signature: str = "",
        layout: str = "",
        ahead: Ahead | None = None,
    ) -> Operation[T]:
        """Send a frame to all workers; if all agree, carry larger data."""
        what, signature = what or self._what, signature or self._signature
        return self._outer.exchange(
            slot, carry, what=what, signature=signature, layout=layout, ahead=ahead
        )

    def merging(self) -> AbstractContextManager[None]:
        """Do what the turn of the merge function does."""
        return self._outer.merging()


def cause_of(error: BaseException) -> str:
    """Name an error in a line, for the other workers; Ctrl-C comes as a cancellation."""
    if isinstance(error, asyncio.CancelledError) and is_ctrl_c():
        return "KeyboardInterrupt"
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _as_they_are(parts: object) -> Any:
    return parts
