"""What a strategy says of itself: statistics, waits, stragglers, traces, who holds the loop."""

import asyncio
import errno
import itertools
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.strategies import _watching
from aioreplica.strategies._loop_watch import HoldFinder, RanOp, where_is
from tests.sequencer import Sequencer

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def work() -> None:
    """Be an op."""


# --- statistics -------------------------------------------------------------------------------


async def test_statistics_count_ops_skew_and_lag(pair: ar.MirroredStrategy) -> None:
    before = pair.statistics()
    order = Sequencer([1, 0])

    async def step() -> None:
        await me().run_on_device(work)
        await order.turn(me().replica_id_in_sync_group)
        await me().barrier()

    await pair.run(step)
    after = pair.statistics()

    assert [each.num_merges for each in before.skew] == [0, 0]
    assert (before.loop_lag_s, before.max_loop_lag_s) == (None, 0.0)
    assert [each.num_last for each in after.skew] == [1, 0]
    assert [after.lanes[name].queued for name in pair._runtime.device_names] == [0, 0]
    assert after.loop_lag_s is not None
    assert 0 < after.loop_lag_s <= after.max_loop_lag_s
    report = pair.straggler_report()
    assert report.startswith("Replica 0 (cpu:0) was late by ")
    assert "last in 1 of 1; most of it in barrier at " in report


async def test_without_devices_there_are_statistics_all_the_same() -> None:
    strategy = ar.DefaultStrategy()

    assert strategy.statistics().skew[0].num_merges == 0
    assert strategy.waiting() == ()
    assert strategy.straggler_report() == "No merge of several replicas is recorded."


# --- who waits for whom -----------------------------------------------------------------------


async def test_waits_name_the_replica_the_collective_and_the_missing_ones(
    triple: ar.MirroredStrategy,
) -> None:
    order, started = Sequencer([0, 1, 2]), asyncio.Event()
    seen: list[Any] = []

    async def step() -> None:
        ctx, mine = me(), me().replica_id_in_sync_group
        await order.turn(mine)
        if mine == 1:
            handle = ctx.start_all_reduce("sum", 1.0)
            child = asyncio.create_task(ctx.barrier())
            await asyncio.sleep(0)
            started.set()
            await child
            await handle
        elif mine == 0:
            handle = ctx.start_all_reduce("sum", 1.0)
            await handle
            await ctx.barrier()
        else:
            await started.wait()
            seen.extend(triple.waiting())
            await ctx.start_all_reduce("sum", 1.0)
            await ctx.barrier()

    await triple.run(step)

    found = [(w.step, w.replica_id, w.device, w.what, w.waits_for) for w in seen]
    assert found == [
        (0, 0, triple._runtime.device_names[0], "start_all_reduce #1 (SUM)", (2,)),
        (0, 1, triple._runtime.device_names[1], "barrier #2", (0, 2)),
    ]
    assert all(re.search(r"test_watching\.py:\d+$", wait.where) for wait in seen)
    assert triple.waiting() == ()


async def test_waits_name_ops_and_the_waits_of_device_loops(solo: ar.OneDeviceStrategy) -> None:
    begun, go, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def block() -> None:
        loop.call_soon_threadsafe(begun.set)
        go.wait(60)

    async def step() -> None:
        await asyncio.gather(me().run_on_device(block), me().run_on_device(work))

    async def look() -> list[str]:
        await begun.wait()
        seen = [wait.what.rpartition(".")[2] for wait in solo.waiting()]
        go.set()
        return seen

    _, seen = await asyncio.gather(solo.run(step), look())

    device = solo._runtime.device_names[0]
    assert seen == [f"block, which runs on {device}", f"work, which is queued on {device}"]


async def test_threads_of_plain_steps_are_listed_too(pair: ar.MirroredStrategy) -> None:
    seen: list[Any] = []

    def step() -> None:
        ctx = me()
        if ctx.replica_id_in_sync_group == 1:
            while not pair.waiting():  # replica 0's thread is on its way
                os.sched_yield()
            seen.extend(pair.waiting())
        ctx.blocking.barrier()

    await pair.run(step)

    assert [(wait.replica_id, wait.what, wait.waits_for) for wait in seen] == [
        (0, "barrier #1", (1,))
    ]


# --- traces -----------------------------------------------------------------------------------


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def meet() -> None:
    await me().barrier()


async def test_a_trace_is_written_when_the_block_is_left(
    pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    async with pair.trace(path) as tracing:
        await pair.run(meet)
        await tracing.save()
        early = path.read_bytes()
        await pair.run(meet)
    late = path.read_bytes()
    await pair.run(meet)

    assert b"step 0" in early
    assert b"step 1" not in early
    assert b"step 1" in late
    assert path.read_bytes() == late
    assert pair.observers.run_began is None
    assert names_in(tmp_path) == [path.name]


async def test_two_saves_at_once_do_not_mix(
    pair: ar.MirroredStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aioreplica.telemetry import _trace

    path, both_there = tmp_path / "run.json", threading.Barrier(2)
    chrome_json = _trace.chrome_json

    def held(*args: Any) -> Iterator[bytes]:
        first, *rest = chrome_json(*args)
        yield first
        both_there.wait(10)
        yield from rest

    async with pair.trace(path) as tracing:
        await pair.run(meet)
        with monkeypatch.context() as patch:
            patch.setattr(_trace, "chrome_json", held)
            await asyncio.gather(tracing.save(), tracing.save())
        saved = path.read_text()

    assert "step 0" in str(json.loads(saved))
    assert names_in(tmp_path) == [path.name]


async def test_a_trace_of_a_failed_block_is_written_and_the_error_stays(
    pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    failure = KeyError("mine")

    async def step() -> None:
        raise failure

    with pytest.raises(KeyError) as raised:
        async with pair.trace(tmp_path / "run.json"):
            await pair.run(step)

    assert raised.value is failure
    assert b"fault" in (tmp_path / "run.json").read_bytes()


async def test_a_bad_path_is_refused_before_anything_is_traced(
    pair: ar.MirroredStrategy, tmp_path: Path
) -> None:
    for name in ("run.txt", "run.pftrace"):
        with pytest.raises(ValueError, match=rf"ends in \.json, .*, got '{name}'"):
            pair.trace(name)
    with pytest.raises(FileNotFoundError, match="Make it first"):
        pair.trace(tmp_path / "missing" / "run.json")
    with pytest.raises(ValueError, match="capacity=0"):
        pair.trace(tmp_path / "run.json", capacity=0)
    assert pair.observers.run_began is None


class FullDisk:
    """A file that takes ten bytes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def write(self, piece: bytes) -> None:
        self._file.write(piece[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    really_open = Path.open

    def open_full(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if self.name.endswith(".part") and threading.current_thread() is threading.main_thread():
            raise AssertionError("written on the event loop")
        if self.name.endswith(".part"):
            monkeypatch.setattr(Path, "open", really_open)
            try:
                return FullDisk(self)
            finally:
                monkeypatch.setattr(Path, "open", open_full)
        return really_open(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_full)
    yield
    monkeypatch.setattr(Path, "open", really_open)


@pytest.mark.usefixtures("full_disk")
async def test_a_full_disk_is_a_warning_and_the_old_trace_stays(
    pair: ar.MirroredStrategy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")

    with caplog.at_level(logging.WARNING, "aioreplica.telemetry"):
        async with pair.trace(path) as tracing:
            await pair.run(meet)
            with pytest.raises(OSError, match="No space left"):
                await tracing.save()

    assert "was not written: [Errno 28] No space left" in caplog.records[-1].getMessage()
    assert path.read_text() == "old"
    assert names_in(tmp_path) == ["run.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
async def test_a_disk_that_is_really_full(
    pair: ar.MirroredStrategy,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "run.json"
    monkeypatch.setattr(_watching, "NUMBERS", itertools.count(7))
    (tmp_path / f"run.json.{os.getpid()}.7.part").symlink_to("/dev/full")

    with caplog.at_level(logging.WARNING, "aioreplica.telemetry"):
        async with pair.trace(path):
            await pair.run(meet)

    assert "No space left" in caplog.records[-1].getMessage()
    assert names_in(tmp_path) == []


# --- who holds the loop -----------------------------------------------------------------------


def ran(what: str, begin_s: float, end_s: float = float("inf")) -> RanOp:
    return RanOp(what, begin_s, end_s)


@pytest.mark.parametrize(
    ("ops", "on_loop", "named"),
    [
        ([ran("op a on cpu:0", 0.0)], "", "op a on cpu:0"),
        ([ran("op a on cpu:0", 0.5, 1.0)], "", "op a on cpu:0"),
        ([ran("op a on cpu:0", 0.9)], "f at x.py:1", "f at x.py:1"),
        ([ran("op a on cpu:0", 0.0, 0.1), ran("op b on cpu:1", 0.0)], "g", "op b on cpu:1"),
        (
            [ran("op a on cpu:0", 0.0), ran("op b on cpu:1", 0.0)],
            "",
            "op a on cpu:0 or op b on cpu:1",
        ),
        ([], "", None),
    ],
    ids=["runs", "ended", "too short", "one of two", "two", "nothing ran"],
)
async def test_the_watch_names_the_thread_that_held_the_gil(
    ops: list[RanOp], on_loop: str, named: str | None
) -> None:
    finder = HoldFinder(0.1)

    text = finder.gil(0.475, 1.0, 0.5, 0.4, ops, on_loop)

    if named is None:
        assert text is None
    else:
        assert text is not None
        assert text.startswith(f"The GIL was held for 0.5 s by {named}: ")
    assert finder.gil(0.475, 0.55, 0.05, 0.05, ops, on_loop) is None


async def test_a_process_that_got_no_time_is_not_blamed_for_computing() -> None:
    finder = HoldFinder(0.1)

    text = finder.gil(0.475, 1.0, 0.5, 0.01, [ran("op a on cpu:0", 0.0)], "f at x.py:1")

    assert text == (
        "Nothing of the process ran for 0.5 s, during op a on cpu:0: that held the GIL without "
        "computing, or the machine was busy."
    )
    assert finder.gil(0.475, 1.0, 0.5, 0.01, [], "f at x.py:1") is None


async def test_a_blocked_loop_is_reported_once_when_it_is_over() -> None:
    finder = HoldFinder(0.1)

    assert finder.loop(1.0, 1.05, is_answered=False, on_loop="f") is None
    assert finder.loop(1.0, 1.05, is_answered=True, on_loop="") is None
    assert finder.loop(2.0, 2.2, is_answered=False, on_loop="f at x.py:1") is None
    assert finder.loop(2.0, 2.4, is_answered=False, on_loop="g at x.py:2") is None
    text = finder.loop(2.0, 2.5, is_answered=True, on_loop="")
    assert text is not None
    assert text.startswith("The event loop was held for 0.5 s by f at x.py:1. Await it, or ")
    assert finder.loop(3.0, 3.01, is_answered=True, on_loop="") is None


async def test_a_thread_is_where_its_innermost_frame_is() -> None:
    assert where_is(None) == ""
    here = where_is(sys._getframe())
    assert re.fullmatch(r"test_a_thread_is_.*_is at .*test_watching\.py:\d+", here)


@pytest.mark.slow
async def test_the_code_that_holds_the_loop_is_named_in_the_log(
    solo: ar.OneDeviceStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    async def hold_the_loop() -> None:
        while "The event loop was held for " not in caplog.text:
            for _ in range(12):
                threading.Event().wait(0.02)  # blocks the loop, and lets go of the GIL
            await asyncio.sleep(0.02)  # the watch sees that it is over

    with caplog.at_level(logging.WARNING, "aioreplica.telemetry"):
        async with solo.watch_loop(threshold_s=0.04) as watch:
            await asyncio.wait_for(hold_the_loop(), 120)
            with pytest.raises(RuntimeError, match="This watch is running"):
                await watch.__aenter__()

    assert "threading.py" in caplog.text  # where the thread stood
    assert not [t for t in threading.enumerate() if "loop watch" in t.name and not t.daemon]


@pytest.mark.slow
async def test_an_op_that_keeps_the_gil_is_named_in_the_log(
    solo: ar.OneDeviceStrategy, caplog: pytest.LogCaptureFixture
) -> None:
    def keep_the_gil() -> int:
        return sum(range(20_000_000))  # one call into C, which does not let go

    async def step() -> None:
        while "keep_the_gil" not in caplog.text:
            await me().run_on_device(keep_the_gil)

    with caplog.at_level(logging.WARNING, "aioreplica.telemetry"):
        async with solo.watch_loop(threshold_s=0.05):
            await asyncio.wait_for(solo.run(step), 120)

    assert re.search(
        r"for .* s(?: by|, during) op .*keep_the_gil of replica 0 on cpu:0", caplog.text
    )


@pytest.mark.parametrize("threshold_s", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_threshold_must_be_positive(solo: ar.OneDeviceStrategy, threshold_s: float) -> None:
    with pytest.raises(ValueError, match="threshold_s must be a positive number"):
        solo.watch_loop(threshold_s=threshold_s)
