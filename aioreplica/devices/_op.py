"""One op: a function call that a lane runs once, and the future of its result."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Generator
from contextvars import Context, copy_context
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar, final

from ..context import PLACE
from ._drain import is_interrupted, wait_shielded

if TYPE_CHECKING:
    from ._completion import CompletionPort
    from ._lane import Lane
    from ._tracker import OpTracker

T = TypeVar("T")
LIBRARY = __name__.partition(".")[0] + "."


@final
class Op(asyncio.Future[T]):
    """A call for a lane: a coroutine to those who await it, a future to `asyncio.gather`.

    Args:
        port: Brings the result back to the event loop.
        fn: The function to call.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        lane: Where to put the op when it is first waited for; None if the maker puts it.
        tracker: Learns when it is put on the lane and when it is done.

    Nothing runs before somebody waits: the first await or done callback puts the op on its lane.
    Being a future it needs no task of its own when many are gathered; having the methods of a
    coroutine it can be given to `create_task` too.

    Invariants:
        * Exactly one of `withdraw` (event loop) and `perform` (lane thread) wins the claim, so an
          op that was withdrawn never starts and a started one always completes.
        * The op holds its arguments until it is done: their buffers are not reused under it.
        * `is_done` becomes true on the event loop, after the call has ended.

    Cancellation:
        A queued op is withdrawn at once. A started one is waited for, then the cancellation goes
        on; only an interrupt of the interpreter abandons it to its daemon thread.
    """

    __slots__ = (
        "_args",
        "_cancel_when_done",
        "_claim",
        "_context",
        "_drained",
        "_error",
        "_fn",
        "_is_awaited",
        "_kwargs",
        "_lane",
        "_outcome",
        "_steps",
        "_tracker",
        "_was_withdrawn",
        "is_done",
        "port",
        "seconds",
    )

    def __init__(
        self,
        port: CompletionPort,
        fn: Callable[..., T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        lane: Lane | None = None,
        tracker: OpTracker | None = None,
    ) -> None:
        super().__init__(loop=port.loop)
        self._lane = lane  # None once it is put there
        self._tracker = tracker
        self.port = port
        self._fn = fn
        self._args = args
        self._kwargs = kwargs
        self._context: Context = copy_context()
        self._claim = [True]
        self._error: BaseException | None = None
        self._is_awaited = False
        self._was_withdrawn = False
        self._cancel_when_done = False
        self._drained: list[asyncio.Future[None]] | None = None
        self._steps: Generator[Any, Any, T] | None = None
        self.is_done = False
        self.seconds = 0.0

    @property
    def tracker(self) -> OpTracker | None:
        """What counts the ops of the run that this one belongs to."""
        return self._tracker

    # ---- on the lane's thread ------------------------------------------------------------

    def perform(self) -> bool:
        """Run the call in the calling thread; False if it was withdrawn."""
        if not self.claim():
            return False
        self.run_claimed()
        return True

    def claim(self) -> bool:
        """Take the op, so that it cannot be withdrawn any more; False if it was."""
        try:
            self._claim.pop()
        except IndexError:
            return False
        return True

    def run_claimed(self) -> None:
        """Run the call in the calling thread, which has claimed it."""
        start = perf_counter()
        try:
            self._outcome = self._context.run(self._fn, *self._args, **self._kwargs)
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to the awaiting task
            self._error = error
        self.seconds = perf_counter() - start
        self._args, self._kwargs = (), {}  # let go before anybody learns that the op is done

    def fail_claimed(self, error: BaseException) -> None:
        """End the claimed op with an error instead of running it, as a lost device does."""
        self._error = error
        self._args, self._kwargs = (), {}

    @property
    def fn_name(self) -> str:
        """Name of the function that the op runs; of the user's, while the library's calls one."""
        fn: Any = self._fn
        if str(getattr(fn, "__module__", "")).startswith(LIBRARY):
            fn = next((each for each in self._args if is_of_user(each)), fn)
        return getattr(fn, "__qualname__", None) or type(fn).__qualname__

    @property
    def place(self) -> Any:
        """What was current where the op was made."""
        return self._context.get(PLACE)

    def runs(self, fn: Callable[..., Any]) -> bool:
        """Tell whether this is the function that the op runs."""
        return self._fn is fn

    # ---- on the event loop ---------------------------------------------------------------

    def put(self) -> None:
        """Put the op on its lane, unless it is there or was cancelled before."""
        lane, self._lane = self._lane, None
        if lane is not None and not self.done():
            if self._tracker is not None:
                self._tracker.add(self)
            lane.put(self)

    def withdraw(self) -> bool:
        """Take the op back, once; False if it has started."""
        try:
            self._claim.pop()
        except IndexError:
            return False
        self._was_withdrawn = True
        self._args, self._kwargs = (), {}  # the lane may hold the op for a while
        if self._tracker is not None:
            self._tracker.done(self)
        return True

    def resolve(self) -> None:
        """Wake whoever waits for the op, which has been performed."""
        self.is_done = True
        if self._tracker is not None:
            self._tracker.done(self)
        for waiter in self._drained or ():
            if not waiter.done():
                waiter.set_result(None)
        if self.done():
            return
        error = self._error
        if self._cancel_when_done:
            super().cancel()
        elif error is None:
            self.set_result(self._outcome)
        elif isinstance(error, StopIteration):  # a future cannot carry one
            wrapped = RuntimeError(f"A device op raised StopIteration({error.value!r}).")
            wrapped.__cause__ = error
            self.set_exception(wrapped)
        else:
            self.set_exception(error)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the op: at once if it has not started, else when it has ended.

        A task that awaits a started op is woken at once, and waits for its end by itself.
        """
        if self.done():
            return False
        if self._was_withdrawn or self.withdraw() or self._is_awaited or is_interrupted():
            return super().cancel(msg)
        self._cancel_when_done = True
        return True

    def add_done_callback(
        self, fn: Callable[[Any], object], /, *, context: Context | None = None
    ) -> None:
        """Call `fn` when the op is done; starts it if nobody has waited before."""
        if self._lane is not None:
            self.put()
        super().add_done_callback(fn, context=context)

    def __await__(self) -> Generator[Any, Any, T]:
        self._is_awaited = True
        if self._lane is not None:
            self.put()
        try:
            return (yield from super().__await__())
        except asyncio.CancelledError:
            yield from self._drain().__await__()
            raise

    async def _drain(self) -> None:
        """Wait for the end of a started op whose await was cancelled."""
        if not self.cancelled():  # finished in the same loop cycle, or raised this itself
            if self.done():
                self.exception()
                return
            super().cancel()
        if self._was_withdrawn or self.withdraw() or self.is_done:
            return
        if not await wait_shielded(lambda: self.is_done, self._new_drained):
            replica = PLACE.get().replica
            if replica is not None:
                replica.op_abandoned()

    def _new_drained(self) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = asyncio.Future(loop=self.get_loop())
        self._drained = [*(self._drained or ()), waiter]
        return waiter

    def __del__(self) -> None:
        if self._lane is not None and not self.done():
            warnings.warn(
                f"The call of {self._fn!r} on {self._lane.name} was never awaited, so it did not "
                "run.",
                RuntimeWarning,
                stacklevel=2,
                source=self,
            )
        super().__del__()

    # ---- as a coroutine ------------------------------------------------------------------

    def send(self, value: Any) -> Any:
        """Go on to the next wait; for a task that was given the op as a coroutine."""
        if self._steps is None:
            self._steps = self.__await__()
        return self._steps.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise at the current wait, such as the cancellation of the op's task."""
        if self._steps is None:
            self.cancel()
            self._steps = self.__await__()
        return self._steps.throw(*error)

    def close(self) -> None:
        """End the wait; a queued op is withdrawn."""
        if not self.done():
            self.cancel()
        if self._steps is not None:
            self._steps.close()


def is_of_user(thing: Any) -> bool:
    """Tell whether this is a function that is not the library's own."""
    return callable(thing) and not str(getattr(thing, "__module__", "")).startswith(LIBRARY)
