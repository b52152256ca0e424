"""Future result of a closure, and the way of its errors back to the program."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar, final

from ...devices import require_loop, run_on_host
from ...errors import WorkerLostError
from ._closure import ClosureFailedError
from ._packing import HomeSide, Packed, unpack
from ._queue import ScheduledClosure

T = TypeVar("T")

UNPACK_HERE_BYTES = 256 * 1024
"""Results up to this size are unpickled on the event loop, which takes less than a thread does."""


class Runner(Protocol):
    """Interface of who runs closures, for their results."""

    async def make_again(self, closure: ScheduledClosure) -> None:
        """Have a result made again that was lost with its worker."""


@final
class RemoteValue(Generic[T]):
    """Future result of a closure; it stays on the worker until it is fetched.

    `ClusterCoordinator.schedule` gives it. A result that is lost with its worker is computed again
    by another one; what the closure pushes then is dropped.
    """

    __slots__ = ("_closure", "_fetched", "_runner", "_side")

    def __init__(self, closure: ScheduledClosure, side: HomeSide, runner: Runner) -> None:
        self._closure = closure
        self._side = side
        self._runner = runner
        self._fetched: tuple[T] | None = None

    async def fetch(self) -> T:
        """Wait for the closure and return its result, each time the same object.

        Raises:
            ClosureCancelledError: If it was cancelled because another one had failed, or because
                the coordinator was closed.
            WorkerLostError: If it was lost with its worker and none is left that could compute it
                again, or a parameter server is gone.
            Exception: What the closure raised.

        Cancellation:
            Stops waiting; the closure goes on.
        """
        settled = self._closure.settled
        if not settled.done():
            require_loop(settled.get_loop(), self)
        await asyncio.shield(settled)  # others wait for it, too
        packed: Packed | None = None
        while packed is None:
            if self._fetched is not None:
                return self._fetched[0]
            submission = self._closure.submission
            if submission is None:  # its worker is gone
                await self._runner.make_again(self._closure)
                continue
            try:
                packed = await submission.result()
            except WorkerLostError:
                if self._closure.submission is submission:
                    self._closure.submission = None
            except ClosureFailedError as failure:  # in another run, after its worker was lost
                raise error_of(failure, self._closure, self._side) from failure
        found: T = await _unpacked(packed, self._side)
        if self._fetched is None:  # somebody else may have fetched it meanwhile
            self._fetched = (found,)
            self._closure.submission = None  # the worker may let it go
            self._closure.call = Packed(b"", ())
        return self._fetched[0]

    def done(self) -> bool:
        """Tell whether the closure is over, in whatever way."""
        return self._closure.settled.done()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be an argument of a closure. Pass `await remote.fetch()`."
        )

    def __repr__(self) -> str:
        state = "over" if self.done() else self._closure.state
        return f"<RemoteValue of {self._closure.fn_name} #{self._closure.number} | {state}>"


def error_of(
    failure: ClosureFailedError, closure: ScheduledClosure, side: HomeSide
) -> BaseException:
    """Return what a closure raised, with its traceback there and where that was."""
    from ...devices.processes import RemoteTracebackError  # it needs cloudpickle

    error: BaseException
    try:
        if failure.error is None:
            raise ValueError
        error = unpack(failure.error, side)
    except Exception:  # noqa: BLE001 - what was raised can be told in words only
        error = RuntimeError(failure.words)
    error.__cause__ = RemoteTracebackError(failure.text)
    with suppress(Exception):
        error.add_note(f"Raised in closure #{closure.number} ({closure.fn_name}).")
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    reason = (
        "An iterator has ended" if isinstance(error, Exception) else "That would end this program"
    )
    wrapped = RuntimeError(
        f"The closure {closure.fn_name} #{closure.number} raised {failure.words}. {reason}; catch "
        "it in the closure."
    )
    wrapped.__cause__ = error
    return wrapped


async def _unpacked(packed: Packed, side: HomeSide) -> Any:
    if packed.num_bytes <= UNPACK_HERE_BYTES:
        return unpack(packed, side)
    return await run_on_host(unpack, packed, side)
