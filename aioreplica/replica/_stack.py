"""Where a replica is: the stack of its chain of awaits, or of its device thread."""

from __future__ import annotations

import asyncio
import sys
import traceback
from types import FrameType
from typing import Any

from ._seat import Seat

MAX_DEPTH = 64
DEVICE_PROGRAM = "run_device_program"
"""The frame below which a device thread runs what the user wrote."""


def format_stack(work: asyncio.Future[Any] | None) -> str:
    """Format the awaits of a task, outermost first; a future that is no task has no stack."""
    if work is None or work.done():
        return "  (ended)"
    if not isinstance(work, asyncio.Task):
        return "  (a plain function on its device thread)"
    lines = []
    awaited: Any = work.get_coro()
    for _ in range(MAX_DEPTH):
        frame: FrameType | None = getattr(awaited, "cr_frame", getattr(awaited, "gi_frame", None))
        if frame is None:
            break
        summary = traceback.extract_stack(frame, limit=1)[0]
        lines.append(f"  {summary.filename}:{summary.lineno} in {summary.name}: {summary.line}")
        awaited = getattr(awaited, "cr_await", getattr(awaited, "gi_yieldfrom", None))
    return "\n".join(lines) or "  (not started)"


def format_thread_stack(seat: Seat) -> str:
    """Format the frames of a replica's device thread, from the step function inwards."""
    if seat.work is None or seat.work.done():
        return "  (ended)"
    frame = None if seat.thread_id is None else sys._current_frames().get(seat.thread_id)
    if frame is None:
        return "  (not started: its device is busy)"
    found = traceback.extract_stack(frame, limit=MAX_DEPTH)
    starts = [i for i, summary in enumerate(found) if summary.name == DEVICE_PROGRAM]
    lines = found[starts[-1] + 1 :] if starts else found
    shown = [f"  {s.filename}:{s.lineno} in {s.name}: {s.line}" for s in lines]
    return "\n".join(["  (a plain function on its device thread)", *shown])
