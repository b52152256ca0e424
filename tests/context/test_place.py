"""The current place, seen from everywhere that code can run."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.context import DEFAULT_PLACE, PLACE, LoopStep, Place

pytestmark = pytest.mark.usefixtures("no_task_left")


def seen() -> tuple[bool, bool, int | None]:
    """In cross-replica context? In a replica? Updating which component?"""
    return (
        ar.in_cross_replica_context(),
        ar.get_replica_context() is not None,
        ar.get_update_replica_id(),
    )


def test_the_default_place_is_a_replica_context() -> None:
    assert PLACE.get() is DEFAULT_PLACE
    assert seen() == (False, True, None)


@pytest.mark.asyncio
async def test_a_scope_is_cross_replica(strategy: ar.Strategy) -> None:
    is_default = isinstance(strategy, ar.DefaultStrategy)  # whose scope changes nothing
    with strategy.scope():
        assert seen() == (not is_default, is_default, None)

    assert seen() == (False, True, None)


@pytest.mark.asyncio
async def test_a_step_is_in_its_replica(strategy: ar.Strategy) -> None:
    async def step() -> None:
        ctx = ar.get_replica_context()
        assert seen() == (False, True, None)
        assert ar.get_strategy() is strategy
        assert ctx.strategy is strategy
        assert ctx.num_replicas_in_sync == strategy.num_replicas_in_sync

    await strategy.run(step)
    assert seen() == (False, True, None)


@pytest.mark.asyncio
async def test_a_plain_step_is_in_its_replica(strategy: ar.Strategy) -> None:
    def step() -> tuple[object, ...]:
        return (*seen(), ar.get_strategy() is strategy)

    results = await strategy.run(step)

    assert strategy.local_results(results) == ((False, True, None, True),) * len(
        strategy.local_results(results)
    )


@pytest.mark.asyncio
async def test_a_merge_function_is_cross_replica(strategy: ar.Strategy) -> None:
    def merge(current: ar.Strategy) -> tuple[object, ...]:
        return (*seen(), current is strategy, ar.get_strategy() is strategy)

    async def step() -> tuple[object, ...]:
        merged: tuple[object, ...] = await ar.get_replica_context().merge_call(merge)
        assert seen() == (False, True, None)
        return merged

    results = strategy.local_results(await strategy.run(step))

    assert set(results) == {(True, False, None, True, True)}


@pytest.mark.asyncio
async def test_an_async_merge_function_is_cross_replica_after_an_await(
    strategy: ar.Strategy,
) -> None:
    async def merge(current: ar.Strategy) -> tuple[object, ...]:
        await ar.run_on_host(int)
        return (*seen(), current is strategy, ar.get_strategy() is strategy)

    async def step() -> tuple[object, ...]:
        merged: tuple[object, ...] = await ar.get_replica_context().merge_call(merge)
        assert seen() == (False, True, None)
        return merged

    results = strategy.local_results(await strategy.run(step))

    assert set(results) == {(True, False, None, True, True)}


@pytest.mark.asyncio
async def test_an_update_function_is_neither(gang: ar.MirroredStrategy) -> None:
    with gang.scope():
        variable = ar.Variable(0.0)

    async def update(_variable: ar.Variable) -> list[tuple[object, ...]]:
        before = seen()
        await ar.run_on_host(int)
        return [before, seen()]

    results = await gang.extended.update(variable, update, group=False)

    assert results == [[(False, False, i)] * 2 for i in range(gang.num_replicas_in_sync)]


@pytest.mark.asyncio
async def test_device_ops_see_the_place_of_their_caller(strategy: ar.Strategy) -> None:
    async def step() -> None:
        ctx = ar.get_replica_context()
        assert await ctx.run_on_device(ar.get_replica_context) is ctx
        assert await ar.run_on_host(ar.get_replica_context) is ctx

    await strategy.run(step)


def test_places_describe_themselves() -> None:
    class Replica:
        replica_id_in_sync_group = 3

    assert Place().describe() == "no strategy's scope"
    assert Place("S").describe() == "the scope of 'S'"
    assert Place("S", in_merge=True).describe() == "a merge function of 'S'"
    assert Place("S", Replica()).describe() == "a replica of 'S'"
    assert Place("S", update_replica_id=1).describe() == "the update of component 1 of 'S'"


def test_steps_that_count_as_taken_never_become_fewer() -> None:
    """Device threads go on between any two looks at what they have completed and published."""
    published = [3, 0]

    class Completed(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield from list(super().__iter__())
            self[:] = [3, 3]  # now all have completed step 2, and one has published in step 3
            published[0] = 4

    before = LoopStep(0, [2, 2], published).num_taken()
    after = LoopStep(0, Completed([2, 2]), published).num_taken()

    assert (before, after) == (3, 3)
    assert LoopStep(0, [3, 3], published).num_taken() == 4


@pytest.mark.asyncio
@pytest.mark.parametrize("is_plain", [False, True], ids=["async", "plain"])
async def test_tasks_started_by_a_step_are_outside_after_the_run(
    strategy: ar.Strategy, is_plain: bool
) -> None:
    go, variable = asyncio.Event(), ar.Variable(0.0)
    tasks: list[asyncio.Task[Any]] = []
    loop = asyncio.get_running_loop()

    async def live_on() -> Any:
        await go.wait()
        await variable.assign_add(1.0)
        with strategy.scope() as current:
            inside = ar.get_strategy() is current
        return seen(), inside or isinstance(strategy, ar.DefaultStrategy)

    async def step() -> None:
        tasks.append(asyncio.create_task(live_on()))

    def plain_step() -> None:
        started = asyncio.run_coroutine_threadsafe(live_on(), loop)
        loop.call_soon_threadsafe(lambda: tasks.append(asyncio.wrap_future(started)))

    if is_plain:
        await strategy.run(plain_step)
        await asyncio.sleep(0)
    else:
        await strategy.run(step)
    go.set()

    results = await asyncio.gather(*tasks)
    assert results == [((False, True, None), True)] * strategy.num_replicas_in_sync
    assert variable.value == strategy.num_replicas_in_sync


@pytest.mark.asyncio
async def test_tasks_started_by_an_update_are_outside_after_it(pair: ar.MirroredStrategy) -> None:
    go = asyncio.Event()
    tasks: list[asyncio.Task[Any]] = []
    with pair.scope():
        variable = ar.Variable(1.0)

    async def live_on() -> Any:
        await go.wait()
        await variable.assign_add(1.0)
        return seen()

    async def update(_variable: ar.Variable) -> None:
        tasks.append(asyncio.create_task(live_on()))

    await pair.extended.update(variable, update)
    go.set()

    assert await asyncio.gather(*tasks) == [(False, True, None)] * 2
    assert variable.value == 3.0
