"""The training benchmark as a command, and the programs that it compares."""

import json
import math
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import _mlp
from benchmarks._bare_threads import BareThreads
from benchmarks._training import Speed

ROOT = Path(__file__).resolve().parents[2]
ONE = "NumPy, 1 BLAS thread"
ADAPTED = [name for name in ("optax", "torch") if find_spec(name) is not None]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What a quick run on asyncio prints, and what it writes."""
    output = tmp_path_factory.mktemp("benchmarks") / "result.json"
    options = ["--quick", "--loops", "asyncio", "--output", str(output)]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", "train", *options],
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
    threads = f"NumPy, {written['num_blas_threads']} BLAS threads"
    expected = [
        (f"from_{name}, AdamW{size}", f"{name} alone", 1)
        for name in ADAPTED
        for size in ("", ", small")
    ]
    if "torch" in ADAPTED:
        loops = ("transformer, prepare", "transformer, torch_module")
        expected += [(name, "plain torch", 1) for name in loops]
    for size in (1, 2):
        for name in ("SGD", "Adam"):
            for batch in (32, 256):
                title, looped = f"{name}, batch {batch}", f"{name}, batch {batch}, run_steps"
                expected += [(title, ONE, size), (title, threads, size)]
                expected += [(title, "bare threads", size)] * (size > 1)
                expected += [(looped, ONE, size)]
                expected += [
                    (looped, "bare threads", size),
                    (f"{title}, bare threads", ONE, size),
                ] * (size > 1)
            expected += [
                (f"{name}, batch 256", "bare array updates", size),
                (f"{name}, apply_gradients alone", "bare array updates", size),
            ]

    assert (written["benchmark"], written["is_quick"]) == ("train", True)
    found = [(row["name"], row["against"], row["num_replicas"]) for row in written["rows"]]
    assert found == expected


@pytest.mark.xslow
def test_rows_hold_measurements_and_what_was_promised(quick: tuple[str, dict[str, Any]]) -> None:
    printed, written = quick

    for row in written["rows"]:
        numbers = [row[name] for name in ("ours", "floor", "lowest", "ratio", "highest")]
        assert all(math.isfinite(number) and number > 0 for number in numbers), row
    promised = {
        (row["against"], row["target"]["limit"], row["num_replicas"])
        for row in written["rows"]
        if row["target"]
    }
    assert promised == {
        (ONE, 1 / 1.4, 2),
        ("bare array updates", 1.15, 1),
        ("bare array updates", 1.15, 2),
        *((f"{name} alone", 1.5, 1) for name in ADAPTED),
        *(("plain torch", limit, 1) for limit in (1.05, 1.2) if "torch" in ADAPTED),
    }
    assert printed.count("steps/s; sequential") == 8


@pytest.mark.slow
def test_gradients_by_hand_are_those_of_the_loss() -> None:
    parameters = [array.astype(np.float64) for array in _mlp.initial_parameters()]
    images, labels = _mlp.made_up_batch(5)

    def loss() -> float:
        w1, b1, w2, b2, w3, b3 = parameters
        hidden = np.maximum(np.maximum(images @ w1 + b1, 0) @ w2 + b2, 0)
        scores = hidden @ w3 + b3
        return float(np.sum(np.log(np.exp(scores).sum(axis=1)) - scores[range(5), labels]))

    float32 = [array.astype(np.float32) for array in parameters]
    found = _mlp.Backprop(5)(float32, images, labels)

    for array, gradient in zip(parameters, found, strict=True):
        assert gradient.shape == array.shape
        where = np.unravel_index(int(np.abs(gradient).argmax()), array.shape)
        before, step = array[where], 1e-5
        array[where] = before + step
        above = loss()
        array[where] = before - step
        slope = (above - loss()) / (2 * step)
        array[where] = before
        assert slope == pytest.approx(gradient[where], rel=1e-4)


def test_a_line_tells_both_speeds() -> None:
    text = str(Speed("SGD, batch 256", 2, 280.0, 200.0, 140.0, 2))

    assert text == (
        "SGD, batch 256, 2 replicas: 280 steps/s; sequential 200 with 1 BLAS thread (1.40x), "
        "140 with 2 (2.00x)"
    )


@pytest.mark.slow
def test_bare_threads_train_as_the_sequential_program_does() -> None:
    threads = BareThreads("SGD", 2, 8)
    sequential = _mlp.SequentialSGD(_mlp.initial_parameters())
    backprop = _mlp.Backprop(8)

    threads.run(3)
    for _ in range(3):
        sequential.apply(backprop(sequential.parameters, *_mlp.made_up_batch(8)), 8)

    for ours, theirs in zip(threads.parameters, sequential.parameters, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
