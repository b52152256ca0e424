"""Errors of an iterator that a device loop could take for something else, or could not note."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import aioreplica as ar

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]


def nothing(ctx: ar.MultiStepContext, *inputs: Any) -> None:
    """A step that does nothing."""


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("at_close", [False, True], ids=["read", "closed"])
async def test_a_cancellation_of_the_iterators_own_is_not_one_of_the_caller(
    pair: ar.MirroredStrategy, is_async: bool, at_close: bool
) -> None:
    """Such as of a future that it awaits: a task group would take no notice of it."""
    mine = asyncio.CancelledError("elsewhere")

    class Source:
        def __iter__(self) -> Iterator[int]:
            try:
                yield 1
            finally:
                raise mine

    class AsyncSource:
        async def __aiter__(self) -> AsyncIterator[int]:
            try:
                yield 1
            finally:
                raise mine

    source: Any = AsyncSource() if is_async else Source()
    if not at_close:  # an iterator of its own is not closed with the loop
        source = aiter(source) if is_async else iter(source)
    with pytest.raises(RuntimeError, match="would look like a cancellation") as caught:
        await pair.run_steps(nothing, source, 1 if at_close else 9)

    assert caught.value.__cause__ is mine
    assert "after 1 complete steps" in caught.value.__notes__[0]


async def test_an_error_of_the_iterator_that_takes_no_notes_is_raised_as_it_is(
    pair: ar.MirroredStrategy,
) -> None:
    class MyError(Exception):
        def add_note(self, note: str) -> None:
            raise TypeError("no notes")

    mine, plain = MyError(), OSError("disk")

    class Source:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            raise self.error

    with pytest.raises(MyError) as caught:
        await pair.run_steps(nothing, Source(mine), 1)
    assert caught.value is mine
    source = Source(plain)
    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
            await pair.run_steps(nothing, source, 1)
    assert len(plain.__notes__) == 1
