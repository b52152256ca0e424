"""How long device threads wait for each other."""

import asyncio
import threading

import pytest

import aioreplica as ar
from tests.replica.gated import me, my_id, spawn

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]


async def test_a_timeout_longer_than_a_thread_can_wait_is_unlimited(
    pair: ar.MirroredStrategy,
) -> None:
    early, gate = threading.Event(), threading.Event()
    options = ar.CommunicationOptions(timeout_seconds=1e12)

    def step() -> int:
        if my_id() == 1:
            gate.wait(10)
        else:
            early.set()
        total: int = me().blocking.all_reduce("sum", my_id(), options)
        return total

    running = spawn(pair.run(step))
    await asyncio.to_thread(early.wait, 10)
    gate.set()

    assert (await running).values == (1, 1)
