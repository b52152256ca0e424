"""What device tests share: a lane of one's own, an op under control, a fresh interpreter."""

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from aioreplica.devices import CompletionQueue, Lane, lane_table, run_on_lane

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60


class GatedOp:
    """An op that tells the loop when it starts, and ends when the test says so."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._gate = threading.Event()
        self.started = asyncio.Event()
        self.has_ended = False
        self.error: BaseException | None = None

    def __call__(self) -> str:
        self._loop.call_soon_threadsafe(self.started.set)
        assert self._gate.wait(LIMIT_S), "the test never released the op"
        self.has_ended = True
        if self.error is not None:
            raise self.error
        return "result"

    def release(self) -> None:
        self._gate.set()


@pytest.fixture
def new_gated_op() -> Iterator[Callable[[], GatedOp]]:
    """Make ops under control; every one is released when the test ends."""
    made: list[GatedOp] = []

    def make() -> GatedOp:
        made.append(GatedOp())
        return made[-1]

    yield make
    for op in made:
        op.release()


@pytest_asyncio.fixture
async def gated_op(new_gated_op: Callable[[], GatedOp]) -> AsyncIterator[GatedOp]:
    op = new_gated_op()
    yield op
    op.release()


@pytest.fixture
def lane() -> Iterator[Lane]:
    """A lane that nobody else uses."""
    lane = Lane("test:0")
    yield lane
    lane.stop()
    lane.join(LIMIT_S)


@pytest.fixture
def lane_names() -> Iterator[tuple[str, str]]:
    """Two lanes of the process that nobody else uses."""
    names = ("test:1", "test:2")
    lane_table().acquire(names)
    yield names
    lane_table().release(names)


@pytest.fixture
def run_on() -> Callable[..., Any]:
    """Run a function on a lane: the one place that knows how the library does it."""

    def run_on(lane: Lane, fn: Callable[..., Any], *args: Any) -> Coroutine[Any, Any, Any]:
        return run_on_lane(lane, CompletionQueue.of_running_loop(), fn, args, {})

    return run_on


@pytest.fixture
def run_script() -> Callable[[str], str]:
    """Run a program in a fresh interpreter; give what it printed."""

    def run(source: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(source)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,  # a process in the background ends when a core has nothing else to do
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
        return done.stdout

    return run
