"""Explored: queue, flush, crash, recovery and shutdown in all orders, and cancelled everywhere.

A crash is a copy of the folder, taken at a moment that the schedule chooses, from which another
learner goes on: that of SIGKILL, which leaves what was written. What a power cut leaves is another
matter, see test_simulated_disk.py.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path

import anyio
import pytest

from aioreplica import testing as art
from aioreplica.errors import ContextError, PoisonedExampleError

from .conftest import MEMORY
from .program import Counting, example

IN = MEMORY if MEMORY.is_dir() else None
POISONED = 3


async def clients(program: Counting, acknowledged: set[int], numbers: range) -> None:
    """Submit examples from two tasks; note which were acknowledged."""

    async def client(own: range) -> None:
        for i in own:
            ticket = await program.learner.submit(
                example(i, 1.0 if i == POISONED else 0.0), key=f"example {i}"
            )
            acknowledged.add(i)
            assert program.is_one_version()
            try:
                await ticket
            except PoisonedExampleError:
                assert i == POISONED
            except ContextError:
                return  # closed meanwhile

    async with asyncio.TaskGroup() as group:
        group.create_task(client(numbers[::2]))
        group.create_task(client(numbers[1::2]))


async def recovers(folder: Path, acknowledged: set[int], offered: range) -> None:
    """Check that a learner on a folder learns each acknowledged example once, retries included."""
    async with Counting(folder) as program:
        for i in offered:  # a client that does not know asks again, with its key
            await program.learner.submit(
                example(i, 1.0 if i == POISONED else 0.0), key=f"example {i}"
            )
    wanted = [0 if i == POISONED else 1 for i in offered]
    assert program.learned() == wanted
    async with Counting(folder) as again:
        assert again.learned() == wanted
        dead = [letter.example["id"] for letter in await again.learner.dead_letters()]
        assert dead == [POISONED] * (POISONED in offered)


@pytest.mark.parametrize(
    "schedules",
    [
        pytest.param(12, marks=pytest.mark.slow),
        pytest.param(300, marks=pytest.mark.xslow),
    ],
)
def test_a_crash_at_any_moment_loses_and_doubles_nothing(schedules: int) -> None:
    offered = range(5)

    async def main() -> None:
        with tempfile.TemporaryDirectory(dir=IN) as made:
            folder, copy = Path(made) / "a", Path(made) / "b"
            folder.mkdir()
            acknowledged: set[int] = set()
            kept: set[int] = set()

            async def crash() -> None:
                await asyncio.sleep(0)
                kept.update(acknowledged)
                shutil.copytree(folder, copy)

            async with Counting(folder) as program, asyncio.TaskGroup() as group:
                group.create_task(clients(program, acknowledged, offered))
                group.create_task(program.learner.checkpoint())
                group.create_task(crash())
            assert [n for i, n in enumerate(program.learned()) if i != POISONED] == [1] * 4
            async with Counting(copy) as restored:
                while not restored.learner.is_ready:
                    await asyncio.sleep(0.001)
                counts = dict(enumerate(restored.learned()))
                assert all(counts.get(i) == 1 for i in kept - {POISONED})
                assert max(counts.values(), default=0) <= 1
            await recovers(copy, kept, offered)

    art.explore(main, schedules=schedules).check()


@pytest.mark.slow
def test_pausing_saving_changing_and_closing_against_each_other() -> None:
    async def main() -> None:
        async with Counting(queue_size=2) as program:
            learner = program.learner
            learned: list[int] = []

            async def submit(i: int) -> None:
                try:
                    ticket = await learner.submit(example(i))
                except ContextError:
                    return  # closed before it had a place
                assert await ticket > 0  # closing learns what was taken
                learned.append(i)

            async def meddle() -> None:
                await learner.pause()
                versions = learner.version
                await asyncio.sleep(0.001)
                assert learner.version == versions or learner.state in {"closing", "closed"}
                learner.step_fn = program.step
                learner.resume()

            async def close() -> None:
                await asyncio.sleep(0.002)
                await learner.aclose()

            tasks = [asyncio.create_task(submit(i)) for i in range(5)]
            tasks += [asyncio.create_task(meddle()), asyncio.create_task(close())]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                assert result is None or isinstance(result, ContextError), result
            assert learner.statistics().queue_depth == 0
            assert [i for i, n in enumerate(program.learned()) if n == 1] == sorted(learned)
            assert max(program.learned(), default=1) == 1

    art.explore(main, schedules=100).check()


@pytest.mark.xslow
def test_cancelled_anywhere_it_leaves_a_folder_that_goes_on() -> None:
    offered = range(2)

    async def main() -> None:
        with tempfile.TemporaryDirectory(dir=IN) as made:
            folder = Path(made)
            acknowledged: set[int] = set()
            try:
                async with Counting(folder) as program:
                    with anyio.move_on_after(10.0):
                        await clients(program, acknowledged, offered)
            finally:
                with anyio.CancelScope(shield=True):
                    await recovers(folder, acknowledged, offered)

    art.cancel_everywhere(main).check()
