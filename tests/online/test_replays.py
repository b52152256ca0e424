"""Submissions whose key was known: their tickets tell what became of the example."""

import asyncio
import gc
from pathlib import Path
from typing import Any

import anyio
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, PoisonedExampleError
from aioreplica.online import Journal
from aioreplica.online._journal_format import Dead, Entry
from aioreplica.online._labels import label, taken_again
from aioreplica.online._ticket import Ticket

from .program import RAISES, Counting, example


async def set_aside(program: Counting, number: int, key: str) -> None:
    with pytest.raises(PoisonedExampleError, match="set aside: ValueError"):
        await (await program.learner.submit(example(number, RAISES), key=key))


@pytest.mark.asyncio
async def test_a_replay_of_a_discarded_example_says_so(folder: Path) -> None:
    async with Counting(folder) as program:
        await set_aside(program, 0, "a")
        await program.learner.discard(1)
        again = await program.learner.submit(example(0, RAISES), key="a")
        assert (again.number, again.is_duplicate) == (1, True)
        with pytest.raises(PoisonedExampleError, match="Example 1 was set aside, and discarded"):
            await again
        await (await program.learner.submit(example(1)))
    async with Counting(folder) as program:  # it is kept in the journal
        again = await program.learner.submit(example(0, RAISES), key="a")
        with pytest.raises(PoisonedExampleError, match="discarded"):
            await again
        assert program.learned() == [0, 1]


@pytest.mark.asyncio
async def test_a_replay_of_a_retried_example_waits_for_that(folder: Path) -> None:
    async with Counting(folder) as program:
        learner = program.learner
        await set_aside(program, 0, "a")
        await learner.pause()
        retried = await learner.retry(1)
        again = await learner.submit(example(0, RAISES), key="a")
        assert (again.number, retried.number) == (1, 2)
        assert not again.is_done
        learner.resume()
        with pytest.raises(PoisonedExampleError, match="Example 2 was set aside"):
            await again  # it fails once more

        async def forgiving(ctx: ar.ReplicaContext, batch: Any) -> Any:
            return await program.step(ctx, batch | {"mood": batch["mood"] * 0})

        learner.step_fn = forgiving
        version = await (await learner.retry(2))
        again = await learner.submit(example(0, RAISES), key="a")
        assert await again == version
        assert program.learned() == [1]


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_replays_that_nobody_waits_for_are_not_kept(folder: Path) -> None:
    def num_tickets() -> int:
        gc.collect()
        return sum(type(each) is Ticket for each in gc.get_objects())

    async with Counting(folder, queue_size=10) as program:
        learner = program.learner
        await learner.pause()
        first = await learner.submit(example(0), key="a")
        waiting = [await learner.submit(example(0), key="a") for _ in range(3)]
        before = num_tickets()
        for _ in range(200):
            await learner.submit(example(0), key="a")
        assert num_tickets() <= before + 1
        learner.resume()
        assert [await ticket for ticket in waiting] == [await first] * 3


@pytest.mark.asyncio
async def test_replays_are_told_when_the_learner_is_closed(folder: Path) -> None:
    program = Counting(folder)
    async with program:
        learner = program.learner

        async def hangs(ctx: ar.ReplicaContext, batch: Any) -> None:
            await asyncio.Event().wait()

        learner.step_fn = hangs
        await learner.submit(example(0), key="a")
        again = await learner.submit(example(0), key="a")
        closing = asyncio.create_task(learner.aclose())
        while learner.state != "closing":
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(ContextError, match="The journal has it"):
            await again


@pytest.mark.asyncio
async def test_a_discarded_example_without_a_key_is_not_called_learned(folder: Path) -> None:
    async with Counting(folder, max_batch=1) as program:
        learner = program.learner
        for mood in (RAISES, 0.0):
            ticket = await learner.submit(example(0, mood))
            if mood:
                with pytest.raises(PoisonedExampleError):
                    await ticket
                await learner.discard(1)
        await ticket
        await learner.checkpoint()  # which forgets what is too old
        with pytest.raises(PoisonedExampleError, match="discarded"):
            await (await learner.ticket(1))


@pytest.mark.asyncio
async def test_labels_and_retries_that_do_not_wait_are_refused_when_the_queue_is_full(
    folder: Path,
) -> None:
    journal = Journal(folder / "journal.db", label_ttl_s=60.0)
    async with Counting(folder, max_batch=1, queue_size=1, journal=journal) as program:
        learner = program.learner
        with pytest.raises(PoisonedExampleError):
            await (await learner.submit(example(0, RAISES)))
        learner.expect(example(1), prediction_id="a")
        await learner.pause()
        await learner.submit(example(2))
        engine = learner._open_engine()
        with pytest.raises(anyio.WouldBlock):
            await label(engine, "a", 1.0, waits=False)
        with pytest.raises(anyio.WouldBlock):
            await taken_again(engine, 1, waits=False)
        assert "input" in await learner.expected("a")
        assert [each.number for each in await learner.dead_letters()] == [1]


def test_what_has_taken_a_place_is_forgotten_with_its_key(folder: Path) -> None:
    file = Journal(folder / "journal.db", keep_keys_s=10.0).file()
    file.open()
    try:
        file.append([Entry([example(0)], "a"), Entry([example(1)], "b")], 0.0)
        file.set_aside([Dead(number, "bad", 0.0) for number in (1, 2)])
        assert file.discard(1)
        assert file.discard(2)
        file.append([Entry([example(2)], "c")], 9.0)
        assert file.fates([1, 2, 3]) == {1: 0, 2: 0}
        file.compact([0], 15.0)
        assert file.fates([1, 2, 3]) == {}
    finally:
        file.close()
