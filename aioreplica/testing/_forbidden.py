"""Refusal of calls that reach outside the process, which a simulated loop cannot make."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from ._errors import RealIOError

_PACKAGE = __file__.rpartition("/testing/")[0] + "/"
_STANDARD = tuple({sys.base_prefix + "/lib/", sys.prefix + "/lib/", "<frozen"})

_WAITS_IN_C = frozenset({
    "select.select", "poll.poll", "epoll.poll", "_signal.sigwait", "_signal.sigwaitinfo",
    "_signal.sigtimedwait", "RustNotify.watch",
})  # fmt: skip


def wait_in_c(called: object) -> str:
    """Return a note on a function that waits in C for what no schedule decides about; else ""."""
    name = getattr(called, "__qualname__", "")
    if "." not in name:
        name = f"{getattr(called, '__module__', '')}.{name}"
    if name not in _WAITS_IN_C:
        return ""
    return (
        f"The program calls {name}, which waits in C for what is real: no schedule decides when it "
        "goes on, and nothing else does meanwhile. Put a stub in its place."
    )


def is_foreign(file: str) -> bool:
    """Tell whether a file is this package's, the standard library's or anyio's."""
    if file.startswith(_PACKAGE) or "/anyio/" in file:
        return True
    return file.startswith(_STANDARD) and "-packages" not in file


def call_site(frame: FrameType | None = None) -> str:
    """Return `file:line` of the innermost call in the program under test, here or in `frame`.

    A call in a pool that has no line of the program is where a task awaits it. Below the frames of
    a run there is only who explores, who has called nothing.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        if not is_foreign(name):
            return f"{name}:{frame.f_lineno}"
        if name.startswith(_PACKAGE + "testing/"):
            if function == "perform":
                return _awaited_at(frame.f_locals["self"])
            if function == "run_until":
                break
        frame = frame.f_back
    return "unknown"


def _awaited_at(op: Any) -> str:
    """Return the line at which a task awaits a call in a pool."""
    for callback, _ in getattr(op.future, "_callbacks", None) or ():
        task = getattr(callback, "__self__", None)
        if isinstance(task, asyncio.Task):
            for frame in reversed([*suspended_frames(task.get_coro())]):
                if not is_foreign(frame.f_code.co_filename):
                    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "unknown"


def suspended_frames(coroutine: object) -> Iterator[FrameType]:
    """Yield the frames of a suspended coroutine, or generator, and of what it awaits."""
    thing: object = coroutine
    while thing is not None:
        frame = getattr(thing, "cr_frame", None) or getattr(thing, "gi_frame", None)
        frame = frame or getattr(thing, "ag_frame", None)
        if frame is not None:
            yield frame
        following = getattr(thing, "cr_await", None)
        if following is None:
            following = getattr(thing, "gi_yieldfrom", None)
        if following is None:
            following = getattr(thing, "ag_await", None)
        thing = following


def is_importing() -> bool:
    """Tell whether a module is being imported, which happens once and is part of no schedule."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load":
            return True
        frame = frame.f_back
    return False


def refuse(what: str, instead: str = "") -> NoReturn:
    """Raise the error for something real."""
    raise refusal(what, instead)


def refusal(what: str, instead: str = "", frame: FrameType | None = None) -> RealIOError:
    """Return the error for something real that was called here, or in `frame`."""
    site = call_site(frame)
    advice = instead or "Put an object of your own in its place that the test can control."
    return RealIOError(
        f"{what} at {site} would leave the simulation: no schedule could decide when it answers. "
        f"{advice}",
        site=site,
    )


def _refusal(what: str) -> Any:
    def method(self: object, *args: object, **kwargs: object) -> NoReturn:
        refuse(what)

    return method


class ForbiddenIO:
    """The methods of an event loop that need the world outside, each raising `RealIOError`."""

    connect_read_pipe = _refusal("A pipe")
    connect_write_pipe = _refusal("A pipe")
    subprocess_exec = _refusal("A subprocess")
    subprocess_shell = _refusal("A subprocess")
    add_signal_handler = _refusal("A signal handler")
    remove_signal_handler = _refusal("A signal handler")
    run_until_complete = _refusal("Running the loop that runs already")
    run_forever = _refusal("Running the loop that runs already")
