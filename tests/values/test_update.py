"""Updates: components staged one by one and swapped together; cancelled writes leave no trace."""

import asyncio
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError


def new(strategy: ar.Strategy, value: Any = 0.0, aggregation: str = "none") -> Any:
    with strategy.scope():
        name = None if strategy._runtime.variable_table.has("w") else "w"
        return ar.Variable(value, name=name, aggregation=aggregation)


def components(variable: Any) -> list[Any]:
    return [part.tolist() for part in variable.components]


@pytest.mark.asyncio
async def test_reads_and_writes_act_on_the_component(pair: ar.MirroredStrategy) -> None:
    variable = new(pair, 1.0)
    seen: list[tuple[Any, ...]] = []

    async def update(v: Any, factor: float) -> int | None:
        index = ar.get_update_replica_id()
        await v.assign(factor * (index + 1))
        await v.assign_add(1.0)
        seen.append((index, float(v.value), components(v)))
        return index

    results = await pair.extended.update(variable, update, args=(10.0,))

    assert seen == [(0, 11.0, [1.0, 1.0]), (1, 21.0, [1.0, 1.0])]
    assert components(variable) == [11.0, 21.0]
    assert variable.version == 1
    assert isinstance(results, ar.Mirrored)
    assert results.values == (0, 1)
    assert ar.get_update_replica_id() is None


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["sync", "async", "awaitable"])
async def test_the_function_may_be_of_any_kind(pair: ar.MirroredStrategy, kind: str) -> None:
    variable = new(pair, 1.0)

    def plain(v: Any) -> None:
        v.assign_sub(0.5)

    async def coroutine(v: Any) -> None:
        await asyncio.sleep(0)
        await v.assign_sub(0.5)

    functions = {"sync": plain, "async": coroutine, "awaitable": lambda v: v.assign_sub(0.5)}

    await pair.extended.update(variable, functions[kind])

    assert components(variable) == [0.5, 0.5]


@pytest.mark.asyncio
async def test_no_aggregation_is_needed_in_an_update(pair: ar.MirroredStrategy) -> None:
    variable = new(pair, 1.0, "sum")

    await pair.extended.update(variable, lambda v: v.assign(2.0))

    assert components(variable) == [2.0, 2.0]


@pytest.mark.asyncio
async def test_arguments_are_unwrapped_and_results_listed(pair: ar.MirroredStrategy) -> None:
    variable = new(pair)

    results = await pair.extended.update(
        variable,
        lambda _v, x, *, y: (x, y),
        args=(ar.Mirrored([1, 1]),),
        kwargs={"y": ar.Mirrored(["a", "a"])},
        group=False,
    )

    assert results == [(1, "a"), (1, "a")]
    assert variable.version == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("nested", [False, True])
async def test_a_per_replica_argument_is_a_value_error(
    pair: ar.MirroredStrategy, nested: bool
) -> None:
    variable = new(pair)
    value: Any = ar.PerReplica([1.0, 2.0])

    with pytest.raises(ValueError, match="PerReplica"):
        await pair.extended.update(
            variable, lambda v, x: v.assign(1.0), args=([value] if nested else value,)
        )


@pytest.mark.asyncio
async def test_a_variable_of_another_strategy_is_a_context_error(
    pair: ar.MirroredStrategy,
) -> None:
    other = ar.MirroredStrategy(["cpu:2", "cpu:3"])

    with pytest.raises(ContextError, match="w"):
        await pair.extended.update(new(other), lambda v: v.assign(1.0))


@pytest.mark.asyncio
async def test_other_variables_of_the_strategy_are_written_in_the_same_swap(
    pair: ar.MirroredStrategy,
) -> None:
    first, second = new(pair), new(pair)

    async def update(v: Any) -> None:
        await v.assign(1.0)
        await second.assign(float(v.value) + 1.0)

    await pair.extended.update(first, update)

    assert (components(first), components(second)) == ([1.0, 1.0], [2.0, 2.0])


@pytest.mark.asyncio
@pytest.mark.parametrize("value", [np.zeros(2), 1j, ar.PerReplica([1.0, 2.0])])
async def test_a_value_that_does_not_fit_changes_no_component(
    pair: ar.MirroredStrategy, value: Any
) -> None:
    variable = new(pair)

    async def update(v: Any) -> None:
        await v.assign(value if ar.get_update_replica_id() == 1 else 5.0)

    with pytest.raises((ValueError, TypeError)):
        await pair.extended.update(variable, update)
    assert (components(variable), variable.version) == ([0.0, 0.0], 0)


@pytest.mark.asyncio
async def test_an_error_in_the_last_component_changes_none(pair: ar.MirroredStrategy) -> None:
    variable = new(pair)

    async def update(v: Any) -> None:
        await v.assign(5.0)
        if ar.get_update_replica_id() == 1:
            raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        await pair.extended.update(variable, update)
    assert components(variable) == [0.0, 0.0]


# --- cancellation -----------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("component", [0, 1])
async def test_a_cancelled_update_changes_no_component(
    pair: ar.MirroredStrategy, component: int
) -> None:
    variable, reached = new(pair), asyncio.Event()

    async def update(v: Any) -> None:
        await v.assign(5.0)
        if ar.get_update_replica_id() == component:
            reached.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(pair.extended.update(variable, update))
    await reached.wait()
    assert components(variable) == [0.0, 0.0]
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert (components(variable), variable.version) == ([0.0, 0.0], 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("num_cycles", range(12))
async def test_a_cancelled_run_leaves_the_old_value_or_the_new_one(
    pair: ar.MirroredStrategy, num_cycles: int
) -> None:
    variable = new(pair, np.zeros(3), "sum")

    async def step() -> None:
        for _ in range(2):
            await asyncio.sleep(0)
            await variable.assign_add(np.ones(3))

    task = asyncio.create_task(pair.run(step))
    for _ in range(num_cycles):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

    written = variable.version
    assert components(variable) == [[2.0 * written] * 3] * 2
    assert written in (0, 1, 2)
    assert task.cancelled() or written == 2


@pytest.mark.asyncio
async def test_a_write_that_waits_for_a_replica_is_not_half_done(pair: ar.MirroredStrategy) -> None:
    variable, waiting = new(pair, 0.0, "sum"), asyncio.Event()

    async def step() -> None:
        if ar.get_replica_context().replica_id_in_sync_group == 1:
            waiting.set()
            await asyncio.Event().wait()
        await variable.assign(1.0)

    task = asyncio.create_task(pair.run(step))
    await waiting.wait()
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert (components(variable), variable.version) == ([0.0, 0.0], 0)
    await assign_again(pair, variable)


async def assign_again(strategy: ar.Strategy, variable: Any) -> None:
    """The variable works after a run that was cancelled."""

    async def step() -> None:
        await variable.assign(1.0)

    await strategy.run(step)
    assert components(variable) == [2.0, 2.0]
