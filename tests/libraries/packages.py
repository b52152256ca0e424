"""Programs over some sixty packages: each is clean, refused with a reason, told, or a real bug.

`python -m tests.libraries.packages FOLDER` makes an environment with the releases below in a folder
and explores the programs there. Its exit status is 1 if one of them is something else. Python 3.12
or newer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aioreplica.testing as art

from .suites import ROOT, environment

RELEASES = (
    "aiobreaker==1.2.0", "aiocache==0.12.3", "aiochannel==1.4.1", "aiodns==4.0.4",
    "aiofiles==25.1.0", "aiohttp==3.14.5", "aioitertools==0.13.0", "aiojobs==1.4.0",
    "aiolimiter==1.3.0", "aiologic==0.17.1", "aiometer==1.0.0", "aiomysql==0.3.2", "aiopg==1.4.0",
    "aiorwlock==1.5.1", "aiosmtpd==1.4.6", "aiosmtplib==5.1.3", "aiosqlite==0.22.1",
    "aiostream==0.8.1", "aiotools==2.2.4", "anyio==4.16.0", "apscheduler==3.11.3",
    "asgiref==3.13.0", "async-lru==2.4.0", "async-timeout==4.0.3", "asyncer==0.0.18",
    "asyncpg==0.32.0", "asyncstdlib==3.14.0", "backoff==2.2.1", "cashews==7.6.0",
    "culsans==0.11.0", "databases==0.9.0", "fakeredis==2.40.0", "fastapi==0.165.0",
    "graphql-core==3.3.2", "greenlet==3.5.6", "grpcio==1.85.3", "httpcore==1.0.9", "httpx==0.28.1",
    "hypercorn==0.18.0", "janus==2.0.0", "litestar==2.25.0", "psycopg[binary]==3.3.9",
    "psycopg-pool==3.3.3", "psycopg2-binary==2.9.13", "purgatory==3.0.1", "pyee==16.0.1",
    "pyrate-limiter==4.5.1", "pyzmq==27.3.0", "quart==0.22.0", "reactivex==6.1.0", "redis==8.1.0",
    "sqlalchemy==2.1.9", "sse-starlette==3.7.0", "stamina==26.1.0", "starlette==1.10.0",
    "strawberry-graphql==0.341.2", "svcs==26.2.0", "tenacity==9.2.1", "tornado==6.6.1",
    "tortoise-orm==1.1.9", "trio==0.35.0", "trustme==1.2.1", "uvicorn==0.54.0", "uvloop==0.23.0",
    "watchfiles==1.3.0", "websockets==17.4",
)  # fmt: skip
OURS = (
    "array-api-compat==1.16.0", "numpy==2.5.5", "optree==0.20.0", "threadpoolctl==3.8.0",
    "time-machine==3.6.0",
)  # fmt: skip
"""What the kit needs, and the package that moves `datetime`."""
Program = Callable[[], Any]


def main() -> int:
    """Return 0 if every program did as it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for the environment")
    parser.add_argument("--schedules", type=int, default=500, help="of each program")
    parser.add_argument("--here", action="store_true", help="in this environment")
    parser.add_argument("names", nargs="*", help="only programs with these names")
    given = parser.parse_intermixed_args()
    if given.here:
        return explore_all(given.schedules, given.names)
    python = environment(given.folder.resolve() / "packages", [*OURS, *RELEASES])
    command = [python, "-W", "ignore", "-m", "tests.libraries.packages", *sys.argv[1:], "--here"]
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=path, check=False).returncode


def explore_all(schedules: int, names: list[str]) -> int:
    """Explore every program; print a line for each, and return 1 if one is not as it should be."""
    from . import databases, outside, services, tools, web

    clean = [*web.PROGRAMS, *databases.PROGRAMS, *services.PROGRAMS, *tools.PROGRAMS]
    expected: list[tuple[Program, str, str]] = [
        *((program, "clean", "") for program in clean),
        *((program, "a bug", text) for program, text in tools.BUGS),
        *((program, "refused", text) for program, text in outside.REFUSED),
        *((program, "told", text) for program, text in outside.TOLD),
    ]
    wrong = []
    for program, verdict, text in expected:
        name = program.__name__
        if names and name not in names:
            continue
        start = time.perf_counter()
        report = art.explore(program, schedules=schedules, leaks=services.LEAKS.get(name, ()))
        found, told = verdict_of(report)
        is_right = text in told if verdict == "told" else (found, text in told) == (verdict, True)
        shown = verdict if is_right else f"{found}, not {verdict}: {told}"
        seconds = time.perf_counter() - start
        print(f"{name:36} {report.schedules_run:5} {seconds:6.1f} s  {shown}", flush=True)
        wrong += [] if is_right else [name]
    print(f"not as they should be: {', '.join(wrong)}" if wrong else "all as they should be")
    return 1 if wrong else 0


def verdict_of(report: art.Report) -> tuple[str, str]:
    """Return the verdict of a report, and what it tells."""
    told = "\n".join(report.warnings)
    if report.failure is None:
        return "clean", told
    error = report.failure.error
    return "refused" if isinstance(error, art.RealIOError) else "a bug", f"{error}\n{told}"


if __name__ == "__main__":
    sys.exit(main())
