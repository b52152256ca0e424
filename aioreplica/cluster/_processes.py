"""Processes of workers: which of them are on this host, and ending one that hangs."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class ProcessId(NamedTuple):
    """Identity of a process among all others, of any host and time.

    Attributes:
        space: The start of the system, and the namespace that counts its processes; empty where
            the system does not tell.
        number: Its number there.
        start: When it was started, in ticks of the system.
    """

    space: str
    number: int
    start: str


def this_process() -> ProcessId:
    """Return the identity of this process."""
    space = start = ""
    with suppress(OSError):  # no Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        start = _start_of(os.getpid())
        space = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ProcessId(space, os.getpid(), start)


def end_process(process: ProcessId) -> bool:
    """Kill a process, if it is on this host and still there; tell whether it was."""
    here = this_process()
    if not here.space or process.space != here.space or process.number == here.number:
        return False
    with suppress(OSError):
        if _start_of(process.number) == process.start:
            os.kill(process.number, signal.SIGKILL)
            return True
    return False


def _start_of(number: int) -> str:
    """Return the 22nd field of the system's line on a process, behind its name in brackets."""
    line = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
    return line.rpartition(")")[2].split()[19]
