"""Reductions that were started, over workers: they go together as far as all have started them."""

import asyncio
import random
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.collectives import CommunicationOptions, Float16, Summands
from aioreplica.errors import MergeMismatchError, WorkerLostError
from aioreplica.strategies import MultiWorkerMirroredStrategy
from aioreplica.tree import flatten
from aioreplica.typing import ReduceOp
from tests.strategies.workers import communicator_of, on_workers, outcomes, strategies

NUM = 24
PAUSES = [(), (0, 3, 4, 16), (2, 9, 10, 11, 20)]


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def rank_of(strategy: MultiWorkerMirroredStrategy) -> int:
    workers = strategy._runtime.workers
    assert workers is not None
    return workers.rank


def brought(index: int) -> tuple[ReduceOp, Any]:
    """Numbers, trees, halves and arrays in the slot and behind it; sums that round."""
    own = me().replica_id_in_sync_group
    op = ReduceOp.MEAN if 8 <= index < 11 else ReduceOp.MAX if index == 17 else ReduceOp.SUM
    value = np.linspace(0.1 + own, index + 1 / 3, 700)
    kinds = (
        0.1 * (own + 1) + index, {"a": value.astype(np.float32), "b": [value[:3], own]},
        value.astype(np.float16), np.arange(700) * own, value, value.reshape(-1, 7) + 0.1,
    )  # fmt: skip
    return op, kinds[index % 6]


async def one_by_one() -> list[Any]:
    return [await me().all_reduce(*brought(index)) for index in range(NUM)]


async def all_started(pauses: tuple[int, ...]) -> list[Any]:
    handles, awaited = {}, {}
    for index in range(NUM):
        if index == 13:
            awaited[index] = await me().all_reduce(*brought(index))
        else:
            handles[index] = me().start_all_reduce(*brought(index))
        if index in pauses:
            await asyncio.sleep(0)
        if index == 19:
            awaited[6] = await handles[6]
            await me().barrier()
    awaited |= {index: await handle for index, handle in handles.items()}
    return [awaited[index] for index in range(NUM)]


@pytest.mark.slow
@pytest.mark.explore(schedules=8)
@pytest.mark.parametrize(("num_workers", "num_replicas"), [(2, 1), (2, 2), (3, 1)])
async def test_reductions_started_at_other_times_give_what_each_alone_gives(
    num_workers: int, num_replicas: int
) -> None:
    async def program(strategy: MultiWorkerMirroredStrategy) -> None:
        expected = strategy.local_results(await strategy.run(one_by_one))
        before = communicator_of(strategy).statistics().calls
        results = await strategy.run(all_started, (PAUSES[rank_of(strategy)],))
        assert communicator_of(strategy).statistics().calls - before < NUM * 2 // 3
        for found, right in zip(strategy.local_results(results), expected, strict=True):
            for a, b in zip(flatten(found)[0], flatten(right)[0], strict=True):
                assert type(a) is type(b)
                assert np.asarray(a).dtype == np.asarray(b).dtype
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    await on_workers(num_workers, num_replicas, program)


@pytest.mark.explore(schedules=15)
async def test_one_that_differs_is_named_and_those_before_it_have_their_results() -> None:
    found: list[list[Any]] = [[], []]

    async def step(rank: int) -> None:
        sizes = [700, 700, 700 + rank, 700]
        handles = [me().start_all_reduce("sum", np.ones(size)) for size in sizes]
        for handle in handles:
            found[rank].append((await handle).sum())

    results = await outcomes(strategies(2, 1), [lambda each: each.run(step, (rank_of(each),))] * 2)

    assert found == [[1400.0, 1400.0]] * 2
    assert [type(each) for each in results] == [MergeMismatchError] * 2
    assert "disagree in start_all_reduce #3 (SUM)" in str(results[0])
    assert str(results[0]) == str(results[1])
    for error in results:
        [note] = [each for each in error.__notes__ if "by the merge of" in each]
        assert "start_all_reduce #3" in note


@pytest.mark.explore(schedules=15)
async def test_a_cancelled_wait_ends_with_what_is_being_sent_not_with_what_was_started_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker 0 has started two where worker 1 starts its second once that wait has ended."""
    monkeypatch.setattr(Summands, "give_back", lambda _self: False)  # the engine reads them
    ended = asyncio.Event()

    async def step(rank: int) -> list[float]:
        ctx = me()
        await ctx.barrier()
        handles = [ctx.start_all_reduce("sum", np.full(50_000, rank + 1.0))]
        if rank:
            await handles[0]
            await ended.wait()
        handles.append(ctx.start_all_reduce("sum", np.full(50_000, rank + 2.0)))
        if not rank:
            waiting = asyncio.ensure_future(_wait(handles[0]))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            ended.set()
        return [float((await handle)[-1]) for handle in handles]

    async def program(strategy: MultiWorkerMirroredStrategy) -> Any:
        return strategy.local_results(await strategy.run(step, (rank_of(strategy),)))

    assert await on_workers(2, 1, program) == [([3.0, 5.0],)] * 2


async def _wait(handle: ar.Handle) -> Any:
    return await handle


# ---- neighbours in the queue that do not join ----------------------------------------------------

HALF = CommunicationOptions(compression=Float16())
KINDS = (*["start"] * 8, "half", "half", "scatter", "scatter", "all_reduce", "barrier")
OPS = ("sum", "sum", "sum", "mean", "max")
DTYPES = ("f8", "f8", "f8", "f4", "f2", "i4", "c16", "number")
SIZES = (1, 60, 700, 700, 3000, 20_000)


def program_of(seed: int) -> Iterator[tuple[str, int, str, str, int]]:
    """Yield the kind of each operation, its number, operator, dtype and size."""
    rng = random.Random(seed)
    for number in range(0, 8 * rng.randint(8, 20), 8):
        kind = rng.choices(["start", "half", "scatter", "all_reduce", "barrier"], [8, 2, 2, 1, 1])[
            0
        ]
        op = rng.choice(OPS) if seed % 2 else "sum"
        dtype = rng.choice(DTYPES if seed % 3 else DTYPES[:4])
        if dtype == "c16" and op == "max":
            op = "sum"
        yield kind, number, op, "f4" if kind == "half" else dtype, rng.choice(SIZES)


def brings(number: int, dtype: str, size: int) -> Any:
    rng = np.random.default_rng([number, me().replica_id_in_sync_group])
    value = rng.standard_normal(size) * 9
    return float(value[0]) if dtype == "number" else value.astype(dtype)


def bits(value: Any) -> tuple[Any, ...]:
    return type(value), np.asarray(value).dtype, np.shape(value), np.asarray(value).tobytes()


async def scatter(number: int, op: str, dtype: str, size: int) -> Any:
    dtype = "f8" if dtype == "number" else dtype
    return await me().reduce_scatter(op, brings(number, dtype, 6 * size))


async def each_alone(seed: int) -> dict[int, Any]:
    found = {}
    for kind, number, op, dtype, size in program_of(seed):
        if kind == "scatter":
            found[number] = bits(await scatter(number, op, dtype, size))
            for own in range(number + 1, number + 4):
                found[own] = bits(await me().all_reduce(op, brings(own, dtype, size)))
        elif kind != "barrier":
            options = HALF if kind == "half" else None
            found[number] = bits(await me().all_reduce(op, brings(number, dtype, size), options))
    return found


async def as_it_comes(seed: int, rank: int) -> dict[int, Any]:
    """Start all, with pauses of this worker's own, and waits that are cancelled."""
    turns = random.Random(f"{seed} {rank}")
    handles: dict[int, ar.Handle] = {}
    found: dict[int, Any] = {}

    async def pause() -> None:
        for _ in range(turns.choice([0, 0, 1, 3, 8])):
            await asyncio.sleep(0)

    async def scatter_before(is_called: asyncio.Event, *args: Any) -> Any:
        is_called.set()
        return await scatter(*args)

    for kind, number, op, dtype, size in program_of(seed):
        if kind == "scatter":
            is_called = asyncio.Event()
            before = asyncio.ensure_future(scatter_before(is_called, number, op, dtype, size))
            await is_called.wait()
            for own in range(number + 1, number + 4):
                handles[own] = me().start_all_reduce(op, brings(own, dtype, size))
                await pause()
            found[number] = await before
        elif kind == "all_reduce":
            found[number] = await me().all_reduce(op, brings(number, dtype, size))
        elif kind == "barrier":
            await me().barrier()
        else:
            options = HALF if kind == "half" else None
            handles[number] = me().start_all_reduce(op, brings(number, dtype, size), options)
        await pause()
        if handles and turns.random() < 0.2:
            waiting = asyncio.ensure_future(_wait(turns.choice(list(handles.values()))))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
    order = list(handles)
    turns.shuffle(order)
    found |= {number: await handles[number] for number in order}
    return {number: bits(each) for number, each in found.items()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Replica 0. two tasks call")  # an event orders them
@pytest.mark.explore(schedules=6)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.xslow] * (seed > 2)) for seed in range(8)]
)
async def test_whatever_is_queued_beside_each_other_gives_the_bits_of_one_by_one(seed: int) -> None:
    """Compressed beside plain, scattered beside not, other operators, dtypes, turns."""

    async def step(rank: int) -> None:
        right = await each_alone(seed)
        assert await as_it_comes(seed, rank) == right

    num_workers, num_replicas = ((2, 1), (3, 1), (2, 2))[seed % 3]
    await on_workers(num_workers, num_replicas, lambda each: each.run(step, (rank_of(each),)))


@pytest.mark.asyncio
async def test_those_behind_another_kind_that_only_some_have_started_are_sent_once() -> None:
    """Worker 0 has queued five where worker 1 has three, and the first two end with the third."""
    has_started, has_scattered = asyncio.Event(), asyncio.Event()

    async def step(rank: int) -> list[float]:
        ctx, handles = me(), list[ar.Handle]()
        await ctx.barrier()
        if rank:
            await has_started.wait()
        handles.append(ctx.start_all_reduce("sum", np.full(700, rank + 1.0)))

        async def start_behind() -> None:
            await asyncio.sleep(0)
            handles.append(ctx.start_all_reduce("sum", np.full(700, rank + 2.0)))
            if rank:
                await has_scattered.wait()
            handles.extend(ctx.start_all_reduce("sum", np.full(700, rank + k)) for k in (3.0, 4.0))
            has_started.set()

        behind = asyncio.ensure_future(start_behind())
        part = await ctx.reduce_scatter("sum", np.full(700, rank + 5.0))
        has_scattered.set()
        await behind
        sums = [float((await handle)[-1]) for handle in handles]
        sums += [float((await ctx.all_reduce("sum", np.full(700, rank + k)))[-1]) for k in (6, 7)]
        return [float(part[-1]), *sums]

    async def program(strategy: MultiWorkerMirroredStrategy) -> Any:
        results = strategy.local_results(await strategy.run(step, (rank_of(strategy),)))
        return results, communicator_of(strategy).statistics().calls

    found = await on_workers(2, 1, program)
    assert [results for results, _ in found] == [([11.0, 3.0, 5.0, 7.0, 9.0, 13.0, 15.0],)] * 2
    assert found[0][1] == found[1][1]


@pytest.mark.explore(schedules=15)
async def test_an_error_of_one_is_its_own_and_what_goes_with_it_has_its_result() -> None:
    """Of a small sum, adding up is part of carrying it, and nothing is sent after an error."""

    async def step(rank: int) -> list[Any]:
        ctx, handles = me(), list[ar.Handle]()
        await ctx.barrier()
        with np.errstate(over="raise"):
            for value in (1.0, 3e38, 3.0):
                handles.append(ctx.start_all_reduce("sum", np.full(9, value, np.float32)))
            if not rank:
                handles.append(ctx.start_all_reduce("sum", np.ones(9, np.float32)))
        return await asyncio.gather(*map(_wait, handles), return_exceptions=True)

    async def program(strategy: MultiWorkerMirroredStrategy) -> Any:
        [found] = strategy.local_results(await strategy.run(step, (rank_of(strategy),)))
        return [each if isinstance(each, Exception) else float(each[-1]) for each in found]

    for rank, found in enumerate(await on_workers(2, 1, program)):
        assert found[0] == 2.0
        assert isinstance(found[1], FloatingPointError)
        assert [each for each in found[1].__notes__ if "start_all_reduce #3" in each]
        assert found[2] == 6.0
        assert [type(each) for each in found[3:]] == [WorkerLostError][rank:]


# ---- many of them --------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("is_read", [False, True], ids=["waits", "is read"])
@pytest.mark.parametrize("is_awaited", [False, True], ids=["started", "awaited"])
async def test_the_end_of_a_run_with_many_looks_at_each_a_few_times(
    is_read: bool, is_awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num, looks = 300, list[int]()
    give_back = Summands.give_back

    def counted(summands: Summands) -> bool:
        looks.append(1)
        return give_back(summands) and not is_read

    monkeypatch.setattr(Summands, "give_back", counted)
    is_over = asyncio.Event()

    async def step(rank: int) -> None:
        await me().barrier()
        if rank:
            await is_over.wait()
            raise KeyError
        handles = [me().start_all_reduce("sum", np.ones(700)) for _ in range(num)]
        if is_awaited:
            tasks = [asyncio.ensure_future(_wait(handle)) for handle in handles]
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)
        is_over.set()
        raise ZeroDivisionError

    results = await outcomes(strategies(2, 1), [lambda each: each.run(step, (rank_of(each),))] * 2)

    assert isinstance(results[0], ZeroDivisionError)
    assert num <= len(looks) <= 4 * num


@pytest.mark.asyncio
async def test_a_stream_of_them_keeps_no_input_that_has_been_reduced() -> None:
    """Worker 0 has always started one more than worker 1, so its exchange never ends."""

    async def step(rank: int) -> list[int]:
        inputs = list[weakref.ref[Any]]()

        def start() -> ar.Handle:
            value = np.ones(700)
            inputs.append(weakref.ref(value))
            return me().start_all_reduce("sum", value)

        handle = start()
        for _ in range(20):
            behind = None if rank else start()
            await handle
            handle = behind or start()
        kept = [index for index, each in enumerate(inputs) if each() is not None]
        await handle
        return kept

    async def program(strategy: MultiWorkerMirroredStrategy) -> Any:
        return strategy.local_results(await strategy.run(step, (rank_of(strategy),)))

    for (kept,) in await on_workers(2, 1, program):
        assert min(kept) > 15


@pytest.mark.asyncio
async def test_the_lane_looks_at_the_queue_while_the_event_loop_adds_to_it() -> None:
    """Without a GIL a copy of a deque fails then, and the next item is all that is safe."""

    class Growing(deque[Any]):
        def copy(self) -> Any:
            raise RuntimeError("deque mutated during iteration")

        __copy__ = copy

    async def step() -> list[Any]:
        handles = [me().start_all_reduce(("sum", "mean")[i % 2], np.ones(4) * i) for i in range(12)]
        return [(await handle)[0] for handle in handles]

    async def program(strategy: MultiWorkerMirroredStrategy) -> Any:
        workers = strategy._runtime.workers
        assert workers is not None
        workers.queue = Growing()
        return strategy.local_results(await strategy.run(step))[0]

    expected = [i if i % 2 else 2 * i for i in range(12)]
    assert await on_workers(2, 1, program) == [expected, expected]
