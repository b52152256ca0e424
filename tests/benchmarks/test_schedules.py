"""The schedules benchmark as a command: rates, verdicts, and an error for a wrong one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _schedule_verdicts, schedules
from benchmarks._schedule_verdicts import count_alarms, find_bugs, time_cancellation
from tests.testing import programs
from tests.testing.depths import DEPTHS, TASKS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a quick run prints, and what it writes."""
    output = tmp_path_factory.mktemp("benchmarks") / "result.json"
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "schedules", "--quick", "--output", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, json.loads(output.read_text(encoding="utf-8"))


@pytest.mark.xslow
def test_rates_are_compared_with_the_stock_loop(quick: tuple[str, dict[str, Any]]) -> None:
    _, written = quick
    names = [(row["name"], row["against"]) for row in written["rows"]]

    assert names[:2] == [
        ("schedule, bare barrier", "asyncio.run"),
        ("schedule, library", "asyncio.run"),
    ]
    assert all(row["ours"] > 0 and row["floor"] > 0 for row in written["rows"])
    assert written["rows"][0]["target"] == {"of": "ours", "limit": 1e6 / 3000}


@pytest.mark.xslow
def test_every_verdict_is_right(quick: tuple[str, dict[str, Any]]) -> None:
    printed, written = quick

    assert [each["name"] for each in written["found"]] == [p.__name__ for p in programs.BUGGY]
    for name in ("num_missed", "num_called_clean", "num_alarms", "num_replays_differ"):
        assert written[name] == 0
    assert written["num_replays"] >= 20
    assert [(each["depth"], each["num_tasks"]) for each in written["depths"]] == [
        (depth, tasks) for depth in DEPTHS for tasks in TASKS
    ]
    assert "correct programs: 0 alarms in " in printed


def test_a_missed_bug_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "BUGGY", [programs.lost_update, programs.locked_counter])
    monkeypatch.setattr(_schedule_verdicts, "MAX_SCHEDULES", 40)

    lost, correct = find_bugs(num_seeds=2, limit=2000)

    assert (lost.num_found, lost.exhaustive) == (2, "found")
    assert (correct.num_found, correct.exhaustive) == (0, "complete")
    assert "0/2" in schedules.format_found([correct])


def test_an_alarm_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "CORRECT", [programs.starved_check])

    alarms, _ = count_alarms(60)

    assert alarms == 1  # at `reorder` only: asyncio's own order never starves anybody


def test_cancellation_is_timed() -> None:
    seconds, num_runs = time_cancellation()

    assert seconds > 0
    assert num_runs == 22
