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
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from functools import partial
from itertools import islice
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeVar, final

from ..collectives import (
    SLOT_BYTES,
    Carry,
    Summands,
    join_run,
    no_data,
    runs_of,
    share_totals,
)
from ..devices import OwnedTask, is_interrupted, wait_shielded
from ..devices.backends import reduce_arrays
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
    from ._run import WorkersRun

T = TypeVar("T")

NOTHING_AHEAD = Summands(ReduceOp.SUM, [], are_lent=False)
FUSED_BYTES = 1024 * 1024
"""Bytes of arrays that go together; above that, they gain nothing by it."""


@final
class Exchange(asyncio.Future[T]):
    """Exchange of a worker with all others; it is completed even if nobody awaits it.

    Args:
        run: Of which it is a part.
        frame: What this worker says; without the number of the run.
        told: Gives its name, and what has to be equal on all workers, in words; for errors.
        carry: Called if all agree.
        ahead: What is reduced before that.
        can_fuse: Whether it is a reduction that may go with others.
        is_awaited: Whether it was called to be awaited, and not started.

    Attributes:
        frame: The same.
        is_over: Whether all is done, so that the next one may begin.

    Cancellation:
        Ends the wait at once, and the exchange goes on: the other workers need it. While a
        caller's own arrays are being sent, it ends the wait when that is over.
    """

    __slots__ = (
        "_ahead", "_can_fuse", "_carry", "_context", "_is_awaited", "_queue", "_run", "_slots",
        "_tell", "_told", "frame", "is_over",
    )  # fmt: skip

    # Set for few of those that go together, so these are not slots.
    _is_cancelled = False  # and ends when it is over
    _led: Sequence[Exchange[Any]] = ()  # of those queued behind it
    _after: list[Any] = []  # noqa: RUF012 - arrays that follow the frames; replaced, not changed
    _then: Sequence[Callable[[], object]] = ()

    def __init__(
        self,
        run: WorkersRun,
        frame: Frame,
        told: Callable[[], tuple[str, str]],
        carry: Carry[T],
        ahead: Summands = NOTHING_AHEAD,
        *,
        can_fuse: bool = False,
        is_awaited: bool = False,
    ) -> None:
        super().__init__()
        self.frame = frame
        self.is_over = False
        self._run = run
        self._told = told
        self._carry: Carry[Any] = carry
        self._context = copy_context()  # in which it is carried, such as that of np.errstate
        self._ahead = ahead
        self._can_fuse = can_fuse
        self._is_awaited = is_awaited
        self._queue = run.workers.queue
        self._slots: list[bytes] | None = None
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

        There is one such function. It is called soon if the exchange is done, or was cancelled.
        """
        if self.done():
            self.get_loop().call_soon(fn)
        else:
            self._tell = fn

    def give_back(self) -> bool:
        """Go on without the caller's own arrays, by copies; false if they are being read."""
        return self._ahead.give_back()

    def when_over(self, fn: Callable[[], object]) -> None:
        """Call something when the exchange is over, or soon if it is."""
        if self.is_over:
            self.get_loop().call_soon(fn)
        else:
            self._then = [*self._then, fn]

    async def over(self) -> bool:
        """Wait until it is over; what it has raised is not raised here.

        Returns:
            False if the interpreter is being interrupted.

        Cancellation:
            Raised again once it is over.
        """
        cancelled: list[asyncio.CancelledError] = []
        has_ended = await wait_shielded(lambda: self.is_over, self._new_waiter, cancelled.append)
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
        workers = self._run.workers
        before = workers.before()
        self._queue = workers.queue
        self._queue.append(self)
        if before is None:
            self._begin()

    def _begin(self) -> None:
        if self.is_over:  # it was led
            return
        run, workers = self._run, self._run.workers
        try:
            if self.frame.kind is FrameKind.COLLECTIVE or run.ended_by is not None:
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
            communicator = await self._run.workers.connect()
        except BaseException as error:
            self._break(error)
            raise
        self._send(communicator)

    def _send(self, communicator: Communicator) -> None:
        """Have the engine send the frame, with what is queued by then."""
        run = self._run
        try:
            frame = self.frame = run.numbered(self.frame)
            communicator._what = f"{self._told()[0]} of run {frame.run} ({run.function})"
            self._after = []
            communicator._launch(
                Call(
                    AGREE, NOTHING, self._ahead.op, agrees=self._look, summands=self._after,
                    brings=self._bring, is_awaited=self._is_awaited,
                    then=partial(self._came, communicator),
                )
            )  # fmt: skip
        except BaseException as error:  # noqa: BLE001 - `_break` raises what has to be
            self._break(error)

    def _bring(self) -> Array:
        """Return the frame, and behind it what is ahead if there is room; as the engine sends it.

        What is started until then goes with it where the engine's thread sends: the event loop may
        be busy for as long as a step starts reductions, and that thread runs when it waits.
        """
        room = self._run.workers.room
        followers = self._led = self._followers()
        behind, num_bytes = [], 0
        for each in (self, *followers):
            num_bytes += each._ahead.num_bytes
            if num_bytes > room:
                break
            behind.append(each._ahead)
        return self.frame.encode(room, behind, [each.frame for each in followers])

    def _followers(self) -> Sequence[Exchange[Any]]:
        """Return the exchanges queued behind this one that could go with it."""
        if not self._can_fuse or len(self._queue) == 1:
            return ()
        followers: list[Exchange[Any]] = []
        ahead, num_bytes, num_in_slot = self._ahead, 0, 0
        for each in islice(self._queue.copy(), MAX_FOLLOWERS + 1):
            num_bytes += each._ahead.num_bytes
            num_in_slot += len(each.frame.slot)
            is_full = num_bytes > FUSED_BYTES or num_in_slot > SLOT_BYTES
            is_alike = each._can_fuse and each._run is self._run and each._ahead.op is ahead.op
            if each is not self:
                if is_full or not is_alike:
                    break
                followers.append(each)
        return followers

    def _look(self, rows: Any) -> bool:
        """Tell whether to reduce what follows, which the engine's thread then does."""
        followers, self._led = self._led, ()
        slots = self._slots = slots_if_one_collective(rows)
        if slots is None:
            return False
        if followers:
            common = slots_in_common(rows, self.frame, [each.frame for each in followers])
            self._led = followers[: len(common)]
            for each, its_slots in zip(self._led, common, strict=True):
                each._slots = its_slots
        all_ahead = self._all_ahead()
        if sum([each.num_bytes for each in all_ahead]) <= self._run.workers.room:
            runs, op = runs_of(all_ahead), all_ahead[0].op
            columns = zip(*[arrays_behind(row, runs) for row in rows], strict=True)
            share_totals(all_ahead, [reduce_arrays(op, column) for column in columns])
            return False
        for summands in all_ahead:
            summands.begin()
        self._after[:] = map(join_run, runs_of(all_ahead))
        return True

    def _all_ahead(self) -> list[Summands]:
        return [self._ahead, *[each._ahead for each in self._led]]

    def _came(self, communicator: Communicator, came: asyncio.Future[Any]) -> None:
        """Do what follows from the frames of all workers."""
        try:
            rows, totals = came.result()
            led, all_ahead = self._led, self._all_ahead()
            if totals is not None:
                share_totals(all_ahead, totals)
            slots = self._slots
            if slots is None:
                frames = list(map(Frame.decode, rows))
                decision = decide(frames)
                if not isinstance(decision, Agreed):
                    self._spawn(self._disagree(communicator, frames, decision))
                    return
                slots = decision.slots
            self._slots = slots
            self._run.workers.agreed(sum([each.num_bytes for each in all_ahead]))
        except BaseException as error:  # noqa: BLE001 - `_break` raises what has to be
            self._break(error)
            return
        queue = self._queue
        for _ in led:  # they are all over in this cycle: the one behind them begins
            del queue[1]
        for each in (self, *led):
            each._context.run(each._follow, communicator)

    def _follow(self, communicator: Communicator) -> None:
        """Do what follows from the slots of all workers."""
        try:
            assert self._slots is not None  # since they have agreed
            found: Any = self._carry(communicator, self._slots)
        except BaseException as error:  # noqa: BLE001 - `_break` raises what has to be
            self._break(error)
            return
        if isinstance(found, CoroutineType):  # of one that has led none
            self._spawn(self._go_on(found))
        else:
            self._succeed(found)

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
        try:
            ended_by = await self._run.end(
                communicator, frames, decision, partial(self._run.where, self.frame, *self._told())
            )
        except BaseException as error:
            self._break(error)
            raise
        self._fail(ended_by)

    # ---- the end -------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = OwnedTask(work, f"aioreplica workers: {self._run.function}")
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
        self._run.workers.break_off(error)
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
        self._ahead, self._carry = NOTHING_AHEAD, no_data  # who holds this holds no arrays,
        self._told = _nothing_told  # nor the turn, which holds this
        if self._led or self._after:
            self._led, self._after = (), []
        queue = self._queue
        if queue and queue[0] is self:
            queue.popleft()
            if queue:
                self.get_loop().call_soon(queue[0]._begin)
        if self._then:
            then, self._then = self._then, ()
            for fn in then:
                self.get_loop().call_soon(fn)
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()


def _nothing_told() -> tuple[str, str]:
    return "", ""
