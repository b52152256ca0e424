"""The benchmark of compiled steps as a command: a row for everything, with weights that agree."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.xslow
def test_it_compares_with_programs_by_hand(tmp_path: Path) -> None:
    output = tmp_path / "result.json"

    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "compiled", "--quick", "--loops", "asyncio",
         "--output", str(output)],
        cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip

    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert {row["against"] for row in rows} == {
        "lax.scan by hand", "jit, a call per step", "without readers",
        "a task that sleeps as often",
    }  # fmt: skip
    assert {row["num_replicas"] for row in rows} == {1, 2}
    assert {row["name"] for row in rows if row["against"] == "lax.scan by hand"} == {
        "MLP, batch 32, SGD", "small model, SGD",
    }  # fmt: skip
    assert all(row["ours"] > 0 and math.isfinite(row["ratio"]) for row in rows)
