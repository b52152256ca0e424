"""Refusal of calls that reach outside the process, which a simulated loop cannot make."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NoReturn

from ._errors import RealIOError

_PACKAGE = __file__.rpartition("/testing/")[0] + "/"
_STANDARD = tuple({sys.base_prefix + "/lib/", sys.prefix + "/lib/", "<frozen"})


def is_foreign(file: str) -> bool:
    """Tell whether a file is this package's, the standard library's or anyio's."""
    if file.startswith(_PACKAGE) or "/anyio/" in file:
        return True
    return file.startswith(_STANDARD) and "-packages" not in file


def call_site(frame: FrameType | None = None) -> str:
    """Return `file:line` of the innermost call in the program under test, here or in `frame`."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not is_foreign(name):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


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
    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
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
