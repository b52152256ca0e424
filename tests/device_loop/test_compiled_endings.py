"""Compiled calls that end early, or meet others: queues, records, restores, stalls, first calls."""

import asyncio
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from tests.conftest import mirrored
from tests.replica.gated import GatedOp, spawn

jax = pytest.importorskip("jax")

from tests.device_loop.compiled_steps import adam, elements, model  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio, pytest.mark.slow]


@pytest.mark.parametrize("ends", ["cancelled", "stalled"])
async def test_a_call_ends_while_the_device_that_leads_is_busy(
    gang: ar.Strategy, ends: str
) -> None:
    """Its op is taken back from the queue then: nobody leads, and the others have to go."""
    w, _, step = model(gang, adam)
    loop, started, queued = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    iterator, busy, followers = iter(elements(gang, 4)), GatedOp(), []

    def holds(ctx: ar.MultiStepContext, x: Any) -> None:
        loop.call_soon_threadsafe(started.set)
        busy()

    def waits(wait: Any) -> None:
        if wait.describe() == "the compiled steps":
            followers.append(wait)
        if len(followers) == gang.num_replicas_in_sync - 1:
            loop.call_soon_threadsafe(queued.set)

    async with mirrored(1) as other:
        held = spawn(other.run_steps(holds, iter([ar.PerReplica([np.ones(3)])]), 1))
        await started.wait()
        remove = gang.observers.add(ar.telemetry.Observer(wait_began=waits))
        run = spawn(gang.run_steps(step, iterator, 4, compile="jax"))
        await queued.wait()
        if ends == "cancelled":
            run.cancel()
        else:
            [group] = gang._runtime.lifecycle.active_groups()
            group.stalled(1.0)
        with pytest.raises(asyncio.CancelledError if ends == "cancelled" else ar.errors.StallError):
            await run
        remove()
        busy.gate.set()
        await held

    result = await gang.run_steps(step, iterator, 4, compile="jax")
    assert (result.steps_run, w.version) == (4, 4)  # with all lanes, and all elements
