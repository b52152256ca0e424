"""The cost of input: batches beside slices by hand, overlap, leaks and exact resumption.

Rows compare the library with a floor measured in the same process, in turns; two lines say whether
anything grew over epochs that were broken off, and how many resumptions saw another sequence.
Targets are printed with marks and never change the exit status; growth and a wrong sequence do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import aioreplica as ar

from ._command import parse_options
from ._input_batches import measure_batches
from ._input_checks import Growth, count_wrong_resumes, measure_growth
from ._input_overlap import measure_overlap
from ._loops import open_runners
from ._report import format_table, summarise, write_json
from ._row import Row

NUM_REPLICAS = 4


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        num_rounds: Rounds of each comparison.
        num_batches: Batches that make one sample of their cost.
        num_slow_batches: Batches of 10 ms that make one sample.
        num_epochs: Epochs that are broken off.
        batch_size: Of the epoch that is stopped behind each batch.
    """

    num_rounds: int
    num_batches: int
    num_slow_batches: int
    num_epochs: int
    batch_size: int


FULL = Plan(11, 64, 100, 200, 16)
QUICK = Plan(3, 8, 5, 20, 200)


def main(arguments: Sequence[str]) -> None:
    """Measure, print the table, check, write the JSON."""
    options = parse_options("input", __doc__, arguments)
    plan = QUICK if options.is_quick else FULL
    ar.set_logical_devices("cpu", NUM_REPLICAS)
    rows: list[Row] = []
    growths: list[Growth] = []
    num_stops = num_wrong = 0
    for name, runner in open_runners(options.loops):
        rows += runner.run(measure(name, plan))
        growth, stops, wrong = runner.run(check(plan))
        growths.append(growth)
        num_stops += stops
        num_wrong += wrong
        print(
            f"{name}: after {growth.num_epochs} epochs broken off {growth.num_tasks:+d} tasks, "
            f"{growth.num_threads:+d} threads, {growth.num_files:+d} files, "
            f"{growth.num_bytes:+d} bytes"
        )
        print(f"{name}: stopped behind each of {stops} places, other sequences = {wrong}")
    print(format_table(rows))
    print(summarise(rows))
    num_grown = sum(not growth.is_flat for growth in growths)
    counts = {"num_stops": num_stops, "num_wrong": num_wrong, "num_grown": num_grown}
    write_json(options.output, "input", rows, is_quick=options.is_quick, counts=counts)
    print(f"Written to {options.output}.")
    if num_wrong or num_grown:
        raise SystemExit(f"{num_wrong} wrong sequences, {num_grown} event loops on which it grew.")


async def measure(loop: str, plan: Plan) -> list[Row]:
    """Measure everything once on the running loop, which is called `loop`."""
    async with ar.MirroredStrategy(ar.list_devices("cpu")) as strategy:
        batches = await measure_batches(
            loop, strategy, num_batches=plan.num_batches, num_rounds=plan.num_rounds
        )
        overlap = await measure_overlap(
            loop, strategy, num_batches=plan.num_slow_batches, num_rounds=min(plan.num_rounds, 5)
        )
    return [*batches, *overlap]


async def check(plan: Plan) -> tuple[Growth, int, int]:
    """Look for what is left behind, and for resumptions that go wrong."""
    async with ar.MirroredStrategy(ar.list_devices("cpu")) as strategy:
        growth = await measure_growth(strategy, num_epochs=plan.num_epochs)
        stops, wrong = await count_wrong_resumes(strategy, batch_size=plan.batch_size)
    return growth, stops, wrong
