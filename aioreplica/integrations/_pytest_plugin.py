"""The pytest plugin of aioreplica: async tests under many schedules.

pytest imports every plugin that is installed, so the kit itself is imported only when a test is
explored. Whether a test is, and why not, is decided once, before anything of it is set up; for a
whole suite explored by `--ar-explore` a table tells it.
"""

from __future__ import annotations

import inspect
import re
import sys
import unittest
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial, wraps
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from _pytest.unittest import TestCaseFunction

if TYPE_CHECKING:
    from _pytest.fixtures import SubRequest
    from _pytest.terminal import TerminalReporter

    from aioreplica.testing import Report
    from aioreplica.testing._fixtures import Fixtures
    from aioreplica.testing._report import UnreadReport


MARKER: Final = "explore"
OPTIONS: Final = pytest.StashKey[dict[str, Any]]()
"""How a test is explored; absent for a test that is not."""
FIXTURES: Final = pytest.StashKey["Fixtures"]()
OF_SUITE: Final = pytest.StashKey[bool]()
"""Whether a test is explored for `--ar-explore` alone."""
ENDED_EARLY: Final = (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest)
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
LONGEST_NAME: Final = 150
"""Most characters of a test's id in the name of its page; file systems take 255."""
SHOWN: Final = 3
"""How many tests are named with a reason that many share."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the command line."""
    group = parser.getgroup("aioreplica", "schedules of async tests (aioreplica.testing)")
    group.addoption(
        "--ar-explore",
        nargs="?",
        const="*",
        metavar="PATTERN",
        help="explore every async test, as if it were marked; with =PATTERN, those whose id has "
        "that in it, with wildcards as in file names",
    )
    group.addoption(
        "--ar-fidelity",
        choices=("asyncio", "reorder", "adversarial"),
        help="what the schedules of every exploration vary",
    )
    group.addoption(
        "--ar-replay",
        metavar="TOKEN",
        help="run explored tests under the schedule of a token; those it is not of are skipped",
    )
    group.addoption("--ar-seed", type=int, metavar="N", help="seed of every exploration")
    group.addoption("--ar-schedules", type=int, metavar="N", help="schedules of every exploration")
    group.addoption(
        "--ar-timeline",
        type=Path,
        metavar="FOLDER",
        help="write the timeline of every failing schedule there, as a page",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    check_pattern(config)
    config.addinivalue_line(
        "markers",
        "explore(schedules=1000, seed=0, strategy='portfolio', fidelity='reorder', faults=None, "
        "max_steps=None, leaks=()): run an async test under many schedules, see "
        "aioreplica.testing.explore.",
    )


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    """Tell what became of a suite that was explored."""
    if config.getoption("--ar-explore") is not None:
        write_table(terminalreporter)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Decide whether a test is explored, before its fixtures are made."""
    if not isinstance(item, pytest.Function):
        return
    marker = item.get_closest_marker(MARKER)
    if (marker is None and not is_meant(item)) or is_skipped_case(item):
        return
    item.stash[OF_SUITE] = marker is None
    if marker is not None:
        _check_marked(item, marker)
    reason = refusal(item)
    if reason is not None:
        _refuse(item, reason)
    from aioreplica.testing._fixtures import Fixtures

    item.stash[OPTIONS] = {} if marker is None else dict(marker.kwargs)
    if not isinstance(item, TestCaseFunction):
        item.stash[FIXTURES] = fixtures = Fixtures(item, async_function(item))
        wide = fixtures.wide_async()
        if wide is not None:
            text = (
                f"the async fixture {wide[0]!r} has {wide[1]} scope, so that what it makes belongs "
                "to an event loop that schedules do not have"
            )
            if marker is None:
                _refuse(item, text)
            raise pytest.UsageError(
                f"{item.name} is marked `explore`, but {text}. Give it function scope."
            )


def _check_marked(item: pytest.Function, marker: pytest.Mark) -> None:
    """Refuse what carries the marker and cannot be explored."""
    if marker.args:
        raise pytest.UsageError(
            f"The marker of {item.name} takes keywords only, as in explore(schedules=200)."
        )
    if hasattr(item.obj, "hypothesis"):
        raise pytest.UsageError(
            f"{item.name} is marked `explore` and decorated with `@given`, and both choose what is "
            "run. Let Hypothesis draw the schedule too: in a plain test with @given(..., "
            "schedule=art.schedules()), call art.run(main, schedule=schedule)."
        )
    if async_function(item) is None:
        raise pytest.UsageError(f"{item.name} is marked `explore` but is not an async function.")
    cls: Any = item.cls
    is_async = inspect.iscoroutinefunction(item.obj) and isinstance(item, TestCaseFunction)
    if is_async and not issubclass(cls, unittest.IsolatedAsyncioTestCase):
        raise pytest.UsageError(
            f"{item.name} is marked `explore`, but {cls.__name__} is no "
            "unittest.IsolatedAsyncioTestCase: nothing would run its async methods."
        )


def _refuse(item: pytest.Item, reason: str) -> None:
    """Skip a test that cannot be explored, and note it for the table."""
    item.user_properties.append((PROPERTY, ("refused", reason)))
    pytest.skip(f"not explored: {reason}")


def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: SubRequest
) -> object | None:
    """Leave the fixtures of an explored test to its schedules, which make them anew."""
    fixtures = request._pyfuncitem.stash.get(FIXTURES, None)
    if fixtures is None or not fixtures.is_remade(fixturedef.argname):
        return None
    from aioreplica.testing._fixtures import LATER

    fixturedef.cached_result = (LATER, fixturedef.cache_key(request), None)
    return LATER


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Explore a test; fail one that got a failed report from the kit and did not look at it."""
    __tracebackhide__ = True
    if OPTIONS in item.stash and isinstance(item, pytest.Function):
        # in place of what other plugins make of an async test
        item.runtest = partial(_explore, item)  # type: ignore[method-assign]
    before = list(_unread_reports())
    result = yield
    forgotten = [each for each in _unread_reports() if all(each is not old for old in before)]
    for each in forgotten:
        each.read()  # so that it is told once
    if forgotten:
        pytest.fail("\n".join(each.text for each in forgotten), pytrace=False)
    return result


def _unread_reports() -> Sequence[UnreadReport]:
    """Return what the kit knows, if the tests have imported it."""
    kit = sys.modules.get("aioreplica.testing._report")
    return () if kit is None else kit.unread_reports()


def _explore(item: pytest.Function) -> None:
    """Run a test under its schedules."""
    __tracebackhide__ = True
    if isinstance(item, TestCaseFunction):
        _explore_program(item, _program_of_case(item))
        return
    backend = item.funcargs.get("anyio_backend", "asyncio")
    reason = refusal(item, backend)  # a fixture without parameters may choose it too
    if reason is not None:
        _refuse(item, reason)
    fixtures = item.stash[FIXTURES]
    try:
        _explore_program(item, fixtures.call)
    except BaseException as error:
        _name_shared(error, fixtures)
        raise


def _program_of_case(item: pytest.Function) -> Callable[[], Awaitable[None]]:
    """Return what runs an async method of a test case in the loop that is there.

    unittest would run it once, in an event loop of its own. In each schedule there is a new
    instance, with its own `setUp`, `asyncSetUp`, cleanups and so on.
    """
    from aioreplica.testing._fixtures import run_case

    cls: Any = item.cls
    return partial(run_case, cls, item.originalname, async_function(item))


def _explore_program(item: pytest.Function, program: Callable[[], Awaitable[None]]) -> None:
    """Run a program under the schedules of a test; raise what ended one of them early."""
    __tracebackhide__ = True
    ended: list[BaseException] = []

    @wraps(item.obj)
    async def main() -> None:
        try:
            await program()
        except ENDED_EARLY as error:  # a skip is no failure of a schedule
            ended.append(error)

    del main.__wrapped__  # its signature has arguments
    main.__name__ = item.originalname or item.name  # by which tokens know it
    _run(main, item)
    if ended:
        raise ended[0]


def _name_shared(error: BaseException, fixtures: Fixtures) -> None:
    """Name the fixtures that schedules share, where that may be the cause."""
    from aioreplica.testing import NondeterminismError

    names = fixtures.shared()
    if names and isinstance(error, NondeterminismError):
        error.add_note(
            f"All schedules share these fixtures, which may keep what one has changed: "
            f"{', '.join(names)}. Those of function scope are made anew for each schedule."
        )


def _run(main: Any, item: pytest.Function) -> None:
    """Explore or replay, as the command line says."""
    __tracebackhide__ = True  # what failed is the test
    import aioreplica.testing as art

    config, options, is_of_suite = item.config, item.stash[OPTIONS], item.stash[OF_SUITE]
    token = config.getoption("--ar-replay")
    if token is not None:
        if not art.is_token_of(token, main):
            pytest.skip(f"token {token} is of another test")
        shared = {name: options[name] for name in ("faults", "leaks") if name in options}
        art.replay(main, token, **shared)
        return
    if is_of_suite:
        options["schedules"] = DEFAULT_SCHEDULES
    for name in ("seed", "schedules", "fidelity"):
        given = config.getoption(f"--ar-{name}")
        if given is not None:
            options[name] = given
    report = art.explore(main, **options)
    if is_of_suite:
        refused = why_not_explored(report)
        if refused is not None:
            _refuse(item, refused)
    _save_timeline(report, item)
    _note(report, item)
    report.check()


def _note(report: Report, item: pytest.Function) -> None:
    """Note for the table what became of a test, and what was not simulated."""
    item.user_properties.append((PROPERTY, outcome_of(report)))
    if report.confirmed:
        item.user_properties.append((PROPERTY, ("confirmed", report.confirmed_token)))
    for warning in report.warnings:
        if item.stash[OF_SUITE]:  # which may make errors of its warnings
            item.user_properties.append((PROPERTY, ("warned", warning)))
        else:
            item.warn(pytest.PytestWarning(warning))


def _save_timeline(report: Report, item: pytest.Function) -> None:
    folder = item.config.getoption("--ar-timeline")
    if folder is not None and report.failure is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            report.failure.save_html(folder / _page_name(item.nodeid))
        except OSError as error:  # what failed is the test
            report.failure.error.add_note(f"Its timeline could not be written: {error}.")


def _page_name(nodeid: str) -> str:
    """Return a file name for a test, which no other test has, of parameters of any form."""
    digest = blake2b(nodeid.encode(errors="replace"), digest_size=4).hexdigest()
    readable = re.sub(r"[^\w.-]+", "_", nodeid, flags=re.ASCII).strip("_")
    return f"{readable[-LONGEST_NAME:]}-{digest}.html"


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
