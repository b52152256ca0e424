"""Traces: what they keep, how it is drawn, and the file read back by other code."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.telemetry._trace import TraceRecorder, chrome_json
from tests.sequencer import Sequencer
from tests.telemetry.timelines import read_chrome

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def work() -> None:
    """Be an op."""


async def traced(strategy: ar.Strategy, step: Any, **options: Any) -> TraceRecorder:
    trace = TraceRecorder(strategy._runtime.device_names, **options)
    remove = strategy.observers.add(trace.observer)
    await strategy.run(step)
    remove()
    return trace


async def test_a_track_for_steps_each_replica_and_each_device(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        await me().run_on_device(work)
        await me().all_reduce("sum", 1.0)

    timeline = (await traced(pair, step, worker_id=3)).timeline()

    first, second = pair._runtime.device_names
    assert timeline.worker == "worker 3"
    assert list(timeline.tracks) == [
        "steps", f"replica 0 ({first})", f"replica 1 ({second})", first, second,
    ]  # fmt: skip
    names = Counter((each.track, each.name, each.category) for each in timeline.slices)
    run = f"{test_a_track_for_steps_each_replica_and_each_device.__name__}.<locals>.step"
    expected = [("steps", run, "run")]
    for replica_id, device in enumerate(pair._runtime.device_names):
        track = f"replica {replica_id} ({device})"
        expected += [
            (track, "step 0", "step"),
            (track, "work", "await"),
            (track, "all_reduce (SUM)", "collective"),
            (device, "work", "op"),
        ]
    assert names == Counter(expected)


async def test_flows_follow_the_arrivals_and_lead_from_replica_to_device(
    triple: ar.MirroredStrategy,
) -> None:
    order = Sequencer([2, 0, 1])

    async def step() -> None:
        await order.turn(me().replica_id_in_sync_group)
        await me().barrier()
        await me().run_on_device(work)

    timeline = (await traced(triple, step)).timeline()

    flows = defaultdict(list)
    for each in timeline.slices:
        for flow in each.flows:
            flows[flow].append((each.category, each.track.split(" (")[0]))
    assert sorted(map(tuple, flows.values())) == sorted(
        [
            (("collective", "replica 2"), ("collective", "replica 0"), ("collective", "replica 1")),
            *(
                (("await", f"replica {i}"), ("op", device))
                for i, device in enumerate(triple._runtime.device_names)
            ),
        ]
    )


async def test_slices_of_a_track_are_nested_and_others_get_a_track_more(
    pair: ar.MirroredStrategy,
) -> None:
    order = Sequencer([0, 1])

    async def step() -> None:
        ctx = me()
        first = ctx.start_all_reduce("sum", 1.0)
        await order.turn(ctx.replica_id_in_sync_group)
        second = ctx.start_all_reduce("sum", 2.0)
        await first
        await second

    timeline = (await traced(pair, step)).timeline()

    assert any(track.endswith(" +1") for track in timeline.tracks)
    require_nested(timeline.slices)


def require_nested(slices: Any) -> None:
    open_slices: dict[str, list[Any]] = defaultdict(list)
    for each in slices:
        stack = open_slices[each.track]
        while stack and stack[-1].end_ns <= each.begin_ns:
            stack.pop()
        assert each.begin_ns <= each.end_ns
        assert not stack or each.end_ns <= stack[-1].end_ns, (each, stack[-1])
        stack.append(each)


async def test_writes_scalars_texts_and_faults_are_marked(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        total = ar.Variable(0.0, aggregation="sum")

    async def step() -> None:
        await total.assign_add(1.0)
        me().record("loss", 0.25)
        me().record("note", "half way")
        raise KeyError("mine")

    trace = TraceRecorder(pair._runtime.device_names)
    pair.observers.add(trace.observer)
    with pytest.raises(KeyError):
        await pair.run(step)
    timeline = trace.timeline()

    assert [(each.name, each.value) for each in timeline.samples] == [("loss", 0.25)]
    marks = [
        (each.name, each.args.get("value", each.args.get("error"))) for each in timeline.instants
    ]
    assert marks == [("write 1", None), ("scalar note", "half way"), ("fault", "KeyError: 'mine'")]
    errors = [each.args.get("error") for each in timeline.slices if each.category == "step"]
    assert "KeyError: 'mine'" in errors


async def test_memory_is_bounded(solo: ar.OneDeviceStrategy) -> None:
    async def step() -> None:
        for _ in range(50):
            await me().barrier()

    trace = await traced(solo, step, capacity=10)

    assert len(trace) == 10
    assert [
        each.args["number"] for each in trace.timeline().slices if each.category == "collective"
    ] == [*range(43, 51)]
    trace.clear()
    assert len(trace) == 0
    with pytest.raises(ValueError, match="at least 1 happening, got capacity=0"):
        TraceRecorder(("cpu:0",), capacity=0)


async def test_ops_that_are_withdrawn_leave_nothing_behind(solo: ar.OneDeviceStrategy) -> None:
    trace = TraceRecorder(solo._runtime.device_names)
    solo.observers.add(trace.observer)
    assert trace.observer.op_queued is not None

    class Withdrawn:
        pass

    for _ in range(10_000):
        trace.observer.op_queued(Withdrawn(), "cpu:0")  # type: ignore[arg-type]

    assert len(trace._queued) <= 4096


# --- files ------------------------------------------------------------------------------------


async def busy_trace(strategy: ar.MirroredStrategy) -> TraceRecorder:
    order = Sequencer([1, 0])

    async def step() -> None:
        ctx = me()
        await ctx.run_on_device(work)
        handle = ctx.start_all_reduce("sum", 1.0)
        await order.turn(ctx.replica_id_in_sync_group)
        await ctx.barrier()
        await handle
        ctx.record("loss\x1b\ud800", -0.5)
        ctx.record("note", "ünï\ud800")

    return await traced(strategy, step)


async def test_the_file_holds_the_same_as_the_time_line(
    pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    timeline = (await busy_trace(pair)).timeline()
    (tmp_path / "run.json").write_bytes(b"".join(chrome_json(timeline)))

    chrome = read_chrome(tmp_path / "run.json")

    expected = sorted(
        (each.track, each.name, each.category, each.begin_ns, each.end_ns, each.flows)
        for each in timeline.slices
    )
    assert [each[:3] for each in sorted(chrome.slices)] == [each[:3] for each in expected]
    for ours, theirs in zip(sorted(chrome.slices), expected, strict=True):
        assert ours[3] == pytest.approx(theirs[3], abs=500)  # a float holds half a microsecond
        assert ours[5] == theirs[5]
    assert list(chrome.tracks) == list(timeline.tracks)
    assert chrome.process == ("worker 0", timeline.pid)
    assert chrome.samples[0][1:] == (-0.5,)
    assert len(chrome.instants) == len(timeline.instants)


async def test_numbers_that_json_does_not_have_are_marks(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        for value in (0.5, float("nan"), float("inf"), float("-inf")):
            me().record("loss", value)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    text = b"".join(chrome_json((await traced(pair, step)).timeline()))
    events = json.loads(text, parse_constant=refuse)["traceEvents"]

    assert {event["args"]["value"] for event in events if event["ph"] == "C"} == {0.5}
    marks = [event["args"]["value"] for event in events if event["name"] == "scalar loss"]
    assert set(marks) == {"nan", "inf", "-inf"}


async def test_chrome_events_obey_the_schema(pair: ar.MirroredStrategy) -> None:
    text = b"".join(chrome_json((await busy_trace(pair)).timeline())).decode()
    events = json.loads(text)["traceEvents"]

    def of(phase: str) -> Iterator[dict[str, Any]]:
        return (event for event in events if event["ph"] == phase)

    assert {event["ph"] for event in events} == {"M", "X", "s", "f", "i", "C"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["name"], str)
        assert event["ph"] == "M" or event["ts"] > 0
    assert all(event["dur"] >= 0 and isinstance(event["tid"], int) for event in of("X"))
    assert all(event["s"] == "t" for event in of("i"))
    assert all(isinstance(event["args"]["value"], float) for event in of("C"))
    begins, ends = ({event["id"] for event in of(phase)} for phase in ("s", "f"))
    assert begins == ends != set()
    assert all(event["bp"] == "e" for event in of("f"))


async def test_an_empty_trace_is_a_file_too(tmp_path: Path) -> None:
    timeline = TraceRecorder(("cpu:0",)).timeline()
    (tmp_path / "run.json").write_bytes(b"".join(chrome_json(timeline)))

    read = read_chrome(tmp_path / "run.json")
    assert read.slices == []
    assert read.tracks == ["steps", "replica 0 (cpu:0)"]
