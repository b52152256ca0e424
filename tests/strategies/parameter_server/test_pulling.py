"""Values and rows of several variables: how many messages, how old they are, and counted once."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.autodiff import embedding_lookup, embedding_lookup_sparse
from aioreplica.errors import ContextError, WorkerLostError
from aioreplica.strategies.parameter_server import _server
from tests.parameter_server.coordinating import Gate

from .opening import opened

NUM_TABLES, NUM_ROWS = 4, 6
START = np.arange(NUM_ROWS * 2.0).reshape(NUM_ROWS, 2)
ROWS = np.array([[1, 4], [4, 0]])
CUT: dict[str, Any] = {"num_ps": 2, "variable_partitioner": ar.FixedShardsPartitioner(2)}


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often servers were called."""
    found: Counter[str] = Counter()

    def counted(name: str) -> Any:
        method = getattr(_server.ParameterServer, name)

        def call(server: Any, *args: Any) -> Any:
            found[name] += 1
            return method(server, *args)

        return call

    for name in ("pull", "push"):
        monkeypatch.setattr(_server.ParameterServer, name, counted(name))
    return found


def tables_in(strategy: Any) -> tuple[list[Any], Any]:
    with strategy.scope():
        tables = [ar.Variable(START + i, name=f"table{i}") for i in range(NUM_TABLES)]
        return tables, ar.optimizers.SGD(1.0)


def learn(tables: Any, optimizer: Any, gate: Gate | None = None) -> list[Any]:
    first, *others = tables
    found = [first.rows(ROWS, ahead=[(table, ROWS) for table in others])]
    found += [table.rows(ROWS) for table in others]
    bags = embedding_lookup_sparse(tables[0], [4, 1], [0, 0], combiner="sum")
    found += [embedding_lookup(tables[1], [0]), bags]
    slices = [ar.IndexedSlices(np.ones((2, 2)), [1, 4], table.shape) for table in tables]
    optimizer.apply_gradients(list(zip(slices, tables, strict=True)))
    if gate is not None:
        gate.pass_through()
    return found


@pytest.mark.asyncio
async def test_rows_of_several_variables_are_one_message_to_each_server(
    messages: Counter[str],
) -> None:
    async with opened(**CUT) as (strategy, coordinator):
        tables, optimizer = tables_in(strategy)
        remote = await coordinator.schedule(learn, (tables, optimizer))
        await coordinator.join()
        assert messages == {"pull": 2, "push": 2}
        *rows, row, bag = await remote.fetch()
        for i, found in enumerate(rows):
            np.testing.assert_array_equal(found, (START + i)[ROWS])
        np.testing.assert_array_equal(row, START[[0]] + 1)
        np.testing.assert_array_equal(bag, START[4:5] + START[1:2])
        expected = START.copy()
        expected[[1, 4]] -= 1
        for i, table in enumerate(tables):
            np.testing.assert_array_equal(await table.read(), expected + i)


def read_in_turn(tables: Any) -> Any:
    a, b, c, d = tables
    row = a.rows([5], ahead=[a, (b, [1]), (b, [[4]]), (c, []), a, (d, ROWS), d])
    found = [a.value, row, b.rows([4, 1, 4]), c.rows([]), d.rows([3]), d.value]
    a.rows([], ahead=[a, (a, [0]), (d, [1])])
    return found


@pytest.mark.asyncio
async def test_values_and_rows_are_one_message_to_each_server(messages: Counter[str]) -> None:
    async with opened(**CUT) as (strategy, coordinator):
        tables, _ = tables_in(strategy)
        whole, rows, others, none, some, last = await (
            await coordinator.schedule(read_in_turn, (tables,))
        ).fetch()
        assert messages == {"pull": 2}
        np.testing.assert_array_equal(whole, START)
        np.testing.assert_array_equal(rows, START[[5]])
        np.testing.assert_array_equal(others, START[[4, 1, 4]] + 1)
        assert none.shape == (0, 2)
        np.testing.assert_array_equal(some, START[[3]] + 3)
        np.testing.assert_array_equal(last, START + 3)


def read_others(table: Any) -> list[Any]:
    found = [table.rows([2], ahead=[(table, [1])]), table.rows([2, 3])]  # the second is not there
    table.assign_add(ar.IndexedSlices(np.ones((1, 2)), [2], table.shape))
    return [*found, table.rows([2])]


@pytest.mark.asyncio
async def test_rows_that_were_not_pulled_or_were_written_are_pulled(
    messages: Counter[str],
) -> None:
    async with opened() as (strategy, coordinator):
        tables, _ = tables_in(strategy)
        remote = await coordinator.schedule(read_others, (tables[0],))
        before, others, after = await remote.fetch()
        assert messages == {"pull": 3, "push": 1}
        np.testing.assert_array_equal(before, START[[2]])
        np.testing.assert_array_equal(others, START[[2, 3]])
        np.testing.assert_array_equal(after, START[[2]] + 1)


def read_in_shapes(table: Any, other: Any, indices: Any) -> list[Any]:
    found = [table.rows(indices), table.rows(indices, ahead=[(other, [3, 0, 5])])]
    found += [table.rows(indices), embedding_lookup(table, indices)]
    return [*found, other.rows(indices), embedding_lookup(other, indices)]


@pytest.mark.asyncio
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("shape", [(), (0,), (2,), (2, 2), (0, 3)])
async def test_rows_have_the_shape_of_their_indices(
    messages: Counter[str], shape: tuple[int, ...], *, there: bool
) -> None:
    chosen = np.resize([5, 3] if there else [1, 3], shape)
    async with opened(**CUT) as (strategy, coordinator):
        tables, _ = tables_in(strategy)
        remote = await coordinator.schedule(read_in_shapes, (*tables[:2], chosen))
        found = await remote.fetch()
        for i, rows in enumerate(found):
            np.testing.assert_array_equal(rows, START[chosen] + (i > 3), strict=True)


def read_ahead_again(table: Any, other: Any, gate: Gate) -> list[Any]:
    table.rows([0], ahead=[(other, [2, 5])])
    gate.pass_through()
    table.rows([0, 1], ahead=[(other, [3, 2, 0])])
    table.rows([1, 0], ahead=[(other, [5])])
    found = [other.rows(rows) for rows in ([0, 2, 3, 5], 2, [5, 0])]
    return [*found, table.rows([1, 0])]


@pytest.mark.asyncio
async def test_another_ahead_adds_to_the_one_before(messages: Counter[str]) -> None:
    """What was pulled before stays as old as it is; only what is new comes."""
    async with opened() as (strategy, coordinator):
        tables, _ = tables_in(strategy)
        gate = Gate()
        remote = await coordinator.schedule(read_ahead_again, (*tables[:2], gate))
        await gate.reached()
        await tables[1].assign_add(np.full_like(START, 10.0))
        messages.clear()
        gate.open()
        several, one, two, others = await remote.fetch()
        assert messages == {"pull": 1}
        now = START + 1
        now[[0, 3]] += 10
        np.testing.assert_array_equal(several, now[[0, 2, 3, 5]])
        np.testing.assert_array_equal(one, now[2])
        np.testing.assert_array_equal(two, now[[5, 0]])
        np.testing.assert_array_equal(others, START[[1, 0]])


def descend_from_old_rows(table: Any, optimizer: Any, gate: Gate) -> None:
    table.rows([0], ahead=[(table, [1])])
    gate.pass_through()
    slices = ar.IndexedSlices(table.rows([1]), [1], table.shape)
    optimizer.apply_gradients([(slices, table)])


@pytest.mark.asyncio
@pytest.mark.parametrize(("max_staleness", "stale"), [(0, 1), (1, 0)])
async def test_rows_are_as_old_as_the_pull(max_staleness: int, stale: int) -> None:
    async with opened(max_staleness=max_staleness) as (strategy, coordinator):
        tables, optimizer = tables_in(strategy)
        gate = Gate()
        await coordinator.schedule(descend_from_old_rows, (tables[0], optimizer, gate))
        await gate.reached()
        await tables[0].assign_add(np.ones_like(START))
        gate.open()
        await coordinator.join()
        assert coordinator.statistics().pushes_stale == stale


@pytest.mark.asyncio
@pytest.mark.parametrize("replicate", [False, True])
async def test_a_closure_that_runs_again_counts_once(*, replicate: bool) -> None:
    async with (
        asyncio.timeout(30),
        opened(2, replicate=replicate, **CUT) as (strategy, coordinator),
    ):
        tables, optimizer = tables_in(strategy)
        gate = Gate()
        await coordinator.schedule(learn, (tables, optimizer, gate))
        await gate.reached()  # all is pushed
        if replicate:
            strategy.engine.lose_server(0)
        strategy.engine.lose_worker("worker-0")
        await gate.reached()  # once more, on the other worker
        gate.open()
        await coordinator.join()
        expected = START.copy()
        expected[[1, 4]] -= 1
        for i, table in enumerate(tables):
            np.testing.assert_array_equal(await table.read(), expected + i)
        assert await optimizer.iterations.read() == 1


def pull_of(table: Any, wanted: Any) -> None:
    table.rows([1], ahead=[wanted, (table, [9])])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("wanted", "error", "words"),
    [
        (3, TypeError, r"ahead takes variables and pairs .* got 3 \(int\)"),
        ([1, 2, 3], TypeError, r"got \[1, 2, 3\] \(list\)"),
        ((START, [1]), TypeError, "ahead takes variables and pairs"),
    ],
)
async def test_what_cannot_be_pulled_is_refused(
    messages: Counter[str], wanted: Any, error: type[Exception], words: str
) -> None:
    async with opened() as (strategy, coordinator):
        tables, _ = tables_in(strategy)
        remote = await coordinator.schedule(pull_of, (tables[0], wanted), isolate=True)
        with pytest.raises(error, match=words):
            await remote.fetch()
        remote = await coordinator.schedule(pull_of, (tables[0], tables[1]), isolate=True)
        with pytest.raises(ValueError, match="Row 9 is out of range: variable 'table0'"):
            await remote.fetch()
        assert not messages


@pytest.mark.asyncio
async def test_it_belongs_into_closures() -> None:
    async with opened() as (strategy, _):
        tables, _ = tables_in(strategy)
        with pytest.raises(ContextError, match="outside a closure"):
            tables[0].rows([1], ahead=[tables[1]])


def pull_own(own: Any, table: Any) -> float:
    table.rows([], ahead=[own, (own, [0]), table])
    return float(own.value[0] + table.value[0, 1])


@pytest.mark.asyncio
async def test_what_the_worker_has_is_not_pulled(messages: Counter[str]) -> None:
    async with opened() as (strategy, coordinator):
        tables, _ = tables_in(strategy)
        own = coordinator.create_per_worker_variable(np.array([4.0]))
        assert await (await coordinator.schedule(pull_own, (own, tables[0]))).fetch() == 5.0
        assert messages == {"pull": 1}


def total(w: Any) -> float:
    return float(np.sum(w.value))


def add_one(w: Any) -> None:
    w.assign_add(np.ones(w.shape))


@pytest.mark.asyncio
@pytest.mark.parametrize("num_pushes", [0, 1])
async def test_a_variable_that_was_lost_and_assigned_is_pulled_anew(num_pushes: int) -> None:
    """Its versions begin anew, and come to those of values that the worker has kept."""
    async with opened() as (strategy, coordinator):
        with strategy.scope():
            w = ar.Variable(np.zeros(8), name="w")
        for _ in range(num_pushes):
            await coordinator.schedule(add_one, (w,))
        assert await (await coordinator.schedule(total, (w,))).fetch() == 8.0 * num_pushes
        strategy.engine.lose_server(0)
        with pytest.raises(WorkerLostError):
            await w.read()
        await w.assign(np.full(8, 10.0))
        for _ in range(num_pushes):
            await coordinator.schedule(add_one, (w,))
        assert await (await coordinator.schedule(total, (w,))).fetch() == 80.0 + 8.0 * num_pushes
