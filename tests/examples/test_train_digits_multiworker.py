"""The example of many workers: two workers in one process."""

import asyncio
import re
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

import aioreplica as ar
from examples import train_digits_multiworker as example
from tests.strategies.workers import on_workers


@pytest.mark.asyncio
async def test_two_workers_give_what_one_gives_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    lines: list[str] = []

    async def program(strategy: ar.Strategy) -> example.Result:
        return await example.train(
            strategy, epochs=epochs, checkpoints=tmp_path, report=lines.append
        )

    epochs = 1
    first = await on_workers(2, 2, program)
    epochs = 2
    async with asyncio.timeout(60):
        second = await on_workers(2, 2, program)
    lines_before = list(lines)
    async with asyncio.timeout(60):
        third = await on_workers(2, 2, program)  # all is done: the network is tested again
    assert [result.test_accuracy for result in third] == [second[0].test_accuracy] * 2
    assert lines[len(lines_before) :] == ["goes on from checkpoint 2"]
    whole = await example.train(ar.MirroredStrategy(["cpu:0", "cpu:1"]), epochs=2)

    assert first[0].fingerprint == first[1].fingerprint
    assert second[0].fingerprint == second[1].fingerprint
    assert [result.first_epoch for result in second] == [1, 1]
    assert second[0].test_accuracy == pytest.approx(whole.test_accuracy, abs=0.01)
    assert [re.sub(r"[0-9.]+%?", "N", line) for line in lines_before] == [
        "epoch N: loss N, accuracy N",  # worker 0 alone has reported
        "goes on from checkpoint N",
        "epoch N: loss N, accuracy N",
    ]
