"""Run every program under many schedules: correct ones may not alarm, planted bugs must."""

from __future__ import annotations

import argparse
import sys
import time

import aioreplica.testing as art

from . import bugs, databases, web

PROGRAMS = [*web.PROGRAMS, *databases.PROGRAMS]


def main() -> int:
    """Return 0 if every program did as it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, help="of each correct program")
    parser.add_argument("names", nargs="*", help="only programs with these names")
    given = parser.parse_args()
    failed = []
    for program in PROGRAMS:
        name = program.__name__
        if given.names and name not in given.names:
            continue
        start = time.perf_counter()
        report = art.explore(program, schedules=given.schedules)
        print(f"{name:28} {report}  {time.perf_counter() - start:.1f} s", flush=True)
        if report.failure is not None:
            failed.append(name)
            print(f"    {report.failure.error!r}")
    for program, faults, kind in bugs.BUGS:
        name = program.__name__
        if given.names and name not in given.names:
            continue
        report = art.explore(program, schedules=1000, faults=faults)
        print(f"{name:28} {report}", flush=True)
        if report.failure is None or not isinstance(report.failure.error, kind):
            failed.append(name)
            print(f"    expected {kind.__name__}")
    print(f"not as they should be: {', '.join(failed)}" if failed else "all as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
