"""Processes of workers: which of them are on this host, starting more, ending one that hangs."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..context import REGISTRY
from ..errors import ContextError
from ._transport import LOGGER, WARN_S

FOLDER = "."  # in which the paths of the command line are meant
with suppress(OSError):  # it was deleted
    FOLDER = str(Path.cwd())


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


def end_hanging(rank: int, process: ProcessId) -> None:
    """Kill the process of a worker that hangs, if it is on this host."""
    if end_process(process):
        LOGGER.warning("Worker %d hangs: its process %d was killed.", rank, process.number)


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


def own_command() -> list[str]:
    """Return the command that starts a process as this one was started, in `FOLDER`."""
    return [sys.executable, *sys.orig_argv[1:]]


def require_own_program(what: str) -> None:
    """Check that this process can be started once more.

    Raises:
        ContextError: If it has no program: it reads from a terminal, or a pipe.
    """
    if sys.argv[:1] in ([], [""], ["-"]):
        raise ContextError(
            f"{what} starts workers with the command line of this one, which has no program: it "
            "is read from a terminal or a pipe. Put it into a file."
        )


def start_worker(variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start one more process as this one was, which waits for it before it ends.

    Args:
        variables: Of the environment, besides those of this process.
    """
    held = REGISTRY.once("started_workers", dict[int, list[subprocess.Popen[bytes]]])
    if os.getpid() not in held:
        held[os.getpid()] = []
        atexit.register(_wait_for, held[os.getpid()], os.getpid())
    started = held[os.getpid()]
    started[:] = [each for each in started if each.poll() is None]
    process = subprocess.Popen(
        own_command(), stdin=subprocess.DEVNULL, env={**os.environ, **variables}, cwd=FOLDER
    )
    started.append(process)
    return process


def _wait_for(started: list[subprocess.Popen[bytes]], parent: int) -> None:
    """Wait for the processes that this one has started: its end may be that of its container."""
    for process in started if parent == os.getpid() else ():
        with suppress(subprocess.TimeoutExpired):
            process.wait(WARN_S)
            continue
        LOGGER.warning(
            "This worker has ended, and waits for process %d, a worker that it has started.",
            process.pid,
        )
        process.wait()


def _start_of(number: int) -> str:
    """Return the 22nd field of the system's line on a process, behind its name in brackets."""
    line = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
    return line.rpartition(")")[2].split()[19]
