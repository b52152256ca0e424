"""Schedules drawn by Hypothesis, which alone shrinks them."""

import pytest
from hypothesis import find, given, settings

import aioreplica.testing as art
from tests.testing import programs


def fails(schedule: art.Schedule) -> bool:
    try:
        art.run(programs.lost_update, schedule=schedule)
    except AssertionError:
        return True
    return False


def test_hypothesis_finds_and_shrinks() -> None:
    schedule = find(
        art.schedules(max_decisions=20), fails, settings=settings(database=None, deadline=None)
    )

    assert len(schedule.choices) == 1, "one decision is enough"
    assert fails(schedule)


@given(schedule=art.schedules())
@settings(max_examples=30, deadline=None, database=None)
def test_a_correct_program_passes_under_drawn_schedules(schedule: art.Schedule) -> None:
    art.run(programs.locked_counter, schedule=schedule)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        art.schedules(max_decisions=0)
    with pytest.raises(ValueError, match="not both"):
        art.run(programs.locked_counter, seed=1, schedule=art.Schedule())
