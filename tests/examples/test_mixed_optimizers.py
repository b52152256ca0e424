"""The example of two optimizers: both move, and the result does not depend on the replicas."""

import asyncio

import pytest

from examples.mixed_optimizers import main, train


@pytest.mark.slow
def test_one_and_four_replicas_agree() -> None:
    one, four = (asyncio.run(train(replicas=count, epochs=1)) for count in (1, 4))

    assert one.losses == pytest.approx(four.losses, rel=1e-9)
    assert one.accuracy == four.accuracy
    assert one.updates == four.updates == (29, 29)


@pytest.mark.slow
def test_it_learns_and_prints_the_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioreplica.set_logical_devices", lambda *_: None)

    assert main(["--replicas", "2", "--epochs", "3"]) == 0

    out = capsys.readouterr().out
    assert "epoch 3: loss 0." in out
    assert float(out.split("training images: ")[1].split("%")[0]) > 90
