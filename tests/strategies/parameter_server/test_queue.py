"""Which closures run, without any engine: events in, closures out."""

from __future__ import annotations

import asyncio

import pytest

from aioreplica.strategies.parameter_server._packing import Packed
from aioreplica.strategies.parameter_server._queue import ClosureQueue, ScheduledClosure


async def closures(*numbers: int) -> list[ScheduledClosure]:
    loop = asyncio.get_running_loop()
    packed = Packed(b"", ())
    return [
        ScheduledClosure(n, "fn", False, packed, {}, None, loop.create_future()) for n in numbers
    ]


@pytest.mark.asyncio
async def test_the_oldest_is_the_least_that_is_not_over() -> None:
    queue, made = ClosureQueue(8), await closures(5, 6, 7)
    for each in made:
        queue.add(each)
    assert queue.take(2) == made[:2]
    assert queue.take(2) == []
    queue.finished(made[1])
    assert (queue.oldest, queue.take(2)) == (5, made[2:])
    queue.finished(made[0])
    queue.finished(made[2])
    assert (queue.is_idle, queue.oldest) == (True, 8)


@pytest.mark.asyncio
async def test_the_first_error_is_kept_once_and_cancels_the_rest() -> None:
    queue, made = ClosureQueue(8), await closures(0, 1, 2)
    for each in made:
        queue.add(each)
    queue.take(2)
    error = ValueError("first")
    assert queue.failed(error) == made
    assert queue.failed(ValueError("second")) == []
    assert (queue.is_idle, queue.num_running) == (True, 0)
    queue.finished(made[0])  # it comes too late
    assert (queue.is_idle, queue.oldest) == (True, 3)
    assert (queue.take_error(), queue.take_error()) == (error, None)
