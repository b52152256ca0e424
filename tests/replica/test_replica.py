"""Calls that were made and never awaited: the run fails and says where."""

import asyncio
import inspect

import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def my_id() -> int:
    return me().replica_id_in_sync_group


def line_after() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno + 1


@pytest.mark.asyncio
async def test_a_collective_never_awaited_fails_the_run(strategy: ar.Strategy) -> None:
    lines: list[int] = []

    async def step() -> None:
        lines.append(line_after())
        me().all_reduce("sum", 1.0)

    with pytest.raises(ContextError, match="never awaited") as caught:
        await strategy.run(step)

    assert f"{__file__}:{lines[0]}" in str(caught.value)
    assert "all_reduce #1 (SUM)" in str(caught.value)


@pytest.mark.asyncio
async def test_an_assign_never_awaited_fails_the_run(strategy: ar.Strategy) -> None:
    with strategy.scope():
        variable = ar.Variable(0.0, aggregation="sum")

    async def step() -> None:
        variable.assign(1.0)

    with pytest.raises(ContextError, match="never awaited") as caught:
        await strategy.run(step)

    assert "assign #1" in str(caught.value)
    assert f"{__file__}:" in str(caught.value)
    assert variable.value == 0.0


@pytest.mark.asyncio
async def test_one_replica_that_forgets_while_others_wait(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        call = me().barrier()
        if my_id() == 0:
            await call

    with pytest.raises(RuntimeError, match="replica 1: barrier #1") as caught:
        await pair.run(step)

    assert f"{__file__}:" in str(caught.value)


@pytest.mark.asyncio
async def test_a_replica_that_goes_on_without_it_names_it(pair: ar.MirroredStrategy) -> None:
    """The forgotten call shifts the numbers, so the next one does not match."""

    async def step() -> None:
        if my_id():
            me().any(True)
        await me().barrier()

    with pytest.raises(RuntimeError, match=r"barrier #1.*barrier #2") as caught:
        await pair.run(step)

    assert "replica 1: any #1 at" in str(caught.value)


@pytest.mark.asyncio
async def test_a_failure_comes_before_its_unawaited_calls(strategy: ar.Strategy) -> None:
    async def step() -> None:
        me().barrier()
        raise ValueError("root")

    with pytest.raises(ValueError, match="root"):
        await strategy.run(step)


@pytest.mark.asyncio
async def test_a_cancelled_run_closes_unawaited_calls(strategy: ar.Strategy) -> None:
    async def step() -> None:
        kept = me().barrier()
        await asyncio.Event().wait()
        await kept

    task = asyncio.get_running_loop().create_task(strategy.run(step))
    await idle()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.asyncio
async def test_a_child_task_left_behind_ends_with_the_run(pair: ar.MirroredStrategy) -> None:
    """The one has started and waits, the other has not: both runs end, and both children."""
    tasks: list[asyncio.Task[None]] = []

    async def step() -> None:
        tasks.append(asyncio.get_running_loop().create_task(me().barrier()))

    with pytest.raises(RuntimeError, match=r"barrier #1 (?s:.*)test_replica\.py"):
        await pair.run(step)
    await asyncio.wait(tasks, timeout=10)
    assert [task.done() for task in tasks] == [True, True]
