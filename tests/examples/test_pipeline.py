"""The example of a pipeline: it learns, and keeps the pace of theory in virtual time."""

import asyncio
from typing import Any

import pytest

import aioreplica as ar
import aioreplica.testing as art
from examples import pipeline


@pytest.mark.xslow
def test_it_learns_and_prints_the_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioreplica.set_logical_devices", lambda *_: None)

    assert pipeline.main(["--steps", "20", "--seconds", "0.001"]) == 0

    out = capsys.readouterr().out
    assert float(out.split("first, ")[1].split()[0]) < 0.3
    assert "of what theory says" in out


def test_a_step_takes_what_theory_says(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> Any:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(pipeline.time, "perf_counter", loop.time)
        async with ar.MirroredStrategy([f"cpu:{i}" for i in range(4)]) as strategy:
            return await pipeline.measure(strategy, 1.0)

    assert 0.9 <= art.run(main) <= 1.05
