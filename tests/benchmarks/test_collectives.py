"""The collectives benchmark as a command: a table, a row for everything, no result that differs."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks._arrival_orders import PACK_SIZES, count_different, make_trees, plain_sums
from benchmarks._blocked_sum import BLOCK_BYTES, replica_arrays, sum_blocks
from benchmarks._inline import Crossing, _threshold, find_crossing
from tests.conftest import mirrored

ROOT = Path(__file__).resolve().parents[2]

FLOOR = "blocked np.add"
EXPECTED = [
    *[(f"all_reduce {mib} MiB", FLOOR, size) for size in (2, 4) for mib in (1, 16)],
    ("all_reduce 1 KiB", FLOOR, 4),
    ("all_reduce 64 KiB", FLOOR, 4),
    ("list of 200 x 4 KiB", "one 800 KiB array", 4),
    ("dict of 200 x 4 KiB", "one 800 KiB array", 4),
    ("start + await 1 KiB", "all_reduce", 4),
    ("overlap, waiting ops", "one by one", 4),
    ("overlap, computing ops", "one by one", 4),
    ("loop lag, 64 MiB", "bare threads", 4),
    *[
        (f"inline, reads {size}", against, 4)
        for against in ("one thread", "all threads")
        for size in ("256 KiB", "2 MiB", "16 MiB")
    ],
    ("different bits", "results compared", 8),
]
TARGETS = {
    "all_reduce 1 MiB": {"of": "ratio", "limit": 1.3},
    "all_reduce 16 MiB": {"of": "ratio", "limit": 1.3},
    "all_reduce 1 KiB": {"of": "difference", "limit": 30.0},
    "all_reduce 64 KiB": {"of": "difference", "limit": 30.0},
    "list of 200 x 4 KiB": {"of": "ratio", "limit": 2.0},
    "dict of 200 x 4 KiB": {"of": "ratio", "limit": 2.0},
    "loop lag, 64 MiB": {"of": "ours", "limit": 10.0},
    "different bits": {"of": "ours", "limit": 0.0},
}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a quick run on asyncio prints, and what it writes."""
    output = tmp_path_factory.mktemp("benchmarks") / "result.json"
    options = ["--quick", "--loops", "asyncio", "--output", str(output)]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "collectives", *options],
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

    assert written["benchmark"] == "collectives"
    assert written["is_quick"] is True
    rows = [(row["name"], row["against"], row["num_replicas"]) for row in written["rows"]]
    assert rows == EXPECTED
    assert {row["loop"] for row in written["rows"]} == {"asyncio"}


@pytest.mark.xslow
def test_every_row_holds_measurements(quick: tuple[str, dict[str, Any]]) -> None:
    _, written = quick

    for row in written["rows"][:-1]:  # the last one counts what should be 0
        numbers = [row[name] for name in ("ours", "floor", "lowest", "ratio", "highest")]
        assert all(math.isfinite(number) and number > 0 for number in numbers), row
        assert row["lowest"] <= row["ratio"] <= row["highest"], row
        assert math.isfinite(row["difference"]), row


@pytest.mark.xslow
def test_promises_carry_a_target_and_its_mark(quick: tuple[str, dict[str, Any]]) -> None:
    _, written = quick
    targets = {row["name"]: row["target"] for row in written["rows"] if row["target"] is not None}

    assert targets == TARGETS
    for row in written["rows"]:
        assert isinstance(row["is_met"], bool) == (row["name"] in TARGETS)


@pytest.mark.xslow
def test_no_result_differs(quick: tuple[str, dict[str, Any]]) -> None:
    _, written = quick

    assert written["num_different"] == 0
    assert written["num_results"] == 8 * 10 * len(PACK_SIZES) * 2
    assert written["rows"][-1]["ours"] == 0


@pytest.mark.xslow
def test_the_table_has_one_line_for_each_row(quick: tuple[str, dict[str, Any]]) -> None:
    printed, written = quick
    lines = printed.splitlines()
    rule = next(i for i, line in enumerate(lines) if line.startswith("---"))
    body = lines[rule + 1 : rule + 1 + len(EXPECTED)]
    num_targets = sum(row["target"] is not None for row in written["rows"])

    assert [line.split("  ")[0] for line in body] == [row["name"] for row in written["rows"]]
    assert lines[rule + 1 + len(EXPECTED)].endswith(f"of {num_targets} targets met.")
    assert any(line.startswith("asyncio: off the loop is faster in") for line in lines)


@pytest.mark.parametrize("size", [1, BLOCK_BYTES // 4, BLOCK_BYTES // 4 * 2 + 3])
def test_the_floor_sums_left_to_right(size: int) -> None:
    arrays = replica_arrays(4, 4 * size)
    whole, parts = np.zeros_like(arrays[0]), np.zeros_like(arrays[0])

    sum_blocks(arrays, whole)
    sum_blocks(arrays, parts, 0, size // 3)
    sum_blocks(arrays, parts, size // 3, size)

    expected = ((arrays[0] + arrays[1]) + arrays[2]) + arrays[3]
    assert whole.tobytes() == parts.tobytes() == expected.tobytes()


@pytest.mark.asyncio
async def test_the_check_counts_every_result() -> None:
    trees = make_trees(3)
    async with mirrored(3) as strategy:
        count = await count_different(strategy, trees, plain_sums(trees), num_orders=2)

    assert count.num_results == 3 * 2 * len(PACK_SIZES)
    assert count.num_different == 0


@pytest.mark.asyncio
async def test_the_check_knows_a_sum_in_another_order() -> None:
    trees = make_trees(3)
    async with mirrored(3) as strategy:
        count = await count_different(strategy, trees, plain_sums(trees[::-1]), num_orders=1)

    assert count.num_different == count.num_results == 3 * len(PACK_SIZES)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([0.5, 0.5, 1.5], 8.0),
        ([0.5, 1.0, 1.5], 4.0),
        ([1.1, 0.5, 1.5], 8.0),
        ([1.1, 1.2, 1.3], 0.0),
        ([0.5, 1.2, 0.9], math.inf),
    ],
)
def test_the_crossing_is_where_the_ratio_passes_1_for_the_last_time(
    ratios: list[float], expected: float
) -> None:
    assert find_crossing([1, 4, 16], ratios) == pytest.approx(expected)


def test_a_crossing_says_when_threads_never_are_faster() -> None:
    assert str(Crossing("one thread", math.inf)) == "one thread: never"
    assert str(Crossing("all threads", 3 * 2**19)) == "all threads: from 1.5 MiB on"


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_the_threshold_is_moved_to_where_that_many_threads_are_used(num_threads: int) -> None:
    threshold = _threshold(2**20, num_threads)

    assert threshold < 2**20
    assert 2**20 // threshold == num_threads
