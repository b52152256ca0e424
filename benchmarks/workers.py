"""The cost of collectives among workers: ours beside the engines' own blocking calls.

Two workers on this machine, for each engine that is installed: MPI (mpi4py and an mpirun beside
this interpreter) and torch.distributed with Gloo. Floor and ours take turns in one run.
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
from typing import Any

from ._command import parse_options
from ._report import format_table, summarise, write_json
from ._row import Row, Target, compared_row
from ._worker import SIZES

NUM_WORKERS = 2
RATIO = Target("ratio", 1.25)
SMALL_US = Target("difference", 80.0)
CPU_S = Target("ours", 0.15)
LAG_MS = Target("ours", 10.0)
LIMIT_S = 600.0
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
            rows += rows_of(engine, loop, _launch(engine, loop, 2 if options.is_quick else 15))
    print(format_table(rows))
    print(summarise(rows))
    write_json(options.output, "workers", rows, is_quick=options.is_quick)


def rows_of(engine: str, loop: str, told: Mapping[str, Any]) -> list[Row]:
    """Make the rows of what worker 0 has told."""
    name, rows = NAMES[engine], []
    for size in SIZES:
        target = RATIO if size > 4096 else SMALL_US if engine == "mpi" else None
        rows.append(
            compared_row(
                f"{name} all_reduce {_in_words(size)}", loop, NUM_WORKERS, "µs",
                against="its own, blocking", target=target, **told["sizes"][str(size)],
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


def _launch(engine: str, loop: str, num_rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "samples.json"
        worker = [sys.executable, "-m", "benchmarks._worker", engine, str(num_rounds), loop]
        command, common = [*worker, str(output)], dict(os.environ, OMP_NUM_THREADS="1")
        if engine == "mpi":
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
            sys.exit(f"The workers of {NAMES[engine]} have failed: {codes}.")
        result: dict[str, Any] = json.loads(output.read_text())
        return result


def _is_installed(engine: str) -> bool:
    if engine == "torch":
        return importlib.util.find_spec("torch") is not None
    launcher = Path(sys.executable).with_name("mpirun")
    return importlib.util.find_spec("mpi4py") is not None and launcher.exists()


def _in_words(size: int) -> str:
    return f"{size // 1024} KiB" if size < 1024 * 1024 else f"{size // (1024 * 1024)} MiB"
