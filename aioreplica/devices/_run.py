"""Awaiting ops: on a lane, on the host or several at once; cancellable until they start."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar, final

from .._functions import is_async, require_finished, require_no_yield
from ..context import PLACE, REGISTRY
from ._completion import CompletionQueue
from ._lane import Lane
from ._lane_table import COLLECTIVES, HOST, lane_table
from ._op import AnyOp, Op, OpTracker

INLINE_BYTES = 2 * 1024 * 1024
"""Array work that reads no more than this runs on the event loop. A trip to another thread and back
costs about 40 µs; summing that many bytes takes 50 to 100 µs, so two threads would save nothing."""

JOIN_S = 0.5  # a bound only: an idle thread ends in microseconds

P = ParamSpec("P")
T = TypeVar("T")


def run_on_lane(
    lane: Lane,
    completions: CompletionQueue,
    fn: Callable[..., T],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    tracker: OpTracker | None = None,
) -> Op[T]:
    """Return an op that runs `fn` on a lane of the caller's choice once it is awaited."""
    return Op(completions, fn, args, kwargs, lane, tracker)


def submit_gang(lane_names: Sequence[str], ops: Sequence[AnyOp]) -> None:
    """Put one op on each lane, all or nothing with regard to other gangs.

    Two gangs that need the same devices get them in the same order, so neither can hold half of
    them while it waits for the rest. If one lane refuses its op, those that have not begun are
    taken back from the others.
    """
    table = lane_table()
    with table.gang_lock:
        try:
            for name, op in zip(lane_names, ops, strict=True):
                table.lane(name).put(op)
        except BaseException:
            for op in ops:  # one whose put has failed may be on its lane, too
                op.withdraw()
            raise


async def run_on_host(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking function in the host's thread pool.

    Args:
        fn: A plain function; it sees the caller's context variables.
        *args: Passed on.
        **kwargs: Passed on.

    Raises:
        TypeError: If `fn` is not a plain function.
        Exception: Whatever `fn` raises.

    Cancellation:
        As for a device op: taken back while queued, waited for once started.

    Example:
        >>> import asyncio
        >>> asyncio.run(run_on_host(pow, 2, 10))
        1024
    """
    if not callable(fn) or is_async(fn):
        raise TypeError(
            f"run_on_host needs a plain function, got {fn!r} ({type(fn).__name__}). "
            "Await asynchronous ones directly."
        )
    require_no_yield(fn, "run_on_host")
    _, tracker = _current_replica()
    result = await _op_on(HOST, fn, args, kwargs, tracker)
    require_finished(result, fn, "run_on_host")
    return result


def device_op(fn: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make a plain function awaitable: on the replica's device in a step, on the host elsewhere.

    Raises:
        TypeError: If `fn` is not callable, is already asynchronous, or contains `yield`.

    Cancellation:
        As for `ReplicaContext.run_on_device`.

    Example:
        >>> import asyncio
        >>> @device_op
        ... def square(x):
        ...     return x * x
        >>> asyncio.run(square(7))
        49
    """
    if not callable(fn) or is_async(fn):
        raise TypeError(f"device_op wraps a plain function, got {fn!r}; drop the decorator.")
    require_no_yield(fn, "device_op")

    @functools.wraps(fn)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        device_name, tracker = _current_replica()
        result = await _op_on(device_name or HOST, fn, args, kwargs, tracker)
        require_finished(result, fn, "device_op")
        return result

    return call


async def run_together(pieces: Sequence[Callable[[], T]]) -> list[T]:
    """Run plain functions at once, on the lane of the collectives; wait for all.

    That lane is the library's own: no function of a user is ever put there, so a reduction never
    queues behind something that waits for the reduction.

    Raises:
        Exception: What the first piece that failed raises.

    Cancellation:
        Pieces that have not started are taken back; the others are waited for.
    """
    _, tracker = _current_replica()
    ops = [_op_on(COLLECTIVES, piece, (), {}, tracker) for piece in pieces]
    for op in ops:
        op.put()
    results: list[T] = []
    failure: BaseException | None = None
    for op in ops:
        try:
            results.append(await op)
        except BaseException as error:  # noqa: BLE001 - raised below, when the others have ended
            failure = failure or error
            for other in ops:
                other.cancel()
    if failure is not None:
        raise failure
    return results


def num_collective_streams() -> int:
    """Return how many threads the lane of the collectives can have."""
    return lane_table().num_collective_streams


@final
class OwnLane:
    """One thread for something that may block, from its first call to `close`.

    A thread of its own, not one of the host pool: a generator that holds an SQLite connection, or
    anything else that belongs to the thread that made it, works; and one that blocks for long
    keeps no thread from others.

    Args:
        kind: What its lane is called, before a number.
        writes_files: Whether a call that has begun is waited for in an interrupt, too.
    """

    __slots__ = ("_generation", "_kind", "_lane", "_port", "_writes_files")

    def __init__(self, kind: str = "input", *, writes_files: bool = False) -> None:
        self._kind = kind
        self._writes_files = writes_files
        self._lane: Lane | None = None
        self._generation = 0  # of the lane
        self._port: CompletionQueue | None = None

    @property
    def is_busy(self) -> bool:
        """True if a call runs that was given up because of an interrupt."""
        lane = self._living()
        return lane is not None and lane.statistics().running > 0

    def run(self, fn: Callable[..., T], *args: Any) -> Op[T]:
        """Return an op that calls `fn` on the thread once it is awaited."""
        self._port = CompletionQueue.of_running_loop()
        lane = self._living()
        if lane is None:
            number = next(REGISTRY.once("source_lanes", itertools.count))
            name, table = f"{self._kind}:{number}", lane_table()
            table.acquire((name,))
            lane = self._lane = table.lane(name, num_streams=1)
            self._generation = table.generation
        op = run_on_lane(lane, self._port, fn, args, {})
        if self._writes_files:
            op.writes_files = True
        return op

    def close(self) -> None:
        """End the thread, and see it gone unless it is busy; idempotent."""
        lane, self._lane = self._living(), None
        if lane is not None:
            is_busy = lane.statistics().running > 0
            _end(lane)
            if not is_busy:
                lane.join(JOIN_S)

    def __del__(self) -> None:
        """End the thread of an owner that was dropped: soon, as the collector may be the caller."""
        port = getattr(self, "_port", None)
        lane = None if port is None else self._living()
        if lane is None or port is None:
            return
        try:
            port.loop.call_soon_threadsafe(_end, lane)
        except RuntimeError:  # the event loop is closed
            _end(lane)

    def _living(self) -> Lane | None:
        """Return the lane; in the child of a fork its thread does not exist, and it is dropped."""
        if self._lane is not None and self._generation != lane_table().generation:
            self._lane = None
        return self._lane


def _end(lane: Lane) -> None:
    lane_table().release((lane.name,))


def _current_replica() -> tuple[str | None, OpTracker | None]:
    """Return device and tracker of the replica that this is called in, None and None elsewhere.

    Raises:
        CancelledError: If its run was aborted.
    """
    replica = PLACE.get().replica
    if replica is None:
        return None, None
    replica.check_running()
    return replica.device_name, replica.op_tracker


def _op_on(
    lane_name: str,
    fn: Callable[..., T],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    tracker: OpTracker | None,
) -> Op[T]:
    lane = lane_table().lane(lane_name)
    return Op(CompletionQueue.of_running_loop(), fn, args, kwargs, lane, tracker)
