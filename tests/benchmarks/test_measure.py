"""Tests of measuring in turns, and of the rows and the table that come of it."""

import asyncio
import itertools
import re
from collections.abc import Iterator

import pytest

from benchmarks._floors import OneFutureBarrier, pass_barrier
from benchmarks._measure import Comparison, Contender, compare, take_turns
from benchmarks._report import format_table, summarise
from benchmarks._row import Row, Target, compared_row


def test_contenders_take_turns_and_the_first_round_is_dropped() -> None:
    calls: list[str] = []

    def contender(name: str, samples: Iterator[float]) -> Contender:
        async def sample() -> float:
            calls.append(name)
            return next(samples)

        return sample

    contenders = {
        "a": contender("a", iter([100.0, 1.0, 2.0])),
        "b": contender("b", iter([200.0, 3.0, 4.0])),
    }
    samples = asyncio.run(take_turns(contenders, num_rounds=2))

    assert calls == ["a", "b", "a", "b", "a", "b"]
    assert samples == {"a": [1.0, 2.0], "b": [3.0, 4.0]}


def test_the_ratio_is_the_median_over_rounds_not_of_medians() -> None:
    ours, floor = [1.0, 10.0, 30.0], [1.0, 2.0, 20.0]

    assert compare(ours, floor) == Comparison(
        ours=10.0, floor=2.0, ratio=1.5, lowest=1.0, highest=5.0, difference=8.0
    )


@pytest.mark.parametrize(("ours", "floor"), [([], []), ([1.0], [1.0, 2.0])])
def test_rounds_must_match(ours: list[float], floor: list[float]) -> None:
    with pytest.raises(ValueError, match="Need one sample of each per round"):
        compare(ours, floor)


def row(target: Target | None) -> Row:
    return compared_row(
        "merge", "asyncio", 2, "us", ours=[6.0], against="floor", floor=[2.0], target=target
    )


@pytest.mark.parametrize(
    ("target", "is_met"),
    [
        (None, None),
        (Target("ratio", 3.0), True),
        (Target("ratio", 2.9), False),
        (Target("ours", 6.0), True),
        (Target("ours", 5.9), False),
        (Target("difference", 4.0), True),
        (Target("difference", 3.9), False),
    ],
)
def test_a_target_limits_the_ratio_our_own_value_or_the_difference(
    target: Target | None, is_met: bool | None
) -> None:
    assert row(target).is_met is is_met
    assert row(target).as_json()["is_met"] is is_met


def test_the_table_is_aligned_and_marked() -> None:
    rows = [row(None), row(Target("ratio", 3.5)), row(Target("ratio", 2.5))]
    rows.append(row(Target("difference", 4)))
    header, rule, *body = format_table(rows).splitlines()

    assert re.fullmatch(r"[- ]+", rule)
    assert {line.index("asyncio") for line in body} == {header.index("loop")}
    assert [line.rsplit("  ")[-1] for line in body] == [
        "3.00-3.00",
        "ratio <= 3.5 ok",
        "ratio <= 2.5 MISSED",
        "ours - floor <= 4 ok",
    ]
    assert summarise(rows) == "2 of 3 targets met."


@pytest.mark.parametrize("num_parties", [1, 2, 5])
def test_the_floor_is_a_barrier(num_parties: int) -> None:
    async def main() -> list[int]:
        barrier = OneFutureBarrier(num_parties)
        passed: list[int] = []

        async def party() -> None:
            for generation in range(3):
                await barrier.wait()
                passed.append(generation)

        await asyncio.gather(*(party() for _ in range(num_parties)))
        await pass_barrier(barrier, num_parties, num_times=2)
        return passed

    passed = asyncio.run(main())

    # A party passes a generation only after all have passed the one before the last.
    assert sorted(passed) == sorted(list(range(3)) * num_parties)
    assert all(later >= earlier - 1 for earlier, later in itertools.pairwise(passed))
