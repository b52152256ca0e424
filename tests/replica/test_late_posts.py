"""What device threads post to an event loop that comes to it too late."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.errors import MergeMismatchError
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


def test_an_op_that_comes_as_its_partner_gives_up_blames_that_one() -> None:
    """The op completes the call between the cancellation of a task and the wake-up of all."""
    go = threading.Event()

    async def main() -> str:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SlowLoop)

        def op(ctx: ar.ReplicaContext) -> Any:
            loop.thread_id = threading.get_ident()
            assert go.wait(10)
            return ctx.blocking.all_reduce("sum", 1)

        def give_up(task: asyncio.Task[Any]) -> None:
            go.set()
            assert loop.posted.wait(10)  # the op's call is the next that the loop sees
            task.cancel()

        async def step() -> Any:
            if my_id() == 1:
                return await me().run_on_device(op, me())
            if my_id() == 0:
                task = asyncio.current_task()
                assert task is not None
                loop.call_soon(give_up, task)
            return await me().all_reduce("sum", 1)

        async with mirrored(3) as strategy:
            with pytest.raises(MergeMismatchError) as caught:
                await strategy.run(step)
        return caught.value.reason

    with asyncio.Runner(loop_factory=SlowLoop) as runner:
        assert runner.run(main()).startswith("Replica 0 withdrew from all_reduce #1")
