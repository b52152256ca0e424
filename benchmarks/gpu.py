"""All that a GPU has to show, in one program: the tests marked `gpu`, then measurements.

Needs torch built for CUDA, and the extras `bench` and `test`; jax with its GPU plugin for one part,
and two GPUs for another. A part that cannot run here says why; one that fails is told with its
traceback, the others go on, and the exit status is 1. After ten minutes it ends and shows where it
was; parts that were done are in the JSON. `--device cpu` is a dry run, which shows that the program
runs: a sleep stands for the work of the device, and the numbers mean nothing.

Rows compare the library with a floor measured in the same process, in turns. Targets are printed
with marks and never change the exit status.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import faulthandler
import functools
import os
import subprocess
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import aioreplica as ar

from ._gpu_place import Place, find_place
from ._gpu_streams import measure_all_reduce, measure_input, measure_memory, measure_overlap
from ._gpu_training import LeftOutError, measure_digits, measure_jax
from ._report import format_table, summarise, write_json
from ._row import Row, compared_row
from .workers import run_workers

Part = Callable[[Place], Awaitable[list[Row]]]

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S, TESTS_S = 600, 240
"""For the whole program, and of these for the tests: what takes longer has hung."""


def main(arguments: Sequence[str]) -> None:
    """Run all parts, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="does it run, not how fast")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmark-results-gpu.json"), metavar="PATH"
    )
    options = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory, too
    ar.set_logical_devices("cpu", 2)
    place = find_place(options.device, is_quick=options.quick)
    machine = describe(place)
    print(", ".join(f"{key}: {value}" for key, value in machine.items()), flush=True)
    rows: list[Row] = []
    told: dict[str, str] = {}
    for name in options.only or PARTS:
        told[name] = run_part(PARTS[name], place, rows)
        print(f"{name}: {told[name]}", flush=True)
        counts: dict[str, object] = {"machine": machine, "parts": told}
        write_json(options.output, "gpu", rows, is_quick=options.quick, counts=counts)
    if rows:
        print(format_table(rows))
        print(summarise(rows))
    print(f"Written to {options.output}.")
    faulthandler.cancel_dump_traceback_later()
    failed = [name for name, what in told.items() if what.startswith("FAILED")]
    if failed:
        raise SystemExit(f"Parts that failed: {', '.join(failed)}.")


def run_part(part: Part, place: Place, rows: list[Row]) -> str:
    """Run a part and add its rows; return in words what came of it."""
    begin = perf_counter()
    try:
        found = asyncio.run(_awaited(part, place))
    except LeftOutError as reason:
        return f"left out: {reason}"
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the other parts go on
        traceback.print_exc()
        return f"FAILED: {type(error).__name__}: {error}"
    rows += found if place.is_gpu else [dataclasses.replace(row, target=None) for row in found]
    return f"{perf_counter() - begin:.1f} s"


async def _awaited(part: Part, place: Place) -> list[Row]:
    return await part(place)


def describe(place: Place) -> Mapping[str, str]:
    """Return what is measured: the device, and the versions of what drives it."""
    import torch

    found = {"device": "the host, a dry run", "torch": torch.__version__}
    if place.is_gpu:
        found["device"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


async def run_tests(place: Place) -> list[Row]:
    """Run the tests marked `gpu`, in a process of their own.

    Raises:
        LeftOutError: In a dry run, in which they would be skipped.
        RuntimeError: If one failed, or none ran.
    """
    if not place.is_gpu:
        raise LeftOutError("they need a GPU")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]
    result = await asyncio.to_thread(
        functools.partial(subprocess.run, command, cwd=ROOT, check=False, timeout=TESTS_S)
    )
    if result.returncode:
        raise RuntimeError(f"pytest -m gpu ended with status {result.returncode}.")
    return []


async def measure_workers(place: Place) -> list[Row]:
    """Compare an all_reduce of two workers' GPUs with NCCL's.

    Raises:
        LeftOutError: If there are not two GPUs.
    """
    import torch

    if place.is_gpu and torch.cuda.device_count() < 2:
        raise LeftOutError("NCCL needs a GPU for each worker, and there is one")
    mib = 1 if place.is_quick else 64
    program = ["benchmarks._gpu_worker", place.kind, str(place.num_rounds), str(mib * 1024 * 1024)]
    told: dict[str, Any] = await asyncio.to_thread(run_workers, "torch", program)
    return [
        compared_row(
            f"all_reduce of workers, {mib} MiB", "asyncio", 2, "ms", ours=told["ours"],
            against="NCCL by hand" if place.is_gpu else "Gloo by hand", floor=told["by hand"],
        )
    ]  # fmt: skip


def on_shared(part: Part) -> Part:
    """Return a part that runs with two replicas on one GPU."""

    async def run(place: Place) -> list[Row]:
        with place.shared():
            return await part(place)

    return run


PARTS: Mapping[str, Part] = {
    "tests": run_tests,
    "overlap": on_shared(measure_overlap),
    "all_reduce": on_shared(measure_all_reduce),
    "input": on_shared(measure_input),
    "digits": on_shared(measure_digits),
    "workers": measure_workers,
    "memory": on_shared(measure_memory),
    "jax": measure_jax,  # last: its libraries and torch's are two of each in one process
}
