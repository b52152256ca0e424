"""Every object that lives long, used again and again: it leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.cluster import LocalClosureEngine, LocalCommunicator
from aioreplica.integrations import opentelemetry, prometheus, tensorboard
from aioreplica.integrations.asgi import OnlineService
from aioreplica.online import OnlineLearner
from tests.cluster.thread_engine import ThreadCommunicator
from tests.conftest import STRATEGIES, mirrored, one_worker
from tests.growth import assert_nothing_grows

pytestmark = pytest.mark.asyncio


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


async def step(x: Any = 1.0) -> Any:
    ctx = me()
    await ctx.run_on_device(np.ones, 3)
    return await ctx.all_reduce("sum", x)


# ---- strategies ------------------------------------------------------------------------------


KINDS: dict[str, Callable[[], ar.Strategy]] = {**STRATEGIES, "workers-1": lambda: one_worker(2)}


@pytest.mark.xslow
@pytest.mark.parametrize("kind", KINDS)
async def test_strategies(kind: str, tmp_path: Path) -> None:
    async def open_and_close(number: int) -> None:
        async with KINDS[kind]() as strategy:
            await strategy.run(step)
            if kind != "default":
                with pytest.raises(ZeroDivisionError):
                    await strategy.run(fail)

    async def fail() -> None:
        raise ZeroDivisionError

    await assert_nothing_grows(open_and_close, tmp_path)


@pytest.mark.xslow
async def test_datasets_read_to_the_end_left_early_and_in_device_loops(tmp_path: Path) -> None:
    def sum_up(_ctx: Any, x: Any) -> None:
        me().blocking.all_reduce("sum", x.sum())

    async def read(strategy: ar.Strategy, source: Any, *, is_left: bool) -> None:
        async with strategy.distribute_dataset(source) as batches:
            async for batch in batches:
                await strategy.run(step, args=(batch,))
                if is_left:
                    return
            await strategy.run_steps(sum_up, batches, 2)

    async def read_both(number: int) -> None:
        async with mirrored(2) as strategy:
            for source in (ar.ArrayDataset(np.ones((16, 2)), 4), [np.ones((4, 2))] * 4):
                await read(strategy, source, is_left=bool(number % 2))

    await assert_nothing_grows(read_both, tmp_path)


@pytest.mark.xslow
async def test_watching_tracing_and_exporters(tmp_path: Path) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider
    from prometheus_client import CollectorRegistry

    registry, meters, spans = CollectorRegistry(), MeterProvider(), TracerProvider()
    strategy = mirrored(2)

    async def watch(number: int) -> None:
        async with strategy.watch_loop(logger=logging.getLogger("growth")):
            with (
                prometheus.export(strategy, registry=registry, name="growth"),
                opentelemetry.export_metrics(strategy, meter_provider=meters, name="growth"),
                opentelemetry.export_spans(strategy, tracer_provider=spans),
            ):
                await strategy.run(step)
        async with strategy.trace(tmp_path / "trace.json"):
            await strategy.run(step)

    async with strategy:
        await assert_nothing_grows(watch, tmp_path)
    meters.shutdown()
    spans.shutdown()


@pytest.mark.xslow
async def test_tensorboard_writers_and_servers_of_metrics(tmp_path: Path) -> None:
    from prometheus_client import CollectorRegistry

    strategy = mirrored(2)

    async def export(number: int) -> None:
        with prometheus.serve(0, registry=CollectorRegistry()):
            pass
        folder = tmp_path / "events"
        with tensorboard.export(strategy, folder):
            await strategy.run(step)
        for file in folder.iterdir():
            file.unlink()

    async with strategy:
        await assert_nothing_grows(export, tmp_path, times=6)


# ---- training --------------------------------------------------------------------------------


@pytest.mark.xslow
async def test_checkpoint_managers_opened_saved_and_restored(folder: Path) -> None:
    v = ar.Variable(np.zeros(4))

    async def save(number: int) -> None:
        async with ar.CheckpointManager(folder / "steps", max_to_keep=2) as manager:
            await manager.save(number, {"v": v})
            await manager.restore({"v": v})

    await assert_nothing_grows(save, folder)


@pytest.mark.xslow
async def test_variables_optimizers_and_windows_of_gradients(tmp_path: Path) -> None:
    strategy = mirrored(2)

    async def train(number: int) -> None:
        with strategy.scope():
            w = ar.Variable(np.ones(3))
            optimizer = ar.optimizers.Adam(0.1)
            window = ar.GradientAccumulator(ar.optimizers.SGD(0.1))

        async def learn() -> None:
            await optimizer.apply_gradients([(np.ones(3), w)])
            await window.add([(np.ones(3), w)])
            await window.apply()

        await strategy.run(learn)

    async with strategy:
        await assert_nothing_grows(train, tmp_path)


# ---- online ----------------------------------------------------------------------------------


@asynccontextmanager
async def new_learner(folder: Path) -> AsyncIterator[tuple[OnlineLearner, ar.Variable]]:
    strategy = mirrored(2)
    manager = ar.CheckpointManager(folder / "steps", max_to_keep=2)
    with strategy.scope():
        w = ar.Variable(0.0, aggregation="sum")

    async def learn(ctx: ar.ReplicaContext, batch: Any) -> None:
        if (batch["x"] < 0).any():
            raise ValueError("negative")
        await w.assign_add(float(batch["x"].sum()))

    learner = OnlineLearner(
        strategy, learn, {"w": w}, max_batch=4, queue_size=50,
        checkpoints=manager, journal=folder / "journal.db", publish_to=folder / "published",
        max_delay_s=0.0,
    )  # fmt: skip
    async with strategy, manager:
        yield learner, w


async def use(learner: OnlineLearner, number: int) -> None:
    await (await learner.submit({"x": 1.0}, key=f"key {number}"))
    await (await learner.submit({"x": 1.0}, key=f"key {number}"))
    poisoned = await learner.submit({"x": -1.0})
    with pytest.raises(ar.errors.PoisonedExampleError):
        await poisoned
    await learner.discard(poisoned.number)


@pytest.mark.xslow
async def test_learners_opened_again_with_their_journals(tmp_path: Path) -> None:
    async def learn(number: int) -> None:
        async with new_learner(tmp_path) as (learner, _), learner:
            await use(learner, number)

    await assert_nothing_grows(learn, tmp_path)


@pytest.mark.xslow
async def test_a_learner_that_is_used_for_long(tmp_path: Path) -> None:
    async with new_learner(tmp_path) as (learner, _), learner:

        async def learn(number: int) -> None:
            await use(learner, number)
            await learner.checkpoint()

        await assert_nothing_grows(learn, tmp_path)


@pytest.mark.xslow
async def test_lifespans_of_a_service_and_its_followers(tmp_path: Path) -> None:
    async with new_learner(tmp_path) as (learner, w):
        service = OnlineService(
            learner, lambda snapshot, x: x * snapshot[w], input_like=np.zeros(1)
        )

        async def serve(number: int) -> None:
            async with service.lifespan():
                await (await learner.submit({"x": 1.0}))
                followed = asyncio.Event()
                following = asyncio.create_task(follow(service, followed))
                await followed.wait()
            await following

        await assert_nothing_grows(serve, tmp_path)


async def follow(service: OnlineService, followed: asyncio.Event) -> None:
    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message.get("body"):
            followed.set()

    scope = {"type": "http", "method": "GET", "path": "/events", "root_path": ""}
    await service({**scope, "headers": [(b"host", b"localhost")]}, receive, send)


# ---- several workers -------------------------------------------------------------------------


@pytest.mark.xslow
@pytest.mark.parametrize("kind", [LocalCommunicator, ThreadCommunicator])
async def test_groups_of_workers(kind: Any, tmp_path: Path) -> None:
    async def meet(number: int) -> None:
        group = kind.group(2, timeout=60.0)
        assert await asyncio.gather(*(c.all_reduce(c.rank) for c in group)) == [1, 1]
        pair = [c.split([0, 1]) for c in group]
        await asyncio.gather(*(c.barrier() for c in pair))
        await asyncio.gather(*(c.aclose() for c in (*pair, *group)))

    await assert_nothing_grows(meet, tmp_path)


@pytest.mark.xslow
@pytest.mark.parametrize("kind", [LocalCommunicator, ThreadCommunicator])
async def test_splits_of_a_group_that_goes_on(kind: Any, tmp_path: Path) -> None:
    group = kind.group(2, timeout=60.0)

    async def split(number: int) -> None:
        pair = [c.split([0, 1]) for c in group]
        await asyncio.gather(*(c.barrier() for c in pair))
        await asyncio.gather(*(c.aclose() for c in pair))
        await asyncio.gather(*(c.barrier() for c in group))

    await assert_nothing_grows(split, tmp_path)
    await asyncio.gather(*(c.aclose() for c in group))


@pytest.mark.xslow
async def test_coordinators_of_closures(tmp_path: Path) -> None:
    async def coordinate(number: int) -> None:
        async with (
            ar.ParameterServerStrategy(LocalClosureEngine(2), num_ps=2) as strategy,
            ar.ClusterCoordinator(strategy) as coordinator,
        ):
            with strategy.scope():
                counter = ar.Variable(0, name="counter")
            for _ in range(3):
                await coordinator.schedule(add_one, (counter,), timeout_s=60.0)
            await coordinator.join()
            assert int(await counter.read()) == 3

    await assert_nothing_grows(coordinate, tmp_path)


def add_one(counter: Any) -> None:
    counter.assign_add(1)
