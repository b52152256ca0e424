"""Several communicators on one lane of each worker: each waits for its own workers only."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar
from itertools import combinations
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.cluster import Communicator, LocalCommunicator, _engine, _poller, _transport
from aioreplica.cluster._communicator import AGREE, ENDED, NOTHING, Call, Failure
from aioreplica.cluster._engine import Visit
from aioreplica.cluster._torch import TorchTransport
from aioreplica.cluster._transport import PASSED, WAITING, Note, name_of
from aioreplica.devices import CompletionQueue, Lane, Op
from aioreplica.errors import ContextError, StallError, WorkerLostError
from aioreplica.typing import ReduceOp
from tests.cluster.thread_engine import ThreadCommunicator, ThreadTransport, Wires
from tests.strategies.workers import only

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]

Group = Sequence[Communicator]


def threads(size: int = 2, **options: Any) -> tuple[tuple[ThreadCommunicator, ...], ...]:
    """Return two groups of the same workers."""
    first = ThreadCommunicator.group(size, timeout=60.0, **options)
    return first, ThreadCommunicator.group(size, timeout=60.0, beside=first)


def local() -> tuple[Group, Group]:
    return LocalCommunicator.group(2, timeout=60.0), LocalCommunicator.group(2, timeout=60.0)


def thread_splits() -> tuple[Group, Group]:
    whole = ThreadCommunicator.group(2, timeout=60.0)
    return [c.split([0, 1]) for c in whole], [c.split([0, 1]) for c in whole]


def a_group_and_its_split() -> tuple[Group, Group]:
    whole = ThreadCommunicator.group(2, timeout=60.0)
    return whole, [c.split([1, 0]) for c in whole]


class Watched:
    """A lock that says which threads have come to it, before they wait for it."""

    def __init__(self, name: str, come: list[str], has_come: threading.Event) -> None:
        self._lock = threading.Lock()
        self._said = (name, come, has_come)

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        name, come, has_come = self._said
        if threading.current_thread() is not threading.main_thread():
            come.append(name)
            has_come.set()
        return self._lock.acquire(*args, **kwargs)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


async def test_the_lane_does_not_look_before_the_call_is_queued_that_starts_it() -> None:
    """It would find nothing to do, and wait for the next call, or a second."""
    come: list[str] = []
    has_come = threading.Event()
    lane = Lane("test.poller", nice=0)

    def put(op: Op[Any]) -> None:
        lane.put(op)
        assert has_come.wait(60)

    poller = _poller.Poller(SimpleNamespace(put=put))  # type: ignore[arg-type]
    poller._guard = Watched("guard", come, has_come)  # type: ignore[assignment]
    poller._bell = Watched("bell", come, has_come)  # type: ignore[assignment]
    poller._bell.acquire()

    op: Op[int] = Op(CompletionQueue.of_running_loop(), lambda: 3, (), {})
    poller.put(op)
    assert await op == 3
    assert come[0] == "guard"
    poller.rest()
    lane.stop()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0)


async def close(*groups: Group) -> None:
    await asyncio.gather(*(c.aclose() for group in reversed(groups) for c in group))


ORDERS = [
    "".join("a" if place in places else "b" for place in range(4))
    for places in combinations(range(4), 2)
]


@pytest.mark.parametrize("make", [threads, thread_splits, a_group_and_its_split, local])
async def test_order_is_that_of_each_communicator_and_no_other(make: Callable[[], Any]) -> None:
    """Two calls of each of two groups, in every order on both workers."""
    first, second = make()
    for mine in ORDERS:
        for theirs in ORDERS:
            calls = []
            for rank, order in enumerate((mine, theirs)):
                number = {"a": 1, "b": 100}
                for name in order:
                    group = first if name == "a" else second
                    calls.append((name, number[name], group[rank].all_reduce(number[name])))
                    number[name] += 1
            for name, number_, call in calls:
                assert int(await call) == 2 * number_, (mine, theirs, name)
    await close(first, second)


async def test_two_strategies_run_in_opposite_order() -> None:
    async def step(value: float) -> Any:
        ctx = ar.get_replica_context()
        assert ctx is not None
        started = ctx.start_all_reduce("sum", np.full(5000, value))
        return await ctx.all_reduce("sum", value), (await started)[-1]

    async def worker(rank: int, made: Sequence[ar.MultiWorkerMirroredStrategy]) -> Any:
        one, two = made
        async with one, two:
            runs = [one.run(step, (1.0,)), two.run(step, (2.0,))]
            tasks = [asyncio.ensure_future(each) for each in runs[:: 1 - 2 * rank]]
            results = await asyncio.gather(*tasks)
            return [two.local_results(each) for each in results[:: 1 - 2 * rank]]

    groups = threads()
    with only(1):
        made = [
            [ar.MultiWorkerMirroredStrategy(group[rank]) for group in groups] for rank in (0, 1)
        ]
    for results in await asyncio.gather(*(worker(rank, made[rank]) for rank in (0, 1))):
        assert results == [((2.0, 2.0),), ((4.0, 4.0),)]


async def test_a_call_that_hangs_keeps_no_other_communicator_from_its_own() -> None:
    hanging, working = threads()
    waits = hanging[0].barrier()
    for number in range(20):
        totals = await asyncio.gather(*(c.all_reduce(number) for c in working))
        assert [int(total) for total in totals] == [2 * number] * 2
    assert not waits.done()
    await asyncio.gather(waits, hanging[1].barrier())
    await close(hanging, working)


async def test_the_event_loop_begins_calls_while_another_group_waits() -> None:
    hanging, working = threads(is_attempted=True)
    waits, asked = hanging[0].barrier(), set()

    def call(c: ThreadCommunicator) -> asyncio.Future[Any]:
        def agrees(_rows: Any) -> bool:
            asked.add((c.rank, threading.get_ident() == loop_thread))
            return False

        brings = lambda: np.ones(1)  # noqa: E731
        return c._launch(
            Call(AGREE, NOTHING, ReduceOp.SUM, agrees=agrees, brings=brings, is_awaited=True)
        )

    loop_thread = threading.get_ident()
    async with asyncio.timeout(60):
        while (1, True) not in asked:  # unless the lane was just looking, which is seldom
            working[0].link._patience_s, working[1].link._patience_s = 0.0, 60.0
            await asyncio.gather(*map(call, working))
    assert not waits.done()
    await asyncio.gather(waits, hanging[1].barrier())
    await close(hanging, working)


async def test_one_strategy_may_close_while_another_one_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_engine, "CLOSE_S", 60.0)
    hanging, closing = threads()
    waits = hanging[0].barrier()
    await asyncio.gather(*(c.barrier() for c in closing))
    await close(closing)
    assert [c.link.ended for c in closing] == [None, None]
    await asyncio.gather(waits, hanging[1].barrier())
    await close(hanging)


async def test_a_group_leaves_behind_the_abandoned_calls_of_its_splits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_engine, "CLOSE_S", 60.0)
    groups = ThreadCommunicator.group(2, timeout=60.0)
    splits = [c.split([0, 1]) for c in groups]
    splits[0].all_reduce(1).cancel()
    closing = asyncio.gather(groups[0].aclose(), splits[0].aclose())
    assert int(await splits[1].all_reduce(1)) == 2
    await closing
    assert groups[0].link.ended is None
    await close(groups[1:], splits[1:])


async def test_a_split_is_given_back_when_all_have_left_it_and_not_before() -> None:
    """Some may be in its last call."""
    group = ThreadCommunicator.group(3, timeout=60.0)
    transports = [c.link.transport for c in group]
    pairs = [c.split([0, 1]) for c in group[:2]]
    name = name_of("", [0, 1], "0")

    def forgotten() -> list[list[str]]:
        return [each.forgotten for each in transports if isinstance(each, ThreadTransport)]

    async def meet() -> None:
        await asyncio.gather(*(c.barrier() for c in group))  # and read what was said before

    await asyncio.gather(*(c.barrier() for c in pairs))
    await pairs[0].aclose()
    await meet()
    assert forgotten() == [[], [], []]
    await pairs[1].aclose()
    assert forgotten() == [[], [name], []]
    await meet()
    assert forgotten() == [[name], [name], []]
    await close(group)


async def test_a_worker_that_closes_takes_its_splits_along_and_the_others_are_told() -> None:
    """Also of a split that it has never asked for."""
    group = ThreadCommunicator.group(3, timeout=60.0)
    pairs = [c.split([0, 1]) for c in group[:2]]
    inner = [c.split([0, 1]) for c in pairs]
    unknown = group[2].split([0, 2])
    await asyncio.gather(*(c.barrier() for c in inner))
    last, _ = [c.all_reduce(1) for c in pairs]
    waits = [c.barrier() for c in (pairs[1], inner[1], unknown)]
    await group[0].aclose()
    assert pairs[0].is_closed
    for call in (last, pairs[0].barrier, inner[0].barrier):
        with pytest.raises(ContextError, match=r"that this is a split of was closed"):
            await (call() if callable(call) else call)
    for each in waits:
        with pytest.raises(WorkerLostError, match="Worker 0 has closed the communicator before"):
            await each
    await asyncio.gather(*(each.aclose() for each in (*group[1:], *pairs, *inner, unknown)))
    assert group[0].link.members == []


@pytest.mark.parametrize("is_split", [False, True])
async def test_a_close_that_was_cancelled_goes_on_and_the_others_are_told(
    monkeypatch: pytest.MonkeyPatch, is_split: bool
) -> None:
    monkeypatch.setattr(_engine, "CLOSE_S", 0.01)
    first, second = ThreadCommunicator.group(2)
    (first.split([0, 1]) if is_split else first).barrier()  # the lane waits there
    closing = asyncio.ensure_future(first.aclose())
    await until(lambda: first.is_closed)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await until(lambda: first.link.ended is not None)
    with pytest.raises(WorkerLostError, match="Worker 0 closed the communicator"):
        await second.barrier()
    await until(lambda: not first.link.members)
    await second.aclose()


async def test_the_end_of_a_group_is_seen_by_all_of_its_heads_and_by_no_other_group() -> None:
    ending, working = threads()
    splits = [[c.split([0, 1]) for c in ending] for _ in range(2)]
    waits = [group[0].all_reduce(1) for group in (ending, *splits)]
    other = working[0].all_reduce(1)
    ending[1].abort("the disk is full")
    for error in await asyncio.gather(*waits, return_exceptions=True):
        assert isinstance(error, WorkerLostError)
        assert "Worker 1 ended the group: the disk is full" in str(error)
    assert [int(n) for n in await asyncio.gather(other, working[1].all_reduce(1))] == [2, 2]
    await close(ending, *splits, working)


async def test_a_call_for_no_queue_is_made_while_all_heads_wait() -> None:
    """To connect another strategy, for example, or to shrink."""
    (first, second), other = threads()
    waits = [first.barrier(), other[0].barrier()]
    made = first.link.put(threading.get_ident)
    assert await made != threading.get_ident()
    await asyncio.gather(*waits, second.barrier(), other[1].barrier())
    await close((first, second), other)


class Thing:
    """Something that a context variable holds."""


async def test_the_lane_keeps_no_context_of_a_call_that_is_over() -> None:
    """It may be busy for others for as long as the program runs."""
    variable, context = ContextVar[Thing]("thing"), Context()
    things = WeakSet[Thing]()
    working, hanging = threads()

    def first_call() -> asyncio.Future[Any]:
        variable.set(thing := Thing())
        things.add(thing)
        return working[0].all_reduce(1)

    call = context.run(first_call)
    waits = hanging[0].barrier()
    assert [int(n) for n in await asyncio.gather(call, working[1].all_reduce(1))] == [2, 2]
    del context, call
    async with asyncio.timeout(60):
        while len(things):
            gc.collect()
            await asyncio.sleep(0)
    assert not waits.done()
    await asyncio.gather(waits, hanging[1].barrier())
    await close(working, hanging)


async def test_what_an_attempt_has_begun_is_held_if_the_group_ends_before_the_lane_goes_on() -> (
    None
):
    group = ThreadCommunicator.group(2, timeout=60.0, is_attempted=True)
    link = group[0].link
    visit = Visit(group[0], Call(AGREE, np.ones(3), ReduceOp.SUM, agrees=lambda _rows: True))
    assert not visit.attempt(0.0)
    link.ended = Failure(ENDED, "enough")
    assert visit.advance(False)
    assert any(each is visit._begun for each in link._held)
    await asyncio.gather(*(each.aclose() for each in group))


async def test_who_waits_in_two_groups_is_missed_in_neither(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is said last, of one group, takes nothing back of what was said of the other."""
    now, wires = [0.0], Wires(3)
    for module in (_engine, _poller, _transport):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    whole = ThreadCommunicator.group(3, timeout=60.0, wires=wires)
    splits = [c.split([0, 1, 2]) for c in whole]
    waits = [c.all_reduce(1) for rank in (0, 1) for c in (whole[rank], splits[rank])]

    async def have_looked() -> None:
        before = wires.num_looks[:2]
        async with asyncio.timeout(60):
            while any(wires.num_looks[rank] <= before[rank] + 8 for rank in (0, 1)):
                now[0] += 1e-6
                await asyncio.sleep(0)

    for now[0] in (1.0, 2.0, 58.0, 59.0):
        await have_looked()
    now[0] = 62.0
    for error in await asyncio.gather(*waits, return_exceptions=True):
        assert isinstance(error, StallError)
        assert error.ranks == (2,)
        assert "Worker 2 did not come to all_reduce #0 within 60 s" in str(error)
    await close(whole, splits)


async def test_the_store_keeps_the_newest_word_of_a_worker_in_each_group() -> None:
    kept: dict[str, bytes] = {}
    raw = SimpleNamespace(
        set=kept.__setitem__, add=lambda _key, _amount: 0,
        multi_get=lambda keys: [kept.get(key, b"") for key in keys],
    )  # fmt: skip
    store = SimpleNamespace(raw=raw, ask=lambda fn: fn())
    speaker, listener = object.__new__(TorchTransport), object.__new__(TorchTransport)
    for rank, each in enumerate((speaker, listener)):
        each.rank, each.size, each.store = rank, 2, store  # type: ignore[assignment]
        each._own_words, each._num_words, each._num_read = {}, 0, 0
        each._words = [b"", b""]
    said = [Note(WAITING, 0, "", 4, "barrier #4"), Note(WAITING, 0, "/0,1.0", 7, "two\nlines")]
    for note in said:
        speaker.tell(note)
    assert listener._read(with_words=True) == said
    speaker.tell(Note(PASSED, 0, "", 4, "barrier #4"))
    assert [note.kind for note in listener._read(with_words=True)] == [WAITING, PASSED]
    for number in range(100):
        speaker.tell(Note(WAITING, 0, f"/0,1.{number}", 0, "x" * 2000))
    assert len(kept["word/0"]) < 20_000
    assert listener._read(with_words=True)[-1].group == "/0,1.99"
