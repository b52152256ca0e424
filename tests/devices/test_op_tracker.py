"""The ops of a run: which are running or unfinished, and who is told about them."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.devices import (
    CompletionQueue,
    Lane,
    Op,
    OpTracker,
    UnfinishedOp,
    lane_table,
)
from aioreplica.telemetry import ObservedOp, Observer, Observers, observe_everywhere

LIMIT_S = 60


def tracked(lane: Lane, fn: Callable[..., Any], *args: Any, run: OpTracker) -> Op[Any]:
    return Op(CompletionQueue.of_running_loop(), fn, args, {}, lane, run)


class OpLog:
    """What an observer was told about ops, and on which thread."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []
        self.threads: dict[str, str] = {}
        self.seconds: list[float] = []

    def observer(self) -> Observer:
        return Observer(
            op_queued=self._teller("queued"),
            op_started=self._teller("started"),
            op_ended=self._teller("ended"),
        )

    def _teller(self, kind: str) -> Callable[[ObservedOp, str], None]:
        def tell(op: ObservedOp, lane_name: str) -> None:
            self.told.append((kind, op.fn_name, lane_name))
            self.threads[kind] = threading.current_thread().name
            self.seconds.append(op.seconds)

        return tell


@pytest.mark.asyncio
async def test_an_observer_is_told_of_an_op_queued_started_and_ended(lane: Lane) -> None:
    observers, log = Observers(), OpLog()
    observers.add(log.observer())

    await tracked(lane, len, [], run=OpTracker(observers))

    assert log.told == [(kind, "len", "test:0") for kind in ("queued", "started", "ended")]
    assert log.threads["queued"] == threading.current_thread().name
    assert "test:0" in log.threads["started"]
    assert "test:0" in log.threads["ended"]
    assert log.seconds[:2] == [0.0, 0.0]
    assert log.seconds[2] > 0.0


@pytest.mark.asyncio
async def test_a_withdrawn_op_is_told_as_queued_only(lane: Lane, gated_op: Any) -> None:
    observers, log = Observers(), OpLog()
    run = OpTracker(observers)
    first = tracked(lane, gated_op, run=run)
    first.put()
    await gated_op.started.wait()
    observers.add(log.observer())
    second = tracked(lane, len, [], run=run)
    second.put()

    assert second.withdraw()
    gated_op.release()
    await first

    assert [kind for kind, name, _ in log.told if name == "len"] == ["queued"]


@pytest.mark.asyncio
async def test_ops_of_another_run_are_not_observed(lane: Lane) -> None:
    observers, log = Observers(), OpLog()
    observers.add(log.observer())

    await tracked(lane, len, [], run=OpTracker(Observers()))
    await tracked(lane, len, [], run=OpTracker())

    assert log.told == []


@pytest.mark.asyncio
async def test_ops_outside_every_run_reach_observers_of_everything(lane: Lane) -> None:
    log = OpLog()
    remove = observe_everywhere(log.observer())
    try:
        await Op(CompletionQueue.of_running_loop(), len, ([],), {}, lane)
    finally:
        remove()
    await Op(CompletionQueue.of_running_loop(), len, ([],), {}, lane)

    assert [kind for kind, _, _ in log.told] == ["queued", "started", "ended"]


# --- which ops run, which are unfinished -------------------------------------------------------


@pytest.mark.asyncio
async def test_an_op_that_runs_is_known_on_any_thread(pair: ar.MirroredStrategy) -> None:
    seen: dict[str, object] = {}

    async def step() -> None:
        ctx = ar.get_replica_context()
        if ctx.replica_id_in_sync_group == 0:
            return
        tracker = ctx._own.op_tracker

        def look(when: str) -> None:
            for replica_id in (0, 1):
                op = tracker.running(replica_id)
                seen[f"{when} {replica_id}"] = None if op is None else op.fn_name

        def work() -> None:
            thread = threading.Thread(target=look, args=("during",))  # has no context variables
            thread.start()
            thread.join(LIMIT_S)

        look("before")
        await ctx.run_on_device(work)
        look("after")

    await pair.run(step)

    name = f"{test_an_op_that_runs_is_known_on_any_thread.__qualname__}.<locals>.step.<locals>.work"
    assert seen == {
        "before 0": None, "before 1": None, "during 0": None, "during 1": name,
        "after 0": None, "after 1": None,
    }  # fmt: skip


@pytest.mark.asyncio
async def test_queued_and_withdrawn_ops_do_not_run(
    solo: ar.OneDeviceStrategy, gated_op: Any
) -> None:
    seen: list[object] = []

    async def step() -> None:
        ctx = ar.get_replica_context()
        lane_table().lane("cpu:0").put(Op(CompletionQueue.of_running_loop(), gated_op, (), {}))
        await gated_op.started.wait()
        first, second = ctx.run_on_device(len, []), ctx.run_on_device(len, [])
        both = asyncio.gather(first, second, return_exceptions=True)
        seen.append(ctx._own.op_tracker.running(0))
        second.cancel()
        seen.append(ctx._own.op_tracker.running(0))
        gated_op.release()
        await both

    await solo.run(step)

    assert seen == [None, None]


@pytest.mark.asyncio
async def test_unfinished_ops_name_function_device_task_and_line(
    pair: ar.MirroredStrategy, gated_op: Any
) -> None:
    found: list[tuple[UnfinishedOp, ...]] = []

    async def prefetch() -> None:
        ctx = ar.get_replica_context()
        await ctx.run_on_device(gated_op)  # the line that is named

    async def step() -> None:
        ctx = ar.get_replica_context()
        if ctx.replica_id_in_sync_group == 0:
            return
        child = asyncio.create_task(prefetch(), name="prefetch")
        made_of_an_op = asyncio.create_task(ctx.run_on_device(len, []), name="bare")
        await gated_op.started.wait()
        gathered = asyncio.gather(ctx.run_on_device(len, [1]))
        tracker = ctx._own.op_tracker
        found.append(tracker.unfinished(0))
        found.append(tracker.unfinished(1))
        gated_op.release()
        await asyncio.gather(child, made_of_an_op, gathered)
        found.append(tracker.unfinished(1))

    await pair.run(step)

    line = prefetch.__code__.co_firstlineno + 2
    none, some, after = found
    assert (none, after) == ((), ())
    by_task = {op.task_name: op for op in some}
    assert [op.fn_name for op in some] == ["GatedOp", "len", "len"]
    assert by_task["prefetch"] == UnfinishedOp(
        "GatedOp", "cpu:1", "prefetch", f"test_op_tracker.py:{line}", True
    )
    assert by_task["prefetch"].describe() == (
        f"GatedOp on cpu:1, awaited by task 'prefetch' at test_op_tracker.py:{line}"
    )
    assert by_task["bare"] == UnfinishedOp("len", "cpu:1", "bare", "-", False)
    assert by_task[None].describe() == "len on cpu:1"


@pytest.mark.asyncio
async def test_ops_put_after_the_run_are_refused(lane: Lane) -> None:
    run = OpTracker()
    run.close()

    with pytest.raises(ar.errors.ContextError, match="after the run"):
        await tracked(lane, len, [], run=run)
    assert lane.statistics().queued == 0


@pytest.mark.asyncio
async def test_draining_takes_queued_ops_back_and_waits_for_the_one_that_runs(
    lane: Lane, gated_op: Any
) -> None:
    run, calls = OpTracker(), []
    ops = [tracked(lane, gated_op, run=run), tracked(lane, calls.append, 1, run=run)]
    for op in ops:
        op.put()
    await gated_op.started.wait()

    drained = asyncio.create_task(run.drain(lambda _cancelled: None))
    await asyncio.sleep(0)
    assert (drained.done(), ops[1].cancelled()) == (False, True)
    gated_op.release()

    assert await drained
    assert (run.num_done, run.unfinished(0), calls) == (2, (), [])
