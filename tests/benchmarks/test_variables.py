"""The variables benchmark as a command: a table, a row for everything, no torn snapshot."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks._torn import _is_torn, count_torn
from tests.conftest import mirrored

ROOT = Path(__file__).resolve().parents[2]

EXPECTED = [
    ("assign_add 4 MiB", "np.add(a, x, out=b)"),
    ("new bytes, 20 x", "a = a + x"),
    ("value", "attribute"),
    ("value in replica", "attribute"),
    ("snapshot of 1000", "dict of attributes"),
]
TARGETS = {
    "assign_add 4 MiB": {"of": "ratio", "limit": 1.2},
    "new bytes, 20 x": {"of": "ours", "limit": 2**20},
    "snapshot of 1000": {"of": "ours", "limit": 1000.0},
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a quick run on asyncio prints, and what it writes."""
    output = tmp_path_factory.mktemp("benchmarks") / "result.json"
    options = ["--quick", "--loops", "asyncio", "--output", str(output)]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "variables", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, json.loads(output.read_text(encoding="utf-8"))


@pytest.mark.xslow
def test_every_row_is_written(quick: tuple[str, dict[str, Any]]) -> None:
    _, written = quick

    assert written["benchmark"] == "variables"
    assert written["is_quick"] is True
    assert [(row["name"], row["against"]) for row in written["rows"]] == EXPECTED
    assert {(row["loop"], row["num_replicas"]) for row in written["rows"]} == {("asyncio", 4)}


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
    targets = {row["name"]: row["target"] for row in written["rows"] if row["target"] is not None}

    assert targets == TARGETS
    for row in written["rows"]:
        assert isinstance(row["is_met"], bool) == (row["name"] in TARGETS)


@pytest.mark.xslow
def test_no_snapshot_is_torn(quick: tuple[str, dict[str, Any]]) -> None:
    printed, written = quick

    assert written["num_torn"] == 0
    assert written["num_snapshots"] >= 50
    assert any(line.endswith("torn = 0") for line in printed.splitlines())


@pytest.mark.xslow
def test_the_table_has_one_line_for_each_row(quick: tuple[str, dict[str, Any]]) -> None:
    printed, written = quick
    lines = printed.splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("---"))
    body = lines[rule + 1 : rule + 1 + len(EXPECTED)]

    assert [line.split("  ")[0] for line in body] == [row["name"] for row in written["rows"]]
    assert lines[rule + 1 + len(EXPECTED)].endswith(f"of {len(TARGETS)} targets met.")


@pytest.mark.asyncio
async def test_the_check_does_what_it_was_asked_to() -> None:
    async with mirrored(2) as strategy:
        count = await count_torn(strategy, num_snapshots=20, num_steps=10)

    assert count.num_snapshots >= 20
    assert count.num_steps >= 10
    assert count.num_torn == 0


@pytest.mark.parametrize("torn", ["a", "b", "p", "q", "inside"])
def test_the_check_knows_a_torn_snapshot(torn: str) -> None:
    numbers = {"a": 1.0, "b": 2.0, "p": 3.0, "q": 3.0}
    arrays = {name: np.full(2, number) for name, number in numbers.items()}
    assert not _is_torn(**arrays)

    if torn == "inside":
        arrays["a"][1] = 9.0
    else:
        arrays[torn][:] += 1.0

    assert _is_torn(**arrays)
