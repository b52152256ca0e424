"""Explored: queue, flush, crash, recovery and shutdown in all orders, and cancelled everywhere.

A crash is a copy of the folder, taken at a moment that the schedule chooses, from which another
learner goes on: that of SIGKILL, which leaves what was written. What a power cut leaves is another
matter, see test_simulated_disk.py.
"""

import asyncio
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.errors import CheckpointError, ContextError, PoisonedExampleError
from aioreplica.online._journal import OpenJournal
from aioreplica.online._journal_file import JournalFile
from tests.conftest import MEMORY

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
        pytest.param(120, marks=pytest.mark.xslow),
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


@pytest.mark.xslow
def test_a_promotion_against_everything_else_serves_no_version_twice() -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory(dir=IN) as made:
            folder = Path(made)
            served: dict[int, bytes] = {}
            promised: list[int] = []
            async with both(folder) as (first, second):
                learner = first.learner
                for i in range(3):
                    await (await learner.submit(example(i)))
                    while second.learner.statistics().learned_number <= i:
                        await asyncio.sleep(0.001)
                    await second.learner.checkpoint()

                def look() -> None:
                    snapshot = learner.snapshot()
                    bits = b"".join(each.tobytes() for each in snapshot.values())
                    assert served.setdefault(snapshot.version, bits) == bits, snapshot.version

                async def watch() -> None:
                    while learner.state != "closed":
                        look()
                        await asyncio.sleep(0)

                async def promote() -> None:
                    with suppress(ValueError, ContextError):  # it was not caught up, or closed
                        promised.append(await learner.promote("b"))
                        assert learner.version >= promised[-1]

                async def go_back() -> None:
                    with suppress(ContextError):
                        assert await second.learner.rollback(to=2) == 2

                async def submit() -> None:
                    with suppress(ContextError):
                        await (await learner.submit(example(3)))

                async def save() -> None:
                    with suppress(CheckpointError, ContextError):
                        await second.learner.checkpoint()

                async def close() -> None:
                    await asyncio.sleep(0.002)
                    await learner.aclose()

                watching = asyncio.create_task(watch())
                actions = (promote, go_back, submit, save, close)
                await asyncio.gather(*(asyncio.create_task(each()) for each in actions))
                await watching
                look()
            newest = max(served)
            async with both(folder) as (again, other):
                assert again.learner.champion == ("b" if promised else "main")
                assert again.learner.version >= newest
                last = again.learner.statistics().last_number
                assert again.learned() == other.learned() == [1] * last

    art.explore(main, schedules=12).check()


@pytest.mark.asyncio
async def test_what_is_promoted_while_it_goes_back_has_a_version_of_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, is_queued = asyncio.get_running_loop(), threading.Event()
    promoting: list[asyncio.Future[int]] = []
    write, roll_back = OpenJournal.promote, JournalFile.roll_back

    async def promote(journal: OpenJournal, learned: int, version: int) -> None:
        writing = asyncio.ensure_future(write(journal, learned, version))
        await asyncio.sleep(0)
        is_queued.set()
        await writing

    def roll_back_then_promote(file: JournalFile, *given: Any) -> Any:
        found = roll_back(file, *given)
        start = first.learner.promote
        loop.call_soon_threadsafe(lambda: promoting.append(asyncio.ensure_future(start("b"))))
        assert is_queued.wait(60)
        return found

    monkeypatch.setattr(OpenJournal, "promote", promote)
    monkeypatch.setattr(JournalFile, "roll_back", roll_back_then_promote)
    served: dict[int, bytes] = {}
    async with asyncio.timeout(60), both(folder) as (first, second):
        for i in range(3):
            await (await first.learner.submit(example(i)))
            while second.learner.statistics().learned_number <= i:
                await asyncio.sleep(0)
            await second.learner.checkpoint()
        going_back = asyncio.ensure_future(second.learner.rollback(to=1))
        while not (going_back.done() and promoting and promoting[0].done()):
            snapshot = first.learner.snapshot()
            bits = b"".join(each.tobytes() for each in snapshot.values())
            assert served.setdefault(snapshot.version, bits) == bits, snapshot.version
            await asyncio.sleep(0)
        assert await promoting[0] <= first.learner.version
        assert second.learned() == [1] * second.learner.statistics().learned_number


@asynccontextmanager
async def both(folder: Path) -> AsyncIterator[tuple[Counting, Counting]]:
    """Open a champion and a challenger b."""
    given: dict[str, Any] = {"max_batch": 1, "max_delay_s": 0.0, "num_replicas": 1}
    manager = ar.CheckpointManager(folder / "b" / "all", max_to_keep=None)
    second = Counting(folder / "b", journal=None, checkpoints=manager, **given)
    async with (
        second.strategy,
        Counting(folder, challengers={"b": second.learner}, **given) as first,
    ):
        yield first, second
