"""The example of compiled steps: as accurate as the eager ones, and clear without jax."""

import asyncio
import sys

import numpy as np
import pytest

pytest.importorskip("sklearn")
from examples import compiled_digits


@pytest.mark.xslow
def test_it_is_as_accurate_compiled_as_eagerly() -> None:
    pytest.importorskip("jax")

    eager, compiled = (
        asyncio.run(compiled_digits.train(replicas=2, epochs=6, compiler=compiler))
        for compiler in (None, "jax")
    )

    np.testing.assert_allclose(compiled.losses, eager.losses, rtol=1e-2)
    assert eager.accuracy > 0.9
    assert compiled.accuracy == pytest.approx(eager.accuracy, abs=0.01)


def test_without_jax_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("aioreplica.set_logical_devices", lambda *_: None)
    monkeypatch.setitem(sys.modules, "jax", None)

    assert compiled_digits.main(["--epochs", "1"]) == 1

    assert "pip install 'aioreplica[examples,jax]'" in capsys.readouterr().out
