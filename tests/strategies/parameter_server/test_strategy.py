"""The strategy and its coordinator, with servers and workers in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.cluster import LocalClosureEngine
from aioreplica.errors import ClosureCancelledError, ContextError, NonFiniteError, WorkerLostError
from tests.strategies.parameter_server.opening import count_twice, descend_by_rows, fail, opened

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: ar.optimizers.SGD(0.1, momentum=0.9),
    "adagrad": lambda: ar.optimizers.Adagrad(0.1),
    "rmsprop": lambda: ar.optimizers.RMSprop(0.1),
    "adam": lambda: ar.optimizers.Adam(0.1, clipnorm=0.5),
    "adamw": lambda: ar.optimizers.AdamW(0.1, global_clipnorm=0.5),
}


def descend(w: Any, optimizer: Any, target: Any) -> None:
    optimizer.apply_gradients([(w.value - target, w)])


@pytest.mark.asyncio
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_shards", [1, 3])
async def test_closures_one_by_one_train_as_without_servers(name: str, num_shards: int) -> None:
    start = np.arange(10.0).reshape(5, 2)
    targets = np.linspace(-1, 1, 6)
    plain, rule = ar.Variable(start), OPTIMIZERS[name]()
    for target in targets:
        await rule.apply_gradients([(plain.value - target, plain)])
    partitioner = ar.FixedShardsPartitioner(num_shards)
    async with opened(num_ps=2, variable_partitioner=partitioner) as (strategy, coordinator):
        with strategy.scope():
            w, optimizer = ar.Variable(start), OPTIMIZERS[name]()
        for target in targets:
            await coordinator.schedule(descend, (w, optimizer, target))
        await coordinator.join()
        np.testing.assert_allclose(await w.read(), plain.value, rtol=1e-12)
        assert int(await optimizer.iterations.read()) == 6


@pytest.mark.asyncio
async def test_rows_touch_only_their_shard() -> None:
    async with opened(num_ps=2, variable_partitioner=ar.FixedShardsPartitioner(2)) as opened_:
        strategy, coordinator = opened_
        with strategy.scope():
            w, optimizer = ar.Variable(np.zeros((6, 2))), ar.optimizers.Adagrad(0.5)
        await coordinator.schedule(descend_by_rows, (w, optimizer, np.array([4, 5, 4])))
        await coordinator.join()
        value = await w.read()
        assert not value[:4].any()
        assert value[4:].all()
        assert coordinator.statistics().pushes == 2  # the rows and the count
        assert (await w.read([5, 0, 5])).tolist() == value[[5, 0, 5]].tolist()


async def count_and_wait(counter: Any) -> int:
    counter.assign_add(1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    counter.assign_add(1)
    return 7


@pytest.mark.asyncio
@pytest.mark.parametrize("lost_after", range(6))
async def test_a_closure_of_a_lost_worker_counts_once(lost_after: int) -> None:
    async with opened(2) as (strategy, coordinator):
        with strategy.scope():
            counter = ar.Variable(0)
        remotes = [await coordinator.schedule(count_and_wait, (counter,)) for _ in range(3)]
        for _ in range(lost_after):
            await asyncio.sleep(0)
        strategy.engine.lose_worker("worker-0")
        await coordinator.join()
        assert int(await counter.read()) == 6
        assert await coordinator.fetch({"all": remotes}) == {"all": [7, 7, 7]}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, StopIteration, SystemExit])
async def test_the_first_error_is_raised_once_and_cancels_the_rest(kind: Any) -> None:
    async with opened(1) as (strategy, coordinator):
        with strategy.scope():
            counter = ar.Variable(0)
        bad = await coordinator.schedule(fail, (kind,))
        later = [await coordinator.schedule(count_twice, (counter,)) for _ in range(3)]
        expected = ValueError if kind is ValueError else RuntimeError
        with pytest.raises(expected, match="no"):
            await coordinator.join()
        with pytest.raises(expected, match="no"):
            await bad.fetch()
        for remote in later:
            with pytest.raises(ClosureCancelledError, match="another one failed"):
                await remote.fetch()
        before = int(await counter.read())
        await coordinator.schedule(count_twice, (counter,))
        await coordinator.join()
        assert int(await counter.read()) == before + 2
        assert coordinator.statistics().num_cancelled == 3


def add_too_much(v: Any) -> None:
    v.assign_add(300)


@pytest.mark.asyncio
async def test_an_int_that_a_variable_does_not_hold_is_refused_before_a_push() -> None:
    text = "holds -128 to 127, cannot assign 300"
    async with opened(1) as (strategy, coordinator):
        with strategy.scope():
            v = ar.Variable(np.int8(1))
        with pytest.raises(ValueError, match=text):
            await v.assign(300)
        await coordinator.schedule(add_too_much, (v,))
        with pytest.raises(ValueError, match=text):
            await coordinator.join()
        assert await v.read() == 1
        assert coordinator.statistics().pushes == 0


def not_finite(w: Any, optimizer: Any) -> None:
    optimizer.apply_gradients([(np.array([1.0, np.nan]), w)])


@pytest.mark.asyncio
async def test_closures_have_the_learning_rate_of_when_they_were_scheduled() -> None:
    async with opened(1, num_ps=2) as (strategy, coordinator):
        with strategy.scope():
            w, optimizer = ar.Variable([0.0, 0.0]), ar.optimizers.SGD(1.0)
        for rate in (1.0, 10.0, 100.0, 1.0):
            optimizer.learning_rate = rate
            coordinator.schedule_nowait(push_ones, (w, optimizer))
        await coordinator.join()
        assert (await w.read()).tolist() == [1.0 + 10.0 + 100.0 + 1.0] * 2
        server: Any = strategy.servers.handles[0]
        assert len(server._state._former) == 0


def push_ones(w: Any, optimizer: Any) -> None:
    optimizer.apply_gradients([(-np.ones(2), w)])


@pytest.mark.asyncio
async def test_gradients_that_are_not_finite_change_nothing() -> None:
    async with opened(1) as (strategy, coordinator):
        with strategy.scope():
            w, optimizer = ar.Variable([1.0, 2.0]), ar.optimizers.SGD(0.1)
            skipping = ar.optimizers.SGD(0.1, on_non_finite="skip")
        await coordinator.schedule(not_finite, (w, optimizer))
        with pytest.raises(NonFiniteError, match="not finite"):
            await coordinator.join()
        await coordinator.schedule(not_finite, (w, skipping))
        await coordinator.join()
        assert (await w.read()).tolist() == [1.0, 2.0]
        assert int(await skipping.skipped_steps.read()) == 1


# ---- checkpoints, and what is lost ---------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_restored_checkpoint_goes_on_as_before(is_lost: bool, tmp_path: Path) -> None:
    rows = [np.array([i % 6, (i * 5) % 6]) for i in range(6)]
    options: dict[str, Any] = {"num_ps": 2, "variable_partitioner": ar.FixedShardsPartitioner(2)}
    async with opened(1, **options) as (strategy, coordinator):
        manager = ar.CheckpointManager(tmp_path)
        with strategy.scope():
            w, optimizer = ar.Variable(np.zeros((6, 2))), ar.optimizers.Adam(0.1)
        state = {"w": w, "optimizer": optimizer}

        async def train() -> Any:
            for each in rows:
                await coordinator.schedule(descend_by_rows, (w, optimizer, each))
            await coordinator.join()
            return await w.read()

        await train()
        await manager.save(1, state)
        expected = await train()
        if is_lost:
            strategy.engine.lose_server(1)
            with pytest.raises(
                WorkerLostError, match=r"Parameter server 1 .* 'variable'"
            ) as caught:
                await train()
            assert "variable" in caught.value.variables
        await manager.restore(state)
        assert strategy.lost_variables == ()
        np.testing.assert_array_equal(await train(), expected)
        await manager.aclose()
    async with opened(1) as (strategy, coordinator):  # another number of servers
        with strategy.scope():
            w, optimizer = ar.Variable(np.zeros((6, 2))), ar.optimizers.Adam(0.1)
        async with ar.CheckpointManager(tmp_path) as manager:
            assert await manager.restore({"w": w, "optimizer": optimizer}) == 1
        np.testing.assert_array_equal(await train(), expected)


@pytest.mark.asyncio
@pytest.mark.parametrize("is_partial", [False, True])
async def test_restoring_a_variable_alone_leaves_its_slots(
    is_partial: bool, tmp_path: Path
) -> None:
    start = np.arange(10.0).reshape(5, 2)
    plain, rule = ar.Variable(start), ar.optimizers.Adam(0.1)
    for value in (None, start, None):
        if value is not None:
            await plain.assign(value)
        await rule.apply_gradients([(plain.value - 0.5, plain)])
    partitioner = ar.FixedShardsPartitioner(2)
    async with (
        ar.CheckpointManager(tmp_path) as manager,
        opened(num_ps=2, variable_partitioner=partitioner) as (strategy, coordinator),
    ):
        with strategy.scope():
            w, optimizer = ar.Variable(start), ar.optimizers.Adam(0.1)
        await manager.save(1, {"w": w})
        for is_restored in (False, True, False):
            if is_restored and is_partial:
                await manager.restore({"w": w, "optimizer": optimizer}, partial=True)
            elif is_restored:
                await manager.restore({"w": w})
            await coordinator.schedule(descend, (w, optimizer, 0.5))
            await coordinator.join()
        np.testing.assert_allclose(await w.read(), plain.value, rtol=1e-12)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["sgd", "adam"])
async def test_a_checkpoint_restored_before_the_servers_start_has_the_slots(
    name: str, tmp_path: Path
) -> None:
    rows = [np.array([i % 6, (i * 5) % 6]) for i in range(6)]

    async def train(coordinator: Any, state: dict[str, Any]) -> Any:
        for each in rows:
            await coordinator.schedule(descend_by_rows, (state["w"], state["optimizer"], each))
        await coordinator.join()
        return await state["w"].read()

    def new_state(strategy: Any) -> dict[str, Any]:
        with strategy.scope():
            return {"w": ar.Variable(np.zeros((6, 2)), name="w"), "optimizer": OPTIMIZERS[name]()}

    async with ar.CheckpointManager(tmp_path) as manager:
        async with opened(1, num_ps=2) as (strategy, coordinator):
            state = new_state(strategy)
            await train(coordinator, state)
            await manager.save(1, state)
            expected = await train(coordinator, state)
        async with ar.ParameterServerStrategy(LocalClosureEngine(1), num_ps=2) as strategy:
            state = new_state(strategy)
            await manager.restore(state)
            await manager.save(2, state)  # before the optimizer is on the servers
            async with ar.ClusterCoordinator(strategy) as coordinator:
                np.testing.assert_array_equal(await train(coordinator, state), expected)
                await manager.restore(state, step=2)
                np.testing.assert_array_equal(await train(coordinator, state), expected)


@pytest.mark.asyncio
async def test_what_is_saved_on_cancel_is_on_the_servers(tmp_path: Path) -> None:
    rows = [np.array([0, 1]), np.array([1, 2]), np.array([0, 2])]
    async with opened(1, num_ps=2) as (strategy, coordinator):
        with strategy.scope():
            w, optimizer = ar.Variable(np.zeros((6, 2))), ar.optimizers.Adam(0.1)
        state, is_trained = {"w": w, "optimizer": optimizer}, asyncio.Event()

        async def train() -> None:
            for each in rows:
                await coordinator.schedule(descend_by_rows, (w, optimizer, each))
            await coordinator.join()
            is_trained.set()
            await asyncio.Event().wait()

        async with ar.CheckpointManager(tmp_path) as manager:
            saving = asyncio.create_task(manager.save_on_cancel(train(), state, lambda: 3))
            await is_trained.wait()
            saving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await saving
            await manager.save(4, state)
            keys = [each.key for each in manager.describe(4).entries]
            assert [each.key for each in manager.describe(3).entries] == keys
            assert len(keys) == 4  # with the slots
            for key in keys:
                stopped, saved = await manager.read(3, key), await manager.read(4, key)
                np.testing.assert_array_equal(stopped, saved, err_msg=key)


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_values_are_not_in_the_program() -> None:
    async with opened(1) as (strategy, _):
        with strategy.scope():
            w, optimizer = ar.Variable([1.0, 2.0], name="w"), ar.optimizers.SGD(0.1)
        with pytest.raises(ContextError, match=r"await variable\.read\(\)"):
            _ = w.value
        with pytest.raises(ContextError, match=r"await variable\.read\(\)"):
            _ = w + 1
        with pytest.raises(ContextError, match="snapshot"):
            strategy.snapshot(w)
        with pytest.raises(ContextError, match="schedule"):
            await strategy.run(print)
        with pytest.raises(ContextError):
            await optimizer.apply_gradients([(np.ones(2), w)])
        with pytest.raises(ContextError):
            await optimizer.distributed_apply([(np.ones(2), w)])
        assert (await w.assign_add([1.0, 1.0])).tolist() == [2.0, 3.0]
        with pytest.raises(ValueError, match="Row 2 is out of range"):
            await w.read(2)


@pytest.mark.asyncio
async def test_a_variable_of_a_closed_strategy_begins_no_cluster(tmp_path: Path) -> None:
    engine = LocalClosureEngine(1)
    async with ar.CheckpointManager(tmp_path) as manager:
        async with ar.ParameterServerStrategy(engine) as strategy:
            with strategy.scope():
                w = ar.Variable(np.zeros(2), name="w")
            await w.read()
        for call in (w.read, lambda: w.assign(np.ones(2)), lambda: manager.save(1, {"w": w})):
            with pytest.raises(ContextError, match="is closed"):
                await call()
            assert engine._num_users == 0


@pytest.mark.asyncio
async def test_a_strategy_that_is_opened_again_takes_a_checkpoint(tmp_path: Path) -> None:
    strategy = ar.ParameterServerStrategy(LocalClosureEngine(1))
    with strategy.scope():
        w = ar.Variable(np.arange(3.0), name="w")
    async with ar.CheckpointManager(tmp_path) as manager:
        async with strategy:
            await manager.save(1, {"w": w})
        async with strategy:
            await manager.restore({"w": w})
            np.testing.assert_array_equal(await w.read(), [0.0, 1.0, 2.0])


@pytest.mark.asyncio
async def test_arguments_that_cannot_be_pickled_are_named() -> None:
    lock = threading.Lock()
    async with opened(1) as (_, coordinator):
        with pytest.raises(TypeError, match=r"captured variable 'lock' \(a .*lock\)"):
            await coordinator.schedule(lambda: lock)
        with pytest.raises(ContextError, match="lives in the program"):
            await coordinator.schedule(lambda: coordinator.strategy)
        with pytest.raises(ContextError, match="lives in the program"):
            await coordinator.schedule(str, ({"inside": [coordinator.strategy]},))
        other = ar.Variable(1.0, name="other")
        with pytest.raises(ContextError, match="'other' belongs to no strategy"):
            await coordinator.schedule(count_twice, (other,))
        with pytest.raises(ContextError, match="made outside the scope"):
            await coordinator.schedule(fail, (ar.optimizers.SGD(0.1),))
        remote = await coordinator.schedule(str)
        with pytest.raises(TypeError, match="cannot be an argument of a closure"):
            await coordinator.schedule(str, (remote,))
        await coordinator.schedule(threading.Lock)
        with pytest.raises(TypeError, match=r"its result \(a .*lock\) cannot be pickled"):
            await coordinator.join()
        with pytest.raises(ValueError, match="tuple or list"):
            await coordinator.schedule(str, 3)
        with pytest.raises(TypeError, match="needs a function"):
            await coordinator.schedule(3)


@pytest.mark.asyncio
async def test_variables_live_beside_another_one() -> None:
    partitioner = ar.MinSizePartitioner(8, 2)
    async with opened(1, num_ps=3, variable_partitioner=partitioner) as (strategy, _):
        with strategy.scope():
            _first, table = ar.Variable(0.0), ar.Variable(np.zeros(4))
        with strategy.extended.colocate_vars_with(table) as here:
            assert here is strategy
            beside, small = ar.Variable(np.ones(6)), ar.Variable(1.0)
        with strategy.scope():
            later = ar.Variable(0.0)
        servers = [[shard.server for shard in v.shards] for v in (table, beside, small, later)]
        assert servers == [[1, 2], [1, 2], [1], [0]]
        assert (await beside.read()).tolist() == [1.0] * 6


@pytest.mark.asyncio
async def test_one_coordinator_at_a_time() -> None:
    async with opened(1) as (strategy, coordinator):
        with pytest.raises(ContextError, match="has a coordinator already"):
            await ar.ClusterCoordinator(strategy).join()
        await coordinator.aclose()
        with pytest.raises(ContextError, match="is closed"):
            await coordinator.schedule(str)
        async with ar.ClusterCoordinator(strategy) as another:
            assert await (await another.schedule(str)).fetch() == ""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_ps": 0}, "num_ps must be at least 1"),
        ({"max_staleness": -1}, "at least 0"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ar.ParameterServerStrategy(LocalClosureEngine(1), **options)


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
async def test_half_precision_has_masters_on_the_servers(dtype: str, tmp_path: Path) -> None:
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    start, one = np.ones((6, 2), dtype), np.ones((6, 2), dtype)

    def pull_down(w: Any, optimizer: Any) -> None:
        optimizer.apply_gradients([(one, w)])

    partitioner = ar.FixedShardsPartitioner(2)
    async with opened(num_ps=2, variable_partitioner=partitioner) as (strategy, coordinator):
        with strategy.scope():
            w, optimizer = ar.Variable(start, name="w"), ar.optimizers.SGD(2.0**-12)
        state = {"w": w, "optimizer": optimizer}
        manager = ar.CheckpointManager(tmp_path)

        async def steps(count: int) -> Any:
            for _ in range(count):
                await coordinator.schedule(pull_down, (w, optimizer))
            await coordinator.join()
            return np.array(await w.read()).astype(np.float32)

        await steps(32)
        await manager.save(1, state)
        expected = await steps(32)
        await manager.restore(state)
        np.testing.assert_array_equal(await steps(32), expected)
        assert expected.tolist() == [[1 - 2.0**-6] * 2] * 6
