"""Steps that hang: they are ended and told of, and a learner can be closed all the same."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.online import OnlineLearner

from .program import Counting, example

STUCK = """
import asyncio, sys, threading
import numpy as np
import aioreplica as ar

begun = threading.Event()

def step(ctx, batch):
    print("stuck", flush=True)
    begun.set()
    threading.Event().wait()

async def main():
    strategy = ar.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        total = ar.Variable(0.0)
    async with ar.online.OnlineLearner(
        strategy, step, {"total": total}, max_batch=1, max_delay_s=0.0, queue_size=2,
        journal=sys.argv[1], grace_s=0.01,
    ) as learner:
        await learner.submit({"x": 1.0})
        while not begun.is_set():
            await asyncio.sleep(0)

asyncio.run(main())
"""


def test_a_step_that_hangs_is_ended_and_told_of() -> None:
    async def main() -> None:
        hangs = True

        async def step(ctx: ar.ReplicaContext, batch: Any) -> Any:
            await program.counts.assign_add(np.ones_like(program.counts.value))
            if hangs:
                await asyncio.Event().wait()
            await program.counts.assign_sub(np.ones_like(program.counts.value))
            return await program.step(ctx, batch)

        async with Counting(step_timeout_s=30.0) as program:
            learner = program.learner
            learner.step_fn = step
            tickets = [await learner.submit(example(i)) for i in range(6)]
            await asyncio.sleep(20.0)
            assert learner.state == "running"
            assert learner.statistics().step_running_s == pytest.approx(20.0, abs=0.1)
            await asyncio.sleep(20.0)
            now = learner.statistics()
            assert (learner.state, learner.is_ready, now.step_running_s) == ("failed", False, 0.0)
            assert now.failure == (
                "StallError: A step of 4 examples took longer than 30 s; it was ended."
            )
            assert (now.num_dead, now.queue_depth) == (0, 6)
            assert not program.counts.value.any()
            hangs = False
            learner.resume()
            for ticket in tickets:
                await ticket
            assert program.learned() == [1] * 6

    art.run(main)


def test_a_step_that_hangs_for_a_while_may_be_tried_again() -> None:
    async def main() -> None:
        tries = 0

        async def step(ctx: ar.ReplicaContext, batch: Any) -> Any:
            nonlocal tries
            tries += ctx.replica_id_in_sync_group == 0
            if tries < 3:
                await asyncio.Event().wait()
            return await program.step(ctx, batch)

        async with Counting(step_timeout_s=5.0, retry_on=TimeoutError) as program:
            program.learner.step_fn = step
            await (await program.learner.submit(example(0)))
            assert program.learner.statistics().num_retries == 2

    art.run(main)


def test_a_timeout_that_a_step_raises_is_blamed_on_its_example() -> None:
    async def main() -> None:
        async def step(ctx: ar.ReplicaContext, batch: Any) -> Any:
            async with asyncio.timeout(1.0):
                await asyncio.Event().wait()

        async with Counting(step_timeout_s=5.0) as program:
            program.learner.step_fn = step
            with pytest.raises(ar.errors.PoisonedExampleError, match="set aside: TimeoutError"):
                await (await program.learner.submit(example(0)))

    art.run(main)


def test_closing_ends_within_its_grace_and_leaves_the_rest_to_the_journal(folder: Path) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def step(ctx: ar.ReplicaContext, batch: Any) -> Any:
            await asyncio.Event().wait()

        program = Counting(folder, grace_s=10.0)
        assert program.manager is not None
        async with program.strategy, program.manager:
            await program.learner.__aenter__()
            await (await program.learner.submit(example(0)))
            program.learner.step_fn = step
            for i in range(1, 4):
                ticket = await program.learner.submit(example(i))
            began = loop.time()
            with pytest.warns(RuntimeWarning, match="10 s with 3 examples left: the journal has"):
                await program.learner.aclose()
            assert loop.time() - began == pytest.approx(10.0, abs=0.1)
            assert program.learner.state == "closed"
            with pytest.raises(ar.errors.ContextError, match="The journal has it"):
                await ticket
            await program.learner.aclose()
        async with Counting(folder) as again:
            await again.learner.checkpoint()
        assert again.learned() == [1] * 4

    art.run(main)


@pytest.mark.asyncio
async def test_a_function_on_a_thread_cannot_be_ended_but_is_told_of() -> None:
    go = threading.Event()

    def step(ctx: ar.ReplicaContext, batch: Any) -> None:
        go.wait(60)

    async with ar.OneDeviceStrategy("cpu:0") as strategy:
        with strategy.scope():
            total = ar.Variable(0.0)
        async with OnlineLearner(
            strategy,
            step,
            {"total": total},
            max_batch=1,
            max_delay_s=0.0,
            queue_size=2,
            step_timeout_s=0.001,
        ) as learner:
            ticket = await learner.submit({"x": 1.0})
            while learner.state != "failed":
                await asyncio.sleep(0)
            assert "longer than 0.001 s." in learner.statistics().failure
            assert not learner.is_ready
            go.set()
            while learner.statistics().step_running_s:
                await asyncio.sleep(0)
            assert "it was ended" in learner.statistics().failure
            assert not ticket.is_done


@pytest.mark.xslow
def test_a_process_with_a_step_that_never_ends_ends(folder: Path) -> None:
    program = [sys.executable, "-c", STUCK, str(folder / "journal.db")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "stuck\n"
    assert done.returncode == 1
    assert "StallError: The learner cannot be closed: a step has been running for" in done.stderr


@pytest.mark.parametrize("name", ["step_timeout_s", "grace_s"])
def test_wrong_times_are_said(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be finite"):
        Counting(**{name: float("inf")})
