"""Handles whose replica does something else meanwhile: errors, circles, lost failures."""

import asyncio
import inspect
import threading
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import MergeMismatchError, StallError
from tests.replica.gated import me, my_id, spawn
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")


@pytest.mark.asyncio
async def test_a_clash_names_the_line_of_a_start_that_is_not_awaited(
    gang: ar.MirroredStrategy,
) -> None:
    """Replica 0 waits elsewhere by then; what disagrees is what it started before."""
    sites: list[str] = []

    async def step() -> None:
        if my_id() == 1:
            await idle()
            me().start_all_reduce("min", 1)
        else:
            sites.append(f"{__file__}:{inspect.currentframe().f_lineno + 1}")
            me().start_all_reduce("max", 1)
        await me().barrier()

    with pytest.raises(MergeMismatchError, match="MAX and MIN differ") as caught:
        await gang.run(step)

    assert "start_all_reduce #1 (MAX)" in str(caught.value)
    assert sites[0] in str(caught.value)


@pytest.mark.asyncio
async def test_a_circle_behind_a_handle_that_is_complete(triple: ar.MirroredStrategy) -> None:
    """Child tasks of replica 0 wait for two handles; as one wakes, the other cannot be complete.

    That a child waits does not show that its replica is stuck, so it takes the stall timeout.

    Replica 2 waits in everybody's second call, replica 0 for what replica 2 would start after it.
    """

    async def step() -> Any:
        if my_id() == 0:
            everybody = me().start_all_reduce("sum", 1)
            both = me().group([0, 2]).start_all_reduce("sum", 1)
            await asyncio.gather(everybody, both)
            return await me().barrier()
        if my_id() == 2:
            await idle()
        first = me().start_all_reduce("sum", 1)
        await me().barrier()
        if my_id() == 2:
            await me().group([0, 2]).start_all_reduce("sum", 1)
        return await first

    with pytest.raises(StallError, match="made no progress"):
        await triple.run(step, options=ar.RunOptions(stall_timeout=0.2))


@pytest.mark.asyncio
@pytest.mark.parametrize("started_early", [True, False])
async def test_a_child_task_that_waits_holds_up_nobody(
    triple: ar.MirroredStrategy, started_early: bool
) -> None:
    """Replica 0 itself goes on and starts what replica 1 waits for, in time or a little later."""

    async def wait(handle: Any) -> Any:
        return await handle

    async def step() -> Any:
        if my_id() == 0:
            child = spawn(wait(me().group([0, 1]).start_all_reduce("sum", 1)))
            if not started_early:
                await idle()
            everybody = await me().start_all_reduce("sum", 1)
            return [everybody, await child]
        if started_early:
            await idle()
        everybody = await me().start_all_reduce("sum", 1)
        if my_id() == 1:
            return [everybody, await me().group([0, 1]).start_all_reduce("sum", 1)]
        return [everybody]

    results = triple.local_results(await triple.run(step))

    assert results == ([3, 2], [3, 2], [3])


class Failing(ar.collectives.Compression):
    """Fails when it encodes, once it is let go."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(error_feedback=False)
        self.gate = gate

    def encode(self, value: Any) -> Any:
        assert self.gate.wait(10)
        raise ArithmeticError("cannot encode")

    def decode(self, code: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        raise AssertionError("never encoded")


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["await given up", "cancel"])
async def test_a_failed_reduction_fails_the_run_though_its_result_was_given_up(
    strategy: ar.Strategy, how: str
) -> None:
    """Nobody has seen the error by then, so the run must show it."""
    gate = threading.Event()
    options = ar.CommunicationOptions(compression=Failing(gate))

    async def step() -> None:
        handle = me().start_all_reduce("sum", np.ones(3), options)
        if how == "cancel":
            handle.cancel()
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await handle
        await me().barrier()
        gate.set()

    with pytest.raises(ArithmeticError, match="cannot encode"):
        await strategy.run(step)
