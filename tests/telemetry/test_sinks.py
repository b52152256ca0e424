"""Sinks: events in memory and in a log, and text that cannot control a terminal."""

import logging
from pathlib import Path

import pytest

import aioreplica as ar
from aioreplica.errors import CheckpointError
from aioreplica.telemetry import MemorySink, Observer, events_to, log_observer, printable

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]

EVIL = "loss\x1b[2J\r\nERROR forged\u2028\ud800"


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


async def test_memory_keeps_every_kind_in_order(solo: ar.Strategy) -> None:
    sink = MemorySink()
    solo.observers.add(sink.observer)

    def work() -> None: ...

    async def step() -> None:
        await me().run_on_device(work)
        me().record("loss", 0.5)
        await me().barrier()

    await solo.run(step)

    name = "test_memory_keeps_every_kind_in_order.<locals>"
    device = solo._runtime.device_names[0]
    found = [(e.kind, e.name, e.step, e.replica_id, e.value) for e in sink.events()]
    assert found[:3] == [
        ("replica", "begin", 0, 0, None),
        ("run", "begin", 0, None, f"{name}.step"),
        ("op", f"{name}.work", -1, 0, f"queued on {device}"),
    ]
    assert [e.value for e in sink.events("op")] == [
        f"{what} on {device}" for what in ("queued", "started", "ended")
    ]
    assert ("scalar", "loss", 0, 0, 0.5) in found
    assert found[-3:] == [
        ("merge", "barrier #1", 0, None, None),
        ("replica", "end", 0, 0, None),
        ("run", "end", 0, None, f"{name}.step"),
    ]
    sink.clear()
    assert sink.events() == ()


async def test_a_memory_sink_is_bounded_and_keeps_the_kinds_asked_for(solo: ar.Strategy) -> None:
    sink = MemorySink(capacity=2, kinds=["run_ended"])
    solo.observers.add(sink.observer)

    async def step() -> None: ...

    for _ in range(3):
        await solo.run(step)

    assert [event.step for event in sink.events()] == [1, 2]
    assert sink.observer.merge_ended is None
    assert repr(sink) == "<MemorySink | 2 of 2 events>"


async def test_saves_and_restores_are_told(tmp_path: Path) -> None:
    state = {"model": [ar.Variable(1.0)]}
    async with ar.CheckpointManager(tmp_path) as manager:
        sink = MemorySink()
        remove = manager.observers.add(sink.observer)
        await manager.save(4, state)
        await manager.restore(state)
        with pytest.raises(CheckpointError, match="no step 7"):
            await manager.restore(state, 7)
        remove()
        await manager.save(5, state)

    told = [(event.kind, event.name, event.step, event.value) for event in sink.events()]
    assert told[:2] == [("checkpoint", "save", 4, None), ("checkpoint", "restore", 4, None)]
    [(*failed, text)] = told[2:]
    assert failed == ["checkpoint", "restore", 7]
    assert isinstance(text, str)
    assert text.startswith("CheckpointError: There is no step 7")


async def test_unknown_kinds_and_no_capacity_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Unknown kind of event 'merge'\. Choose from replica_began"
    ):
        MemorySink(kinds=["merge"])
    with pytest.raises(ValueError, match="at least 1 event, got capacity=0"):
        MemorySink(capacity=0)


async def test_a_fault_is_a_warning_in_the_log_and_the_rest_is_not(
    solo: ar.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    solo.observers.add(log_observer(kinds=["run_began", "fault"]))

    async def step() -> None:
        raise KeyError("mine")

    with caplog.at_level(logging.DEBUG, "aioreplica.telemetry"), pytest.raises(KeyError):
        await solo.run(step)

    levels = [(record.levelname, record.getMessage().split(":")[0]) for record in caplog.records]
    assert levels == [("DEBUG", "step 0"), ("WARNING", "step 0")]
    assert caplog.records[-1].getMessage() == "step 0: fault KeyError KeyError: 'mine'"


async def test_a_name_cannot_forge_a_line_of_the_log(
    solo: ar.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    solo.observers.add(log_observer(level=logging.INFO, kinds=["event_added"]))

    async def step() -> None:
        me().record(EVIL, EVIL)

    with caplog.at_level(logging.INFO, "aioreplica.telemetry"):
        await solo.run(step)

    [record] = caplog.records
    text = record.getMessage()
    assert text.isprintable()
    assert text.startswith(r"step 0, replica 0: scalar loss\x1b[2J\r\nERROR forged\u2028\ud800 ")
    text.encode()


@pytest.mark.parametrize("text", ["", "plain", "grün 雪", "a b"])
async def test_printable_text_stays_as_it_is(text: str) -> None:
    assert printable(text) is text


async def test_errors_whose_text_fails_are_named_all_the_same(solo: ar.Strategy) -> None:
    class BadError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    sink = MemorySink(kinds=["fault", "replica_ended"])
    solo.observers.add(sink.observer)

    async def step() -> None:
        raise BadError

    with pytest.raises(BadError):
        await solo.run(step)
    assert [event.value for event in sink.events()] == ["BadError", "BadError"]


async def test_events_are_told_with_the_clock_they_are_given() -> None:
    times: list[float] = []
    observer = events_to(lambda event: times.append(event.time_s), now=lambda: 7.0)
    assert isinstance(observer, Observer)
    assert observer.write_published is not None

    observer.write_published(1)

    assert times == [7.0]
