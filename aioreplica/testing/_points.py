"""Where a task stands: the chain of frames it is suspended in, in words."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import PurePath
from types import FrameType
from typing import Any, Final

from ._forbidden import is_foreign

MEETING_METHODS: Final = {
    "MeetingPoint.meet",
    "MeetingPoint.wait_for_started",
    "ThreadPoint.meet",
}
"""Where a replica waits in a collective; both know the call."""

AWAITED_METHODS: Final = {
    "Lock.acquire": "Lock",
    "Event.wait": "Event",
    "Condition.wait": "Condition",
    "Semaphore.acquire": "Semaphore",
    "Queue.get": "Queue",
    "Queue.put": "Queue",
    "Queue.join": "Queue",
    "Barrier.wait": "Barrier",
    "Barrier._block": "Barrier",
    "Barrier._wait": "Barrier",
    "TaskGroup.__aexit__": "TaskGroup",
    "MemoryObjectReceiveStream.receive": "MemoryObjectReceiveStream",
    "MemoryObjectSendStream.send": "MemoryObjectSendStream",
    "Future.result": "Future",
    "SimLock.acquire": "Lock",
    "SimRLock.acquire": "RLock",
}
PACKAGES: Final = {
    "_locks": "threading",
    "threading": "threading",
    "queue": "queue",
    "_base": "concurrent.futures",
}
"""By the name of the file; what is neither there nor anyio's is asyncio's."""


def frames_of(task: asyncio.Task[Any]) -> list[FrameType]:
    """Return the frames a task is suspended in, outermost first."""
    return list(_walk(task.get_coro()))


def _walk(thing: Any) -> Iterator[FrameType]:
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


def site_of(frame: FrameType) -> str:
    """Return `file:line`, with the file's name only."""
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"


def own_frame(frames: list[FrameType]) -> FrameType | None:
    """Return the innermost frame of the program itself, not of a library it awaits."""
    for frame in reversed(frames):
        if not is_foreign(frame.f_code.co_filename):
            return frame
    return frames[-1] if frames else None


def call_of(frames: list[FrameType]) -> Any | None:
    """Return the call of the collective that a replica is in, or None."""
    for frame in reversed(frames):
        if frame.f_code.co_qualname in MEETING_METHODS:
            return frame.f_locals.get("call")
    return None


def frame_of(frames: list[FrameType], function: str) -> FrameType | None:
    """Return the innermost frame of a function, by its qualified name."""
    return next((each for each in reversed(frames) if each.f_code.co_qualname == function), None)


def place_of_call(call: Any) -> str:
    """Name the call of a collective and where it is."""
    return f"{call.describe()} at {PurePath(call.file).name}:{call.line}"


def primitive_of(frames: list[FrameType]) -> tuple[str, Any] | None:
    """Return the kind and object of the synchronisation primitive a task waits in, or None.

    The kind has the name of its package, such as "asyncio.Lock". Primitives are made of each
    other; the one that the program itself called counts.
    """
    found: FrameType | None = None
    for frame in frames:
        if not is_foreign(frame.f_code.co_filename):
            found = None
        elif found is None and frame.f_code.co_qualname in AWAITED_METHODS:
            found = frame
    if found is None:
        return None
    file = PurePath(found.f_code.co_filename)
    package = "anyio" if "/anyio/" in str(file) else PACKAGES.get(file.stem, "asyncio")
    kind = f"{package}.{AWAITED_METHODS[found.f_code.co_qualname]}"
    return kind, found.f_locals.get("self")


def point_of(task: asyncio.Task[Any]) -> str:
    """Say where a task stands, such as "merge_call #1 (add)" or "app.py:12"."""
    if task.done():
        return _end_of(task)
    frames = frames_of(task)
    call = call_of(frames)
    if call is not None:
        return place_of_call(call)
    frame = own_frame(frames)
    if frame is None:
        return "an await"
    if frame.f_lasti < 4 and len(frames) == 1 and not _has_begun(task):
        return "its start"
    found = primitive_of(frames)
    kind = f"{found[0].rpartition('.')[2]} at " if found is not None else ""
    return f"{kind}{site_of(frame)}"


def _has_begun(task: asyncio.Task[Any]) -> bool:
    coroutine = task.get_coro()
    return getattr(coroutine, "cr_await", None) is not None


def _end_of(task: asyncio.Task[Any]) -> str:
    if task.cancelled():
        return "its end (cancelled)"
    error = task._exception  # unlike `exception()` this retrieves nothing
    return "its end" if error is None else f"its end ({type(error).__name__})"
