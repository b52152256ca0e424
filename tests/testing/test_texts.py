"""Texts of errors and timelines: the line that is to blame, and what is refused by name."""

import asyncio
import logging
import select
import subprocess
import threading

import pytest

import aioreplica.testing as art
from aioreplica.testing import _watchdog


@pytest.mark.parametrize("waits", [False, True], ids=["on the loop's thread", "on its own"])
def test_a_process_that_a_pool_starts_is_told_with_the_line_that_awaits_it(waits: bool) -> None:
    async def main() -> None:
        if waits:
            await asyncio.to_thread(threading.Event().wait, 1)
        await asyncio.to_thread(subprocess.run, ["true"])

    failure = art.explore(main, schedules=3).failure

    assert failure is not None
    assert isinstance(failure.error, art.RealIOError)
    line = main.__code__.co_firstlineno + 3
    assert failure.error.site == f"{__file__}:{line}"


def test_a_process_that_a_callback_starts_is_not_blamed_on_who_explores() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(subprocess.run, ["true"])
        await asyncio.sleep(0)

    with pytest.raises(art.LeakError, match="at unknown would leave"):
        art.run(main)


@pytest.mark.skipif(not hasattr(select, "epoll"), reason="this system has no epoll")
def test_a_selector_of_another_event_loop_is_refused_by_name() -> None:
    async def main() -> None:
        select.epoll()  # as trio does, when it is imported in the program

    with pytest.raises(art.RealIOError, match=r"select\.epoll.*Only asyncio is simulated"):
        art.run(main)


def test_a_loop_that_is_made_by_its_class_is_refused_by_name() -> None:
    async def main() -> None:
        asyncio.SelectorEventLoop()

    with pytest.raises(art.RealIOError, match=r"made by its class.*asyncio\.new_event_loop"):
        art.run(main)
    asyncio.SelectorEventLoop().close()


def test_unhandled_errors_are_in_the_log_of_a_test(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(0)
        assert "the callback failed" in caplog.text

    def fail() -> None:
        raise ValueError("the callback failed")

    with caplog.at_level(logging.ERROR):
        art.run(main, leaks="ignore")


def test_unhandled_errors_are_not_printed_where_nobody_listens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(int, "x")
        await asyncio.sleep(0)

    monkeypatch.setattr(logging.getLogger("asyncio"), "propagate", False)
    art.run(main, leaks="ignore")

    assert capsys.readouterr().err == ""


def test_a_step_that_spins_is_told_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        while True:
            pass

    monkeypatch.setattr(_watchdog, "LOOK_S", 0.01)
    monkeypatch.setattr(_watchdog, "STUCK_S", 0.1)

    with pytest.raises(art.StarvationError, match=r"after \d+ s, in which the process used \d+ s"):
        art.run(main)


def test_a_step_inside_one_primitive_shows_the_lines_in_it() -> None:
    async def main() -> None:
        condition = asyncio.Condition()

        async def waiter() -> None:
            async with condition:
                await condition.wait()

        async with asyncio.TaskGroup() as group:
            group.create_task(waiter())
            await asyncio.sleep(1)
            async with condition:
                condition.notify_all()
                await asyncio.sleep(1)
        raise ValueError

    failure = art.explore(main, schedules=3).failure

    assert failure is not None
    place = f"Condition at test_texts.py:{main.__code__.co_firstlineno + 5}"
    told = [step.did for step in failure.steps if step.did.startswith(f"{place} > locks.py:")]
    assert len(told) == 1
    assert f" -> {place} > locks.py:" in told[0]
