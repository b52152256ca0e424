"""A run ends after its device ops, however it ends and however they were waited for."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest

import aioreplica as ar
import aioreplica.testing as art
from aioreplica.errors import MergeMismatchError, StallError
from tests.sequencer import idle

LIMIT_S = 60


class Gate:
    """An op that starts, waits to be let through, and counts how many have ended."""

    def __init__(self) -> None:
        self._gate = threading.Event()
        self.loop = asyncio.get_running_loop()
        self.started = asyncio.Event()
        self.num_ended = 0

    def __call__(self) -> None:
        self.loop.call_soon_threadsafe(self.started.set)
        assert self._gate.wait(LIMIT_S)
        self.num_ended += 1

    def open(self) -> None:
        self._gate.set()


@pytest.fixture
def gates() -> Iterator[list[Gate]]:
    made: list[Gate] = []
    yield made
    for gate in made:
        gate.open()


def me() -> Any:
    return ar.get_replica_context()


async def cancel_later(task: asyncio.Task[Any], gate: Gate) -> None:
    """Cancel once the op has started, and see that the task goes on until the op has ended."""
    await gate.started.wait()
    task.cancel()
    await idle()
    assert not task.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate.num_ended == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("use", ["gather", "create_task", "wait_for", "shield", "device_op"])
async def test_a_cancelled_run_waits_for_a_started_op(
    solo: ar.OneDeviceStrategy, gates: list[Gate], use: str
) -> None:
    gate = Gate()
    gates.append(gate)

    async def step() -> None:
        run = me().run_on_device
        if use == "gather":
            await asyncio.gather(run(gate), run(gate), run(gate))
        elif use == "create_task":
            async with asyncio.TaskGroup() as group:
                group.create_task(run(gate))
                group.create_task(run(gate))
        elif use == "wait_for":
            await asyncio.wait_for(run(gate), LIMIT_S)
        elif use == "shield":
            await asyncio.shield(run(gate))
        else:
            await asyncio.gather(ar.device_op(gate)(), ar.device_op(gate)())

    await cancel_later(asyncio.get_running_loop().create_task(solo.run(step)), gate)


@pytest.mark.asyncio
async def test_a_failed_run_waits_for_a_started_op_and_takes_queued_ones_back(
    solo: ar.OneDeviceStrategy, gates: list[Gate]
) -> None:
    gate = Gate()
    gates.append(gate)

    async def step() -> None:
        run = me().run_on_device
        failing = asyncio.gather(run(gate), run(gate))
        await gate.started.wait()
        failing.add_done_callback(lambda _: None)
        raise ValueError("mine")

    task = asyncio.get_running_loop().create_task(solo.run(step))
    await gate.started.wait()
    await idle()
    assert not task.done()
    gate.open()

    with pytest.raises(ValueError, match="mine"):
        await task
    assert gate.num_ended == 1


@pytest.mark.asyncio
async def test_two_tasks_may_wait_for_one_op_and_be_cancelled(
    solo: ar.OneDeviceStrategy, gates: list[Gate]
) -> None:
    gate = Gate()
    gates.append(gate)

    async def step() -> None:
        op = me().run_on_device(gate)

        async def use() -> None:
            await op

        tasks = [asyncio.get_running_loop().create_task(use()) for _ in range(2)]
        await gate.started.wait()
        tasks[0].cancel()
        await asyncio.sleep(0)
        gate.open()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2

    async with asyncio.timeout(LIMIT_S):
        await solo.run(step)


@pytest.mark.asyncio
async def test_an_anyio_scope_around_gathered_ops_is_left_after_them(
    solo: ar.OneDeviceStrategy, gates: list[Gate]
) -> None:
    gate = Gate()
    gates.append(gate)

    async def step() -> None:
        run = me().run_on_device
        await asyncio.gather(run(gate), run(gate))

    async def cancel_and_open() -> None:
        await gate.started.wait()
        scope.cancel()
        await idle()
        gate.open()

    opener = asyncio.get_running_loop().create_task(cancel_and_open())
    with anyio.CancelScope() as scope:
        await solo.run(step)
    assert gate.num_ended == 1
    await opener


def test_ops_that_end_are_progress() -> None:
    """Ops that take longer together than the timeout allows are no stall; one that hangs is."""

    def op() -> None:
        threading.Event().wait(5)  # in simulated time

    async def busy() -> None:
        await asyncio.gather(*[me().run_on_device(op) for _ in range(12)])
        for _ in range(12):
            await ar.device_op(op)()

    async def hang() -> None:
        await asyncio.sleep(10_000)

    async def main() -> None:
        options = ar.RunOptions(stall_timeout=40)
        async with ar.OneDeviceStrategy("cpu:0") as strategy:
            await strategy.run(busy, options=options)
            with pytest.raises(StallError):
                await strategy.run(hang, options=options)

    art.run(main)


@pytest.mark.asyncio
async def test_one_that_cancelled_itself_before_it_arrived_is_the_one_that_withdrew(
    triple: ar.MirroredStrategy,
) -> None:
    async def step() -> None:
        if me().replica_id_in_sync_group == 1:
            await asyncio.sleep(0)
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        elif me().replica_id_in_sync_group == 2:
            await asyncio.Event().wait()  # the last one never comes
        await me().barrier()

    with pytest.raises(MergeMismatchError, match="Replica 1 withdrew from barrier #1"):
        await triple.run(step)


@pytest.mark.asyncio
async def test_one_that_gives_up_before_the_first_step_withdrew(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        if me().replica_id_in_sync_group == 1:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(me().barrier(), 0)

    with pytest.raises(MergeMismatchError, match="Replica 1 withdrew from barrier #1"):
        await pair.run(step)


@pytest.mark.asyncio
async def test_a_task_that_is_about_to_call_is_not_blamed(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        if me().replica_id_in_sync_group == 1:
            await asyncio.sleep(0)
            async with asyncio.TaskGroup() as group:
                group.create_task(me().barrier())
        elif me().replica_id_in_sync_group == 0:
            await idle()

    with pytest.raises(MergeMismatchError, match="Replica 0 returned while replica 1 waits"):
        await pair.run(step)


@pytest.mark.asyncio
async def test_a_context_outside_runs_outlives_a_merge_that_was_given_up() -> None:
    context: Any = ar.get_replica_context()

    async def forever(_strategy: ar.Strategy) -> None:
        limit.reschedule(0.0)
        await asyncio.Event().wait()

    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(None) as limit:
                await context.merge_call(forever)
    assert await context.all_reduce("sum", 3) == 3


@pytest.mark.asyncio
async def test_a_failure_is_mentioned_by_the_timeout_that_overtakes_it(
    solo: ar.OneDeviceStrategy, gates: list[Gate]
) -> None:
    gate = Gate()
    gates.append(gate)

    async def step() -> None:
        asyncio.gather(me().run_on_device(gate)).add_done_callback(lambda _: None)
        await gate.started.wait()
        raise ValueError("mine")

    task = asyncio.get_running_loop().create_task(solo.run(step))
    await gate.started.wait()
    await idle()
    task.cancel()
    gate.open()

    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert "ValueError('mine')" in "".join(caught.value.__notes__)


@pytest.mark.asyncio
async def test_the_default_strategy_is_never_closed() -> None:
    entered, was_left = asyncio.Event(), asyncio.Event()

    async def step() -> int:
        entered.set()
        await was_left.wait()
        return 7

    task = asyncio.get_running_loop().create_task(ar.get_strategy().run(step))
    await entered.wait()
    async with ar.get_strategy():
        pass
    was_left.set()

    assert await task == 7


@pytest.mark.asyncio
async def test_broadcast_values_do_not_change_when_the_source_writes(
    pair: ar.MirroredStrategy,
) -> None:
    async def step() -> float:
        mine = np.full(3, float(me().replica_id_in_sync_group + 1))
        got = await me().broadcast(mine, source=0)
        mine[:] = 9.0
        await me().barrier()
        assert not got.flags.writeable
        return float(got[0])

    assert list(await pair.run(step)) == [1.0, 1.0]


@pytest.mark.asyncio
async def test_updates_that_await_do_not_lose_each_others_writes(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        counter = ar.Variable(0.0)

    async def add_one(variable: ar.Variable) -> None:
        old = variable.value
        await asyncio.sleep(0)
        await variable.assign(old + 1)

    await asyncio.gather(*[pair.extended.update(counter, add_one) for _ in range(3)])

    assert [float(part) for part in counter.components] == [3.0, 3.0]
    await pair.check_in_sync([counter])


def test_a_variable_is_not_changed_in_place() -> None:
    variable = ar.Variable(1.0)

    with pytest.raises(TypeError, match="assign_add"):
        variable += 1


@pytest.mark.asyncio
async def test_an_op_is_not_started_after_its_run(solo: ar.OneDeviceStrategy) -> None:
    calls: list[int] = []
    kept: list[Any] = []

    async def step() -> None:
        kept.append(me().run_on_device(calls.append, 1))

    await solo.run(step)

    with pytest.raises(ar.errors.ContextError, match="after the run"):
        await kept[0]
    assert calls == []
