"""The device loop benchmark as a command: a table, a row for everything, no bit that differs."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import _mlp_ops as mlp
from benchmarks._device_steps import count_different_bits
from tests.conftest import mirrored

ROOT = Path(__file__).resolve().parents[2]

EXPECTED = [
    ("MLP step", "run, awaited ops"),
    ("blocking 1 KiB", "threading.Barrier"),
    ("loop lag, MLP", "bare threads"),
]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a quick run on asyncio prints, and what it writes."""
    output = tmp_path_factory.mktemp("benchmarks") / "result.json"
    options = ["--quick", "--loops", "asyncio", "--output", str(output)]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "device_loop", *options],
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

    assert (written["benchmark"], written["is_quick"]) == ("device_loop", True)
    assert [(row["name"], row["against"]) for row in written["rows"]] == EXPECTED
    assert {(row["loop"], row["num_replicas"]) for row in written["rows"]} == {("asyncio", 4)}


@pytest.mark.xslow
def test_every_row_holds_measurements_and_a_target(quick: tuple[str, dict[str, Any]]) -> None:
    _, written = quick

    for row in written["rows"]:
        numbers = [row[name] for name in ("ours", "floor", "lowest", "ratio", "highest")]
        assert all(math.isfinite(number) and number > 0 for number in numbers), row
        assert row["num_rounds"] == 3, row
        assert isinstance(row["is_met"], bool)
    targets = [row["target"] for row in written["rows"]]
    assert targets == [
        {"of": "ratio", "limit": 1 / 3},
        {"of": "ratio", "limit": 1.0},
        {"of": "ours", "limit": 10.0},
    ]


@pytest.mark.xslow
def test_no_bit_differs(quick: tuple[str, dict[str, Any]]) -> None:
    printed, written = quick

    assert (written["num_compared"], written["num_different"]) == (3, 0)
    assert "asyncio: hops of 3 sizes, different weights = 0" in printed


@pytest.mark.slow
@pytest.mark.asyncio
async def test_the_check_trains_and_compares() -> None:
    async with mirrored(2) as strategy:
        assert await count_different_bits(strategy) == (3, 0)


def test_the_network_learns() -> None:
    params = mlp.new_params()
    images, labels = (part[0] for part in mlp.new_batches(1, 1)[0])

    def loss() -> float:
        logits = mlp.output_layer(params, mlp.hidden_layer(params, images)).astype(np.float64)
        norms = np.log(np.exp(logits).sum(axis=1))
        return float((norms - (logits * labels).sum(axis=1)).mean())

    before = loss()
    for _ in range(50):
        mlp.descend(params, mlp.gradients_of(params, images, labels))

    assert loss() < 0.8 * before
