"""The benchmark of checkpoints: signals, a service on a full disk, steps beside saves."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from benchmarks import _full_service
from benchmarks._checkpoint_program import build, train_and_stop
from benchmarks._checkpoint_stops import Stops, differences
from benchmarks._full_service import FullService, train_beside_full_disk
from benchmarks._saving_steps import measure_steps

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.xslow
def test_signals_and_a_full_disk_are_survived(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    options = ["--quick", "--no-speed", "--no-kills", "--signals", "4", "--output", str(output)]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "checkpoint", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )

    written = json.loads(output.read_text(encoding="utf-8"))
    stops, service = written["signals"], FullService(**written["service on a full disk"])
    assert sum(stops["sent"].values()) >= 4
    assert result.returncode == 0, result.stdout + result.stderr
    assert (stops["wrong_codes"], stops["num_wrong"], stops["differences"]) == ([], 0, [])
    assert (service.num_rounds, service.num_jobs, service.why_not) == (2, 6, "")
    assert service.is_good


@pytest.mark.slow
def test_a_training_that_is_restored_behind_its_last_step_is_as_it_was(tmp_path: Path) -> None:
    """Nothing has made the slots of its optimizer, so its objects are not those of one that ran."""

    def train(name: str) -> None:
        training = train_and_stop(str(tmp_path / name), 3, 10, faults=None, max_to_keep=None)
        asyncio.run(training)

    train("whole")
    train("stopped")
    train("stopped")  # restores the third step, and does none

    assert differences(tmp_path / "stopped", tmp_path / "whole") == (3, [])


def test_what_differs_between_two_trainings_is_named(tmp_path: Path) -> None:
    async def save(name: str, *, number: float, history: list[float], extra: bool) -> None:
        async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            state = build(strategy, 3)
            await state["model"][1].assign(number)
            state["history"] += history
            state["rng"].random(len(history))
            if extra:
                state["extra"] = np.zeros(2)
            async with state["data"], ar.CheckpointManager(tmp_path / name) as manager:
                await manager.save(4, state)

    asyncio.run(save("whole", number=0.5, history=[0.25], extra=False))
    asyncio.run(save("equal", number=0.5, history=[0.25], extra=False))
    asyncio.run(save("other", number=0.75, history=[0.25, 0.5], extra=True))

    assert differences(tmp_path / "nothing", tmp_path / "whole") == (None, [])
    assert differences(tmp_path / "equal", tmp_path / "whole") == (4, [])
    step, found = differences(tmp_path / "other", tmp_path / "whole")
    assert step == 4
    assert [text.split()[0] for text in found] == ["extra", "history", "model/1", "rng"]
    assert found[:3] == [
        "extra is in one of them only",
        "history is [0.25, 0.5] and not [0.25]",
        "model/1 is array(0.75) and not array(0.5)",
    ]
    assert not Stops(differences=found).is_good


@pytest.mark.xslow
def test_steps_are_measured_beside_saves_beside_waits_and_without(tmp_path: Path) -> None:
    rows = asyncio.run(
        measure_steps(tmp_path, num_bytes=1 << 20, num_variables=3, num_steps=6, num_rounds=1)
    )

    assert [(row.unit, row.against) for row in rows] == [
        ("ms, p50", "waiting as long, not saving"),
        ("ms, p50", "neither waiting nor saving"),
        ("ms, p99", "not saving"),
    ]
    assert all(row.ours > 0 and row.floor > 0 for row in rows)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000007"]  # the eighth save


@pytest.mark.xslow
def test_jobs_wait_for_a_disk_where_none_can_be_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise PermissionError("not here")

    monkeypatch.setattr(_full_service, "small_disk", refuse)

    found = train_beside_full_disk(1)

    assert found == FullService(3, 3, 1, 1, 0, is_simulated=True)
    assert found.is_good
    assert "no disk could be mounted" in str(found)


def test_a_job_that_did_not_wait_or_ended_otherwise_is_told() -> None:
    assert not FullService(3, 2, 1, 1).is_good
    assert not FullService(3, 3, 0, 1).is_good
    assert not FullService(3, 3, 1, 1, 1).is_good
    assert FullService(why_not="pydantic is not installed").is_good
