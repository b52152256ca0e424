"""Device loops under many schedules: infeed, ends, calls on the host; each says how many."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from threading import Event
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.device_loop import _infeed
from aioreplica.errors import StallError
from aioreplica.replica import BlockingContext

PAIR = ["cpu:0", "cpu:1"]
IN_A_MINUTE = ar.RunOptions(stall_timeout=60)


@pytest.fixture(autouse=True)
def _shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the feeder wait for room, which it seldom does at its real depth."""
    monkeypatch.setattr(_infeed, "MAX_AHEAD", 2)


def blocking() -> BlockingContext:
    context = ar.get_replica_context()
    assert context is not None
    return context.blocking


def my_id() -> int:
    return blocking().replica_id_in_sync_group


def parts(step: int) -> ar.PerReplica:
    rng = np.random.default_rng(step)
    return ar.PerReplica([rng.normal(size=5).astype(np.float32) for _ in PAIR])


def train(ctx: ar.MultiStepContext, x: Any) -> None:
    mean = blocking().all_reduce("mean", np.sin(x))
    total = ctx.last_step_outputs["total"] + mean / 3
    ctx.set_last_step_output("total", total.astype(np.float32))


async def bits(hop: int) -> bytes:
    async with ar.MirroredStrategy(PAIR) as strategy:
        source, total = iter([parts(k) for k in range(6)]), np.zeros(5, np.float32)
        for _ in range(0, 6, hop):
            result = await strategy.run_steps(train, source, hop, {"total": total})
            total = strategy.local_results(result.last_step_outputs["total"])[0]
        return bytes(total.tobytes())


# --- infeed -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_schedule_gives_the_same_bits() -> None:
    """100 schedules each of one hop of 6 steps and of three hops of 2."""
    expected = art.run(lambda: bits(6))

    async def whole() -> None:
        assert await bits(6) == expected

    async def in_parts() -> None:
        assert await bits(2) == expected

    for main in (whole, in_parts):
        report = art.explore(main, schedules=100)
        report.check()
        assert report.schedules_run == 100


@pytest.mark.explore(schedules=100)
async def test_every_replica_gets_the_elements_in_order() -> None:
    seen: list[list[int]] = [[], []]

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        seen[my_id()].append(x)

    async with ar.MirroredStrategy(PAIR) as strategy:
        source = iter(range(9))
        assert (await strategy.run_steps(step, source, 5)).steps_run == 5
        assert seen == [[0, 1, 2, 3, 4]] * 2
        assert next(source) == 5


@pytest.mark.explore(schedules=100)
@pytest.mark.parametrize("is_async", [False, True])
async def test_an_iterator_that_ends_early_ends_all_replicas_alike(is_async: bool) -> None:
    seen: list[list[int]] = [[], []]

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        seen[my_id()].append(x)
        blocking().barrier()

    async def slowly() -> AsyncIterator[int]:
        for i in range(4):
            await asyncio.sleep(0.1)
            yield i

    async with ar.MirroredStrategy(PAIR) as strategy:
        result = await strategy.run_steps(step, slowly() if is_async else iter(range(4)), 10)
    assert result.steps_run == 4
    assert seen == [[0, 1, 2, 3]] * 2


@pytest.mark.explore(schedules=100)
async def test_an_error_of_the_iterator_comes_behind_the_steps_before() -> None:
    seen: list[list[int]] = [[], []]

    def source() -> Iterator[int]:
        yield from range(3)
        raise LookupError("disk is gone")

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        seen[my_id()].append(x)

    async with ar.MirroredStrategy(PAIR) as strategy:
        with pytest.raises(LookupError, match="disk is gone"):
            await strategy.run_steps(step, source(), 10)
    assert seen == [[0, 1, 2]] * 2


@pytest.mark.explore(schedules=150)
async def test_a_failing_step_ends_the_filler_and_the_other_replica() -> None:
    def step(ctx: ar.MultiStepContext, x: int) -> None:
        if x == 2 and my_id() == 1:
            raise ValueError("bad element")

    async with ar.MirroredStrategy(PAIR) as strategy:
        with pytest.raises(ValueError, match="bad element"):
            await strategy.run_steps(step, iter(range(8)), 8)


@pytest.mark.explore(schedules=100)
async def test_an_iterator_that_hangs_is_a_stall() -> None:
    goes_on = Event()

    def source() -> Iterator[int]:
        yield 0
        goes_on.wait()

    async with ar.MirroredStrategy(PAIR) as strategy:
        with pytest.raises(StallError, match="the infeed for step 1") as caught:
            await strategy.run_steps(lambda ctx, x: None, source(), 3, options=IN_A_MINUTE)
    goes_on.set()  # its thread was left behind
    assert [row.state for row in caught.value.rows] == ["waiting", "waiting"]


def test_an_iterator_that_hangs_without_patience_is_a_deadlock() -> None:
    def source() -> Iterator[int]:
        yield 0
        Event().wait()

    async def main() -> None:
        async with ar.MirroredStrategy(PAIR) as strategy:
            await strategy.run_steps(lambda ctx, x: None, source(), 3)

    with pytest.raises(art.DeadlockError) as caught:
        art.run(main)
    waits = {wait.who.partition(" #")[0]: wait.awaits for wait in caught.value.waits}
    assert waits["replica 0"] == "the infeed for step 1"
    assert waits["op ThreadFeeder._feed"].startswith("threading.Event")


def test_a_loop_can_be_cancelled_at_every_moment() -> None:
    report = art.cancel_everywhere(lambda: bits(3))

    report.check()
    assert report.schedules_run > 30


@pytest.mark.explore(schedules=100)
async def test_loops_at_once_do_not_block_each_other() -> None:
    async with (
        ar.MirroredStrategy(PAIR) as one,
        ar.MirroredStrategy(PAIR[::-1]) as other,
    ):
        results = await asyncio.gather(
            one.run_steps(lambda ctx, x: blocking().barrier(), iter(range(3)), 3),
            other.run_steps(lambda ctx, x: blocking().barrier(), iter(range(4)), 4),
        )
    assert [result.steps_run for result in results] == [3, 4]


# --- calls on the host ------------------------------------------------------------------------


@pytest.mark.explore(schedules=100)
async def test_async_host_functions_answer_their_own_replica() -> None:
    async def answer(own: int, step: int) -> tuple[int, int]:
        for _ in range(2 - own):
            await asyncio.sleep(0)
        return own, step

    def step(ctx: ar.MultiStepContext, x: int) -> None:
        found = ar.outside_compilation(answer, my_id(), x)
        assert found == (my_id(), x)
        ctx.set_last_step_output("sum", blocking().all_reduce("sum", found[0]))

    async with ar.MirroredStrategy(PAIR) as strategy:
        result = await strategy.run_steps(step, iter(range(2)), 2)
        assert strategy.local_results(result.last_step_outputs["sum"]) == (1, 1)


@pytest.mark.explore(schedules=150)
async def test_cancelling_ends_host_functions_where_they_wait() -> None:
    ended: list[int] = []

    async def publish(own: int) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(own)

    begun: list[int] = []

    def step() -> None:
        begun.append(my_id())
        ar.outside_compilation(publish, my_id())

    async with ar.MirroredStrategy(PAIR) as strategy:
        run = asyncio.ensure_future(strategy.run(step))
        await asyncio.sleep(0.1)
        run.cancel()
        with suppress(asyncio.CancelledError):
            await run
        assert run.cancelled()
        assert set(ended) <= set(begun)


@pytest.mark.explore(schedules=150)
async def test_an_error_on_the_host_ends_the_run() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise LookupError("no such table")

    def step() -> None:
        if my_id():
            ar.outside_compilation(fail)
        blocking().barrier()

    async with ar.MirroredStrategy(PAIR) as strategy:
        with pytest.raises(LookupError, match="no such table"):
            await strategy.run(step)


# --- stalls -----------------------------------------------------------------------------------


@pytest.mark.explore(schedules=30)
async def test_a_host_function_that_hangs_is_a_stall() -> None:
    async with ar.MirroredStrategy(PAIR) as strategy:
        with pytest.raises(StallError, match="outside cluster '0'"):
            await strategy.run(
                lambda: ar.outside_compilation(asyncio.sleep, 3600), options=IN_A_MINUTE
            )


@pytest.mark.explore(schedules=30)
async def test_an_async_iterator_that_hangs_is_cancelled() -> None:
    ended: list[str] = []

    async def source() -> AsyncIterator[int]:
        yield 1
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("source")

    async with ar.MirroredStrategy(PAIR) as strategy:
        with pytest.raises(StallError, match="the infeed for step 1"):
            await strategy.run_steps(lambda ctx, x: None, source(), 9, options=IN_A_MINUTE)

    assert ended == ["source"]
