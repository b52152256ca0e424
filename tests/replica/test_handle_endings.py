"""Handles that are never awaited, given up, or in flight when a run fails or is cancelled."""

import asyncio
import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import pytest

import aioreplica as ar
from tests.replica.gated import here, me, my_id, spawn
from tests.sequencer import Sequencer, idle

pytestmark = pytest.mark.usefixtures("no_task_left")

LARGE = 1200 * 1024  # float64 elements: reduced off the event loop
SIZES = pytest.mark.parametrize("size", [3, LARGE], ids=["inline", "off the loop"])


# ---- never awaited, cancelled ------------------------------------------------------------------


async def warnings_of(strategy: ar.Strategy, step: Callable[[], Any]) -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await strategy.run(step)
        gc.collect()
    return caught


@pytest.mark.asyncio
@SIZES
async def test_a_handle_never_awaited_is_a_warning_at_its_line(
    strategy: ar.Strategy, size: int
) -> None:
    lines: list[str] = []

    async def step() -> None:
        lines.append(here(1))
        me().start_all_reduce("sum", np.ones(size))

    [warning] = await warnings_of(strategy, step)

    assert warning.category is RuntimeWarning
    assert f"{warning.filename}:{warning.lineno}" == lines[0]
    text = str(warning.message)
    assert lines[0] in text
    assert "start_all_reduce #1 (SUM)" in text
    assert "never awaited" in text
    assert "discard()" in text


@pytest.mark.asyncio
async def test_the_warning_can_be_an_error_of_run(strategy: ar.Strategy) -> None:
    """As with `-W error`, which the tests run under."""

    async def step() -> None:
        me().start_all_reduce("sum", 1)

    with pytest.raises(RuntimeWarning, match="never awaited"):
        await strategy.run(step)

    async def good() -> int:
        return await me().start_all_reduce("sum", 1)

    count = strategy.num_replicas_in_sync
    assert strategy.local_results(await strategy.run(good)) == (count,) * count


@pytest.mark.asyncio
async def test_one_warning_per_site(gang: ar.MirroredStrategy) -> None:
    """Two lines are two warnings, whatever the number of replicas."""

    async def step() -> None:
        me().start_all_reduce("sum", 1)
        me().start_all_reduce("sum", 1)
        await me().start_all_reduce("sum", 1)

    caught = await warnings_of(gang, step)

    assert len(caught) == 2
    assert caught[1].lineno == caught[0].lineno + 1


@pytest.mark.asyncio
async def test_only_replicas_that_did_not_await_are_named(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        handle = me().start_all_reduce("sum", 1)
        if my_id() == 0:
            await handle

    [warning] = await warnings_of(pair, step)

    assert "in replica 1" in str(warning.message)


@pytest.mark.asyncio
async def test_a_failed_run_does_not_warn(gang: ar.MirroredStrategy) -> None:
    """What went wrong is said already."""

    async def step() -> None:
        me().start_all_reduce("sum", 1)
        raise KeyError("mine")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(KeyError):
            await gang.run(step)
        gc.collect()
    assert caught == []


@pytest.mark.asyncio
@pytest.mark.parametrize("who", [{0}, {1}, {0, 1}], ids=str)
@SIZES
async def test_cancel_gives_up_the_result_not_the_reduction(
    pair: ar.MirroredStrategy, who: set[int], size: int
) -> None:
    async def step() -> Any:
        handle = me().start_all_reduce("sum", np.ones(size))
        if my_id() in who:
            handle.cancel()
            handle.cancel()
            return "gave up"
        return float((await handle)[-1])

    results = pair.local_results(await pair.run(step))

    assert results == tuple("gave up" if i in who else 2.0 for i in range(2))


@pytest.mark.asyncio
async def test_a_cancelled_await_can_be_repeated(pair: ar.MirroredStrategy) -> None:
    """Replica 0 gives up waiting before replica 1 has started; nothing is withdrawn."""
    sequencer = Sequencer(["0 gave up", "1 starts"])

    async def step() -> int:
        if my_id() == 1:
            await sequencer.turn("1 starts")
            return await me().start_all_reduce("sum", 1)
        handle = me().start_all_reduce("sum", 1)

        async def wait() -> Any:
            return await handle

        task = spawn(wait())
        await idle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sequencer.turn("0 gave up")
        return await handle

    assert pair.local_results(await pair.run(step)) == (2, 2)


@pytest.mark.asyncio
async def test_a_local_timeout_gives_nothing_up(pair: ar.MirroredStrategy) -> None:
    gave_up = asyncio.Event()

    async def step() -> int:
        if my_id() == 1:
            await gave_up.wait()
            return await me().start_all_reduce("sum", 1)
        handle = me().start_all_reduce("sum", 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await handle
        with anyio.move_on_after(0) as scope:
            await handle
        assert scope.cancelled_caught
        waiting = spawn(asyncio.wait_for(handle, 60))
        await idle()
        waiting.cancel()
        await asyncio.wait([waiting])
        gave_up.set()
        return await handle

    assert pair.local_results(await pair.run(step)) == (2, 2)


@pytest.mark.asyncio
async def test_one_of_two_waiting_tasks_is_cancelled(pair: ar.MirroredStrategy) -> None:
    """The other one, and the other replica, still get the result."""
    cancelled = asyncio.Event()

    async def step() -> Any:
        if my_id() == 1:
            await cancelled.wait()
            return await me().start_all_reduce("sum", 1)
        handle = me().start_all_reduce("sum", 1)

        async def wait() -> Any:
            return await handle

        tasks = [spawn(wait()), spawn(wait())]
        await idle()
        tasks[0].cancel()
        await idle()
        cancelled.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        return results[1]

    assert pair.local_results(await pair.run(step)) == (2, 2)


# ---- failures ----------------------------------------------------------------------------------


@pytest.mark.asyncio
@SIZES
@pytest.mark.parametrize("others", ["awaiting", "going on"])
async def test_a_replica_fails_with_handles_in_flight(
    gang: ar.MirroredStrategy, size: int, others: str
) -> None:
    before = threading.active_count()
    unwound: list[int] = []

    async def step() -> None:
        handles = [me().start_all_reduce("sum", np.ones(size)) for _ in range(2)]
        if my_id() == 1:
            await idle()
            raise ValueError("mine")
        try:
            if others == "awaiting":
                me().start_all_reduce("sum", 1)
                await me().start_all_reduce("sum", 1)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            unwound.append(my_id())
            with pytest.raises(asyncio.CancelledError):
                await handles[0]
            raise

    with pytest.raises(ValueError, match="mine") as caught:
        await gang.run(step)

    assert "replica 1" in str(caught.value.__notes__)
    assert sorted(unwound) == [i for i in range(gang.num_replicas_in_sync) if i != 1]
    assert threading.active_count() - before <= 4  # the lane of the collectives, which stays


@pytest.mark.asyncio
@SIZES
async def test_cancelled_from_outside_with_handles_in_flight(
    gang: ar.MirroredStrategy, size: int
) -> None:
    started = asyncio.Event()

    async def step() -> None:
        me().start_all_reduce("sum", np.ones(size))
        if my_id() == 0:
            handle = me().start_all_reduce("sum", 1)
            started.set()
            await handle
        await asyncio.Event().wait()

    task = spawn(gang.run(step))
    await started.wait()
    task.cancel("enough")
    with pytest.raises(asyncio.CancelledError, match="enough"):
        await task

    async def good() -> Any:
        return float((await me().start_all_reduce("sum", np.ones(size)))[0])

    count = gang.num_replicas_in_sync
    assert gang.local_results(await gang.run(good)) == (count,) * count


@pytest.mark.asyncio
async def test_a_child_task_left_behind_with_a_handle_ends(gang: ar.MirroredStrategy) -> None:
    """A replica fails; the other's child task waits for a handle that is never complete."""
    children: list[asyncio.Task[Any]] = []

    async def wait(handle: Any) -> Any:
        return await handle

    async def step() -> None:
        if my_id() == 1:
            await idle()
            raise ValueError("mine")
        children.append(spawn(wait(me().start_all_reduce("sum", 1))))
        await asyncio.Event().wait()

    with pytest.raises(ValueError, match="mine"):
        await gang.run(step)
    await idle()

    assert [child.done() for child in children] == [True] * len(children)
    assert all(child.cancelled() for child in children)


class BadCompression(ar.collectives.Compression):
    """Fails when it encodes."""

    def __init__(self) -> None:
        super().__init__(error_feedback=False)

    def encode(self, value: Any) -> Any:
        raise ArithmeticError("cannot encode")

    def decode(self, code: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        raise AssertionError("never encoded")


@pytest.mark.asyncio
@pytest.mark.parametrize("awaited", [True, False], ids=["awaited", "not awaited"])
async def test_a_failed_merge_fails_the_run(strategy: ar.Strategy, awaited: bool) -> None:
    """Whether anybody awaits the handle or not."""
    options = ar.CommunicationOptions(compression=BadCompression())

    async def step() -> None:
        handle = me().start_all_reduce("sum", np.ones(3), options)
        if awaited:
            await handle

    with pytest.raises(ArithmeticError, match="cannot encode") as caught:
        await strategy.run(step)

    notes = "\n".join(caught.value.__notes__)
    assert "start_all_reduce #1" in notes
    assert __file__ in notes


@pytest.mark.asyncio
async def test_asyncio_says_nothing_of_a_failed_merge(strategy: ar.Strategy) -> None:
    """The run raises it; a log of a future whose error nobody asked for would only confuse."""
    said: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: said.append(context))

    async def step() -> None:
        me().start_all_reduce("mean", 2**5000)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        await strategy.run(step)
    await idle()
    gc.collect()
    assert said == []


@pytest.mark.asyncio
async def test_a_failed_merge_ends_a_run_that_would_wait_for_ever(
    gang: ar.MirroredStrategy,
) -> None:
    """Replica 1 has returned without looking; the others need not wait for anything more."""

    async def step() -> None:
        handle = me().start_all_reduce("mean", 2**5000)
        if my_id() == 1:
            return
        try:
            await asyncio.Event().wait()
        finally:
            handle.cancel()

    with pytest.raises(OverflowError) as caught:
        async with asyncio.timeout(10):
            await gang.run(step)
    assert "replica 1" in str(caught.value.__notes__)


@pytest.mark.asyncio
async def test_a_failed_merge_can_be_caught_at_the_await(strategy: ar.Strategy) -> None:
    options = ar.CommunicationOptions(compression=BadCompression())

    async def step() -> int:
        handle = me().start_all_reduce("sum", np.ones(3), options)
        for _ in range(2):
            with pytest.raises(ArithmeticError, match="cannot encode"):
                await handle
        return await me().start_all_reduce("sum", 1)

    count = strategy.num_replicas_in_sync
    assert strategy.local_results(await strategy.run(step)) == (count,) * count
