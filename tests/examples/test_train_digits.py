"""The digits example: reproducible, independent of the number of replicas, and good enough."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.train_digits import Result, main, plot_losses, train
from tests.telemetry.timelines import read_chrome

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_digits.py"


def quick(**options: Any) -> Result:
    """Two epochs of three steps whose last batch is uneven."""
    return asyncio.run(train(**{"epochs": 2, "batch_size": 599, **options}))


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(SCRIPT), "--no-progress", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )


def test_two_runs_with_one_seed_are_bitwise_equal() -> None:
    first, second = quick(), quick()

    assert first.fingerprint == second.fingerprint
    assert first.losses == second.losses
    assert first.fingerprint != quick(seed=1).fingerprint


def test_one_and_four_replicas_agree() -> None:
    one, four = quick(replicas=1), quick(replicas=4)

    assert one.losses == pytest.approx(four.losses, rel=1e-9)
    assert one.test_accuracy == four.test_accuracy
    assert one.parameters.keys() == four.parameters.keys()
    for name, value in one.parameters.items():
        assert value.dtype == np.float64
        np.testing.assert_allclose(value, four.parameters[name], rtol=1e-9, atol=1e-15)


def test_progress_is_reported_after_every_step() -> None:
    seen: list[tuple[int, int, float]] = []

    result = quick(report=lambda *status: seen.append(status))

    assert seen == [(number, 6, loss) for number, loss in enumerate(result.losses, 1)]
    assert result.losses[-1] < result.losses[0]
    assert result.test_accuracy > 0.3


def test_the_loss_curve_is_a_png(tmp_path: Path) -> None:
    plot_losses([2.0, 1.0, 0.5], tmp_path / "curve.png")

    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--replicas", "--epochs", "--batch-size"])
def test_counts_must_be_positive(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([option, "0"])

    assert caught.value.code == 2
    assert f"argument {option}: must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.xslow
def test_the_program_reaches_97_percent(tmp_path: Path) -> None:
    curve = tmp_path / "curve.png"

    output, errors = start("--output", str(curve)).communicate(timeout=60)

    assert errors == ""
    *_, last = output.splitlines()
    assert last.startswith("test accuracy: ")
    assert float(last.split()[-1].rstrip("%")) >= 97.0
    assert curve.exists()


@pytest.mark.xslow
def test_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    with start("--epochs", "10000", "--output", str(tmp_path / "curve.png")) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)

    assert first.startswith("step 100/")
    assert process.returncode == 130
    assert errors == ""
    assert output.splitlines()[-1].startswith("Interrupted")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_trace_shows_every_replica_and_device(tmp_path: Path) -> None:
    quick(epochs=1, replicas=3, trace=tmp_path / "digits.json")

    read = read_chrome(tmp_path / "digits.json")
    devices = [f"cpu:{i}" for i in range(3)]
    replicas = [f"replica {i} ({device})" for i, device in enumerate(devices)]
    assert [track for track in read.tracks if " +" not in track][:4] == ["steps", *replicas]
    assert set(devices) <= set(read.tracks)
    steps = [each for each in read.slices if each[2] == "step"]
    assert sorted(each[0] for each in steps) == sorted(replicas * 4)  # 3 of training, 1 of test
    meets: dict[int, set[str]] = {}
    for track, _, category, _, _, flows in read.slices:
        if category == "collective":
            for flow in flows:
                meets.setdefault(flow, set()).add(track)
    assert len(meets) == 3
    assert all(tracks == set(replicas) for tracks in meets.values())
    made = {flow for each in read.slices if each[2] == "await" for flow in each[5]}
    run = {flow for each in read.slices if each[2] == "op" for flow in each[5]}
    assert made == run != set()
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".part"]
