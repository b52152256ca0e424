"""The pytest plugin: marker, options, replay; harmless to everybody else."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import asyncio
import pytest

@pytest.fixture
def patience():
    return 1

@pytest.mark.explore(schedules=300)
async def test_lost_update(patience):
    state = {"v": 0}
    async def writer(delay):
        for _ in range(delay):
            await asyncio.sleep(0)
        seen = state["v"]
        await asyncio.sleep(0)
        state["v"] = seen + patience
    await asyncio.gather(writer(0), writer(2))
    assert state["v"] == 2

@pytest.mark.explore(schedules=20)
async def test_fine():
    await asyncio.sleep(3600)

@pytest.mark.asyncio
async def test_of_pytest_asyncio():
    await asyncio.sleep(0)

def test_plain():
    pass
"""


FIXTURES = """
import asyncio
import threading
import pytest
import pytest_asyncio

made = []
ended = []

class App:
    def __init__(self):
        self.lock = threading.Lock()
        self.calls = 0

@pytest.fixture
def log():
    return []

@pytest.fixture
def app(log):
    app = App()
    made.append(app)
    log.append(app)
    yield app
    ended.append(app)

@pytest_asyncio.fixture
async def client(app):
    await asyncio.sleep(1)
    yield app, asyncio.get_running_loop()
    await asyncio.sleep(1)

@pytest.mark.explore(schedules=20)
async def test_app(app, client, log, tmp_path):
    own, loop = client
    assert own is app and log == [app] and tmp_path.exists()
    assert loop is asyncio.get_running_loop()
    app.calls += 1
    await asyncio.sleep(0)
    assert app.calls == 1

@pytest.fixture(scope="module")
def shared():
    return {"calls": 0}

@pytest.mark.explore(schedules=20)
async def test_shared(shared):
    shared["calls"] += 1
    for _ in range(shared["calls"]):
        await asyncio.sleep(0)

def test_made():
    assert len(made) > 20 and len(ended) == len(made)
"""


METHODS = """
import asyncio
import pytest

class TestCases:
    value = 1

    @pytest.mark.explore(schedules=5)
    async def test_method(self):
        await asyncio.sleep(self.value)

    @pytest.mark.explore(schedules=5)
    @pytest.mark.parametrize("number", [1, 2])
    async def test_numbers(self, number):
        await asyncio.sleep(number)
        assert number == 1
"""


CASES = """
import asyncio
import unittest
import pytest
from hypothesis import given, strategies

log = []

class Cases(unittest.IsolatedAsyncioTestCase):
    def setUp(self):
        self.count = 0
        log.append("setUp")

    async def asyncSetUp(self):
        await asyncio.sleep(1)
        self.addAsyncCleanup(asyncio.sleep, 1)
        self.addCleanup(log.append, "cleanup")

    async def asyncTearDown(self):
        await asyncio.sleep(1)
        log.append("tearDown")

    @pytest.mark.explore(schedules=5)
    async def test_passes(self):
        await asyncio.sleep(3600)

    def test_was_run_often(self):
        assert len(log) > 3 * 5 and log[-4:] == ["setUp", "tearDown", "cleanup", "setUp"]

    @pytest.mark.explore(schedules=200)
    async def test_update(self):
        async def add(rounds):
            for _ in range(rounds):
                await asyncio.sleep(0)
            seen = self.count
            await asyncio.sleep(0)
            self.count = seen + 1
        await asyncio.gather(add(0), add(2))
        self.assertEqual(self.count, 2)

    @unittest.skip("because")
    @pytest.mark.explore
    async def test_skipped(self):
        raise AssertionError

class Blocking(unittest.TestCase):
    @pytest.mark.explore
    async def test_of_no_loop(self):
        raise AssertionError

@pytest.mark.explore
@given(number=strategies.integers())
async def test_drawn(number):
    raise AssertionError
"""


ASYNC_FIXTURES = """
import asyncio
import pytest

loops = []

@pytest.fixture
async def queue():
    loops.append(asyncio.get_running_loop())
    await asyncio.sleep(1)
    yield asyncio.Queue()
    await asyncio.sleep(1)

@pytest.fixture
async def other(queue):
    return queue

@pytest.fixture
def filled(other):
    other.put_nowait(1)
    yield other
    other.get_nowait()

@pytest.mark.explore(schedules=10)
async def test_fixtures(filled, other):
    await asyncio.sleep(1)
    assert filled is other and other.qsize() == 1

def test_every_schedule_had_its_own():
    assert len(set(map(id, loops))) > 1 and len(loops) > 10

@pytest.fixture(scope="module")
async def wide():
    raise AssertionError

@pytest.mark.explore(schedules=10)
async def test_wide(wide):
    raise AssertionError
"""


def run_pytest(folder: Path, *options: str) -> str:
    (folder / "test_it.py").write_text(TESTS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    if not any(option.startswith("--asyncio-mode") for option in options):
        command.append("--asyncio-mode=strict")
    result = subprocess.run(
        [*command, str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout + result.stderr


@pytest.mark.xslow
def test_a_marked_test_is_explored_and_replayed(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, f"--ar-timeline={tmp_path / 'pages'}")

    assert "1 failed, 3 passed" in output
    [token] = set(re.findall(r"--ar-replay (ar1-\S+)", output))
    assert "is held at" in output
    assert len([*(tmp_path / "pages").glob("test_it.py_test_lost_update-*.html")]) == 1

    replayed = run_pytest(tmp_path, f"--ar-replay={token}")
    assert "1 failed, 2 passed, 1 skipped" in replayed


PAGES = """
import asyncio
import pytest

@pytest.mark.explore(schedules=5)
@pytest.mark.parametrize("path", ["a/b", "a_b", "x" * 250])
async def test_fails(path):
    await asyncio.sleep(0)
    raise ValueError("an update is lost")

class TestOther:
    @pytest.mark.explore(schedules=5)
    @pytest.mark.parametrize("path", ["a/b"])
    async def test_fails(self, path):
        raise ValueError("an update is lost")
"""


@pytest.mark.slow
def test_each_failing_test_has_a_page_whatever_its_id(tmp_path: Path) -> None:
    (tmp_path / "test_pages.py").write_text(PAGES, encoding="utf-8")
    output = run_pytest(tmp_path, f"--ar-timeline={tmp_path / 'pages'}", "-k", "test_fails")

    assert output.count("E       ValueError: an update is lost") == 4
    assert len([*(tmp_path / "pages").glob("*.html")]) == 4


@pytest.mark.slow
def test_a_page_that_cannot_be_written_does_not_hide_the_failure(tmp_path: Path) -> None:
    (tmp_path / "test_pages.py").write_text(PAGES, encoding="utf-8")
    taken = tmp_path / "pages"
    taken.write_text("")
    output = run_pytest(tmp_path, f"--ar-timeline={taken}", "-k", "test_fails and a_b")

    assert "ValueError: an update is lost" in output
    assert "Its timeline could not be written" in output
    assert "--ar-replay ar1-" in output


@pytest.mark.xslow
def test_it_explores_in_auto_mode_too(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, "--asyncio-mode=auto")

    assert "1 failed, 3 passed" in output
    assert "is held at" in output


@pytest.mark.xslow
def test_methods_are_explored(tmp_path: Path) -> None:
    (tmp_path / "test_class.py").write_text(METHODS, encoding="utf-8")

    assert "1 failed, 3 passed" in run_pytest(tmp_path, "--ar-schedules=5", "-k", "Cases or fine")


DEADLOCK = """
import asyncio
import pytest

@pytest.mark.explore(schedules=3)
async def test_deadlock():
    await asyncio.Event().wait()
"""


@pytest.mark.xslow
def test_no_frame_of_the_kit_is_shown(tmp_path: Path) -> None:
    (tmp_path / "test_deadlock.py").write_text(DEADLOCK, encoding="utf-8")

    output = run_pytest(tmp_path, "-k", "deadlock")

    assert "main awaits asyncio.Event at test_deadlock.py:7" in output
    assert "aioreplica/testing/" not in output
    assert "_pytest_plugin.py" not in output


@pytest.mark.xslow
def test_the_command_line_sets_how_many_schedules(tmp_path: Path) -> None:
    assert "4 passed" in run_pytest(tmp_path, "--ar-schedules=1", "--ar-seed=3")


@pytest.mark.xslow
def test_a_damaged_token_is_refused_before_anything_runs(tmp_path: Path) -> None:
    assert "Nothing was run" in run_pytest(tmp_path, "--ar-replay=ar1-nonsense")


@pytest.mark.slow
def test_the_plugin_imports_the_kit_when_it_is_used() -> None:
    plugin = "aioreplica.integrations._pytest_plugin"
    code = f"import {plugin}, sys; sys.exit('aioreplica.testing' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.explore(schedules=25)
async def test_the_marker_works_in_this_suite() -> None:
    import asyncio

    await asyncio.sleep(3600)


@pytest.mark.xslow
def test_fixtures_are_made_for_every_schedule_or_named(tmp_path: Path) -> None:
    (tmp_path / "test_fixtures.py").write_text(FIXTURES, encoding="utf-8")

    found = run_pytest(tmp_path, "-k", "app or shared or made")

    assert "2 passed" in found, found
    assert "1 failed" in found, found
    assert "All schedules share these fixtures" in found
    assert "shared (module scope)" in found


@pytest.mark.xslow
def test_unittest_cases_are_explored_or_refused(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES, encoding="utf-8")

    found = run_pytest(tmp_path, "-k", "Cases or Blocking or drawn")

    assert "1 failed, 2 passed, 1 skipped, 4 deselected, 2 errors" in found, found
    assert "is held at" in found
    assert "but Blocking is no unittest.IsolatedAsyncioTestCase" in found
    assert "Let Hypothesis draw the schedule too" in found


@pytest.mark.xslow
def test_a_case_of_unittest_is_replayed(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES, encoding="utf-8")
    [token] = set(re.findall(r"--ar-replay (ar1-\S+)", run_pytest(tmp_path, "-k", "test_update")))

    replayed = run_pytest(tmp_path, f"--ar-replay={token}", "-k", "test_update or test_passes")

    assert "1 failed, 1 skipped" in replayed, replayed


@pytest.mark.xslow
def test_async_fixtures_need_no_plugin_in_strict_mode(tmp_path: Path) -> None:
    (tmp_path / "test_async.py").write_text(ASYNC_FIXTURES, encoding="utf-8")

    found = run_pytest(tmp_path, "-k", "fixtures or own or wide")

    assert "2 passed" in found, found
    assert "1 error" in found, found
    assert "test_wide is marked `explore`, but the async fixture 'wide' has module scope" in found
