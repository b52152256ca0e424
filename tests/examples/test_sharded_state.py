"""The example of divided state: each worker keeps its part, and the bits are the same."""

import asyncio
from unittest import mock

import pytest

import aioreplica as ar
from examples import sharded_state
from tests.strategies.workers import strategies


@pytest.mark.asyncio
async def test_two_workers_keep_half_each(capsys: pytest.CaptureFixture[str]) -> None:
    made = strategies(2, 1)
    with mock.patch.object(ar, "MultiWorkerMirroredStrategy", side_effect=made):
        found = await asyncio.gather(*[sharded_state.main(300, 2, 3) for _ in made])

    assert [are_equal for are_equal, _ in found] == [True, True]
    out = capsys.readouterr().out
    assert out.count("divided among 2 workers") == 2
    assert out.count("the same bits: True") == 1
