"""Whole programs with the embedded cluster: however they end, no process of theirs is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0
PROGRAM = """
import asyncio, sys, time
import numpy as np
import aioreplica as ar


def work(count, seconds):
    count.assign_add(1.0)
    time.sleep(seconds)


async def main(end):
    async with ar.ParameterServerStrategy(num_ps=1, num_workers=2) as strategy:
        with strategy.scope():
            count = ar.Variable(np.zeros(()), name="count")
        async with ar.ClusterCoordinator(strategy) as coordinator:
            for _ in range(4):
                await coordinator.schedule(work, (count, 0.01))
            await coordinator.join()
            print("count", float(await count.read()), flush=True)
            if end == "return":
                return
            if end == "raise":
                raise ValueError("enough")
            if end == "exit":
                sys.exit(3)
            for _ in range(4):
                await coordinator.schedule(work, (count, 60.0))
            print("busy", flush=True)
            await coordinator.join()


async def forget():
    strategy = ar.ParameterServerStrategy(num_ps=1, num_workers=2)
    coordinator = await ar.ClusterCoordinator(strategy).__aenter__()
    await (await coordinator.schedule(abs, (-1,))).fetch()
    print("count 4.0", flush=True)


if __name__ == "__main__":
    asyncio.run(forget() if sys.argv[1] == "forget" else main(sys.argv[1]))
"""


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program; whatever it started has to be gone in the end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # not ignored
    process = subprocess.Popen(
        [sys.executable, *command], env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        for each in family_of(process.pid):
            each.kill()


def family_of(session: int) -> list[psutil.Process]:
    """Return the processes of a session."""
    found = []
    for each in psutil.process_iter():
        try:
            if os.getsid(each.pid) == session and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(process.communicate())


def assert_none_left(session: int, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while family_of(session) and time.monotonic() < end:
        threading.Event().wait(0.05)
    assert [each.cmdline() for each in family_of(session)] == []


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [("return", 0, ""), ("raise", 1, "ValueError: enough"), ("exit", 3, ""), ("forget", 0, None)],
)
def test_programs_that_end(program: str, end: str, code: int, text: str | None) -> None:
    with running(program, end) as process:
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == code, err
        assert "count 4.0" in out
        if text is not None:
            assert err.strip().splitlines()[-1:] == ([text] if text else []), err
        assert_none_left(process.pid)


@pytest.mark.parametrize("whom", ["program", "session"])
def test_ctrl_c_in_the_middle_of_closures(program: str, whom: str) -> None:
    """A terminal sends it to all processes; a supervisor to one."""
    with running(program, "busy") as process:
        until(process, "busy")
        if whom == "session":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode in {130, -signal.SIGINT, 1}
        assert err.strip().endswith("KeyboardInterrupt"), err
        assert_none_left(process.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_that_is_ended(program: str, number: int) -> None:
    with running(program, "busy") as process:
        until(process, "busy")
        process.send_signal(number)
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == -number
        assert_none_left(process.pid)


EXAMPLE = str(ROOT / "examples" / "recommender_ps.py")


@pytest.mark.parametrize("options", [(), ("--workers", "1")], ids=" ".join)
def test_the_recommender(tmp_path: Path, options: tuple[str, ...]) -> None:
    figure = tmp_path / "roc.png"
    options = ("--epochs", "1", "--batch-size", "1024", *options)
    with running(EXAMPLE, "--output", str(figure), *options) as process:
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
        assert err == ""
        assert "area under it: 0." in out
        assert figure.read_bytes().startswith(b"\x89PNG")
        assert_none_left(process.pid)


def test_ctrl_c_in_the_recommender(tmp_path: Path) -> None:
    figure = tmp_path / "roc.png"
    with running(EXAMPLE, "--epochs", "1000", "--output", str(figure)) as process:
        end = time.monotonic() + LIMIT_S
        while len(family_of(process.pid)) < 4 and time.monotonic() < end:
            threading.Event().wait(0.05)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 130, err
        assert "Interrupted" in out
        assert not figure.exists()
        assert_none_left(process.pid)
