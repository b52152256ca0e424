"""A closure on its worker: how old its rows are, and what is left of it."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.cluster import LocalClosureEngine
from aioreplica.errors import StallError
from aioreplica.strategies.parameter_server._packing import Packed
from tests.strategies.parameter_server.opening import opened


async def descend_twice(w: Any, optimizer: Any, rows: Any) -> None:
    for _ in range(2):
        slices = ar.IndexedSlices(w.rows(rows), rows, w.shape)
        await optimizer.apply_gradients([(slices, w)])


async def descend_twice_from_old_rows(w: Any, optimizer: Any, rows: Any) -> None:
    slices = ar.IndexedSlices(w.rows(rows), rows, w.shape)
    for _ in range(2):
        await optimizer.apply_gradients([(slices, w)])


@pytest.mark.asyncio
@pytest.mark.parametrize(("fn", "stale"), [(descend_twice, 0), (descend_twice_from_old_rows, 1)])
async def test_rows_are_as_old_as_their_last_read(fn: Any, stale: int) -> None:
    async with (
        ar.ParameterServerStrategy(LocalClosureEngine(1), max_staleness=0) as strategy,
        ar.ClusterCoordinator(strategy) as coordinator,
    ):
        with strategy.scope():
            w, optimizer = ar.Variable(np.full((4, 2), 9.0)), ar.optimizers.SGD(0.5)
        await coordinator.schedule(fn, (w, optimizer, np.array([1, 3])))
        await coordinator.join()
        assert coordinator.statistics().pushes_stale == stale


SIZE = 54_321
"""Bytes of an argument that is as large as no other one."""


@pytest.mark.asyncio
async def test_arguments_go_when_a_closure_is_over() -> None:
    async with (
        ar.ParameterServerStrategy(LocalClosureEngine(1)) as strategy,
        ar.ClusterCoordinator(strategy) as coordinator,
    ):
        remote = await coordinator.schedule(len, (bytes(SIZE),))
        await coordinator.join()
        assert await remote.fetch() == SIZE
        gc.collect()
        packed = [each for each in gc.get_objects() if type(each) is Packed]
        assert not [each for each in packed if SIZE <= each.num_bytes < SIZE + 4096]
        assert remote.done()


def learn_bags(table: Any, optimizer: Any, indices: Any, segments: Any) -> float:
    def loss() -> Any:
        bags = ar.autodiff.embedding_lookup_sparse(table, indices, segments, combiner="mean")
        return (bags**2).sum() / 2

    return float(optimizer.blocking.minimize(loss))


@pytest.mark.asyncio
async def test_bags_of_a_cut_table_pull_and_push_their_rows_only() -> None:
    pytest.importorskip("autograd")
    start = np.arange(12.0).reshape(6, 2)
    async with (
        ar.ParameterServerStrategy(
            LocalClosureEngine(1), num_ps=2, variable_partitioner=ar.FixedShardsPartitioner(2)
        ) as strategy,
        ar.ClusterCoordinator(strategy) as coordinator,
    ):
        with strategy.scope():
            table, sgd = ar.Variable(start), ar.optimizers.SGD(1.0)
        remote = await coordinator.schedule(learn_bags, (table, sgd, [5, 1, 1], [0, 0, 1]))
        await coordinator.join()
        assert coordinator.statistics().bytes_pulled < start.nbytes
        mean = (start[5] + start[1]) / 2
        assert await remote.fetch() == (np.sum(mean**2) + np.sum(start[1] ** 2)) / 2
        expected = start.copy()
        expected[5] -= mean / 2
        expected[1] -= mean / 2 + start[1]
        np.testing.assert_allclose(await table.read(), expected)


async def wait_at_most(limit_s: float) -> None:
    async with asyncio.timeout(limit_s):
        await asyncio.sleep(30.0)


@pytest.mark.parametrize(
    ("limit_s", "kind", "text"),
    [(10.0, TimeoutError, None), (60.0, StallError, "has not ended within 20 s")],
)
def test_a_timeout_of_its_own_is_not_that_of_the_closure(
    limit_s: float, kind: type[Exception], text: str | None
) -> None:
    async def main() -> None:
        async with opened(1) as (_, coordinator):
            remote = await coordinator.schedule(
                wait_at_most, (limit_s,), timeout_s=20.0, isolate=True
            )
            with pytest.raises(TimeoutError, match=text) as caught:
                await remote.fetch()
            assert type(caught.value) is kind

    art.run(main)
