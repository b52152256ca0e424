"""An epoch: what is put back comes first, and workers are asked as often as needed, no more."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from aioreplica.errors import ContextError
from aioreplica.input._epoch import Epoch
from aioreplica.input._source import Item
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")


def epoch_of(count: int) -> Epoch:
    async def items() -> AsyncIterator[Item]:
        for number in range(count):
            yield Item(number, number + 1)

    return Epoch(items(), "the epoch", is_inline=True, is_managed=True)


async def rest(epoch: Epoch) -> list[int]:
    found = []
    while (item := await epoch.next()) is not None:
        found.append(item.value)
    return found


@pytest.mark.asyncio
async def test_items_that_are_put_back_come_first_and_in_their_order() -> None:
    epoch = epoch_of(5)
    read = [await epoch.next() for _ in range(4)]
    assert None not in read

    epoch.put_back(read[2:], None)
    epoch.put_back(read[:2], None)

    assert await rest(epoch) == [0, 1, 2, 3, 4]


@pytest.mark.asyncio
async def test_an_error_that_was_put_back_still_comes_behind_batches_that_are_put_back_later() -> (
    None
):
    epoch = epoch_of(2)
    read = [await epoch.next() for _ in range(2)]
    assert None not in read
    assert await epoch.next() is None
    epoch.put_back(read, OSError("the disk is gone"))
    again = await epoch.next()
    assert again is not None
    epoch.put_back([again], None)

    assert [await epoch.next() for _ in range(2)] == read
    with pytest.raises(OSError, match="the disk is gone"):
        await epoch.next()
    assert await epoch.next() is None  # it comes once


@pytest.mark.asyncio
@pytest.mark.parametrize("agreed", [1, 2, 3, 9])
async def test_workers_are_asked_again_when_as_many_as_agreed_were_given(agreed: int) -> None:
    """All have `agreed` batches, and the others end with them."""
    epoch, asked = epoch_of(5), []

    async def go_on(num_left: int) -> int:
        asked.append(num_left)
        return min(agreed, num_left) if len(asked) == 1 else 0

    epoch.go_on, epoch.num_batches = go_on, 5

    assert await rest(epoch) == [*range(min(agreed, 5))]
    assert asked == [5, 0 if agreed >= 5 else 5 - agreed]


@pytest.mark.asyncio
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_batch_is_kept_when_the_question_is_refused(is_cancelled: bool) -> None:
    """And nobody is told of that later, if nobody waited for it any more."""
    epoch, asked = epoch_of(2), []

    async def go_on(num_left: int) -> int:
        asked.append(num_left)
        if len(asked) == 1:
            if is_cancelled:
                waiting.cancel()
            raise ContextError("not now")
        return num_left

    epoch.go_on, epoch.num_batches = go_on, 2
    waiting = asyncio.ensure_future(epoch.next())
    with pytest.raises(asyncio.CancelledError if is_cancelled else ContextError):
        await waiting

    assert await rest(epoch) == [0, 1]
    assert asked == [2, 2, 0]


@pytest.mark.asyncio
async def test_a_batch_is_kept_when_the_wait_for_the_answer_is_cancelled() -> None:
    epoch, answer, asked = epoch_of(2), asyncio.Event(), []

    async def go_on(num_left: int) -> int:
        asked.append(num_left)
        await answer.wait()
        return num_left

    epoch.go_on, epoch.num_batches = go_on, 2
    waiting = asyncio.ensure_future(epoch.next())
    await idle()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    answer.set()

    assert await rest(epoch) == [0, 1]
    assert asked == [2, 0]


@pytest.mark.asyncio
@pytest.mark.parametrize("num_agreed", [0, 1])
async def test_an_epoch_that_is_closed_during_a_question_gives_nothing_and_is_not_over(
    num_agreed: int,
) -> None:
    """Its dataset stays behind the batch before, whatever the other workers say."""
    epoch, answer = epoch_of(2), asyncio.Event()

    async def go_on(_num_left: int) -> int:
        await answer.wait()
        return num_agreed

    epoch.go_on, epoch.num_batches = go_on, 2
    waiting = asyncio.ensure_future(epoch.next())
    await idle()
    await epoch.aclose("a state was loaded")
    answer.set()
    with pytest.raises(ContextError, match="a state was loaded"):
        await waiting

    assert not epoch.is_exhausted
