"""The cost of device loops: small steps, blocking reductions, the event loop's lag meanwhile.

Rows compare the library with a floor measured in the same process, in turns; a line says whether
the weights after 100 steps depend on how many steps a hop has. Targets are printed with marks and
never change the exit status; a bit that differs does.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

import aioreplica as ar

from . import _mlp_ops as mlp
from ._blocking import measure_blocking
from ._command import parse_options
from ._device_steps import (
    NUM_BATCHES,
    count_different_bits,
    in_bare_threads,
    in_device_loop,
    measure_steps,
)
from ._loop_lag import MAX_LAG_MS, lag_during
from ._loops import open_runners
from ._measure import take_turns
from ._report import format_table, summarise, write_json
from ._row import Row, compared_row

NUM_REPLICAS = 4


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        num_rounds: Rounds of each comparison.
        num_steps: Steps of training in one sample.
        num_times: Reductions in one sample.
        num_lag_steps: Steps during which the lag is measured once.
    """

    num_rounds: int
    num_steps: int
    num_times: int
    num_lag_steps: int


FULL = Plan(11, 500, 2000, 5000)
QUICK = Plan(3, 20, 50, 100)


def main(arguments: Sequence[str]) -> None:
    """Measure, print the table, check, write the JSON."""
    options = parse_options("device_loop", __doc__, arguments)
    plan = QUICK if options.is_quick else FULL
    ar.set_logical_devices("cpu", NUM_REPLICAS)
    rows: list[Row] = []
    num_compared = num_different = 0
    for name, runner in open_runners(options.loops):
        rows += runner.run(measure(name, plan))
        compared, different = runner.run(check())
        num_compared += compared
        num_different += different
        print(f"{name}: hops of {compared} sizes, different weights = {different}")
    print(format_table(rows))
    print(summarise(rows))
    counts = {"num_compared": num_compared, "num_different": num_different}
    write_json(options.output, "device_loop", rows, is_quick=options.is_quick, counts=counts)
    print(f"Written to {options.output}.")
    if num_different:
        raise SystemExit(f"{num_different} of {num_compared} hop sizes gave other weights.")


async def measure(loop: str, plan: Plan) -> list[Row]:
    """Measure everything once on the running loop, which is called `loop`."""
    async with ar.MirroredStrategy(ar.list_devices("cpu")) as strategy:
        steps = await measure_steps(
            loop, strategy, num_steps=plan.num_steps, num_rounds=plan.num_rounds
        )
        blocking = await measure_blocking(
            loop, strategy, num_times=plan.num_times, num_rounds=plan.num_rounds
        )
        lag = await measure_lag(loop, strategy, plan)
    return [*steps, *blocking, *lag]


async def measure_lag(loop: str, strategy: ar.Strategy, plan: Plan) -> list[Row]:
    """Compare the lag during a device loop with that during the same work in bare threads."""
    size, count = strategy.num_replicas_in_sync, plan.num_lag_steps
    batches = mlp.new_batches(size, NUM_BATCHES)
    with ThreadPoolExecutor(size) as executor:
        contenders = {
            "ours": lag_during(in_device_loop(strategy, batches, count)),
            "floor": lag_during(in_bare_threads(executor, size, count)),
        }
        samples = await take_turns(contenders, num_rounds=plan.num_rounds)
    row = compared_row(
        "loop lag, MLP", loop, size, "ms, p99", against="bare threads", target=MAX_LAG_MS, **samples
    )
    return [row]


async def check() -> tuple[int, int]:
    """Look for weights that depend on the number of steps per hop."""
    async with ar.MirroredStrategy(ar.list_devices("cpu")) as strategy:
        return await count_different_bits(strategy)
