"""The training service as a process, for tests of it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Service:
    process: subprocess.Popen[str]
    url: str
    data: Path

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=60)


@contextmanager
def serving(data: Path, *options: str) -> Iterator[Service]:
    """Run the service until the block ends; nothing may have been printed as an error."""
    command = [sys.executable, "-W", "error", "-m", "examples.training_service", "--port", "0"]
    with subprocess.Popen(
        [*command, "--data", str(data), "--devices", "2", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "http://" in line, process.communicate()
            yield Service(process, line.partition(" at ")[2].partition(",")[0], data)
        finally:
            process.kill()
            errors = process.communicate()[1]
    assert errors == ""
