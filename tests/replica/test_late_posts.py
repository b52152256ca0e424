"""What device threads post to an event loop that comes to it too late."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import aioreplica as ar
from tests.conftest import mirrored
from tests.replica.gated import me, my_id, spawn
from tests.sequencer import idle


class SlowLoop(asyncio.SelectorEventLoop):
    """Holds what one thread posts until `before` has returned; `posted` tells that it did."""

    def __init__(self) -> None:
        super().__init__()
        self.posted = threading.Event()
        self.thread_id: int | None = None
        self.num_cycles = 0
        self.before: Callable[[], object] = lambda: None

    def call_soon_threadsafe(self, callback: Any, *args: Any, **options: Any) -> asyncio.Handle:
        if threading.get_ident() != self.thread_id:
            return super().call_soon_threadsafe(callback, *args, **options)

        def late(num_cycles: int) -> None:
            if num_cycles:
                self.call_soon(late, num_cycles - 1)
                return
            self.before()
            callback(*args)

        handle = super().call_soon_threadsafe(late, self.num_cycles, **options)
        self.posted.set()
        return handle


def test_a_timeout_after_the_last_arrival_is_ignored() -> None:
    met = threading.Event()
    options = ar.CommunicationOptions(timeout_seconds=0.01)

    async def main() -> tuple[Any, ...]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SlowLoop)
        loop.before = lambda: met.wait(10)

        def step() -> Any:
            if my_id() == 0:
                loop.thread_id = threading.get_ident()
                return me().blocking.all_reduce("sum", 1.0, options=options)
            assert loop.posted.wait(10)  # the other thread has waited for too long
            result = me().blocking.all_reduce("sum", 2.0, options=options)
            met.set()
            return result

        async with mirrored(2) as strategy:
            return strategy.local_results(await strategy.run(step))

    with asyncio.Runner(loop_factory=SlowLoop) as runner:
        assert runner.run(main()) == (3.0, 3.0)


def test_a_host_function_does_not_begin_after_its_run_was_cancelled() -> None:
    go = threading.Event()
    called: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SlowLoop)
        loop.num_cycles = 20
        started = asyncio.Event()

        def step() -> None:
            loop.call_soon_threadsafe(started.set)
            loop.thread_id = threading.get_ident()
            assert go.wait(10)
            ar.outside_compilation(called.append, "begun")

        async with ar.OneDeviceStrategy("cpu:0") as strategy:
            run = spawn(strategy.run(step))
            await started.wait()
            run.cancel()
            go.set()
            assert loop.posted.wait(10)  # while this holds up the loop
            with pytest.raises(asyncio.CancelledError):
                await run
            await idle()

    with asyncio.Runner(loop_factory=SlowLoop) as runner:
        runner.run(main())
    assert called == []
