"""Devices in processes of their own: beside threads and a bare process pool; killed, and for long.

`--kills` processes are killed with SIGKILL in the middle of an op, which must be a DeviceError that
names the op; then nothing of them may be left. `--ops` ops must leave the memory of both sides as
it was. What is wrong there changes the exit status; targets of speed are printed with marks and
do not.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, final

import autograd
import autograd.numpy as anp
import numpy as np
import psutil

import aioreplica as ar
from aioreplica.errors import DeviceError

from ._measure import Contender, take_turns
from ._online_http import rows_of, run_way
from ._online_server import IN_BACKGROUND, ON_PROCESSES
from ._report import format_table, summarise, write_json
from ._row import Row, Target, compared_row

LOOP = "asyncio"
PROCESSES, THREADS = ("cpu:0", "cpu:1"), ("cpu:2", "cpu:3")
MIB = 1024 * 1024
ALLOWED_GROWTH_BYTES = 8 * MIB
COUNT_TO = 400_000  # of a pure Python op: 10 to 30 ms


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        num_rounds: Rounds of each comparison.
        num_steps: Steps that make one sample.
        num_hops: Hops that make one sample.
        num_kills: Processes to kill.
        num_ops: Ops to run for long.
        num_windows: Windows of predictions beside steps on processes; a third of it on threads.
        window_s: How long one is.
    """

    num_rounds: int
    num_steps: int
    num_hops: int
    num_kills: int
    num_ops: int
    num_windows: int
    window_s: float


FULL = Plan(15, 20, 200, 100, 1_000_000, 20, 2.0)
QUICK = Plan(2, 3, 20, 3, 2_000, 1, 0.5)


def main(arguments: Sequence[str]) -> None:
    """Measure, kill, run for long, print, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks processes", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run")
    parser.add_argument("--kills", type=int, help="processes to kill (100; quick: 3)")
    parser.add_argument("--ops", type=int, help="ops to run for long (1000000; quick: 2000)")
    parser.add_argument("--no-speed", action="store_true", help="leave the comparisons out")
    default = Path("benchmark-results-processes.json")
    parser.add_argument("--output", type=Path, default=default, metavar="PATH")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else FULL
    num_kills = plan.num_kills if options.kills is None else options.kills
    num_ops = plan.num_ops if options.ops is None else options.ops
    ar.set_logical_devices("cpu", 4, processes=[True, True, False, False])
    rows: list[Row] = []
    if not options.no_speed:
        rows = asyncio.run(measure(plan))
        print(format_table(rows))
        print(summarise(rows), flush=True)
    failures: list[str] = []
    counts: dict[str, object] = {}
    if num_kills:
        with tempfile.TemporaryDirectory() as folder:
            counts["kills"] = asyncio.run(kill(num_kills, Path(folder), failures))
    if num_ops:
        counts["long run"] = asyncio.run(run_long(num_ops, failures))
    write_json(options.output, "processes", rows, is_quick=options.quick, counts=counts)
    if failures:
        raise SystemExit("; ".join(failures))


async def measure(plan: Plan) -> list[Row]:
    """Compare with threads and with a bare pool."""
    rows = []
    for name, new_step, bare in (
        ("pure Python", count_step, partial(count, COUNT_TO)),
        ("HIPS autograd", autograd_step, partial(recurrent_slope, *weights_and_inputs())),
    ):
        rows += await compare_steps(name, new_step, bare, plan)
    rows += await compare_hops(plan)
    for step in ("pure Python steps", "autograd steps"):
        rows += await asyncio.to_thread(compare_predictions, step, plan)
    return rows


# ---- steps that hold the GIL -----------------------------------------------------------------


def count(limit: int) -> int:
    """Add numbers up, one by one."""
    total = 0
    for number in range(limit):
        total += number
    return total


def count_step(_strategy: ar.MirroredStrategy) -> Callable[[], Any]:
    """Return a step of pure Python."""

    async def step() -> int:
        return await _context().run_on_device(count, COUNT_TO)

    return step


def recurrent_loss(w: Any, inputs: Any) -> Any:
    """Run a small recurrent model: many operations on small arrays."""
    state = anp.zeros((8, 16))
    for each in inputs:
        state = anp.tanh(each + state @ w)
    return anp.sum(state**2)


def weights_and_inputs() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((200, 8, 16))
    return rng.standard_normal((16, 16)) * 0.1, inputs


def autograd_step(strategy: ar.MirroredStrategy) -> Callable[[], Any]:
    """Return a training step of a small recurrent model."""
    weights, inputs = weights_and_inputs()
    with strategy.scope():
        w = ar.Variable(weights, name="w")
        optimizer = ar.optimizers.SGD(1e-3)

    def loss() -> Any:
        return recurrent_loss(w.value, inputs)

    async def step() -> None:
        await optimizer.minimize(loss)

    return step


def recurrent_slope(w: Any, inputs: Any) -> Any:
    """Return the gradient of the recurrent model."""
    return autograd.grad(recurrent_loss)(w, inputs)


async def compare_steps(
    name: str,
    new_step: Callable[[ar.MirroredStrategy], Callable[[], Any]],
    bare: Callable[[], Any],
    plan: Plan,
) -> list[Row]:
    """Compare steps on two processes with the same steps on two threads.

    And their ops on the two processes of a bare pool with these: what two cores give at most.
    """
    loop = asyncio.get_running_loop()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        async with ar.MirroredStrategy(PROCESSES) as ours, ar.MirroredStrategy(THREADS) as floor:

            def contender(take: Callable[[], Any]) -> Contender:
                async def sample() -> float:
                    begin_s = perf_counter()
                    for _ in range(plan.num_steps):
                        await take()
                    return (perf_counter() - begin_s) / plan.num_steps * 1e3

                return sample

            def both_in_the_pool() -> Any:
                return asyncio.gather(*(loop.run_in_executor(pool, bare) for _ in range(2)))

            samples = await take_turns(
                {
                    "ours": contender(partial(ours.run, new_step(ours))),
                    "floor": contender(partial(floor.run, new_step(floor))),
                    "pool": contender(both_in_the_pool),
                },
                num_rounds=plan.num_rounds,
            )
    return [
        compared_row(
            f"step of {name}", LOOP, 2, "ms", ours=samples["ours"], against="2 threads",
            floor=samples["floor"], target=Target("ratio", 1 / 1.6),
        ),
        compared_row(
            f"bare ops of {name}", LOOP, 2, "ms", ours=samples["pool"], against="2 threads, steps",
            floor=samples["floor"],
        ),
    ]  # fmt: skip


def compare_predictions(name: str, plan: Plan) -> list[Row]:
    """Compare the time of predictions beside steps with that of idle ones, in other processes."""
    rows: list[Row] = []
    for way in (name + ON_PROCESSES, name + ON_PROCESSES + IN_BACKGROUND):
        rounds = run_way(way, plan.num_windows, seconds=plan.window_s)
        rows += rows_of(way, rounds, ratios={"p99": 3.0})
    beside = run_way(name, -(-plan.num_windows // 3), seconds=plan.window_s)
    return rows + rows_of(name, beside)


# ---- hops ------------------------------------------------------------------------------------


def empty(*_args: object) -> None:
    """Do nothing."""


async def compare_hops(plan: Plan) -> list[Row]:
    """Compare hops with those of a bare pool, and with a copy."""
    array, target = np.ones(4 * MIB // 8), np.ones(4 * MIB // 8)
    rows: list[Row] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        async with ar.OneDeviceStrategy(PROCESSES[0]) as strategy:

            async def step() -> None:
                rows.extend(await _hop_rows(_context(), pool, array, target, plan))

            await strategy.run(step)
    return rows


async def _hop_rows(ctx: Any, pool: ProcessPoolExecutor, array: Any, target: Any,
                    plan: Plan) -> list[Row]:  # fmt: skip
    # One by one in turns, not one sample each: the pairs of a round see the same machine.
    pairs: dict[str, list[float]] = {"hop": [], "pool": [], "array": [], "copy": []}
    loop = asyncio.get_running_loop()
    for _ in range(plan.num_rounds + 1):
        found: dict[str, list[float]] = {name: [] for name in [*pairs, "awaited"]}
        for _ in range(plan.num_hops):
            begin_s = perf_counter()
            await ctx.run_on_device(empty)
            found["hop"].append(perf_counter() - begin_s)
            begin_s = perf_counter()
            pool.submit(empty).result()
            found["pool"].append(perf_counter() - begin_s)
            begin_s = perf_counter()
            await loop.run_in_executor(pool, empty)
            found["awaited"].append(perf_counter() - begin_s)
            begin_s = perf_counter()
            await ctx.run_on_device(empty, array)
            found["array"].append(perf_counter() - begin_s)
            begin_s = perf_counter()
            np.copyto(target, array)
            found["copy"].append(perf_counter() - begin_s)
        micros = {name: median(times) * 1e6 for name, times in found.items()}
        pairs["hop"].append(micros["hop"])
        pairs["pool"].append(min(micros["pool"], micros["awaited"]))
        pairs["array"].append(micros["array"] - micros["hop"])
        pairs["copy"].append(micros["copy"])
    kept = {name: samples[1:] for name, samples in pairs.items()}
    return [
        compared_row(
            "hop of an empty op", LOOP, 1, "µs", ours=kept["hop"], against="ProcessPoolExecutor",
            floor=kept["pool"], target=Target("ratio", 3.0),
        ),
        compared_row(
            "4 MiB more in a hop", LOOP, 1, "µs", ours=kept["array"], against="one copy of it",
            floor=kept["copy"], target=Target("ratio", 1.5),
        ),
    ]  # fmt: skip


# ---- kills and long runs ---------------------------------------------------------------------


def spin(array: Any, mark: str) -> None:
    """Leave a mark, then run until the process is killed."""
    Path(mark).touch()
    while True:
        array += 1.0


async def kill(num_kills: int, folder: Path, failures: list[str]) -> dict[str, object]:
    """Kill processes in the middle of an op; look whether the device goes on, and what is left."""
    names = _names_in_shared_memory()
    rng = random.Random(0)
    ours = psutil.Process()
    num_named = num_usable = 0
    num_files = 0
    begin_s = perf_counter()
    async with ar.OneDeviceStrategy(PROCESSES[0]) as strategy:
        for i in range(num_kills):
            pid = (await strategy.run(_ask)).values[0]
            mark = folder / str(i)
            run = asyncio.ensure_future(strategy.run(_spin, args=(str(mark),)))
            await asyncio.to_thread(_wait_for, mark)
            await asyncio.sleep(rng.uniform(0.0, 0.02))
            os.kill(pid, signal.SIGKILL)
            try:
                await run
            except DeviceError as error:
                num_named += "op 'spin'" in str(error)
            num_usable += (await strategy.run(_ask)).values[0] != pid
            gc.collect()  # an error and its traceback hold the executor that broke
            num_files = num_files if i else ours.num_fds()
        grown = ours.num_fds() - num_files
    await asyncio.to_thread(_wait_for_processes, ours)
    gc.collect()
    left = [each.cmdline() for each in ours.children() if "spawn_main" in " ".join(each.cmdline())]
    new_names = sorted(_names_in_shared_memory() - names)
    print(
        f"killed {num_kills} processes in {perf_counter() - begin_s:.0f} s: {num_named} "
        f"DeviceErrors that name the op, usable again {num_usable} times; left: "
        f"{len(left)} processes, {len(new_names)} mappings of shared memory, "
        f"{grown} more open files",
        flush=True,
    )
    if (num_named, num_usable) != (num_kills, num_kills):
        failures.append(f"{num_named} errors and {num_usable} recoveries of {num_kills} kills")
    if left or new_names or grown > 0:
        failures.append(f"kills have left {left}, {new_names}, {grown} open files")
    return {"of": num_kills, "named": num_named, "usable": num_usable, "left": len(left)}


async def run_long(num_ops: int, failures: list[str]) -> dict[str, object]:
    """Run many ops; compare the memory of both sides before and after."""
    async with ar.OneDeviceStrategy(PROCESSES[0]) as strategy:
        array = np.ones(MIB // 8)

        async def steps(number: int) -> None:
            ctx = _context()
            for i in range(number):
                await ctx.run_on_device(empty, array if i % 100 == 0 else i)

        async def memory() -> tuple[int, int]:
            gc.collect()
            process = strategy.statistics().lanes[PROCESSES[0]].process
            assert process is not None
            return psutil.Process().memory_info().rss, psutil.Process(process.pid).memory_info().rss

        await strategy.run(steps, args=(max(num_ops // 10, 100),))
        before = await memory()
        begin_s = perf_counter()
        await strategy.run(steps, args=(num_ops,))
        seconds = perf_counter() - begin_s
        after = await memory()
    grown = [now - then for now, then in zip(after, before, strict=True)]
    print(
        f"{num_ops} ops in {seconds:.0f} s: memory grew by {grown[0] / MIB:.2f} MiB here and "
        f"{grown[1] / MIB:.2f} MiB in the process",
        flush=True,
    )
    if max(grown) > ALLOWED_GROWTH_BYTES:
        failures.append(f"{num_ops} ops have grown memory by {grown} bytes")
    return {"ops": num_ops, "seconds": seconds, "grown_bytes": grown}


async def _ask() -> int:
    return await _context().run_on_device(os.getpid)


async def _spin(mark: str) -> None:
    await _context().run_on_device(spin, np.ones(MIB), mark)


def _context() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def _names_in_shared_memory() -> set[str]:
    """Return what of shared memory this process has mapped, with or without names."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return {line for line in lines if "memfd:aioreplica" in line or "/dev/shm/" in line}


def _wait_for(mark: Path) -> None:
    while not mark.exists():
        time.sleep(0.001)


def _wait_for_processes(ours: psutil.Process) -> None:
    processes = [each for each in ours.children() if "spawn_main" in " ".join(each.cmdline())]
    psutil.wait_procs(processes, 10)
