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


@pytest.mark.slow
def test_a_marked_test_is_explored_and_replayed(tmp_path: Path) -> None:
    output = run_pytest(tmp_path, f"--ar-timeline={tmp_path / 'pages'}")

    assert "1 failed, 3 passed" in output
    [token] = set(re.findall(r"--ar-replay (ar1-\S+)", output))
    assert "is held at" in output
    assert (tmp_path / "pages" / "test_lost_update.html").exists()

    replayed = run_pytest(tmp_path, f"--ar-replay={token}")
    assert "1 failed, 2 passed, 1 skipped" in replayed


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


@pytest.mark.slow
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
