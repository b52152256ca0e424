"""The core benchmark as a command: it runs, prints a table and writes every row; no timings."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

QUICK_SIZES = (1, 2, 8)
EXPECTED = [
    *[
        ("merge_call", against, size)
        for size in QUICK_SIZES
        for against in ("one-future barrier", "asyncio.Barrier")
    ],
    *[
        (name, against, size)
        for size in QUICK_SIZES
        for name, against in (("empty run", "asyncio.TaskGroup"), ("spawn", "asyncio.gather"))
    ],
    ("device hop", "run_in_executor", 1),
    ("device hop x64", "run_in_executor", 1),
    ("waiting replica", "one-future barrier", 1024),
]
PROMISED = {
    ("merge_call", "one-future barrier", 2),
    ("merge_call", "asyncio.Barrier", 2),
    ("merge_call", "one-future barrier", 8),
    ("merge_call", "asyncio.Barrier", 8),
    ("empty run", "asyncio.TaskGroup", 8),
    ("device hop", "run_in_executor", 1),
    ("device hop x64", "run_in_executor", 1),
    ("waiting replica", "one-future barrier", 1024),
}


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own: it splits the host into devices, which only works once."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a quick run on asyncio prints, and what it writes."""
    output = tmp_path_factory.mktemp("benchmarks") / "result.json"
    result = run_command("core", "--quick", "--loops", "asyncio", "--output", str(output))
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, json.loads(output.read_text(encoding="utf-8"))


def identity(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["name"], row["against"], row["num_replicas"]


@pytest.mark.xslow
def test_every_row_is_written(quick: tuple[str, dict[str, Any]]) -> None:
    _, written = quick

    assert written["benchmark"] == "core"
    assert written["is_quick"] is True
    assert [identity(row) for row in written["rows"]] == EXPECTED
    assert {row["loop"] for row in written["rows"]} == {"asyncio"}


@pytest.mark.xslow
def test_every_row_holds_measurements(quick: tuple[str, dict[str, Any]]) -> None:
    _, written = quick

    for row in written["rows"]:
        numbers = [row[name] for name in ("ours", "floor", "lowest", "ratio", "highest")]
        assert all(math.isfinite(number) and number > 0 for number in numbers), row
        assert row["lowest"] <= row["ratio"] <= row["highest"], row
        assert row["num_rounds"] == 3, row


@pytest.mark.xslow
def test_promises_carry_a_target_and_its_mark(quick: tuple[str, dict[str, Any]]) -> None:
    _, written = quick
    marked = {identity(row): row["is_met"] for row in written["rows"] if row["target"] is not None}
    unmarked = [row["is_met"] for row in written["rows"] if row["target"] is None]

    assert marked.keys() == PROMISED
    assert all(isinstance(is_met, bool) for is_met in marked.values())
    assert set(unmarked) == {None}


@pytest.mark.xslow
def test_the_table_has_one_line_for_each_row(quick: tuple[str, dict[str, Any]]) -> None:
    printed, written = quick
    lines = printed.splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("---"))
    body = lines[rule + 1 : rule + 1 + len(EXPECTED)]

    assert [line.split("  ")[0] for line in body] == [row["name"] for row in written["rows"]]
    assert lines[rule + 1 + len(EXPECTED)].endswith(f"of {len(PROMISED)} targets met.")


@pytest.mark.xslow
def test_an_unknown_loop_is_refused() -> None:
    result = run_command("core", "--loops", "asyncio,trio")

    assert result.returncode == 2
    assert "unknown event loop 'trio'; choose from asyncio, uvloop" in result.stderr
