"""Central storage: one copy of each variable, which all replicas read."""

import copy
import pickle
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

import aioreplica as ar
from aioreplica.errors import DeviceError

DEVICES = ["cpu:1", "cpu:2"]


@pytest_asyncio.fixture
async def central() -> AsyncIterator[ar.CentralStorageStrategy]:
    async with ar.CentralStorageStrategy(DEVICES, "cpu:3") as strategy:
        yield strategy


def test_where_things_live() -> None:
    extended = ar.CentralStorageStrategy(DEVICES, "cpu:3").extended

    assert list(map(str, extended.worker_devices)) == DEVICES
    assert list(map(str, extended.parameter_devices)) == ["cpu:3"]
    assert list(map(str, extended.non_slot_devices([]))) == ["cpu:3"]


@pytest.mark.parametrize(("devices", "home"), [(["cpu:2"], "cpu:2"), (DEVICES, "cpu:0")])
def test_where_variables_live_by_default(devices: list[str], home: str) -> None:
    strategy = ar.CentralStorageStrategy(devices)

    assert list(map(str, strategy.extended.parameter_devices)) == [home]


@pytest.mark.asyncio
async def test_an_update_runs_once(central: ar.CentralStorageStrategy) -> None:
    with central.scope():
        variable = ar.Variable(0.0, aggregation="mean")
    ids: list[int | None] = []

    async def add(v: ar.Variable, amount: float) -> float:
        ids.append(ar.get_update_replica_id())
        await v.assign_add(amount)
        return amount

    async def step() -> tuple[float, object]:
        replica = ar.get_replica_context()
        assert replica is not None
        got = await replica.update(variable, add, args=(float(replica.replica_id_in_sync_group),))
        await variable.assign_add(2.0 * replica.replica_id_in_sync_group)
        return float(variable), got

    result = await central.run(step)

    assert ids == [0]
    assert central.local_results(result) == ((1.0, 0.0),) * 2
    assert await central.extended.update(variable, add, args=(1.0,), group=False) == [1.0]
    given = await central.extended.reduce_to("mean", ar.PerReplica([2.0, 4.0]), variable)
    await central.extended.update(variable, add, args=(given,))
    assert float(variable) == 5.0
    assert variable.component_names == (variable.name,)
    assert {id(component) for component in variable.components} == {id(variable.components[0])}


@pytest.mark.asyncio
async def test_state_of_no_variable_is_updated_on_the_parameter_device(
    central: ar.CentralStorageStrategy,
) -> None:
    result = await central.extended.update_non_slot(
        central.extended.non_slot_devices([]), lambda: str(ar.current_device())
    )

    assert list(result) == ["cpu:3"] * 2


@pytest.mark.asyncio
async def test_training_is_bitwise_that_of_mirrored_variables() -> None:
    async def trained(strategy: ar.Strategy) -> bytes:
        async with strategy:
            with strategy.scope():
                weights = ar.Variable(np.linspace(-1.0, 1.0, 6).reshape(3, 2))
                optimizer = ar.optimizers.Adam(0.1)

            async def step(x: np.ndarray) -> None:
                await optimizer.apply_gradients([(2.0 * (weights.value - x), weights)])

            for seed in range(3):
                batches = [np.random.default_rng([seed, i]).normal(size=(3, 2)) for i in (0, 1)]
                await strategy.run(step, args=(ar.PerReplica(batches),))
            assert all(v.num_copies == weights.num_copies for v in optimizer.variables)
            return weights.value.tobytes()

    central = await trained(ar.CentralStorageStrategy(DEVICES))
    assert central == await trained(ar.MirroredStrategy(DEVICES))


def test_copies_and_equality() -> None:
    strategy = ar.CentralStorageStrategy(DEVICES, "cpu:3")

    assert copy.deepcopy(strategy) == strategy == pickle.loads(pickle.dumps(strategy))
    assert strategy != ar.CentralStorageStrategy(DEVICES, "cpu:4")
    assert strategy != ar.MirroredStrategy(DEVICES)


@pytest.mark.parametrize(
    ("devices", "home", "error", "text"),
    [
        ([], None, ValueError, "CentralStorageStrategy needs at least one device"),
        ("cpu:0", None, ValueError, "takes a list of devices"),
        (4, None, TypeError, "takes a list of devices such as .*, got 4"),
        (["cpu:0", "cpu:0"], None, ValueError, "got device cpu:0 twice"),
        (["cpu:0"], "cpu:99", DeviceError, "cpu:99"),
    ],
)
def test_bad_devices(devices: object, home: str | None, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        ar.CentralStorageStrategy(devices, home)
