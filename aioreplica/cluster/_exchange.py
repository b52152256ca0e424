"""An exchange across workers: the frames of all, then what follows from them.

An exchange is a future that goes from stage to stage in callbacks, because a small reduction in a
training step would cost less than the tasks that wait for it. Tasks are made only where there is
more to carry than what came with the frames.

Exchanges queue. The first of the queue sends its frame, which names the reductions behind it too;
what all workers have queued is one exchange, and the rest stays in the queue. How many they are
differs between workers, and what is decided does not: it follows from the frames of all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, final

from ..collectives import SLOT_BYTES, Carry, Summands, join_run, no_data, runs_of, share_totals
from ..devices import OwnedTask, is_interrupted, wait_shielded
from ..devices.backends import reduce_arrays
from ..replica import Call as ReplicaCall
from ..tree import Array
from ..typing import ReduceOp
from ._communicator import AGREE, NOTHING, Call, Communicator
from ._frame import (
    MAX_FOLLOWERS,
    Agreed,
    Closed,
    Differs,
    Failed,
    Frame,
    FrameKind,
    arrays_behind,
    decide,
    slots_if_one_collective,
    slots_in_common,
)

if TYPE_CHECKING:
    from ..replica import Outcome
    from ._run import WorkersRun

T = TypeVar("T")

Part: TypeAlias = tuple[Frame, Summands, ReplicaCall | None]
"""An operation: its frame, what is reduced ahead, and the call if it may go with those before."""

Work: TypeAlias = Callable[..., Coroutine[Any, Any, None]]

NOTHING_AHEAD = Summands(ReduceOp.SUM, [], are_lent=False)
FUSED_BYTES = 1024 * 1024
"""Bytes of arrays that go together; above that, they gain nothing by it."""


@final
class Exchange(asyncio.Future[T]):
    """Exchange of a worker with all others; it is completed even if nobody awaits it.

    It is one operation; or, without `carry`, reductions that were started one after another. Those
    of them that all workers have started end together, each with its own result or error, and the
    rest is the next round of the same exchange.

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
    _is_cancelled = False  # and ends when what is being sent is over
    _num_rounds = 0  # of those that have not ended it
    _outcomes: list[Outcome] = []  # noqa: RUF012 - of parts that have ended; replaced, not changed
    _then: list[Callable[[], object]] | None = None

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
        # In which it is carried, such as that of np.errstate; each part has that of its call.
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

    def take(self) -> Sequence[Outcome]:
        """Return what reductions came to that have ended since the last time, in their order."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def join(self, part: Part) -> bool:
        """Add a reduction that was started next; false if it cannot go with these."""
        if self.is_over or self.done() or self.parts[0][1].op is not part[1].op:
            return False
        self.parts.append(part)
        self._is_awaited = False
        return True

    def give_back(self, call: ReplicaCall | None = None) -> bool:
        """Go on without callers' own arrays, by copies; false if they are being read.

        Args:
            call: Whose arrays; None for those of all.
        """
        parts = self.parts
        if call is not None and parts and parts[0][2] is not None:
            parts = [part for part in parts if part[2] is call]
        return False not in [summands.give_back() for _, summands, _ in parts]

    def when_over(self, fn: Callable[[], object]) -> None:
        """Call something when it is over, or what is being sent of it; soon if it is over."""
        if self.is_over:
            self.get_loop().call_soon(fn)
        elif self._then is None:
            self._then = [fn]
        else:
            self._then.append(fn)

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
            self._new_waiter,
            cancelled.append,
        )
        if cancelled:
            raise cancelled[0]
        return has_ended

    def _new_waiter(self) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = self.get_loop().create_future()
        self.when_over(lambda: None if waiter.done() else waiter.set_result(None))
        return waiter

    # ---- from stage to stage -------------------------------------------------------------

    def enter(self, *, was_held: bool = False) -> None:
        """Begin when the exchanges before are over, unless the wait was cancelled already."""
        workers = self.run.workers
        if self.done():
            self._end()
            return
        if not was_held and self.run.outer is not None and workers.groups.hold(self):
            return
        before = workers.before()
        self._queue = workers.queue
        self._queue.append(self)
        if before is None:
            self._begin()

    def _begin(self) -> None:
        """Send the frame, as the first of the queue; again for the next round."""
        if self.is_over:  # it went with one before
            return
        run, workers = self.run, self.run.workers
        try:
            if self.parts[0][0].kind is FrameKind.COLLECTIVE or run.ended_by is not None:
                run.raise_if_over()  # all know of the failure by then: none waits for its frame
            workers.raise_if_broken()
        except BaseException as error:  # noqa: BLE001 - for those who wait
            self._fail(error)
            return
        if run.outer is not None and workers.groups.holds(self._begin):
            return
        workers.num_sent += 1
        if run.outer is not None:
            workers.groups.heed(run.outer)
        if (communicator := workers.connected) is None:
            self._spawn(self._connect)
        else:
            self._send(communicator)

    async def _connect(self) -> None:
        workers = self.run.workers
        communicator = await workers.connect()
        if not self.is_over:
            self._send(communicator)
        elif not workers.queue:  # it was closed meanwhile, and is not used again
            workers._communicator = None
            await communicator.aclose()

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
            if (disagreed := bucket.take(*came.result())) is not None:
                self._spawn(self._disagree, communicator, *disagreed)
                return
            self.run.workers.agreed(bucket.num_bytes)
        except BaseException as error:  # noqa: BLE001 - `_break` raises what has to be
            self._break(error)
            return
        shares = bucket.shares()
        for each, its_slots in shares[1:]:  # of these the next one begins that is not over
            if len(its_slots) == len(each.parts):
                self._queue.remove(each)
        for each, its_slots in shares:
            each._follow(communicator, its_slots)
        if self._carry is None and not self.is_over:  # a follower that is not begins behind this
            self.get_loop().call_soon(self._begin)

    def _follow(self, communicator: Communicator, slots: Sequence[list[bytes]]) -> None:
        """Do what follows from the slots of all workers."""
        if self._carry is None:
            self._end_parts(communicator, slots)
            return
        try:
            assert self._context is not None  # with `carry`
            found: Any = self._context.run(self._carry, communicator, slots[0])
        except BaseException as error:  # noqa: BLE001 - `_break` raises what has to be
            self._break(error)
            return
        if isinstance(found, CoroutineType):  # of one that went alone
            self._spawn(self._go_on, found)
        else:
            self._succeed(found)

    def _end_parts(self, communicator: Communicator, slots: Sequence[list[bytes]]) -> None:
        """End the reductions that all workers have started; go on with the rest."""
        outcomes = self._outcomes = [*self._outcomes]
        for (_, summands, call), each in zip(self.parts[: len(slots)], slots, strict=True):
            assert call is not None  # without `carry`
            try:
                outcomes.append((call.context.run(summands.carry, communicator, each), None))
            except Exception as error:  # noqa: BLE001 - of this one; those it went with have theirs
                self.run.workers.break_off(error)
                outcomes.append((None, error))
            except BaseException as error:  # noqa: BLE001 - `_break` raises it
                self._break(error)
                return
        del self.parts[: len(slots)]
        if not self.parts:
            self._succeed(None)  # type: ignore[arg-type]  # its results are taken
            return
        self._num_rounds += 1
        self._call_then()
        if self._is_cancelled and not self.done():
            super().cancel()
        if (tell := self._tell) is not None:
            if self.done():
                self._tell = None
            tell()

    async def _go_on(self, carrying: Coroutine[Any, Any, T]) -> None:
        self._succeed(await carrying)

    async def _disagree(
        self,
        communicator: Communicator,
        frames: list[Frame],
        decision: Closed | Failed | Differs,
    ) -> None:
        """End the run: the workers are not in the same collective."""
        run, workers = self.run, self.run.workers
        where = partial(run.where, run.numbered(self.parts[0][0]), *self._told())
        self._settle(await run.end(communicator, frames, decision, where))
        self._call_tell()  # who waits need not wait for what follows
        if workers.outer is None and not isinstance(decision, Closed):
            await workers.groups.settle(communicator)
        self._end()

    # ---- the end -------------------------------------------------------------------------

    def _spawn(self, work: Work, *args: object) -> None:
        task = OwnedTask(self._or_break(work, args), f"aioreplica workers: {self.run.function}")
        task.when_done(lambda _error: None)  # looked at: those who wait have it too

    async def _or_break(self, work: Work, args: tuple[object, ...]) -> None:
        try:
            await work(*args)
        except BaseException as error:
            self._break(error)
            raise

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
        self._settle(error)
        self._end()

    def _settle(self, error: BaseException) -> None:
        if not self.done():
            if self._is_cancelled or isinstance(error, asyncio.CancelledError):
                super().cancel()
            else:
                self.set_exception(error)
                self.exception()  # looked at: who waited may have been cancelled

    def _end(self) -> None:
        self.is_over = True
        if self._carry is None:
            self.run.forget(self)
        self._carry, self._told, self.parts = no_data, _nothing_told, []  # no arrays, no turn
        queue = self._queue
        if queue and queue[0] is self:
            queue.popleft()
            if queue:
                self.get_loop().call_soon(queue[0]._begin)
        if self._then is not None:
            self._call_then()
        self._call_tell()

    def _call_tell(self) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()

    def _call_then(self) -> None:
        then, self._then = self._then, None
        for fn in then or ():
            self.get_loop().call_soon(fn)


@final
class Bucket:
    """Messages of one exchange of frames: an operation, and the reductions queued behind it.

    Args:
        first: The exchange whose turn it is.
        frame: Of its first operation.
        queue: Which it begins.

    Attributes:
        after: Arrays that follow the frames; filled in once all of these have agreed.
        slots: Small data of all workers, for each operation that all of them had queued; None if it
            could not be seen at a glance that they agree.
        ready: What is reduced of each of these.
        num_bytes: Size of the arrays that are reduced.
    """

    __slots__ = (
        "_first", "_frame", "_from", "_parts", "_queue", "_room", "after", "num_bytes", "ready",
        "slots",
    )  # fmt: skip

    def __init__(self, first: Exchange[Any], frame: Frame, queue: deque[Exchange[Any]]) -> None:
        self._first = first
        self._frame = frame
        self._queue = queue
        self._parts = first.parts[:1]
        self._from = [first]  # the exchange of each part
        self._room = first.run.workers.room
        self.after: list[Any] = []
        self.slots: list[list[bytes]] | None = None
        self.ready = [self._parts[0][1]]
        self.num_bytes = self.ready[0].num_bytes

    def bring(self) -> Array:
        """Return the frame, and behind it what is ahead if there is room; as the engine sends it.

        What is started until then goes with it where the engine's thread sends: the event loop may
        be busy for as long as a step starts reductions, and that thread runs when it waits.
        """
        if self._first.can_fuse:
            self._take_parts()
        behind, num_bytes = [], 0
        for _, summands, _ in self._parts:
            num_bytes += summands.num_bytes
            if num_bytes > self._room:
                break
            behind.append(summands)
        return self._frame.encode(self._room, behind, [frame for frame, _, _ in self._parts[1:]])

    def _take_parts(self) -> None:
        """Take the operations that could go together."""
        first, parts, origins = self._first, self._parts, self._from
        op, num_bytes, num_in_slot = parts[0][1].op, 0, 0
        # Not of a copy: without a GIL that fails, as the event loop may add to the queue meanwhile.
        for number in range(min(len(self._queue), MAX_FOLLOWERS + 1)):
            each = self._queue[number]
            if each is not first and not (each.can_fuse and each.run is first.run):
                return
            for part in each.parts.copy():  # which the event loop may add to
                frame, summands, _ = part
                num_bytes += summands.num_bytes
                num_in_slot += len(frame.slot)
                if part is parts[0]:
                    continue
                is_full = num_bytes > FUSED_BYTES or num_in_slot > SLOT_BYTES
                if is_full or summands.op is not op or len(parts) > MAX_FOLLOWERS:
                    return
                parts.append(part)
                origins.append(each)

    def look(self, rows: Any) -> bool:
        """Tell whether to reduce what follows, which the engine's thread then does."""
        slots = slots_if_one_collective(rows)
        if slots is None:
            return False
        self.slots = [slots]
        if len(self._parts) > 1:
            frames = [frame for frame, _, _ in self._parts[1:]]
            self.slots += slots_in_common(rows, self._frame, frames)
            self.ready = [part[1] for part in self._parts[: len(self.slots)]]
            self.num_bytes = sum([each.num_bytes for each in self.ready])
        ready = self.ready
        if self.num_bytes <= self._room:
            runs, op = runs_of(ready), ready[0].op
            columns = zip(*[arrays_behind(row, runs) for row in rows], strict=True)
            share_totals(ready, [reduce_arrays(op, column) for column in columns])
            return False
        for summands in ready:
            summands.begin()
        self.after[:] = map(join_run, runs_of(ready))
        return True

    def take(
        self, rows: Any, totals: Sequence[Array] | None
    ) -> tuple[list[Frame], Closed | Failed | Differs] | None:
        """Take what the engine brought; None if all agree, else all frames, and what follows.

        Args:
            rows: The frames of all workers.
            totals: What came of `after`; None if there was nothing to send.
        """
        if totals is not None:
            share_totals(self.ready, totals)
        if self.slots is None:
            frames = list(map(Frame.decode, rows))
            decision = decide(frames)
            if not isinstance(decision, Agreed):
                return frames, decision
            self.slots = [decision.slots]
        return None

    def shares(self) -> list[tuple[Exchange[Any], list[list[bytes]]]]:
        """Return the exchanges whose operations all workers had queued, each with their slots."""
        found: list[tuple[Exchange[Any], list[list[bytes]]]] = []
        slots = self.slots or []
        for each, its_slots in zip(self._from, slots, strict=False):  # the last may have no slots
            if not found or found[-1][0] is not each:
                found.append((each, []))
            found[-1][1].append(its_slots)
        return found


def _nothing_told() -> tuple[str, str]:
    return "", ""
