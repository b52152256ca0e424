"""The example of jax: it learns, repeats itself bit by bit, and says how good it is."""

import asyncio
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.xslow


@pytest.fixture
def example() -> Any:
    pytest.importorskip("jax")
    from examples import jax_digits

    return jax_digits


def arrays(result: Any) -> list[np.ndarray]:
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves((result.params, result.state))]


def test_two_runs_are_bitwise_equal_and_the_state_follows_the_images(example: Any) -> None:
    first, second = (asyncio.run(example.train(replicas=2, epochs=1)) for _ in range(2))

    assert first.losses == second.losses
    for one, other in zip(arrays(first), arrays(second), strict=True):
        np.testing.assert_array_equal(one, other)
    assert 0.2 < float(np.mean(first.state["mean"])) < 0.4


def test_it_learns_and_prints_the_result(
    example: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioreplica.set_logical_devices", lambda *_: None)

    assert example.main(["--replicas", "2", "--epochs", "4"]) == 0

    out = capsys.readouterr().out
    assert "epoch 4: loss" in out
    assert float(out.split("accuracy: ")[1].rstrip("%\n")) > 85
