"""Communicators over an engine: the contract, and groups that end, between threads."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.cluster import _engine, _poller, _transport
from aioreplica.cluster._communicator import AGREE, NOTHING, Call
from aioreplica.cluster._transport import NOTE_BYTES, PATIENCE_S, Note, name_of
from aioreplica.errors import ContextError, StallError, WorkerLostError
from aioreplica.replica._meeting_point import MeetingPoint
from aioreplica.typing import ReduceOp
from tests.cluster.communicator_contract import (
    CHECKS,
    an_abandoned_call_goes_on,
    brought_by,
    cuts_as_it_is_told,
    reduces_in_rank_order,
    same_bits,
)
from tests.cluster.thread_engine import ThreadCommunicator, ThreadTransport, Wires
from tests.strategies.workers import only

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]

ADDED = ("float32", "float64")
Work = Callable[[ThreadCommunicator], Awaitable[Any]]


async def by_all(
    size: int, work: Work, *, timeout: float | None = 60.0, added: Sequence[str] = ()
) -> list[Any]:
    async def worker(c: ThreadCommunicator) -> Any:
        try:
            return await work(c)
        finally:
            await c.aclose()

    group = ThreadCommunicator.group(size, timeout=timeout, added=added)
    return await asyncio.gather(*map(worker, group), return_exceptions=True)


async def until_it_ends(c: ThreadCommunicator) -> None:
    while True:
        await c.barrier()


def checked(check: Work) -> Any:
    is_slow = check in (reduces_in_rank_order, an_abandoned_call_goes_on, cuts_as_it_is_told)
    return pytest.param(check, id=check.__name__, marks=[pytest.mark.xslow] * is_slow)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0)


@pytest.mark.parametrize(("size", "added"), [(2, ()), (3, ()), (2, ADDED)], ids=str)
@pytest.mark.parametrize("check", [checked(check) for check in CHECKS])
async def test_contract(check: Work, size: int, added: Sequence[str]) -> None:
    for result in await by_all(size, check, added=added):
        if result is not None:
            raise result


@pytest.mark.parametrize(("most", "num_added"), [(1 << 20, 2), (300_000, 3)])
async def test_an_engine_that_adds_up_gets_arrays_of_one_dtype_together(
    monkeypatch: pytest.MonkeyPatch, most: int, num_added: int
) -> None:
    monkeypatch.setattr(_engine, "JOINED_BYTES", most)
    shapes = [("float32", (70_003,)), ("float32", (0,)), ("float32", (400, 200)), ("int16", (5,)),
              ("float64", (2, 3)), ("float64", ())]  # fmt: skip

    async def work(c: ThreadCommunicator) -> Any:
        brought = [brought_by(c.rank, shape, np.dtype(name), 2) for name, shape in shapes]
        _, totals = await c.all_gather_then_reduce([1], lambda _rows: True, [*brought], "sum")
        return totals, c.link.transport.num_added  # type: ignore[attr-defined]

    added, plain = await by_all(2, work, added=ADDED), await by_all(2, work)

    for (ours, count), (theirs, none) in zip(added, plain, strict=True):
        assert (count, none) == (num_added, 0)
        assert all(same_bits(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("size", [2, 3])
async def test_long_arrays_that_cannot_be_cut_evenly_are_reduced_to_the_last_number(
    size: int,
) -> None:
    async def work(c: ThreadCommunicator) -> None:
        for rest in range(size):
            numbers = np.arange(90_000 + rest, dtype=np.int64)
            total = await c.all_reduce(numbers * (c.rank + 1))
            assert (total == numbers * (size * (size + 1) // 2)).all()

    assert await by_all(size, work) == [None] * size


@pytest.mark.parametrize("size", [2, 3])
async def test_a_worker_that_closes_is_named_to_those_whose_next_call_it_does_not_make(
    size: int,
) -> None:
    async def work(c: ThreadCommunicator) -> Any:
        await c.barrier()
        if c.rank == 1:
            return "left"
        return await c.all_reduce(1)

    left, *errors = sorted(await by_all(size, work), key=lambda each: each != "left")
    assert left == "left"
    for error in errors:
        assert isinstance(error, WorkerLostError)
        assert error.ranks == (1,)
        assert "Worker 1 has closed the communicator before all_reduce #1" in str(error)


async def test_a_worker_may_close_when_it_has_made_the_call_that_others_are_in() -> None:
    wires = Wires(3)
    first, second, third = ThreadCommunicator.group(3, timeout=60.0, wires=wires)
    mine, theirs = first.broadcast(7, root=0), second.broadcast(0, root=0)
    assert await theirs == 7
    await second.aclose()
    looks = wires.num_looks[0]
    await until(lambda: wires.num_looks[0] > looks + 2)  # it has read that worker 1 has left
    assert await asyncio.gather(mine, third.broadcast(0, root=0)) == [7, 7]
    await asyncio.gather(first.aclose(), third.aclose())


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the lanes, which a test sets."""
    now = [0.0]
    for module in (_engine, _poller, _transport):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    return now


async def heard(now: list[float], wires: Wires, *ranks: int) -> None:
    """Wait until these workers have looked often: they have said and heard what there is."""
    looks = [wires.num_looks[rank] for rank in ranks]

    def have_looked() -> bool:
        now[0] += 1e-6  # who has just begun to wait does so without a look at first
        return all(wires.num_looks[r] > n + 5 for r, n in zip(ranks, looks, strict=True))

    await until(have_looked)


async def stalls(*calls: Awaitable[Any]) -> list[StallError]:
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, StallError) for result in results), results
    return results


async def test_a_stall_names_the_missing_workers(now: list[float]) -> None:
    wires = Wires(3)
    first, second, third = group = ThreadCommunicator.group(3, timeout=60.0, wires=wires)
    calls = asyncio.gather(first.all_reduce(1), third.all_reduce(1), return_exceptions=True)
    await until(lambda: min(wires.num_looks[::2]) > 0)  # both calls have begun
    for now[0] in (1.0, 3.0, 58.0, 59.0):
        await heard(now, wires, 0, 2)
    now[0] = 61.0
    for result in await calls:
        assert isinstance(result, StallError)
        assert (result.ranks, result.timeout_s) == ((1,), 60.0)
        assert "Worker 1 did not come to all_reduce #0 within 60 s" in str(result)
    with pytest.raises(StallError, match="Worker 1"):
        await second.all_reduce(1)
    await asyncio.gather(*(each.aclose() for each in group))


async def test_a_stall_does_not_name_a_worker_that_came_just_before_it(now: list[float]) -> None:
    """It had not said so yet, and was killed by the others as one that hangs."""
    wires = Wires(3)
    first, second, _ = group = ThreadCommunicator.group(3, timeout=60.0, wires=wires)
    early = first.all_reduce(1)
    await until(lambda: wires.num_looks[0] > 0)
    for now[0] in (1.0, 3.0, 58.0, 59.0, 59.9):
        await heard(now, wires, 0)
    late = second.all_reduce(1)
    now[0] = 60.2
    await heard(now, wires, 0, 1)
    now[0] = 60.6
    for error in await stalls(early, late):
        assert error.ranks == (2,)
        assert "Worker 2 did not come to all_reduce #0 within 60 s" in str(error)
    await asyncio.gather(*(each.aclose() for each in group))


async def test_a_stall_names_the_worker_that_has_stopped_inside_the_call(now: list[float]) -> None:
    """It said that it waits there, as all did; then it says nothing any more."""
    wires, wakes, stops = Wires(3), threading.Event(), threading.Event()
    first, second, third = group = ThreadCommunicator.group(3, timeout=60.0, wires=wires)

    def stop(_rows: Any) -> bool:
        stops.set()
        return wakes.wait(60)

    def meet(c: ThreadCommunicator, agrees: Callable[[Any], bool] = lambda _: True) -> Any:
        return c.all_gather_then_reduce([1], agrees, [np.ones(3)], "sum")

    early = [meet(first), meet(second, stop)]
    await until(lambda: min(wires.num_looks[:2]) > 0)
    now[0] = 1.0
    await heard(now, wires, 0, 1)
    late = meet(third)
    await until(stops.is_set)
    for now[0] in (1.5, 30.0, 59.0, 100.0):  # a pause of all is not a stop of one
        await heard(now, wires, 0, 2)
    now[0] = 102.0
    for error in await stalls(early[0], late):
        assert error.ranks == (1,)
        assert "Worker 1 has come to agreement #0 and stopped in it, for 60 s now" in str(error)
    wakes.set()
    await asyncio.gather(early[1], return_exceptions=True)
    await asyncio.gather(*(each.aclose() for each in group))


async def test_groups_that_are_called_in_another_order_are_told_so_and_blame_nobody(
    now: list[float],
) -> None:
    wires = Wires(2)
    group = ThreadCommunicator.group(2, timeout=60.0, wires=wires)
    splits = [c.split([0, 1]) for c in group]
    calls = [group[0].all_reduce(1), splits[1].all_reduce(2)]
    await until(lambda: min(wires.num_looks) > 0)
    for now[0] in (1.0, 3.0, 58.0, 59.0):
        await heard(now, wires, 0, 1)
    now[0] = 61.0
    for error in await stalls(*calls):
        assert error.ranks == (0, 1)
        assert "Workers must make the calls of groups that overlap in one order" in str(error)
        assert "all_reduce #0 of the group of all" in str(error)
        assert "all_reduce #0 of the split of workers 0 and 1" in str(error)
    await asyncio.gather(*(each.aclose() for each in (*group, *splits)))


async def test_without_a_timeout_a_long_wait_is_logged_once_with_what_all_said_last(
    now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    wires = Wires(3)
    group = ThreadCommunicator.group(3, wires=wires)
    await asyncio.gather(*(c.barrier() for c in group))
    group[0]._what = "all_reduce #2 (SUM) of run 0 (step)"
    calls = [group[0].all_reduce(1), group[2].all_reduce(1)]
    await heard(now, wires, 0, 2)  # both calls have begun
    for now[0] in (1.0, 11.0, 30.0):
        await heard(now, wires, 0, 2)
    records = [each for each in caplog.records if "goes on waiting" in each.getMessage()]
    assert sorted(each.args[0] for each in records) == [0, 2]
    text = next(each.getMessage() for each in records if each.args[0] == 0)
    assert "Worker 0 has waited 11 s in all_reduce #2 (SUM) of run 0 (step) for worker 1" in text
    assert "worker 2 waits in all_reduce #1" in text
    assert int(await group[1].all_reduce(1)) == 3
    await asyncio.gather(*calls)
    await asyncio.gather(*(each.aclose() for each in group))


# ---- calls that are attempted on the event loop's thread -----------------------------------------


def attempted() -> tuple[ThreadCommunicator, ThreadCommunicator]:
    """Return a group of which the first is early: it looks once, and its lane waits."""
    first, second = ThreadCommunicator.group(2, timeout=60.0, is_attempted=True)
    first.link._patience_s, second.link._patience_s = 0.0, 60.0
    return first, second


class Meeting:
    """Makes calls that tasks wait for, and notes who was asked whether all agree, and where."""

    def __init__(self, *, agrees: bool = False) -> None:
        self.agrees = agrees
        self.asked: list[tuple[int, bool]] = []
        self.overflows: set[str] = set()  # what NumPy was to do at one

    def call(self, c: ThreadCommunicator) -> asyncio.Future[Any]:
        loop_thread = threading.get_ident()

        def agrees(_rows: Any) -> bool:
            self.asked.append((c.rank, threading.get_ident() == loop_thread))
            self.overflows.add(np.geterr()["over"])
            return self.agrees

        own = np.array([1.0 + c.rank])
        call = Call(
            AGREE, NOTHING, ReduceOp.SUM, agrees=agrees, summands=[own], brings=lambda: own,
            is_awaited=True,
        )  # fmt: skip
        return c._launch(call)


async def test_who_comes_last_exchanges_on_the_event_loop_and_the_first_on_its_lane() -> None:
    group, meeting = attempted(), Meeting()
    early, late = map(meeting.call, group)
    assert not early.done()
    assert late.done()
    for rows, totals in await asyncio.gather(early, late):
        assert rows.tolist() == [[1.0], [2.0]]
        assert totals is None
    assert sorted(meeting.asked) == [(0, False), (1, True)]
    assert group[1].link.poller.lane.statistics().done == 0
    assert [c.link._patience_s for c in group] == [0.0, PATIENCE_S]  # who is early is so again
    await asyncio.gather(*(each.aclose() for each in group))


async def test_the_lane_reduces_what_all_have_agreed_on_and_does_not_ask_again() -> None:
    group, meeting = attempted(), Meeting(agrees=True)
    for _, totals in await asyncio.gather(*map(meeting.call, group)):
        assert totals is not None
        assert totals[0].tolist() == [3.0]
    assert sorted(meeting.asked) == [(0, False), (1, True)]
    assert [c.link._patience_s for c in group] == [0.0, PATIENCE_S]  # it came in time
    await asyncio.gather(*(each.aclose() for each in group))


@pytest.mark.parametrize("agrees", [False, True])
async def test_a_call_goes_out_and_ends_for_the_others_while_the_event_loop_is_busy(
    agrees: bool,
) -> None:
    group, meeting = attempted(), Meeting(agrees=agrees)
    group[1].link._patience_s = 0.0
    has_ended = threading.Event()

    async def other() -> Any:
        try:
            return await meeting.call(group[1])
        finally:
            has_ended.set()
            await group[1].aclose()

    call = meeting.call(group[0])
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(asyncio.run, other())
        assert has_ended.wait(60)  # and nothing else runs on this loop
        for rows, totals in (result.result(), await call):
            assert rows.tolist() == [[1.0], [2.0]]
            assert agrees == (totals is not None)
    await group[0].aclose()


async def test_a_call_is_performed_in_the_context_of_who_makes_it_attempted_or_not() -> None:
    group, meeting = attempted(), Meeting()
    with np.errstate(over="raise"):
        calls = [*map(meeting.call, group)]
    behind = [c.all_reduce(1) for c in group]
    await asyncio.gather(*calls, *behind)
    assert sorted(meeting.asked) == [(0, False), (1, True)]
    assert meeting.overflows == {"raise"}
    await asyncio.gather(*(each.aclose() for each in group))


async def test_an_interrupt_of_an_attempt_ends_the_group_and_nothing_is_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, meeting = attempted(), Meeting()
    exchange, sent = ThreadTransport.all_gather, Counter[int]()

    def interrupted(self: ThreadTransport, *args: Any) -> Any:
        sent[self.rank] += 1
        poll = exchange(self, *args)
        if self.rank == 1:
            raise KeyboardInterrupt
        return poll

    monkeypatch.setattr(ThreadTransport, "all_gather", interrupted)
    waiting = meeting.call(group[0])
    with pytest.raises(KeyboardInterrupt):
        meeting.call(group[1])
    with pytest.raises(WorkerLostError, match=r"Worker 1 failed .*interrupted by KeyboardInt"):
        await waiting
    assert sent == {0: 1, 1: 1}
    await asyncio.gather(*(each.aclose() for each in group))


async def test_what_is_called_behind_a_call_that_is_attempted_is_performed_behind_it() -> None:
    group, meeting, gate = attempted(), Meeting(), threading.Event()
    group[1].link.put(gate.wait, 60)  # so that the lane of the first waits in what it has begun
    calls = [(meeting.call(c), c.all_reduce(c.rank), meeting.call(c)) for c in group]
    gate.set()
    for rows, total, again in [await asyncio.gather(*each) for each in calls]:
        assert rows[0].tolist() == again[0].tolist() == [[1.0], [2.0]]
        assert total == 1
    assert sorted(meeting.asked) == [(0, False), (0, False), (1, False), (1, False)]
    await asyncio.gather(*(each.aclose() for each in group))


async def test_a_call_goes_to_the_lane_while_the_engine_is_busy_for_another_group() -> None:
    group, meeting = attempted(), Meeting()
    lock = group[1].link.poller.lock
    assert lock is not None
    with lock:
        calls = [meeting.call(c) for c in group]
        await until(lambda: bool(group[1].queue))
    await asyncio.gather(*calls)
    assert sorted(meeting.asked) == [(0, False), (1, False)]
    await asyncio.gather(*(each.aclose() for each in group))


async def test_an_error_of_an_attempt_ends_the_group_as_one_of_the_lane_does() -> None:
    group, meeting = attempted(), Meeting()

    def fail() -> Any:
        raise ValueError("no frame")

    call = Call(AGREE, NOTHING, ReduceOp.SUM, agrees=bool, brings=fail, is_awaited=True)
    calls = [meeting.call(group[0]), group[1]._launch(call)]
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, WorkerLostError)
        assert "Worker 1 failed in agreement #0: ValueError('no frame')" in str(error)
    await asyncio.gather(*(each.aclose() for each in group))


async def test_who_comes_last_to_a_reduction_has_its_result_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, has_come, waits = attempted(), asyncio.Event(), list[MeetingPoint]()
    new_waiter = MeetingPoint.new_waiter

    def noting(self: MeetingPoint, *args: Any) -> Any:
        waits.append(self)
        return new_waiter(self, *args)

    monkeypatch.setattr(MeetingPoint, "new_waiter", noting)

    async def step(is_last: bool) -> Any:
        ctx = ar.get_replica_context()
        assert ctx is not None
        await ctx.all_reduce("sum", np.ones(1000))  # from then on frames have room for as much
        group[0].link._patience_s, group[1].link._patience_s = 0.0, 60.0
        await has_come.wait() if is_last else has_come.set()
        waits.clear()
        return (await ctx.all_reduce("sum", np.full(1000, 1.0 + is_last)))[-1]

    async def worker(strategy: ar.MultiWorkerMirroredStrategy, is_last: bool) -> Any:
        async with strategy:
            return strategy.local_results(await strategy.run(step, args=(is_last,)))

    with only(1):
        made = [ar.MultiWorkerMirroredStrategy(c) for c in group]
    assert await asyncio.gather(*map(worker, made, (False, True))) == [(3.0,), (3.0,)]
    assert waits == []


async def test_a_started_reduction_goes_out_while_the_event_loop_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = ThreadCommunicator.group(2, timeout=60.0, is_attempted=True)
    sent = [threading.Event() for _ in group]
    exchange = ThreadTransport.all_gather

    def noting(self: ThreadTransport, *args: Any) -> Any:
        sent[self.rank].set()
        return exchange(self, *args)

    monkeypatch.setattr(ThreadTransport, "all_gather", noting)

    async def step() -> Any:
        ctx = ar.get_replica_context()
        assert ctx is not None
        rank = ctx.replica_id_in_sync_group
        await ctx.all_reduce("sum", 1.0)  # all have met, and nothing is under way
        sent[rank].clear()
        handle = ctx.start_all_reduce("sum", np.ones(1000))
        assert sent[rank].wait(60)
        return (await handle)[-1]

    async def worker(strategy: ar.MultiWorkerMirroredStrategy) -> Any:
        async with strategy:
            return strategy.local_results(await strategy.run(step))

    with only(1):
        made = [ar.MultiWorkerMirroredStrategy(c) for c in group]
    assert await asyncio.gather(*map(worker, made)) == [(2.0,), (2.0,)]


async def test_an_abort_reaches_those_that_wait_and_those_that_come_later() -> None:
    async def work(c: ThreadCommunicator) -> str:
        if c.rank == 1:
            await c.barrier()  # the others may still be in it when they are told
            c.abort("the disk is full")
        with pytest.raises(WorkerLostError, match="Worker 1 ended the group: the disk is full"):
            await until_it_ends(c)
        with pytest.raises(WorkerLostError, match="disk"):
            c.barrier()
        return "told"

    assert await by_all(3, work) == ["told"] * 3


async def test_an_error_on_the_lane_ends_the_group_and_says_whose_it_was() -> None:
    def agrees(rows: Any) -> bool:
        raise ZeroDivisionError("while looking")

    async def work(c: ThreadCommunicator) -> None:
        await c.all_gather_then_reduce([1], agrees, [np.ones(3)], "sum")

    for error in await by_all(2, work):
        assert isinstance(error, WorkerLostError)
        assert "failed in agreement #0: ZeroDivisionError('while looking')" in str(error)


async def test_who_has_asked_is_told_of_the_end_of_the_group() -> None:
    """Soon: what ends it may be in the middle of something."""

    async def work(c: ThreadCommunicator) -> str:
        come: asyncio.Future[asyncio.Future[Any]] = asyncio.get_running_loop().create_future()
        c._launch(
            Call(
                AGREE, NOTHING, ReduceOp.SUM, agrees=lambda _: True, brings=lambda: np.ones(3),
                then=come.set_result,
            )
        )  # fmt: skip
        c.abort("enough")
        assert not come.done()
        return str((await come).exception())

    first, second = await by_all(2, work)
    assert "ended the group: enough" in first
    assert "ended the group: enough" in second


async def test_the_same_split_twice_makes_two_groups() -> None:
    """What is said of one, that a worker has left it, is not said of the other."""
    wires = Wires(2)
    group = ThreadCommunicator.group(2, timeout=60.0, wires=wires)
    first, second = [c.split([0, 1]) for c in group], [c.split([0, 1]) for c in group]
    assert [int(n) for n in await asyncio.gather(*(c.all_reduce(1) for c in first))] == [2, 2]
    assert [int(n) for n in await asyncio.gather(*(c.all_reduce(2) for c in second))] == [4, 4]
    await first[1].aclose()
    waits = second[0].all_reduce(3)
    looks = wires.num_looks[0]
    await until(lambda: wires.num_looks[0] > looks + 2)  # it has read that worker 1 has left
    assert [int(n) for n in await asyncio.gather(waits, second[1].all_reduce(3))] == [6, 6]
    with pytest.raises(WorkerLostError, match="Worker 1 has closed the communicator"):
        await first[0].all_reduce(1)
    await asyncio.gather(*(each.aclose() for each in (*group, *first, *second)))


async def test_a_split_ends_with_its_group_and_cannot_shrink() -> None:
    first, second = group = ThreadCommunicator.group(2, timeout=60.0)
    pair = first.split([0, 1])
    with pytest.raises(ContextError, match="split"):
        await pair.shrink()
    second.abort("enough")
    with pytest.raises(WorkerLostError, match="enough"):
        await pair.barrier()
    await asyncio.gather(*(each.aclose() for each in group))


async def test_a_worker_that_closes_while_its_lane_waits_ends_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own call was abandoned, and the one it waits for never comes: no close waits for that."""
    monkeypatch.setattr(_engine, "CLOSE_S", 0.01)
    first, second = ThreadCommunicator.group(2)
    first.barrier().cancel()
    await first.aclose()
    with pytest.raises(WorkerLostError, match="Worker 0 closed the communicator"):
        await second.barrier()
    await second.aclose()


async def test_notes_of_any_length_fit() -> None:
    long = Note("ended", 3, "/0,1.0", 7, "ü" * 3000, tuple(range(900)), 2.5)
    assert len(long.encode()) <= NOTE_BYTES
    short = Note.decode(long.encode())
    assert (short.kind, short.rank, short.group, short.number) == ("ended", 3, "/0,1.0", 7)
    assert long.text.startswith(short.text)
    assert short.text
    assert short.ranks == tuple(range(len(short.ranks)))


async def test_notes_about_splits_of_many_workers_have_a_size_too() -> None:
    names = [name_of(outer, range(size), "0") for outer in ("", "/0,1.0") for size in (270, 900)]
    names.append(name_of(name_of("", range(900), "0"), [0, 1], "0"))

    assert len(set(names)) == len(names)
    for name in names:
        note = Note.decode(Note("waiting", 3, name, 7, "all_reduce #7" * 99).encode())
        assert (note.group, note.number) == (name, 7)
    assert name_of("", [0, 2], "1") == "/0,2.1"
