"""Training a network of 784-512-512-10: steps on replicas beside a sequential NumPy program.

The sequential program is measured twice, with one BLAS thread and with as many as BLAS takes by
itself; a strategy shares the cores out among its replicas, so two replicas on two cores have one
BLAS thread each. Targets are printed with marks and never change the exit status.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import aioreplica as ar

from ._adapters import measure_adapters
from ._command import parse_options
from ._loops import open_runners
from ._report import format_table, summarise, write_json
from ._row import Row
from ._torch_loops import measure_torch_loops
from ._training import Speed, blas_threads, measure_overhead, measure_steps

MAX_REPLICAS = 4


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        num_rounds: Rounds of each comparison.
        num_adapter_rounds: Rounds of those with other libraries, whose threads make them unsteady.
        num_steps: Steps that make one sample.
        sizes: Numbers of replicas.
        batch_sizes: Sizes of the global batch.
        optimizers: Names of classes in `ar.optimizers`.
    """

    num_rounds: int
    num_adapter_rounds: int
    num_steps: int
    sizes: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    optimizers: tuple[str, ...]


FULL = Plan(9, 41, 10, (1, 2, MAX_REPLICAS), (32, 256), ("SGD", "Adam"))
QUICK = Plan(1, 1, 1, (1, 2), (32, 256), ("SGD", "Adam"))


def main(arguments: Sequence[str]) -> None:
    """Measure, print the tables, write the JSON."""
    options = parse_options("train", __doc__, arguments)
    plan = QUICK if options.is_quick else FULL
    ar.set_logical_devices("cpu", MAX_REPLICAS)
    num_threads = blas_threads()
    rows: list[Row] = []
    for name, runner in open_runners(options.loops):
        found, speeds = runner.run(measure(name, plan, num_threads))
        rows += found
        for speed in speeds:
            print(f"{name}: {speed}")
    print(format_table(rows))
    print(summarise(rows))
    write_json(
        options.output, "train", rows, is_quick=options.is_quick,
        counts={"num_blas_threads": num_threads},
    )  # fmt: skip
    print(f"Written to {options.output}.")


async def measure(loop: str, plan: Plan, num_threads: int) -> tuple[list[Row], list[Speed]]:
    """Measure everything once on the running loop, which is called `loop`."""
    rows: list[Row] = []
    speeds: list[Speed] = []
    rows += await measure_adapters(loop, num_steps=plan.num_steps, num_rounds=4 * plan.num_rounds)
    rows += await measure_torch_loops(loop, num_steps=plan.num_steps, num_rounds=plan.num_rounds)
    devices = ar.list_devices("cpu")
    for size in plan.sizes:
        async with ar.MirroredStrategy(devices[:size]) as strategy:
            for name in plan.optimizers:
                for batch_size in plan.batch_sizes:
                    found, speed = await measure_steps(
                        loop, strategy, name, batch_size=batch_size, num_steps=plan.num_steps,
                        num_rounds=plan.num_rounds, num_threads=num_threads,
                    )  # fmt: skip
                    rows += found
                    speeds.append(speed)
                rows += await measure_overhead(
                    loop, strategy, name, num_steps=plan.num_steps, num_rounds=plan.num_rounds
                )
    return rows, speeds
