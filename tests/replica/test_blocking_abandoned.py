"""Device threads whose event loop was closed under them."""

import asyncio
import inspect
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from typing import Any

import pytest

import aioreplica as ar
from tests.conftest import mirrored
from tests.replica.gated import me, my_id


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait check soon whether their loop was closed; they check again and again."""
    monkeypatch.setattr("aioreplica.devices._gate.LOOK_S", 0.01)


def test_threads_are_let_go_when_their_loop_is_gone() -> None:
    """A loop that is closed without ending its runs leaves no thread parked for ever."""
    ended = [threading.Event(), threading.Event()]
    strategy = mirrored(2)
    parked = threading.Event()

    def step() -> None:
        try:
            if my_id() == 0:
                parked.set()
            me().blocking.merge_call(never)
        finally:
            ended[my_id()].set()

    async def never(_strategy: ar.Strategy) -> None:
        await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    task = loop.create_task(strategy.run(step))
    while not parked.is_set():
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    strategy._runtime.abandon()

    assert all(event.wait(10) for event in ended)
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # nobody can await it
    del task


@pytest.mark.parametrize("closed", ["before the merge", "with it in its queue", "with its task"])
def test_a_merge_is_closed_whenever_its_loop_is(
    monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """A loop forgets what is in its queue when it is closed."""
    if closed == "before the merge":  # who checks first ends the run, and nobody merges
        monkeypatch.setattr("aioreplica.devices._gate.LOOK_S", 60)
    started = [threading.Event(), threading.Event()]
    ended = [threading.Event(), threading.Event()]
    may_merge, is_posted = threading.Event(), threading.Event()
    merges: list[Coroutine[object, object, None]] = []
    strategy = mirrored(2)

    class Loop(asyncio.SelectorEventLoop):
        def call_soon_threadsafe(
            self, callback: Callable[..., object], *args: Any, context: Context | None = None
        ) -> asyncio.Handle:
            handle = super().call_soon_threadsafe(callback, *args, context=context)
            if merges:
                is_posted.set()
            return handle

    def step() -> None:
        try:
            started[my_id()].set()
            assert may_merge.wait(10)
            me().blocking.merge_call(merge)
        finally:
            ended[my_id()].set()

    def merge(_strategy: ar.Strategy) -> Coroutine[object, object, None]:
        merges.append(nothing())
        return merges[0]

    async def nothing() -> None:
        raise AssertionError("there is no loop to run this")

    loop = Loop()
    task = loop.create_task(strategy.run(step))
    while not all(event.is_set() for event in started):
        loop.run_until_complete(asyncio.sleep(0))
    if closed != "before the merge":
        may_merge.set()
        assert is_posted.wait(10)
    if closed == "with its task":
        loop.call_soon(loop.stop)
        loop.run_forever()  # one turn: the task is made in it
    loop.close()
    may_merge.set()

    assert all(event.wait(10) for event in ended)
    assert [inspect.getcoroutinestate(merge) for merge in merges] == [inspect.CORO_CLOSED]
    strategy._runtime.abandon()
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # nobody can await it
    del task


def test_a_device_loop_that_never_waits_ends_too() -> None:
    stepped = [threading.Event(), threading.Event()]
    strategy = mirrored(2)
    source_ended = threading.Event()

    class Endless:
        def __iter__(self) -> Iterator[int]:
            try:
                yield from itertools.repeat(1)
            finally:
                source_ended.set()

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        me().blocking.barrier()
        stepped[my_id()].set()

    loop = asyncio.new_event_loop()
    task = loop.create_task(strategy.run_steps(step, Endless(), 10**9))
    while not all(event.is_set() for event in stepped):
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    strategy._runtime.abandon()

    assert source_ended.wait(10)
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # nobody can await it
    del task
