"""How long an epoch on spot machines is waited for: as long as there is progress."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import _parameter_spot as spot


@pytest.mark.asyncio
async def test_work_is_waited_for_while_it_advances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot, "LIMIT_S", 0.0)
    numbers, end, was_cancelled = iter(range(10)), asyncio.Event(), False

    async def work() -> None:
        nonlocal was_cancelled
        try:
            await end.wait()
        except asyncio.CancelledError:
            was_cancelled = True
            raise

    def progress() -> int:
        number = next(numbers)
        if number == 7:
            end.set()
        return number

    await spot.while_it_advances(work(), progress)
    end.clear()
    with pytest.raises(TimeoutError, match="Progress has stood at 17 for 0 s"):
        await spot.while_it_advances(work(), lambda: 17)
    assert was_cancelled


@pytest.mark.asyncio
async def test_an_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await spot.while_it_advances(work(), int)
