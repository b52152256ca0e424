"""The cost of the core: merges, runs, replicas and device hops beside bare asyncio.

Each row compares the library with a floor measured in the same process, in turns. Targets are
printed with marks and never change the exit status: a busy machine is no defect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import aioreplica as ar

from ._command import parse_options
from ._device_hop import measure_hops
from ._loops import open_runners
from ._memory import measure_memory
from ._merge import measure_merges
from ._report import format_table, summarise, write_json
from ._row import Row
from ._run import measure_runs

MAX_REPLICAS = 1024


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        num_rounds: Rounds of each comparison.
        num_hop_rounds: Rounds of the device hops: many short ones, because the time of a hop
            jumps with the choice of cores for its two threads.
        sizes: Numbers of replicas.
        num_arrivals: Arrivals in merges that make one sample.
        num_tasks: Replicas of empty runs that make one sample.
        num_calls: Device calls that make one sample.
    """

    num_rounds: int
    num_hop_rounds: int
    sizes: tuple[int, ...]
    num_arrivals: int
    num_tasks: int
    num_calls: int


FULL = Plan(7, 41, (1, 2, 4, 8, 64, MAX_REPLICAS), 20_000, 2_000, 256)
QUICK = Plan(3, 3, (1, 2, 8), 1_000, 200, 128)


def main(arguments: Sequence[str]) -> None:
    """Measure, print the table, write the JSON."""
    options = parse_options("core", __doc__, arguments)
    plan = QUICK if options.is_quick else FULL
    ar.set_logical_devices("cpu", MAX_REPLICAS)
    rows: list[Row] = []
    for name, runner in open_runners(options.loops):
        rows += runner.run(measure(name, plan))
    print(format_table(rows))
    print(summarise(rows))
    write_json(options.output, "core", rows, is_quick=options.is_quick)
    print(f"Written to {options.output}.")


async def measure(loop: str, plan: Plan) -> list[Row]:
    """Measure everything once on the running loop, which is called `loop`."""
    merges: list[Row] = []
    runs: list[Row] = []
    num_rounds = plan.num_rounds
    devices = ar.list_devices("cpu")
    for size in plan.sizes:
        async with ar.MirroredStrategy(devices[:size]) as strategy:
            merges += await measure_merges(
                loop, strategy, num_arrivals=plan.num_arrivals, num_rounds=num_rounds
            )
            runs += await measure_runs(
                loop, strategy, num_tasks=plan.num_tasks, num_rounds=num_rounds
            )
    hops = await measure_hops(loop, num_calls=plan.num_calls, num_rounds=plan.num_hop_rounds)
    async with ar.MirroredStrategy(devices) as strategy:
        memory = await measure_memory(loop, strategy, num_rounds=num_rounds)
    return [*merges, *runs, *hops, *memory]
