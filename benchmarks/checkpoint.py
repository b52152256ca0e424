"""Checkpoints: saving and restoring beside raw files, what that costs others, and kills.

A training process is killed with SIGKILL at random times while it saves, `--kills` times, and once
behind every step of a run of 20 steps, whose end must be the same bit for bit. With `--signals`
trainings are stopped by SIGINT, SIGTERM and SIGKILL at random times while calls that read fail now
and then, and go on until they have ended: with the documented statuses, and after each stop with
every bit that an uninterrupted training has at that step; and jobs of the training service train
while the disk is full.

A restore that fails or mixes two saves, a promised step that is gone, another end and another exit
status change the exit status of this program; targets of speed are printed with marks and do not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, final

import numpy as np

import aioreplica as ar

from ._checkpoint_kills import kill_at_every_step, kill_at_random, stop_with_sigterm
from ._checkpoint_stops import stop_at_random
from ._full_disk import fill_up
from ._full_service import train_beside_full_disk
from ._loop_lag import lag_during
from ._measure import Contender, take_turns
from ._report import format_table, summarise, write_json
from ._row import Row, Target, compared_row
from ._saving_steps import measure_steps

MIB = 1024 * 1024
NUM_ARRAYS = 16
CHUNK_BYTES = 4 * MIB
LOOP = "asyncio"


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        num_bytes: Of the state that is saved.
        num_rounds: Rounds of each comparison.
        num_variables: Of the state whose cut is timed.
        num_steps: Of a sample of training while it saves.
        every: Which steps a run is killed behind.
    """

    num_bytes: int
    num_rounds: int
    num_variables: int
    num_steps: int
    every: int


FULL = Plan(256 * MIB, 5, 1000, 40, 1)
QUICK = Plan(8 * MIB, 2, 100, 6, 6)


def main(arguments: Sequence[str]) -> None:
    """Measure, kill, print, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks checkpoint", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, few steps")
    parser.add_argument("--kills", type=int, help="SIGKILLs at random times (300; quick: 5)")
    parser.add_argument(
        "--signals", type=int, nargs="?", const=0, metavar="N",
        help="SIGINT, SIGTERM and SIGKILL mixed, N times (as many as --kills), with failing reads",
    )  # fmt: skip
    parser.add_argument("--no-speed", action="store_true", help="measure nothing")
    parser.add_argument("--no-kills", action="store_true", help="leave out --kills and full disks")
    default = Path("benchmark-results-checkpoint.json")
    parser.add_argument("--output", type=Path, default=default, metavar="PATH")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else FULL
    num_kills = (5 if options.quick else 300) if options.kills is None else options.kills
    ar.set_logical_devices("cpu", 2)
    rows: list[Row] = []
    if not options.no_speed:
        rows = [*asyncio.run(measure(plan)), *asyncio.run(measure_training(plan))]
        print(format_table(rows))
        print(summarise(rows))
    failures: list[str] = []
    counts: dict[str, object] = {}
    if not options.no_kills:
        failures, counts = kill(plan, num_kills)
    if options.signals is not None:
        stops = stop_at_random(options.signals or num_kills)
        print(stops)
        counts["signals"] = asdict(stops)
        if not stops.is_good:
            failures.append("a signal was not survived")
        service = train_beside_full_disk(2 if options.quick else 20)
        print(service)
        counts["service on a full disk"] = asdict(service)
        if not service.is_good:
            failures.append("a job of the training service did not survive a full disk")
    write_json(options.output, "checkpoint", rows, is_quick=options.quick, counts=counts)
    if failures:
        raise SystemExit("; ".join(failures))


def kill(plan: Plan, num_kills: int) -> tuple[list[str], dict[str, object]]:
    """Kill training processes; return what must not be, and all counts."""
    failures = []
    counts: dict[str, object] = {}
    for is_looped in (False, True):
        name = "device loop" if is_looped else "async steps"
        wrong, of = kill_at_every_step(is_looped=is_looped, every=plan.every)
        print(f"killed behind {of} steps and resumed ({name}): other bits at the end = {wrong}")
        counts[f"resumed, {name}"] = {"of": of, "wrong": wrong}
        if wrong:
            failures.append(f"{wrong} of {of} resumed runs ({name}) ended in other bits")
    status = stop_with_sigterm()
    print(f"told to stop with SIGTERM: exit status {status} after a save")
    if status != 75:
        failures.append(f"SIGTERM gave exit status {status}, not 75")
    disk = fill_up(plan.every)
    if disk.why_not:
        print(f"no full disk: a small one could not be mounted ({disk.why_not})")
    else:
        print(
            f"saved {disk.num_saves} times on a disk that is almost full: {disk.num_refused} found "
            f"no space, {disk.num_wrong} left another state than they said"
        )
    counts["full disk"] = asdict(disk)
    if disk.num_wrong:
        failures.append("a full disk was not survived")
    kills = kill_at_random(num_kills)
    print(
        f"killed {kills.num_kills} times while saving: {kills.num_restored} restored, "
        f"{kills.num_torn} torn, {kills.num_lost} promised and lost, newest step {kills.newest}"
    )
    counts["kills"] = {"of": kills.num_kills, "restored": kills.num_restored}
    if not kills.is_good:
        failures.append("a kill while saving was not survived")
    return failures, counts


async def measure(plan: Plan) -> list[Row]:
    """Compare saving and restoring with raw files, and look at the loop meanwhile."""
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        rng = np.random.default_rng(0)
        count = plan.num_bytes // NUM_ARRAYS // 4
        arrays = [rng.random(count, np.float32) for _ in range(NUM_ARRAYS)]
        with strategy.scope():
            state = {"model": [ar.Variable(array) for array in arrays]}
        with tempfile.TemporaryDirectory() as folder:
            return [
                *await _measure_files(plan, Path(folder), state, arrays),
                await _measure_delay(plan, strategy, Path(folder) / "delay"),
                await measure_memory(plan.num_bytes, Path(folder)),
            ]


async def measure_training(plan: Plan) -> list[Row]:
    """Compare steps of a training that saves every few of them with those of one that does not."""
    with tempfile.TemporaryDirectory() as folder:
        return await measure_steps(
            Path(folder), num_bytes=2 * plan.num_bytes, num_variables=plan.num_variables,
            num_steps=plan.num_steps, num_rounds=plan.num_rounds,
        )  # fmt: skip


async def _measure_files(
    plan: Plan, folder: Path, state: dict[str, Any], arrays: list[Any]
) -> list[Row]:
    manager = ar.CheckpointManager(folder / "ours", max_to_keep=1)
    size = f"{plan.num_bytes // MIB} MiB"
    raw, number = folder / "raw", iter(range(10**6))

    async def save() -> None:
        await manager.save(next(number), state)

    async def restore() -> None:
        await manager.restore(state)

    contenders: dict[str, Contender] = {
        "ours": seconds(save),
        "raw": seconds(partial(run_now, write_raw, raw, arrays)),
        **{
            name: seconds(partial(run_now, write, folder / name, arrays))
            for name, write in other_libraries().items()
        },
    }
    saved = await take_turns(contenders, num_rounds=plan.num_rounds)
    read = await take_turns(
        {"ours": seconds(restore), "raw": seconds(partial(run_now, read_raw, raw, arrays))},
        num_rounds=plan.num_rounds,
    )
    lag = await take_turns({"ours": lag_during(save), "idle": lag_during(_idle)}, num_rounds=3)
    limit = Target("ratio", 1.5)
    rows = [
        compared_row(
            f"save {size}", LOOP, 2, "s", ours=saved["ours"], against=name, floor=saved[name],
            target=limit if name == "raw" else None,
        )
        for name in saved if name != "ours"
    ]  # fmt: skip
    return [
        *rows,
        compared_row(
            f"restore {size}", LOOP, 2, "s", ours=read["ours"], against="raw read",
            floor=read["raw"], target=limit,
        ),
        compared_row(
            f"loop lag, save {size}", LOOP, 2, "ms, p99", ours=lag["ours"], against="idle",
            floor=lag["idle"], target=Target("ours", 5.0),
        ),
    ]  # fmt: skip


async def _measure_delay(plan: Plan, strategy: ar.Strategy, folder: Path) -> Row:
    """Measure how long a step takes while a cut of many variables is taken, and without one."""
    with strategy.scope():
        state = {"model": [ar.Variable(float(i)) for i in range(plan.num_variables)]}
    manager = ar.CheckpointManager(folder, max_to_keep=1)
    number = iter(range(10**6))

    async def step() -> None:
        await asyncio.sleep(0)

    async def with_cut() -> float:
        running = asyncio.create_task(strategy.run(step))
        await asyncio.sleep(0)
        start = perf_counter()
        saving = asyncio.create_task(manager.save(next(number), state, wait=False))
        await asyncio.sleep(0)
        await running
        delay = perf_counter() - start
        await saving
        await manager.wait()
        return delay * 1e3 / plan.num_variables * 100

    async def without() -> float:
        start = perf_counter()
        await strategy.run(step)
        return (perf_counter() - start) * 1e3 / plan.num_variables * 100

    samples = await take_turns({"ours": with_cut, "floor": without}, num_rounds=plan.num_rounds)
    await manager.aclose()
    return compared_row(
        "delay of a step by a save", LOOP, 2, "ms per 100 variables", against="no save",
        target=Target("difference", 1.0), **samples,
    )  # fmt: skip


async def measure_memory(num_bytes: int, folder: Path) -> Row:
    """Measure what a save allocates beside a state that is not laid out as files are."""
    rows = num_bytes // NUM_ARRAYS // 4096
    arrays = [np.zeros((512, rows)).T for _ in range(NUM_ARRAYS)]  # 4096 bytes in a row
    state = {"model": [ar.Variable(array) for array in arrays]}
    manager = ar.CheckpointManager(folder / "strided", max_to_keep=1)
    number = iter(range(10**6))

    async def save() -> None:
        await manager.save(next(number), state)

    async def raw() -> None:
        write_raw(folder / "raw", [np.ascontiguousarray(array) for array in arrays])

    samples = await take_turns({"ours": _allocated(save), "floor": _allocated(raw)}, num_rounds=3)
    await manager.aclose()
    return compared_row(
        f"memory, save {num_bytes // MIB} MiB", LOOP, 1, "MiB", against="copies, raw",
        target=Target("ours", 64.0), **samples,
    )  # fmt: skip


def _allocated(action: Callable[[], Awaitable[object]]) -> Contender:
    """Return a contender for the MiB that are allocated at most during `action`, on any thread."""

    async def sample() -> float:
        tracemalloc.start()
        try:
            await action()
            return tracemalloc.get_traced_memory()[1] / MIB
        finally:
            tracemalloc.stop()

    return sample


def seconds(action: Callable[[], Awaitable[object]]) -> Contender:
    """Return a contender that awaits `action` and gives its seconds."""

    async def sample() -> float:
        start = perf_counter()
        await action()
        return perf_counter() - start

    return sample


async def run_now(fn: Callable[..., object], *args: Any) -> None:
    """Call a blocking function in place."""
    fn(*args)


async def _idle() -> None:
    await asyncio.sleep(0.3)


def write_raw(path: Path, arrays: Sequence[Any]) -> None:
    """Write arrays one behind the other to a new file, and sync it."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    for array in arrays:
        data = memoryview(array).cast("B")
        for start in range(0, len(data), CHUNK_BYTES):
            os.write(fd, data[start : start + CHUNK_BYTES])
    os.fsync(fd)
    os.close(fd)


def read_raw(path: Path, arrays: Sequence[Any]) -> list[Any]:
    """Read arrays back from a file into new memory."""
    with path.open("rb", buffering=0) as file:
        made = []
        for array in arrays:
            made.append(np.empty_like(array))
            file.readinto(memoryview(made[-1]).cast("B"))
    return made


def other_libraries() -> dict[str, Callable[[Path, Sequence[Any]], None]]:
    """Return what others write files with, of those that are installed; synced, too."""
    found: dict[str, Callable[[Path, Sequence[Any]], None]] = {}
    try:
        from safetensors.numpy import save_file
    except ImportError:
        pass
    else:

        def with_safetensors(path: Path, arrays: Sequence[Any]) -> None:
            save_file({str(i): array for i, array in enumerate(arrays)}, path)
            _sync(path)

        found["safetensors"] = with_safetensors
    try:
        import torch
    except ImportError:
        return found

    def with_torch(path: Path, arrays: Sequence[Any]) -> None:
        torch.save([torch.from_numpy(array) for array in arrays], path)
        _sync(path)

    found["torch.save"] = with_torch
    return found


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
