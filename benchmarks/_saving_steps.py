"""Steps of a training that saves every few of them, beside those of one that saves nothing."""

from __future__ import annotations

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

        async def train(*, saves: bool) -> float:
            """Return the median of milliseconds from step to step."""
            times = []
            for number in range(num_steps):
                begin = perf_counter()
                await strategy.run(step)
                await small[number % num_variables].assign(float(number))
                if saves and number % EVERY == 0:
                    await manager.save(next(numbers), state, wait=False)
                times.append(perf_counter() - begin)
            await manager.wait()  # so that no save reaches into the next sample
            return median(times) * 1e3

        saving, plain = partial(train, saves=True), partial(train, saves=False)
        steps = await take_turns({"ours": saving, "floor": plain}, num_rounds=num_rounds)
        lags = {"ours": lag_during(saving), "floor": lag_during(plain)}
        lag = await take_turns(lags, num_rounds=num_rounds)
    what = f"saving {num_bytes >> 20} MiB and {num_variables} variables every {EVERY} steps"
    return [
        compared_row(
            f"step, {what}", LOOP, 2, "ms, p50", against="not saving",
            target=Target("ratio", 1.3), **steps,
        ),
        compared_row(
            f"loop lag, {what}", LOOP, 2, "ms, p99", against="not saving",
            target=Target("ours", 5.0), **lag,
        ),
    ]  # fmt: skip
