"""Pure Python on device threads without the GIL: beside bare threads, and beside the build with it.

Steps whose work is pure Python (a tokenizer, HIPS autograd on small arrays, a game) run on as many
devices as there are replicas, and the same functions on bare threads that meet at a barrier, in
turns. `--beside PYTHON` names another interpreter, with a GIL, whose merges, runs and hops are
measured too; by default it is this one with PYTHON_GIL=1. Where the GIL is on, all of it runs and
nothing is promised.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, final

import aioreplica as ar
from aioreplica._gil import has_gil

from ._measure import Contender, take_turns
from ._online_http import rows_of, run_way
from ._report import format_table, summarise, write_json
from ._row import Row, Target, compared_row
from .processes import recurrent_slope, weights_and_inputs

LOOP = "asyncio"
SHARE = 0.9  # of the speed of bare threads
LIMIT_S = 300.0
P99 = 1.5  # of /predict beside training, to idle
STEMS = ("quick", "brown", "fox", "jump", "over", "lazy", "dog", "sleep", "evening", "sun", "again")
ENDS = ("", "s", "ed", "er", "ing", "ly", "ness", "able", "ish", "est", "ward", "less", "ful")
TEXT = " ".join(stem + end for stem in STEMS for end in ENDS)  # 143 words
NUM_MERGES = 20
WALLS = frozenset((x, y) for x in range(12) for y in range(12) if (3 * x + 5 * y) % 7 == 0)
MOVES = ((1, 0), (0, 1), (-1, 0), (0, -1))


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        num_rounds: Rounds of each comparison.
        num_steps: Steps that make one sample.
        num_windows: Windows of predictions beside training.
        window_s: How long one is.
    """

    num_rounds: int
    num_steps: int
    num_windows: int
    window_s: float


FULL = Plan(15, 20, 20, 2.0)
QUICK = Plan(2, 2, 1, 0.5)


def main(arguments: Sequence[str]) -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks free_threading", description=__doc__
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run")
    parser.add_argument("--replicas", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--beside", metavar="PYTHON", help="another interpreter, with a GIL")
    parser.add_argument("--no-predictions", action="store_true", help="leave /predict out")
    default = Path("benchmark-results-free_threading.json")
    parser.add_argument("--output", type=Path, default=default, metavar="PATH")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else FULL
    ar.set_logical_devices("cpu", options.replicas)
    ar.set_lane_options(nice=0)  # as bare threads have
    print(f"The GIL is {'on: nothing is promised' if has_gil() else 'off'}.", flush=True)
    rows = asyncio.run(measure(options.replicas, plan))
    rows += core_rows(options.beside, is_quick=options.quick)
    if not options.no_predictions:
        way = "pure Python steps"
        rounds = run_way(way, plan.num_windows, seconds=plan.window_s)
        rows += rows_of(way, rounds, ratios=None if has_gil() else {"p99": P99})
    print(format_table(rows))
    print(summarise(rows))
    write_json(options.output, "free_threading", rows, is_quick=options.quick)
    print(f"Written to {options.output}.")


# ---- work that is pure Python ----------------------------------------------------------------


def tokenize(text: str) -> int:
    """Count the tokens of a text after some merges of its most frequent pairs."""
    words = Counter(tuple(word) for word in text.split())
    for _ in range(NUM_MERGES):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        words = Counter({_merged(word, best): count for word, count in words.items()})
    return sum(len(word) * count for word, count in words.items())


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    made, i = [], 0
    while i < len(word):
        if word[i : i + 2] == pair:
            made.append(word[i] + word[i + 1])
            i += 2
        else:
            made.append(word[i])
            i += 1
    return tuple(made)


def play(seed: int, num_moves: int = 3000) -> int:
    """Walk through a maze with a simple policy; return what was collected."""
    rng = random.Random(seed)
    x = y = total = 0
    seen: dict[tuple[int, int], int] = {}
    for _ in range(num_moves):
        choices = [
            (seen.get((x + dx, y + dy), 0) + rng.random(), x + dx, y + dy)
            for dx, dy in MOVES
            if 0 <= x + dx < 12 and 0 <= y + dy < 12 and (x + dx, y + dy) not in WALLS
        ]
        if not choices:
            x = y = 0
            continue
        _, x, y = min(choices)
        seen[x, y] = seen.get((x, y), 0) + 1
        total += seen[x, y] == 1
    return total


def slope_size() -> int:
    """Differentiate a small recurrent model; return the size of the gradient."""
    return int(recurrent_slope(*weights_and_inputs()).size)


WORK: dict[str, Callable[[], int]] = {
    "a tokenizer": partial(tokenize, TEXT),
    "HIPS autograd on small arrays": slope_size,
    "a game": partial(play, 3),
}


# ---- beside bare threads ---------------------------------------------------------------------


@final
class BareThreads:
    """Threads that call a function and meet at a barrier, where one adds the results up."""

    def __init__(self, work: Callable[[], int], num_threads: int) -> None:
        self._work = work
        self._begin = threading.Barrier(num_threads + 1)  # its threads wait there between samples
        self._end = threading.Barrier(num_threads + 1, timeout=LIMIT_S)
        self._results = [0] * num_threads
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def step(self) -> int:
        """Call the function once on each thread; return the sum."""
        self._begin.wait(LIMIT_S)
        self._end.wait()
        return sum(self._results)

    def close(self) -> None:
        """End the threads."""
        self._is_over = True
        with suppress(threading.BrokenBarrierError):  # one of them has failed
            self._begin.wait(LIMIT_S)
        for thread in self._threads:
            thread.join(LIMIT_S)

    def _serve(self, index: int) -> None:
        while True:
            self._begin.wait()
            if self._is_over:
                return
            try:
                self._results[index] = self._work()
            except BaseException:
                self._begin.abort()
                self._end.abort()
                raise
            self._end.wait()


async def measure(num_replicas: int, plan: Plan) -> list[Row]:
    """Compare each kind of work with bare threads, and with one thread that does all of it."""
    rows: list[Row] = []
    async with ar.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)]) as strategy:
        for name, work in WORK.items():
            rows += await _compare(strategy, name, work, num_replicas, plan)
    return rows


async def _compare(
    strategy: ar.MirroredStrategy,
    name: str,
    work: Callable[[], int],
    num_replicas: int,
    plan: Plan,
) -> list[Row]:
    async def step(ctx: ar.ReplicaContext) -> Any:
        return await ctx.all_reduce("sum", await ctx.run_on_device(work))

    async def ours() -> None:
        await strategy.run(ar.with_context(step))

    async def bare() -> None:
        threads.step()

    async def alone() -> None:
        for _ in range(num_replicas):
            work()

    cpu: dict[str, list[float]] = {"ours": [], "bare": []}

    def contender(take: Callable[[], Any], cpu_ms: list[float] | None = None) -> Contender:
        async def sample() -> float:
            begin_s, cpu_s = perf_counter(), process_time()
            for _ in range(plan.num_steps):
                await take()
            if cpu_ms is not None:
                cpu_ms.append((process_time() - cpu_s) / plan.num_steps * 1e3)
            return (perf_counter() - begin_s) / plan.num_steps * 1e3

        return sample

    threads = BareThreads(work, num_replicas)
    try:
        samples = await take_turns(
            {
                "ours": contender(ours, cpu["ours"]),
                "bare": contender(bare, cpu["bare"]),
                "alone": contender(alone),
            },
            num_rounds=plan.num_rounds,
        )
    finally:
        threads.close()
    target = None if has_gil() else Target("ratio", 1 / SHARE)
    return [
        compared_row(
            f"step of {name}", LOOP, num_replicas, "ms", ours=samples["ours"],
            against="bare threads", floor=samples["bare"], target=target,
        ),
        compared_row(
            "its time of processors", LOOP, num_replicas, "ms", ours=cpu["ours"][1:],
            against="bare threads", floor=cpu["bare"][1:], target=target,
        ),
        compared_row(
            f"step of {name}", LOOP, num_replicas, "ms", ours=samples["ours"],
            against="one thread", floor=samples["alone"],
        ),
    ]  # fmt: skip


# ---- beside the GIL --------------------------------------------------------------------------


def core_rows(beside: str | None, *, is_quick: bool) -> list[Row]:
    """Compare merges, runs and hops with those of an interpreter with a GIL, round by round."""
    ours: dict[tuple[str, int, str], list[float]] = {}
    floor: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(1 if is_quick else 3):
        for python, gil, found in ((sys.executable, "0", ours), (beside, "1", floor)):
            for key, value in _core(python or sys.executable, gil).items():
                found.setdefault(key, []).append(value)
    against = "with the GIL" if beside is None else Path(beside).name
    return [
        compared_row(
            name, LOOP, size, unit, ours=ours[name, size, unit], against=against,
            floor=floor[name, size, unit],
        )
        for name, size, unit in ours
        if (name, size, unit) in floor
    ]  # fmt: skip


def _core(python: str, gil: str) -> dict[tuple[str, int, str], float]:
    """Run the benchmark of the core; return what the library took in each row."""
    environment = {**os.environ}
    environment.pop("PYTHON_GIL", None)
    if python == sys.executable and hasattr(sys, "_is_gil_enabled"):
        environment["PYTHON_GIL"] = gil
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "core.json"
        subprocess.run(
            [python, "-m", "benchmarks", "core", "--quick", "--loops", LOOP,
             "--output", str(output)],
            env=environment, check=True, stdout=subprocess.DEVNULL, timeout=600,
        )  # fmt: skip
        rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    return {
        (row["name"], row["num_replicas"], row["unit"]): row["ours"]
        for row in rows
        if row["unit"] != "bytes"
    }
