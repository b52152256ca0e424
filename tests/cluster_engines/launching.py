"""Starting workers as their launchers do, and ending whatever a test has left of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAM = str(Path(__file__).with_name("program.py"))
STRATEGY_PROGRAM = str(Path(__file__).with_name("strategy_program.py"))
ULFM = ("--with-ft", "ulfm")
ROOT = str(Path(__file__).parents[2])
LIMIT_S = 240.0


@dataclass
class Launch:
    """What has become of the workers.

    Attributes:
        results: What each said, by rank.
        said: The same in the order of the processes, also if two had one rank.
        codes: The exit status of the launcher, or of each worker where there is none.
        seconds: From the start to the end of all.
        output: Everything on stderr.
    """

    results: dict[int, Any] = field(default_factory=dict)
    said: list[Any] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    seconds: float = 0.0
    output: str = ""


def mpi(
    size: int,
    *arguments: str,
    options: Sequence[str] = (),
    program: str = PROGRAM,
    **variables: str,
) -> Launch:
    """Start workers with the mpirun beside this interpreter."""
    process = started_by_mpi(size, *arguments, options=options, program=program, **variables)
    with process:
        return ended([process])


def started_by_mpi(
    size: int,
    *arguments: str,
    options: Sequence[str] = (),
    program: str = PROGRAM,
    **variables: str,
) -> subprocess.Popen[str]:
    launcher = str(Path(sys.executable).with_name("mpirun"))
    command = [launcher, *options, "--map-by", ":OVERSUBSCRIBE", "-n", str(size)]
    return started([*command, sys.executable, program, *arguments], variables)


def gloo(
    size: int,
    *arguments: str,
    port: int | None = None,
    of_rank: Mapping[int, Mapping[str, str]] | None = None,
    program: str = PROGRAM,
    **variables: str,
) -> Launch:
    """Start workers one by one, with the variables that torchrun sets."""
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port()),
        "WORLD_SIZE": str(size), **variables,
    }  # fmt: skip
    of_rank = of_rank or {}
    processes = [
        started(
            [sys.executable, program, *arguments],
            {**common, "RANK": str(rank), **of_rank.get(rank, {})},
        )
        for rank in range(size)
    ]
    return ended(processes)


def started(command: list[str], variables: Mapping[str, str]) -> subprocess.Popen[str]:
    environment = {
        **os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl": "self,sm", **variables,
    }  # fmt: skip
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def ended(processes: list[subprocess.Popen[str]], limit_s: float = LIMIT_S) -> Launch:
    """Wait for the end; what has not ended then is killed, which is a failure."""
    launch, start = Launch(), time.monotonic()
    errors = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=limit_s - (time.monotonic() - start))
            errors.append(err)
            launch.codes.append(process.returncode)
            for line in out.splitlines():
                if line.startswith("{"):
                    said = json.loads(line)
                    launch.results[said["rank"]] = said["result"]
                    launch.said.append(said["result"])
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    launch.seconds = time.monotonic() - start
    launch.output = "\n".join(errors)
    return launch


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def row_after_shrinking(rank: int, size: int, lost: list[list[int]]) -> dict[str, Any]:
    """Return what a survivor tells that is worker `rank` of `size` now, with 2 replicas each."""
    return {
        "rank": rank,
        "replicas": 2 * size,
        "lost": lost,
        "learned": True,
        "chief": rank == 0,
        "task": [rank, size],
        "copied": "A MultiWorkerMirroredStrategy that has lost workers cannot be cop",
    }
