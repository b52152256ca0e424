"""A running program of a peer: asked in lines of JSON."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from types import TracebackType
from typing import Any, Self, final

import psutil

from ._cases import OURS, Peer

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CLOSE_S = 20.0


class ProgramError(RuntimeError):
    """A peer's program ended; says what it wrote."""


@final
class Program:
    """One peer with one number of replicas, in a process of its own until the block ends.

    Args:
        peer: Whose program it is.
        interpreter: Of its environment.
        num_replicas: How many replicas it makes.
    """

    def __init__(self, peer: Peer, interpreter: str, num_replicas: int) -> None:
        self.name = peer.name
        program = peer.program or (OURS if peer.is_ours else peer.name)
        file = HERE / "programs" / f"{program}_program.py"
        arguments = [str(num_replicas), *([peer.library] if peer.library else [])]
        self._errors = TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed at the end
        begin = perf_counter()
        self._process = subprocess.Popen(
            [interpreter, str(file), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore",
                 **peer.environ},
        )  # fmt: skip
        self._read()
        self.start_s = perf_counter() - begin

    def make(self, task: str, mode: str, settings: Any) -> dict[str, Any]:
        """Let it prepare a task and check itself; return what the checks gave."""
        return self._ask({"make": {"task": task, "mode": mode, **settings}})

    def sample(self, mode: str, seconds: float) -> float:
        """Let it work in a way it has prepared; return microseconds per unit."""
        found: float = self._ask({"mode": mode, "seconds": seconds})["us"]
        return found

    def drop(self) -> None:
        """Let it forget what it has prepared."""
        self._ask({})

    def memory(self) -> int:
        """Return the bytes that it and its child processes hold, shared pages by their share."""
        process = psutil.Process(self._process.pid)
        found = [process, *process.children(recursive=True)]
        return sum(each.memory_full_info().pss for each in found)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # what it wrote before it ended says more
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        self._errors.seek(0)
        raise ProgramError(f"{self.name} ended: {self._errors.read()[-2000:]}")
