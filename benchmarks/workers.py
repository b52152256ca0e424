"""The cost of collectives among workers: ours beside the engines' own blocking calls.

Two workers on this machine, for each engine that is installed: MPI (mpi4py and an mpirun beside
this interpreter) and torch.distributed with Gloo. Floor and ours take turns in one run.

Then two workers train a classifier of digits, one replica each, beside one worker of two replicas
and beside torch's DistributedDataParallel over Gloo: one process after the other, in turns. So does
a loop of torch that `ar.prepare` has made ready, on one worker of two replicas and on two workers.
At last a network of 20 layers in torch, in turns in the same processes, beside DDP.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ._command import parse_options
from ._report import format_table, summarise, write_json
from ._row import Row, Target, compared_row
from ._worker import NUM_HANDLES, SIZES

NUM_WORKERS = 2
RATIO = Target("ratio", 1.25)
HANDLES = Target("ratio", 3.0)
SMALL_US = Target("difference", 80.0)
CPU_S = Target("ours", 0.15)
LAG_MS = Target("ours", 10.0)
DEEP = Target("ratio", 1.0)
LIMIT_S = 600.0
LOSS_ERROR = 1e-5
NAMES = {"mpi": "MPI", "torch": "Gloo"}


def main(arguments: Sequence[str]) -> None:
    """Measure every engine on every loop; print a table and write it as JSON."""
    options = parse_options("workers", __doc__, arguments)
    engines = [name for name in NAMES if _is_installed(name)]
    if not engines:
        sys.exit('Neither engine is installed: pip install "aioreplica[mpi,torch]".')
    rows: list[Row] = []
    for loop in options.loops:
        if loop != "asyncio" and importlib.util.find_spec(loop) is None:
            print(f"{loop} is not installed: skipped")
            continue
        for engine in engines:
            rows += rows_of(engine, loop, _launch(engine, loop, 1 if options.is_quick else 15))
    rows += training_rows(engines, *((1, 1) if options.is_quick else (5, 3)))
    if "torch" in engines:
        rows += deep_rows(1 if options.is_quick else 15)
    print(format_table(rows))
    print(summarise(rows))
    write_json(options.output, "workers", rows, is_quick=options.is_quick)


def rows_of(engine: str, loop: str, told: Mapping[str, Any]) -> list[Row]:
    """Make the rows of what worker 0 has told."""
    name, rows = NAMES[engine], []
    for size in SIZES:
        target = RATIO if size > 4096 else SMALL_US if engine == "mpi" else None
        what = f"{name} all_reduce {_in_words(size)}"
        for key, words, promised in (("sizes", what, target), ("alone", f"{what}, no frame", None)):
            rows.append(
                compared_row(
                    words, loop, NUM_WORKERS, "µs", against="its own, blocking", target=promised,
                    **told[key][str(size)],
                )
            )  # fmt: skip
    rows.append(
        compared_row(
            f"{name} {NUM_HANDLES} handles of 4 KiB", loop, NUM_WORKERS, "µs", target=HANDLES,
            against="as many of its calls, blocking", **told["handles"],
        )
    )  # fmt: skip
    for what, unit, key, target in (
        ("CPU while a worker is 2 s late", "s", "cpu", CPU_S),
        ("loop lag, 64 MiB", "ms, p99", "lag", LAG_MS),
    ):
        values = told[key]
        rows.append(
            compared_row(
                f"{name} {what}", loop, NUM_WORKERS, unit, ours=values,
                against="its limit", floor=[target.limit] * len(values), target=target,
            )
        )  # fmt: skip
    return rows


def training_rows(engines: Sequence[str], num_turns: int, num_rounds: int) -> list[Row]:
    """Train the digits in every way, in turns; make a row of milliseconds per step for each."""
    ways = [("replicas", "")] + [("workers", engine) for engine in engines]
    if "torch" in engines and importlib.util.find_spec("sklearn") is not None:
        ways += [("ddp", "torch"), ("prepared-replicas", ""), ("prepared-workers", "torch")]
    samples: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    weights = []
    for _ in range(num_turns):
        for way, kept in samples.items():
            told = run_workers(way[1], ["benchmarks._worker_training", way[0], str(num_rounds)])
            kept.append(1000 / median(told["rates"]))
            weights.append(told["weights"])
    if max(weights) > min(weights) * 1.001:
        sys.exit(f"Not all ways have trained the same: sums of weights {sorted(set(weights))}.")
    alone = samples["replicas", ""]
    rows = []
    for (who, engine), values in samples.items():
        if who == "workers":
            against = {"1 worker of 2 replicas": alone}
            if ("ddp", "torch") in samples:
                against["torch DDP, Gloo"] = samples["ddp", "torch"]
            rows += [
                compared_row(
                    f"{NAMES[engine]} digits, a step", "asyncio", NUM_WORKERS, "ms", ours=values,
                    against=name, floor=floor,
                )
                for name, floor in against.items()
            ]  # fmt: skip
        elif who.startswith("prepared"):
            rows.append(
                compared_row(
                    f"prepare, digits, a step, on {'2 workers' if engine else '1 worker'}",
                    "asyncio", NUM_WORKERS, "ms", ours=values, against="torch DDP, Gloo",
                    floor=samples["ddp", "torch"],
                )
            )  # fmt: skip
    return rows


def deep_rows(num_rounds: int) -> list[Row]:
    """Train the network of 20 layers; the losses of all ways have to be the same."""
    told = run_workers("torch", ["benchmarks._worker_deep", str(num_rounds)])
    times, losses = told["times"], told["losses"]
    words = {"prepare": "prepare", "module": "torch_module"}
    for way, name in words.items():
        error = max(abs(a - b) for a, b in zip(losses[way], losses["ddp"], strict=True))
        if error > LOSS_ERROR:
            sys.exit(f"{name}: a loss of 20 layers differs from that of DDP by {error}.")
    return [
        compared_row(
            f"{name}, 20 layers, a step", "asyncio", NUM_WORKERS, "ms", ours=times[way],
            against="torch DDP, Gloo", floor=times["ddp"], target=DEEP,
        )
        for way, name in words.items()
    ]  # fmt: skip


def _launch(engine: str, loop: str, num_rounds: int) -> dict[str, Any]:
    return run_workers(engine, ["benchmarks._worker", engine, str(num_rounds), loop])


def run_workers(engine: str, program: Sequence[str]) -> dict[str, Any]:
    """Run a program on two workers, or on one without an engine; return what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "samples.json"
        command = [sys.executable, "-m", *program, str(output)]
        common = dict(os.environ, OMP_NUM_THREADS="1")
        if not engine:
            environments = [common]
        elif engine == "mpi":
            launcher = str(Path(sys.executable).with_name("mpirun"))
            command = [launcher, "--map-by", ":OVERSUBSCRIBE", "-n", str(NUM_WORKERS), *command]
            if os.geteuid() == 0:
                common |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
            environments = [common]
        else:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = str(free.getsockname()[1])
            common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
            environments = [{**common, "RANK": str(rank)} for rank in range(NUM_WORKERS)]
        processes = [subprocess.Popen(command, env=each) for each in environments]
        try:
            codes = [process.wait(LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            name = " ".join(program)
            sys.exit(f"{name}: workers of {NAMES.get(engine, 'no engine')} have failed: {codes}.")
        result: dict[str, Any] = json.loads(output.read_text())
        return result


def _is_installed(engine: str) -> bool:
    if engine == "torch":
        return importlib.util.find_spec("torch") is not None
    launcher = Path(sys.executable).with_name("mpirun")
    return importlib.util.find_spec("mpi4py") is not None and launcher.exists()


def _in_words(size: int) -> str:
    return f"{size // 1024} KiB" if size < 1024 * 1024 else f"{size // (1024 * 1024)} MiB"
