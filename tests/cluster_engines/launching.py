"""Starting workers as their launchers do, and ending whatever a test has left of them.

Run as a program, this forks the workers of Gloo: torch takes seconds to import, and does so once,
and so does most of what their programs import beside it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

PROGRAM = str(Path(__file__).with_name("program.py"))
STRATEGY_PROGRAM = str(Path(__file__).with_name("strategy_program.py"))
ULFM = ("--with-ft", "ulfm")
# Shared memory is for those of one launch only; and MPI spins while others start, maybe for long.
BEYOND_ONE_LAUNCH = {"OMPI_MCA_btl": "self,sm,tcp", "TEST_TIMEOUT_S": "100"}
PR_SET_CHILD_SUBREAPER = 36
ROOT = str(Path(__file__).parents[2])
LIMIT_S = 240.0
MEMORY = Path("/dev/shm")  # where the system has one: no timeout is for a slow disk


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

    def hear(self, line: str) -> None:
        """Take one line of a worker's stdout; only what it says in JSON counts."""
        if line.startswith("{"):
            said = json.loads(line)
            self.results[said["rank"]] = said["result"]
            self.said.append(said["result"])


def mpi(
    size: int,
    *arguments: str,
    options: Sequence[str] = (),
    program: str = PROGRAM,
    limit_s: float = LIMIT_S,
    **variables: str,
) -> Launch:
    """Start workers with the mpirun beside this interpreter."""
    process = started_by_mpi(size, *arguments, options=options, program=program, **variables)
    with process:
        return ended([process], limit_s)


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
    limit_s: float = LIMIT_S,
    **variables: str,
) -> Launch:
    """Start workers with the variables that torchrun sets, as forks of one process."""
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or free_port()),
        "WORLD_SIZE": str(size), **variables,
    }  # fmt: skip
    of_rank = of_rank or {}
    environments = [{**common, "RANK": str(n), **of_rank.get(n, {})} for n in range(size)]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        codes = SERVER.fork(folder, program, arguments, environments, limit_s)
        launch = Launch(codes=codes, seconds=time.monotonic() - start)
        for rank in range(size):
            for line in _text(folder, f"out{rank}").splitlines():
                launch.hear(line)
            launch.output += _text(folder, f"err{rank}")
    return launch


def _text(folder: str, name: str) -> str:
    path = Path(folder, name)
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


class Server:
    """The process that forks, from the first launch to the end of this one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def fork(
        self,
        folder: str,
        program: str,
        arguments: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        limit_s: float,
    ) -> list[int]:
        """Return the exit statuses of the workers; none if they had to be killed, all of them."""
        if self._process is not None and self._process.poll() is not None:
            self.close()  # something has ended it since
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
            atexit.register(self.close)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{json.dumps([folder, program, arguments, environments])}\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], limit_s)
        if not ready:
            self.close()
            return []
        line = process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError("The process that forks workers ended before they had.")
        codes: list[int] = json.loads(line)
        return codes

    def close(self) -> None:
        """End the process, with all that it has forked."""
        process, self._process = self._process, None
        if process is not None:
            atexit.unregister(self.close)
            with process, suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


SERVER = Server()


def serve() -> None:
    """Fork the workers of each line; each of them ends as a program does, by what left it."""
    import torch.distributed  # noqa: F401 - once for all

    import aioreplica as ar
    from tests.checkpoint import simulated_files  # noqa: F401
    from tests.cluster import communicator_contract  # noqa: F401

    for name in ("cluster", "errors", "MultiWorkerMirroredStrategy", "optimizers"):
        getattr(ar, name)  # which imports it

    gc.freeze()  # for the forks
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # theirs are ours behind their end
    for line in sys.stdin:
        folder, program, arguments, environments = json.loads(line)
        workers: list[int] = []
        for number, environment in enumerate(environments):
            workers.append(os.fork())
            if not workers[-1]:
                for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
                    path = f"{folder}/{name}{number}"
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
                os.environ.update(environment)
                sys.argv = [program, *arguments]
                sys.orig_argv[1:] = sys.argv  # which starts one more
                signal.signal(signal.SIGINT, signal.default_int_handler)
                runpy.run_path(program, run_name="__main__")
                return
        codes: dict[int, int] = {}
        while left := psutil.Process().children():  # and those that they have started and left
            is_stopped = [each.status() == psutil.STATUS_STOPPED for each in left]
            if codes and all(is_stopped):  # nothing else ends them
                for each in left:
                    each.kill()
            worker, status = os.waitpid(-1, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                codes[worker] = os.waitstatus_to_exitcode(status)
        print(json.dumps([codes[worker] for worker in workers]), flush=True)


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
                launch.hear(line)
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
        "copied": "A MultiWorkerMirroredStrategy whose workers have changed cannot be"[:65],
    }


if __name__ == "__main__":
    serve()
