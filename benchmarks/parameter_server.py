"""Parameter servers: closures, pulls and pushes beside Dask itself; kills; what training comes to.

`--kills` kills a worker in the middle of 24 closures, so many times. A push that is lost or counts
twice, closures one by one that differ from one replica in this process, and asynchronous training
that is more than 1 % less accurate, change the exit status; targets of speed are printed with marks
and do not. `--spot` does something else: it trains on `dask` processes with TLS while workers are
killed every few seconds and others come, and counts what was learned.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from ._report import format_table, summarise, write_json
from ._row import Row

MAX_DIFFERENCE = 1e-6


def main(arguments: Sequence[str]) -> None:
    """Measure, kill, train, print, write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks parameter_server", description=__doc__
    )
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run")
    parser.add_argument("--kills", type=int, help="workers to kill (20; quick: 2)")
    parser.add_argument("--no-speed", action="store_true", help="leave the comparisons out")
    parser.add_argument("--no-training", action="store_true", help="leave the trainings out")
    parser.add_argument("--spot", action="store_true", help="only train while workers are killed")
    parser.add_argument("--replicate", action="store_true", help="with --spot: kill servers too")
    parser.add_argument("--seconds", type=float, default=300.0, help="of --spot (300; quick: 12)")
    default = Path("benchmark-results-parameter_server.json")
    parser.add_argument("--output", type=Path, default=default, metavar="PATH")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("distributed") is None:
        sys.exit('Dask is not installed: pip install "aioreplica[dask]".')
    if options.spot:
        _spot(12.0 if options.quick else options.seconds, replicate=options.replicate)
        return
    num_kills = (2 if options.quick else 20) if options.kills is None else options.kills
    rows: list[Row] = []
    if not options.no_speed:
        rows = _measure(is_quick=options.quick)
    counts: dict[str, object] = {}
    failures: list[str] = []
    if num_kills:
        counts["kills"] = _kill(num_kills, failures)
    if not options.no_training:
        counts["training"] = _train(1 if options.quick else 3, failures)
    write_json(options.output, "parameter_server", rows, is_quick=options.quick, counts=counts)
    if failures:
        raise SystemExit("; ".join(failures))


def _spot(seconds: float, *, replicate: bool) -> None:
    from ._parameter_spot import run_spot

    pause_s = min(2.0, seconds / (12 if replicate else 6))
    spot = asyncio.run(run_spot(round(seconds / pause_s), pause_s=pause_s, replicate=replicate))
    print(spot, flush=True)
    if not spot.is_good:
        raise SystemExit("an example was lost or learned twice, or something was kept")


def _measure(*, is_quick: bool) -> list[Row]:
    from ._parameter_calls import FULL, QUICK, closures_per_second, measure_calls

    rows = asyncio.run(measure_calls(QUICK if is_quick else FULL))
    print(format_table(rows))
    print(summarise(rows))
    for name, rate in closures_per_second(rows).items():
        print(f"{name}: {rate:.0f} per second")
    sys.stdout.flush()
    return rows


def _kill(num_kills: int, failures: list[str]) -> dict[str, object]:
    from ._parameter_kills import kill_workers

    kills = asyncio.run(kill_workers(num_kills))
    print(kills, flush=True)
    if not kills.is_good:
        failures.append("a push was lost or counted twice, or no kill hit a closure")
    return {"of": kills.num_kills, "lost": kills.num_lost, "twice": kills.num_twice}


def _train(epochs: int, failures: list[str]) -> dict[str, object]:
    from ._parameter_training import compare_accuracies, compare_with_one_replica

    difference = asyncio.run(compare_with_one_replica())
    print(f"one by one, beside one replica here: largest difference {difference:.1e}", flush=True)
    if not difference <= MAX_DIFFERENCE:
        failures.append(f"closures one by one differ by {difference:.1e}")
    accuracies = asyncio.run(compare_accuracies(epochs=epochs))
    print(accuracies, flush=True)
    if not accuracies.is_good:
        failures.append("asynchronous training is more than 1 % less accurate")
    return {
        "difference": difference,
        "asynchronous": accuracies.asynchronous,
        "one_by_one": accuracies.one_by_one,
    }
