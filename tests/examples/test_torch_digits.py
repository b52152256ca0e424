"""The example of torch: it learns, repeats itself bit by bit, and says how good it is."""

import asyncio
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.xslow


@pytest.fixture
def example() -> Any:
    pytest.importorskip("torch")
    from examples import torch_digits

    return torch_digits


def arrays(result: Any) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in result.module.state_dict().values()]


def test_two_runs_are_bitwise_equal_and_leave_the_values_in_the_module(example: Any) -> None:
    first, second = (asyncio.run(example.train(replicas=2, epochs=1)) for _ in range(2))

    assert first.losses == second.losses
    for one, other in zip(arrays(first), arrays(second), strict=True):
        np.testing.assert_array_equal(one, other)
    assert first.module[1].num_batches_tracked == 23
    assert not first.module.training


def test_it_learns_and_prints_the_result(
    example: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioreplica.set_logical_devices", lambda *_: None)

    assert example.main(["--replicas", "2", "--epochs", "4"]) == 0

    out = capsys.readouterr().out
    assert "epoch 4: loss" in out
    assert float(out.split("accuracy: ")[1].rstrip("%\n")) > 85
