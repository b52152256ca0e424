"""Warnings of a report on what was not simulated."""

import asyncio
import select
import sys
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

import aioreplica.testing as art
from aioreplica.testing._fixtures import run_case
from tests.testing.programs import step


class Expiry:
    """Holder of clocks that no replacement reaches."""

    clock = staticmethod(time.monotonic)
    measure = staticmethod(time.perf_counter)


@pytest.fixture
def started_before() -> Iterator[SimpleQueue[Callable[[], None] | None]]:
    """A thread that calls what it is given."""
    calls = SimpleQueue[Callable[[], None] | None]()

    def serve() -> None:
        while (call := calls.get()) is not None:
            call()

    thread = threading.Thread(target=serve, name="from before")
    thread.start()
    yield calls
    calls.put(None)
    thread.join()


def test_a_real_thread_that_calls_the_loop_is_named(
    started_before: SimpleQueue[Callable[[], None] | None],
) -> None:
    answered = SimpleQueue[None]()  # a real one: it is older than the run

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def call() -> None:
            loop.call_soon_threadsafe(int)
            answered.put(None)

        started_before.put(call)
        answered.get()
        await step()

    report = art.explore(main, schedules=3)

    assert any("thread 'from before' called the event loop and is real" in each
               for each in report.warnings)  # fmt: skip


def test_threads_of_the_program_are_no_real_ones() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        thread = threading.Thread(target=lambda: loop.call_soon_threadsafe(done.set))
        thread.start()
        await done.wait()
        await asyncio.to_thread(thread.join)

    assert art.explore(main, schedules=10).warnings == ()


def test_a_clock_that_was_kept_before_the_run_is_named() -> None:
    async def main() -> None:
        Expiry.clock()
        Expiry.measure()  # what is measured decides nothing, as a rule
        time.monotonic()

    [warning] = art.explore(main, schedules=3).warnings

    assert warning.startswith("The program calls the real time.monotonic: it was kept before")


def test_a_loop_of_uvloop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = SimpleNamespace(new_event_loop=lambda: "a loop")
    monkeypatch.setitem(sys.modules, "uvloop", stub)  # it may not be installed

    async def main() -> None:
        assert stub.new_event_loop() == "a loop"

    [warning] = art.explore(main, schedules=3).warnings

    assert "event loop of uvloop" in warning
    assert stub.new_event_loop() == "a loop"


def test_what_waits_in_c_for_something_real_is_named() -> None:
    async def main() -> None:
        await asyncio.to_thread(select.select, [], [], [], 0)

    [warning] = art.explore(main, schedules=3).warnings

    assert warning.startswith("The program calls select.select, which waits in C for what is real")


class Case(unittest.IsolatedAsyncioTestCase):
    """A case whose class keeps something."""

    shared: list[int]

    @classmethod
    def setUpClass(cls) -> None:
        """Make it once."""
        cls.shared = []

    async def test_it(self) -> None:
        """Use it."""
        assert self.shared == []


def test_what_unittest_made_for_all_schedules_is_named() -> None:
    Case.setUpClass()

    [warning] = art.explore(partial(run_case, Case, "test_it", Case.test_it), schedules=3).warnings

    assert warning.startswith("unittest called Case.setUpClass once, before the run")
