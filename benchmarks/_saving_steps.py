"""Steps of a training that saves every few of them, beside those of one that saves nothing.

A save that begins before the one before has ended waits for that, and so does the training. The
first steps after such a wait are slow whatever it was for: the kernel wakes both threads on one
core and takes some steps to part them. So there are two comparisons: with a training that waits as
often and as long but saves nothing, which shows what saves cost, and with one that never waits.
"""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import aioreplica as ar

from ._loop_lag import lag_during
from ._measure import take_turns
from ._row import Row, Target, compared_row

EVERY = 5
SIDE = 512
LOOP = "asyncio"


async def measure_steps(
    folder: Path, *, num_bytes: int, num_variables: int, num_steps: int, num_rounds: int
) -> list[Row]:
    """Compare the median of a step's time, and the lag of the loop.

    Args:
        folder: Where to save.
        num_bytes: Of one variable of the state.
        num_variables: Of one number each, beside it.
        num_steps: Steps in one sample; one in five is followed by a save in the background, which
            waits for the one before.
        num_rounds: Rounds of each comparison.
    """
    rng, numbers = np.random.default_rng(0), count()
    factor = rng.random((SIDE, SIDE), np.float32)
    async with (
        ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy,
        ar.CheckpointManager(folder, max_to_keep=1) as manager,
    ):
        with strategy.scope():
            small = [ar.Variable(float(i)) for i in range(num_variables)]
            state = {"model": [ar.Variable(rng.random(num_bytes // 4, np.float32)), *small]}

        async def step() -> None:
            context = ar.get_replica_context()
            assert context is not None
            await context.run_on_device(np.matmul, factor, factor)
            await context.barrier()

        waits = [0.0]  # seconds that calls of `save` have taken, in the newest training with saves

        async def train(mode: str) -> float:
            """Return the median of milliseconds from step to step."""
            times, pauses = [], list(waits)
            if mode == "saving":
                waits.clear()
            for number in range(num_steps):
                begin = perf_counter()
                await strategy.run(step)
                await small[number % num_variables].assign(float(number))
                if number % EVERY == 0 and mode == "saving":
                    called = perf_counter()
                    await manager.save(next(numbers), state, wait=False)
                    waits.append(perf_counter() - called)
                elif number % EVERY == 0 and mode == "waiting":
                    await asyncio.sleep(pauses[number // EVERY % len(pauses)])
                times.append(perf_counter() - begin)
            await manager.wait()  # so that no save reaches into the next sample
            return median(times) * 1e3

        saving, waiting, plain = (partial(train, mode) for mode in ("saving", "waiting", "plain"))
        turns = {"ours": saving, "floor": waiting, "plain": plain}
        steps = await take_turns(turns, num_rounds=num_rounds)
        lags = {"ours": lag_during(saving), "floor": lag_during(plain)}
        lag = await take_turns(lags, num_rounds=num_rounds)
    what = f"saving {num_bytes >> 20} MiB and {num_variables} variables every {EVERY} steps"
    return [
        compared_row(
            f"step, {what}", LOOP, 2, "ms, p50", against="waiting as long, not saving",
            target=Target("ratio", 1.3), ours=steps["ours"], floor=steps["floor"],
        ),
        compared_row(
            f"step, {what}", LOOP, 2, "ms, p50", against="neither waiting nor saving",
            ours=steps["ours"], floor=steps["plain"],
        ),
        compared_row(
            f"loop lag, {what}", LOOP, 2, "ms, p99", against="not saving",
            target=Target("ours", 5.0), **lag,
        ),
    ]  # fmt: skip
