"""Explore correct programs over popular libraries; each alarm would be a false one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from time import monotonic
from typing import Final

from .._environments import Environments

PROGRAMS: Final = Path(__file__).with_name("correct")
PACKAGE, RELEASE = "anyio", "4.16.0"
LIBRARIES: Final = (
    "aiohttp==3.14.5",
    "aiojobs==1.4.0",
    "aiolimiter==1.3.0",
    "aiorwlock==1.5.1",
    "aiostream==0.8.1",
    "async-lru==2.4.0",
    "async-timeout==5.0.1",
    "asyncstdlib==3.14.0",
    "httpx==0.28.1",
    "janus==2.0.0",
    "psycopg[binary]==3.2.13",
    "psycopg_pool==3.3.3",
    "redis==8.1.0",
    "sse-starlette==3.7.0",
    "starlette==1.10.0",
    "tenacity==9.2.1",
    "websockets==17.4",
)
SCRIPT: Final = """
import importlib, inspect, json, logging, sys, warnings
from pathlib import Path
from time import monotonic
folder, root, name, count, seconds = sys.argv[1:]
sys.path[:0] = [folder, str(Path(folder).parent / "programs"), root]
warnings.simplefilter("ignore")
logging.disable()
import aioreplica.testing as art
module = importlib.import_module(name)
for program in vars(module).values():
    if inspect.iscoroutinefunction(program) and program.__module__ == name:
        start, ran, alarm, seed = monotonic(), 0, None, 0
        while ran < int(count) and alarm is None and monotonic() < start + float(seconds):
            report = art.explore(program, schedules=min(500, int(count) - ran), seed=seed,
                                 leaks=getattr(module, "LEAKS", ()))
            ran, seed = ran + report.schedules_run, seed + 1
            alarm = report.failure.story if report.failed else None
        print(json.dumps({"program": f"{name}.{program.__name__}", "ran": ran, "alarm": alarm}),
              flush=True)
"""


def check_correct(environments: Environments, num_schedules: int, seconds: float) -> str | None:
    """Explore every program; print a line for each.

    Args:
        environments: Where the libraries are installed.
        num_schedules: Schedules of every program.
        seconds: Longest time for one program; it is cut short between batches of 500 schedules.

    Returns:
        What to end the command with: None if nothing alarmed.
    """
    python = environments.make(PACKAGE, RELEASE, LIBRARIES)
    alarms, num_programs, num_run, start = 0, 0, 0, monotonic()
    for file in sorted(PROGRAMS.glob("[a-z]*.py")):
        command = [str(python), "-c", SCRIPT, str(PROGRAMS), str(PROGRAMS.parents[2]), file.stem,
                   str(num_schedules), str(seconds)]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        for line in result.stdout.splitlines():
            answer = json.loads(line)
            num_programs += 1
            num_run += answer["ran"]
            alarms += answer["alarm"] is not None
            print(f"{answer['program']:45} {answer['ran']:6}  {answer['alarm'] or 'clean'}")
        if result.returncode:
            return f"{file.name} cannot be explored: {result.stderr.strip()[-800:]}"
    print(f"{alarms} alarms: {num_programs} programs, {num_run} schedules, "
          f"{monotonic() - start:.0f} s")  # fmt: skip
    return f"{alarms} alarms." if alarms else None
