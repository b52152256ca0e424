"""Elements of per-worker datasets: one closure each, whatever comes and goes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.cluster import LocalClosureEngine, current_worker_index
from aioreplica.errors import ContextError
from aioreplica.input import ArraySpec
from aioreplica.strategies.parameter_server._splits import (
    Element,
    EndOfSplitError,
    Leases,
    SplitReader,
)
from tests.sequencer import idle

pytest.importorskip("cloudpickle")


def test_a_worker_takes_its_own_split_first_and_others_after_its_end() -> None:
    leases = Leases(2)
    assert [leases.take(closure, 0, 1) for closure in (0, 1)] == [(1, 0), (1, 1)]
    leases.end(1, 1, 1)
    assert leases.take(1, 0, 1) == (0, 0)
    assert leases.take(2, 0, 1) == (0, 1)


def test_the_elements_of_one_closure_are_of_one_split() -> None:
    leases = Leases(2)
    assert [leases.take(0, ordinal, 0) for ordinal in (0, 1)] == [(0, 0), (0, 1)]
    leases.end(0, 0, 1)
    assert leases.take(0, 1, 0) is None
    assert leases.take(1, 0, 0) == (1, 0)


def test_a_run_that_comes_again_gets_the_same_on_any_worker() -> None:
    leases = Leases(2)
    first = [leases.take(7, ordinal, 0) for ordinal in range(3)]
    leases.take(8, 0, 0)
    assert [leases.take(7, ordinal, 1) for ordinal in range(3)] == first
    assert leases.take(7, 3, 1) == (0, 4)


def test_what_failed_gives_back_and_what_succeeded_does_not() -> None:
    leases = Leases(1)
    for closure in range(3):
        leases.take(closure, 0, 0)
    leases.settle(1, {1})
    assert leases.take(3, 0, 0) == (0, 1)
    leases.settle(4, ())
    assert leases.take(4, 0, 0) == (0, 3)
    assert leases.has_learned(2)
    assert [leases.take(2, ordinal, 0) for ordinal in (0, 1)] == [(0, 2), None]  # made again
    assert repr(leases) == "<Leases | 1 splits, 1 closures have some>"


def test_what_has_finished_is_learned_before_older_ones_are_over() -> None:
    leases = Leases(1)
    for closure in range(3):
        leases.take(closure, 0, 0)
    leases.settle(0, {1}, {2})
    assert leases.has_learned(2)
    assert [leases.take(2, ordinal, 0) for ordinal in (0, 1)] == [(0, 2), None]
    assert [leases.take(closure, 0, 0) for closure in (0, 3)] == [(0, 0), (0, 1)]


def test_what_is_given_back_beyond_the_end_is_nothing() -> None:
    leases = Leases(1)
    for closure in range(3):
        leases.take(closure, 0, 0)
    leases.end(2, 0, 2)
    leases.settle(0, {0, 1, 2})
    assert [leases.take(closure, 0, 0) for closure in (3, 4, 5)] == [(0, 0), (0, 1), None]


@pytest.mark.parametrize("seed", range(20))
def test_each_element_is_learned_once_whatever_happens(seed: int) -> None:
    """Closures fail, run again and come in any order; their worker's index is any."""
    rng, sizes = random.Random(seed), [5, 0, 9]
    leases, learned, number = Leases(3), Counter[tuple[int, int]](), 0
    while sum(learned.values()) < sum(sizes):
        batch = range(number, number + rng.randint(1, 4))
        number, failed = batch.stop, set[int]()
        for closure in batch:
            got: list[tuple[int, int]] = []
            for _ in range(rng.randint(1, 2)):
                got, count = [], rng.randint(1, 3)
                index = rng.randrange(5)
                while len(got) < count:
                    element = leases.take(closure, len(got), index)
                    if element is None:
                        break
                    if element.position >= sizes[element.split]:
                        leases.end(closure, element.split, sizes[element.split])
                        continue
                    got.append(element)
            taken = [*leases._taken.get(closure, [])]
            if rng.random() < 0.3 or taken != got:  # a run that took more has the last word
                failed.add(closure)
            else:
                learned.update(got)
        leases.settle(number, failed)
    assert set(learned.values()) == {1}


def test_a_reader_goes_on_or_begins_anew_and_skips() -> None:
    made: list[int] = []

    def make(split: int) -> Iterator[int]:
        made.append(split)
        return iter(range(10 * split, 10 * split + 5))

    reader = SplitReader(make)
    assert [reader.read(Element(1, i)) for i in (0, 1, 3)] == [10, 11, 13]
    assert made == [1]
    assert [reader.read(Element(1, 2)), reader.read(Element(0, 4))] == [12, 4]
    assert made == [1, 1, 0]
    with pytest.raises(EndOfSplitError) as caught:
        reader.read(Element(0, 9))
    assert caught.value.end == 5


def test_a_dataset_that_fails_is_not_at_its_end() -> None:
    fails = [True]

    def make(_split: int) -> Iterator[int]:
        yield 0
        if fails:
            fails.clear()
            raise OSError("no such file")
        yield 1

    reader = SplitReader(make)
    assert reader.read(Element(0, 0)) == 0
    with pytest.raises(OSError, match="no such file"):
        reader.read(Element(0, 1))
    assert reader.read(Element(0, 1)) == 1


# ---- with a coordinator --------------------------------------------------------------------------


def numbers(context: ar.InputContext) -> Iterator[int]:
    assert context.input_pipeline_id == current_worker_index()
    return iter(range(context.input_pipeline_id, 11, context.num_input_pipelines))


async def learn(seen: Any, iterator: Any, is_bad: bool = False) -> int:
    element = next(iterator)
    if is_bad:
        raise ValueError("bad")
    seen.assign_add(ar.IndexedSlices(np.ones(1), [element], seen.shape))
    return element


async def an_epoch() -> None:
    """Workers are lost and come, a closure fails alone: each number is learned once."""
    engine = LocalClosureEngine(2)
    async with (
        ar.ParameterServerStrategy(engine) as strategy,
        ar.ClusterCoordinator(strategy) as coordinator,
    ):
        with strategy.scope():
            seen = ar.Variable(np.zeros(11), name="seen")
        iterator = iter(coordinator.create_per_worker_dataset(numbers))
        remotes = [coordinator.schedule_nowait(learn, (seen, iterator)) for _ in range(5)]
        bad = coordinator.schedule_nowait(learn, (seen, iterator, True), isolate=True)
        await asyncio.sleep(0)
        engine.lose_worker("worker-0")
        remotes += [coordinator.schedule_nowait(learn, (seen, iterator)) for _ in range(3)]
        engine.add_worker()
        engine.add_worker()
        with pytest.raises(ValueError, match="bad"):
            await bad.fetch()
        engine.lose_worker("worker-1")
        remotes += [coordinator.schedule_nowait(learn, (seen, iterator)) for _ in range(3)]
        await coordinator.join()
        assert (await seen.read()).tolist() == [1.0] * 11
        assert sorted(await coordinator.fetch(remotes)) == list(range(11))


@pytest.mark.slow
def test_each_number_is_learned_once_under_every_schedule() -> None:
    art.explore(an_epoch, schedules=60).check()


@pytest.mark.asyncio
async def test_a_worker_that_came_later_has_no_part_of_its_own() -> None:
    engine = LocalClosureEngine(1)
    async with (
        ar.ParameterServerStrategy(engine) as strategy,
        ar.ClusterCoordinator(strategy) as coordinator,
    ):
        dataset = coordinator.create_per_worker_dataset(numbers)
        engine.lose_worker("worker-0")
        engine.add_worker()
        assert await (await coordinator.schedule(list, (dataset,))).fetch() == [*range(11)]
        engine.add_worker()
        for _ in range(2):
            await coordinator.schedule(list, (dataset,))
        with pytest.raises(ContextError, match=r"Worker 1 came after .* in 1 parts"):
            await coordinator.join()


@pytest.mark.asyncio
async def test_the_elements_of_a_dataset_are_described() -> None:
    async with (
        ar.ParameterServerStrategy(LocalClosureEngine(2)) as strategy,
        ar.ClusterCoordinator(strategy) as coordinator,
    ):
        batches = [{"x": np.zeros((4, 3), np.float32)}]
        expected = {"x": ArraySpec((None, 3), np.dtype("float32"))}
        assert coordinator.create_per_worker_dataset(batches).element_spec == expected
        rows = ar.ArrayDataset({"x": np.zeros((8, 3), np.float32)}, batch_size=2)
        assert coordinator.create_per_worker_dataset(rows).element_spec == expected
        with pytest.raises(ValueError, match="first part of the dataset is empty"):
            _ = coordinator.create_per_worker_dataset([]).element_spec


@pytest.mark.asyncio
async def test_iterators_and_resources_that_were_dropped_leave_the_workers() -> None:
    engine = LocalClosureEngine(1)
    async with (
        ar.ParameterServerStrategy(engine) as strategy,
        ar.ClusterCoordinator(strategy) as coordinator,
    ):
        dataset = coordinator.create_per_worker_dataset(range(100))
        for _ in range(12):
            iterator = iter(dataset)
            await coordinator.schedule(next, (iterator,))
            resource = coordinator.create_per_worker_resource(dict)
            await coordinator.schedule(len, (resource,))
            del iterator, resource
            await coordinator.join()
        [place] = engine._workers.values()
        assert repr(place.worker) == "<ClosureWorker worker-0 | keeps 0 things>"
        server: Any = strategy.servers.handles[0]
        assert server._state._leases == {}
    assert repr(place.worker) == "<ClosureWorker worker-0 | keeps 0 things>"


def next_or_fail(iterator: Any, is_bad: bool = False) -> int:
    element: int = next(iterator)
    if is_bad:
        raise ValueError("bad")
    return element


@pytest.mark.asyncio
@pytest.mark.parametrize("is_missed", [False, True])
async def test_what_a_failed_closure_took_is_given_back_whatever_is_told_first(
    monkeypatch: pytest.MonkeyPatch, *, is_missed: bool
) -> None:
    """The end of another one was told before, or its own end was told to nobody."""
    engine = LocalClosureEngine(1)
    async with (
        ar.ParameterServerStrategy(engine) as strategy,
        ar.ClusterCoordinator(strategy) as coordinator,
    ):
        came, may_go_on, cancel = asyncio.Event(), asyncio.Event(), engine.cancel

        async def cancel_later(submissions: Any) -> None:
            came.set()
            await may_go_on.wait()
            await cancel(submissions)

        async def miss() -> None:
            raise TimeoutError

        monkeypatch.setattr(engine, "cancel", cancel_later)
        iterator = iter(coordinator.create_per_worker_dataset(range(9)))
        bad = await coordinator.schedule(next_or_fail, (iterator, True), isolate=True)
        await came.wait()
        runner = coordinator._runner
        if is_missed:
            with monkeypatch.context() as patch:
                patch.setattr(runner, "report", miss)
                may_go_on.set()
                with pytest.raises(ValueError, match="bad"):
                    await bad.fetch()
        runner._next_report = 1
        assert await (await coordinator.schedule(next_or_fail, (iterator,))).fetch() == 1
        await idle()  # it is told
        may_go_on.set()
        with pytest.raises(ValueError, match="bad"):
            await bad.fetch()
        assert await (await coordinator.schedule(next_or_fail, (iterator,))).fetch() == 0
