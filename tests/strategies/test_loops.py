"""A strategy outlives its event loop, and what a closed one does, method by method."""

import asyncio
import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.devices import lane_table
from aioreplica.errors import ContextError, LoopMismatchError, WorkerLostError
from tests.conftest import mirrored
from tests.sequencer import idle
from tests.strategies.workers import strategies

BOUND = [lambda: ar.OneDeviceStrategy("cpu:0"), lambda: mirrored(2)]
each_kind = pytest.mark.parametrize("make", BOUND, ids=["one device", "mirrored"])


async def total(x: float) -> Any:
    ctx = ar.get_replica_context()
    assert ctx is not None
    await ctx.run_on_device(int)
    return await ctx.all_reduce("sum", x)


def close(strategy: ar.Strategy) -> None:
    asyncio.run(strategy.aclose())


# ---- another loop ------------------------------------------------------------------------------


@each_kind
def test_the_next_loop_goes_on_with_the_variables(make: Any) -> None:
    strategy = make()
    with strategy.scope():
        weight = ar.Variable([1.0, 2.0], aggregation="mean")
    optimizer = ar.optimizers.SGD(0.5, momentum=0.5)

    async def step() -> None:
        await optimizer.apply_gradients([(np.ones(2) / strategy.num_replicas_in_sync, weight)])

    for number in range(3):
        asyncio.run(strategy.run(step))
        assert weight.version == number + 1
        assert strategy.statistics().state == "open"
    assert int(optimizer.iterations.value) == 3
    assert strategy.statistics().num_steps == 3
    np.testing.assert_allclose(weight.value, [1.0 - 0.5 * 4.25, 2.0 - 0.5 * 4.25])
    close(strategy)
    assert not set(strategy._runtime.device_names) & set(lane_table().statistics())


@each_kind
def test_two_living_loops_are_refused(make: Any) -> None:
    strategy = make()
    first, second = asyncio.Runner(), asyncio.Runner()
    with second:
        with first:
            first.run(strategy.run(total, (1.0,)))  # stopped from here on, but not closed
            for use in (lambda: strategy.run(total, (1.0,)), strategy.__aenter__, strategy.aclose):
                with pytest.raises(LoopMismatchError):
                    second.run(use())
            first.run(strategy.run(total, (1.0,)))
        second.run(strategy.run(total, (1.0,)))
        second.run(strategy.aclose())


def test_a_loop_over_a_dataset_of_the_dead_loop_is_ended() -> None:
    strategy = mirrored(2)
    dataset = strategy.distribute_dataset([np.arange(4.0)] * 3)

    async def begin() -> Any:
        batches = aiter(dataset)
        await anext(batches)
        return batches

    batches = asyncio.run(begin())

    async def go_on() -> list[Any]:
        await strategy.run(total, (1.0,))
        with pytest.raises(ContextError, match=r"event loop of <MirroredStrategy> was closed"):
            await anext(batches)
        async with dataset:
            return [batch async for batch in dataset]

    assert len(asyncio.run(go_on())) == 3
    close(strategy)  # without a warning of a loop that was broken off


def test_a_wait_on_the_dead_loop_does_not_disturb_later_ones() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        weight, other = ar.Variable([1.0, 2.0]), ar.Variable([1.0, 2.0])

    async def train() -> None:
        await strategy.run(total, (1.0,))
        waits.append(asyncio.ensure_future(strategy.wait_for_version(weight, 1)))
        waits.append(asyncio.ensure_future(strategy.wait_for_version(other, 1)))
        await asyncio.sleep(0)

    waits: list[asyncio.Future[int]] = []
    first = asyncio.new_event_loop()
    first.run_until_complete(train())
    first.close()

    async def evaluate() -> int:
        await strategy.run(total, (1.0,))
        waiting = asyncio.ensure_future(strategy.wait_for_version(weight, 1))
        await asyncio.sleep(0)
        await weight.assign([3.0, 4.0])
        return await waiting

    assert asyncio.run(evaluate()) == 1
    assert "0 waiting" in repr(strategy._runtime.store)
    close(strategy)
    for wait in waits:  # pending for good, as their loop is
        wait._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_run_that_the_dead_loop_left_does_not_hold_up_aclose() -> None:
    strategy = mirrored(2)

    async def step() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        left.append(asyncio.ensure_future(strategy.run(step)))
        await idle()

    left: list[asyncio.Future[Any]] = []
    first = asyncio.new_event_loop()
    first.run_until_complete(main())
    tasks = asyncio.all_tasks(first)
    first.close()

    asyncio.run(asyncio.wait_for(strategy.aclose(), 60))
    assert strategy.statistics().num_active == 0
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]


# ---- closed and open again -----------------------------------------------------------------------


@pytest.mark.asyncio
@each_kind
async def test_async_with_opens_a_closed_strategy_again(make: Any) -> None:
    strategy = make()
    with strategy.scope():
        weight = ar.Variable(1.0)

    for number in range(3):
        async with strategy:
            await strategy.run(total, (1.0,))
            await weight.assign_add(1.0)
            assert strategy.statistics().state == "open"
            assert set(strategy._runtime.device_names) <= set(lane_table().statistics())
        assert strategy.statistics().state == "closed"
        assert weight.value == number + 2.0
    assert not set(strategy._runtime.device_names) & set(lane_table().statistics())


@pytest.mark.asyncio
async def test_it_cannot_be_opened_while_it_closes() -> None:
    strategy, started, go = mirrored(2), asyncio.Event(), asyncio.Event()

    async def step() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            started.set()
            await go.wait()

    running = asyncio.ensure_future(strategy.run(step))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(strategy.aclose())
    await started.wait()

    with pytest.raises(ContextError, match="is being closed"):
        await strategy.__aenter__()
    go.set()
    await closing
    with pytest.raises(ContextError, match="was closed during step"):
        await running
    async with strategy:
        await strategy.run(total, (1.0,))


def test_closed_on_one_loop_and_opened_on_another() -> None:
    strategy = mirrored(2)

    async def main() -> Any:
        async with strategy:
            return await strategy.run(total, (1.0,))

    assert [asyncio.run(main()).values for _ in range(2)] == [(2.0, 2.0)] * 2


# ---- waits -------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_aclose_ends_every_wait() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        made = [ar.Variable([1.0, 2.0], name=name) for name in "abc"]
    waits = [asyncio.ensure_future(strategy.wait_for_version(v, 2)) for v in made]
    await asyncio.sleep(0)

    await strategy.aclose()

    for wait, name in zip(waits, "abc", strict=True):
        with pytest.raises(
            ContextError, match=rf"'{name}' has seen 0 writes, and the wait for 2 was ended"
        ):
            await asyncio.wait_for(wait, 60)
    assert "0 waiting" in repr(strategy._runtime.store)


# ---- the table of docs/guide.md ------------------------------------------------------------------

REFUSED: dict[str, Callable[[ar.Strategy, Any], Any]] = {
    "run": lambda s, v: s.run(total, (1.0,)),
    "run_steps": lambda s, v: s.run_steps(lambda ctx, x: None, iter([1.0]), 1),
    "reduce": lambda s, v: s.reduce("sum", ar.PerReplica([1, 2])),
    "gather": lambda s, v: s.gather(ar.PerReplica([np.ones(1)] * 2), 0),
    "check_in_sync": lambda s, v: s.check_in_sync([v]),
    "wait_for_version": lambda s, v: s.wait_for_version(v, 9),
    "extended.reduce_to": lambda s, v: s.extended.reduce_to("sum", ar.PerReplica([1, 2]), v),
    "extended.batch_reduce_to": lambda s, v: s.extended.batch_reduce_to(
        "sum", [(ar.PerReplica([1, 2]), v)]
    ),
    "extended.call_for_each_replica": lambda s, v: s.extended.call_for_each_replica(total, (1.0,)),
    "iterating over a dataset": lambda s, v: anext(aiter(s.distribute_dataset([np.ones(2)]))),
    "a view's reduce": lambda s, v: s._runtime.view_of((1,)).reduce("sum", ar.PerReplica([1])),
}

WORKS: dict[str, Callable[[ar.Strategy, Any], Any]] = {
    "scope": lambda s, v: s.scope().__enter__,
    "local_results": lambda s, v: s.local_results(v),
    "snapshot": lambda s, v: s.snapshot(v)[v],
    "wait_for_version of a version that was reached": lambda s, v: s.wait_for_version(v, 1),
    "distribute_dataset": lambda s, v: s.distribute_dataset([np.ones(2)]),
    "distribute_values_from_function": lambda s, v: s.distribute_values_from_function(repr),
    "extended.update": lambda s, v: s.extended.update(v, lambda w: w.assign_add(1.0)),
    "extended.update_non_slot": lambda s, v: s.extended.update_non_slot(
        s.extended.non_slot_devices([v]), lambda: 1
    ),
    "extended.broadcast_to": lambda s, v: s.extended.broadcast_to(1.0, v),
    "extended.read_var": lambda s, v: s.extended.read_var(v),
    "extended.value_container": lambda s, v: s.extended.value_container(v.value) is v,
    "extended.colocate_vars_with": lambda s, v: s.extended.colocate_vars_with(v),
    "extended.worker_devices": lambda s, v: s.extended.worker_devices,
    "variable.value": lambda s, v: v.value + 1,
    "variable.assign": lambda s, v: v.assign(5.0),
    "Variable in the scope": lambda s, v: ar.Variable(1.0).strategy is s,
    "trainable_variables": lambda s, v: s.trainable_variables,
    "statistics": lambda s, v: s.statistics(),
    "aclose": lambda s, v: s.aclose(),
    "deepcopy": lambda s, v: copy.deepcopy(s) == s,
    "pickle": lambda s, v: pickle.loads(pickle.dumps(s)) == s,
    "async with": lambda s, v: s.__aenter__(),
}


async def closed_with_a_variable() -> tuple[ar.Strategy, Any, Any]:
    strategy = mirrored(2)
    with strategy.scope():
        variable = ar.Variable(1.0)
    async with strategy:
        await variable.assign(2.0)
        snapshot = strategy.snapshot(variable)
    return strategy, variable, snapshot


@pytest.mark.asyncio
@pytest.mark.parametrize("what", REFUSED)
async def test_a_closed_strategy_refuses(what: str) -> None:
    strategy, variable, _ = await closed_with_a_variable()

    with pytest.raises(ContextError, match="closed"):
        await asyncio.wait_for(REFUSED[what](strategy, variable), 60)
    assert strategy.statistics().state == "closed"


@pytest.mark.asyncio
@pytest.mark.parametrize("what", WORKS)
async def test_a_closed_strategy_still(what: str) -> None:
    strategy, variable, snapshot = await closed_with_a_variable()

    with strategy.scope():
        result = WORKS[what](strategy, variable)
        if hasattr(result, "__await__"):
            result = await asyncio.wait_for(result, 60)

    assert result is not False
    assert snapshot[variable] == 2.0
    assert strategy.statistics().state == ("open" if what == "async with" else "closed")
    await strategy.aclose()


def test_the_guide_says_it_for_each_of_them() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text(encoding="utf-8")
    table = guide.partition("What a closed")[2].partition("The default strategy belongs")[0]

    for what in (*REFUSED, *WORKS):
        name = what.split(" of ")[0].split(" in ")[0].removeprefix("a view's ")
        words = {"variable.value": "reading", "variable.assign": "writing", "Variable": "variables"}
        assert words.get(name, name) in table.replace("pickling", "pickle"), what


@pytest.mark.parametrize("closes", [False, True], ids=["runs", "closes"])
def test_an_operation_whose_event_loop_ended_holds_up_nothing(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = strategies(2, 1)

    async def leave_one_waiting() -> None:
        await asyncio.gather(*(strategy.run(total, (1.0,)) for strategy in made))
        entered, workers = asyncio.Event(), made[0]._runtime.workers
        assert workers is not None
        before = workers.before
        monkeypatch.setattr(workers, "before", lambda: entered.set() or before())
        waiting = asyncio.create_task(made[0].run(total, (1.0,)))
        await entered.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    async def go_on() -> None:
        if not closes:
            with pytest.raises(WorkerLostError, match="its event loop ended"):
                await made[0].run(total, (1.0,))
        await made[0].aclose()  # LocalCommunicators are of one loop, which is gone

    asyncio.run(leave_one_waiting())
    asyncio.run(go_on())
