"""The cost of being watched: merges and steps with recorder, observers, trace and exporters.

Merges of tasks all happen in one thread, so processor time is compared, which other programs
disturb little. Each row compares one way of watching with none, or with the recorder alone as every
program has it, in the same process and in turns. Targets are printed with marks and never change
the exit status: a busy machine is no defect.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import process_time
from typing import Any, final

import numpy as np

import aioreplica as ar
from aioreplica.telemetry import Observer
from aioreplica.telemetry._trace import TraceRecorder

from ._command import parse_options
from ._loops import open_runners
from ._measure import Contender, take_turns
from ._report import format_table, summarise, write_json
from ._row import Row, Target, compared_row

MAX_REPLICAS = 8
RECORDED, UNMEASURABLE, TRACED = 1.05, 1.02, 1.25
TRACE_CAPACITY = 4096
BYTES_PER_HAPPENING = 2000


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        num_rounds: Rounds of each comparison.
        sizes: Numbers of replicas.
        num_arrivals: Arrivals in merges that make one sample.
    """

    num_rounds: int
    sizes: tuple[int, ...]
    num_arrivals: int


FULL = Plan(101, (2, 4, 8), 4_000)
QUICK = Plan(3, (2,), 400)


def main(arguments: Sequence[str]) -> None:
    """Measure, print the table, write the JSON."""
    options = parse_options("telemetry", __doc__, arguments)
    plan = QUICK if options.is_quick else FULL
    ar.set_logical_devices("cpu", MAX_REPLICAS)
    rows: list[Row] = []
    for name, runner in open_runners(options.loops):
        rows += runner.run(measure(name, plan))
    print(format_table(rows))
    print(summarise(rows))
    write_json(options.output, "telemetry", rows, is_quick=options.is_quick)
    print(f"Written to {options.output}.")


async def measure(loop: str, plan: Plan) -> list[Row]:
    """Measure everything once on the running loop, which is called `loop`."""
    devices = ar.list_devices("cpu")
    rows: list[Row] = []
    for size in plan.sizes:
        async with ar.MirroredStrategy(devices[:size]) as strategy:
            rows += await _measure_merges(loop, strategy, plan)
    async with ar.MirroredStrategy(devices[:4]) as strategy:
        rows.append(await _measure_memory(loop, strategy, plan))
    return rows


async def _measure_merges(loop: str, strategy: ar.Strategy, plan: Plan) -> list[Row]:
    size = strategy.num_replicas_in_sync
    num_merges = max(100, plan.num_arrivals // size)

    def merges(prepare: Callable[[], Callable[[], object]]) -> Contender:
        async def sample() -> float:
            end = prepare()
            try:
                start = process_time()
                await strategy.run(_merge_often, (num_merges,))
                return (process_time() - start) / (num_merges * size) * 1e6
            finally:
                end()

        return sample

    samples = await take_turns(
        {
            "nothing": merges(lambda: _without_recorder(strategy)),
            "recorder": merges(lambda: _nothing),
            "twin": merges(lambda: _nothing),
            "unwanted": merges(lambda: strategy.observers.add(Observer(op_ended=_ignore))),
            "trace": merges(lambda: strategy.observers.add(_new_trace(strategy).observer)),
        },
        num_rounds=plan.num_rounds,
    )
    return [
        compared_row(
            f"merge, {title}", loop, size, "us/replica", ours=samples[name], against=against,
            floor=samples[floor], target=Target("ratio", limit),
        )
        for name, title, floor, against, limit in (
            ("recorder", "recorder", "nothing", "no observer", RECORDED),
            ("unwanted", "exporter off", "twin", "recorder", UNMEASURABLE),
            ("trace", "trace", "recorder", "recorder", TRACED),
        )
    ]  # fmt: skip


async def _measure_memory(loop: str, strategy: ar.Strategy, plan: Plan) -> Row:
    """Compare the memory of a trace that is full with that of one that was full three times."""
    size = strategy.num_replicas_in_sync
    ours: list[float] = []
    floor: list[float] = []
    for _ in range(min(3, plan.num_rounds)):
        trace = _new_trace(strategy)
        end = strategy.observers.add(trace.observer)
        tracemalloc.start()
        try:
            for kept, num_merges in ((floor, TRACE_CAPACITY), (ours, 2 * TRACE_CAPACITY)):
                await strategy.run(_merge_often, (num_merges,))
                kept.append(tracemalloc.get_traced_memory()[0] / TRACE_CAPACITY)
        finally:
            tracemalloc.stop()
            end()
    return compared_row(
        "trace memory, full 3 times", loop, size, "bytes/happening", ours=ours,
        against="full once", floor=floor, target=Target("ratio", 1.1),
    )  # fmt: skip


async def _merge_often(num_merges: int) -> None:
    ctx = ar.get_replica_context()
    assert ctx is not None
    value = np.zeros(4, np.float32)
    for _ in range(num_merges):
        await ctx.merge_call(_give_back, args=(value,))


def _give_back(_strategy: ar.Strategy, value: Any) -> Any:  # Any: a PerReplica in and out
    return value


def _new_trace(strategy: ar.Strategy) -> TraceRecorder:
    return TraceRecorder(strategy._runtime.device_names, capacity=TRACE_CAPACITY)


def _without_recorder(strategy: ar.Strategy) -> Callable[[], None]:
    """Stop the recorder for a while; only a benchmark can."""
    recording, strategy.observers.merge_ended = strategy.observers.merge_ended, None

    def restore() -> None:
        strategy.observers.merge_ended = recording

    return restore


def _ignore(*_event: object) -> None:
    """Be an observer of something that does not happen here."""


def _nothing() -> None:
    """Change nothing."""
