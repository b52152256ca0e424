"""The communicator: collectives among the workers of a cluster, as awaitables.

Everything that does not depend on an engine is here: the checks, the order of calls, and how the
end of a group reaches those who wait. An engine's adapter queues a call and settles its future.

Invariants:
    * Calls are numbered when they are made, and an adapter performs them in that order.
    * A call is settled at most once. Cancelling its future changes nothing for the engine: the
      adapter holds the call, and with it the array, until the engine is done with it.
    * `_failure` is set once. From then on every call raises, and all pending ones have ended.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self, final

import numpy as np

from ..devices import running_loop
from ..errors import ContextError, StallError, WorkerLostError
from ..tree import Array
from ..typing import ReduceOp
from ._arguments import (
    as_array,
    require_members,
    require_reason,
    require_root,
    require_sizes,
    require_timeout,
    require_writable,
)

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"
COMPLETE = "all_gather of parts"
BROADCAST, BARRIER, AGREE = "broadcast", "barrier", "agreement"
LOST, STALLED, CROSSED, ENDED, CLOSED = "lost", "stalled", "crossed", "ended", "closed"
MAX_REASON = 400  # characters; a note from one worker to the others has a fixed size
NOTHING = np.empty(0, np.uint8)
CLOSED_TEXT = "This communicator was closed. Connect again to make another."
OUTER_CLOSED_TEXT = "The communicator that this is a split of was closed, and so were its splits."


@final
@dataclass(slots=True, eq=False)
class Call:
    """One collective of one worker; holds the array until the engine is done with it.

    Attributes:
        kind: Name of the method.
        array: What this worker brings, C-contiguous.
        op: The operator; None where nothing is reduced.
        root: Whose array is sent, in a broadcast.
        sizes: How many rows of the array each worker gets or has, where it is cut.
        agrees: For AGREE: whether `summands` are reduced, seeing the arrays of all.
        summands: For AGREE: arrays as `array`, each combined by `op`; `agrees` may fill them in.
        brings: For AGREE: makes the array when the engine is about to send it; None if it is there.
        then: Called with the future when it is done: by the engine's message to the event loop, not
            a cycle later; a failure is told soon. None where only the future tells.
        is_awaited: Whether a task waits for it, so that the event loop may begin it.
        what: Names it in errors, where the user has called something else.
        number: Of the call in its communicator, from 0; the same on every worker.
    """

    kind: str
    array: Array
    op: ReduceOp | None = None
    root: int = 0
    sizes: Sequence[int] = ()
    agrees: Callable[[Array], bool] | None = None
    summands: Sequence[Array] = ()
    what: str = ""
    number: int = -1
    brings: Callable[[], Array] | None = None
    is_awaited: bool = False
    then: Callable[[asyncio.Future[Any]], None] | None = None

    def bring(self) -> Array:
        """Return the array; called when it is sent, maybe on another thread."""
        if self.brings is not None:
            self.array, self.brings = self.brings(), None
        return self.array

    def parts_of(self, array: Array) -> list[Array]:
        """Cut what all workers have together into the part of each, in the order of ranks."""
        begins = [sum(self.sizes[:rank]) for rank in range(len(self.sizes) + 1)]
        return [array[begin:end] for begin, end in pairwise(begins)]

    def describe(self) -> str:
        """Return, for example, "all_reduce #3"."""
        return self.what or f"{self.kind} #{self.number}"


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """Reason for the end of a group, in the same words on all of its workers.

    Attributes:
        kind: LOST, STALLED (some do not come), CROSSED (all wait, for each other), ENDED (by
            `abort`), or CLOSED (this communicator only).
        text: What happened, and what to do.
        ranks: Whom it is about, as far as that is known.
        timeout: The timeout that was over, in seconds.
    """

    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    timeout: float | None = None

    def error(self) -> Exception:
        """Return a new error, so that each who waits gets one with a traceback of its own."""
        if self.kind == CLOSED:
            return ContextError(self.text)
        if self.kind in (STALLED, CROSSED):
            return StallError(self.text, timeout_s=self.timeout, ranks=self.ranks)
        return WorkerLostError(self.text, ranks=self.ranks)


@final
@dataclass(frozen=True, slots=True)
class CommunicatorStatistics:
    """Counters and state of a communicator.

    Attributes:
        calls: Collectives started since it was made.
        pending: Those that have not ended, abandoned ones included.
        failure: Why the group has ended; empty while it works.
    """

    calls: int
    pending: int
    failure: str = field(default="")


class Communicator(ABC):
    """Collectives among the workers of a group.

    Every worker has one communicator of the group and must make the same calls in the same order,
    with arrays of one shape and dtype. A collective is queued when its method is called, not when
    it is awaited, so that plain code can fix the order; what is returned is a future of the
    running loop. Its array must not be written until it has ended.

    Reductions go in ascending rank, element by element, whatever the engine and the size of the
    array: results are bitwise the same on every worker, in every run and with every engine, and
    bitwise those of as many replicas in one process. Half precision is summed in float32.

    Arrays are of booleans, integers, floats (bfloat16 too) or complex numbers. Anything that NumPy
    takes for such an array is accepted; a result is a new NumPy array, which may be read-only.

    The first error ends the group for all workers: what is pending fails, and every later call
    raises. Make a new communicator to go on.

    Cancellation:
        A cancelled await abandons its collective, which goes on in the background as the others
        need it; the array is held until then.

    Example:
        >>> import asyncio
        >>> from aioreplica.cluster import LocalCommunicator
        >>> async def worker(communicator):
        ...     async with communicator:
        ...         return await communicator.all_reduce([communicator.rank, 1.0])
        >>> async def main():
        ...     return await asyncio.gather(*map(worker, LocalCommunicator.group(3)))
        >>> asyncio.run(main())[2]
        array([3., 3.])
    """

    is_new = False
    """Whether its group has grown by this worker."""

    def __init__(
        self, rank: int, size: int, timeout: float | None, worker: int | None = None
    ) -> None:
        self._rank, self._size, self._timeout = rank, size, require_timeout(timeout)
        self._worker = rank if worker is None else worker  # its rank in the outermost group
        self._failure: Failure | None = None
        self._pending: dict[Call, asyncio.Future[object]] = {}
        self._is_closed = False
        self._num_splits: dict[tuple[int, ...], int] = {}
        self._on_alarm: Callable[[int, int, str], None] | None = None  # gets the rank of who raises
        self._name = ""  # of the group; empty for the outermost one
        self._what = ""  # names calls that are made for something else, by a strategy
        self._num_calls, self._pid = 0, os.getpid()

    # ---- what it is ----------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The number of this worker in the group, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of workers in the group."""
        return self._size

    @property
    def timeout(self) -> float | None:
        """Limit of a collective's wait for the others, in seconds; None waits for ever."""
        return self._timeout

    @property
    def is_closed(self) -> bool:
        """True after `aclose` was called, of this one or the one it was split from at first."""
        return self._is_closed

    @property
    def has_failed(self) -> bool:
        """True if the group has ended by a failure, for this worker at least."""
        return self._failure is not None

    def statistics(self) -> CommunicatorStatistics:
        """Return counts of calls, and why the group has ended if it has."""
        text = "" if self._failure is None else self._failure.text
        return CommunicatorStatistics(self._num_calls, len(self._pending), text)

    def __repr__(self) -> str:
        state = "open" if self._failure is None else self._failure.kind
        return f"<{type(self).__name__} | rank {self._rank} of {self._size}, {state}>"

    # ---- collectives ---------------------------------------------------------------------

    def all_reduce(self, x: Any, op: ReduceOp | str = "sum") -> asyncio.Future[Any]:
        """Combine the arrays of all workers, element by element.

        Args:
            x: An array, of the same shape and dtype on every worker.
            op: "sum", "mean", "min" or "max".

        Returns:
            A future of the combined array, the same on every worker. The mean of integers is
            float64, the sum of booleans an integer, as in `ctx.all_reduce`.

        Raises:
            TypeError: If `x` holds no numbers.
            ValueError: If the operator is unknown.
            WorkerLostError: If a worker is gone or ended the group; at the call or the await.
            StallError: If a worker did not come before the timeout; at the call or the await.
            ContextError: If this communicator was closed, or no event loop is running.
        """
        return self._launch(Call(ALL_REDUCE, as_array(x, ALL_REDUCE), ReduceOp.parse(op)))

    def all_gather(self, x: Any, sizes: Sequence[int] = ()) -> asyncio.Future[Any]:
        """Collect the arrays of all workers.

        Args:
            x: An array, of the same shape and dtype on every worker.
            sizes: How many elements of a flat `x` each worker has in their place already. It is
                written until the future of it is done.

        Returns:
            A future of an array of shape `(size, *x.shape)`, by rank; with `sizes` of `x`.

        Raises:
            Exception: As in `all_reduce`; a ValueError also if the sizes do not fit.
        """
        if len(sizes):
            sizes = require_sizes(require_writable(x, COMPLETE), sizes, self._size)
            return self._launch(Call(COMPLETE, x, sizes=sizes))
        return self._launch(Call(ALL_GATHER, as_array(x, ALL_GATHER)))

    def reduce_scatter(
        self, x: Any, op: ReduceOp | str = "sum", sizes: Sequence[int] = ()
    ) -> asyncio.Future[Any]:
        """Combine the arrays of all workers, and give each worker one part along the first axis.

        Args:
            x: An array with at least one axis, of the same shape and dtype on every worker.
            op: As in `all_reduce`.
            sizes: How many elements of a flat array each worker gets.

        Returns:
            A future of this worker's part of the combined array. Parts are contiguous and in the
            order of ranks; where they cannot be equal, lower ranks get one row more.

        Raises:
            Exception: As in `all_reduce`; a ValueError also if `x` or the sizes cannot be cut.
        """
        array = as_array(x, REDUCE_SCATTER)
        if not array.ndim:
            raise ValueError(f"reduce_scatter needs an array with an axis to cut, got {x!r}.")
        sizes = require_sizes(array, sizes, self._size)
        return self._launch(Call(REDUCE_SCATTER, array, ReduceOp.parse(op), sizes=sizes))

    def broadcast(self, x: Any, root: int = 0) -> asyncio.Future[Any]:
        """Send the array of one worker to all.

        Args:
            x: An array; those of the others tell only shape and dtype, which must be the same.
            root: Whose array is sent.

        Returns:
            A future of the root's array.

        Raises:
            Exception: As in `all_reduce`; a ValueError also if `root` is not a rank of the group.
        """
        root = require_root(root, self._size)
        return self._launch(Call(BROADCAST, as_array(x, BROADCAST), root=root))

    def barrier(self) -> asyncio.Future[None]:
        """Return a future that is done when every worker has called this.

        Raises:
            Exception: As in `all_reduce`.
        """
        return self._launch(Call(BARRIER, NOTHING))

    def all_gather_then_reduce(
        self, x: Any, agrees: Callable[[Any], bool], summands: list[Any], op: ReduceOp | str
    ) -> asyncio.Future[tuple[Any, list[Any] | None]]:
        """Collect an array of all workers, and combine others if they agree, in one go.

        The event loop is not asked in between.

        Args:
            x: As in `all_gather`.
            agrees: Called with what was collected, maybe on another thread; has to say the same on
                all workers.
            summands: Arrays, as in `all_reduce`. The list may be changed until `agrees` is called.
            op: As in `all_reduce`.

        Returns:
            A future of what `all_gather` gives, and of what `all_reduce` gives of each; of None in
            place of the latter if they disagree.

        Raises:
            Exception: As in `all_reduce`.

        Cancellation:
            As for every collective.
        """
        summands[:] = [as_array(each, ALL_REDUCE) for each in summands]
        call = Call(AGREE, as_array(x, AGREE), ReduceOp.parse(op), agrees=agrees, summands=summands)
        return self._launch(call)

    # ---- groups, and their end -----------------------------------------------------------

    def split(self, ranks: Iterable[int]) -> Communicator:
        """Return a communicator of some of the workers; to be called by each of them.

        Its ranks are counted from 0 in ascending order of those here. Calls of each are performed
        in the order in which they are made; between groups there is none. Workers that wait for
        each other in different groups wait until the timeout. A failure ends the group and all of
        its splits; errors name workers by their ranks in the group that was connected.

        Args:
            ranks: Ranks of this group, this worker's among them.

        Raises:
            TypeError: If `ranks` are not integers.
            ValueError: If a rank is not in the group or given twice, or this worker is left out.
            Exception: What ended the group, if it has ended.
        """
        members = require_members(ranks, self._rank, self._size)
        self._require_open()
        self._num_splits[members] = ordinal = self._num_splits.get(members, -1) + 1
        return self._subgroup(members, str(ordinal))

    async def shrink(self) -> Communicator:
        """Make a communicator of the workers that are left; all of them must call this.

        After a `WorkerLostError` or `StallError`, on MPI started as `mpirun --with-ft ulfm`, Gloo
        without `torchrun`, and a `LocalCommunicator`. Ranks keep their order; close this one next.

        Raises:
            ContextError: If this engine cannot go on after the loss of a worker, the group works,
                or this is a split of another communicator.
            StallError: If not all workers that are left came before the timeout.
            WorkerLostError: If another one was lost meanwhile: call it again. Or if it is this one.

        Cancellation:
            As for `ar.cluster.connect`.
        """
        return await self._resized(0)

    def abort(self, reason: str) -> None:
        """End the group for everybody, now; does not wait. Does nothing if it has ended.

        Pending calls fail here at once, and on the other workers as soon as they are told.

        Args:
            reason: Shown to all workers; at most 400 characters of it.

        Raises:
            TypeError: If `reason` is not a string.
            ContextError: If no event loop is running.
        """
        require_reason(reason)
        if self._failure is None:
            text = f"Worker {self._worker} ended the group: {reason[:MAX_REASON]}"
            failure = Failure(ENDED, text, (self._worker,))
            running_loop("abort")  # else the others would never be told
            self._spread(failure)
            self._end(failure)

    async def aclose(self) -> None:
        """Give it back, with its splits if it was connected; those who wait are told. Idempotent.

        Pending calls fail with a `ContextError` here. Takes at most about a second.

        Cancellation:
            What is left is done in the background.
        """
        if not self._is_closed:
            await self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):  # not a cancellation: nothing is wrong here then
            self.abort(f"{type(error).__name__}: {error}")
        await self.aclose()

    # ---- for adapters --------------------------------------------------------------------

    @abstractmethod
    def _enqueue(self, call: Call) -> Callable[[], None] | None:
        """Queue a call; `_settle` is called on the event loop when it has ended, or by a result."""

    @abstractmethod
    def _absent(self) -> tuple[int, ...] | None:
        """Return the workers that have not come to the call in progress; None if there is none."""

    @abstractmethod
    def _subgroup(self, ranks: tuple[int, ...], key: str) -> Communicator:
        """Return a communicator of the workers given, ascending; the key tells it from others."""

    @abstractmethod
    def _alarm(self, number: int, text: str) -> None:
        """Have `_on_alarm` of the other workers called, whatever they wait in; does not wait."""

    @abstractmethod
    async def _resized(self, num_new: int) -> Communicator:
        """Meet the workers that are left; or start `num_new`, and meet these and all others."""

    @abstractmethod
    def _spread(self, failure: Failure) -> None:
        """Tell the other workers that the group has ended; does not wait."""

    @abstractmethod
    async def _close(self) -> None:
        """Shut it, and its splits if it is outermost; tell the others; give resources back."""

    def _shut(self, text: str = CLOSED_TEXT) -> None:
        """Make no more calls; those that are pending fail."""
        self._is_closed, self._on_alarm = True, None
        self._end(Failure(CLOSED, text))

    def _launch(self, call: Call) -> asyncio.Future[Any]:
        self._require_open()
        future: asyncio.Future[object] = running_loop(call.kind).create_future()
        call.number, call.what = self._num_calls, self._what
        resolve = self._enqueue(call)
        self._num_calls += 1
        self._pending[call] = future
        if resolve is not None:  # it is over
            resolve()
        return future

    def _require_open(self) -> None:
        if self._failure is not None:
            raise self._failure.error()
        _require_process(self._pid)

    def _settle(self, call: Call, result: object) -> None:
        """Hand a result on, unless the await was cancelled or the group has ended."""
        future = self._pending.pop(call, None)
        if future is not None and not future.done():
            future.set_result(result)
            if call.then is not None:
                call.then(future)

    def _end(self, failure: Failure) -> None:
        """Let all pending and later calls fail; on the event loop. The first failure stays."""
        if self._failure is None:
            self._failure = failure
        pending, self._pending = self._pending, {}
        _let_fail(pending, self._failure)


def nothing_lost_error() -> ContextError:
    """Return the error of `shrink` for a group that works."""
    return ContextError("No worker of this group was lost, so there is nothing to shrink.")


def _let_fail(pending: dict[Call, asyncio.Future[object]], failure: Failure) -> None:
    for call, future in pending.items():
        loop = future.get_loop()
        if not future.done() and not loop.is_closed():
            future.set_exception(failure.error())
            future.exception()  # already known: every later call raises it
            if call.then is not None:
                loop.call_soon(call.then, future)


def _require_process(pid: int) -> None:
    if pid != os.getpid():
        raise ContextError(
            f"This communicator belongs to process {pid}, and this one was forked from it. Fork "
            "before connecting, or start processes with the 'spawn' method."
        )
