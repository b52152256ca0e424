"""Run one program with one tool and print what was found, as JSON.

Runs by itself inside the environment of a release: it imports nothing of this package.

    python _probe.py TOOL PROGRAM SEEDS SCHEDULES SECONDS
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import io
import json
import logging
import re
import sys
import sysconfig
import traceback
import warnings
from pathlib import Path
from time import monotonic

HERE = Path(__file__).parent
HANGS_AFTER = 5.0
PARTS = ("sentence", "error", "timeline")


def probe_kit(main, seeds, schedules, deadline):
    """Explore with each seed; a failure's number is that of its schedule, from 1."""
    import aioreplica.testing as art

    found, story = [], None
    for seed in range(seeds):
        if monotonic() > deadline and found:
            break
        report = art.explore(main, schedules=schedules, seed=seed)
        found.append(report.schedules_run if report.failed else None)
        if report.failed and story is None:
            failure = report.failure
            story = {
                "error": "".join(traceback.format_exception(failure.error)),
                "sentence": "\n".join(failure.summary),
                "timeline": failure.timeline,
            }
    return {"found": found, "story": story}


def probe_simloom(main, seeds, schedules, deadline):
    """Explore seed by seed, so that the deadline is kept."""
    import simloom

    def run(start, count):
        result = simloom.explore(main, runs=count, start_seed=start)
        failures = getattr(result, "failures", None)
        return failures[0] if failures else None

    return _probe_other(run, seeds, schedules, deadline)


def probe_simloop(main, seeds, schedules, deadline):
    """Explore seed by seed, so that the deadline is kept."""
    import simloop

    return _probe_other(
        lambda start, count: simloop.explore(main, range(start, start + count)),
        seeds, schedules, deadline,
    )  # fmt: skip


def _probe_other(run, seeds, schedules, deadline):
    found, story, num_run = [], None, 0
    for seed in range(seeds):
        at = None
        for number in range(schedules):
            if monotonic() > deadline:
                return {"found": found, "story": story, "ran": num_run}
            with contextlib.redirect_stdout(io.StringIO()):
                failure = run(seed * schedules + number, 1)
            num_run += 1
            if failure is not None:
                at = number + 1
                text = getattr(failure, "format", None)
                text = text() if callable(text) else str(failure)
                story = story or {"error": text, "sentence": "", "timeline": ""}
                break
        found.append(at)
    return {"found": found, "story": story, "ran": num_run}


def probe_plain(main, seeds, schedules, deadline):
    """Repeat on the stock loop until it fails; a hang counts as a failure after some seconds."""

    async def guarded():
        async with asyncio.timeout(HANGS_AFTER):
            await main()

    for number in range(schedules):
        if monotonic() > deadline:
            return {"found": [], "story": None, "ran": number}
        try:
            asyncio.run(guarded())
        except BaseException as error:
            story = {"error": _text(error), "sentence": "", "timeline": ""}
            return {"found": [number + 1], "story": story, "ran": number + 1}
    return {"found": [None], "story": None, "ran": schedules}


def named(story, culprit):
    """Say where a story names a line of the functions: in its sentence, timeline, or not at all."""
    parts = [_where(story, *each.split(":")) for each in culprit.split(";")]
    return next((part for part in PARTS if part in parts), "no")


def _where(story, path, functions):
    lines = set()
    for root in {sysconfig.get_path("purelib"), sysconfig.get_path("stdlib")}:
        for file in Path(root).rglob(f"*{Path(path).name}"):
            if str(file).endswith("/" + path):
                for node in ast.walk(ast.parse(file.read_text())):
                    is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                    if is_function and node.name in functions.split(","):
                        lines.update(range(node.lineno, node.end_lineno + 1))
    name = re.escape(Path(path).name)
    for part in PARTS:
        mentioned = re.findall(rf'{name}(?:", line |:)(\d+)', story[part])
        if lines & {int(line) for line in mentioned}:
            return part
    return "no"


def _text(error):
    lines = [f"{type(error).__name__}: {error}"]
    for inner in getattr(error, "exceptions", ()):
        lines += ["  " + line for line in _text(inner).splitlines()]
    return "\n".join([*lines, *getattr(error, "__notes__", ())])


def main():
    tool, program, seeds, schedules, seconds, culprit = sys.argv[1:]
    sys.path[:0] = [str(HERE / "programs"), str(HERE.parents[1])]
    warnings.simplefilter("ignore")
    logging.disable()
    module = importlib.import_module(program)
    start = monotonic()
    probe = globals()[f"probe_{tool}"]
    try:
        result = probe(module.main, int(seeds), int(schedules), start + float(seconds))
    except Exception as error:
        result = {"found": [], "story": None, "broken": _text(error)[:500]}
    result["seconds"] = round(monotonic() - start, 2)
    if result["story"] is not None:
        result["named"] = named(result["story"], culprit)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
