"""reduce_to, batch_reduce_to and broadcast_to: results live where a destination lives."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, DeviceError

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]

ARRAY = np.arange(3.0)


def new_variable(strategy: ar.Strategy, value: Any = 0.0) -> ar.Variable:
    with strategy.scope():
        return ar.Variable(value)


def per_replica(strategy: ar.Strategy, value: Any = ARRAY) -> ar.PerReplica:
    return ar.PerReplica([value * (i + 1) for i in range(strategy.num_replicas_in_sync)])


def is_plain(strategy: ar.Strategy) -> bool:
    return isinstance(strategy, ar.DefaultStrategy)


def entries(strategy: ar.Strategy, result: Any) -> list[Any]:
    """The entries of a result that must have one per replica, or be plain by default."""
    if is_plain(strategy):
        assert not isinstance(result, ar.DistributedValues)
        return [result]
    assert type(result) is ar.Mirrored
    assert len(result) == strategy.num_replicas_in_sync
    return list(result)


# ---- reduce_to ----------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "MEAN", ar.ReduceOp.MIN, ar.ReduceOp.MAX])
@pytest.mark.parametrize("destination", ["variable", "per replica"])
async def test_the_result_is_what_reduce_gives_on_each_device(
    strategy: ar.Strategy, op: Any, destination: str
) -> None:
    value = per_replica(strategy)
    where = new_variable(strategy) if destination == "variable" else value

    parts = entries(strategy, await strategy.extended.reduce_to(op, value, where))

    expected = await strategy.reduce(op, value)
    for part in parts:
        assert part.tolist() == expected.tolist()
        assert part is parts[0]
        assert not part.flags.writeable


async def test_the_destination_is_not_written(strategy: ar.Strategy) -> None:
    variable = new_variable(strategy, 7.0)

    await strategy.extended.reduce_to("sum", per_replica(strategy, 1.0), variable)

    assert variable.value == 7.0
    assert variable.version == 0


@pytest.mark.parametrize("device", ["cpu:5", ar.Device("cpu:0")])
async def test_for_a_device_the_result_is_plain(strategy: ar.Strategy, device: Any) -> None:
    count = strategy.num_replicas_in_sync

    result = await strategy.extended.reduce_to("sum", per_replica(strategy, 1.0), device)

    assert result == sum(range(1, count + 1))


async def test_a_part_of_weight_zero_contributes_nothing(strategy: ar.Strategy) -> None:
    count = strategy.num_replicas_in_sync
    totals, weights = [6.0] + [float("nan")] * (count - 1), [3] + [0] * (count - 1)
    part = ar.Weighted(ar.PerReplica(totals), ar.PerReplica(weights))
    whole = ar.PerReplica([ar.Weighted(t, w) for t, w in zip(totals, weights, strict=True)])

    one = await strategy.extended.reduce_to("sum", part, "cpu:0")
    two = await strategy.extended.batch_reduce_to("sum", [(part, "cpu:0"), (whole, "cpu:0")])

    assert [(each.total, each.weight) for each in (one, *two)] == [(6.0, 3)] * 3
    assert (await strategy.reduce("sum", part)).total == 6.0


async def test_pytrees_keep_their_structure(strategy: ar.Strategy) -> None:
    value = {"a": per_replica(strategy, 1.0), "b": [per_replica(strategy, 2.0)]}
    variable = new_variable(strategy)

    result = await strategy.extended.reduce_to("mean", value, variable)

    mean = (strategy.num_replicas_in_sync + 1) / 2
    assert set(entries(strategy, result["a"])) == {mean}
    assert set(entries(strategy, result["b"][0])) == {2 * mean}


async def test_components_that_are_containers_become_entries(gang: ar.MirroredStrategy) -> None:
    value = ar.PerReplica([{"x": 1.0}] * gang.num_replicas_in_sync)

    result = await gang.extended.reduce_to("mean", value, value)

    assert list(result) == [{"x": 1.0}] * gang.num_replicas_in_sync
    assert result[0] is not result[1]


@pytest.mark.parametrize("op", ["mean", "min", "max"])
@pytest.mark.parametrize("kind", ["mirrored", "variable"])
async def test_of_a_mirrored_value_it_is_that_value(
    gang: ar.MirroredStrategy, op: str, kind: str
) -> None:
    variable = new_variable(gang, 3.0)
    value = variable if kind == "variable" else ar.Mirrored([3.0] * gang.num_replicas_in_sync)

    result = await gang.extended.reduce_to(op, value, variable)

    assert [float(part) for part in result] == [3.0] * gang.num_replicas_in_sync


async def test_the_sum_of_a_mirrored_value_is_refused(gang: ar.MirroredStrategy) -> None:
    value = ar.Mirrored([3.0] * gang.num_replicas_in_sync)

    with pytest.raises(ValueError, match="Use MEAN"):
        await gang.extended.reduce_to("sum", value, value)


async def test_plain_values_are_refused_as_in_reduce(gang: ar.MirroredStrategy) -> None:
    with pytest.raises(ValueError, match="plain float"):
        await gang.extended.reduce_to("sum", 1.0, "cpu:0")


async def test_in_a_merge_function_the_result_feeds_an_update(gang: ar.MirroredStrategy) -> None:
    variable = new_variable(gang)

    async def merge(current: ar.Strategy, gradients: ar.PerReplica) -> None:
        total = await current.extended.reduce_to("sum", gradients, variable)
        await current.extended.update(variable, lambda v, g: v.assign_sub(g), (total,))

    async def step() -> None:
        await ar.get_replica_context().merge_call(merge, (1.0,))

    await gang.run(step)

    assert variable.value == -gang.num_replicas_in_sync


# ---- batch_reduce_to ----------------------------------------------------------------------------


async def test_a_batch_is_reduce_to_of_each_pair(strategy: ar.Strategy) -> None:
    value, variable = per_replica(strategy, 1.0), new_variable(strategy)
    pairs = [({"a": value}, variable), (value, "cpu:0"), (value, value), ((), variable)]

    results = await strategy.extended.batch_reduce_to("sum", pairs)

    alone = [await strategy.extended.reduce_to("sum", v, where) for v, where in pairs]
    assert repr(results) == repr(alone)
    assert type(results) is list


async def test_an_empty_batch_gives_an_empty_list(strategy: ar.Strategy) -> None:
    assert await strategy.extended.batch_reduce_to("mean", []) == []
    assert await strategy.extended.batch_reduce_to("mean", iter(())) == []


@pytest.mark.parametrize("item", [(1.0,), (1, 2, 3), 1.0, "ab"])
async def test_items_that_are_not_pairs_are_refused(either: ar.Strategy, item: Any) -> None:
    with pytest.raises(ValueError, match="pairs"):
        await either.extended.batch_reduce_to("sum", [item])


# ---- broadcast_to -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 200_000])
async def test_a_broadcast_array_is_copied_once(strategy: ar.Strategy, size: int) -> None:
    value = np.ones(size)

    parts = entries(strategy, await strategy.extended.broadcast_to(value, new_variable(strategy)))

    if is_plain(strategy):
        assert parts[0] is value
    else:
        value[:] = 2.0
        assert all(part is parts[0] for part in parts)
        assert parts[0].tolist() == [1.0] * size
        assert not parts[0].flags.writeable


class Own(np.ndarray):
    """A user's kind of array."""


@pytest.mark.parametrize("kind", [Own, np.matrix])
async def test_a_broadcast_array_of_a_subclass_is_copied_too(
    pair: ar.MirroredStrategy, kind: Any
) -> None:
    value = np.ones((2, 2)).view(kind)

    first, second = (await pair.extended.broadcast_to(value, new_variable(pair))).values

    value[:] = 2.0
    assert first is second
    assert (type(first), first.tolist()) == (np.ndarray, [[1.0] * 2] * 2)
    assert not first.flags.writeable


async def test_a_masked_array_is_not_broadcast(strategy: ar.Strategy) -> None:
    masked = np.ma.array([1.0, 999.0], mask=[False, True])

    with pytest.raises(TypeError, match="broadcast_to would drop the mask"):
        await strategy.extended.broadcast_to([masked], new_variable(strategy))


async def test_a_broadcast_to_a_device_has_one_entry(pair: ar.MirroredStrategy) -> None:
    result = await pair.extended.broadcast_to("text", "cpu:5")

    assert type(result) is ar.Mirrored
    assert result.values == ("text",)


async def test_broadcast_of_trees_variables_and_mirrored_values(strategy: ar.Strategy) -> None:
    variable = new_variable(strategy, 4.0)
    value = {"v": variable, "m": ar.Mirrored([[5]] * strategy.num_replicas_in_sync), "n": None}

    parts = entries(strategy, await strategy.extended.broadcast_to(value, variable))

    assert parts == [{"v": 4.0, "m": [5], "n": None}] * len(parts)
    assert len({id(part["m"]) for part in parts}) == len(parts)


async def test_a_per_replica_is_not_broadcast(strategy: ar.Strategy) -> None:
    value = per_replica(strategy)

    with pytest.raises(ValueError, match="reduce_to"):
        await strategy.extended.broadcast_to([value], value)


# ---- wrong destinations, wrong places -----------------------------------------------------------


async def send(strategy: ar.Strategy, method: str, destinations: Any) -> Any:
    extended, value = strategy.extended, ar.Mirrored([1.0] * strategy.num_replicas_in_sync)
    if method == "reduce_to":
        return await extended.reduce_to("mean", value, destinations)
    if method == "batch_reduce_to":
        return await extended.batch_reduce_to("mean", [(value, destinations)])
    return await extended.broadcast_to(1.0, destinations)


METHODS = pytest.mark.parametrize("method", ["reduce_to", "batch_reduce_to", "broadcast_to"])


@METHODS
@pytest.mark.parametrize("wrong", [[], ["cpu:0"], ("cpu:0", "cpu:1"), {"cpu:0"}, {"a": "cpu:0"}])
async def test_a_list_of_destinations_is_refused(
    either: ar.Strategy, method: str, wrong: Any
) -> None:
    with pytest.raises(TypeError, match=r"one destination.*Pass one device"):
        await send(either, method, wrong)


@METHODS
@pytest.mark.parametrize("wrong", [None, 0, 1.5, ARRAY])
async def test_an_invalid_destination_is_refused(
    either: ar.Strategy, method: str, wrong: Any
) -> None:
    if wrong is ARRAY and method != "broadcast_to":
        wrong = ARRAY.tolist
    with pytest.raises(TypeError, match=f"{type(wrong).__name__}. Pass a device"):
        await send(either, method, wrong)


@METHODS
async def test_unknown_devices_are_refused(strategy: ar.Strategy, method: str) -> None:
    with pytest.raises(DeviceError, match="cpu:99"):
        await send(strategy, method, "cpu:99")
    with pytest.raises(ValueError, match="not a device"):
        await send(strategy, method, "not a device")


@METHODS
async def test_a_distributed_value_of_another_length_is_refused(
    strategy: ar.Strategy, method: str
) -> None:
    wrong = ar.PerReplica([0.0] * (strategy.num_replicas_in_sync + 1))

    with pytest.raises(ValueError, match=f"{len(wrong)} values as destinations"):
        await send(strategy, method, wrong)


@METHODS
async def test_a_variable_of_another_strategy_is_refused(
    gang: ar.MirroredStrategy, solo: ar.OneDeviceStrategy, method: str
) -> None:
    for foreign in (new_variable(solo), ar.Variable(0.0)):
        with pytest.raises(ContextError, match="its own strategy"):
            await send(gang, method, foreign)


@METHODS
async def test_in_a_replica_the_twin_is_named(strategy: ar.Strategy, method: str) -> None:
    twin = "ctx.broadcast" if method == "broadcast_to" else "ctx.all_reduce"

    async def step() -> None:
        await send(strategy, method, "cpu:0")

    with pytest.raises(ContextError, match=rf"extended\.{method}.*{twin}"):
        await strategy.run(step)


# ---- to a plain array ---------------------------------------------------------------------------


async def test_a_plain_array_stands_for_its_device(strategy: ar.Strategy) -> None:
    value, where = per_replica(strategy), np.zeros(7)
    expected = sum(value.values)

    one = await strategy.extended.reduce_to("sum", value, where)
    two = await strategy.extended.batch_reduce_to("sum", [(value, where), (value, "cpu:0")])

    for result in (one, *two):
        assert type(result) is np.ndarray
        np.testing.assert_array_equal(result, expected)
    assert not where.any()
