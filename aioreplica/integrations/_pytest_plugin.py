"""The pytest plugin of aioreplica: async tests under many schedules.

pytest imports every plugin that is installed, so the kit itself is imported only when a test
carries the marker.
"""

from __future__ import annotations

import inspect
import sys
import unittest
from collections.abc import Generator, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.compat import is_async_function
from _pytest.unittest import TestCaseFunction

if TYPE_CHECKING:
    from _pytest.fixtures import SubRequest

    from aioreplica.testing import Report
    from aioreplica.testing._fixtures import Fixtures
    from aioreplica.testing._report import UnreadReport

MARKER = "explore"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the command line."""
    group = parser.getgroup("aioreplica", "schedules of async tests (aioreplica.testing)")
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
    config.addinivalue_line(
        "markers",
        "explore(schedules=1000, seed=0, strategy='portfolio', fidelity='reorder', faults=None, "
        "max_steps=None, leaks=()): run an async test under many schedules, see "
        "aioreplica.testing.explore.",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test under its schedules; leave all others alone."""
    __tracebackhide__ = True
    marker = pyfuncitem.get_closest_marker(MARKER)
    if marker is None:
        return None
    function = _async_function(pyfuncitem.obj)
    _check_marked(pyfuncitem, marker, function)
    from aioreplica.testing._fixtures import Fixtures

    fixtures = Fixtures(pyfuncitem)

    @wraps(function)
    async def main() -> None:
        await fixtures.call(function)

    del main.__wrapped__  # its signature has arguments
    try:
        _run(main, dict(marker.kwargs), pyfuncitem)
    except BaseException as error:
        _name_shared(error, fixtures)
        raise
    return True


def _check_marked(item: pytest.Function, marker: pytest.Mark, function: Any) -> None:
    """Refuse what carries the marker and cannot be explored."""
    __tracebackhide__ = True
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
    if not inspect.iscoroutinefunction(function):
        raise pytest.UsageError(f"{item.name} is marked `explore` but is not an async function.")


def _explore_case(item: pytest.Function, marker: pytest.Mark) -> None:
    """Run a marked method of an `IsolatedAsyncioTestCase` under its schedules.

    unittest would run it once, in an event loop of its own. In each schedule there is a new
    instance, with its own `setUp`, `asyncSetUp`, cleanups and so on.
    """
    __tracebackhide__ = True
    if getattr(item.obj, "__unittest_skip__", False):
        pytest.skip(item.obj.__unittest_skip_why__)
    cls = type(item.instance)
    _check_marked(item, marker, item.obj)
    if not issubclass(cls, unittest.IsolatedAsyncioTestCase):
        raise pytest.UsageError(
            f"{item.name} is marked `explore`, but {cls.__name__} is no "
            "unittest.IsolatedAsyncioTestCase: nothing would run its async methods."
        )
    from aioreplica.testing._fixtures import run_case

    async def main() -> None:
        await run_case(cls, item.originalname)

    main.__name__ = item.originalname  # by which tokens know it
    _run(main, dict(marker.kwargs), item)


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: SubRequest) -> object | None:
    """Leave async fixtures that no other plugin takes to the schedules of a marked test.

    Those are made in each schedule anyhow, and so is what they are for.
    """
    __tracebackhide__ = True
    item = request._pyfuncitem
    if item.get_closest_marker(MARKER) is None or isinstance(item, TestCaseFunction):
        return None
    from aioreplica.testing._fixtures import LATER, Fixtures

    names = [name for name in fixturedef.argnames if request.getfixturevalue(name) is LATER]
    if not (names or is_async_function(fixturedef.func)):
        return None
    if Fixtures(item).is_remade(fixturedef.argname):
        fixturedef.cached_result = (LATER, fixturedef.cache_key(request), None)
        return LATER
    if names:
        pytest.fail(
            f"The fixture {fixturedef.argname!r} ({fixturedef.scope} scope) is made once for all "
            f"schedules of {item.name}, and {names[0]!r}, an async fixture, anew in each. Give it "
            "function scope, and neither parameters nor the request, or make both with "
            "pytest_asyncio.fixture.",
            pytrace=False,
        )
    return None  # pytest refuses it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that got a failed report from the kit and did not look at it."""
    __tracebackhide__ = True
    marker = item.get_closest_marker(MARKER)
    if marker is not None and isinstance(item, TestCaseFunction):
        item.runtest = partial(_explore_case, item, marker)  # type: ignore[method-assign]
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


def _name_shared(error: BaseException, fixtures: Fixtures) -> None:
    """Name the fixtures that schedules share, where that may be the cause."""
    from aioreplica.testing import NondeterminismError

    names = fixtures.shared()
    if names and isinstance(error, NondeterminismError):
        error.add_note(
            f"All schedules share these fixtures, which may keep what one has changed: "
            f"{', '.join(names)}. Those of function scope without parameters are made anew for "
            "each schedule."
        )


def _async_function(function: Any) -> Any:
    """Return the test function itself where another plugin has wrapped it into a plain one."""
    if inspect.iscoroutinefunction(function):
        return function
    owner = getattr(function, "__self__", None)
    inner = inspect.unwrap(getattr(function, "__func__", function))
    return inner if owner is None else inner.__get__(owner)


def _run(main: Any, options: dict[str, Any], item: pytest.Function) -> None:
    """Explore or replay, as the command line says."""
    __tracebackhide__ = True  # what failed is the test
    import aioreplica.testing as art

    config = item.config
    token = config.getoption("--ar-replay")
    if token is not None:
        if not art.is_token_of(token, main):
            pytest.skip(f"token {token} is of another test")
        shared = {name: options[name] for name in ("faults", "leaks") if name in options}
        art.replay(main, token, **shared)
        return
    for name in ("seed", "schedules"):
        given = config.getoption(f"--ar-{name}")
        if given is not None:
            options[name] = given
    report = art.explore(main, **options)
    _save_timeline(report, item)
    for warning in report.warnings:
        item.warn(pytest.PytestWarning(warning))
    report.check()


def _save_timeline(report: Report, item: pytest.Function) -> None:
    folder = item.config.getoption("--ar-timeline")
    if folder is not None and report.failure is not None:
        folder.mkdir(parents=True, exist_ok=True)
        report.failure.save_html(folder / f"{item.name}.html")
