"""Workers that are added, or take the place of lost ones, go on with the state of the others."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.checkpoint import Savepoint
from aioreplica.cluster import LocalCommunicator
from aioreplica.collectives import no_data
from aioreplica.errors import ContextError, MergeMismatchError, StallError, WorkerLostError
from aioreplica.strategies import MultiWorkerMirroredStrategy
from tests.strategies.test_multi_worker_shrink import (
    BATCH,
    NUM_STEPS,
    Training,
    count,
    learned_alone,
    lose,
)
from tests.strategies.workers import communicator_of, only

Strategy = MultiWorkerMirroredStrategy
Program = Callable[[Strategy], Awaitable[Any]]


async def outcomes_of_all(
    size: int,
    program: Program,
    *,
    timeout: float | None = None,
    newcomer: Program | None = None,
) -> list[Any]:
    """Run a program on workers, and on those that are added; in the order in which they began."""
    tasks: list[asyncio.Task[Any]] = []

    async def worker(strategy: Strategy, program: Program) -> Any:
        async with strategy:
            return await program(strategy)

    def start(communicator: LocalCommunicator) -> None:
        with only(size):
            strategy = Strategy(communicator)
        own = newcomer if communicator.is_new and newcomer is not None else program
        tasks.append(asyncio.ensure_future(worker(strategy, own)))

    for communicator in LocalCommunicator.group(size, timeout=timeout, spawn=start):
        start(communicator)
    results: list[Any] = []
    while len(results) < len(tasks):
        results += await asyncio.gather(tasks[len(results)], return_exceptions=True)
    return results


def rank_of(strategy: Strategy) -> int:
    assert strategy._runtime.workers is not None
    return strategy._runtime.workers.rank


def kept_of(strategy: Strategy, value: float = 0.0) -> tuple[Any, Savepoint]:
    """Make a variable, and a savepoint of it."""
    with strategy.scope():
        variable = ar.Variable(value, name="a")
    return variable, Savepoint([variable])


@pytest.mark.asyncio
@pytest.mark.parametrize("sharding", ["data", "file"])
async def test_a_new_worker_goes_on_with_the_state_of_the_others(sharding: str) -> None:
    """Two workers do two steps, and three the others: each example counts once, as for one."""
    expected = await learned_alone()
    sizes: list[tuple[int, int]] = []

    async def program(strategy: Strategy) -> Any:
        training = Training(strategy, sharding)
        strategy.on_resize(lambda: sizes.append((rank_of(strategy), strategy.num_replicas_in_sync)))
        async with training.batches:
            if strategy.num_replicas_in_sync == 2:
                async for batch in training.batches:
                    await strategy.run(training.step, (batch,))
                    training.settings["steps"] += 1
                    if training.settings["steps"] == 2:
                        break
                training.kept = Savepoint(training.state)
            await strategy.grow(3, training.kept)
            assert training.settings["steps"] == 2
            await strategy.grow(3, training.kept)  # there are three already
            await training.to_the_end()
        await strategy.check_in_sync(strategy.trainable_variables)
        return rank_of(strategy), training.learned()

    results = await outcomes_of_all(2, program)

    assert [rank for rank, _ in results] == [0, 1, 2]
    if sharding == "data":
        assert [learned for _, learned in results] == [expected] * 3
    for _, (seen, *_) in results:  # with files the steps are other ones
        assert sharding == "data" or seen == [1.0] * (BATCH * NUM_STEPS)
    assert sorted(sizes) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.xslow
@pytest.mark.explore(
    schedules=20, faults=art.Faults().lose_worker("worker:1").lose_worker("worker:4")
)
async def test_a_lost_worker_is_replaced_whenever_it_is_lost() -> None:
    """So is worker 4, which has come in its place."""
    expected = await learned_alone()

    async def program(strategy: Strategy) -> Any:
        training = Training(strategy)
        async with training.batches:
            while True:
                try:
                    await strategy.grow(3, training.kept)
                    await training.to_the_end()
                    break
                except WorkerLostError:
                    await strategy.shrink(training.kept)
        await strategy.check_in_sync(strategy.trainable_variables)
        return training.learned(), strategy.num_replicas_in_sync

    results = await outcomes_of_all(3, program)

    assert len(results) in (3, 4, 5)
    for number, result in enumerate(results):
        if number in (1, 3):
            continue
        if not isinstance(result, BaseException):
            assert result[0] == expected, (number, result)
            assert result[1] in (2, 3)
        else:  # one was lost when all others had finished
            assert isinstance(result, WorkerLostError | ContextError), results


@pytest.mark.asyncio
async def test_bad_calls_change_nothing() -> None:
    async def program(strategy: Strategy) -> Any:
        _, kept = kept_of(strategy)
        with pytest.raises(TypeError, match=r"grow takes an ar\.checkpoint\.Savepoint, got None"):
            await strategy.grow(3, None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="grow takes a number of workers, got 3j"):
            await strategy.grow(3j, kept)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="There are 2 workers already, got 1"):
            await strategy.grow(1, kept)

        async def step() -> None:
            await strategy.grow(3, kept)

        with pytest.raises(ContextError, match="grow is a cross-replica method"):
            await strategy.run(step)
        with pytest.raises(MergeMismatchError, match="grow"):
            await strategy.grow(3 + rank_of(strategy), kept)
        return strategy.local_results(await strategy.run(count))

    assert await outcomes_of_all(2, program) == [(2,), (2,)]


@pytest.mark.asyncio
@pytest.mark.parametrize("spawns", [False, True])
async def test_workers_that_cannot_be_started_are_an_error_and_the_group_works_on(
    spawns: bool,
) -> None:
    def fails(_communicator: LocalCommunicator) -> None:
        raise OSError("no room")

    async def program(communicator: LocalCommunicator) -> Any:
        with only(2):
            strategy = Strategy(communicator)
        async with strategy:
            said = "Worker 2 could not be started: OSError" if spawns else "cannot start workers"
            held = kept_of(strategy)  # the variable too: a collector may take it on one of them
            with pytest.raises(ContextError, match=said):
                await strategy.grow(3, held[1])
            return strategy.local_results(await strategy.run(count))

    group = LocalCommunicator.group(2, spawn=fails if spawns else None)
    assert await asyncio.gather(*map(program, group)) == [(2,), (2,)]


@pytest.mark.asyncio
async def test_a_new_worker_that_does_something_else_first_is_told_and_others_go_on() -> None:
    async def program(strategy: Strategy) -> Any:
        variable, kept = kept_of(strategy, 7.0)
        with pytest.raises(WorkerLostError) as caught:
            await strategy.grow(3, kept)
        await strategy.shrink(kept)
        return caught.value.ranks, float(variable.value), strategy.num_replicas_in_sync

    async def newcomer(strategy: Strategy) -> Any:
        await strategy.run(count)

    results = await outcomes_of_all(2, program, newcomer=newcomer)

    assert results[:2] == [((2,), 7.0, 2)] * 2
    assert isinstance(results[2], ContextError)
    assert "Worker 2 was started by `strategy.grow`" in str(results[2])


@pytest.mark.asyncio
async def test_a_worker_that_is_lost_while_others_come_to_grow_is_told_to_them() -> None:
    async def program(strategy: Strategy) -> Any:
        _, kept = kept_of(strategy, float(rank_of(strategy)))
        await strategy.run(count)
        if rank_of(strategy) == 1:
            lose(strategy)
            return None
        with pytest.raises(WorkerLostError) as caught:
            await strategy.grow(4, kept)
        await strategy.shrink(kept)
        await strategy.grow(3, kept)
        return caught.value.ranks, strategy.num_replicas_in_sync

    async def newcomer(strategy: Strategy) -> Any:
        variable, kept = kept_of(strategy, 5.0)
        await strategy.grow(3, kept)
        return float(variable.value), strategy.extended.worker_devices

    results = await outcomes_of_all(3, program, newcomer=newcomer)

    assert results[:3] == [((1,), 3), None, ((1,), 3)]
    value, (device,) = results[3]
    assert value == 0.0
    assert str(device) == "cpu:1"  # that of the worker whose place it has taken


@pytest.mark.explore(schedules=6)
async def test_new_workers_that_never_come_are_named_and_the_others_shrink_without() -> None:
    """Worker 2 comes, worker 3 does not: it is left out, and told so when it comes."""
    have_shrunk = asyncio.Event()

    async def program(strategy: Strategy) -> Any:
        variable, kept = kept_of(strategy, 7.0)
        with pytest.raises(StallError, match="Worker 3 did not come to the first meeting") as late:
            await strategy.grow(4, kept)
        await strategy.shrink(kept)
        have_shrunk.set()
        found = strategy.local_results(await strategy.run(count))
        return late.value.ranks, rank_of(strategy), float(variable.value), found

    async def newcomer(strategy: Strategy) -> Any:
        if rank_of(strategy) == 2:
            return await program(strategy)
        await have_shrunk.wait()
        with pytest.raises(WorkerLostError, match="gone on without worker 3"):
            await strategy.grow(4, kept_of(strategy)[1])
        return "late"

    results = await outcomes_of_all(2, program, newcomer=newcomer, timeout=30.0)

    assert results == [*(((3,), rank, 7.0, (3,)) for rank in range(3)), "late"]


@pytest.mark.asyncio
async def test_who_is_cancelled_in_grow_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 is cancelled while it waits for worker 0, with which the others go on."""
    resized = LocalCommunicator._resized
    is_cancelled, have_gone_on = asyncio.Event(), asyncio.Event()

    async def waits(communicator: LocalCommunicator, num_new: int) -> Any:
        if communicator.rank == 0:
            await is_cancelled.wait()
        return await resized(communicator, num_new)

    monkeypatch.setattr(LocalCommunicator, "_resized", waits)

    async def program(strategy: Strategy) -> Any:
        variable, kept = kept_of(strategy, 7.0)
        rank = rank_of(strategy)
        if rank == 1:
            group = communicator_of(strategy)._group
            growing = asyncio.ensure_future(strategy.grow(4, kept))
            while rank not in group._coming:
                await asyncio.sleep(0)
            growing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await growing
            is_cancelled.set()
            with pytest.raises(WorkerLostError, match="cannot meet the other workers any more"):
                await strategy.run(count)
            await have_gone_on.wait()
            with pytest.raises(WorkerLostError, match="grow was cancelled here"):
                await strategy.shrink(kept)
            return "left"
        await strategy.grow(4, kept)
        have_gone_on.set()
        return rank_of(strategy), float(variable.value)

    results = await outcomes_of_all(3, program)

    assert results == [(0, 7.0), "left", (1, 7.0), (2, 7.0)]


@pytest.mark.asyncio
@pytest.mark.parametrize("num_cycles", [1, 2, 3])
async def test_who_is_cancelled_while_the_others_agree_to_grow_is_left_behind(
    num_cycles: int,
) -> None:
    """Its agreement may be on the way: the others would wait for it, and it for them."""

    async def program(strategy: Strategy) -> Any:
        variable, kept = kept_of(strategy, 7.0)
        if not communicator_of(strategy).is_new:
            await strategy.run(count)
        growing = asyncio.ensure_future(strategy.grow(4, kept))
        if rank_of(strategy) == 1:
            for _ in range(num_cycles):
                await asyncio.sleep(0)
            growing.cancel()
        await growing
        return rank_of(strategy), float(variable.value)

    results = await asyncio.wait_for(outcomes_of_all(3, program), 300)

    assert isinstance(results.pop(1), asyncio.CancelledError)
    assert results == [(0, 7.0), (1, 7.0), (2, 7.0)]


@pytest.mark.asyncio
async def test_errors_while_states_are_exchanged_name_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def program(strategy: Strategy) -> None:
        _, savepoint = kept_of(strategy)
        await strategy.grow(2, savepoint)

    async def newcomer(strategy: Strategy) -> None:
        _, savepoint = kept_of(strategy)

        async def do_something_else(workers: Any, *_: object) -> None:
            async with workers.operation("something", "else") as turn:
                await turn.exchange(b"", no_data)

        monkeypatch.setattr(strategy, "_resized", do_something_else)
        await strategy.grow(2, savepoint)

    results = await outcomes_of_all(1, program, newcomer=newcomer)

    assert [type(result) for result in results] == [MergeMismatchError] * 2
    assert "grow" in str(results[0])
    assert "shrink" not in str(results[0])


@pytest.mark.asyncio
async def test_an_interrupt_while_a_worker_is_started_leaves_nobody_waiting() -> None:
    class Interrupt(BaseException):
        pass

    def start(_communicator: LocalCommunicator) -> None:
        raise Interrupt

    loop = asyncio.get_running_loop()
    said: list[Any] = []
    loop.set_exception_handler(lambda _loop, context: said.append(context["exception"]))
    with only(2):
        strategies = [Strategy(each) for each in LocalCommunicator.group(2, spawn=start)]

    async def program(strategy: Strategy) -> Any:
        async with strategy:  # they close together
            _, savepoint = kept_of(strategy)
            with pytest.raises(ContextError, match="could not be started: Interrupt"):
                await strategy.grow(3, savepoint)
        return 1

    assert await asyncio.gather(*map(program, strategies)) == [1, 1]
    assert [type(each) for each in said] == [Interrupt]


@pytest.mark.asyncio
async def test_who_closes_while_it_waits_in_grow_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker 1 is closed while it waits for worker 0, which goes on with the new one."""
    resized, has_closed = LocalCommunicator._resized, asyncio.Event()
    has_come = asyncio.Event()

    async def waits(communicator: LocalCommunicator, num_new: int) -> Any:
        if communicator.rank == 0:
            await has_closed.wait()
        else:
            has_come.set()
        return await resized(communicator, num_new)

    monkeypatch.setattr(LocalCommunicator, "_resized", waits)

    async def program(strategy: Strategy) -> Any:
        _, kept = kept_of(strategy)
        if strategy._runtime.workers is not None and rank_of(strategy) == 1:
            growing = asyncio.ensure_future(strategy.grow(3, kept))
            await has_come.wait()
            await strategy.aclose()
            with pytest.raises(ContextError, match="was closed while grow waited"):
                await growing
            has_closed.set()
            return "left"
        await strategy.grow(3, kept)
        return strategy.local_results(await strategy.run(count))

    async def newcomer(strategy: Strategy) -> Any:
        _, kept = kept_of(strategy)
        await strategy.grow(3, kept)
        return strategy.local_results(await strategy.run(count))

    assert await outcomes_of_all(2, program, newcomer=newcomer) == [(2,), "left", (2,)]


@pytest.mark.asyncio
async def test_who_is_cancelled_while_its_groups_are_closed_leaves_no_communicator_open() -> None:
    before: list[Any] = []

    async def program(strategy: Strategy) -> None:
        variable, savepoint = kept_of(strategy)
        del variable
        await strategy.run(count)
        before.append(communicator_of(strategy))
        workers = strategy._runtime.workers
        assert workers is not None
        with mock.patch.object(workers.groups, "aclose", side_effect=asyncio.CancelledError):
            await strategy.grow(2, savepoint)

    async def newcomer(strategy: Strategy) -> None:
        _, savepoint = kept_of(strategy)
        await strategy.grow(2, savepoint)

    results = await outcomes_of_all(1, program, newcomer=newcomer)

    assert isinstance(results[0], asyncio.CancelledError)
    assert isinstance(results[1], WorkerLostError)
    assert before[0].is_closed
