"""The example of accumulation: windows of small batches are large batches."""

import asyncio

import numpy as np
import pytest

from examples.accumulation import main, train


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
def test_windows_of_small_batches_are_large_ones(replicas: int) -> None:
    large, small = (
        asyncio.run(train(replicas=replicas, epochs=2, window=window)) for window in (1, 4)
    )

    np.testing.assert_allclose(small.weights, large.weights, rtol=1e-9, atol=1e-12)
    assert small.updates == large.updates == 2 * 15
    assert large.losses[1] < large.losses[0]


@pytest.mark.slow
def test_it_says_how_far_apart_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioreplica.set_logical_devices", lambda *_: None)

    assert main(["--replicas", "2", "--epochs", "1"]) == 0

    out = capsys.readouterr().out
    assert "4 x 32, epoch 1: loss" in out
    assert float(out.split("weight: ")[1]) < 1e-9
