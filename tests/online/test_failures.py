"""Steps that always fail: their examples are kept, not set aside, and learned in the end."""

import asyncio
import itertools
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.errors import PoisonedExampleError
from aioreplica.online._failures import Backoff, FailuresInARow, has_any
from aioreplica.online._intake import Taken, dead_error

from .program import RAISES, Counting, example


async def broken(ctx: ar.ReplicaContext, batch: Any) -> None:
    raise NameError("name 'loss' is not defined")


async def until_state(learner: ar.online.OnlineLearner, state: str) -> None:
    while learner.state != state:
        await asyncio.sleep(0)


@pytest.mark.asyncio
@pytest.mark.parametrize("is_journalled", [True, False])
async def test_a_broken_step_sets_nothing_aside_and_its_examples_are_learned_later(
    folder: Path, is_journalled: bool
) -> None:
    async with Counting(folder if is_journalled else None) as program:
        learner = program.learner
        await (await learner.submit(example(0)))
        learner.step_fn = broken
        tickets = [await learner.submit(example(i)) for i in range(1, 30)]
        await until_state(learner, "failed")
        assert await learner.dead_letters() == ()
        assert not learner.is_ready
        now = learner.statistics()
        assert (now.learned_number, now.queue_depth, now.last_number) == (1, 29, 30)
        for said in ("5 examples in a row, 2 to 6,", "NameError: name 'loss'", "set_aside=True"):
            assert said in now.failure
        assert learner.snapshot()[program.counts][:2].tolist() == [1, 0]
        late = await learner.submit(example(30))
        learner.step_fn = program.step
        learner.resume()
        await late
        versions = [await ticket for ticket in tickets[4:]]  # those before have told of an error
        assert versions == sorted(versions)
        assert program.learned() == [1] * 31
        assert learner.statistics().queue_depth == 0
    assert program.learned() == [1] * 31


@pytest.mark.asyncio
async def test_the_log_tells_when_learning_stops(caplog: pytest.LogCaptureFixture) -> None:
    """Of dead letters only the first: whoever submits examples could fill it."""
    async with Counting() as program:
        learner = program.learner
        for i in range(6):
            ticket = await learner.submit(example(i, RAISES if i % 2 else 0))
            with suppress(PoisonedExampleError):
                await ticket
        learner.step_fn = broken
        for i in range(6, 12):
            await learner.submit(example(i))
        await until_state(learner, "failed")
        failure = learner.statistics().failure
    told = [(each.levelname, each.getMessage()) for each in caplog.records]
    assert [level for level, _ in told] == ["WARNING", "ERROR"]
    assert "Example 2 was set aside" in told[0][1]
    assert "a bad mood" in told[0][1]
    assert told[1][1] == f"Nothing is learned any more: {failure}"


@pytest.mark.asyncio
async def test_a_restart_learns_what_a_broken_step_has_left(folder: Path) -> None:
    async with Counting(folder) as program:
        learner = program.learner
        for i in range(3):
            await (await learner.submit(example(i)))
        learner.step_fn = broken
        for i in range(3, 20):
            await learner.submit(example(i))
        await until_state(learner, "failed")
        assert await learner.checkpoint() == 3
    again = Counting(folder)
    again.learner.step_fn = broken  # still, for its backlog
    async with again:
        await until_state(again.learner, "failed")
        assert again.learner.statistics().learned_number == 3
        assert await again.learner.dead_letters() == ()
        again.learner.step_fn = again.step
        again.learner.resume()
        await until_state(again.learner, "running")
        assert again.learned() == [1] * 20
    async with Counting(folder) as last:
        assert last.learned() == [1] * 20


@pytest.mark.asyncio
async def test_no_checkpoint_is_behind_examples_that_may_be_taken_back(folder: Path) -> None:
    async with Counting(folder, max_batch=1) as program:
        learner = program.learner
        await (await learner.submit(example(0)))
        for i in range(1, 4):
            with pytest.raises(PoisonedExampleError):
                await (await learner.submit(example(i, RAISES)))
        assert await learner.checkpoint() == 1
        assert learner.statistics().learned_number == 4
        await (await learner.submit(example(4)))
        assert await learner.checkpoint() == 5
        for i in range(5, 8):
            with pytest.raises(PoisonedExampleError):
                await (await learner.submit(example(i, RAISES)))
    assert program.manager is not None
    assert program.manager.steps()[-1] == 5  # so is the one of closing
    async with Counting(folder) as again:
        await until_state(again.learner, "running")
        assert again.learned() == [1, 0, 0, 0, 1]
        assert [x.number for x in await again.learner.dead_letters()] == [2, 3, 4, 6, 7, 8]


@pytest.mark.asyncio
async def test_what_was_discarded_or_retried_meanwhile_is_not_taken_back(folder: Path) -> None:
    async with Counting(folder, max_batch=1) as program:
        learner = program.learner
        for i in range(4):
            with pytest.raises(PoisonedExampleError):
                await (await learner.submit(example(i, RAISES)))
        await learner.pause()
        await learner.discard(1)
        again = await learner.retry(2)
        learner.step_fn = broken
        learner.resume()
        await until_state(learner, "failed")
        assert again.number == 5

        async def forgiving(ctx: ar.ReplicaContext, batch: Any) -> Any:
            return await program.step(ctx, batch | {"mood": batch["mood"] * 0})

        learner.step_fn = forgiving
        learner.resume()
        await again
        assert program.learned() == [0, 1, 1, 1]
    async with Counting(folder) as restarted:
        assert restarted.learned() == [0, 1, 1, 1]
        assert await restarted.learner.dead_letters() == ()


@pytest.mark.asyncio
async def test_many_bad_examples_in_a_row_are_set_aside_if_someone_says_so(folder: Path) -> None:
    async with Counting(folder) as program:
        learner = program.learner
        tickets = [await learner.submit(example(i, RAISES if i < 9 else 0.0)) for i in range(12)]
        await until_state(learner, "failed")
        learner.resume()  # they fail again
        await until_state(learner, "failed")
        assert await learner.dead_letters() == ()
        learner.resume(set_aside=True)
        await tickets[-1]
        assert len(await learner.dead_letters()) == 9
        assert program.learned() == [0] * 9 + [1] * 3
        for i in range(12, 17):  # that was for once
            await learner.submit(example(i, RAISES))
        await until_state(learner, "failed")
        learner.resume(set_aside=True)
        await (await learner.submit(example(17)))


@pytest.mark.asyncio
async def test_good_steps_between_failures_begin_the_count_again() -> None:
    async with Counting(max_batch=1) as program:
        for i in range(30):
            ticket = await program.learner.submit(example(i, 0.0 if i % 5 == 4 else RAISES))
            if i % 5 == 4:
                await ticket
        assert program.learner.state == "running"
        assert program.learner.statistics().num_dead == 24


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_the_limit_is_that_of_the_program(limit: int) -> None:
    async def main() -> None:
        async with Counting(max_batch=1, max_failures_in_a_row=limit) as program:
            for i in range(limit - 1):
                with pytest.raises(PoisonedExampleError):
                    await (await program.learner.submit(example(i, RAISES)))
            assert program.learner.state == "running"
            await program.learner.submit(example(limit, RAISES))
            await until_state(program.learner, "failed")
            assert await program.learner.dead_letters() == ()

    art.run(main)


# ---- errors that go away by themselves -----------------------------------------------------


def test_a_short_outage_makes_no_dead_letters() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        tries: list[float] = []
        back_at = loop.time() + 2.0

        async def step(ctx: ar.ReplicaContext, batch: Any) -> Any:
            result = await program.step(ctx, batch)
            if ctx.replica_id_in_sync_group == 0:
                tries.append(loop.time())
            if loop.time() < back_at:
                raise ConnectionError("the feature store does not answer")
            return result

        async with Counting(retry_on=(ConnectionError, TimeoutError)) as program:
            learner = program.learner
            learner.step_fn = step
            tickets = [await learner.submit(example(i)) for i in range(6)]
            await until_state(learner, "retrying")
            now = learner.statistics()
            assert now.retry_error == "ConnectionError: the feature store does not answer"
            assert (now.num_retries, now.failure, learner.is_ready) == (1, "", False)
            for ticket in tickets:
                await ticket
            assert learner.state == "running"
            assert await learner.dead_letters() == ()
            assert learner.statistics().num_retries == 5
            waits = [after - before for before, after in itertools.pairwise(tries[:6])]
            assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6], abs=0.05)
            assert program.learned() == [1] * 6

    art.run(main)


def test_closing_tries_an_outage_once_more_and_leaves_the_rest_to_the_journal(
    folder: Path,
) -> None:
    async def main() -> None:
        async def step(ctx: ar.ReplicaContext, batch: Any) -> Any:
            await ctx.barrier()
            raise ConnectionError("down")

        async with Counting(folder, retry_on=ConnectionError) as program:
            program.learner.step_fn = step
            await program.learner.submit(example(0))
            await until_state(program.learner, "retrying")
        assert "closed while it tried again" in program.learner.statistics().failure
        async with Counting(folder) as again:
            await until_state(again.learner, "running")
            assert again.learned() == [1]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ({"max_failures_in_a_row": 0}, ValueError),
        ({"max_failures_in_a_row": 2.5}, TypeError),
        ({"retry_on": "ConnectionError"}, TypeError),
        ({"retry_on": (OSError, BaseException)}, TypeError),
        ({"retry_on": OSError("now")}, TypeError),
    ],
)
def test_wrong_limits_are_said(argument: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(argument))):
        Counting(**argument)


# ---- the decisions -------------------------------------------------------------------------


def test_an_error_that_is_a_sentence_ends_with_one_full_stop() -> None:
    for error in ("ValueError: bad", "ValueError: bad."):
        assert str(dead_error(3, error)).startswith("Example 3 was set aside: ValueError: bad. Lo")


def test_failures_in_a_row_are_counted_until_a_step_is_kept() -> None:
    failures = FailuresInARow(3)
    first, second = Taken(8, "a", None, 0.0), Taken(9, "b", None, 0.0)
    failures.add(first, 7)
    assert not failures.is_last_straw
    failures.add(second, 8)
    assert failures.is_last_straw
    assert failures.before == 7
    assert failures.take_back({9}) == [second]
    assert failures.failed == []
    failures.add(first, 7)
    failures.add(second, 8)
    failures.lift()
    assert not failures.is_last_straw
    assert failures.failed == []
    failures.kept()
    assert FailuresInARow(1).is_last_straw
    assert not FailuresInARow(None).is_last_straw


def test_waits_double_up_to_a_limit() -> None:
    backoff = Backoff(0.5, 3.0)
    assert backoff.until < 0
    waits = []
    for _ in range(5):
        backoff.failed(10.0)
        waits.append(backoff.until - 10.0)
    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.succeeded()
    backoff.failed(20.0)
    assert backoff.until == 20.5


def test_an_error_in_a_group_is_found() -> None:
    inner = ExceptionGroup("inner", [ValueError(), ConnectionResetError()])
    assert has_any(ExceptionGroup("two", [KeyError(), inner]), (ConnectionError,))
    assert not has_any(inner, (KeyError,))
    assert not has_any(ConnectionError(), ())
