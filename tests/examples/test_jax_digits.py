"""The example of jax: it learns, repeats itself bit by bit, and says how good it is."""

import asyncio

import numpy as np
import pytest

LIBRARY = pytest.importorskip("jax")

from examples.jax_digits import Result, main, train  # noqa: E402  # where jax is installed

pytestmark = pytest.mark.xslow


def arrays(result: Result) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in LIBRARY.tree.leaves((result.params, result.state))]


def test_two_runs_are_bitwise_equal_and_the_state_follows_the_images() -> None:
    first, second = (asyncio.run(train(replicas=2, epochs=1)) for _ in range(2))

    assert first.losses == second.losses
    for one, other in zip(arrays(first), arrays(second), strict=True):
        np.testing.assert_array_equal(one, other)
    assert 0.2 < float(np.mean(first.state["mean"])) < 0.4


def test_it_learns_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioreplica.set_logical_devices", lambda *_: None)

    assert main(["--replicas", "2", "--epochs", "4"]) == 0

    out = capsys.readouterr().out
    assert "epoch 4: loss" in out
    assert float(out.split("accuracy: ")[1].rstrip("%\n")) > 85
