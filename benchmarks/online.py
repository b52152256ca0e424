"""Online learning in a web service: predictions while it trains, the journal, kills, and load.

`--kills` kills a service under load and counts what was learned; `--soak` loads one for so many
seconds. An acknowledged example that is lost or learned twice, and memory, threads or files that
grow, change the exit status; targets of speed are printed with marks and do not.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from ._online_http import measure_http
from ._online_journal import measure_journal
from ._online_kills import kill_under_load
from ._online_soak import soak
from ._report import format_table, summarise, write_json
from ._row import Row


def main(arguments: Sequence[str]) -> None:
    """Measure, kill, load, print, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks online", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few and short windows")
    parser.add_argument("--kills", type=int, help="SIGKILLs under load (100; quick: 5)")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="of mixed load (600; 20)")
    parser.add_argument("--no-speed", action="store_true", help="kill and load only")
    default = Path("benchmark-results-online.json")
    parser.add_argument("--output", type=Path, default=default, metavar="PATH")
    options = parser.parse_args(arguments)
    num_kills = (5 if options.quick else 100) if options.kills is None else options.kills
    seconds = (20.0 if options.quick else 600.0) if options.soak is None else options.soak
    rows: list[Row] = []
    counts: dict[str, object] = {}
    if not options.no_speed:
        rows, steps = measure_http(is_quick=options.quick)
        rows += asyncio.run(measure_journal(is_quick=options.quick))
        counts["ways"] = steps
        print(format_table(rows))
        print(summarise(rows))
    failures = []
    if num_kills:
        kills = asyncio.run(kill_under_load(num_kills))
        print(kills)
        counts["kills"] = {"of": kills.num_kills, "acknowledged": len(kills.acknowledged)}
        if not kills.is_good:
            failures.append("an acknowledged example was not learned exactly once")
    if seconds:
        load = asyncio.run(soak(seconds))
        print(load)
        counts["soak"] = {"memory_mib": load.memory_mib, "num_files": load.num_files}
        if not load.is_good:
            failures.append("the service grew under load, or did not learn what it took")
    write_json(options.output, "online", rows, is_quick=options.quick, counts=counts)
    if failures:
        raise SystemExit("; ".join(failures))
