"""Survivors of a lost worker shrink, and go on from the newest step that any of them completed."""

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.checkpoint import Savepoint
from aioreplica.cluster import LocalCommunicator
from aioreplica.errors import CheckpointError, ContextError, StallError, WorkerLostError
from aioreplica.strategies import MultiWorkerMirroredStrategy
from tests.sequencer import idle
from tests.strategies.workers import communicator_of, outcomes, strategies

Strategy = MultiWorkerMirroredStrategy
NUM_STEPS, BATCH = 6, 4


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def read_file(number: Any) -> list[Any]:
    """Return the batches of a file; the last one is odd."""
    first = number * BATCH
    return [np.arange(first, first + 1), np.arange(first + 1, first + BATCH)]


class Training:
    """A model whose weights show which examples it has seen, how often, and in which step."""

    def __init__(self, strategy: ar.Strategy, sharding: Any = "data") -> None:
        self.strategy = strategy
        has_files = sharding == "file"  # batches are other ones then, for fewer workers
        with strategy.scope():
            self.seen = ar.Variable(np.zeros(BATCH * NUM_STEPS), name="seen")
            self.sgd = ar.optimizers.SGD(1.0, momentum=0.0 if has_files else 0.5)
        self.settings = {"steps": 0}
        data: Any = ar.ArrayDataset(np.arange(BATCH * NUM_STEPS), batch_size=BATCH)
        if has_files:
            data = ar.input.Files(range(NUM_STEPS), read_file)  # type: ignore[arg-type]
        self.batches = strategy.distribute_dataset(data, ar.InputOptions(sharding=sharding))
        self.state = {
            "seen": self.seen, "sgd": self.sgd, "batches": self.batches, "settings": self.settings,
        }  # fmt: skip
        self.kept = Savepoint(self.state)

    async def step(self, batch: Any) -> None:
        gradient = np.zeros(BATCH * NUM_STEPS)
        gradient[batch] = -1.0
        await me().run_on_device(int)
        await self.sgd.apply_gradients([(gradient, self.seen)])
        await me().barrier()

    async def to_the_end(self) -> None:
        async for batch in self.batches:
            await self.strategy.run(self.step, (batch,))
            self.settings["steps"] += 1
            self.kept = Savepoint(self.state)

    def learned(self) -> Any:
        slots = [v.value.tolist() for v in self.sgd.variables]
        return self.seen.value.tolist(), slots, self.settings["steps"]


async def learned_alone() -> Any:
    async with ar.MirroredStrategy(["cpu:0"]) as strategy:
        training = Training(strategy)
        async with training.batches:
            await training.to_the_end()
        return training.learned()


async def survive(strategy: Strategy, sharding: str = "data") -> Any:
    """Train to the end, whoever is lost on the way."""
    training = Training(strategy, sharding)
    async with training.batches:
        while True:
            try:
                await training.to_the_end()
                break
            except WorkerLostError:
                await strategy.shrink(training.kept)
        assert repr(training.batches).startswith("<DistributedDataset of")
    await strategy.check_in_sync(strategy.trainable_variables)
    return training.learned(), strategy.num_replicas_in_sync


@pytest.mark.xslow
@pytest.mark.explore(schedules=25, faults=art.Faults().lose_worker("worker:1"))
async def test_every_batch_counts_once_whenever_a_worker_is_lost() -> None:
    expected = await learned_alone()

    results = await outcomes(strategies(3, 1), [survive] * 3)

    for rank in (0, 2):
        if isinstance(results[rank], BaseException):  # it was lost when all others had finished
            assert isinstance(results[rank], WorkerLostError | ContextError), results
            continue
        learned, num_replicas = results[rank]
        assert learned == expected
        assert num_replicas in (2, 3)
    lost = results[1]
    assert not isinstance(lost, BaseException) or "worker 1" in str(lost).lower(), lost


@pytest.mark.xslow
@pytest.mark.explore(schedules=25, faults=art.Faults().lose_worker("worker:1"))
async def test_every_example_of_files_counts_once_whenever_a_worker_is_lost() -> None:
    """Two files of two batches for each of three workers; two have to deal out what is left."""
    results = await outcomes(strategies(3, 1), [partial(survive, sharding="file")] * 3)

    for rank, result in enumerate(results):
        if isinstance(result, BaseException):
            assert isinstance(result, WorkerLostError | ContextError), results
        else:
            assert result[0][0] == [1.0] * (BATCH * NUM_STEPS), (rank, result)


@pytest.mark.slow
@pytest.mark.explore(
    schedules=15, faults=art.Faults().lose_worker("worker:0").lose_worker("worker:2")
)
async def test_a_second_loss_shrinks_again_and_the_chief_may_be_lost() -> None:
    expected = await learned_alone()

    results = await outcomes(strategies(4, 1), [survive] * 4)

    for rank in (1, 3):
        if not isinstance(results[rank], BaseException):
            assert results[rank][0] == expected
        else:
            assert isinstance(results[rank], WorkerLostError | ContextError), results


def lose(strategy: Strategy) -> None:
    """Let the engine lose a worker, as all of the others see it."""
    communicator = communicator_of(strategy)
    assert isinstance(communicator, LocalCommunicator)
    rank = communicator.rank
    communicator._arrived(lambda: None, lambda: None, LostOp(rank))  # type: ignore[arg-type]


class LostOp:
    """A message that was not sent."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def cancelled(self) -> bool:
        return False

    def exception(self) -> BaseException:
        return WorkerLostError("killed by the test.", ranks=(self.rank,))


async def count() -> Any:
    return await me().all_reduce("sum", 1)


@pytest.mark.asyncio
async def test_ranks_replicas_and_input_are_those_of_the_smaller_group() -> None:
    seen: dict[int, Any] = {}
    all_ready = asyncio.Barrier(3)

    async def program(strategy: Strategy) -> Any:
        assert strategy._runtime.workers is not None
        rank = strategy._runtime.workers.rank
        assert strategy.local_results(await strategy.run(count)) == (6, 6)
        await all_ready.wait()
        if rank == 0:
            lose(strategy)
            return
        with pytest.raises(WorkerLostError, match=r"[Ww]orker 0"):
            await strategy.run(count)
        sizes: list[Any] = []
        fn = strategy.on_resize(lambda: sizes.append(strategy.num_replicas_in_sync))

        @strategy.on_resize
        async def then() -> None:
            sizes.append(strategy.local_results(await strategy.run(count)))

        await strategy.shrink()
        assert sizes == [4, (4, 4)]
        assert callable(fn)
        result = strategy.local_results(await strategy.run(count))
        ids = strategy.distribute_values_from_function(lambda v: v.replica_id_in_sync_group)
        chief = strategy.extended.should_checkpoint
        seen[rank] = strategy._runtime.workers.rank, result, strategy.local_results(ids), chief
        with pytest.raises(ContextError, match="has lost no worker"):
            await strategy.shrink()

    await outcomes(strategies(3, 2), [program] * 3)

    assert seen == {1: (0, (4, 4), (0, 1), True), 2: (1, (4, 4), (2, 3), False)}


@pytest.mark.asyncio
async def test_an_error_of_a_function_is_raised_by_shrink_which_is_done() -> None:
    all_ready = asyncio.Barrier(3)
    called: list[int] = []

    async def program(strategy: Strategy) -> Any:
        assert strategy._runtime.workers is not None
        rank = strategy._runtime.workers.rank
        await strategy.run(count)
        await all_ready.wait()
        if rank == 0:
            lose(strategy)
            return None
        with pytest.raises(WorkerLostError):
            await strategy.run(count)

        @strategy.on_resize
        def fails() -> None:
            raise OSError("no such file")

        strategy.on_resize(lambda: called.append(rank))
        with pytest.raises(OSError, match="no such file"):
            await strategy.shrink()
        return strategy.local_results(await strategy.run(count))

    assert await outcomes(strategies(3, 1), [program] * 3) == [None, (2,), (2,)]
    assert called == []


@pytest.mark.asyncio
async def test_a_loop_that_is_open_over_a_shrink_ends_with_an_error() -> None:
    """It would go on with the shares of the larger group: examples left out, or read twice."""
    ended: dict[int, str] = {}
    all_ready = asyncio.Barrier(3)

    async def program(strategy: Strategy) -> Any:
        assert strategy._runtime.workers is not None
        rank = strategy._runtime.workers.rank
        data = ar.ArrayDataset(np.arange(24), batch_size=3)
        batches = strategy.distribute_dataset(data, ar.InputOptions(sharding="data"))
        iterator = aiter(batches)
        await anext(iterator)
        await all_ready.wait()
        if rank == 0:
            lose(strategy)
            return
        with pytest.raises(WorkerLostError):
            await strategy.run(count)
        await strategy.shrink()
        with pytest.raises(ContextError) as caught:
            await anext(iterator)
        ended[rank] = str(caught.value)
        await batches.aclose()

    await outcomes(strategies(3, 1), [program] * 3)

    assert [ended[rank].count("has lost a worker") for rank in (1, 2)] == [1, 1]


@pytest.mark.asyncio
async def test_on_read_variables_keep_the_components_of_survivors() -> None:
    totals: dict[int, float] = {}
    all_ready = asyncio.Barrier(3)

    async def program(strategy: Strategy) -> Any:
        assert strategy._runtime.workers is not None
        rank = strategy._runtime.workers.rank
        with strategy.scope():
            total = ar.metrics.Sum("total")

        async def step() -> None:
            total.update_state(float(10**rank))
            await me().barrier()

        await strategy.run(step)
        kept = Savepoint({"total": total})
        await all_ready.wait()
        if rank == 1:
            lose(strategy)
            return
        with pytest.raises(WorkerLostError):
            await strategy.run(step)
        await strategy.shrink(kept)
        totals[rank] = float(await total.read())

    await outcomes(strategies(3, 1), [program] * 3)

    assert totals == {0: 101.0, 2: 101.0}


@pytest.mark.explore(schedules=4)
async def test_a_worker_that_does_not_come_to_shrink_is_named() -> None:
    all_ready, is_over = asyncio.Barrier(3), asyncio.Event()
    errors: dict[int, Any] = {}

    made = strategies(3, 1, timeout=30.0)

    async def first(strategy: Strategy) -> Any:
        await strategy.run(count)
        await all_ready.wait()
        with pytest.raises(WorkerLostError):
            await strategy.run(count)
        with pytest.raises(StallError, match="Worker 2 did not come to shrink") as caught:
            await strategy.shrink()
        errors[0] = caught.value.ranks
        is_over.set()

    async def second(strategy: Strategy) -> Any:
        await strategy.run(count)
        await all_ready.wait()
        lose(strategy)

    async def third(strategy: Strategy) -> Any:
        await strategy.run(count)
        await all_ready.wait()
        await is_over.wait()

    await outcomes(made, [first, second, third])
    assert errors == {0: (2,)}


@pytest.mark.asyncio
async def test_bad_calls_change_nothing() -> None:
    async def program(strategy: Strategy) -> Any:
        with pytest.raises(ContextError, match="has lost no worker"):
            await strategy.shrink()
        with pytest.raises(TypeError, match=r"takes an ar\.checkpoint\.Savepoint or None, got 3"):
            await strategy.shrink(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="on_resize takes a function without arguments, got 3"):
            strategy.on_resize(3)  # type: ignore[type-var]

        async def step() -> None:
            await strategy.shrink()

        with pytest.raises(ContextError, match="shrink is a cross-replica method"):
            await strategy.run(step)

        async def merge(_: Any) -> None:
            with pytest.raises(ContextError, match="shrink was to run in a merge function"):
                await strategy.shrink()

        async def merging() -> None:
            await me().merge_call(merge)

        await strategy.run(merging)
        return True

    assert await outcomes(strategies(1, 1), [program]) == [True]


@pytest.mark.asyncio
async def test_savepoints_of_different_states_are_an_error() -> None:
    all_ready = asyncio.Barrier(3)

    async def program(strategy: Strategy) -> Any:
        assert strategy._runtime.workers is not None
        rank = strategy._runtime.workers.rank
        with strategy.scope():
            a, b = ar.Variable(1.0, name="a"), ar.Variable(2.0, name="b")
        await strategy.run(count)
        kept = Savepoint({"a": a} if rank == 0 else {"b": b})
        await all_ready.wait()
        if rank == 1:
            lose(strategy)
            return
        with pytest.raises(WorkerLostError):
            await strategy.run(count)
        await strategy.shrink(kept)

    results = await outcomes(strategies(3, 1), [program] * 3)

    assert isinstance(results[2], CheckpointError)
    assert "Only in the state: b. Only in the checkpoint: a" in str(results[2])
    assert isinstance(results[0], WorkerLostError)


@pytest.mark.asyncio
async def test_the_newest_savepoint_wins_with_slots_that_others_have_not_made() -> None:
    """Worker 0 has completed no step, worker 2 has completed one, with the first use of slots."""
    all_ready = asyncio.Barrier(3)
    learned: dict[int, Any] = {}

    async def program(strategy: Strategy) -> Any:
        assert strategy._runtime.workers is not None
        rank = strategy._runtime.workers.rank
        training = Training(strategy)
        async with training.batches:
            batches = aiter(training.batches)
            await strategy.run(training.step, (await anext(batches),))
            training.settings["steps"] += 1
            if rank == 0:
                training.kept.put_back()  # the step was not completed here
            else:
                training.kept = Savepoint(training.state)
            await all_ready.wait()
            if rank == 1:
                lose(strategy)
                return
            with pytest.raises(WorkerLostError):
                await strategy.run(count)
            await strategy.shrink(training.kept)
            assert training.settings == {"steps": 1}
            await training.to_the_end()
            learned[rank] = training.learned()

    results = await outcomes(strategies(3, 1), [program] * 3)

    assert results == [None] * 3
    assert learned[0] == learned[2] == await learned_alone()


@pytest.mark.explore(schedules=6)
@pytest.mark.parametrize("comes_to_shrink", [False, True])
async def test_a_worker_that_hangs_is_evicted_and_told_so_when_it_comes_back(
    comes_to_shrink: bool,
) -> None:
    """Worker 1 hangs in step 3, or between two steps; the others do that step again."""
    expected = await learned_alone()
    has_gone_on = asyncio.Event()
    told: list[tuple[int, ...]] = []

    async def program(strategy: Strategy) -> Any:
        training = Training(strategy)
        hangs = communicator_of(strategy).rank == 1
        first = training.step

        async def step(batch: Any) -> None:
            if hangs and training.settings["steps"] == 3 and not comes_to_shrink:
                await has_gone_on.wait()
            await first(batch)

        training.step = step  # type: ignore[method-assign]
        async with training.batches:
            while training.settings["steps"] < NUM_STEPS:
                try:
                    if hangs and training.settings["steps"] == 3 and comes_to_shrink:
                        await has_gone_on.wait()
                        await strategy.shrink(training.kept)
                    async for batch in training.batches:
                        await strategy.run(training.step, (batch,))
                        training.settings["steps"] += 1
                        training.kept = Savepoint(training.state)
                        if hangs and training.settings["steps"] == 3 and comes_to_shrink:
                            break
                except StallError as error:
                    told.append(error.ranks)
                    await strategy.shrink(training.kept)
                    has_gone_on.set()
        assert communicator_of(strategy).size == 2
        return training.learned()

    results = await outcomes(strategies(3, 1, timeout=30.0), [program] * 3)

    assert results[0] == results[2] == expected
    assert told == [(1,), (1,)]
    assert isinstance(results[1], WorkerLostError)
    assert results[1].ranks == (1,)
    text = "the others go on without it" if comes_to_shrink else "gone on without worker 1"
    assert text in str(results[1])


@pytest.mark.explore(schedules=6)
async def test_who_does_not_come_to_shrink_is_left_out_when_the_others_come_again() -> None:
    all_ready, has_shrunk = asyncio.Barrier(3), asyncio.Event()

    async def program(strategy: Strategy) -> Any:
        rank = communicator_of(strategy).rank
        await strategy.run(count)
        await all_ready.wait()
        if rank == 1:
            lose(strategy)
            return None
        if rank == 2:
            await has_shrunk.wait()
        with pytest.raises(WorkerLostError):
            await strategy.run(count)
        if rank == 2:
            with pytest.raises(WorkerLostError, match="Worker 2 is the one that was lost"):
                await strategy.shrink()
            return None
        with pytest.raises(StallError, match="Worker 2 did not come to shrink"):
            await strategy.shrink()
        await strategy.shrink()
        has_shrunk.set()
        return strategy.local_results(await strategy.run(count))

    assert await outcomes(strategies(3, 1, timeout=30.0), [program] * 3) == [(1,), None, None]


@pytest.mark.explore(schedules=20)
async def test_a_survivor_that_closes_is_not_waited_for() -> None:
    """There is no timeout here: whether it has closed before the other came, or does later."""
    all_ready = asyncio.Barrier(3)

    async def program(strategy: Strategy) -> Any:
        rank = communicator_of(strategy).rank
        await strategy.run(count)
        await all_ready.wait()
        if rank == 2:
            lose(strategy)
            return None
        with pytest.raises(WorkerLostError):
            await strategy.run(count)
        if rank == 1:
            return None  # which closes its strategy
        await strategy.shrink()
        return strategy.num_replicas_in_sync

    results = await outcomes(strategies(3, 1), [program] * 3)
    assert results == [1, None, None]


@pytest.mark.asyncio
async def test_a_survivor_that_closes_while_it_waits_in_shrink_leaves_it_to_the_others() -> None:
    all_ready, has_closed = asyncio.Barrier(3), asyncio.Event()

    async def program(strategy: Strategy) -> Any:
        rank = communicator_of(strategy).rank
        await strategy.run(count)
        await all_ready.wait()
        if rank == 2:
            lose(strategy)
            return None
        with pytest.raises(WorkerLostError):
            await strategy.run(count)
        if rank == 0:
            shrinking = asyncio.ensure_future(strategy.shrink())
            await idle()
            await strategy.aclose()
            has_closed.set()
            with pytest.raises(ContextError, match="was closed while shrink waited"):
                await shrinking
            assert strategy._runtime.workers is not None
            return strategy._runtime.workers.is_broken
        await has_closed.wait()
        await strategy.shrink()
        return strategy.local_results(await strategy.run(count))

    assert await outcomes(strategies(3, 1), [program] * 3) == [False, (1,), None]


@pytest.mark.asyncio
async def test_after_a_cancelled_shrink_errors_say_so_and_do_not_advise_it() -> None:
    all_ready, is_over = asyncio.Barrier(3), asyncio.Event()

    async def program(strategy: Strategy) -> Any:
        rank = communicator_of(strategy).rank
        await strategy.run(count)
        await all_ready.wait()
        if rank == 2:
            lose(strategy)
            return None
        with pytest.raises(WorkerLostError):
            await strategy.run(count)
        with pytest.raises(WorkerLostError, match=r"await strategy\.shrink\(\)"):
            await strategy.run(count)
        if rank == 1:
            await is_over.wait()
            return None
        shrinking = asyncio.ensure_future(strategy.shrink())
        await idle()
        shrinking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await shrinking
        with pytest.raises(WorkerLostError, match="shrink was cancelled here") as caught:
            await strategy.run(count)
        assert "strategy.shrink()" not in str(caught.value)
        with pytest.raises(WorkerLostError, match="shrink was cancelled here"):
            await strategy.shrink()
        is_over.set()
        return None

    assert await outcomes(strategies(3, 1), [program] * 3) == [None] * 3


@pytest.mark.asyncio
async def test_shrink_is_not_advised_where_a_worker_has_left_by_an_exception() -> None:
    """It works, as far as the engine knows; all start again."""

    async def program(strategy: Strategy) -> Any:
        await strategy.run(count)
        if communicator_of(strategy).rank:
            raise OSError("disk full")
        with pytest.raises(WorkerLostError, match="OSError: disk full"):
            await strategy.run(count)
        with pytest.raises(WorkerLostError, match="from the newest checkpoint") as caught:
            await strategy.run(count)
        assert "strategy.shrink()" not in str(caught.value)
        with pytest.raises(ContextError, match=r"lost no worker.*disk full.*newest checkpoint"):
            await strategy.shrink()

    first, second = await outcomes(strategies(2, 1), [program] * 2)
    assert first is None
    assert isinstance(second, OSError)
