"""Making HIPS autograd safe across threads: traces numbered by the process, not by depth.

autograd tells the boxes of nested traces apart by the depth at which they were made, counted in a
module global. Two threads that differentiate at the same time both move that counter: a trace can
end up with the number of the one around it, and derivatives of derivatives are then silently wrong.

What autograd needs of these numbers is that an inner trace has a higher one than those around it,
and that no two live traces share one. Numbers that only ever grow have both properties, on any
number of threads, and even where a box crosses from one thread to another. Nothing else in
autograd is shared and written while a function is traced: a node belongs to its trace, and the
tables of derivative rules are filled when modules are imported.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from autograd import tracer

from ..context import REGISTRY

FIRST = 1 << 32  # above every depth that a trace begun before may have


@final
class UniqueTraces:
    """Numbers traces so that no two are ever equal and later ones are higher."""

    __slots__ = ("_last", "_lock")

    def __init__(self) -> None:
        self._last = FIRST
        self._lock = threading.Lock()

    @contextmanager
    def new_trace(self) -> Iterator[int]:
        """Number a trace; what autograd enters around every traced function."""
        with self._lock:
            self._last = number = self._last + 1
        yield number


def separate_threads() -> None:
    """Let autograd number its traces this way from now on, in the whole process.

    Whatever else in the process uses autograd gets the same numbers, which differ from its own
    only in being unique. Idempotent.
    """
    traces = REGISTRY.once("autograd_traces", UniqueTraces)
    tracer.trace_stack.new_trace = traces.new_trace
