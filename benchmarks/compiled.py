"""Compiled steps beside programs of jax by hand: a scan over the same chunk, and a call per step.

Needs the extra `jax`. All three train the same network with the same batches, in turns, in
chunks of 64 steps; weights that differ are an error. Two rows say what a reader of the weights
costs: beside no task, and beside one that wakes up as often and reads nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import final

import numpy as np

import aioreplica as ar

from ._command import parse_options
from ._loops import open_runners
from ._measure import take_turns
from ._report import format_table, summarise, write_json
from ._row import Row, Target, compared_row

MLP = (784, 128, 10)
SMALL = (8, 16, 4)
READ_S = 0.001

NEAR = {"SGD": 1e-5, "Adam": 0.02}
"""How far weights may be apart behind one chunk, in units of the largest: SGD's were equal in every
bit, Adam's within 2e-6 but for the batch of 256. There a gradient is nearly 0 that Adam divides by
its own size, its rounding turns a unit, and 2 % of the weights were up to 0.6 % apart behind 64
steps (5e-7 behind 8). One step from one state is held to 1e-5 of the eager one in
tests/device_loop/test_compiled_numerics.py."""


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        num_rounds: Rounds of each comparison.
        batch_sizes: Examples of a step of the MLP.
        replicas: Numbers of replicas.
        optimizers: Their names.
    """

    num_rounds: int
    batch_sizes: tuple[int, ...]
    replicas: tuple[int, ...]
    optimizers: tuple[str, ...]


FULL = Plan(7, (32, 256), (1, 2, 4), ("SGD", "Adam"))
QUICK = Plan(1, (32,), (1, 2), ("SGD",))


def main(arguments: Sequence[str]) -> None:
    """Measure, print the table, write the JSON."""
    options = parse_options("compiled", __doc__, arguments)
    plan = QUICK if options.is_quick else FULL
    ar.set_logical_devices("cpu", max(2, *plan.replicas))  # before jax is imported
    rows: list[Row] = []
    for name, runner in open_runners(options.loops):
        rows += runner.run(measure(name, plan))
    print(format_table(rows))
    print(summarise(rows))
    write_json(options.output, "compiled", rows, is_quick=options.is_quick)
    print(f"Written to {options.output}.")


async def measure(loop: str, plan: Plan) -> list[Row]:
    """Measure everything once on the running loop, which is called `loop`."""
    models = [(f"MLP, batch {size}", MLP, size, 0.95) for size in plan.batch_sizes]
    cases = [
        ((f"{name}, {optimizer}", sizes, size, num_replicas, optimizer), share)
        for num_replicas, optimizer in product(plan.replicas, plan.optimizers)
        for name, sizes, size, share in (*models, ("small model", SMALL, 32, 0.8))
    ]
    rows = []
    for number, (case, share) in enumerate(cases, 1):
        print(f"{number} of {len(cases)}: {case[0]}, N={case[3]}", file=sys.stderr, flush=True)
        rows += await _measure_case(loop, case, share, plan.num_rounds)
    return rows


async def _measure_case(
    loop: str, given: tuple[str, tuple[int, ...], int, int, str], share: float, num_rounds: int
) -> list[Row]:
    from ._compiled_programs import ByHand, Case, Ours  # it imports jax

    case = Case(*given)
    devices = [f"cpu:{i}" for i in range(case.num_replicas)]
    async with ar.MirroredStrategy(devices) as strategy:
        ours = Ours(case, strategy)
        scan, calls = ByHand(case, scans=True), ByHand(case, scans=False)
        await ours.sample(1)
        await scan.sample(1)
        _require_equal(case.name, NEAR[case.optimizer], ours.weights, scan.weights)
        contenders = {"ours": ours.sample, "scan": scan.sample, "calls": calls.sample}
        found = await take_turns(contenders, num_rounds=num_rounds)
        beside = {
            "ours": _beside(ours.sample, lambda: ours.weights),
            "asleep": _beside(ours.sample, lambda: None),
            "alone": ours.sample,
        }
        read = await take_turns(beside, num_rounds=num_rounds)
    unit, count = "µs per step", case.num_replicas
    return [
        compared_row(
            case.name, loop, count, unit, ours=found["ours"], against="lax.scan by hand",
            floor=found["scan"], target=Target("ratio", 1 / share),
        ),
        compared_row(
            case.name, loop, count, unit, ours=found["ours"], against="jit, a call per step",
            floor=found["calls"], target=Target("ratio", 1.0),
        ),
        compared_row(
            f"{case.name}, read at 1 kHz", loop, count, unit, ours=read["ours"],
            against="without readers", floor=read["alone"], target=Target("ratio", 1.1),
        ),
        compared_row(
            f"{case.name}, read at 1 kHz", loop, count, unit, ours=read["ours"],
            against="a task that sleeps as often", floor=read["asleep"],
        ),
    ]  # fmt: skip


def _beside(
    sample: Callable[[], Awaitable[float]], read_all: Callable[[], object]
) -> Callable[[], Awaitable[float]]:
    """Return a sample during which a task reads something a thousand times a second."""

    async def read() -> None:
        while True:
            kept = read_all()
            await asyncio.sleep(READ_S)
            del kept

    async def sampled() -> float:
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(read())
            found = await sample()
            reader.cancel()
        return found

    return sampled


def _require_equal(
    name: str, near: float, ours: Sequence[np.ndarray], by_hand: Sequence[np.ndarray]
) -> None:
    for mine, other in zip(ours, by_hand, strict=True):
        difference = float(np.max(np.abs(mine - other)) / np.max(np.abs(other)))
        if difference > near:
            raise SystemExit(f"{name}: the weights differ by {difference:.1e} of the largest.")
