"""The input benchmark as a command: a table, a row for everything, nothing grown, nothing wrong."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks._input_checks import Growth, count_wrong_resumes, measure_growth
from tests.conftest import mirrored

ROOT = Path(__file__).resolve().parents[2]

EXPECTED = [
    ("batch above slices", "slices"),
    ("shuffled, above slices", "slices"),
    ("10 ms source, 10 ms step", "buffer size 0"),
]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a quick run on asyncio prints, and what it writes."""
    output = tmp_path_factory.mktemp("benchmarks") / "result.json"
    options = ["--quick", "--loops", "asyncio", "--output", str(output)]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "input", *options],
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

    assert (written["benchmark"], written["is_quick"]) == ("input", True)
    assert [(row["name"], row["against"]) for row in written["rows"]] == EXPECTED
    assert {(row["loop"], row["num_replicas"]) for row in written["rows"]} == {("asyncio", 4)}


@pytest.mark.xslow
def test_every_row_holds_measurements_and_a_target(quick: tuple[str, dict[str, Any]]) -> None:
    _, written = quick

    for row in written["rows"]:
        numbers = [row[name] for name in ("ours", "floor", "lowest", "ratio", "highest")]
        assert all(math.isfinite(number) and number > 0 for number in numbers), row
        assert row["num_rounds"] == 3, row
        assert isinstance(row["is_met"], bool) == (row["target"] is not None)
    targets = [row["target"] for row in written["rows"]]
    assert targets == [
        {"of": "ours", "limit": 60.0},
        None,
        {"of": "ratio", "limit": 1 / 1.9},
    ]


@pytest.mark.xslow
def test_nothing_grows_and_nothing_is_wrong(quick: tuple[str, dict[str, Any]]) -> None:
    printed, written = quick

    assert (written["num_wrong"], written["num_grown"]) == (0, 0)
    assert written["num_stops"] == 6
    assert "asyncio: stopped behind each of 6 places, other sequences = 0" in printed


@pytest.mark.asyncio
async def test_the_checks_do_what_they_were_asked_to() -> None:
    async with mirrored(2) as strategy:
        assert await count_wrong_resumes(strategy, batch_size=250) == (5, 0)
        assert (await measure_growth(strategy, num_epochs=5)).num_epochs == 5


@pytest.mark.parametrize(
    ("growth", "is_flat"),
    [
        (Growth(9, 0, 0, 0, 100), True),
        (Growth(9, 0, -1, 0, -100), True),
        (Growth(9, 1, 0, 0, 0), False),
        (Growth(9, 0, 1, 0, 0), False),
        (Growth(9, 0, 0, 1, 0), False),
        (Growth(9, 0, 0, 0, 90_000), False),
    ],
)
def test_growth_is_known(growth: Growth, is_flat: bool) -> None:
    assert growth.is_flat is is_flat
