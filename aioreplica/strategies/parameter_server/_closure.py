"""A closure on a worker: how its function is run, and what is told of its end."""

from __future__ import annotations

import asyncio
import inspect
import threading
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from ...cluster import ClosureWorker, StateHandle
from ...context import CLOSURE, DEFAULT_PLACE, PLACE
from ...errors import StallError
from ._context import ClosureContext
from ._messages import Stamp
from ._packing import Packed, pack, unpack, unpack_call

MAX_RESULT_BYTES = 1024**3
"""What a closure may return at most: results travel, and are held by the worker and the program."""


@final
class ClosureFailedError(Exception):
    """Error by which an engine learns that a closure raised.

    Args:
        error: What it raised, packed; None if that cannot be pickled.
        text: The traceback.
        words: The error in words.
    """

    def __init__(self, error: Packed | None, text: str, words: str) -> None:
        super().__init__(error, text, words)
        self.error = error
        self.text = text
        self.words = words

    def __repr__(self) -> str:
        return f"ClosureFailedError({self.words!r})"

    __str__ = __repr__


@final
@dataclass(frozen=True, slots=True)
class Closure:
    """A function to be called on a worker, with what it needs there.

    Attributes:
        strategy_id: Tells the strategy from others.
        fn_name: Name of the function.
        is_async: Whether it is an async function.
        call: The function and its arguments, packed.
        stamp: Whose pushes are its own.
        servers: The parameter servers, by number.
        timeout_s: How long it may take, in seconds; None sets no limit.
        worker_index: Index of the worker that it is sent to.
        has_copies: Whether the servers have copies, which have to know what it has changed.
        num_made: How many servers were made so far, which tells values of before apart.
    """

    strategy_id: str
    fn_name: str
    is_async: bool
    call: Packed
    stamp: Stamp
    servers: tuple[StateHandle, ...]
    timeout_s: float | None
    worker_index: int = 0
    has_copies: bool = False
    num_made: int = 0

    def run(self, worker: ClosureWorker) -> Packed:
        """Call the function in this thread, an async one on an event loop of its own."""
        if self.timeout_s is None:
            return self._run(worker, ClosureContext(self, worker))
        return _within(self.timeout_s, self, ClosureContext(self, worker), worker)

    def _run(self, worker: ClosureWorker, context: ClosureContext) -> Packed:
        with _reported(context):
            fn, args, kwargs = unpack_call(self.call, context)
            result = fn(*args, **kwargs)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            context.confirm()
            return _pack_result(result, context)

    async def run_on_loop(self, worker: ClosureWorker) -> Packed:
        """Await the function on the running loop."""
        context = ClosureContext(self, worker)
        with _reported(context):
            fn, args, kwargs = unpack_call(self.call, context)
            limit = asyncio.timeout(self.timeout_s)
            try:
                async with limit:
                    result = await fn(*args, **kwargs)
                    context.confirm()
                    return _pack_result(result, context)
            except TimeoutError:
                if not limit.expired():  # it is the function's own
                    raise
                raise _too_slow(self, worker, "") from None


def _pack_result(result: Any, context: ClosureContext) -> Packed:
    try:
        packed = pack(result, context)
    except Exception as error:  # noqa: BLE001 - whatever a `__reduce__` raises
        from ...devices.processes import obstacle

        where = obstacle({"its result": result}, context, error)[0]
        raise TypeError(
            f"The closure {context.closure.fn_name} cannot return what it did: {where}. Return "
            "arrays and plain data."
        ) from None
    if packed.num_bytes > MAX_RESULT_BYTES:
        raise ValueError(
            f"The closure {context.closure.fn_name} returned {packed.num_bytes / 2**30:.2f} GiB, "
            f"more than {MAX_RESULT_BYTES / 2**30:g} GiB. Return less, or write it to a variable "
            "or a file."
        )
    return packed


@contextmanager
def _reported(context: ClosureContext) -> Any:
    """Run a block as the closure; what it raises, of any kind, becomes a ClosureFailedError."""
    place, closure = PLACE.set(DEFAULT_PLACE), CLOSURE.set(context)
    try:
        yield
    except asyncio.CancelledError as error:
        if _is_cancelled_by_loop():
            raise
        raise _failed(error, context) from None
    except BaseException as error:  # noqa: BLE001 - Dask tells the program of Exceptions only
        raise _failed(error, context) from None
    finally:
        context.end("is over")
        CLOSURE.reset(closure)
        PLACE.reset(place)


def _is_cancelled_by_loop() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0


def _failed(error: BaseException, context: ClosureContext) -> ClosureFailedError:
    trace = error.__traceback__
    own = trace.tb_next if trace is not None else None
    text = "".join(traceback.format_exception(type(error), error, own))
    words = "".join(traceback.format_exception_only(error)).strip()
    packed: Packed | None
    try:
        packed = pack(error, context)
        unpack(packed, context)
    except Exception:  # noqa: BLE001 - then its words have to do
        packed = None
    return ClosureFailedError(packed, text, words)


async def _awaited(result: Any) -> object:
    return await result


# ---- a limit in time ---------------------------------------------------------------------------


def _within(
    timeout_s: float, closure: Closure, context: ClosureContext, worker: ClosureWorker
) -> Packed:
    """Run a closure in a thread of its own, which is left alone if it takes too long."""
    results: list[Packed] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(closure._run(worker, context))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            failures.append(error)

    thread = threading.Thread(target=work, name=f"closure {closure.fn_name}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        context.end(f"has taken longer than its {timeout_s:g} s")
        stack = _stack_of(thread)
        error = _too_slow(closure, worker, stack)
        raise ClosureFailedError(pack(error, context), stack, str(error))
    if failures:
        raise failures[0]
    return results[0]


def _stack_of(thread: threading.Thread) -> str:
    import sys

    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame))


def _too_slow(closure: Closure, worker: ClosureWorker, stack: str) -> StallError:
    return StallError(
        f"The closure {closure.fn_name} on {worker.name} has not ended within "
        f"{closure.timeout_s:g} s. It is left to itself, and what it writes from now on is "
        "dropped.",
        timeout_s=closure.timeout_s,
        stacks=(stack,) if stack else (),
    )
