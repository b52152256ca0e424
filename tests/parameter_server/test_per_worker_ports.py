"""What TensorFlow tests of datasets and resources that every worker has, asked of these.

The facts are those of cluster_coordinator_test. Left out are element specs: types of graphs.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from tests.parameter_server.coordinating import Cluster, Gate, fail, identity

pytest.importorskip("cloudpickle")
pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]


def take(iterator: Iterator[Any]) -> Any:
    return next(iterator)


def numbers() -> range:
    return range(10)


def mapped() -> Iterator[int]:
    return (x + 10 for x in range(10))


def shard() -> Iterator[int]:
    return iter(range(ar.cluster.current_worker_index(), 10, 3))


def shuffled() -> Iterator[int]:
    rng = np.random.default_rng(ar.cluster.current_worker_index())
    return iter(rng.permutation(100).tolist())


def worker_index(gate: Gate) -> int:
    gate.pass_through()
    return ar.cluster.current_worker_index()


def drain(iterator: Iterator[int], gate: Gate) -> list[int]:
    found = list(iterator)
    gate.pass_through()  # so that each worker runs one of these
    return found


async def on_each_worker(cluster: Cluster, fn: Any, *args: Any, num_workers: int = 3) -> list[Any]:
    """Run a closure that passes a gate once on each worker."""
    gate = Gate()
    remotes = [await cluster.coordinator.schedule(fn, (*args, gate)) for _ in range(num_workers)]
    await gate.reached(num_workers)
    gate.open()
    return [await remote.fetch() for remote in remotes]


async def test_workers_have_indices(cluster: Cluster) -> None:
    assert sorted(await on_each_worker(cluster, worker_index)) == [0, 1, 2]
    with pytest.raises(ContextError, match="closure"):
        ar.cluster.current_worker_index()


async def test_a_dataset_knows_its_worker(cluster: Cluster) -> None:
    dataset = cluster.coordinator.create_per_worker_dataset(shard)
    found = await on_each_worker(cluster, drain, iter(dataset))
    assert sorted(found) == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


async def test_datasets_may_be_shuffled_differently(cluster: Cluster) -> None:
    dataset = cluster.coordinator.create_per_worker_dataset(shuffled)
    found = await on_each_worker(cluster, drain, iter(dataset))
    assert [sorted(each) for each in found] == [list(range(100))] * 3
    assert found[0] != found[1] != found[2]


@pytest.mark.parametrize(
    ("dataset", "first"), [(numbers, 0), (mapped, 10), (range(10), 0)], ids=["fn", "map", "data"]
)
async def test_the_first_element_of_a_dataset(cluster: Cluster, dataset: Any, first: int) -> None:
    per_worker = cluster.coordinator.create_per_worker_dataset(dataset)
    remote = await cluster.coordinator.schedule(take, (iter(per_worker),))
    assert await remote.fetch() == first


async def test_an_array_dataset_gives_batches(cluster: Cluster) -> None:
    data = ar.ArrayDataset(np.arange(1, 11), batch_size=4)
    per_worker = cluster.coordinator.create_per_worker_dataset(data)
    remote = await cluster.coordinator.schedule(take, (iter(per_worker),))
    np.testing.assert_array_equal(await remote.fetch(), [1, 2, 3, 4])


def add_next(count: Any, iterator: Iterator[int]) -> int:
    x = next(iterator)
    count.assign_add(float(x))
    return x


def twos() -> Iterator[int]:
    return iter([2] * 10)


async def test_closures_share_an_iterator_of_their_worker(cluster: Cluster) -> None:
    iterator = iter(cluster.coordinator.create_per_worker_dataset(twos))
    for expected in (10, 20):
        for _ in range(5):
            await cluster.coordinator.schedule(add_next, (cluster.count, iterator))
        for _ in range(3):
            await cluster.coordinator.join()
        assert cluster.coordinator.done()
        assert await cluster.counted() == expected


async def test_an_iterator_goes_on_where_it_was(one_worker: Cluster) -> None:
    dataset = one_worker.coordinator.create_per_worker_dataset(numbers)
    iterator, other = iter(dataset), iter(dataset)
    found = [
        await (await one_worker.coordinator.schedule(take, (each,))).fetch()
        for each in (iterator, iterator, other, iterator)
    ]
    assert found == [0, 1, 0, 2]


def take_both(first: Iterator[int], second: Iterator[int]) -> int:
    return next(first) + next(second)


def from_five() -> range:
    return range(5, 10)


async def test_a_closure_takes_several_datasets(one_worker: Cluster) -> None:
    coordinator = one_worker.coordinator
    first, second, third = (
        iter(coordinator.create_per_worker_dataset(fn)) for fn in (numbers, from_five, numbers)
    )
    remotes = [
        await coordinator.schedule(take_both, pair) for pair in ((first, second), (third, second))
    ]
    assert await coordinator.fetch(remotes) == [5, 6]


async def test_iterators_that_are_forgotten_are_let_go(one_worker: Cluster) -> None:
    coordinator = one_worker.coordinator
    dataset = coordinator.create_per_worker_dataset(numbers)
    gone = []
    for _ in range(5):
        iterator = iter(dataset)
        gone.append(weakref.ref(iterator))
        assert await (await coordinator.schedule(take, (iterator,))).fetch() == 0
        await coordinator.join()
    del iterator
    gc.collect()
    assert [each() for each in gone] == [None] * 5


async def test_the_end_of_a_dataset_is_an_error_of_the_closure(one_worker: Cluster) -> None:
    iterator = iter(one_worker.coordinator.create_per_worker_dataset([1]))
    for _ in range(2):
        await one_worker.coordinator.schedule(take, (iterator,))
    with pytest.raises((StopIteration, RuntimeError, StopAsyncIteration)):
        await one_worker.coordinator.join()


async def test_a_dataset_is_not_iterated_on_the_coordinator(cluster: Cluster) -> None:
    iterator = iter(cluster.coordinator.create_per_worker_dataset(numbers))
    with pytest.raises(ContextError, match="schedule"):
        next(iterator)


async def test_datasets_of_the_strategy_itself_are_refused(cluster: Cluster) -> None:
    with pytest.raises((ContextError, ValueError), match="create_per_worker_dataset"):
        cluster.strategy.distribute_dataset(range(3))


class Counter:
    """Something a worker keeps."""

    def __init__(self) -> None:
        self.number = 0


def count_up(counter: Counter) -> int:
    counter.number += 1
    return counter.number


async def test_a_resource_is_made_once_per_worker_and_kept(one_worker: Cluster) -> None:
    resource = one_worker.coordinator.create_per_worker_resource(Counter)
    remotes = [await one_worker.coordinator.schedule(count_up, (resource,)) for _ in range(10)]
    assert await one_worker.coordinator.fetch(remotes) == list(range(1, 11))


def number_of(counter: Counter, gate: Gate) -> int:
    gate.pass_through()
    return counter.number


async def test_each_worker_has_its_own_resource(cluster: Cluster) -> None:
    resource = cluster.coordinator.create_per_worker_resource(Counter)
    for _ in range(10):
        await cluster.coordinator.schedule(count_up, (resource,))
    await cluster.coordinator.join()
    assert sum(await on_each_worker(cluster, number_of, resource)) == 10


async def test_a_resource_that_cannot_be_made_is_an_error_of_its_closures(cluster: Cluster) -> None:
    resource = cluster.coordinator.create_per_worker_resource(fail)
    remote = await cluster.coordinator.schedule(identity, (resource,))
    with pytest.raises(ValueError, match="bad batch"):
        await cluster.coordinator.join()
    with pytest.raises(ValueError, match="bad batch"):
        await remote.fetch()


async def test_a_resource_that_is_not_used_hurts_nothing(cluster: Cluster) -> None:
    good = cluster.coordinator.create_per_worker_resource(Counter)
    cluster.coordinator.create_per_worker_resource(fail)
    remote = await cluster.coordinator.schedule(count_up, (good,))
    await cluster.coordinator.join()
    assert await remote.fetch() == 1


async def test_resources_are_usable_after_an_error(one_worker: Cluster) -> None:
    iterator = iter(one_worker.coordinator.create_per_worker_dataset(numbers))
    first = await one_worker.coordinator.schedule(take, (iterator,))
    await one_worker.coordinator.schedule(fail)
    with pytest.raises(ValueError, match="bad batch"):
        await one_worker.coordinator.join()
    second = await one_worker.coordinator.schedule(take, (iterator,))
    await one_worker.coordinator.join()
    assert await one_worker.coordinator.fetch([first, second]) == [0, 1]


def make_variable() -> Any:
    return ar.Variable(np.zeros(()))


async def test_variables_are_not_made_by_a_dataset(cluster: Cluster) -> None:
    """In TensorFlow at the call; here where the function runs: on the worker, without a scope."""
    with cluster.strategy.scope():
        variable = ar.Variable(np.zeros(3))
    resource = cluster.coordinator.create_per_worker_resource(make_variable)
    remote = await cluster.coordinator.schedule(lambda v: type(v).__name__, (resource,))
    assert await remote.fetch() != type(variable).__name__
