"""Training gives the same on any division of replicas into workers."""

import asyncio
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.devices import list_devices
from aioreplica.strategies import MultiWorkerMirroredStrategy
from tests.strategies.workers import on_workers

pytestmark = pytest.mark.asyncio

NUM_EXAMPLES, BATCH, WIDTH = 22, 6, 5  # the last batch has 4 examples


def data(dtype: str) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((NUM_EXAMPLES, WIDTH)).astype(dtype)
    rows = rng.integers(0, 7, NUM_EXAMPLES)
    return {"x": x, "y": (x @ np.arange(WIDTH) + 0.5).astype(dtype), "row": rows}


def predicted(x: Any, w: Any) -> Any:
    return np.einsum("ij,j->i", x, w)  # no BLAS, whose small products may warn of nothing


def weighted_gradient(batch: dict[str, Any], w: Any) -> ar.Weighted:
    """Return the gradient of the squared error, summed over examples, and their number."""
    x, y = batch["x"], batch["y"]
    error = predicted(x, w) - y
    return ar.Weighted(2 * np.einsum("ij,i->j", x, error), len(x))


async def train(strategy: ar.Strategy, dtype: str) -> dict[str, Any]:
    with strategy.scope():
        rank = 0 if strategy._runtime.workers is None else strategy._runtime.workers.rank
        start = np.random.default_rng(rank).standard_normal(WIDTH)  # worker 0's counts
        w = ar.Variable(start.astype(dtype), name="w")
        table = ar.Variable(np.zeros((7, 2), dtype), name="table")
        adam = ar.optimizers.Adam(0.05, global_clipnorm=3.0)
        loss = ar.metrics.Mean("loss")
        seen = ar.Variable(
            0, name="seen", synchronization="on_read", aggregation="sum", dtype="int64"
        )

    async def step(batch: dict[str, Any]) -> Any:
        ctx = ar.get_replica_context()
        assert ctx is not None
        gradient = weighted_gradient(batch, w.value)
        error = predicted(batch["x"], w.value) - batch["y"]
        loss.update_state(error**2)
        await seen.assign_add(len(error))
        rows = batch["row"]
        slices = ar.IndexedSlices(np.ones((len(rows), 2), dtype), rows, (7, 2))
        pairs = [(gradient, w), (ar.Weighted(slices, len(error)), table)]
        await adam.apply_gradients(pairs)
        return await ctx.all_reduce("mean", w.value)

    dataset = ar.ArrayDataset(data(dtype), batch_size=BATCH)
    options = ar.InputOptions(sharding="data")
    async with strategy.distribute_dataset(dataset, options) as batches:
        for _ in range(3):
            async for batch in batches:
                await strategy.run(step, (batch,))
    await strategy.check_in_sync([w, table])
    return {
        "w": w.value,
        "table": table.value,
        "slots": [variable.value for variable in adam.variables],
        "loss": await loss.read(),
        "seen": await strategy.extended.read_var(seen),
    }


async def one_worker(num_replicas: int, dtype: str) -> dict[str, Any]:
    async with ar.MirroredStrategy(list_devices("cpu")[:num_replicas]) as strategy:
        return await train(strategy, dtype)


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for name in ("w", "table", "loss"):
        np.testing.assert_allclose(found[name], expected[name], rtol=tolerance, atol=tolerance)
    for a, b in zip(found["slots"], expected["slots"], strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    assert found["seen"] == expected["seen"] == 3 * NUM_EXAMPLES


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-12)])
async def test_two_workers_of_two_equal_one_of_four_four_of_one_and_one_of_one(
    dtype: str, tolerance: float
) -> None:
    base = await one_worker(1, dtype)

    assert_close(await one_worker(4, dtype), base, tolerance)
    for division in ((2, 2), (4, 1), (1, 4)):
        results = await on_workers(*division, lambda strategy: train(strategy, dtype))
        for result in results:
            assert_close(result, base, tolerance)
            np.testing.assert_array_equal(result["w"], results[0]["w"])


async def test_results_are_bitwise_the_same_from_run_to_run() -> None:
    first, second = [
        await on_workers(2, 2, lambda strategy: train(strategy, "float32")) for _ in range(2)
    ]

    for a, b in zip(first, second, strict=True):
        assert a["w"].tobytes() == b["w"].tobytes()
        assert a["loss"] == b["loss"]
        for x, y in zip(a["slots"], b["slots"], strict=True):
            assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("kind", ["metric", "read_var", "check_in_sync"])
async def test_a_read_sees_what_the_runs_before_it_have_written(kind: str) -> None:
    """One worker asks in the middle of the run, the other one behind it: the moment is one."""

    async def program(strategy: MultiWorkerMirroredStrategy) -> float:
        with strategy.scope():
            total = ar.metrics.Sum()
            count = ar.Variable(0.0, synchronization="on_read", aggregation="sum")
            mirrored = ar.Variable(0.0, aggregation="sum")
        started, gate = asyncio.Event(), asyncio.Event()

        async def step() -> None:
            started.set()
            await gate.wait()
            total.update_state(1.0)
            await count.assign_add(1.0)
            await mirrored.assign_add(1.0)

        run = asyncio.create_task(strategy.run(step))
        await started.wait()
        assert strategy._runtime.workers is not None
        if strategy._runtime.workers.rank == 0:
            asyncio.get_running_loop().call_soon(gate.set)  # once the call below waits
        else:
            gate.set()
            await run
        found: object
        if kind == "metric":
            found = await total.read()
        elif kind == "read_var":
            found = await strategy.extended.read_var(count)
        else:
            await strategy.check_in_sync([mirrored])
            found = mirrored.value
        await run
        return float(np.asarray(found))

    assert await on_workers(2, 1, program) == [2.0] * 2
