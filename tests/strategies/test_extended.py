"""extended.update: once per component, staged, and swapped in together."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from tests.sequencer import idle

pytestmark = pytest.mark.usefixtures("no_task_left")


def new_variable(strategy: ar.Strategy, value: Any = 0.0, **options: Any) -> ar.Variable:
    with strategy.scope():
        return ar.Variable(value, **options)


def parts(variable: ar.Variable) -> list[float]:
    return [float(part) for part in variable.components]


def my_component() -> int:
    index = ar.get_update_replica_id()
    assert index is not None
    return index


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["sync", "async", "awaitable"])
async def test_every_component_gets_its_own_write(gang: ar.MirroredStrategy, kind: str) -> None:
    variable = new_variable(gang, 1.0)

    async def later(var: ar.Variable, x: float) -> int:
        await ar.run_on_host(int)
        await var.assign_add(x * my_component())
        return my_component()

    def awaitable(var: ar.Variable, x: float) -> Awaitable[int]:
        return later(var, x)

    def at_once(var: ar.Variable, x: float) -> int:
        var.assign_add(x * my_component())
        return my_component()

    fn = {"sync": at_once, "async": later, "awaitable": awaitable}[kind]
    result = await gang.extended.update(variable, fn, (10.0,))

    ids = range(gang.num_replicas_in_sync)
    assert type(result) is ar.Mirrored
    assert result.values == tuple(ids)
    assert parts(variable) == [1.0 + 10.0 * i for i in ids]
    assert variable.version == 1
    assert ar.get_update_replica_id() is None


@pytest.mark.asyncio
async def test_group_false_gives_a_list(gang: ar.MirroredStrategy) -> None:
    variable = new_variable(gang)

    result = await gang.extended.update(variable, lambda _v: my_component(), group=False)

    assert result == list(range(gang.num_replicas_in_sync))


@pytest.mark.asyncio
async def test_mirrored_arguments_are_unwrapped(gang: ar.MirroredStrategy) -> None:
    variable = new_variable(gang)
    count = gang.num_replicas_in_sync

    def update(_variable: ar.Variable, *args: Any, **kwargs: Any) -> None:
        assert args == (my_component(), "s", {"deep": [my_component()]})
        assert kwargs == {"key": my_component(), "none": None}

    ids = ar.Mirrored(range(count))
    await gang.extended.update(
        variable, update, (ids, "s", {"deep": [ids]}), {"key": ids, "none": None}
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["args", "kwargs", "deep", "deep in kwargs"])
async def test_per_replica_arguments_are_refused(gang: ar.MirroredStrategy, where: str) -> None:
    variable = new_variable(gang)
    value = ar.PerReplica([1.0] * gang.num_replicas_in_sync)
    args, kwargs = {
        "args": ((value,), {}),
        "kwargs": ((), {"x": value}),
        "deep": (([{"x": value}],), {}),
        "deep in kwargs": ((), {"x": [value]}),
    }[where]

    with pytest.raises(ValueError, match="PerReplica"):
        await gang.extended.update(variable, lambda _v, x: None, args, kwargs)


@pytest.mark.asyncio
async def test_writes_are_seen_inside_and_nowhere_else_before_the_end(
    gang: ar.MirroredStrategy,
) -> None:
    variable, other = new_variable(gang, 1.0), new_variable(gang, 5.0)
    seen_outside: list[list[float]] = []

    async def look() -> None:
        seen_outside.append(parts(variable) + parts(other))

    async def update(var: ar.Variable) -> None:
        await var.assign(10.0)
        assert var.value == 10.0
        await other.assign_sub(var.value)
        await asyncio.get_running_loop().create_task(look())
        await var.assign_add(1.0)
        assert var.value == 11.0

    await gang.extended.update(variable, update)

    count = gang.num_replicas_in_sync
    assert all(seen[:count] == [1.0] * count for seen in seen_outside)
    assert parts(variable) == [11.0] * count
    assert parts(other) == [-5.0] * count
    assert (variable.version, other.version) == (1, 1)


@pytest.mark.asyncio
async def test_a_reader_keeps_the_array_it_holds(gang: ar.MirroredStrategy) -> None:
    variable = new_variable(gang, np.zeros(3))
    held = variable.value

    await gang.extended.update(variable, lambda v: v.assign(np.ones(3)))

    assert held.tolist() == [0.0] * 3
    assert not variable.value.flags.writeable


@pytest.mark.asyncio
async def test_an_error_leaves_the_variable_as_it_was(gang: ar.MirroredStrategy) -> None:
    variable = new_variable(gang, 1.0)

    async def update(var: ar.Variable) -> None:
        await var.assign(2.0)
        if my_component():
            raise ValueError("second")

    with pytest.raises(ValueError, match="second"):
        await gang.extended.update(variable, update)
    assert parts(variable) == [1.0] * gang.num_replicas_in_sync
    assert variable.version == 0
    assert ar.get_update_replica_id() is None


@pytest.mark.asyncio
async def test_a_cancellation_leaves_the_variable_as_it_was(gang: ar.MirroredStrategy) -> None:
    variable = new_variable(gang, 1.0)

    async def update(var: ar.Variable) -> None:
        await var.assign(2.0)
        if my_component():
            await asyncio.Event().wait()

    task = asyncio.get_running_loop().create_task(gang.extended.update(variable, update))
    await idle()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert parts(variable) == [1.0] * gang.num_replicas_in_sync


@pytest.mark.asyncio
async def test_in_a_merge_function(gang: ar.MirroredStrategy) -> None:
    variable = new_variable(gang)

    async def merge(current: ar.Strategy, gradients: ar.PerReplica) -> Any:
        total = await current.reduce("sum", gradients)
        return await current.extended.update(
            variable, lambda v, g: v.assign_sub(g) or float(v.value), (total,)
        )

    async def step() -> float:
        ctx = ar.get_replica_context()
        result: float = await ctx.merge_call(merge, (float(ctx.replica_id_in_sync_group),))
        assert variable.value == -sum(range(ctx.num_replicas_in_sync))
        return result

    await gang.run(step)


@pytest.mark.asyncio
async def test_a_variable_of_another_strategy_is_refused(
    gang: ar.MirroredStrategy, solo: ar.OneDeviceStrategy
) -> None:
    variable = new_variable(solo)

    with pytest.raises(ContextError, match="its own"):
        await gang.extended.update(variable, lambda v: v.assign(1.0))


@pytest.mark.asyncio
async def test_cross_replica_methods_are_refused_in_an_update(gang: ar.MirroredStrategy) -> None:
    variable = new_variable(gang)

    async def update(var: ar.Variable) -> None:
        with pytest.raises(ContextError):
            await gang.run(int)
        with pytest.raises(ContextError):
            await gang.extended.update(var, lambda _v: None)
        with pytest.raises(ContextError):
            ar.Variable(1.0)

    await gang.extended.update(variable, update)


@pytest.mark.asyncio
async def test_concurrent_updates_of_two_variables(gang: ar.MirroredStrategy) -> None:
    variables = [new_variable(gang, float(i)) for i in range(5)]

    async def update(var: ar.Variable) -> None:
        before = my_component()
        for _ in range(3):
            await asyncio.sleep(0)
            assert my_component() == before
        await var.assign_add(100.0)

    await asyncio.gather(*(gang.extended.update(v, update) for v in variables))

    for i, variable in enumerate(variables):
        assert parts(variable) == [100.0 + i] * gang.num_replicas_in_sync
