"""A whole suite, explored by `--ar-explore`: which tests are meant, which refused, the table."""

from __future__ import annotations

import inspect
import unittest
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from _pytest.unittest import TestCaseFunction

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

    from aioreplica.testing import Report

DEFAULT_SCHEDULES: Final = 20
"""How many schedules a test has that is explored for `--ar-explore` alone."""
PROPERTY: Final = "aioreplica"
"""Name of what reports of tests hold for the table: pairs of a kind and a text."""
OTHER_LOOPS: Final = ("use_uvloop", "loop_factory")
"""Options of anyio's backend that choose an event loop."""
RUNNING: Final = frozenset({
    "asyncio", "run", "get_event_loop", "new_event_loop", "run_until_complete", "close",
})  # fmt: skip
"""Names that a decorator uses which only runs a test in a new event loop."""
SHOWN: Final = 3
"""How many tests are named with a reason that many share."""


def check_pattern(config: pytest.Config) -> None:
    """Refuse a pattern that is a path: it was meant to be collected.

    Raises:
        pytest.UsageError: If there is such a file.
    """
    pattern = config.getoption("--ar-explore")
    if pattern not in (None, "*") and Path(pattern.partition("::")[0]).exists():
        raise pytest.UsageError(
            f"--ar-explore took {pattern!r} for its pattern, and it is a path. Write the path "
            f"first, or `--ar-explore='*' {pattern}`."
        )


def is_meant(item: pytest.Function) -> bool:
    """Tell whether `--ar-explore` means a test: an async one whose id matches."""
    pattern = item.config.getoption("--ar-explore")
    if pattern is None or not fnmatchcase(item.nodeid, f"*{pattern}*"):
        return False
    given = getattr(item.obj, "hypothesis", None)
    if given is not None:
        return inspect.iscoroutinefunction(given.inner_test)
    cls: Any = item.cls
    if isinstance(item, TestCaseFunction) and inspect.iscoroutinefunction(item.obj):
        return issubclass(cls, unittest.IsolatedAsyncioTestCase)
    return inspect.iscoroutinefunction(inspect.unwrap(item.obj))


def async_function(item: pytest.Function) -> Any:
    """Return the async function of a test, not bound to its instance; None without one.

    That is its own, or the one that a decorator of a suite does nothing with but run it in a new
    event loop.
    """
    function = getattr(item.obj, "__func__", item.obj)
    if inspect.iscoroutinefunction(function):
        return function
    inner = getattr(function, "__wrapped__", None)
    if not (inspect.isfunction(function) and inspect.iscoroutinefunction(inner)):
        return None
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    only_runs = set(function.__code__.co_names) <= RUNNING and all(each is inner for each in cells)
    return inner if only_runs else None


def is_skipped_case(item: pytest.Function) -> bool:
    """Tell whether unittest skips a method, which pytest sees when it runs it."""
    return any(getattr(each, "__unittest_skip__", False) for each in (item.obj, item.cls))


def refusal(item: pytest.Function, backend: object = None) -> str | None:
    """Return why a test cannot be explored, or None.

    Args:
        item: The test.
        backend: That of anyio, once its fixture is made.
    """
    if hasattr(item.obj, "hypothesis"):
        return "it is decorated with @given, and Hypothesis runs it many times itself"
    if getattr(item.obj, "__unittest_expecting_failure__", False):
        return "it is expected to fail"
    if async_function(item) is None:
        return (
            "a decorator makes a plain function of it, and does more than run it in an event loop"
        )
    if backend is None:
        callspec = getattr(item, "callspec", None)
        backend = "asyncio" if callspec is None else callspec.params.get("anyio_backend", "asyncio")
    name, options = backend if isinstance(backend, tuple) else (backend, {})
    if name != "asyncio":
        return f"it runs on {name}, and only asyncio is simulated"
    for option in OTHER_LOOPS:
        if options.get(option):
            return f"{option} asks for an event loop of its own"
    return None


def why_not_explored(report: Report) -> str | None:
    """Return why a failed exploration says nothing of the test: it left the simulation."""
    from aioreplica.testing import NondeterminismError, RealIOError

    if report.failure is not None:
        for error in _leaves(report.failure.error):
            if isinstance(error, RealIOError):  # the same reason, whatever the line
                return f"RealIOError: {str(error).partition(' at ')[0]}"
            if isinstance(error, NondeterminismError):
                return "NondeterminismError: the same schedule ran otherwise the second time"
    return None


def outcome_of(report: Report) -> tuple[str, str]:
    """Return kind and text of a test's row: "explored" or "failed"."""
    if report.failure is None:
        return "explored", f"{report.schedules_run} schedules"
    error, token = report.failure.error, report.failure.token
    when = (
        f"in schedule {report.failure.schedule_number + 1}"
        if report.failure.schedule_number
        else "in asyncio's own order"
    )
    return "failed", f"{type(error).__name__} {when}{f', token {token}' if token else ''}"


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def write_table(reporter: TerminalReporter) -> None:
    """Write what became of the explored tests: a row for each file, then the reasons."""
    rows = _rows(reporter)
    reporter.section("schedules of async tests", sep="=")
    if not rows:
        reporter.write_line("No async test was explored.")
        return
    counts: dict[str, Counter[str]] = {}
    for nodeid, kind, _ in rows:
        counts.setdefault(nodeid.partition("::")[0], Counter())[kind] += 1
    width = max(map(len, [*counts, "total"]))
    kinds = ("explored", "refused", "failed", "confirmed")
    reporter.write_line(f"{'':<{width}}" + "".join(f"{kind:>10}" for kind in kinds))
    total: Counter[str] = Counter()
    for file, of_file in sorted(counts.items()):
        total += of_file
        reporter.write_line(_line(file, of_file, width))
    if len(counts) > 1:
        reporter.write_line(_line("total", total, width))
    for nodeid, kind, text in rows:
        if kind == "failed":
            reporter.write_line(f"failed: {nodeid}: {text}")
    for kind in ("refused", "warned"):
        for line in _reasons(rows, kind):
            reporter.write_line(line)
    if total["failed"]:
        reporter.write_line("Replay one: add --ar-replay TOKEN to the same command.")


def _line(name: str, count: Counter[str], width: int) -> str:
    explored = count["explored"] + count["failed"]
    numbers = (explored, count["refused"], count["failed"], count["confirmed"])
    return f"{name:<{width}}" + "".join(f"{number:>10}" for number in numbers)


def _reasons(rows: list[tuple[str, str, str]], wanted: str) -> Iterator[str]:
    """Yield a line for each reason, with the first tests that have it."""
    by_text: dict[str, list[str]] = {}
    for nodeid, kind, text in rows:
        if kind == wanted:
            by_text.setdefault(text, []).append(nodeid)
    for text, nodeids in by_text.items():
        more = f" and {len(nodeids) - SHOWN} more" if len(nodeids) > SHOWN else ""
        yield f"{wanted}: {', '.join(nodeids[:SHOWN])}{more}: {text}"


def _rows(reporter: TerminalReporter) -> list[tuple[str, str, str]]:
    """Return id, kind and text of what the reports hold; each once, though phases repeat it."""
    found: dict[tuple[str, str, str], None] = {}
    for reports in reporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == PROPERTY:
                    kind, text = value
                    found[report.nodeid, kind, text] = None
    return sorted(found)
