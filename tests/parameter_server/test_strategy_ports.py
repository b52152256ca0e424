"""What TensorFlow tests of its strategy of parameter servers, asked of this one.

The facts are those of parameter_server_strategy_v2_test and of the integration with the strategy in
cluster_coordinator_test. Left out is what belongs to device strings, creator scopes and jobs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from tests.parameter_server.coordinating import Cluster, coordinating, identity

pytest.importorskip("cloudpickle")
pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]


async def test_variables_go_round_the_servers() -> None:
    outside = ar.Variable(0.0)
    async with coordinating(num_ps=3) as (strategy, _):
        with strategy.scope():
            variables = [ar.Variable(float(i), name=f"v{i}") for i in range(4)]
        found = [[each.server for each in variable.shards] for variable in variables]
        assert found == [[0], [1], [2], [0]]
        assert [float(await each.read()) for each in variables] == [0.0, 1.0, 2.0, 3.0]
        assert outside.value == 0.0
        assert [each.name for each in strategy.trainable_variables] == ["v0", "v1", "v2", "v3"]


async def test_a_device_of_the_user_changes_no_place() -> None:
    async with coordinating(num_ps=2) as (strategy, _):
        with strategy.scope(), ar.device("cpu:1"):
            variables = [ar.Variable(0.0) for _ in range(3)]
        assert [each.shards[0].server for each in variables] == [0, 1, 0]


async def test_variables_may_be_made_before_and_after_closures(cluster: Cluster) -> None:
    await cluster.coordinator.schedule(identity, (1,))
    await cluster.coordinator.join()
    with cluster.strategy.scope():
        late = ar.Variable(np.arange(3.0), trainable=False, name="late")
    remote = await cluster.coordinator.schedule(total, (late,))
    assert await remote.fetch() == 3.0
    assert not late.trainable


def total(variable: Any) -> float:
    return float(np.sum(variable.value))


def arithmetic(variable: Any) -> list[Any]:
    return [variable + 1, 2 * variable, np.dot(variable, variable), np.asarray(variable)]


async def test_a_variable_takes_part_in_expressions_of_a_closure(cluster: Cluster) -> None:
    with cluster.strategy.scope():
        variable = ar.Variable(np.array([1.0, 2.0]))
    found = await (await cluster.coordinator.schedule(arithmetic, (variable,))).fetch()
    for one, expected in zip(found, ([2.0, 3.0], [2.0, 4.0], 5.0, [1.0, 2.0]), strict=True):
        np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "bool", "complex64"])
async def test_dtypes_are_kept(cluster: Cluster, dtype: str) -> None:
    with cluster.strategy.scope():
        variable = ar.Variable([0, 1, 1], dtype=dtype)
    assert variable.dtype == dtype
    assert (await variable.read()).dtype == dtype


async def test_a_read_is_not_changed_by_later_writes(cluster: Cluster) -> None:
    with cluster.strategy.scope():
        variable = ar.Variable(np.zeros(4))
    before = await variable.read()
    await variable.assign_add(np.ones(4))
    np.testing.assert_array_equal(before, np.zeros(4))
    assert not before.flags.writeable


async def test_a_variable_is_not_an_array_on_the_coordinator(cluster: Cluster) -> None:
    for use in (np.asarray, lambda v: v + 1, float):
        with pytest.raises(ContextError, match=r"read\(\)"):
            use(cluster.count)


async def test_methods_that_run_replicas_are_refused(cluster: Cluster) -> None:
    strategy, count = cluster.strategy, cluster.count
    with pytest.raises(ContextError, match="ClusterCoordinator"):
        await strategy.run(identity, args=(1,))
    with pytest.raises(ContextError):
        strategy.snapshot(count)


async def test_a_variable_of_another_strategy_is_refused(cluster: Cluster) -> None:
    async with coordinating() as (other, _):
        with other.scope():
            foreign = ar.Variable(np.zeros(3), name="foreign")
        with pytest.raises((ContextError, ValueError), match="foreign"):  # noqa: PT012
            await cluster.coordinator.schedule(total, (foreign,))
            await cluster.coordinator.join()
    assert await (await cluster.coordinator.schedule(identity, (1,))).fetch() == 1


async def test_a_variable_of_a_mirrored_strategy_is_refused(cluster: Cluster) -> None:
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as other:
        with other.scope():
            foreign = ar.Variable(np.zeros(3), name="foreign")
        with pytest.raises((ContextError, ValueError, TypeError), match="foreign"):  # noqa: PT012
            await cluster.coordinator.schedule(total, (foreign,))
            await cluster.coordinator.join()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_ps": 0}, ValueError, "num_ps"),
        ({"num_ps": 1.5}, TypeError, "num_ps"),
        ({"mode": "sync"}, TypeError, "mode"),
        ({"max_staleness": -1}, ValueError, "max_staleness"),
        ({"variable_partitioner": 3}, TypeError, "variable_partitioner"),
    ],
    ids=str,
)
async def test_bad_settings_are_refused(options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        ar.ParameterServerStrategy(ar.cluster.LocalClosureEngine(num_workers=1), **options)


@pytest.mark.parametrize("num_workers", [0, -1])
async def test_there_is_at_least_one_worker(num_workers: int) -> None:
    with pytest.raises(ValueError, match="num_workers"):
        ar.cluster.LocalClosureEngine(num_workers=num_workers)
    with pytest.raises(ValueError, match="num_workers"):
        ar.ParameterServerStrategy(num_workers=num_workers)


@pytest.mark.parametrize(
    "options",
    [{"queue_size": 0}, {"queue_size": -1}, {"timeout_s": 0.0}, {"timeout_s": -1.0}],
    ids=str,
)
async def test_bad_settings_of_a_coordinator_are_refused(options: Any) -> None:
    async with ar.ParameterServerStrategy(ar.cluster.LocalClosureEngine(num_workers=1)) as strategy:
        with pytest.raises(ValueError, match=next(iter(options))):
            ar.ClusterCoordinator(strategy, **options)


async def test_a_coordinator_needs_this_strategy() -> None:
    async with ar.OneDeviceStrategy("cpu:0") as strategy:
        with pytest.raises(TypeError, match="ParameterServerStrategy"):
            ar.ClusterCoordinator(strategy)  # type: ignore[arg-type]


# ---- optimizers on the servers -------------------------------------------------------------------


def descend(optimizer: Any, variable: Any, gradient: Any) -> None:
    optimizer.apply_gradients([(gradient, variable)])


OPTIMIZERS = {
    "SGD": lambda: ar.optimizers.SGD(0.1),
    "momentum": lambda: ar.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda: ar.optimizers.Adagrad(0.1),
    "RMSprop": lambda: ar.optimizers.RMSprop(0.01),
    "Adam": lambda: ar.optimizers.Adam(0.01),
    "AdamW": lambda: ar.optimizers.AdamW(0.01),
}
SHAPE = (6, 2)
GRADIENTS = {
    "dense": [np.linspace(-1, i, 12).reshape(SHAPE) for i in range(4)],
    "sparse": [ar.IndexedSlices(np.full((3, 2), i + 1.0), [1, 5, 1], SHAPE) for i in range(4)],
}


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
async def test_a_server_updates_as_one_device_does(name: str, kind: str, num_shards: int) -> None:
    initial = np.linspace(0, 1, 12).reshape(SHAPE)
    partitioner = ar.FixedShardsPartitioner(num_shards)
    async with coordinating(num_workers=1, variable_partitioner=partitioner) as (strategy, c):
        with strategy.scope():
            variable, optimizer = ar.Variable(initial), OPTIMIZERS[name]()
        for gradient in GRADIENTS[kind]:
            await c.schedule(descend, (optimizer, variable, gradient))
            await c.join()  # these rules depend on the order
        found = await variable.read()
    async with ar.OneDeviceStrategy("cpu:0") as one:
        with one.scope():
            expected, optimizer = ar.Variable(initial), OPTIMIZERS[name]()
        for gradient in GRADIENTS[kind]:
            await one.run(apply, args=(optimizer, expected, gradient))
        np.testing.assert_allclose(found, expected.value, rtol=1e-12, atol=1e-14)


async def apply(optimizer: Any, variable: Any, gradient: Any) -> None:
    await optimizer.apply_gradients([(gradient, variable)])


async def minimize_async(optimizer: Any, variable: Any) -> float:
    loss = await optimizer.minimize(lambda: np_sum((variable.value - 3.0) ** 2), [variable])
    return float(loss)


def minimize_plain(optimizer: Any, variable: Any) -> float:
    loss = optimizer.blocking.minimize(lambda: np_sum((variable.value - 3.0) ** 2), [variable])
    return float(loss)


def np_sum(x: Any) -> Any:
    import autograd.numpy as anp

    return anp.sum(x)


@pytest.mark.parametrize("fn", [minimize_async, minimize_plain])
@pytest.mark.parametrize("num_shards", [1, 2])
async def test_closures_minimize(fn: Any, num_shards: int) -> None:
    partitioner = ar.FixedShardsPartitioner(num_shards)
    async with coordinating(num_workers=1, variable_partitioner=partitioner) as (strategy, c):
        with strategy.scope():
            variable, optimizer = ar.Variable(np.zeros(4)), ar.optimizers.SGD(0.1)
        remotes = [await c.schedule(fn, (optimizer, variable)) for _ in range(3)]
        losses = sorted(await c.fetch(remotes), reverse=True)  # no order is promised
        assert losses == pytest.approx([36.0, 36 * 0.64, 36 * 0.64**2])
        np.testing.assert_allclose(await variable.read(), np.full(4, 3 * (1 - 0.8**3)))
