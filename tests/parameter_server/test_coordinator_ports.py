"""What TensorFlow tests of its coordinator, asked of this one.

The facts are those of cluster_coordinator_test. Left out is what belongs to graphs, tracing, tags
of queues and the threads of its workers. Queues that hold two closures are asked the same.
"""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ClosureCancelledError, ContextError
from tests.parameter_server.coordinating import (
    Cluster,
    Gate,
    add_one,
    coordinating,
    fail,
    hold,
    identity,
)

pytest.importorskip("cloudpickle")
pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]


# ---- the queue -----------------------------------------------------------------------------------


async def test_nothing_scheduled_is_done_and_joins_at_once(cluster: Cluster) -> None:
    assert cluster.coordinator.done()
    await cluster.coordinator.join()
    await cluster.coordinator.join()


async def test_done_says_whether_closures_are_waiting_or_running(one_worker: Cluster) -> None:
    gate, coordinator = Gate(), one_worker.coordinator
    running, waiting = [await coordinator.schedule(hold, (gate,)) for _ in range(2)]
    await gate.reached()

    found = coordinator.done(), running.done(), waiting.done()
    statistics = coordinator.statistics()
    gate.open()
    await coordinator.join()

    assert found == (False, False, False)
    assert statistics.queue_depth + statistics.num_running == 2
    assert statistics.num_finished == 0
    assert coordinator.done()
    assert await coordinator.fetch([running, waiting]) == ["held", "held"]


async def test_several_tasks_may_join_and_all_wait_for_the_end(one_worker: Cluster) -> None:
    gate, coordinator = Gate(), one_worker.coordinator
    await coordinator.schedule(hold, (gate,))
    joins = [asyncio.ensure_future(coordinator.join()) for _ in range(4)]
    await gate.reached()

    assert not any(join.done() for join in joins)
    gate.open()
    await asyncio.gather(*joins)
    await coordinator.join()


async def test_joining_after_the_end_does_not_wait(cluster: Cluster) -> None:
    remote = await cluster.coordinator.schedule(add_one, (cluster.count,))
    assert await remote.fetch() == 1.0
    await cluster.coordinator.join()
    assert await cluster.counted() == 1


async def test_many_tasks_schedule_at_once(cluster: Cluster) -> None:
    async def schedule_some() -> None:
        for _ in range(10):
            await cluster.coordinator.schedule(add_one, (cluster.count,))

    await asyncio.gather(*(schedule_some() for _ in range(10)))
    await cluster.coordinator.join()
    assert await cluster.counted() == 100
    assert cluster.coordinator.done()


async def test_a_full_queue_makes_schedule_wait_and_schedule_nowait_refuse() -> None:
    gate = Gate()
    async with coordinating(num_workers=1, queue_size=2) as (_, coordinator):
        await coordinator.schedule(hold, (gate,))
        await gate.reached()
        with pytest.raises(anyio.WouldBlock):  # noqa: PT012 (how many are under way is its own)
            for _ in range(100):
                coordinator.schedule_nowait(hold, (gate,))
        scheduling = asyncio.ensure_future(coordinator.schedule(identity, (5,)))
        await asyncio.sleep(0)
        was_done = scheduling.done()
        gate.open()
        remote = await scheduling

        assert not was_done
        assert await remote.fetch() == 5
        await coordinator.join()
        assert coordinator.schedule_nowait(identity, (6,)) is not None
        await coordinator.join()


async def test_a_schedule_that_is_cancelled_while_it_waits_leaves_nothing(
    one_worker: Cluster,
) -> None:
    gate, coordinator = Gate(), one_worker.coordinator
    held = []
    with pytest.raises(anyio.WouldBlock):  # noqa: PT012
        while True:
            held.append(coordinator.schedule_nowait(hold, (gate,)))
    scheduling = asyncio.ensure_future(coordinator.schedule(add_one, (one_worker.count,)))
    await gate.reached()
    scheduling.cancel()
    await asyncio.wait([scheduling])
    gate.open()
    await coordinator.join()

    assert scheduling.cancelled() != (await one_worker.counted() == 1)
    assert coordinator.statistics().num_finished == len(held) + (not scheduling.cancelled())


# ---- errors --------------------------------------------------------------------------------------


def hold_and_add(gate: Gate, count: Any) -> None:
    gate.pass_through()
    count.assign_add(1.0)


@pytest.mark.parametrize("way", ["join", "schedule", "schedule_nowait"])
async def test_the_first_error_is_raised_once_and_the_rest_is_cancelled(
    one_worker: Cluster, way: str
) -> None:
    first, second, coordinator = Gate(), Gate(), one_worker.coordinator
    held = await coordinator.schedule(hold, (first,))
    bad = await coordinator.schedule(fail)
    later = [
        await coordinator.schedule(hold_and_add, (second, one_worker.count)) for _ in range(20)
    ]
    await first.reached()
    first.open()
    with pytest.raises(ValueError, match="bad batch"):
        await bad.fetch()
    second.open()

    with pytest.raises(ValueError, match="bad batch"):
        await raised_by(coordinator, way)
    await coordinator.join()  # the error is gone

    assert coordinator.done()
    assert await held.fetch() == "held"
    with pytest.raises(ValueError, match="bad batch"):
        await bad.fetch()
    num_run = 0
    for remote in later:
        try:
            num_run += await remote.fetch() is None
        except ClosureCancelledError:
            continue
    assert num_run < 10  # those on their way to the worker when the error came
    with pytest.raises(ClosureCancelledError):
        await later[-1].fetch()
    assert coordinator.statistics().num_cancelled == 20 - num_run
    assert await one_worker.counted() >= num_run
    assert await (await coordinator.schedule(add_one, (one_worker.count,))).fetch() == 1.0


async def raised_by(coordinator: Any, way: str) -> None:
    if way == "join":
        await coordinator.join()
    elif way == "schedule":
        await coordinator.schedule(identity, (1,))
    else:
        coordinator.schedule_nowait(identity, (1,))


async def test_an_error_is_raised_by_whichever_schedule_comes_next(cluster: Cluster) -> None:
    for _ in range(3):
        await cluster.coordinator.schedule(add_one, (cluster.count,))
    await cluster.coordinator.schedule(fail)
    with pytest.raises(ValueError, match="bad batch"):  # noqa: PT012
        while True:
            await cluster.coordinator.schedule(add_one, (cluster.count,))
            await asyncio.sleep(0)
    await cluster.coordinator.join()


async def test_of_several_errors_one_is_raised(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match="number"):  # noqa: PT012
        for i in range(100_000):
            await cluster.coordinator.schedule(fail, (f"number {i}",))
            await asyncio.sleep(0)
    await cluster.coordinator.join()


async def test_join_waits_for_running_closures_before_it_raises(one_worker: Cluster) -> None:
    gate = Gate()
    async with coordinating(num_workers=2) as (_, coordinator):
        held = await coordinator.schedule(hold, (gate,))
        await gate.reached()
        bad = await coordinator.schedule(fail)
        with pytest.raises(ValueError, match="bad batch"):
            await bad.fetch()
        joining = asyncio.ensure_future(coordinator.join())
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(ValueError, match="bad batch"):
            await joining
        assert held.done()
        statistics = coordinator.statistics()
        assert (statistics.queue_depth, statistics.num_running) == (0, 0)


async def test_errors_come_again_and_again(cluster: Cluster) -> None:
    for text in ("first", "second", "third"):
        for _ in range(3):
            await cluster.coordinator.schedule(add_one, (cluster.count,))
        await cluster.coordinator.schedule(fail, (text,))
        with pytest.raises(ValueError, match=text):
            await cluster.coordinator.join()


async def test_closures_scheduled_after_an_error_run(cluster: Cluster) -> None:
    await cluster.coordinator.schedule(fail)
    with pytest.raises(ValueError, match="bad batch"):
        await cluster.coordinator.join()
    before = await cluster.counted()
    for _ in range(3):
        await cluster.coordinator.schedule(add_one, (cluster.count,))
    await cluster.coordinator.join()
    assert await cluster.counted() == before + 3


async def test_done_raises_the_error_when_all_is_over(cluster: Cluster) -> None:
    bad = await cluster.coordinator.schedule(fail)
    with pytest.raises(ValueError, match="bad batch"):
        await bad.fetch()
    with pytest.raises(ValueError, match="bad batch"):  # noqa: PT012
        while not cluster.coordinator.done():
            await asyncio.sleep(0)
    assert cluster.coordinator.done()
    await cluster.coordinator.join()


class UnpicklableError(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fail_oddly() -> None:
    raise UnpicklableError(1, 2)


async def test_an_error_that_does_not_survive_pickling_is_described(cluster: Cluster) -> None:
    await cluster.coordinator.schedule(fail_oddly)
    with pytest.raises(Exception, match="1 and 2"):
        await cluster.coordinator.join()


# ---- results -------------------------------------------------------------------------------------


def nested(x: int) -> Any:
    return x + 1, (x + 2, x + 3), [x + 4], {"v": x}


NESTED = (2, (3, 4), [5], {"v": 1})


async def test_results_are_nested_values(cluster: Cluster) -> None:
    got = await cluster.coordinator.schedule(nested, (1,))
    assert await got.fetch() == NESTED
    assert await cluster.coordinator.fetch(got) == NESTED


async def test_fetch_takes_structures_with_other_things_in_them(cluster: Cluster) -> None:
    remotes = [await cluster.coordinator.schedule(nested, (1,)) for _ in range(5)]
    assert await cluster.coordinator.fetch(remotes) == [NESTED] * 5
    structure = {"all": tuple(remotes[:2]), "other": 7, "none": None}
    expected = {"all": (NESTED, NESTED), "other": 7, "none": None}
    assert await cluster.coordinator.fetch(structure) == expected


async def test_keyword_arguments_reach_the_closure(cluster: Cluster) -> None:
    remote = await cluster.coordinator.schedule(dict, ([("a", 1)],), {"b": 2})
    assert await remote.fetch() == {"a": 1, "b": 2}


async def aidentity(x: Any) -> Any:
    await asyncio.sleep(0)
    return x


@pytest.mark.parametrize("fn", [identity, aidentity])
async def test_plain_and_async_closures_return(cluster: Cluster, fn: Any) -> None:
    assert await (await cluster.coordinator.schedule(fn, ("x",))).fetch() == "x"


async def test_a_fetch_may_be_repeated_and_given_up(one_worker: Cluster) -> None:
    gate = Gate()
    remote = await one_worker.coordinator.schedule(hold, (gate,))
    first = asyncio.ensure_future(remote.fetch())
    await gate.reached()
    first.cancel()
    await asyncio.wait([first])
    gate.open()

    assert first.cancelled()
    assert [await remote.fetch(), await remote.fetch()] == ["held", "held"]


async def test_a_remote_value_as_an_argument_is_refused(cluster: Cluster) -> None:
    remote = await cluster.coordinator.schedule(identity, (1,))
    with pytest.raises((ValueError, TypeError), match="RemoteValue"):
        await cluster.coordinator.schedule(identity, (remote,))
    await cluster.coordinator.join()


async def test_a_closure_that_is_not_a_function_is_refused(cluster: Cluster) -> None:
    with pytest.raises(TypeError, match="5"):
        await cluster.coordinator.schedule(5)


# ---- variables -----------------------------------------------------------------------------------


def assign_both(first: Any, second: Any) -> float:
    first.assign_add(0.1)
    second.assign_sub(0.2)
    return float(first.value / second.value)


async def test_a_closure_reads_its_own_writes(cluster: Cluster) -> None:
    with cluster.strategy.scope():
        first, second = ar.Variable(np.zeros(())), ar.Variable(np.ones(()))
    remote = await cluster.coordinator.schedule(assign_both, (first, second))

    assert await remote.fetch() == pytest.approx(0.1 / 0.8)
    assert await first.read() == pytest.approx(0.1)
    assert await second.read() == pytest.approx(0.8)


async def test_closures_capture_variables(cluster: Cluster) -> None:
    count = cluster.count

    def closure() -> None:
        count.assign_add(2.0)

    for _ in range(5):
        await cluster.coordinator.schedule(closure)
    await cluster.coordinator.join()
    assert await cluster.counted() == 10


def read_around(variable: Any, gate: Gate) -> tuple[float, float]:
    before = float(variable.value)
    gate.pass_through()
    return before, float(variable.value)


async def test_reads_in_a_closure_are_one_read(one_worker: Cluster) -> None:
    gate = Gate()
    remote = await one_worker.coordinator.schedule(read_around, (one_worker.count, gate))
    await gate.reached()
    await one_worker.count.assign(5.0)
    gate.open()

    assert await remote.fetch() == (0.0, 0.0)
    again = await one_worker.coordinator.schedule(read_around, (one_worker.count, gate))
    assert await again.fetch() == (5.0, 5.0)


async def test_a_variable_has_no_value_on_the_coordinator(cluster: Cluster) -> None:
    with pytest.raises(ContextError, match=r"read\(\)"):
        _ = cluster.count.value


async def test_running_without_the_coordinator_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ContextError, match="schedule"):
        await cluster.strategy.run(add_one, args=(cluster.count,))


async def test_a_strategy_has_one_coordinator(cluster: Cluster) -> None:
    with pytest.raises(ContextError, match="coordinator"):
        async with ar.ClusterCoordinator(cluster.strategy):
            pass
    assert await (await cluster.coordinator.schedule(add_one, (cluster.count,))).fetch() == 1.0


async def test_a_closed_coordinator_is_refused_and_a_new_one_may_come() -> None:
    engine = ar.cluster.LocalClosureEngine(num_workers=1)
    async with ar.ParameterServerStrategy(engine) as strategy:
        async with ar.ClusterCoordinator(strategy) as coordinator:
            pass
        for way in ("join", "schedule", "schedule_nowait"):
            with pytest.raises(ContextError, match="closed"):
                await raised_by(coordinator, way)
        async with ar.ClusterCoordinator(strategy) as coordinator:
            assert await (await coordinator.schedule(identity, (1,))).fetch() == 1
