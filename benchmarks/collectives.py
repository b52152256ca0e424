"""The cost of collectives: reductions of all sizes beside blocked NumPy sums.

Each row compares the library with a floor measured in the same process, in turns; one counts the
results that differ when replicas arrive in other orders, and must be 0. Targets are printed with
marks and never change the exit status; a result that differs does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import aioreplica as ar
from aioreplica.collectives import INLINE_SUM_BYTES

from ._arrival_orders import OrderCount, check_orders
from ._command import parse_options
from ._handles import measure_handles, measure_overlap
from ._inline import MIB, Crossing, measure_inline
from ._loop_lag import measure_lag
from ._loops import open_runners
from ._reductions import measure_large, measure_leaves, measure_small
from ._report import format_table, summarise, write_json
from ._row import Row

MAX_REPLICAS = 8
NUM_REPLICAS = 4  # where only one number is measured


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        num_rounds: Rounds of each comparison.
        sizes: Numbers of replicas for large reductions.
        mib: Sizes of large reductions, in MiB for each replica.
        num_read: MiB read in one sample of them.
        num_small: Small reductions that make one sample.
        num_packed: Reductions of many leaves that make one sample.
        num_lag: Reductions during which the lag is sampled.
        num_lag_rounds: Rounds of that.
        totals: Bytes read by one reduction, on the way to the inline threshold.
        num_orders: Orders of arrival for each pack size and number of threads.
        stream_counts: Numbers of threads.
    """

    num_rounds: int
    sizes: tuple[int, ...]
    mib: tuple[int, ...]
    num_read: int
    num_small: int
    num_packed: int
    num_lag: int
    num_lag_rounds: int
    totals: tuple[int, ...]
    num_orders: int
    stream_counts: tuple[int, ...]


FULL = Plan(
    11, (2, 4, 8), (1, 4, 16, 64), 256, 1_000, 100, 60, 5,
    tuple(MIB // 4 << i for i in range(7)), 200, (1, 2, 3, 4),
)  # fmt: skip
QUICK = Plan(3, (2, 4), (1, 16), 32, 50, 5, 3, 2, (MIB // 4, 2 * MIB, 16 * MIB), 10, (1, 4))


def main(arguments: Sequence[str]) -> None:
    """Measure, check that results are the same, print the table, write the JSON."""
    options = parse_options("collectives", __doc__, arguments)
    plan = QUICK if options.is_quick else FULL
    ar.set_logical_devices("cpu", MAX_REPLICAS)
    rows: list[Row] = []
    counts: list[OrderCount] = []
    for name, runner in open_runners(options.loops):
        new_rows, crossings = runner.run(measure(name, plan))
        checked, count = check_orders(
            name, num_orders=plan.num_orders, stream_counts=plan.stream_counts
        )
        rows += [*new_rows, *checked]
        counts.append(count)
        print(
            f"{name}: off the loop is faster in {', in '.join(map(str, crossings))}; the library "
            f"goes there above {INLINE_SUM_BYTES / MIB:.1f} MiB."
        )
    print(format_table(rows))
    print(summarise(rows))
    num_different = sum(count.num_different for count in counts)
    written = {
        "num_results": sum(count.num_results for count in counts),
        "num_different": num_different,
    }
    write_json(options.output, "collectives", rows, is_quick=options.is_quick, counts=written)
    print(f"Written to {options.output}.")
    if num_different:
        raise SystemExit(f"{num_different} results depend on orders, packs or threads.")


async def measure(loop: str, plan: Plan) -> tuple[list[Row], list[Crossing]]:
    """Measure everything once on the running loop, which is called `loop`."""
    num_rounds = plan.num_rounds
    devices = ar.list_devices("cpu")
    rows: list[Row] = []
    for size in plan.sizes:
        async with ar.MirroredStrategy(devices[:size]) as strategy:
            for num_mib in plan.mib:
                rows += await measure_large(
                    loop, strategy, num_mib=num_mib, num_read=plan.num_read, num_rounds=num_rounds
                )
    async with ar.MirroredStrategy(devices[:NUM_REPLICAS]) as strategy:
        rows += await measure_small(loop, strategy, num_times=plan.num_small, num_rounds=num_rounds)
        rows += await measure_leaves(
            loop, strategy, num_times=plan.num_packed, num_rounds=num_rounds
        )
        rows += await measure_handles(
            loop, strategy, num_times=plan.num_small, num_rounds=num_rounds
        )
        rows += await measure_overlap(loop, strategy, num_rounds=num_rounds)
        rows += await measure_lag(
            loop, strategy, num_times=plan.num_lag, num_rounds=plan.num_lag_rounds
        )
        inline, crossings = await measure_inline(
            loop, strategy, totals=plan.totals, num_read=plan.num_read * MIB // 4,
            num_rounds=num_rounds,
        )  # fmt: skip
    return [*rows, *inline], crossings
