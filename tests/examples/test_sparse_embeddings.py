"""The example of sparse gradients: they are those of the dense function, and training is exact."""

import asyncio

import numpy as np
import pytest

from examples.sparse_embeddings import Result, main, sparse_gradients, train


def test_the_rows_are_the_gradient() -> None:
    rng = np.random.default_rng(0)
    inputs, outputs = rng.normal(size=(2, 5, 3))
    contexts, candidates = np.array([[0, 1], [1, 1]]), np.array([[2, 0], [4, 2]])

    _, of_inputs, of_outputs = sparse_gradients(inputs, outputs, contexts, candidates)

    for array, slices in ((inputs, of_inputs), (outputs, of_outputs)):
        dense = slices.to_dense()
        for index in np.ndindex(array.shape):
            sides = []
            for step in (1e-6, -1e-6):
                array[index] += step
                sides.append(sparse_gradients(inputs, outputs, contexts, candidates)[0])
                array[index] -= step
            assert dense[index] == pytest.approx((sides[0] - sides[1]) / 2e-6, abs=1e-7)


@pytest.mark.xslow
def test_training_is_reproducible_and_learns() -> None:
    def run() -> Result:
        return asyncio.run(train(replicas=3, epochs=2))

    first, second = run(), run()

    assert first.losses == second.losses
    assert first.losses[1] < first.losses[0]
    np.testing.assert_array_equal(first.embeddings, second.embeddings)
    assert first.rows_per_step < len(first.vocabulary)
    assert len(first.nearest("return")) == 4


@pytest.mark.slow
def test_it_prints_what_it_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioreplica.set_logical_devices", lambda *_: None)

    assert main(["--replicas", "2", "--epochs", "1"]) == 0

    out = capsys.readouterr().out
    assert "epoch 1: loss" in out
    assert "rows sent per step:" in out
    assert "near 'return':" in out
