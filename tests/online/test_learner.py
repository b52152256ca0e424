"""What a learner does with examples: batches, queue, snapshots, changes while it runs, closing."""

import asyncio
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.errors import (
    ContextError,
    DeviceError,
    LoopMismatchError,
    PoisonedExampleError,
)
from aioreplica.online import OnlineLearner
from tests.strategies.workers import strategies

from .program import Counting, example


@pytest.mark.asyncio
async def test_examples_are_learned_in_order_in_batches_of_at_most_max_batch() -> None:
    async with Counting() as program:
        await program.learner.pause()
        tickets = [await program.learner.submit(example(i)) for i in range(10)]
        program.learner.resume()
        versions = [await ticket for ticket in tickets]
    assert [ticket.number for ticket in tickets] == [*range(1, 11)]
    assert versions == [1] * 4 + [2] * 4 + [3] * 2
    assert program.learned() == [1] * 10


def test_a_batch_waits_for_others_at_most_max_delay_s() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with Counting(max_delay_s=5.0) as program:
            ticket = await program.learner.submit(example(0))
            await asyncio.sleep(3.0)
            await program.learner.submit(example(1))
            await ticket
            assert loop.time() - began == pytest.approx(5.0, abs=0.1)
            assert program.learned() == [1, 1]
            for i in range(4):  # a full batch does not wait
                ticket = await program.learner.submit(example(i))
            full_at = loop.time()
            await ticket
            assert loop.time() - full_at < 1.0

    began = 0.0

    async def timed() -> None:
        nonlocal began
        began = asyncio.get_running_loop().time()
        await main()

    art.run(timed)


@pytest.mark.asyncio
async def test_a_full_queue_blocks_first_come_first_served() -> None:
    async with Counting(queue_size=3) as program:
        learner = program.learner
        await learner.pause()
        learner.submit_many_nowait([example(0), example(1)])
        with pytest.raises(anyio.WouldBlock):
            learner.submit_many_nowait([example(8), example(9)])
        big = asyncio.create_task(learner.submit_many([example(2), example(3)]))
        late = asyncio.create_task(learner.submit(example(4)))
        await asyncio.sleep(0)
        with pytest.raises(anyio.WouldBlock):  # there is a place, but others wait for theirs
            learner.submit_nowait(example(9))
        cancelled = asyncio.create_task(learner.submit(example(5)))
        await asyncio.sleep(0)
        cancelled.cancel()
        learner.resume()
        assert [ticket.number for ticket in await big] == [3, 4]
        assert (await late).number == 5
        await (await late)
        with pytest.raises(ValueError, match="3 places, so 4 examples"):
            await learner.submit_many([example(i) for i in range(4)])
        assert learner.statistics().num_refused == 3
    assert program.learned() == [1] * 5


@pytest.mark.asyncio
async def test_step_function_and_learning_rate_are_replaced_between_steps() -> None:
    async with Counting() as program:
        learner = program.learner
        await (await learner.submit(example(0)))
        before = program.weight.value.copy()
        assert learner.learning_rate == 0.1
        learner.learning_rate = 0.0
        await (await learner.submit(example(1)))
        assert np.array_equal(program.weight.value, before)

        async def other(ctx: ar.ReplicaContext, batch: Any) -> float:
            assert len(batch["id"]) == (1 if ctx.replica_id_in_sync_group == 0 else 0)
            return 0.5

        learner.step_fn = other
        records = learner.records()
        await (await learner.submit(example(2)))
        record = await anext(records)
        assert record.scalars == {"loss": 0.5}
        assert [part.num_examples for part in record.replicas] == [1, 0]
        assert (record.version, record.first_number, record.last_number) == (3, 3, 3)
        with pytest.raises(ValueError, match=">= 0"):
            learner.learning_rate = -1.0
    assert program.learned() == [1, 1]
    assert [r async for r in records] == []  # closed with the learner


@pytest.mark.asyncio
async def test_a_plain_step_function_runs_on_the_devices() -> None:
    import threading

    threads = set()

    def step(ctx: ar.ReplicaContext, batch: Any) -> None:
        threads.add(threading.current_thread().name)
        total.blocking.assign_add(batch["x"].sum())

    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            total = ar.Variable(0.0, aggregation="sum")
        async with OnlineLearner(
            strategy, step, [total], max_batch=8, max_delay_s=0.0, queue_size=8
        ) as learner:
            for ticket in await learner.submit_many([{"x": float(i)} for i in range(5)]):
                await ticket
            assert learner.snapshot()[total] == 10.0
    assert threads == {"aioreplica cpu:0", "aioreplica cpu:1"}


@pytest.mark.asyncio
async def test_it_works_under_every_strategy(strategy: ar.Strategy) -> None:
    with strategy.scope():
        total = ar.Variable(0.0, aggregation="sum")

    async def step(ctx: ar.ReplicaContext, batch: Any) -> None:
        await total.assign_add(batch.sum())

    async with OnlineLearner(
        strategy, step, {"total": total}, max_batch=3, max_delay_s=0.0, queue_size=9
    ) as learner:
        tickets = [await learner.submit(float(i)) for i in range(1, 8)]
        await tickets[-1]
    assert total.value == learner.snapshot()[total] == 28.0


def test_pausing_waits_for_the_step_and_keeps_taking_examples() -> None:
    async def main() -> None:
        entered, go = asyncio.Event(), asyncio.Event()

        async def step(ctx: ar.ReplicaContext, batch: Any) -> None:
            entered.set()
            await go.wait()

        async with Counting() as program:
            learner = program.learner
            learner.step_fn = step
            first = await learner.submit(example(0))
            await entered.wait()
            pausing = asyncio.create_task(learner.pause())
            await asyncio.sleep(1.0)
            assert not pausing.done()
            go.set()
            await pausing
            assert first.is_done
            second = await learner.submit(example(1))
            await asyncio.sleep(1.0)
            assert (learner.state, second.is_done, learner.is_ready) == ("paused", False, True)
        assert await second == 2  # closing learns what was taken

    art.run(main)


@pytest.mark.asyncio
async def test_an_error_that_no_example_is_to_blame_for_stops_learning_and_nothing_else() -> None:
    is_lost = True

    async def step(ctx: ar.ReplicaContext, batch: Any) -> Any:
        result = await program.step(ctx, batch)
        if is_lost:
            raise DeviceError("the device is lost", device="cpu:0")
        return result

    async with Counting() as program:
        learner = program.learner
        learner.step_fn = step
        tickets = [await learner.submit(example(i)) for i in range(6)]
        while learner.state != "failed":
            await asyncio.sleep(0)
        statistics = learner.statistics()
        assert statistics.failure == "DeviceError: the device is lost"
        assert (statistics.num_dead, statistics.queue_depth) == (0, 6)
        assert not learner.is_ready
        assert program.learned() == []
        assert learner.snapshot().version == 0
        is_lost = False
        learner.resume()
        assert [await ticket for ticket in tickets] == [1] * 4 + [2] * 2
    assert program.learned() == [1] * 6


@pytest.mark.asyncio
async def test_closing_that_is_cancelled_undoes_the_step_and_tells_the_tickets() -> None:
    entered = asyncio.Event()

    async def step(ctx: ar.ReplicaContext, batch: Any) -> None:
        await program.counts.assign_add(np.ones_like(program.counts.value))
        entered.set()
        await asyncio.Event().wait()

    async with Counting() as program:
        learner = program.learner
        learner.step_fn = step
        ticket = await learner.submit(example(0))
        await entered.wait()
        waiting = asyncio.create_task(learner.submit_many([example(1)] * 50))
        closing = asyncio.create_task(learner.aclose())
        while learner.state != "closing":
            await asyncio.sleep(0)
        with pytest.raises(ContextError, match="is closed"):
            await learner.submit(example(3))
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(ContextError, match="It is lost"):
            await ticket
        with pytest.raises(ContextError, match="is closed"):
            await waiting
        assert learner.state == "closed"
        await learner.aclose()
    assert program.learned() == []


@pytest.mark.asyncio
async def test_a_slow_listener_loses_the_oldest_records() -> None:
    async with Counting() as program:
        records = program.learner.records(buffer_size=2)
        for i in range(5):
            await (await program.learner.submit(example(i)))
        assert records.num_dropped == 3
        assert [(await anext(records)).last_number for _ in range(2)] == [4, 5]
        with pytest.raises(ValueError, match="buffer_size"):
            program.learner.records(buffer_size=0)


@pytest.mark.asyncio
async def test_refusals_come_before_any_example_is_accepted() -> None:
    spec = ar.online.ExampleSpec({"id": 0, "mood": 0.0})
    async with Counting(validate=spec) as program:
        learner = program.learner
        for wrong, said in [
            ({"id": 0}, r"the keys \['id'\], expected \['id', 'mood'\]"),
            ({"id": 0, "mood": float("nan")}, "finite"),
            ({"id": 0.5, "mood": 0.0}, "expected int"),
        ]:
            with pytest.raises(ValueError, match=said):
                await learner.submit(wrong)
        with pytest.raises(ValueError, match="needs a journal"):
            await learner.submit({"id": 0, "mood": 0.0}, key="k")
        with pytest.raises(ValueError, match="at least one"):
            await learner.submit_many([])
        assert learner.statistics().num_taken == learner.statistics().queue_depth == 0
        with pytest.raises(ContextError, match="no checkpoints"):
            await learner.checkpoint()
        with pytest.raises(ContextError, match="open already"):
            await learner.__aenter__()
    with pytest.raises(ContextError, match="never opened"):
        Counting().learner.snapshot()


@pytest.mark.parametrize(
    ("argument", "error", "said"),
    [
        ({"max_batch": 0}, ValueError, "max_batch must be at least 1, got 0"),
        ({"max_batch": 2.0}, TypeError, "max_batch must be an int"),
        ({"max_delay_s": -1}, ValueError, "max_delay_s must be finite"),
        ({"max_delay_s": float("nan")}, ValueError, "max_delay_s must be finite"),
        ({"queue_size": True}, TypeError, "queue_size"),
        ({"journal": 3}, TypeError, "journal must be a path"),
        ({"checkpoints": "here"}, TypeError, "CheckpointManager"),
        ({"validate": 3}, TypeError, "validate must be callable"),
    ],
)
def test_wrong_arguments_are_said(argument: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Counting(**argument)


@pytest.mark.asyncio
async def test_dead_letters_are_tried_again_or_discarded(folder: Path) -> None:
    for where in (None, folder):
        async with Counting(where) as program:
            learner = program.learner
            tickets = [
                await learner.submit(example(i, 1.0 if i in {1, 2} else 0.0)) for i in range(4)
            ]
            with pytest.raises(
                PoisonedExampleError, match="Example 2 was set aside: ValueError: a bad mood"
            ):
                await tickets[1]
            await tickets[3]
            letters = await learner.dead_letters()
            assert [letter.number for letter in letters] == [2, 3]
            assert letters[0].example["id"] == 1
            assert letters[0].error == "ValueError: a bad mood"
            assert [x.number for x in await learner.dead_letters(after=2)] == [3]

            async def forgiving(ctx: ar.ReplicaContext, batch: Any) -> Any:
                return await program.step(ctx, batch | {"mood": batch["mood"] * 0})

            learner.step_fn = forgiving
            again = await learner.retry(2)
            await again
            assert again.number == 5
            await learner.discard(3)
            for number in (2, 3, 77):
                with pytest.raises(KeyError):
                    await learner.retry(number)
                with pytest.raises(KeyError):
                    await learner.discard(number)
            assert await learner.dead_letters() == ()
        assert program.learned() == [1, 1, 0, 1]
    async with Counting(folder) as program:
        assert program.learned() == [1, 1, 0, 1]


@pytest.mark.asyncio
async def test_closing_that_is_cancelled_before_anything_began_closes_the_journal(
    folder: Path,
) -> None:
    program = Counting(folder)
    async with program.strategy, ar.CheckpointManager(folder / "checkpoints"):
        await program.learner.__aenter__()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # as the end of `asyncio.run` does
        await program.learner.aclose()
        assert program.learner.state == "closed"
        async with program.learner:
            await program.learner.submit(example(0))
    assert program.learned() == [1]


@pytest.mark.asyncio
@pytest.mark.parametrize("has_journal", [False, True])
async def test_threads_and_other_loops_are_told_to_ask_the_learners_loop(
    folder: Path, has_journal: bool
) -> None:
    """A plain function of a web framework runs on a thread; it must not hold a place for ever."""
    async with Counting(folder if has_journal else None) as program:
        learner = program.learner

        async def elsewhere() -> None:
            learner.submit_nowait(example(1))

        with pytest.raises(ContextError, match="needs a running event loop"):
            await asyncio.to_thread(learner.submit_nowait, example(0))
        with pytest.raises(LoopMismatchError, match="run_coroutine_threadsafe"):
            await asyncio.to_thread(asyncio.run, elsewhere())
        assert learner.statistics().queue_depth == 0
        loop = asyncio.get_running_loop()

        def ask() -> Any:
            return asyncio.run_coroutine_threadsafe(learner.submit(example(2)), loop).result(30)

        assert await (await asyncio.to_thread(ask)) == 1
    assert program.learned() == [0, 0, 1]


def test_several_workers_are_refused_before_anything_is_taken() -> None:
    """Each would give its examples to all replicas, and set all of them aside."""
    workers = strategies(2, 1)
    with workers[0].scope():
        weight = ar.Variable(0.0)
    with pytest.raises(ValueError, match="has several workers"):
        OnlineLearner(workers[0], print, {"w": weight}, max_batch=1, max_delay_s=0.0, queue_size=1)
