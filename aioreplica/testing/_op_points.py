"""Where an op stands still: what its thread waits for, in words."""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from ._forbidden import is_foreign
from ._points import AWAITED_METHODS, call_of, frame_of, own_frame, place_of_call, site_of

if TYPE_CHECKING:
    from ._pools import PoolOp

LIBRARY_WAITS: Final = {
    "Infeed.take": "the infeed",
    "ThreadFiller._fill": "room in the infeed",
    "SimLane.lend": "its lane, which it has lent to other ops",
}


def frames_of_op(op: PoolOp) -> list[FrameType]:
    """Return the frames that an op stands still in, outermost first."""
    frame = op.run.thread.frame() if op.run is not None else None
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    frames.reverse()
    return frames


def call_of_op(frames: list[FrameType]) -> Any | None:
    """Return the call of the collective that an op waits in, or None."""
    return call_of(_called_by(frames))


def site_of_op(frames: list[FrameType]) -> str:
    """Return `file:line` of the program's own line that an op stands still in."""
    frame = _own(frames)
    return site_of(frame) if frame is not None else "-"


def wait_of_library(frames: list[FrameType]) -> str:
    """Say what an op waits for that the library has it wait for; "" if it is none of that."""
    inner = _called_by(frames)
    host = frame_of(inner, "ThreadPoint.call_on_host")
    if host is not None:
        return str(host.f_locals["name"]).removeprefix("aioreplica ")
    bridge = frame_of(inner, "BlockingContext._meet_on_loop")
    if bridge is not None:
        return f"blocking {bridge.f_locals['collective'].name}"
    return next((words for name, words in LIBRARY_WAITS.items() if frame_of(inner, name)), "")


def _own(frames: list[FrameType]) -> FrameType | None:
    frame = own_frame(frames)
    return None if frame is None or is_foreign(frame.f_code.co_filename) else frame


def _called_by(frames: list[FrameType]) -> list[FrameType]:
    """Return what the program's own innermost frame has called."""
    frame = _own(frames)
    return frames if frame is None else frames[frames.index(frame) + 1 :]


def point_of_op(op: PoolOp) -> str:
    """Say where an op stands, such as "all_reduce #1 at step.py:12" or "app.py:12"."""
    frames = frames_of_op(op)
    call = call_of_op(frames)
    if call is not None:
        return place_of_call(call)
    site, words = site_of_op(frames), wait_of_library(frames)
    if not words:
        names = [each.f_code.co_qualname for each in _called_by(frames)]
        words = next((AWAITED_METHODS[name] for name in names if name in AWAITED_METHODS), "")
    if site == "-":
        return words or "a wait"
    return f"{words} at {site}" if words else site
