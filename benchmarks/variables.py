"""The cost of variables: writes, reads and snapshots beside bare NumPy and bare attributes.

Each row compares the library with a floor measured in the same process, in turns; a line
says how many of the snapshots that a thread took during training steps were torn. Targets
are printed with marks and never change the exit status; a torn snapshot does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import aioreplica as ar

from ._command import parse_options
from ._loops import open_runners
from ._report import format_table, summarise, write_json
from ._row import Row
from ._torn import TornCount, count_torn
from ._variable_reads import measure_reads, measure_snapshots
from ._variable_writes import measure_write_bytes, measure_writes

NUM_REPLICAS = 4


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        num_rounds: Rounds of each comparison.
        num_writes: Writes that make one sample of their time.
        num_counted_writes: Writes over which allocated bytes are counted.
        num_reads: Reads that make one sample.
        num_variables: Variables in a snapshot.
        num_steps: The least number of steps, and of snapshots checked during them.
    """

    num_rounds: int
    num_writes: int
    num_counted_writes: int
    num_reads: int
    num_variables: int
    num_steps: int


FULL = Plan(11, 200, 1_000, 20_000, 1_000, 1_000)
QUICK = Plan(3, 10, 20, 1_000, 1_000, 50)


def main(arguments: Sequence[str]) -> None:
    """Measure, print the table, check for torn snapshots, write the JSON."""
    options = parse_options("variables", __doc__, arguments)
    plan = QUICK if options.is_quick else FULL
    ar.set_logical_devices("cpu", NUM_REPLICAS)
    rows: list[Row] = []
    counts: list[TornCount] = []
    for name, runner in open_runners(options.loops):
        new_rows = runner.run(measure(name, plan))
        count = runner.run(check(plan))
        rows += new_rows
        counts.append(count)
        print(
            f"{name}: {count.num_snapshots} snapshots during {count.num_steps} steps, "
            f"torn = {count.num_torn}"
        )
    print(format_table(rows))
    print(summarise(rows))
    num_torn = sum(count.num_torn for count in counts)
    written = {
        "num_snapshots": sum(count.num_snapshots for count in counts),
        "num_torn": num_torn,
    }
    write_json(options.output, "variables", rows, is_quick=options.is_quick, counts=written)
    print(f"Written to {options.output}.")
    if num_torn:
        raise SystemExit(f"{num_torn} snapshots were torn.")


async def measure(loop: str, plan: Plan) -> list[Row]:
    """Measure everything once on the running loop, which is called `loop`."""
    num_rounds = plan.num_rounds
    rows = []
    async with ar.MirroredStrategy(ar.list_devices("cpu")) as strategy:
        rows += await measure_writes(
            loop, strategy, num_writes=plan.num_writes, num_rounds=num_rounds
        )
        rows += await measure_write_bytes(
            loop, strategy, num_writes=plan.num_counted_writes, num_rounds=min(num_rounds, 3)
        )
        rows += await measure_reads(loop, strategy, num_reads=plan.num_reads, num_rounds=num_rounds)
    async with ar.MirroredStrategy(ar.list_devices("cpu")) as strategy:
        rows += await measure_snapshots(
            loop, strategy, num_variables=plan.num_variables, num_rounds=num_rounds
        )
    return rows


async def check(plan: Plan) -> TornCount:
    """Look for snapshots of a thread that steps on the running loop have torn."""
    async with ar.MirroredStrategy(ar.list_devices("cpu")) as strategy:
        return await count_torn(strategy, num_snapshots=plan.num_steps, num_steps=plan.num_steps)
