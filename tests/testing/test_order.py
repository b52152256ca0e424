"""Collectives that only the schedule ordered are named, though the schedule passed."""

import asyncio
from collections.abc import Callable, Coroutine

import aioreplica as ar
import aioreplica.testing as art


def total(strategy: ar.Strategy, value: object) -> int:
    return 0


def program(step: object) -> Callable[[], Coroutine[object, None, None]]:
    async def main() -> None:
        async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            await strategy.run(step)  # type: ignore[arg-type]

    return main


def explored(step: object, schedules: int) -> art.Report:
    return art.explore(program(step), schedules=schedules)


async def two_tasks() -> None:
    context = ar.get_replica_context()
    assert context is not None

    async def late() -> None:
        await asyncio.sleep(1)
        await context.merge_call(total, (2,))

    task = asyncio.create_task(late())
    await asyncio.sleep(0)  # from here on `late` may go first
    await context.merge_call(total, (1,))
    await task


async def two_tasks_in_order() -> None:
    context = ar.get_replica_context()
    assert context is not None
    done = asyncio.Event()

    async def late() -> None:
        await done.wait()
        await context.merge_call(total, (2,))

    task = asyncio.create_task(late())
    await context.merge_call(total, (1,))
    done.set()
    await task


def test_calls_that_only_time_orders_are_named() -> None:
    report = explored(two_tasks, schedules=1)

    assert not report.failed
    [warning] = report.warnings
    assert warning.startswith(
        "Replicas 0, 1: two tasks call merge_call #1 (total) at test_order.py"
    )
    assert "nothing but the schedule orders them" in warning


def test_every_exploration_names_them() -> None:
    main = program(two_tasks)

    for report in (art.exhaustive(main, max_preemptions=0), art.cancel_everywhere(main)):
        _ = report.failed  # whether one fails does not matter here
        assert any("two tasks call merge_call #1" in warning for warning in report.warnings)


def test_calls_that_an_event_orders_are_not() -> None:
    report = explored(two_tasks_in_order, schedules=100)

    report.check()
    assert report.warnings == ()
