"""Description of the point at which a task or an op is suspended: its chain of frames, in words."""

from __future__ import annotations

import asyncio
from pathlib import PurePath
from types import FrameType, GetSetDescriptorType
from typing import Final

from ._forbidden import is_foreign, suspended_frames
from ._pools import PoolOp

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
    "SimPool.wait_until_idle": "Executor",
    "SimLock.acquire": "Lock",
    "SimRLock.acquire": "RLock",
}
"""Where code waits in asyncio, anyio, `threading` and `queue`, which have no observers."""
PACKAGES: Final = {
    "_locks": "threading",
    "threading": "threading",
    "queue": "queue",
    "_base": "concurrent.futures",
    "_pools": "concurrent.futures",
}
"""By the name of the file; what is neither there nor anyio's is asyncio's."""


def frames_of(participant: asyncio.Task[object] | PoolOp) -> list[FrameType]:
    """Return the frames a task or an op is suspended in, outermost first."""
    if not isinstance(participant, PoolOp):
        return [] if participant.done() else list(suspended_frames(participant.get_coro()))
    frame = participant.run.thread.frame() if participant.run is not None else None
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    frames.reverse()
    return frames


def site_of(participant: asyncio.Task[object] | PoolOp) -> str:
    """Return `file:line` of the program's own innermost line, with the file's name only."""
    frames = frames_of(participant)
    frame = own_frame(frames)
    if frame is None and frames and not isinstance(participant, PoolOp):
        frame = frames[-1]
    return "-" if frame is None else _place_of(frame, frames)


def _place_of(frame: FrameType, frames: list[FrameType]) -> str:
    """Return `file:line` of a frame; in a library, after the line of the program that led there."""
    line = _line_of(frame)
    if not _is_installed(frame):
        return line
    caller = next(
        (
            each
            for each in reversed(frames)
            if not (is_foreign(each.f_code.co_filename) or _is_installed(each))
        ),
        None,
    )
    return line if caller is None else f"{_line_of(caller)} > {line}"


def _is_installed(frame: FrameType) -> bool:
    """Return True if a frame is of a package that was installed, not of the program."""
    return "site-packages" in frame.f_code.co_filename


def _line_of(frame: FrameType) -> str:
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"


def own_frame(frames: list[FrameType]) -> FrameType | None:
    """Return the innermost frame of the program itself, not of a library it awaits."""
    return next(
        (frame for frame in reversed(frames) if not is_foreign(frame.f_code.co_filename)), None
    )


def primitive_of(frames: list[FrameType]) -> tuple[str, object] | None:
    """Return the kind and object of the synchronisation primitive waited for, or None.

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


def name_in(frame: FrameType, wanted: object) -> str:
    """Return the local variable, or the attribute of `self`, that holds an object; or ""."""
    for name, value in frame.f_locals.items():
        if name != "self":
            if value is wanted:
                return name
            continue
        for attribute, held in attributes_in(value).items():
            if held is wanted and value is not wanted:
                return f"{type(value).__name__}.{attribute}"
    return ""


def attributes_in(value: object) -> dict[str, object]:
    """Return an object's own `__dict__`, or {}, without calling code of its class.

    A class may have a `__dict__`, `__class__` or `__getattr__` of its own, which raises: that of a
    proxy whose context is not set.
    """
    for cls in type(value).__mro__:
        own = vars(cls).get("__dict__")
        if own is not None:
            return dict(own.__get__(value)) if type(own) is GetSetDescriptorType else {}
    return {}


def point_of(participant: asyncio.Task[object] | PoolOp, awaits: str = "") -> str:
    """Say where a task or an op stands, such as "merge_call #1 (add) at app.py:12" or "app.py:12".

    Args:
        participant: The task or op.
        awaits: What it awaits inside aioreplica, where that is known.
    """
    if not isinstance(participant, PoolOp) and participant.done():
        return _end_of(participant)
    frames = frames_of(participant)
    frame = own_frame(frames)
    found = primitive_of(frames)
    what = awaits or ("" if found is None else found[0].rpartition(".")[2])
    if isinstance(participant, PoolOp):
        if frame is None:
            return what or "a wait"
    else:
        frame = frame or (frames[-1] if frames else None)
        if frame is None:
            return "an await"
        if frame.f_lasti < 4 and len(frames) == 1 and not _has_begun(participant):
            return "its start"
    place = _place_of(frame, frames)
    return f"{what} at {place}" if what else place


def inner_line_of(task: asyncio.Task[object]) -> str:
    """Return the innermost line of a task where that is inside asyncio or anyio; else ""."""
    frames = frames_of(task)
    is_inside = frames and is_foreign(frames[-1].f_code.co_filename)
    return _line_of(frames[-1]) if is_inside else ""


def line_of_error(error: BaseException) -> tuple[str, int]:
    """Return file and number of the innermost line of the program that an error came through."""
    found = ("", 0)
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not is_foreign(file):
            found = file, traceback.tb_lineno
        traceback = traceback.tb_next
    return found


def describe_error(error: BaseException) -> str:
    """Return an exception as code, and its line in the program."""
    try:
        shown = repr(error)
    except Exception:  # noqa: BLE001 - the program's own class
        shown = type(error).__qualname__
    file, line = line_of_error(error)
    return f"{shown} at {PurePath(file).name}:{line}" if file else shown


def _has_begun(task: asyncio.Task[object]) -> bool:
    coroutine = task.get_coro()
    return getattr(coroutine, "cr_await", None) is not None


def _end_of(task: asyncio.Task[object]) -> str:
    if task.cancelled():
        return "its end (cancelled)"
    error = task._exception  # unlike `exception()` this retrieves nothing
    return "its end" if error is None else f"its end ({type(error).__name__})"
