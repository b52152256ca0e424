"""Operations across workers: one at a time, to their end, whoever waits for them."""

import asyncio
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import pytest

from aioreplica.cluster import Communicator, LocalCommunicator, Workers
from aioreplica.collectives import Summands, Turn, no_data, reduce_across
from aioreplica.errors import WorkerLostError
from aioreplica.typing import ReduceOp

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]


def both_workers() -> tuple[list[Workers], tuple[LocalCommunicator, ...]]:
    return workers_of_a_group(2)


def workers_of_a_group(size: int) -> tuple[list[Workers], tuple[LocalCommunicator, ...]]:
    group = LocalCommunicator.group(size)

    def workers_of(communicator: LocalCommunicator) -> Workers:
        async def connect() -> Communicator:
            return communicator

        return Workers(connect, communicator.rank, size, 1, "a strategy", communicator)

    return [workers_of(each) for each in group], group


async def in_turn(workers: Workers, do: Any) -> Any:
    async with workers.operation("op", "") as turn:
        return await do(turn)


async def close_all(all_workers: list[Workers]) -> None:
    await asyncio.gather(*(each.aclose() for each in all_workers))


async def test_a_cancelled_wait_leaves_the_operation_to_the_others() -> None:
    all_workers, _ = both_workers()
    first, second = all_workers

    async def give_up(turn: Turn) -> bool:
        exchange = turn.exchange(b"a", no_data)
        exchange.cancel()
        return exchange.cancelled()

    assert await in_turn(first, give_up)
    assert await in_turn(second, lambda turn: turn.exchange(b"b", no_data)) == [b"a", b"b"]
    await close_all(all_workers)


async def test_the_next_operation_begins_when_the_one_before_is_over_on_this_worker() -> None:
    all_workers, _group = both_workers()
    began: list[str] = []

    def noting(name: str) -> Any:
        async def carry(wire: Any, slots: list[bytes]) -> list[bytes]:
            began.append(name)
            for _ in range(3):
                await wire.barrier()
            began.append(f"{name} over")
            return slots

        return carry

    async def two(turn: Turn) -> None:
        exchanges = [turn.exchange(b"", noting(name)) for name in ("one", "two")]
        exchanges[0].cancel()
        await exchanges[1]

    await asyncio.gather(*(in_turn(each, two) for each in all_workers))
    assert sorted(began[:4]) == ["one", "one", "one over", "one over"]
    assert [name for name in began if name.startswith("two")] == ["two", "two", *["two over"] * 2]
    await close_all(all_workers)


async def test_an_exchange_that_was_cancelled_before_its_turn_is_not_sent() -> None:
    all_workers, group = both_workers()

    async def steps(workers: Workers) -> list[bytes]:
        async with workers.run("step") as run:
            with run.turn("first", "", 1) as first, run.turn("second", "", 2) as second:
                early = second.exchange(b"never", no_data)
                early.cancel()
                return await first.exchange(b"now", no_data)

    found = await asyncio.gather(*map(steps, all_workers))
    assert found == [[b"now", b"now"]] * 2
    greeting, exchange = 1, 1
    assert [each.statistics().calls for each in group] == [greeting + exchange] * 2
    await close_all(all_workers)


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_error_of_the_engine_ends_the_group(is_async: bool) -> None:
    all_workers, _ = both_workers()

    def carry(_wire: Any, _slots: list[bytes]) -> list[bytes]:
        raise ZeroDivisionError("in carry")

    async def carry_later(wire: Any, slots: list[bytes]) -> list[bytes]:
        return carry(wire, slots)

    wrong: Any = carry_later if is_async else carry
    carries = [wrong, no_data]
    found = await asyncio.gather(
        *(
            in_turn(workers, lambda turn, carry=carry: turn.exchange(b"", carry))
            for workers, carry in zip(all_workers, carries, strict=True)
        ),
        return_exceptions=True,
    )
    assert isinstance(found[0], ZeroDivisionError)
    assert all_workers[0].is_broken
    with pytest.raises(WorkerLostError, match="in carry"):
        await in_turn(all_workers[1], lambda turn: turn.exchange(b"", no_data))
    await close_all(all_workers)


async def test_a_wait_that_is_cancelled_while_arrays_are_read_ends_with_the_operation() -> None:
    all_workers, _ = both_workers()
    own = np.ones(100_000)
    ahead = Summands(ReduceOp.SUM, [own], are_lent=True)
    seen: list[Any] = []

    async def late(turn: Turn) -> Any:
        exchange = turn.exchange(b"", no_data, layout="float64[100000]", ahead=ahead)
        ahead.begin()  # as the engine does, once all frames have agreed
        exchange.cancel()
        seen.append(exchange.done())
        try:
            await exchange
        except asyncio.CancelledError:
            seen.append(ahead.arrays[0] is own)

    async def prompt(turn: Turn) -> Any:
        return await reduce_across(turn, ReduceOp.SUM, [np.ones(100_000)])

    _, [total] = await asyncio.gather(
        in_turn(all_workers[0], late), in_turn(all_workers[1], prompt)
    )
    assert seen == [False, True]
    assert total[0] == 2.0
    await close_all(all_workers)


async def test_who_waits_is_told_in_the_cycle_in_which_an_exchange_ends() -> None:
    all_workers, _ = both_workers()
    seen: list[str] = []

    async def tells(turn: Turn) -> None:
        exchange: Any = turn.exchange(b"", no_data)
        exchange.add_done_callback(lambda _: seen.append("callback"))
        exchange.tell(lambda: seen.append("told" if exchange.done() else "too early"))
        await exchange
        exchange.tell(lambda: seen.append("told again"))
        seen.append("not at once")
        await asyncio.sleep(0)
        given_up: Any = turn.exchange(b"", no_data)
        given_up.tell(lambda: seen.append(f"cancelled: {given_up.cancelled()}"))
        given_up.cancel()
        seen.append("not in cancel")
        await asyncio.sleep(0)

    async def meets(turn: Turn) -> None:
        await turn.exchange(b"", no_data)
        await turn.exchange(b"", no_data)

    await asyncio.gather(in_turn(all_workers[0], tells), in_turn(all_workers[1], meets))
    assert seen == [
        "told", "callback", "not at once", "told again", "not in cancel", "cancelled: True",
    ]  # fmt: skip
    await close_all(all_workers)


async def test_what_is_started_before_the_engine_sends_goes_together_the_first_included() -> None:
    all_workers, group = both_workers()
    num = 32

    async def steps(workers: Workers) -> tuple[list[float], int]:
        async with workers.run("step") as run:
            await reduced(run.turn("all_reduce", "", 0), np.ones(600))
            before = group[workers.rank].statistics().calls
            started = [
                reduce_across(
                    run.turn("all_reduce", "", index), ReduceOp.SUM,
                    [np.full(600, index + workers.rank)], is_last=True,
                )
                for index in range(1, num + 1)
            ]  # fmt: skip
            found = [float(total[-1]) for [total] in await asyncio.gather(*started)]
            return found, group[workers.rank].statistics().calls - before

    for found, num_calls in await asyncio.gather(*map(steps, all_workers)):
        assert found == [2.0 * index + 1 for index in range(1, num + 1)]
        assert num_calls == 1
    await close_all(all_workers)


async def reduced(turn: Turn, value: Any, op: ReduceOp = ReduceOp.SUM) -> Any:
    return (await reduce_across(turn, op, [value], is_last=True))[0]


def summand(rank: int, index: int) -> Any:
    """Numbers in the slot, arrays in the slot and behind it, of two dtypes; sums that round."""
    if index % 5 == 0:
        return 0.1 * (rank + 1) + index
    size = 3 if index % 5 == 1 else 700
    dtype = np.float32 if index % 3 else np.float64
    return np.linspace(0.1 + rank, index + 1 / 3, size, dtype=dtype).reshape(-1, 1)


@pytest.mark.slow
@pytest.mark.explore(schedules=25)
@pytest.mark.parametrize("num_workers", [2, 3])
async def test_reductions_that_are_queued_go_together_as_far_as_all_have_them(
    num_workers: int,
) -> None:
    """Each worker has queued another number of them when the one before is over."""
    all_workers, group = workers_of_a_group(num_workers)
    together = {2: (0, 4, 13), 3: (0, 1, 40)}[num_workers]
    num = 40

    async def steps(workers: Workers) -> list[Any]:
        found = []
        async with workers.run("step") as run:
            for index in range(num):
                turn = run.turn(f"all_reduce #{index}", "", index)
                op = ReduceOp.MEAN if 20 <= index < 25 else ReduceOp.SUM
                found.append(asyncio.ensure_future(reduced(turn, summand(workers.rank, index), op)))
                if index % 14 == together[workers.rank]:
                    await asyncio.sleep(0)
                if workers.rank == 1 and index == 30:
                    await found[3]
            return await asyncio.gather(*found)

    results = await asyncio.gather(*map(steps, all_workers))
    for index in range(num):
        brought = [summand(rank, index) for rank in range(num_workers)]
        total = brought[0]
        for each in brought[1:]:
            total = total + each
        if 20 <= index < 25:
            total = total / num_workers
        for of_worker in results:
            assert type(of_worker[index]) is type(total)
            assert np.asarray(of_worker[index]).dtype == np.asarray(total).dtype
            assert np.array_equal(of_worker[index], total)
    calls = {each.statistics().calls for each in group}
    assert len(calls) == 1
    assert calls.pop() < num // 2
    await close_all(all_workers)


@pytest.mark.explore(schedules=30)
async def test_what_differs_behind_others_is_told_of_itself_alone() -> None:
    all_workers, _ = both_workers()

    async def steps(workers: Workers) -> tuple[list[Any], str]:
        async with workers.run("step") as run:
            sizes = [600, 600, 600, 600 + workers.rank, 600]
            waits = [
                asyncio.ensure_future(reduced(run.turn(f"all_reduce #{i}", "", i), np.ones(size)))
                for i, size in enumerate(sizes)
            ]
            found = await asyncio.gather(*waits, return_exceptions=True)
        return found[:3], str(found[3])

    results = await asyncio.gather(*map(steps, all_workers))
    for found, error in results:
        assert [each.tolist() for each in found] == [[2.0] * 600] * 3
        assert "disagree in all_reduce #3" in error
        assert "float64[600] on worker 0 and" in error
    await close_all(all_workers)


@pytest.mark.explore(schedules=60)
async def test_queued_reductions_of_a_step_that_is_given_up_do_not_hold_up_the_others() -> None:
    all_workers, _ = both_workers()

    async def gives_up(workers: Workers) -> None:
        async with workers.run("step") as run:
            waits = [
                asyncio.ensure_future(reduced(run.turn(f"all_reduce #{i}", "", i), np.ones(600)))
                for i in range(6)
            ]
            await waits[1]
            for each in waits[2:]:
                each.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            raise ZeroDivisionError

    async def goes_on(workers: Workers) -> list[Any]:
        async with workers.run("step") as run:
            waits = [
                asyncio.ensure_future(reduced(run.turn(f"all_reduce #{i}", "", i), np.ones(600)))
                for i in range(7)
            ]
            found = await asyncio.gather(*waits, return_exceptions=True)
            for each in found:
                if isinstance(each, BaseException):
                    raise each
            return found

    found = await asyncio.gather(
        gives_up(all_workers[0]), goes_on(all_workers[1]), return_exceptions=True
    )
    assert isinstance(found[0], ZeroDivisionError)
    assert isinstance(found[1], WorkerLostError)
    assert "ZeroDivisionError" in str(found[1])
    await close_all(all_workers)


async def test_the_next_run_meets_after_one_that_has_failed_everywhere() -> None:
    """A worker's operation meets the failure of the other, and its own one is queued behind it."""
    all_workers, _ = both_workers()

    async def fails_and_goes_on(workers: Workers) -> list[bytes]:
        with suppress(ZeroDivisionError):
            async with workers.run("step") as run:
                if workers.rank == 0:
                    run.turn("op", "", 1).exchange(b"", no_data)
                raise ZeroDivisionError
        return await in_turn(workers, lambda turn: turn.exchange(b"%d" % workers.rank, no_data))

    found = await asyncio.gather(*map(fails_and_goes_on, all_workers))
    assert found == [[b"0", b"1"]] * 2
    await close_all(all_workers)


async def test_each_exchange_is_carried_in_the_context_in_which_it_was_made() -> None:
    """Of a small sum, adding up is part of that, and `np.errstate` a part of the context."""
    all_workers, group = both_workers()
    variable = ContextVar("variable", default="")
    seen: list[list[str]] = [[], []]

    async def steps(workers: Workers) -> int:
        async with workers.run("step") as run:
            started = []
            for name in ("first", "second", "third"):
                variable.set(name)
                with np.errstate(over="ignore"):
                    turn = run.turn("all_reduce", "", len(started))
                    carry = partial(note, workers.rank, name)
                    ahead = Summands(ReduceOp.SUM, [np.full(3, 1e308)], are_lent=False)
                    started.append(turn.exchange(b"", carry, ahead=ahead, is_last=True))
            await asyncio.gather(*started)
        return group[workers.rank].statistics().calls

    def note(rank: int, name: str, *_: object) -> None:
        seen[rank].append(f"{name} in {variable.get()}, over={np.geterr()['over']}")

    assert len(set(await asyncio.gather(*map(steps, all_workers)))) == 1
    assert seen == [[f"{n} in {n}, over=ignore" for n in ("first", "second", "third")]] * 2
    await close_all(all_workers)
