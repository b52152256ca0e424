"""An exchange across workers: the frames of all, then what follows from them; and its turn.

An exchange is a future that goes from stage to stage in callbacks, because a small reduction in a
training step would cost less than the tasks that wait for it. Tasks are made only where there is
more to carry than what came with the frames.

Exchanges queue. The first of the queue sends its frame, which names the reductions behind it too;
what all workers have queued is one exchange, and the rest stays in the queue. How many they are
differs between workers, and what is decided does not: it follows from the frames of all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeVar, final

from ..collectives import Carry, Summands, gather_bytes, no_data, share_totals
from ..devices import OwnedTask, is_interrupted, wait_shielded
from ..errors import WorkerLostError
from ..replica import Call as ReplicaCall
from ..typing import ReduceOp
from ._communicator import AGREE, NOTHING, Call, Communicator
from ._frame import (
    Agreed,
    Bucket,
    Closed,
    Differs,
    Failed,
    Frame,
    FrameKind,
    Part,
    decide,
    digest_of,
)
from ._rows import WorkerRows, workers_mismatch_error

if TYPE_CHECKING:
    from ._workers import WorkersRun

T = TypeVar("T")

NOTHING_AHEAD = Summands(ReduceOp.SUM, [], are_lent=False)


@final
class Exchange(asyncio.Future[T]):
    """Exchange of a worker with all others; it is completed even if nobody awaits it.

    It is one operation; or, without `carry`, reductions that were started one after another. Those
    of them that all workers have started end together, and it is done when all have.

    Args:
        run: Of which it is a part.
        parts: The operation: the frame, without the number of the run, and what is reduced ahead.
        told: Gives its name, and what has to be equal on all workers, in words; for errors.
        carry: Called if all agree.
        can_fuse: Whether it is a reduction that may go with others.
        is_awaited: Whether it was called to be awaited, and not started.

    Attributes:
        run: The same.
        parts: The same, without those that have ended; others are added behind.
        can_fuse: The same.
        is_over: Whether all is done, so that the next one may begin.

    Cancellation:
        Ends the wait at once, and the exchange goes on: the other workers need it. While a
        caller's own arrays are being sent, it ends the wait when that is over.
    """

    __slots__ = (
        "_carry", "_context", "_is_awaited", "_queue", "_tell", "_told", "can_fuse", "is_over",
        "parts", "run",
    )  # fmt: skip

    # Set for few of them, so these are not slots.
    _is_cancelled = False  # and ends when it is over
    _num_rounds = 0  # of those that have not ended it
    _results: list[Any] = []  # noqa: RUF012 - of reductions that have ended; replaced, not changed
    _then: Sequence[Callable[[], object]] = ()

    def __init__(
        self,
        run: WorkersRun,
        parts: list[Part],
        told: Callable[[], tuple[str, str]],
        carry: Carry[T] | None = None,
        *,
        can_fuse: bool = False,
        is_awaited: bool = False,
    ) -> None:
        super().__init__()
        self.parts = parts
        self.run = run
        self.can_fuse = can_fuse
        self.is_over = False
        self._told = told
        self._carry: Carry[Any] | None = carry
        # In which it is carried, such as that of np.errstate.
        self._context = None if carry is None else copy_context()
        self._is_awaited = is_awaited
        self._queue = run.workers.queue
        self._tell: Callable[[], object] | None = None

    # ---- waiting -------------------------------------------------------------------------

    def cancel(self, msg: object = None) -> bool:
        """End the wait, see above."""
        if self.done():
            return False
        if not self.give_back() and not is_interrupted():
            self._is_cancelled = True  # all workers are here: it is a matter of sending
            return True
        tell, self._tell = self._tell, None
        if tell is not None:
            self.get_loop().call_soon(tell)
        return super().cancel(msg)

    def tell(self, fn: Callable[[], object]) -> None:
        """Call something once it is done: in the same cycle of the event loop, unlike a callback.

        There is one such function. It is called soon if the exchange is done, or was cancelled; and
        of reductions each time that some have ended, see `take`.
        """
        if self.done():
            self.get_loop().call_soon(fn)
        else:
            self._tell = fn

    def take(self) -> Sequence[Any]:
        """Return the results of reductions that have ended since the last time, in their order."""
        results, self._results = self._results, []
        return results

    def join(self, part: Part) -> bool:
        """Add a reduction that was started next; false if it cannot go with these."""
        if self.is_over or self.done() or (self.parts and self.parts[0][1].op is not part[1].op):
            return False
        self.parts.append(part)
        self._is_awaited = False
        return True

    def give_back(self, call: ReplicaCall | None = None) -> bool:
        """Go on without a caller's own arrays, by copies; false if they are being read."""
        whose = (None, call)
        given = [each.give_back() for _, each, of in self.parts if call is None or of in whose]
        return all(given)

    def when_over(self, fn: Callable[[], object]) -> None:
        """Call something when it is over, or what is being sent of it; soon if it is over."""
        if self.is_over:
            self.get_loop().call_soon(fn)
        else:
            self._then = [*self._then, fn]

    async def over(self) -> bool:
        """Wait until it is over, or what is being sent of it; what it has raised is not raised.

        Returns:
            False if the interpreter is being interrupted.

        Cancellation:
            Raised again once it is over.
        """
        cancelled: list[asyncio.CancelledError] = []
        num_rounds = self._num_rounds
        has_ended = await wait_shielded(
            lambda: self.is_over or self._num_rounds > num_rounds,
            self._new_waiter, cancelled.append,
        )  # fmt: skip
        if cancelled:
            raise cancelled[0]
        return has_ended

    def _new_waiter(self) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = self.get_loop().create_future()
        self.when_over(lambda: None if waiter.done() else waiter.set_result(None))
        return waiter

    # ---- from stage to stage -------------------------------------------------------------

    def enter(self) -> None:
        """Begin when the exchanges before are over, unless the wait was cancelled already."""
        if self.done():
            self._end()
            return
        workers = self.run.workers
        before = workers.before()
        self._queue = workers.queue
        self._queue.append(self)
        if before is None:
            self._begin()

    def _begin(self) -> None:
        if self.is_over:  # it went with one before
            self._leave()
            return
        run, workers = self.run, self.run.workers
        try:
            if self.parts[0][0].kind is FrameKind.COLLECTIVE or run.ended_by is not None:
                run.raise_if_over()  # all know of the failure by then: none waits for its frame
            workers.raise_if_broken()
        except BaseException as error:  # noqa: BLE001 - for those who wait
            self._fail(error)
            return
        communicator = workers.connected
        if communicator is None:
            self._spawn(self._connect())
        else:
            self._send(communicator)

    async def _connect(self) -> None:
        try:
            communicator = await self.run.workers.connect()
        except BaseException as error:
            self._break(error)
            raise
        self._send(communicator)

    def _send(self, communicator: Communicator) -> None:
        """Have the engine send the frame, with what is queued by then."""
        run = self.run
        try:
            frame, summands, _ = self.parts[0]
            frame = run.numbered(frame)
            communicator._what = f"{self._told()[0]} of run {frame.run} ({run.function})"
            bucket = Bucket(self, frame, self._queue)
            communicator._launch(
                Call(
                    AGREE, NOTHING, summands.op, agrees=bucket.look, summands=bucket.after,
                    brings=bucket.bring, is_awaited=self._is_awaited,
                    then=partial(self._came, communicator, bucket),
                )
            )  # fmt: skip
        except BaseException as error:  # noqa: BLE001 - `_break` raises what has to be
            self._break(error)

    def _came(self, communicator: Communicator, bucket: Bucket, came: asyncio.Future[Any]) -> None:
        """Do what follows from the frames of all workers."""
        try:
            rows, totals = came.result()
            if totals is not None:
                share_totals(bucket.ready, totals)
            slots = bucket.slots
            if slots is None:
                frames = list(map(Frame.decode, rows))
                decision = decide(frames)
                if not isinstance(decision, Agreed):
                    self._spawn(self._disagree(communicator, frames, decision))
                    return
                slots = [decision.slots]
            self.run.workers.agreed(bucket.num_bytes)
        except BaseException as error:  # noqa: BLE001 - `_break` raises what has to be
            self._break(error)
            return
        start = len(self.parts)
        shares: list[tuple[Exchange[Any], list[list[bytes]]]] = [(self, slots[:start])]
        while start < len(slots):  # of an exchange that is over in this cycle the next one begins
            each, queue = self._queue[1], self._queue
            stop = start + len(each.parts)
            shares.append((each, slots[start:stop]))
            if stop > len(slots):
                break
            del queue[1]
            start = stop
        for each, its_slots in shares:
            each._follow(communicator, its_slots)

    def _follow(self, communicator: Communicator, slots: Sequence[list[bytes]]) -> None:
        """Do what follows from the slots of all workers, for each part that all have."""
        try:
            if self._carry is None:
                ended = zip(self.parts, slots, strict=False)
                self._results = self._results + [
                    call.context.run(summands.carry, communicator, each)  # type: ignore[union-attr]
                    for (_, summands, call), each in ended
                ]
                found: Any = None
            else:
                assert self._context is not None
                found = self._context.run(self._carry, communicator, slots[0])
        except BaseException as error:  # noqa: BLE001 - `_break` raises what has to be
            self._break(error)
            return
        if isinstance(found, CoroutineType):  # of one that went alone
            self._spawn(self._go_on(found))
            return
        del self.parts[: len(slots)]
        if self.parts:
            self._go_round()
        else:
            self._succeed(found)

    def _go_round(self) -> None:
        """Go on with what some worker had not started yet."""
        if self._is_cancelled:
            self._fail(asyncio.CancelledError())
            return
        self._num_rounds += 1
        self._call_then()
        if self._tell is not None:
            self._tell()
        if self._queue and self._queue[0] is self:
            self.get_loop().call_soon(self._begin)

    async def _go_on(self, carrying: Coroutine[Any, Any, T]) -> None:
        try:
            result = await carrying
        except BaseException as error:
            self._break(error)
            raise
        self._succeed(result)

    async def _disagree(
        self,
        communicator: Communicator,
        frames: list[Frame],
        decision: Closed | Failed | Differs,
    ) -> None:
        """End the run: the workers are not in the same collective."""
        run, workers = self.run, self.run.workers
        rows: list[WorkerRows] = []
        if isinstance(decision, Differs):
            try:
                here = run.where(run.numbered(self.parts[0][0]), *self._told())
                told = await gather_bytes(communicator, here.encode())
                rows = list(map(WorkerRows.decode, told))
            except BaseException as error:
                self._break(error)
                raise
        workers.runs_until(max(each.run for each in frames))
        if isinstance(decision, Closed):
            ended_by = workers.closed_error(decision)
        elif isinstance(decision, Failed):
            ended_by = failed_error(decision)
        else:
            ended_by = workers_mismatch_error(rows, run.step)
        run.end(ended_by)
        self._fail(ended_by)

    # ---- the end -------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = OwnedTask(work, f"aioreplica workers: {self.run.function}")
        task.when_done(lambda _error: None)  # looked at: those who wait have it too

    def _succeed(self, result: T) -> None:
        if not self.done():
            if self._is_cancelled:
                super().cancel()
            else:
                self.set_result(result)
        self._end()

    def _break(self, error: BaseException) -> None:
        """Fail in a way after which nothing can be sent any more; raise what is no Exception."""
        self.run.workers.break_off(error)
        self._fail(error)
        if not isinstance(error, Exception):
            raise error

    def _fail(self, error: BaseException) -> None:
        if not self.done():
            if self._is_cancelled or isinstance(error, asyncio.CancelledError):
                super().cancel()
            else:
                self.set_exception(error)
                self.exception()  # looked at: who waited may have been cancelled
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self._carry, self._told = no_data, _nothing_told  # who holds this holds no arrays,
        self.parts = []  # nor the turn, which holds this
        self._leave()
        self._call_then()
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()

    def _leave(self) -> None:
        """Let the next of the queue begin."""
        queue = self._queue
        if queue and queue[0] is self:
            queue.popleft()
            if queue:
                self.get_loop().call_soon(queue[0]._begin)

    def _call_then(self) -> None:
        then, self._then = self._then, ()
        for fn in then:
            self.get_loop().call_soon(fn)


@final
class OpenTurn:
    """The turn of one collective.

    Args:
        run: Of the run.
        what: Names the kind of collective.
        signature: What has to be equal on all workers.
        sequence: Number of the collective.
        before: The turn before; None for the first.
        describe: Names the collective in errors; None if `what` does.
        outer: The turn of a merge function, in which this is an operation.

    Attributes:
        rank: The number of this worker, from 0.
        num_workers: How many workers meet.
        num_local_replicas: How many replicas each of them has.
        has_ended: Whether the next turn may begin.
        is_awaited: Whether its collective was called to be awaited, and not started.
    """

    __slots__ = (
        "_before", "_describe", "_lent", "_next", "_outer", "_run", "_sequence", "_signature",
        "_stage", "_what", "has_ended", "is_awaited", "num_local_replicas", "num_workers", "rank",
    )  # fmt: skip

    def __init__(
        self,
        run: WorkersRun,
        what: str,
        signature: str,
        sequence: int,
        before: OpenTurn | None = None,
        describe: Callable[[], str] | None = None,
        outer: OpenTurn | None = None,
    ) -> None:
        workers = run.workers
        self.rank, self.num_workers = workers.rank, workers.num_workers
        self.num_local_replicas = workers.num_local_replicas
        self._run = run
        self._what = what
        self._signature = signature
        self._sequence = sequence
        self._stage = 0
        self._before = before
        self._describe = describe
        self._outer = outer
        self.has_ended = False
        self.is_awaited = True
        self._next: Callable[[], object] | None = None
        self._lent: Exchange[Any] | None = None  # what replicas' own arrays were given to

    def exchange(
        self,
        slot: bytes,
        carry: Carry[T],
        *,
        what: str = "",
        signature: str = "",
        layout: str = "",
        ahead: Summands | None = None,
        is_last: bool = False,
    ) -> Exchange[T]:
        """Send a frame to all workers; if all agree, carry larger data."""
        if self._outer is not None:
            return self._outer.exchange(
                slot, carry, what=what or self._what, signature=signature or self._signature,
                layout=layout, ahead=ahead,
            )  # fmt: skip
        run = self._run
        name = f"{what} in {self._what}" if what else self._what
        signature = f"{signature} {self._signature}" if signature else self._signature
        stage, self._stage = self._stage, self._stage + 1
        digest = digest_of(name, signature, layout)
        frame = Frame(
            FrameKind.COLLECTIVE, run.number or 0, run.function, self._sequence, stage, digest, slot
        )
        exchange = Exchange(
            run, [(frame, ahead or NOTHING_AHEAD, None)],
            partial(self._told, what, signature, layout), carry,
            can_fuse=is_last and ahead is not None and ahead.is_whole,
            is_awaited=self.is_awaited,
        )  # fmt: skip
        self.take(exchange, is_last=is_last)
        return exchange

    def take(self, exchange: Exchange[Any], *, is_last: bool) -> None:
        """Let an exchange begin when the turns before have ended."""
        if exchange.parts[0][1] is not NOTHING_AHEAD:
            self._lent = exchange
        before, self._before = self._before, None
        if before is None or before.has_ended:
            self._enter(exchange, is_last)
        else:
            enter = partial(self._enter, exchange, is_last)
            before._next = partial(exchange.get_loop().call_soon, enter)

    def _told(self, what: str, signature: str, layout: str) -> tuple[str, str]:
        name = self._what if self._describe is None else self._describe()
        return f"{what} in {name}" if what else name, with_layout(signature, layout)

    def _enter(self, exchange: Exchange[Any], is_last: bool) -> None:
        exchange.enter()
        if is_last:
            self.end()

    def inner(self, what: str, signature: str) -> OpenTurn:
        """Return an operation in this turn, which is that of a merge function."""
        return OpenTurn(self._run, what, signature, self._sequence, outer=self._outer or self)

    @contextmanager
    def merging(self) -> Iterator[None]:
        """Let cross-replica methods of the strategy be exchanges of this turn meanwhile."""
        workers = self._run.workers
        workers.merging = self
        try:
            yield
        finally:
            workers.merging = None

    def give_back(self, call: ReplicaCall) -> Exchange[Any] | None:
        """Go on without the replicas' own arrays in a call; return what is reading them."""
        lent = self._lent
        return None if lent is None or lent.give_back(call) else lent

    def end(self) -> None:
        """Let the next turn begin."""
        if not self.has_ended:
            self.has_ended = True
            if self._run.tail is self:
                self._run.tail = None
            then, self._next = self._next, None
            if then is not None:
                then()

    def __enter__(self) -> OpenTurn:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _nothing_told() -> tuple[str, str]:
    return "", ""


def told_of_first(parts: Sequence[Part]) -> tuple[str, str]:
    """Name the first of some reductions that were started, and say what has to be equal."""
    _, summands, call = parts[0]
    assert call is not None  # who joins others has a call
    return call.describe(), with_layout(call.collective.signature(call), summands.layout)


def with_layout(signature: str, layout: str) -> str:
    """Return what has to be equal on all workers, for errors; a layout that is in it is not new."""
    return signature if layout in signature else f"{signature} sent as {layout}"


def failed_error(failed: Failed) -> WorkerLostError:
    """Return the error of a run that has failed on another worker."""
    return WorkerLostError(
        f"Worker {failed.rank} failed in run {failed.run} ({failed.function}): {failed.cause}. The "
        "run was ended on all workers; see that worker's traceback.",
        ranks=(failed.rank,),
    )
