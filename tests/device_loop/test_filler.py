"""Who advances and who closes the iterator of a device loop, and what is left of that."""

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import aioreplica as ar
from tests.replica.gated import me, spawn

pytestmark = pytest.mark.usefixtures("no_task_left")

ROOT = Path(__file__).resolve().parents[2]


def nothing(ctx: ar.MultiStepContext, *inputs: Any) -> None:
    """A step that does nothing."""


class Numbers:
    """An iterable: every loop over it begins anew."""

    def __init__(self) -> None:
        self.advanced: set[int] = set()
        self.closed: list[int] = []

    def __iter__(self) -> Iterator[int]:
        try:
            for number in range(100):
                self.advanced.add(threading.get_ident())
                yield number
        finally:
            self.closed.append(threading.get_ident())


class LaterNumbers:
    """The same for an async loop; remembers tasks."""

    def __init__(self) -> None:
        self.advanced: set[Any] = set()
        self.closed: list[Any] = []

    async def __aiter__(self) -> AsyncIterator[int]:
        try:
            for number in range(100):
                self.advanced.add(asyncio.current_task())
                yield number
        finally:
            self.closed.append(asyncio.current_task())


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [Numbers, LaterNumbers])
async def test_an_iterator_made_for_the_loop_is_closed_where_it_was_advanced(
    pair: ar.MirroredStrategy, kind: Any
) -> None:
    """A cancel scope of anyio and an SQLite connection both belong to whoever opened them."""
    source = kind()

    await pair.run_steps(nothing, source, 3)

    assert source.advanced == set(source.closed)
    assert len(source.closed) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [Numbers, LaterNumbers])
async def test_it_is_closed_if_a_step_fails(pair: ar.MirroredStrategy, kind: Any) -> None:
    source = kind()

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await pair.run_steps(step, source, 100)

    assert len(source.closed) == len(source.advanced)  # none if it was never advanced


@pytest.mark.asyncio
async def test_what_closing_it_raises_is_raised_after_the_loop(pair: ar.MirroredStrategy) -> None:
    ran: list[int] = []

    class Source:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(9)
            finally:
                raise OSError("disk")

    with pytest.raises(OSError, match="disk") as caught:
        await pair.run_steps(lambda ctx, x: ran.append(x), Source(), 2)

    assert sorted(ran) == [0, 0, 1, 1]
    assert "after 2 complete steps" in caught.value.__notes__[0]


@pytest.mark.asyncio
async def test_a_wait_for_an_iterator_that_does_not_close_can_be_cancelled(
    pair: ar.MirroredStrategy,
) -> None:
    closing, gate = threading.Event(), threading.Event()

    class Source:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from range(9)
            finally:
                closing.set()
                gate.wait(10)

    running = spawn(pair.run_steps(nothing, Source(), 2))
    await asyncio.to_thread(closing.wait, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    gate.set()


@pytest.mark.asyncio
async def test_a_loop_makes_no_reference_cycles(pair: ar.MirroredStrategy) -> None:
    """What the infeed held goes when the loop ends, without waiting for the collector."""

    async def later() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        me().blocking.barrier()
        ar.outside_compilation(str)

    sources: list[Any] = [[1, 2], iter([1, 2]), later(), Numbers(), LaterNumbers()]
    await pair.run_steps(step, [1], 2)
    gc.collect()
    gc.disable()
    try:
        for source in sources:
            await pair.run_steps(step, source, 2)
            assert gc.collect() == 0, f"{source} leaves cycles"
    finally:
        gc.enable()


@pytest.mark.asyncio
async def test_without_a_thread_for_the_iterator_no_program_begins(
    pair: ar.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    await pair.run_steps(nothing, [1])  # the device threads exist

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            await pair.run_steps(lambda ctx, x: ran.append(x), [1])

    assert pair.statistics().num_active == 0
    assert sum(lane.queued for lane in pair.statistics().lanes.values()) == 0
    assert (await pair.run_steps(lambda ctx, x: ran.append(x), [5])).steps_run == 1
    assert ran == [5, 5]


PROGRAM = """
import asyncio, os, signal
import aioreplica as ar

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have turned it off
ar.set_logical_devices("cpu", 2)

class Source:
    async def __aiter__(self):
        try:
            yield 1
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            print("source closed")

async def main():
    async with ar.MirroredStrategy() as strategy:
        await strategy.run_steps(lambda ctx, x: None, Source(), 9)

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_an_interrupt_says_nothing_but_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert (done.stdout.split("\n")[:2], done.stderr) == (["source closed", "interrupted"], "")
