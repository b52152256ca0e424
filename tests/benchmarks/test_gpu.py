"""The GPU benchmark without one: a dry run of the program, and the devices that are one GPU."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.devices import list_devices
from benchmarks import _gpu_place, gpu
from benchmarks._gpu_place import Place, find_place, shared_gpu
from benchmarks._gpu_training import LeftOutError
from benchmarks._row import Row, Target, compared_row

ROOT = Path(__file__).resolve().parents[2]
HOST = Place("cpu", is_quick=True)


def row() -> Row:
    return compared_row(
        "work", "asyncio", 1, "ms", ours=[2.0], against="a floor", floor=[1.0],
        target=Target("ratio", 1.5),
    )  # fmt: skip


async def measure(_place: Place) -> list[Row]:
    return [row()]


async def leave_out(_place: Place) -> list[Row]:
    raise LeftOutError("there is one GPU")


async def fail(_place: Place) -> list[Row]:
    raise LookupError("no such kernel")


async def fail_in_a_worker(_place: Place) -> list[Row]:
    raise SystemExit("workers have failed")


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (leave_out, "left out: there is one GPU"),
        (fail, "FAILED: LookupError: no such kernel"),
        (fail_in_a_worker, "FAILED: SystemExit: workers have failed"),
    ],
)
def test_a_part_that_cannot_be_measured_says_why(part: Any, told: str) -> None:
    rows: list[Row] = []

    assert gpu.run_part(part, HOST, rows) == told
    assert rows == []


def test_a_dry_run_promises_nothing() -> None:
    rows: list[Row] = []

    gpu.run_part(measure, HOST, rows)
    gpu.run_part(measure, Place("cuda", is_quick=True), rows)

    assert [each.target for each in rows] == [None, Target("ratio", 1.5)]


def test_without_a_gpu_it_says_how_to_make_a_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(SystemExit, match="--device cpu"):
        find_place("cuda", is_quick=True)


@pytest.mark.asyncio
async def test_devices_that_share_a_gpu_add_up_there(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = pytest.importorskip("torch")
    monkeypatch.setattr(_gpu_place, "GPU", "cpu")  # the host takes its place
    before = list_devices()

    async def step() -> Any:
        ctx = ar.get_replica_context()
        assert ctx is not None
        mine = await ctx.run_on_device(torch.ones, 2)
        return (await ctx.all_reduce("sum", mine)).tolist()

    with shared_gpu(3):
        assert list(map(str, list_devices("cuda"))) == ["cuda:0", "cuda:1", "cuda:2"]
        async with ar.MirroredStrategy() as strategy:  # all of the best kind
            found = strategy.local_results(await strategy.run(step))

    assert found == ([3.0, 3.0],) * 3
    assert list_devices() == before


@pytest.mark.xslow
def test_a_dry_run_measures_every_part(tmp_path: Path) -> None:
    output = tmp_path / "result.json"

    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "gpu", "--device", "cpu", "--quick",
         "--output", str(output)],
        cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=False,
    )  # fmt: skip

    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads(output.read_text(encoding="utf-8"))
    assert list(written["parts"]) == list(gpu.PARTS)
    left_out = {name for name, what in written["parts"].items() if what.startswith("left out")}
    assert left_out == {"tests"}
    names = [row["name"] for row in written["rows"]]
    assert len(names) == 12
    assert len(set(names)) == 10  # two rows each of all_reduce and of jax
    for row in written["rows"]:
        assert row["ours"] > 0
        assert math.isfinite(row["ratio"])
