"""Closures, pulls and pushes of parameter servers, beside the calls of Dask on the same cluster."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, final

import numpy as np

import aioreplica as ar

from ._dask_cluster import NUM_WORKERS, BareTable, dask_client, pull_and_push, spin, submit_bare
from ._loop_lag import lag_during
from ._measure import Contender, take_turns
from ._row import Row, Target, compared_row

LOOP = "asyncio"
MIB = 1024 * 1024
TABLE_SHAPE = (65_536, 256)  # 64 MiB of float32
NUM_SPARSE = TABLE_SHAPE[0] // 100
NUM_TABLES, FEW_SHAPE, NUM_FEW = 4, (16_384, 32), 164  # 1 % of 2 MiB
NUM_PUSHES = 5  # of few rows: one behind a push of 64 MiB finds nothing in the caches


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        num_rounds: Rounds of each comparison.
        closures: How many closures of 1 ms and of 10 ms make one sample.
        num_tables: Variables of 1 MiB that one sample pulls and pushes.
        num_results: Results of 16 MiB that come in for one sample.
    """

    num_rounds: int
    closures: dict[float, int]
    num_tables: int
    num_results: int


FULL = Plan(9, {0.001: 400, 0.01: 150}, 32, 12)
QUICK = Plan(2, {0.001: 40, 0.01: 20}, 4, 2)


async def measure_calls(plan: Plan) -> list[Row]:
    """Compare with Dask on one cluster."""
    async with dask_client() as client:
        strategy = ar.ParameterServerStrategy(client, num_ps=1)
        async with strategy, ar.ClusterCoordinator(strategy) as coordinator:
            rows = [
                await compare_closures(client, coordinator, seconds, num_closures, plan.num_rounds)
                for seconds, num_closures in plan.closures.items()
            ]
            rows += await compare_calls(client, strategy, coordinator, plan)
            rows.append(await compare_sparse(strategy, coordinator, plan))
            rows.append(await compare_together(strategy, coordinator, plan))
            rows.append(await compare_lag(client, coordinator, plan))
    return rows + await compare_copies(plan)


# ---- closures ------------------------------------------------------------------------------------


async def compare_closures(
    client: Any, coordinator: Any, seconds: float, num_closures: int, num_rounds: int
) -> Row:
    """Compare the time per closure of a sustained stream."""

    async def bare() -> float:
        begin_s = perf_counter()
        await submit_bare(client, num_closures, spin, seconds)
        return (perf_counter() - begin_s) / num_closures * 1e3

    async def ours() -> float:
        begin_s = perf_counter()
        for _ in range(num_closures):
            await coordinator.schedule(spin, (seconds,))
        await coordinator.join()
        return (perf_counter() - begin_s) / num_closures * 1e3

    samples = await take_turns({"ours": ours, "floor": bare}, num_rounds=num_rounds)
    return compared_row(
        f"a closure of {seconds * 1e3:.0f} ms, of many", LOOP, NUM_WORKERS, "ms",
        ours=samples["ours"], against="client.submit", floor=samples["floor"],
        target=Target("ratio", 1.2),
    )  # fmt: skip


# ---- pulls and pushes ----------------------------------------------------------------------------


def ours_pull_and_push(tables: list[Any], delta: Any) -> tuple[float, float]:
    """Pull and push each variable; return the µs of one of them."""
    begin_s = perf_counter()
    for table in tables:
        _ = table.value
    between_s = perf_counter()
    for table in tables:
        table.assign_add(delta)
    scale = 1e6 / len(tables)
    return (between_s - begin_s) * scale, (perf_counter() - between_s) * scale


async def compare_calls(client: Any, strategy: Any, coordinator: Any, plan: Plan) -> list[Row]:
    """Compare pulls and pushes of 1 MiB in a closure with calls of actors in a task."""
    num_elements = MIB // 4
    delta = np.ones(num_elements, np.float32)
    with strategy.scope():
        tables = [
            ar.Variable(np.zeros(num_elements, np.float32), name=f"table{i}")
            for i in range(plan.num_tables)
        ]
    actor = client.submit(BareTable, num_elements, actor=True, pure=False, resources={"PS": 1})
    bare = [await actor] * plan.num_tables
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "floor": []}
    for turn in range(plan.num_rounds + 1):
        samples = {
            "ours": await (await coordinator.schedule(ours_pull_and_push, (tables, delta))).fetch(),
            "floor": await client.submit(
                pull_and_push, bare, delta, pure=False, resources={"W": 1}
            ),
        }
        await coordinator.join()
        if turn:
            for name, sample in samples.items():
                found[name].append(sample)
    return [
        compared_row(
            f"{what} of 1 MiB", LOOP, NUM_WORKERS, "µs",
            ours=[sample[i] for sample in found["ours"]], against="a call of an actor",
            floor=[sample[i] for sample in found["floor"]], target=Target("ratio", 1.2),
        )
        for i, what in enumerate(("pull", "push"))
    ]  # fmt: skip


def push_sparse(optimizer: Any, table: Any, seed: int) -> float:
    """Push 1 % of the rows, several times; return the median ms."""
    rng = np.random.default_rng(seed)
    times = []
    for _ in range(NUM_PUSHES):
        rows = rng.choice(TABLE_SHAPE[0], NUM_SPARSE, replace=False)
        values = np.ones((NUM_SPARSE, TABLE_SHAPE[1]), np.float32)
        slices = ar.IndexedSlices(values, rows, TABLE_SHAPE)
        begin_s = perf_counter()
        optimizer.apply_gradients([(slices, table)])
        times.append((perf_counter() - begin_s) * 1e3)
    return median(times)


def push_dense(optimizer: Any, table: Any) -> float:
    """Push all rows; return the ms."""
    gradient = np.ones(TABLE_SHAPE, np.float32)
    begin_s = perf_counter()
    optimizer.apply_gradients([(gradient, table)])
    return (perf_counter() - begin_s) * 1e3


async def compare_sparse(strategy: Any, coordinator: Any, plan: Plan) -> Row:
    """Compare a gradient of few rows with one of all, each of a table of its own.

    A server writes two buffers of a variable in turn. Behind a push of few rows the other buffer
    lacks only these; behind a push of all it has to be copied, and a push of few rows to the same
    table would pay for that.
    """
    with strategy.scope():
        rarely = ar.Variable(lambda: np.zeros(TABLE_SHAPE, np.float32), name="sparse")
        wholly = ar.Variable(lambda: np.zeros(TABLE_SHAPE, np.float32), name="dense")
        optimizer = ar.optimizers.SGD(0.1)
    numbers = iter(range(10**9))

    async def sparse() -> float:
        args = (optimizer, rarely, next(numbers))
        milliseconds: float = await (await coordinator.schedule(push_sparse, args)).fetch()
        return milliseconds

    async def dense() -> float:
        remote = await coordinator.schedule(push_dense, (optimizer, wholly))
        milliseconds: float = await remote.fetch()
        return milliseconds

    samples = await take_turns({"ours": sparse, "floor": dense}, num_rounds=plan.num_rounds)
    await coordinator.join()
    return compared_row(
        "push of 1 % of 64 MiB", LOOP, NUM_WORKERS, "ms", ours=samples["ours"],
        against="push of all", floor=samples["floor"], target=Target("ratio", 0.05),
    )  # fmt: skip


def learn_rows(optimizer: Any, tables: list[Any], seed: int, is_together: bool) -> float:
    """Read a few rows of each table and push their gradients, several times; return the median ms.

    Together they are one message there and one back; otherwise each read is one.
    """
    rng = np.random.default_rng(seed)
    times = []
    for _ in range(NUM_PUSHES):
        rows = [rng.choice(FEW_SHAPE[0], NUM_FEW, replace=False) for _ in tables]
        pairs = [*zip(tables, rows, strict=True)]
        begin_s = perf_counter()
        if is_together:
            tables[0].rows(rows[0], ahead=pairs[1:])
        found = [(ar.IndexedSlices(v.rows(some), some, v.shape), v) for v, some in pairs]
        optimizer.apply_gradients(found)
        times.append((perf_counter() - begin_s) * 1e3)
    return median(times)


async def compare_together(strategy: Any, coordinator: Any, plan: Plan) -> Row:
    """Compare rows of several tables in one message with those of one table after the other."""
    with strategy.scope():
        tables = [
            ar.Variable(lambda: np.zeros(FEW_SHAPE, np.float32), name=f"few{i}")
            for i in range(NUM_TABLES)
        ]
        optimizer = ar.optimizers.SGD(0.1)
    numbers = iter(range(10**9))

    async def learn(*, is_together: bool) -> float:
        args = optimizer, tables, next(numbers), is_together
        milliseconds: float = await (await coordinator.schedule(learn_rows, args)).fetch()
        return milliseconds

    contenders: dict[str, Contender] = {
        "ours": partial(learn, is_together=True), "floor": partial(learn, is_together=False),
    }  # fmt: skip
    samples = await take_turns(contenders, num_rounds=plan.num_rounds)
    await coordinator.join()
    return compared_row(
        f"pull and push rows of {NUM_TABLES} tables", LOOP, NUM_WORKERS, "ms",
        ours=samples["ours"], against="one pull each", floor=samples["floor"],
    )  # fmt: skip


# ---- copies of servers ---------------------------------------------------------------------------


def pull_all(tables: list[Any]) -> None:
    """Pull each variable."""
    for table in tables:
        _ = table.value


def push_all(tables: list[Any], delta: Any) -> None:
    """Push to each variable."""
    for table in tables:
        table.assign_add(delta)


def push_same_rows(optimizer: Any, table: Any) -> None:
    """Push 1 % of the rows, the same ones several times."""
    rows = np.arange(NUM_SPARSE) * 100
    slices = ar.IndexedSlices(np.ones((NUM_SPARSE, TABLE_SHAPE[1]), np.float32), rows, TABLE_SHAPE)
    for _ in range(NUM_PUSHES):
        optimizer.apply_gradients([(slices, table)])


async def compare_copies(plan: Plan) -> list[Row]:
    """Compare closures on a server that has a copy with those on one that has none.

    A closure is over when the copy knows what it has pushed, so the program's time is taken.
    """
    async with dask_client(num_servers=2) as client, AsyncExitStack() as stack:
        found: dict[str, dict[str, Contender]] = {}
        for name, replicate in (("ours", True), ("floor", False)):
            strategy = ar.ParameterServerStrategy(client, replicate=replicate)
            await stack.enter_async_context(strategy)
            coordinator = await stack.enter_async_context(ar.ClusterCoordinator(strategy))
            for what, contender in _closures_of(strategy, coordinator, plan).items():
                found.setdefault(what, {})[name] = contender
        return [
            compared_row(
                f"{what}, with copies", LOOP, NUM_WORKERS, "ms", ours=samples["ours"],
                against="without", floor=samples["floor"],
            )
            for what, contenders in found.items()
            for samples in [await take_turns(contenders, num_rounds=plan.num_rounds)]
        ]  # fmt: skip


def _closures_of(strategy: Any, coordinator: Any, plan: Plan) -> dict[str, Contender]:
    """Return closures that pull or push; each gives the ms of one pull or push."""
    delta = np.ones(MIB // 4, np.float32)
    with strategy.scope():
        tables = [ar.Variable(np.zeros_like(delta)) for _ in range(plan.num_tables)]
        rows = ar.Variable(lambda: np.zeros(TABLE_SHAPE, np.float32), name="rows")
        optimizer = ar.optimizers.SGD(0.1)

    async def timed(fn: Any, args: tuple[Any, ...], count: int) -> float:
        begin_s = perf_counter()
        await (await coordinator.schedule(fn, args)).fetch()
        return (perf_counter() - begin_s) / count * 1e3

    async def pull() -> float:
        for table in tables:  # else the worker has it
            await table.assign_add(delta)
        return await timed(pull_all, (tables,), len(tables))

    async def push() -> float:
        return await timed(push_all, (tables, delta), len(tables))

    async def push_rows() -> float:
        return await timed(push_same_rows, (optimizer, rows), NUM_PUSHES)

    return {"pull of 1 MiB": pull, "push of 1 MiB": push, "push of 1 % of 64 MiB": push_rows}


# ---- the coordinator's loop ----------------------------------------------------------------------


def result_of(num_bytes: int) -> Any:
    """Return an array."""
    return np.ones(num_bytes, np.uint8)


async def compare_lag(client: Any, coordinator: Any, plan: Plan) -> Row:
    """Compare how late timers are while results of 16 MiB come in."""

    async def ours() -> None:
        remotes = [
            await coordinator.schedule(result_of, (16 * MIB,)) for _ in range(plan.num_results)
        ]
        for remote in remotes:
            await remote.fetch()
        await coordinator.join()

    async def bare() -> None:
        submit = partial(client.submit, result_of, 16 * MIB, pure=False, resources={"W": 1})
        for future in [submit() for _ in range(plan.num_results)]:
            await future

    contenders: dict[str, Contender] = {"ours": lag_during(ours), "floor": lag_during(bare)}
    samples = await take_turns(contenders, num_rounds=plan.num_rounds)
    return compared_row(
        "loop lag, results of 16 MiB", LOOP, NUM_WORKERS, "ms, p99", ours=samples["ours"],
        against="client.submit", floor=samples["floor"], target=Target("ours", 20.0),
    )  # fmt: skip


def closures_per_second(rows: list[Row]) -> dict[str, float]:
    """Return the rates of the rows about closures."""
    return {row.name: 1e3 / row.ours for row in rows if row.name.startswith("a closure")}
