"""Eager tasks: the first step is the maker's, and what follows is explored."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

import aioreplica.testing as art

pytestmark = pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with 3.12")


def use_eager_tasks() -> None:
    loop: Any = asyncio.get_running_loop()
    loop.set_task_factory(vars(asyncio)["eager_task_factory"])


async def lost_update(make: Callable[..., Any]) -> None:
    """Lose an update if one task is held between its two steps for long enough."""
    count = 0

    async def add(rounds: int) -> None:
        nonlocal count
        for _ in range(rounds):
            await asyncio.sleep(0)
        seen = count
        await asyncio.sleep(0)
        count = seen + 1

    await asyncio.gather(make(add(1)), make(add(8)))
    assert count == 2


async def by_a_factory() -> None:
    use_eager_tasks()
    await lost_update(asyncio.create_task)


async def by_the_class() -> None:
    make: Any = asyncio.Task
    loop = asyncio.get_running_loop()
    await lost_update(lambda coro: make(coro, loop=loop, eager_start=True))


@pytest.mark.parametrize("program", [by_a_factory, by_the_class])
def test_a_lost_update_between_eager_tasks_is_found(program: Callable[[], Any]) -> None:
    report = art.explore(program, schedules=200)

    assert report.failure is not None
    assert report.failure.schedule_number > 0  # not in asyncio's own order
    assert "add (Task-1)  test_eager.py" in report.failure.story, "the first step is the maker's"
    with pytest.raises(AssertionError):
        art.replay(program, report.failure.token)


def test_an_eager_task_may_end_at_once() -> None:
    async def program() -> list[str]:
        use_eager_tasks()

        async def nothing() -> int:
            return 3

        done = asyncio.create_task(nothing())
        waiting = asyncio.create_task(asyncio.sleep(1, 4))
        assert done.done()
        assert await done + await waiting == 7
        return [done.get_name(), waiting.get_name()]

    assert art.run(program) == ["Task-1", "Task-2"]
    report = art.explore(program, schedules=50)
    report.check()
    assert report.warnings == ()


def test_a_factory_with_a_task_class_of_its_own_is_named() -> None:
    class Traced(asyncio.Task[None]):
        """Made by the program."""

    async def program() -> None:
        loop: Any = asyncio.get_running_loop()
        loop.set_task_factory(vars(asyncio)["create_eager_task_factory"](Traced))
        await asyncio.gather(asyncio.sleep(0), asyncio.create_task(asyncio.sleep(0)))

    report = art.explore(program, schedules=50)

    report.check()
    assert len(report.warnings) == 1
    assert "Traced were not explored" in report.warnings[0]
