"""The ring recorder: the newest merges, as strings and numbers."""

import sys
from time import monotonic
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.telemetry import MergeRecord, Recorder, source_line


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


def test_a_record_says_what_when_and_where() -> None:
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
