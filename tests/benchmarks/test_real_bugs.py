"""The benchmark of real bugs: its list, its probe, its table. Nothing is installed."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._environments import Environments
from benchmarks.real_bugs import _probe
from benchmarks.real_bugs._table import BUGS, QUICK, Bug
from benchmarks.real_bugs._verdicts import Verdict, format_verdicts

HERE = Path(_probe.__file__).parent

LOST_UPDATE = """
import asyncio

async def main():
    count = 0

    async def add():
        nonlocal count
        seen = count
        await asyncio.sleep(0)
        count = seen + 1

    async def add_later():
        for _ in range(3):
            await asyncio.sleep(0)
        await add()

    await asyncio.gather(add(), add_later())
    assert count == 2
"""


def test_every_bug_has_a_program_an_issue_and_two_releases() -> None:
    names = [bug.name for bug in BUGS]
    assert len(set(names)) == len(names) >= 25
    assert set(QUICK) <= set(names)
    for bug in BUGS:
        text = (HERE / "programs" / f"{bug.name}.py").read_text()
        assert "async def main():" in text, bug.name
        assert bug.issue.rpartition("#")[2].isdigit(), bug.name
        assert bug.buggy != bug.fixed, bug.name
        assert bug.culprit.partition(":")[2], bug.name


@pytest.mark.xslow
@pytest.mark.parametrize(("tool", "is_found"), [("kit", True), ("plain", False)])
def test_a_probe_tells_who_finds_a_bug(tmp_path: Path, tool: str, is_found: bool) -> None:
    (tmp_path / "lost_update.py").write_text(LOST_UPDATE)
    result = subprocess.run(
        [sys.executable, _probe.__file__, tool, "lost_update", "2", "100", "60", "x.py:add"],
        capture_output=True, text=True, check=True, env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    answer = json.loads(result.stdout)
    assert "broken" not in answer
    assert any(answer["found"]) is is_found
    assert all((at or 1) <= 100 for at in answer["found"])


@pytest.mark.parametrize("part", ["sentence", "error", "timeline"])
def test_a_report_names_a_line_in_the_function_of_the_culprit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str
) -> None:
    installed = Path(asyncio.__file__).parent  # the only package of this library
    shutil.copytree(installed, tmp_path / "asyncio", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(_probe.sysconfig, "get_path", lambda _name: str(tmp_path))
    line = asyncio.Condition.wait.__code__.co_firstlineno + 1
    story = {"error": "no", "sentence": "user.py:3", "timeline": "locks.py:1"}
    assert _probe.named(story, "asyncio/locks.py:wait") == "no"
    story[part] = f"task awaits locks.py:{line}"
    assert _probe.named(story, "asyncio/locks.py:wait,notify") == part
    assert _probe.named(story, "asyncio/locks.py:release_nobody;asyncio/tasks.py:sleep") == "no"
    assert _probe.named(story, "asyncio/tasks.py:sleep;asyncio/locks.py:wait") == part


def test_the_table_keeps_misses_and_tools_that_cannot_run() -> None:
    verdict = Verdict(
        "bug", "package 1.0", True, [3, None], "no", None, ["AssertionError"],
        {
            "simloom": {"found": [], "broken": "RuntimeError"},
            "simloop": {"found": [2], "fixed": {"found": [1]}},
            "plain": {"found": [None], "ran": 7},
        },
    )  # fmt: skip
    assert not verdict.is_found
    cells = format_verdicts([verdict]).splitlines()[-1].split("  ")
    cells = [cell.strip() for cell in cells if cell.strip()]
    assert cells == ["bug", "package 1.0", "1/2", "3", "no", "alarm", "cannot run",
                     "fails on fixed too", "none in 7"]  # fmt: skip


def test_a_python_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    environments = Environments("any", folder=tmp_path)
    assert environments.python_of("3.2.99") is None
    assert Environments("any", "false").python_of("3.2.99") is None
    assert Environments("any", shutil.which("false")).python_of("3.2.99") is None
    bug = Bug("name", "cpython", "3.2.99", "3.3.99", "python/cpython#1", "asyncio/locks.py:wait")
    assert environments.make(bug.package, bug.buggy, bug.needs) is None
    assert list(tmp_path.iterdir()) == []
