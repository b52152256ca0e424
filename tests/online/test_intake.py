"""Taking examples: places are given in turn, and none is lost when a wait for one is cancelled."""

import asyncio
from collections.abc import Callable

import pytest

from aioreplica.online._intake import ExampleGroup, Intake
from aioreplica.online._ticket import Signal

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]


def submission(size: int = 1) -> ExampleGroup:
    return ExampleGroup.of([None] * size, None, is_journalled=False)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0)


async def waiting(intake: Intake, *sizes: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(intake.take(submission(size))) for size in sizes]
    await until(lambda: len(intake._room) == len(sizes))
    return tasks


async def test_a_place_that_is_given_to_a_cancelled_wait_goes_to_the_next() -> None:
    intake = Intake(1, None, 0, Signal())
    intake.take_nowait(submission())
    first, second = await waiting(intake, 1, 1)
    intake.free(1)
    first.cancel()  # in the same step
    async with asyncio.timeout(60):
        await second
        with pytest.raises(asyncio.CancelledError):
            await first
    assert (intake.depth, intake.num_taken, intake.last_number) == (1, 2, 2)


async def test_cancelling_a_large_submission_lets_smaller_ones_in() -> None:
    intake = Intake(3, None, 0, Signal())
    intake.take_nowait(submission(2))
    first, second = await waiting(intake, 2, 1)
    first.cancel()
    async with asyncio.timeout(60):
        await second
    assert (intake.depth, intake.num_taken) == (3, 3)
    assert first.cancelled()


@pytest.mark.parametrize("size", [1, 3])
async def test_places_are_free_again_exactly_once(size: int) -> None:
    intake = Intake(3, None, 0, Signal())
    for number in range(1, 5):
        intake.take_nowait(submission(size))
        assert [taken.number for taken in intake.next_batch(9)][-1] == number * size
        intake.free(size)
        assert intake.depth == 0
