"""Observers: every kind of event, told where it happens, and nothing of observers that fail."""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aioreplica as ar
from aioreplica.errors import ContextError
from aioreplica.telemetry import (
    KINDS,
    Event,
    ObservedCheckpoint,
    Observer,
    Observers,
    observe_everywhere,
)

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


@pytest_asyncio.fixture
async def one() -> AsyncIterator[ar.Strategy]:
    async with ar.OneDeviceStrategy("cpu:0") as strategy:
        yield strategy


class Log:
    """Writes down what it is told, one line per event."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        say = self.lines.append
        self.observer = Observer(
            run_began=lambda run: say(f"run {run.step} began with {len(run.works)}"),
            run_ended=lambda run: say(f"run {run.step} ended"),
            call_made=lambda call: say(f"{call.replica_id} calls {call.describe()}"),
            wait_began=lambda wait: say(f"waits in {wait.describe()} for {wait.missing_members()}"),
            wait_ended=lambda wait: say(f"waited in {wait.describe()}"),
            merge_began=lambda merge: say(f"merge {merge.describe()} of {merge.members}"),
            merge_ended=lambda merge, error: say(f"merged {merge.sequence}: {error!r}"),
            op_queued=lambda op, lane: say(f"{op.fn_name} queued on {lane}"),
            op_started=lambda op, lane: say(f"{op.fn_name} started on {lane}"),
            op_ended=lambda op, lane: say(f"{op.fn_name} ended on {lane}"),
            write_published=lambda number: say(f"write {number}"),
            fault=lambda step, error: say(f"fault in {step}: {type(error).__name__}"),
        )


async def test_a_collective_of_two_replicas(pair: ar.MirroredStrategy) -> None:
    log = Log()
    remove = pair.observers.add(log.observer)

    async def step() -> None:
        await me().barrier()

    await pair.run(step)
    remove()
    await pair.run(step)

    assert log.lines == [
        "run 0 began with 2",
        "0 calls barrier #1",
        "waits in barrier #1 for (1,)",
        "1 calls barrier #1",
        "merge barrier #1 of (0, 1)",
        "merged 1: None",
        "waited in barrier #1",
        "run 0 ended",
    ]


async def test_a_merge_that_fails_is_a_fault(pair: ar.MirroredStrategy) -> None:
    log = Log()
    pair.observers.add(log.observer)

    def fail(_strategy: ar.Strategy) -> None:
        raise KeyError("mine")

    async def step() -> None:
        await me().merge_call(fail)

    with pytest.raises(KeyError):
        await pair.run(step)

    assert "merged 1: KeyError('mine')" in log.lines
    assert log.lines[-2:] == ["fault in 0: KeyError", "run 0 ended"]


async def test_ops_and_writes(one: ar.Strategy) -> None:
    log = Log()
    one.observers.add(log.observer)
    with one.scope():
        total = ar.Variable(0.0, aggregation="sum")

    def work() -> int:
        return 3

    async def step() -> None:
        await me().run_on_device(work)
        await total.assign(1.0)

    await one.run(step)

    name = "test_ops_and_writes.<locals>.work"
    lane = str(one.extended.worker_devices[0])
    ops = [line for line in log.lines if name in line]
    assert ops == [f"{name} {what} on {lane}" for what in ("queued", "started", "ended")]
    assert "write 1" in log.lines


async def test_calls_are_told_wherever_they_are_made(one: ar.Strategy) -> None:
    """Awaited, started, in a group, from a device thread, from an op."""
    log = Log()
    one.observers.add(log.observer)

    async def step() -> None:
        ctx = me()
        await ctx.start_all_reduce("sum", 1)
        await ctx.group([0]).barrier()
        await ctx.run_on_device(lambda: ctx.blocking.barrier())

    def plain() -> None:
        me().blocking.barrier()

    await one.run(step)
    await one.run(plain)

    calls = [line for line in log.lines if line.startswith("0 calls")]
    assert calls == [
        "0 calls start_all_reduce #1 (SUM)",
        "0 calls barrier #2",
        "0 calls barrier #3",
        "0 calls barrier #1",
    ]


async def test_a_wait_in_a_host_call_shows_its_task(one: ar.Strategy) -> None:
    seen: list[Any] = []
    one.observers.add(Observer(wait_ended=lambda wait: seen.append(wait.awaited())))

    async def outside() -> int:
        await asyncio.sleep(0)
        return 7

    def step(_ctx: ar.MultiStepContext) -> None:
        assert ar.outside_compilation(outside) == 7

    await one.run_steps(lambda ctx, _x: step(ctx), [np.ones(1)], 1)

    assert [task for task in seen if isinstance(task, asyncio.Task)]


async def test_an_observer_of_all_strategies(one: ar.Strategy, pair: ar.MirroredStrategy) -> None:
    log = Log()
    remove = observe_everywhere(log.observer)
    try:

        async def step() -> None: ...

        await one.run(step)
        async with ar.MirroredStrategy(["cpu:0"]) as later:
            await later.run(step)
        assert log.lines.count("run 0 ended") == 2
    finally:
        remove()
    await pair.run(step)
    assert log.lines.count("run 0 ended") == 2


async def test_managers_are_observed_everywhere_and_by_none_that_fails(tmp_path: Path) -> None:
    seen: list[ObservedCheckpoint] = []

    def fail(_done: object) -> None:
        raise ValueError("a bad observer")

    state = {"model": [ar.Variable(1.0)]}
    async with ar.CheckpointManager(tmp_path) as manager:
        remove = observe_everywhere(Observer(checkpoint_ended=seen.append))
        try:
            manager.observers.add(Observer(checkpoint_ended=fail))
            await manager.save(1, state)
            await manager.restore(state)
        finally:
            remove()
        await manager.save(2, state)

    assert [(done.kind, done.step, done.error) for done in seen] == [
        ("save", 1, None),
        ("restore", 1, None),
    ]
    assert seen[0].num_bytes > 0 == seen[1].num_bytes
    assert seen[0].began_s + seen[0].seconds <= seen[1].began_s


async def test_an_observer_that_fails_is_dropped_and_does_no_harm(
    pair: ar.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_call: object) -> None:
        raise ValueError("a bad observer")

    seen: list[int] = []
    pair.observers.add(Observer(call_made=fail, write_published=lambda _number: None))
    pair.observers.add(Observer(call_made=lambda call: seen.append(call.replica_id)))

    async def step() -> int:
        total: int = await me().all_reduce("sum", 1)
        return total

    with caplog.at_level(logging.WARNING, "aioreplica.telemetry"):
        assert (await pair.run(step)).values == (2, 2)

    [record] = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1].args == ("a bad observer",)
    assert "when it was told of call_made" in record.getMessage()
    assert seen == [0, 1]
    assert pair.observers.write_published is None


async def test_an_observer_that_fails_is_dropped_wherever_it_was_added(
    one: ar.Strategy, pair: ar.MirroredStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_run: object) -> None:
        raise ValueError("a bad observer")

    async def step() -> None: ...

    local, seen = Observer(run_ended=fail), list[object]()
    pair.observers.add(local)
    one.observers.add(local)
    remove = observe_everywhere(Observer(run_began=fail))
    stop = observe_everywhere(Observer(run_began=seen.append))
    try:
        with caplog.at_level(logging.WARNING, "aioreplica.telemetry"):
            await pair.run(step)
            async with ar.OneDeviceStrategy("cpu:0") as later:
                await later.run(step)
            assert len(caplog.records) == 2, "one for each observer"
            await one.run(step)  # whose own observer has not failed yet
            assert len(caplog.records) == 3
        assert len(seen) == 3
    finally:
        remove()
        stop()


async def test_a_replica_begins_with_what_an_observer_sets_and_ends_with_its_error(
    pair: ar.MirroredStrategy,
) -> None:
    name: ContextVar[str] = ContextVar("name")
    log: list[tuple[object, ...]] = []
    pair.observers.add(
        Observer(
            replica_began=lambda run, replica_id, context: context.run(
                name.set, f"{run.fn_name} {replica_id}"
            ),
            replica_ended=lambda run, replica_id, error: log.append((run.step, replica_id, error)),
        )
    )

    async def step() -> str:
        return await me().run_on_device(name.get)

    def plain() -> str:
        return name.get()

    mine = f"{test_a_replica_begins_with_what_an_observer_sets_and_ends_with_its_error.__name__}"
    assert (await pair.run(step)).values == tuple(f"{mine}.<locals>.step {i}" for i in (0, 1))
    assert (await pair.run(plain)).values == tuple(f"{mine}.<locals>.plain {i}" for i in (0, 1))
    assert name.get("unset") == "unset"
    failure = ValueError("mine")

    async def fail() -> None:
        if me().replica_id_in_sync_group == 1:
            raise failure

    with pytest.raises(ValueError, match="mine"):
        await pair.run(fail)
    assert sorted(log[:4]) == [(0, 0, None), (0, 1, None), (1, 0, None), (1, 1, None)]
    assert log[4:] == [(2, 0, None), (2, 1, failure)]


async def test_events_are_told_as_they_are_added(pair: ar.MirroredStrategy) -> None:
    seen: list[Event] = []
    pair.observers.add(Observer(event_added=seen.append))

    async def step() -> None:
        me().record("loss", np.float32(0.5))
        await me().run_on_device(lambda: me().record("note", "in an op"))

    await pair.run(step)

    assert [event[1:] for event in seen] == [
        ("scalar", "loss", 0, 0, 0.5),
        ("scalar", "note", 0, 0, "in an op"),
    ]
    assert pair.events.events() == tuple(seen)


async def test_recording_after_the_run_or_no_number_is_refused(pair: ar.MirroredStrategy) -> None:
    async def step() -> ar.ReplicaContext:
        if me().replica_id_in_sync_group == 0:
            with pytest.raises(TypeError, match=r"Event 'loss' takes a number or a text, got \[1"):
                me().record("loss", [1, 2])  # type: ignore[arg-type]
        return me()

    left = (await pair.run(step)).values[0]
    with pytest.raises(ContextError, match="record was called"):
        left.record("loss", 1.0)
    assert pair.events.events() == ()


async def test_kinds_without_an_observer_have_no_callback() -> None:
    observers = Observers()
    assert [kind for kind in KINDS if getattr(observers, kind) is not None] == []

    seen: list[int] = []
    observer = Observer(write_published=seen.append)
    observers.add(observer)
    assert [kind for kind in KINDS if getattr(observers, kind) is not None] == ["write_published"]
    assert repr(observers) == "<Observers | 1 want write_published>"
    observers.remove(observer)
    observers.remove(observer)
    assert observers.write_published is None


async def test_observing_everywhere_keeps_no_strategy_alive() -> None:
    remove = observe_everywhere(Observer(write_published=lambda _number: None))
    strategy = ar.MirroredStrategy(["cpu:0"])
    observers = strategy.observers
    del strategy
    gc.collect()
    assert observers.write_published is not None
    remove()
    assert observers.write_published is None
