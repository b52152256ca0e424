"""The ring recorder: the newest merges, as strings and numbers."""

import asyncio
import sys
import weakref
from time import monotonic
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import MergeMismatchError, StallError
from aioreplica.telemetry import CollectiveRecord, MergeRecord, Recorder, source_line
from tests.sequencer import idle


def record_here(recorder: Recorder, sequence: int) -> int:
    """Record a merge called by the caller of this function; return its line."""
    frame = sys._getframe(1)
    recorder.record(
        monotonic(),
        3,
        sequence,
        "barrier",
        "",
        (0,),
        (0, 1, 2, 3),
        [(frame.f_code, frame.f_lasti, at) for at in (0.5, 0.25, 0.75, 1.0)],
    )
    return frame.f_lineno


def recorded(capacity: int, count: int) -> list[int]:
    recorder = Recorder(capacity)
    for sequence in range(count):
        record_here(recorder, sequence)
    return [record.sequence for record in recorder.records()]


@pytest.mark.parametrize("capacity", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 12])
def test_the_newest_records_are_kept_oldest_first(capacity: int, count: int) -> None:
    assert recorded(capacity, count) == list(range(count))[-capacity:]


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_recorder_keeps_at_least_one(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity={capacity}"):
        Recorder(capacity)


def test_a_record_names_the_collective_its_times_and_its_lines() -> None:
    recorder = Recorder()
    before = monotonic()

    line = record_here(recorder, 2)

    [record] = recorder.records()
    assert isinstance(record, MergeRecord)
    assert before <= record.time_s <= monotonic()
    assert record[1:7] == (3, 2, "barrier", __file__, line, 4)
    assert record[7:] == ("", (0,), (0, 1, 2, 3), (0.5, 0.25, 0.75, 1.0), ())
    assert (record.step, record.sequence, record.num_replicas) == (3, 2, 4)


def test_a_call_over_several_lines_is_at_its_first_one_every_time() -> None:
    recorder = Recorder()
    lines = [
        record_here(
            recorder,
            sequence,
        )
        for sequence in range(3)
    ]

    assert [record.line for record in recorder.records()] == lines
    assert len(set(lines)) == 1


def test_lines_are_those_that_python_reports() -> None:
    frame = sys._getframe()
    first = source_line(frame.f_code, frame.f_lasti), frame.f_lineno
    second = source_line(frame.f_code, frame.f_lasti), frame.f_lineno

    assert first[0] == first[1]
    assert second == (first[0] + 1, first[1] + 1)


def test_an_instruction_without_a_line_is_at_the_start_of_its_function() -> None:
    code = test_lines_are_those_that_python_reports.__code__

    assert source_line(code, 10**9) == code.co_firstlineno


def test_code_that_is_made_anew_again_and_again_has_its_own_lines() -> None:
    recorder, code = Recorder(capacity=1), compile("0", "made.py", "eval")

    for line in range(1, 10_000):
        made = code.replace(co_firstlineno=line)
        recorder.record(0.0, 0, line, "barrier", "", (0,), (0,), [(made, 0, 0.0)])
        assert recorder.records()[0].line == source_line(made, 0)


def test_records_are_a_snapshot() -> None:
    recorder = Recorder()
    record_here(recorder, 1)
    records = recorder.records()

    record_here(recorder, 2)

    assert len(records) == 1
    assert len(recorder.records()) == 2


def test_repr_shows_how_full_it_is() -> None:
    recorder = Recorder(capacity=3)
    record_here(recorder, 1)

    assert repr(recorder) == "<Recorder | 1 of 3 records>"


@pytest.mark.asyncio
async def test_a_strategy_records_one_entry_per_merge(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        context = ar.get_replica_context()
        await context.all_reduce("sum", 1.0)
        await context.barrier()

    await pair.run(step)
    await pair.run(step)

    records = pair.recorder.records()
    assert [(record.step, record.sequence, record.collective) for record in records] == [
        (0, 1, "all_reduce"),
        (0, 2, "barrier"),
        (1, 1, "all_reduce"),
        (1, 2, "barrier"),
    ]
    assert {record.num_replicas for record in records} == {2}
    assert all(record.file.endswith("test_recorder.py") for record in records)
    assert records[1].line == records[0].line + 1


def flattened(record: tuple[Any, ...]) -> list[Any]:
    """Open the tuples of a record, which are one level deep."""
    return [one for value in record for one in (value if isinstance(value, tuple) else (value,))]


@pytest.mark.asyncio
async def test_a_record_holds_strings_and_numbers_only(pair: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        return await ar.get_replica_context().merge_call(lambda _s, x: x, args=(object(),))

    await pair.run(step)

    [record] = pair.recorder.records()
    assert all(isinstance(value, (str, int, float)) for value in flattened(record))


# ---- one replica's part --------------------------------------------------------------------------


def merged(recorder: Recorder, sequence: int, members: tuple[int, ...], **other: Any) -> None:
    """Record a merge of some replicas, all from one line."""
    frame = sys._getframe()
    times = other.get("arrived_s", tuple(float(i) for i in members))
    places = other.get("places", [(frame.f_code, frame.f_lasti)] * len(members))
    recorder.record(
        other.get("time_s", 9.0),
        other.get("step", 0),
        sequence,
        other.get("collective", "all_reduce"),
        other.get("op", "SUM"),
        other.get("num_bytes", (8,)),
        members,
        [(*place, arrived_s) for place, arrived_s in zip(places, times, strict=True)],
    )


def test_a_replica_s_part_is_found_by_its_id() -> None:
    recorder = Recorder()
    merged(recorder, 1, (0, 1, 2))
    merged(recorder, 1, (1, 2), num_bytes=(16, 24), arrived_s=(3.0, 4.0))
    merged(recorder, 2, (0, 2))

    assert [r.sequence for r in recorder.collectives(0)] == [1, 2]
    assert [r.sequence for r in recorder.collectives(1)] == [1, 1]
    assert recorder.collectives(3) == ()
    [_, part, _] = recorder.collectives(2)
    assert isinstance(part, CollectiveRecord)
    assert part == CollectiveRecord(
        2, 0, 1, "all_reduce", "SUM", 24, part.site, arrived_s=4.0, merged_s=9.0
    )
    assert part.site.startswith(f"{__file__}:")


def test_a_size_that_all_share_is_everybody_s() -> None:
    recorder = Recorder()
    merged(recorder, 1, (0, 3), num_bytes=(40,))

    assert [recorder.collectives(i)[0].num_bytes for i in (0, 3)] == [40, 40]


def test_sites_that_differ_are_each_replica_s_own() -> None:
    recorder = Recorder()
    frame = sys._getframe()
    first = (frame.f_code, frame.f_lasti), frame.f_lineno
    second = (frame.f_code, frame.f_lasti), frame.f_lineno

    merged(recorder, 1, (0, 2), places=[first[0], second[0]])

    [record] = recorder.records()
    assert record.sites == (f"{__file__}:{first[1]}", f"{__file__}:{second[1]}")
    assert (record.file, record.line) == (__file__, first[1])
    assert [recorder.collectives(i)[0].site for i in (0, 2)] == list(record.sites)


# ---- in words ------------------------------------------------------------------------------------


def test_a_line_names_the_collective_its_bytes_and_the_late_replica() -> None:
    recorder = Recorder()
    merged(recorder, 3, (0, 1, 2), num_bytes=(80,), arrived_s=(1.0, 1.0025, 1.001), step=7)

    [record] = recorder.records()

    assert record.describe() == (
        f"step 7: all_reduce #3 (SUM) of replicas 0 to 2, 80 bytes per replica, at "
        f"{record.file}:{record.line}, 2.5 ms for replica 1"
    )


def test_a_line_of_one_replica_and_of_some() -> None:
    recorder = Recorder()
    merged(recorder, 1, (2,), num_bytes=(0,), op="", collective="barrier")
    merged(recorder, 1, (0, 3), num_bytes=(8, 0))

    alone, some = [record.describe() for record in recorder.records()]

    assert "barrier #1 of replica 2, at" in alone
    assert "bytes" not in alone
    assert "ms for" not in alone
    assert "of replicas 0, 3, 8, 0 bytes per replica, at" in some


def test_a_line_of_many_replicas_names_none_that_was_not_there() -> None:
    recorder = Recorder()
    merged(recorder, 1, tuple(range(0, 20, 2)))

    assert "replicas 0 to 18" not in recorder.records()[0].describe()


def test_the_history_is_the_newest_five() -> None:
    recorder = Recorder()
    assert recorder.history() == ""
    for sequence in range(1, 9):
        merged(recorder, sequence, (0, 1))

    lines = recorder.history().splitlines()

    assert lines[1] == "The last merges, newest last:"
    assert [int(line.split("#")[1].split()[0]) for line in lines[2:]] == [4, 5, 6, 7, 8]


# ---- in runs -------------------------------------------------------------------------------------


def me() -> ar.ReplicaContext:
    context = ar.get_replica_context()
    assert context is not None
    return context


@pytest.mark.asyncio
async def test_every_kind_of_collective_is_recorded(pair: ar.MirroredStrategy) -> None:
    array = np.ones((2, 2))

    async def step() -> None:
        ctx = me()
        own = ctx.replica_id_in_sync_group
        await ctx.all_reduce("max", array)
        await ctx.start_all_reduce("sum", {"a": array, "b": 1.0})
        await ctx.reduce_scatter("mean", array)
        await ctx.all_gather(np.ones(own), 0)
        await ctx.all_to_all(array)
        await ctx.broadcast(array, 1)
        await ctx.barrier()
        await ctx.any(True)
        await ctx.all(True)
        await ctx.agree(1)
        await ctx.merge_call(lambda _s: None)

    await pair.run(step)

    told = [(r.sequence, r.collective, r.op, r.num_bytes) for r in pair.recorder.records()]
    assert told == [
        (1, "all_reduce", "MAX", (32,)),
        (2, "start_all_reduce", "SUM", (32,)),
        (3, "reduce_scatter", "MEAN", (32,)),
        (4, "all_gather", "", (0, 8)),
        (5, "all_to_all", "", (32, 32)),
        (6, "broadcast", "", (0, 32)),
        (7, "barrier", "", (0,)),
        (8, "any", "", (0,)),
        (9, "all", "", (0,)),
        (10, "agree", "", (0,)),
        (11, "merge_call", "", (0,)),
    ]
    assert [r.num_bytes for r in pair.recorder.collectives(0)][3:6] == [0, 32, 0]
    assert [r.num_bytes for r in pair.recorder.collectives(1)][3:6] == [8, 32, 32]


@pytest.mark.asyncio
async def test_times_are_those_of_arrival_and_merge(pair: ar.MirroredStrategy) -> None:
    loop = asyncio.get_running_loop()
    times: dict[str, float] = {}

    async def step() -> None:
        if me().replica_id_in_sync_group == 1:
            await idle()
            times["late"] = loop.time()
        else:
            times["early"] = loop.time()
        await me().barrier()

    start = loop.time()
    await pair.run(step)
    end = loop.time()

    [first], [second] = pair.recorder.collectives(0), pair.recorder.collectives(1)
    assert start <= times["early"] <= first.arrived_s < times["late"] <= second.arrived_s
    assert second.arrived_s <= first.merged_s == second.merged_s <= end
    assert "for replica 1" in pair.recorder.records()[0].describe()


@pytest.mark.asyncio
async def test_replicas_that_call_from_different_lines(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        if me().replica_id_in_sync_group:
            await me().barrier()
        else:
            await me().barrier()

    first = step.__code__.co_firstlineno
    await pair.run(step)

    sites = [pair.recorder.collectives(i)[0].site for i in range(2)]
    assert sites == [f"{__file__}:{first + 4}", f"{__file__}:{first + 2}"]
    text = pair.recorder.records()[0].describe()
    assert f"{sites[0]} (replica 0), {sites[1]} (replica 1)" in text


@pytest.mark.asyncio
async def test_a_started_call_is_where_it_was_started(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        handle = me().start_all_reduce("sum", 1)
        await me().barrier()
        await handle

    await pair.run(step)

    started, barrier = pair.recorder.records()
    assert (started.sequence, barrier.sequence) == (1, 2)
    assert started.line == step.__code__.co_firstlineno + 1
    assert barrier.line == started.line + 1


@pytest.mark.asyncio
@pytest.mark.parametrize("ending", ["mismatch", "stall", "call timeout"])
async def test_errors_list_the_merges_before_them(pair: ar.MirroredStrategy, ending: str) -> None:
    """Seven good merges, then one that never comes about; the newest five are shown."""

    async def step() -> None:
        for _ in range(7):
            await me().all_reduce("sum", np.ones(3))
        if me().replica_id_in_sync_group:
            if ending != "mismatch":
                await asyncio.Event().wait()
            return
        timeout = 0.01 if ending == "call timeout" else None
        await me().all_reduce("sum", 1, ar.CommunicationOptions(timeout_seconds=timeout))

    options = ar.RunOptions(stall_timeout=0.02) if ending == "stall" else None
    error = MergeMismatchError if ending == "mismatch" else StallError
    with pytest.raises(error) as caught:
        await pair.run(step, options=options)

    text = str(caught.value)
    tail = text[text.index("The last merges, newest last:") :]
    for sequence in range(1, 8):
        assert (f"all_reduce #{sequence} (SUM) of replicas 0 to 1" in tail) is (sequence > 2)
    assert "24 bytes per replica" in tail
    assert len(pair.recorder.records()) == 7


@pytest.mark.asyncio
async def test_an_error_of_the_first_merge_has_no_history(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        if me().replica_id_in_sync_group:
            await me().barrier()

    with pytest.raises(MergeMismatchError) as caught:
        await pair.run(step)

    assert "The last merges" not in str(caught.value)


@pytest.mark.asyncio
async def test_failed_merges_are_not_recorded(pair: ar.MirroredStrategy) -> None:
    def merge(_strategy: ar.Strategy) -> None:
        raise KeyError("mine")

    async def step() -> None:
        with pytest.raises(KeyError):
            await me().merge_call(merge)
        await me().barrier()

    await pair.run(step)

    assert [record.collective for record in pair.recorder.records()] == ["barrier"]


@pytest.mark.asyncio
async def test_a_strategy_s_recorder_is_bounded(pair: ar.MirroredStrategy) -> None:
    async def step() -> None:
        for _ in range(300):
            await me().barrier()

    await pair.run(step)

    records = pair.recorder.records()
    assert len(records) == 256
    assert [record.sequence for record in records] == list(range(45, 301))


@pytest.mark.asyncio
async def test_it_can_be_read_at_any_time(pair: ar.MirroredStrategy) -> None:
    """From inside a step and inside a merge too."""
    seen: list[int] = []

    def merge(strategy: ar.Strategy) -> None:
        seen.append(len(strategy.recorder.records()))

    async def step() -> None:
        await me().barrier()
        seen.append(len(me().strategy.recorder.collectives(me().replica_id_in_sync_group)))
        await me().merge_call(merge)

    await pair.run(step)

    assert seen == [1, 1, 1]
    assert len(pair.recorder.records()) == 2


@pytest.mark.asyncio
async def test_records_keep_nothing_of_the_run_alive(pair: ar.MirroredStrategy) -> None:
    kept: list[Any] = []

    async def step() -> None:
        mine = np.ones(100)
        kept.append(weakref.ref(mine))
        await me().all_reduce("sum", mine)

    await pair.run(step)
    await asyncio.sleep(0)

    assert len(pair.recorder.records()) == 1
    assert [ref() for ref in kept] == [None, None]
