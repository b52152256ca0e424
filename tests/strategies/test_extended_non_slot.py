"""update_non_slot: a function once per device, in update context, its writes published together."""

import asyncio
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, DeviceError

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]


def new_variable(strategy: ar.Strategy, value: Any = 0.0) -> ar.Variable:
    with strategy.scope():
        return ar.Variable(value)


def my_component() -> int:
    index = ar.get_update_replica_id()
    assert index is not None
    return index


def here(*args: Any, **kwargs: Any) -> Any:
    return my_component(), str(ar.current_device()), args, kwargs


async def here_later(*args: Any, **kwargs: Any) -> Any:
    await ar.run_on_host(int)
    return here(*args, **kwargs)


@pytest.mark.parametrize("fn", [here, here_later, lambda *a, **k: here_later(*a, **k)])
async def test_it_runs_once_per_device_on_it(gang: ar.MirroredStrategy, fn: Any) -> None:
    devices = gang.extended.non_slot_devices([new_variable(gang)])
    mirrored = ar.Mirrored(range(gang.num_replicas_in_sync))

    result = await gang.extended.update_non_slot(devices, fn, (mirrored, "s"), {"k": [mirrored]})

    assert type(result) is ar.Mirrored
    assert list(result) == [(i, str(d), (i, "s"), {"k": [i]}) for i, d in enumerate(devices)]
    assert ar.get_update_replica_id() is None
    assert ar.current_device() == ar.Device("cpu:0")


async def test_group_false_gives_a_list(gang: ar.MirroredStrategy) -> None:
    devices = gang.extended.parameter_devices

    result = await gang.extended.update_non_slot(devices, my_component, group=False)

    assert result == list(range(len(devices)))


async def test_under_every_strategy_the_idiom_runs(strategy: ar.Strategy) -> None:
    variable = new_variable(strategy, 1.0)
    devices = strategy.extended.non_slot_devices([variable])

    async def update(x: float) -> int:
        await variable.assign_add(x)
        assert variable.value == 3.0
        return my_component()

    result = await strategy.extended.update_non_slot(devices, update, (2.0,))

    assert variable.value == 3.0
    assert variable.version == 1
    plain = isinstance(strategy, ar.DefaultStrategy)
    count = strategy.num_replicas_in_sync
    indices = list(range(variable.num_copies)) * (count // variable.num_copies)
    assert result == 0 if plain else list(result) == indices


@pytest.mark.parametrize("devices", ["cpu:1", ar.Device("cpu:1"), ["cpu:1"]])
async def test_one_device_keeps_its_index(pair: ar.MirroredStrategy, devices: Any) -> None:
    result = await pair.extended.update_non_slot(devices, here, (ar.Mirrored(["a", "b"]),))

    assert list(result) == [(1, "cpu:1", ("b",), {})]


async def test_an_error_leaves_variables_as_they_were(gang: ar.MirroredStrategy) -> None:
    variable = new_variable(gang, 1.0)

    async def update() -> None:
        await variable.assign(2.0)
        if my_component():
            raise ValueError("second")

    with pytest.raises(ValueError, match="second"):
        await gang.extended.update_non_slot(gang.extended.parameter_devices, update)
    assert variable.value == 1.0
    assert variable.version == 0
    assert ar.get_update_replica_id() is None


async def test_a_cancellation_leaves_variables_as_they_were(gang: ar.MirroredStrategy) -> None:
    variable, waiting = new_variable(gang, 1.0), asyncio.Event()

    async def update() -> None:
        await variable.assign(2.0)
        if my_component():
            waiting.set()
            await asyncio.Event().wait()

    devices = gang.extended.parameter_devices
    task = asyncio.create_task(gang.extended.update_non_slot(devices, update))
    await waiting.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert variable.value == 1.0


@pytest.mark.parametrize("devices", [(), [], ("cpu:0", "cpu:0"), ("cpu:0", "cpu:7")])
async def test_devices_are_some_of_the_strategys_own(
    pair: ar.MirroredStrategy, devices: Any
) -> None:
    with pytest.raises(ValueError, match="non_slot_devices"):
        await pair.extended.update_non_slot(devices, my_component)


@pytest.mark.parametrize("devices", [None, 0, {"cpu:0"}])
async def test_arguments_that_are_not_devices_are_refused(
    pair: ar.MirroredStrategy, devices: Any
) -> None:
    with pytest.raises(TypeError, match="non_slot_devices"):
        await pair.extended.update_non_slot(devices, my_component)
    with pytest.raises(DeviceError):
        await pair.extended.update_non_slot(["cpu:99"], my_component)


async def test_wrong_functions_and_arguments_are_refused(strategy: ar.Strategy) -> None:
    devices = strategy.extended.non_slot_devices([])
    value = ar.PerReplica([1.0] * strategy.num_replicas_in_sync)

    with pytest.raises(TypeError, match="function"):
        await strategy.extended.update_non_slot(devices, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="PerReplica"):
        await strategy.extended.update_non_slot(devices, here, ([value],))
    with pytest.raises(ValueError, match="PerReplica"):
        await strategy.extended.update_non_slot(devices, here, (), {"k": value})
    with pytest.raises(ValueError, match=r"args=\(value,\)"):
        await strategy.extended.update_non_slot(devices, here, "ab")


async def test_in_a_replica_the_twin_is_named(strategy: ar.Strategy) -> None:
    async def step() -> None:
        await strategy.extended.update_non_slot(["cpu:0"], my_component)

    with pytest.raises(ContextError, match=r"update_non_slot.*ctx\.merge_call"):
        await strategy.run(step)


async def test_non_slot_devices_checks_its_variables(
    gang: ar.MirroredStrategy, solo: ar.OneDeviceStrategy
) -> None:
    mine, foreign = new_variable(gang), new_variable(solo)

    assert gang.extended.non_slot_devices(iter([mine])) == gang.extended.parameter_devices
    for wrong in (mine, None, 3, ["w"]):
        with pytest.raises(TypeError, match="non_slot_devices"):
            gang.extended.non_slot_devices(wrong)  # type: ignore[arg-type]
    with pytest.raises(ContextError, match="its own strategy"):
        gang.extended.non_slot_devices([mine, foreign])
