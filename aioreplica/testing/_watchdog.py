"""The watchdog: interrupts a step of a program that neither awaits nor ends.

Nothing of the kit goes on during a step, so a thread of its own looks at the run from outside. It
counts real time and the processor's, as a step that is slow because the machine is busy, or that
imports a large module, is not a spin.
"""

from __future__ import annotations

import ctypes
import sys
import time
from _thread import allocate_lock, start_new_thread
from pathlib import PurePath
from types import FrameType
from typing import Final, final

from ._errors import StuckStepError
from ._forbidden import is_foreign
from ._simulation import Simulation

LOOK_S: Final = 1.0
STUCK_S: Final = 30.0
"""How long a step may take, in real time; it also has to use half of that of the processor."""
SHOWN: Final = 8
"""How many of its frames are named."""

real_time = time.monotonic
real_process_time = time.process_time


@final
class Watchdog:
    """Looks at the runs of one sandbox, from a thread of its own.

    Args:
        simulation: What runs.

    Attributes:
        stack: Where the step was that was interrupted last, outermost frame first.
        stuck_s: How long it had taken, in real time.
        used_s: How much of the processor the process had used meanwhile, in seconds.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.stack: tuple[str, ...] = ()
        self.stuck_s = self.used_s = 0.0
        self._simulation = simulation
        self._stop = allocate_lock()
        self._stopped = allocate_lock()

    def start(self) -> None:
        """Begin to look."""
        self._stop.acquire()
        self._stopped.acquire()
        start_new_thread(self._look, ())

    def stop(self) -> None:
        """Stop looking, and wait until the thread is gone."""
        self._stop.release()
        self._stopped.acquire()

    def _look(self) -> None:
        try:
            progress, since, used = None, real_time(), real_process_time()
            while not self._stop.acquire(True, LOOK_S):
                now = self._simulation.progress()
                if now is None or now != progress:
                    progress, since, used = now, real_time(), real_process_time()
                    continue
                stuck_s, used_s = real_time() - since, real_process_time() - used
                if stuck_s >= STUCK_S and used_s >= STUCK_S / 2:
                    self.stuck_s, self.used_s = stuck_s, used_s
                    self._interrupt(self._simulation.running_thread())
                    since, used = real_time(), real_process_time()
        finally:
            self._stopped.release()

    def _interrupt(self, ident: int) -> None:
        """Raise the error in a thread, at its next instruction of Python code."""
        self.stack = _stack(sys._current_frames().get(ident))
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ctypes.c_ulong(ident), ctypes.py_object(StuckStepError))


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    """Return the innermost lines of the program that a frame was called from."""
    lines: list[str] = []
    while frame is not None and len(lines) < SHOWN:
        file = frame.f_code.co_filename
        if not is_foreign(file):
            lines.append(f"{PurePath(file).name}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(reversed(lines))
