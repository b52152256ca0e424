"""The cores this process may use, and which of them a thread is on."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def find_getcpu() -> Callable[[], int] | None:
    """Return the system's function that names the calling thread's core, None if it has none."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    try:
        getcpu: Callable[[], int] = ctypes.CDLL(None).sched_getcpu
    except (AttributeError, OSError, TypeError):
        return None
    return getcpu


def move_away(thread_id: int, core: int) -> None:
    """Move a thread that waits for a core to another one than `core`; it stays free to come back.

    Args:
        thread_id: The system's number of a thread; one that has ended is passed over.
        core: Where it would have to wait.
    """
    try:
        allowed = os.sched_getaffinity(thread_id)
        others = allowed - {core}
        if others:
            os.sched_setaffinity(thread_id, others)
            os.sched_setaffinity(thread_id, allowed)
    except OSError:
        return
