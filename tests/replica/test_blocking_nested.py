"""Runs inside merge functions that device threads wait for."""

import asyncio
import threading
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from tests.replica.gated import me

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]

IN_TIME = ar.RunOptions(stall_timeout=5)


async def test_device_programs_are_refused_there(strategy: ar.Strategy) -> None:
    """They would queue behind those that wait for the merge, for ever."""

    def inner(*_: Any) -> int:
        return 1

    async def merge(outer: ar.Strategy) -> None:
        with pytest.raises(ContextError, match=r"hold the devices.*`async def`"):
            await outer.run(inner)
        with pytest.raises(ContextError, match="hold the devices"):
            await outer.run_steps(inner, iter([1]))

    await strategy.run(lambda: me().blocking.merge_call(merge), options=IN_TIME)
    await strategy.run_steps(
        lambda ctx, x: me().blocking.merge_call(merge), iter([1]), options=IN_TIME
    )


async def test_coroutines_run_there_with_their_ops_on_the_host(pair: ar.MirroredStrategy) -> None:
    @ar.device_op
    def where() -> str:
        return threading.current_thread().name

    async def inner() -> tuple[str, str, int]:
        names = await me().run_on_device(threading.current_thread), await where()
        total = await me().all_reduce("sum", 1)
        return names[0].name, names[1], total

    async def merge(outer: ar.Strategy) -> Any:
        return await outer.run(inner)

    first, second, total = await pair.run(lambda: me().blocking.merge_call(merge), options=IN_TIME)

    assert all("host" in name for name in first.values + second.values)
    assert total.values == (2, 2)


async def test_under_coroutines_device_programs_run(pair: ar.MirroredStrategy) -> None:
    async def merge(outer: ar.Strategy) -> Any:
        return await outer.run(lambda: 1)

    async def step() -> Any:
        await asyncio.sleep(0)
        return await me().merge_call(merge)

    assert (await pair.run(step, options=IN_TIME)).values == (1, 1)
