"""A failed report that nobody looks at warns when it is collected, and fails the test in pytest."""

import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aioreplica.testing as art
from aioreplica.testing._report import unread_reports
from tests.testing.programs import step

ROOT = Path(__file__).resolve().parents[2]
FAILS = """
async def fails():
    raise ValueError("mine")
"""


async def fails() -> None:
    raise ValueError("mine")


FINDERS: dict[str, Callable[[], art.Report]] = {
    "explore": lambda: art.explore(fails, schedules=50),
    "exhaustive": lambda: art.exhaustive(fails),
    "cancel_everywhere": lambda: art.cancel_everywhere(fails),
}


@pytest.fixture(autouse=True)
def told() -> Iterator[None]:
    """The plugin of this run is not to fail these tests, which look for themselves."""
    assert unread_reports() == []
    yield
    assert unread_reports() == []


def found_and_dropped(name: str) -> None:
    """Collect the report: its error may hold frames in a circle."""
    FINDERS[name]()
    gc.collect()


@pytest.mark.parametrize("name", FINDERS)
def test_a_failed_report_that_is_collected_unread_warns(name: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"art.{name}, called at {__file__}:") as caught:
        found_and_dropped(name)
    [unread] = unread_reports()
    unread.read()

    [warning] = caught
    assert warning.filename == __file__
    text = str(warning.message)
    assert "ValueError" in text
    assert "--ar-replay ar1-" in text


def check(report: art.Report) -> None:
    with pytest.raises(ValueError, match="mine"):
        report.check()


READERS: dict[str, Callable[[art.Report], object]] = {
    "failed": lambda report: report.failed,
    "failure": lambda report: report.failure,
    "complete": lambda report: report.complete,
    "check": check,
    "repr": repr,
    "str": str,
    "comparison": lambda report: report == copy.copy(report),
    "pickle": lambda report: pickle.dumps((report.failed, report.seed)),
}


@pytest.mark.parametrize("how", READERS)
def test_a_report_that_was_looked_at_does_not_warn(how: str) -> None:
    report = FINDERS["explore"]()
    assert len(unread_reports()) == 1
    assert report.schedules_run >= 1  # which does not tell
    assert len(unread_reports()) == 1

    READERS[how](report)

    assert unread_reports() == []
    del report
    gc.collect()


def test_a_report_without_a_failure_need_not_be_read() -> None:
    art.explore(step, schedules=3)
    art.exhaustive(step)
    art.cancel_everywhere(step)


PROGRAM = """
import aioreplica.testing as art

art.explore(fails, schedules=50)
kept = art.exhaustive(fails)
told = art.explore(fails, schedules=50)
print(told)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("-W", "error::RuntimeWarning")])
def test_a_program_is_told_at_its_exit_at_the_latest(options: tuple[str, ...]) -> None:
    command = [sys.executable, *options, "-c", FAILS + PROGRAM]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)

    assert ended.returncode == 0
    for name in ("explore", "exhaustive"):
        assert ended.stderr.count(f"RuntimeWarning: art.{name}, called at") == 1


TESTS = """
import aioreplica.testing as art
import pytest

reports = []

@pytest.fixture(scope="module")
def shared():
    return art.explore(fails, schedules=50)

def test_dropped():
    art.explore(fails, schedules=50)

def test_kept():
    reports.append(art.exhaustive(fails))

def test_read():
    assert art.explore(fails, schedules=50).failed

def test_before_the_fixture_is_read(shared):
    pass

def test_fixture(shared):
    assert shared.failed

@pytest.mark.xfail(strict=True)
def test_expected():
    art.cancel_everywhere(fails)

def test_that_fails_by_itself():
    art.explore(fails, schedules=50)
    assert False, "by itself"
"""


OPTIONS = [
    pytest.param((), marks=pytest.mark.xslow),
    pytest.param(("-W", "ignore"), marks=pytest.mark.xslow),
    pytest.param(("-W", "error::RuntimeWarning"), marks=pytest.mark.xslow),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_test_that_made_it_fails(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_it.py").write_text(FAILS + TESTS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf", *options]
    ended: Any = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip

    assert "3 failed, 3 passed, 1 xfailed" in ended.stdout, ended.stdout + ended.stderr
    for name in ("test_dropped", "test_kept", "test_that_fails_by_itself"):
        assert f"test_it.py::{name}" in ended.stdout
    assert "art.explore, called at" in ended.stdout
    assert "Replay it with art.replay(main, 'ar1-" in ended.stdout
    assert "by itself" in ended.stdout
