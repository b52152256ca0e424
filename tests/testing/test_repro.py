"""Scripts of a failure: on plain asyncio, and under the kit."""

import asyncio
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aioreplica.testing as art
from aioreplica.testing import _repro
from tests.testing.programs import step

ROOT = Path(__file__).resolve().parents[2]


async def raises_at_once() -> None:
    """Fail in every order."""
    await step()
    raise KeyError("missing")


async def hangs() -> None:
    """Wait for what never comes."""
    await asyncio.Event().wait()


async def leaves_a_task() -> None:
    """End before a task of its own."""
    kept.append(asyncio.create_task(asyncio.Event().wait()))
    await step()


async def overlapping_calls() -> None:
    """Lose an update, where a call in a pool takes longer than another."""
    count = 0

    async def add(calls: int) -> None:
        nonlocal count
        for _ in range(calls):
            await asyncio.to_thread(int)
        seen = count
        await asyncio.to_thread(int)
        count = seen + 1

    await asyncio.gather(add(0), add(2))
    assert count == 2


async def overlapping_awaits() -> None:
    """Lose an update, but only where a task is held although it is ready."""
    count = 0

    async def add(steps: int) -> None:
        nonlocal count
        await step(steps)
        seen = count
        await step()
        count = seen + 1

    await asyncio.gather(add(0), add(4))
    assert count == 2


class Service:
    """Holder of a program, for its dotted name."""

    @staticmethod
    async def serve() -> None:
        """Fail in every order."""
        raise KeyError("missing")


kept: list[Any] = []


def run_script(path: Path) -> tuple[int, str]:
    """Run a script in a process of its own, as a user does."""
    ran = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False, cwd=path.parent,
        env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return ran.returncode, ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "end"),
    [
        (raises_at_once, "KeyError"),
        (Service.serve, "KeyError"),
        (hangs, "hangs"),
        (leaves_a_task, "leaks"),
    ],
)
def test_the_plain_script_says_how_often_it_fails(
    program: Callable[[], Any], end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_repro, "RUNS", 3)
    monkeypatch.setattr(_repro, "HANGS_S", 0.01)

    plain, replay = art.explore(program, schedules=5).save_repro(tmp_path / "repro.py")

    assert (plain, replay) == (tmp_path / "repro.py", tmp_path / "repro_replay.py")
    code, output = run_script(plain)
    assert output == f"{end} in 3 of 3 runs; others: none\nThe first was run 0.\n"
    assert code == 1


def test_the_plain_script_needs_no_kit(tmp_path: Path) -> None:
    plain, _ = art.explore(overlapping_calls).save_repro(tmp_path / "repro.py")

    text = plain.read_text(encoding="utf-8")
    assert "import aioreplica" not in text
    assert "RUNS = 1000\n" in text
    assert text.startswith('"""Fails on plain asyncio with: AssertionError')
    names = runpy.run_path(str(plain))
    assert names["run_once"](0) in ("", "AssertionError")


@pytest.mark.slow
@pytest.mark.parametrize("program", [overlapping_calls, overlapping_awaits])
def test_the_other_script_replays_the_token(program: Callable[[], Any], tmp_path: Path) -> None:
    report = art.explore(program)

    *plain, replay = report.save_repro(tmp_path / "repro.py")

    assert bool(plain) is bool(report.confirmed)
    code, output = run_script(replay)
    assert code == 1
    assert "AssertionError" in output
    assert f"in {program.__name__}" in output


def test_where_the_kit_has_a_part_there_is_no_plain_script(tmp_path: Path) -> None:
    faults = art.Faults().fail_op("default pool")
    report = art.explore(overlapping_calls, faults=faults, schedules=50)
    assert report.confirmed

    assert [path.name for path in report.save_repro(tmp_path / "a.py")] == ["a_replay.py"]


def test_the_leaks_of_the_exploration_are_those_of_the_script(tmp_path: Path) -> None:
    report = art.explore(overlapping_awaits, leaks=[hangs, "pool-*"])

    [replay] = report.save_repro(tmp_path / "repro.py")

    assert ", leaks=['hangs', 'pool-*'])" in replay.read_text(encoding="utf-8")


def test_a_program_that_no_script_can_import_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        await raises_at_once()

    report = art.explore(main)

    with pytest.raises(ValueError, match=r"main.* cannot be imported by a script.*--ar-replay"):
        report.save_repro(tmp_path / "repro.py")
    assert list(tmp_path.iterdir()) == []


def test_without_a_failure_nothing_is_written(tmp_path: Path) -> None:
    report = art.explore(step, schedules=3)

    with pytest.raises(ValueError, match="no schedule that was run fails"):
        report.save_repro(tmp_path / "repro.py")
