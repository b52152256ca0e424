"""Clocks of C: virtual where time-machine is installed, and named where it is not."""

import asyncio
import datetime as dt
import sys
import time

import pytest

import aioreplica.testing as art

HOUR_S = 3600.0


async def an_hour() -> tuple[float, float, bool]:
    """Return how long an hour takes by the clock of `datetime`, and how far that is off `time`."""
    start = dt.datetime.now(dt.UTC)
    off = start.timestamp() - time.time()
    await asyncio.sleep(HOUR_S)
    took = dt.datetime.now(dt.UTC) - start
    return took.total_seconds(), off, type(start) is dt.datetime


def test_datetime_goes_by_virtual_time() -> None:
    pytest.importorskip("time_machine")
    before = dt.datetime.now(dt.UTC)

    took, off, is_intact = art.run(an_hour)

    assert took == pytest.approx(HOUR_S, abs=1e-3)
    assert abs(off) < 1e-3
    assert is_intact
    report = art.explore(an_hour, schedules=20)
    report.check()
    assert report.warnings == ()
    assert before <= dt.datetime.now(dt.UTC) < before + dt.timedelta(hours=1)


def test_datetime_goes_on_while_calls_take_time() -> None:
    pytest.importorskip("time_machine")

    def off() -> float:
        return abs(dt.datetime.now(dt.UTC).timestamp() - time.time())

    def off_after_a_nap() -> float:
        vars(time)["sleep"](2)
        return off()

    async def worst() -> float:
        found = list[float]()
        for _ in range(10):
            await asyncio.to_thread(int)
            found.append(off())
        found.append(await asyncio.to_thread(off_after_a_nap))
        return max(*found, off())

    assert art.run(worst) < 1e-3


def test_a_schedule_by_the_clock_of_datetime_comes() -> None:
    pytest.importorskip("time_machine")

    async def expires() -> None:
        end = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=90)
        while (left := (end - dt.datetime.now(dt.UTC)).total_seconds()) > 0:
            await asyncio.sleep(left / 2 + 1)

    art.explore(expires, schedules=50).check()


def test_datetime_ends_where_its_years_do_though_a_timer_comes_later() -> None:
    pytest.importorskip("time_machine")

    async def a_long_time() -> int:
        await asyncio.sleep(1e300)
        return dt.datetime.now(dt.UTC).year

    assert art.run(a_long_time) == 9999


def test_a_clock_that_a_test_has_set_stays() -> None:
    machine = pytest.importorskip("time_machine")

    async def year() -> int:
        await asyncio.sleep(HOUR_S)
        return dt.datetime.now(dt.UTC).year

    with machine.travel(dt.datetime(1999, 6, 1, tzinfo=dt.UTC), tick=False):
        assert art.run(year) == 1999


def test_a_real_clock_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "time_machine", None)  # as if it were not installed

    report = art.explore(an_hour, schedules=5)

    report.check()
    assert len(report.warnings) == 1
    assert "reads datetime.now(), which is real" in report.warnings[0]
    assert art.explore(naps, schedules=5).warnings == ()


async def naps() -> None:
    await asyncio.sleep(1)
