"""Which closures run, without any engine: events in, closures out."""

from __future__ import annotations

import asyncio

import pytest

from aioreplica.strategies.parameter_server._pickles import Packed
from aioreplica.strategies.parameter_server._queue import ClosureQueue, Commit, ScheduledClosure


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
    assert queue.finished(made[0]) is None  # it comes too late
    assert (queue.take_error(), queue.take_error()) == (error, None)


@pytest.mark.asyncio
async def test_a_step_waits_for_the_commit_of_the_one_before() -> None:
    queue, made = ClosureQueue(8, num_replicas=2, num_needed=2), await closures(0, 1, 2, 3)
    for each in made:
        queue.add(each)
    assert queue.take(9) == made[:2]
    assert queue.finished(made[1]) is None
    commit = queue.finished(made[0])
    assert commit == Commit(0, (0, 1), 2)
    assert queue.take(9) == []
    assert queue.committed(commit) == made[:2]
    assert queue.take(9) == made[2:]


@pytest.mark.asyncio
async def test_the_slowest_of_a_step_is_not_waited_for() -> None:
    queue, made = ClosureQueue(8, num_replicas=3, num_needed=2), await closures(0, 1, 2)
    for each in made:
        queue.add(each)
    queue.take(9)
    assert queue.finished(made[2]) is None
    commit = queue.finished(made[0])
    assert commit == Commit(0, (0, 2), 3)
    queue.committed(commit)
    assert (queue.is_idle, queue.oldest) == (False, 1)
    assert queue.finished(made[1]) is None
    assert queue.is_idle


@pytest.mark.asyncio
async def test_a_step_that_is_not_full_runs_when_it_is_joined() -> None:
    queue, made = ClosureQueue(8, num_replicas=2, num_needed=2), await closures(0, 1)
    queue.add(made[0])
    queue.take(9)
    assert queue.finished(made[0]) is None
    queue.flush()
    commit = queue.complete_step()
    assert commit == Commit(0, (0,), 2)
    queue.committed(commit)
    queue.add(made[1])
    assert made[1].group == 1
    assert queue.take(9) == [made[1]]
