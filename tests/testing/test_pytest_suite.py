"""A whole suite under `--ar-explore`: what is explored, what is refused, and the table."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ASYNCIO_TESTS = """
import asyncio
import pytest
import pytest_asyncio

rounds = []

@pytest.fixture(params=[1, 2])
def number(request):
    request.addfinalizer(lambda: rounds.append(request.param))
    return request.param

@pytest.fixture
def box(request):
    return {"v": 0, "name": request.node.name, "number": request.getfixturevalue("number")}

@pytest_asyncio.fixture
async def queue(box):
    await asyncio.sleep(1)
    queue = asyncio.Queue()
    yield queue
    await asyncio.sleep(1)
    assert queue.empty()

@pytest.fixture(autouse=True)
def counted(monkeypatch):
    monkeypatch.setattr(asyncio, "counted", getattr(asyncio, "counted", 0) + 1, raising=False)

@pytest.mark.asyncio
async def test_fixtures(number, box, queue, tmp_path, caplog):
    (tmp_path / "a").mkdir()
    assert caplog.records == []
    assert box == {"v": 0, "name": f"test_fixtures[{number}]", "number": number}
    assert asyncio.counted == 1
    await asyncio.sleep(1)

@pytest.mark.asyncio
async def test_lost_update():
    state = {"v": 0}
    async def writer(delay):
        for _ in range(delay):
            await asyncio.sleep(0)
        seen = state["v"]
        await asyncio.sleep(0)
        state["v"] = seen + 1
    await asyncio.gather(writer(0), writer(2))
    assert state["v"] == 2

@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server():
    raise AssertionError

@pytest.mark.asyncio(loop_scope="module")
async def test_of_a_server(server):
    raise AssertionError

@pytest.mark.asyncio
async def test_process():
    await asyncio.create_subprocess_exec("true")

@pytest.mark.asyncio
async def test_skips():
    await asyncio.sleep(1)
    pytest.skip("because")

class TestMethods:
    def setup_method(self):
        self.calls = 0

    @pytest.mark.asyncio
    async def test_method(self):
        self.calls += 1
        assert self.calls == 1

def test_rounds():
    assert rounds.count(1) > 5 and rounds.count(2) == rounds.count(1)

def test_plain(counted):
    assert asyncio.counted == 1
"""

OTHER_TESTS = """
import asyncio
import functools
import unittest
import anyio
import pytest

class Cases(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        self.calls = 0

    async def test_case(self):
        self.calls += 1
        await asyncio.sleep(3600)
        assert self.calls == 1

    @unittest.expectedFailure
    async def test_expected(self):
        assert False

    @unittest.skip("because")
    async def test_skipped(self):
        assert False

def asynctest(function):
    @functools.wraps(function)
    def wrapper(*args):
        return asyncio.run(function(*args))
    return wrapper

def twice(function):
    @functools.wraps(function)
    def wrapper(*args):
        print(asyncio.run(function(*args)))
    return wrapper

class Decorated(unittest.TestCase):
    def setUp(self):
        self.calls = 0

    @asynctest
    async def test_run_by_a_decorator(self):
        self.calls += 1
        await asyncio.sleep(3600)
        assert self.calls == 1

@twice
async def test_run_twice():
    await asyncio.sleep(0)

@pytest.fixture
async def event():
    await anyio.sleep(3600)
    yield anyio.Event()

@pytest.fixture(params=["asyncio", "trio", ("asyncio", {"use_uvloop": True})])
def anyio_backend(request):
    return request.param

@pytest.mark.anyio
async def test_of_anyio(event):
    event.set()
    await anyio.sleep(3600)
    await event.wait()

@pytest.fixture
def value():
    return [1]

class TestOverride:
    @pytest.fixture
    def value(self, value):
        return [*value, 2]

    @pytest.mark.anyio
    async def test_value(self, value):
        assert value == [1, 2]
        value.clear()
"""


def suite(folder: Path, tests: str, *options: str) -> str:
    """Run a suite as its authors would, with options; return all output."""
    (folder / "test_it.py").write_text(tests, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    ended = subprocess.run(
        [*command, "-W", "error", "-o", "asyncio_default_fixture_loop_scope=function", "."],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return ended.stdout + ended.stderr


@pytest.mark.xslow
def test_a_suite_of_pytest_asyncio_is_explored_refused_or_failed(tmp_path: Path) -> None:
    found = suite(
        tmp_path, ASYNCIO_TESTS, "--asyncio-mode=strict", "--ar-explore", "--ar-schedules=40"
    )

    assert "1 failed, 5 passed, 3 skipped" in found, found
    assert re.search(r"^test_it.py +5 +2 +1 +0$", found, re.MULTILINE), found
    [token] = re.findall(r"^failed: \S+::test_lost_update: .* token (\S+)$", found, re.MULTILINE)
    assert "test_of_a_server: the async fixture 'server' has module scope" in found
    assert "test_process: RealIOError: A subprocess" in found

    again = suite(
        tmp_path, ASYNCIO_TESTS, "--asyncio-mode=strict", "--ar-explore", f"--ar-replay={token}",
        "-k", "lost_update or method",
    )  # fmt: skip
    assert "1 failed, 1 skipped" in again, again


@pytest.mark.xslow
def test_auto_mode_a_pattern_and_a_fidelity(tmp_path: Path) -> None:
    found = suite(
        tmp_path, ASYNCIO_TESTS, "--asyncio-mode=auto", "--ar-explore=lost_*", "--ar-schedules=40",
        "--ar-fidelity=asyncio", "-k", "update or plain or method",
    )  # fmt: skip

    assert "3 passed" in found, found  # asyncio's own queue keeps the order of the writers
    assert re.search(r"^test_it.py +1 +0 +0 +0$", found, re.MULTILINE), found


@pytest.mark.xslow
def test_suites_of_unittest_and_anyio_are_explored(tmp_path: Path) -> None:
    found = suite(tmp_path, OTHER_TESTS, "--ar-explore", "--ar-schedules=5")

    assert "4 passed, 7 skipped" in found, found
    assert re.search(r"^test_it.py +4 +6 +0 +0$", found, re.MULTILINE), found
    assert "test_run_twice: a decorator makes a plain function of it" in found
    assert "test_expected: it is expected to fail" in found
    assert "it runs on trio, and only asyncio is simulated" in found
    assert "use_uvloop asks for an event loop of its own" in found


@pytest.mark.slow
def test_a_path_is_no_pattern(tmp_path: Path) -> None:
    assert "took 'test_it.py' for its pattern" in suite(
        tmp_path, ASYNCIO_TESTS, "--ar-explore", "test_it.py"
    )
