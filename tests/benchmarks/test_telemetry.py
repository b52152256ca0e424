"""The telemetry benchmark as a command: it prints a table and writes every row; no timings."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = {
    "merge, recorder": ("ratio", 1.05),
    "merge, exporter off": ("ratio", 1.02),
    "merge, trace": ("ratio", 1.25),
    "trace memory, full 3 times": ("ratio", 1.1),
}


@pytest.mark.xslow
def test_every_row_is_written_with_its_target(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    options = ["--quick", "--loops", "asyncio", "--output", str(output)]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "telemetry", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr

    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert {row["name"]: tuple(row["target"].values()) for row in rows} == EXPECTED
    for row in rows:
        assert math.isfinite(row["ratio"])
        assert row["ours"] > 0
    [memory] = [row for row in rows if row["name"].startswith("trace memory")]
    assert memory["is_met"] is True  # counted bytes, no timing
    assert memory["ours"] < 2000
    assert "targets met." in result.stdout
