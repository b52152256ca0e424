"""Learners that are opened more than once: in one process, after crashes, twice at a time."""

import asyncio
import errno
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.errors import ContextError, JournalError
from aioreplica.online import Journal, SnapshotReader

from .program import RAISES, Counting, example
from .test_journal import Failing, cancelled_close, never


async def until_running(learner: ar.online.OnlineLearner) -> None:
    async with asyncio.timeout(30):
        while learner.state != "running":
            await asyncio.sleep(0.001)


@pytest.mark.asyncio
@pytest.mark.parametrize("has_checkpoints", [False, True])
async def test_a_learner_opened_again_learns_nothing_twice(
    folder: Path, has_checkpoints: bool
) -> None:
    """Its variables hold what it has learned, although no checkpoint was saved."""
    options = {} if has_checkpoints else {"checkpoints": None}
    program = Counting(folder, **options)
    async with program:
        learner = program.learner
        for i in range(3):
            await (await learner.submit(example(i)))
        dead = await learner.submit(example(7, RAISES))
        with pytest.raises(ar.errors.PoisonedExampleError):
            await dead
        await learner.pause()
        left = await learner.submit(example(3))
        await cancelled_close(program)
        with pytest.raises(ContextError, match="The journal has it"):
            await left
        version = learner.version
        learner.step_fn = program.step
        async with learner:
            await until_running(learner)
            assert program.learned() == [1, 1, 1, 1]
            assert learner.version > version
            assert (await learner.submit(example(4))).number == 6
        assert program.learned() == [1, 1, 1, 1, 1]


@pytest.mark.asyncio
async def test_fresh_values_learn_the_whole_journal(folder: Path) -> None:
    program = Counting(folder, checkpoints=None)
    async with program:
        await (await program.learner.submit(example(0)))
        await program.learner.aclose()
        for variable in (program.counts, program.sums):
            await variable.assign(np.zeros_like(variable.value))
        async with program.learner:
            await until_running(program.learner)
            assert program.learned() == [1]


@pytest.mark.asyncio
async def test_a_dead_letter_that_was_not_written_is_written_when_it_is_opened_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Counting(folder, checkpoints=None)
    async with program:
        learner = program.learner
        with monkeypatch.context() as patch:
            patch.setattr(
                "aioreplica.online._journal_file.JournalFile.set_aside",
                lambda *_: (_ for _ in ()).throw(JournalError("full")),
            )
            ticket = await learner.submit(example(0, RAISES))
            with pytest.raises(ar.errors.PoisonedExampleError):
                await ticket
            with pytest.raises(JournalError, match="Dead letters were not written down: full"):
                await learner.aclose()
        async with learner:
            pass
        async with learner:
            assert [letter.number for letter in await learner.dead_letters()] == [1]
    assert program.learned() == []


@pytest.mark.asyncio
async def test_no_version_is_used_twice_if_a_crash_follows_a_restart(folder: Path) -> None:
    """The second learner makes fewer versions of the same examples; the third must know of both."""
    used: set[int] = set()
    here = folder / "0"
    here.mkdir()
    for crash in range(4):
        async with Counting(here) as program:
            learner = program.learner
            records = learner.records(buffer_size=100)
            for i in range(9):
                await (await learner.submit(example(i)))
            here = folder / str(crash + 1)
            shutil.copytree(folder / str(crash), here)  # what a crash at this moment leaves
        versions = [record.version async for record in records]
        assert versions == sorted(versions)
        assert not used & set(versions)
        used |= set(versions)


@pytest.mark.asyncio
async def test_entering_twice_at_once_is_refused(folder: Path) -> None:
    program = Counting(folder, journal=None)
    assert program.manager is not None
    async with program.strategy, program.manager:
        async with program.learner:
            await (await program.learner.submit(example(0)))
        entered = await asyncio.gather(
            program.learner.__aenter__(), program.learner.__aenter__(), return_exceptions=True
        )
        assert entered[0] is program.learner
        assert isinstance(entered[1], ContextError)
        await program.learner.aclose()


@pytest.mark.asyncio
async def test_a_link_to_a_journal_is_the_same_journal(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    link = folder / "elsewhere" / "link.db"
    link.symlink_to(folder / "journal.db")
    async with Counting(folder):
        with pytest.raises(JournalError, match="is in use"):
            async with Counting(folder, checkpoints=None, journal=Journal(link)):
                pass


@pytest.mark.parametrize("is_opened_again", [False, True])
@pytest.mark.parametrize("has_checkpoints", [False, True])
def test_a_retry_of_the_newest_example_gets_its_outcome(
    folder: Path, is_opened_again: bool, has_checkpoints: bool
) -> None:
    """Nothing newer comes: the request that is sent again is what wakes an idle learner."""

    async def main() -> None:
        options = {} if has_checkpoints else {"checkpoints": None}
        async with Counting(folder, **options) as program:
            for i in range(2):
                await (await program.learner.submit(example(i), key=f"key {i}"))
            if not is_opened_again:
                await retry(program, 1)
        if is_opened_again:
            async with Counting(folder, **options) as program:
                await retry(program, 1)
        assert program.learned() == [1, 1]

    async def retry(program: Counting, i: int) -> None:
        again = await program.learner.submit(example(i), key=f"key {i}")
        assert (again.number, again.is_duplicate) == (i + 1, True)
        async with asyncio.timeout(60):
            assert await again == program.learner.version

    art.run(main)


@pytest.mark.asyncio
@pytest.mark.parametrize("has_checkpoints", [False, True])
@pytest.mark.parametrize("remedy", ["none", "discard", "retry"])
async def test_no_number_is_used_twice(folder: Path, remedy: str, has_checkpoints: bool) -> None:
    """The newest is a dead letter; "retry" takes its example again, under a newer number."""
    options = {} if has_checkpoints else {"checkpoints": None}
    async with Counting(folder, **options) as program:
        await (await program.learner.submit(example(0)))
        poisoned = await program.learner.submit(example(1, RAISES))
        await asyncio.wait([asyncio.ensure_future(poisoned.saved())])
        with pytest.raises(ar.errors.PoisonedExampleError):
            await poisoned
        newest = 2
        if remedy == "discard":
            await program.learner.discard(2)
        elif remedy == "retry":
            again = await program.learner.retry(2)
            with pytest.raises(ar.errors.PoisonedExampleError):
                await again
            newest = 3
            await program.learner.discard(3)
    for number in (newest + 1, newest + 2):
        async with Counting(folder, **options) as program:
            dead = [letter.number for letter in await program.learner.dead_letters()]
            assert dead == ([2] if remedy == "none" else [])
            assert (await program.learner.submit(example(number))).number == number


@pytest.mark.slow
def test_readers_get_the_last_version_of_a_learner_that_closes_at_once(folder: Path) -> None:
    """The write that follows a step in the background may never have begun."""

    async def main() -> None:
        path = folder / "published"
        path.unlink(missing_ok=True)
        options = {"journal": None, "checkpoints": None, "publish_to": path, "max_delay_s": 0.0}
        async with Counting(**options) as program:
            for i in range(2):
                await (await program.learner.submit(example(i)))
        with SnapshotReader(path) as reader:
            assert reader.read().version == program.learner.version == 2
            assert np.array_equal(reader.read()["counts"], program.counts.value)

    art.explore(main, schedules=30).check()


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
@pytest.mark.parametrize("is_closing", [False, True], ids=["open", "closing"])
def test_ctrl_c_saves_and_closes_the_journal_in_good_order(folder: Path, is_closing: bool) -> None:
    async def main() -> None:
        async with Counting(folder) as program:
            learner = program.learner
            for i in range(3):
                await (await learner.submit(example(i)))
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
            if not is_closing:
                await asyncio.Event().wait()

    async def again() -> None:
        async with Counting(folder) as program:
            assert program.learner.state == "running"
            assert program.learned() == [1, 1, 1]

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(main())
    finally:
        signal.signal(signal.SIGINT, before)
    assert not list(folder.glob("journal.db-wal"))  # SQLite removes it when the file is closed
    asyncio.run(again())


@pytest.mark.asyncio
async def test_a_retry_of_a_backlog_example_learns_of_its_failure(
    folder: Path,
) -> None:
    async with Counting(folder) as program:
        await program.learner.pause()
        await program.learner.submit(example(0), key="k")
        await cancelled_close(program)
    program = Counting(folder)
    program.learner.step_fn = never
    async with program:
        known = await program.learner.submit(example(0), key="k")
        assert known.is_duplicate
        await cancelled_close(program)
        async with asyncio.timeout(60):
            with pytest.raises(ContextError, match="The journal has it"):
                await known


@pytest.mark.asyncio
async def test_the_folder_of_checkpoints_is_given_back_when_the_learner_is_closed(
    folder: Path,
) -> None:
    """Nobody need close the manager: it is the learner's alone."""
    program = Counting(folder)
    async with program.strategy:
        for number in range(2):
            async with program.learner:
                await (await program.learner.submit(example(number)))
        async with ar.CheckpointManager(folder / "checkpoints") as other:
            await other.save(100, {"w": program.weight})
    assert program.learned() == [1, 1]


def test_a_full_disk_at_the_start_stops_learning_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def main() -> None:
        home = Path(tempfile.mkdtemp(dir=folder))  # the schedule begins twice, as a save pauses
        async with Counting(home) as program:
            await (await program.learner.submit(example(0)))
            await program.learner.pause()
            await program.learner.submit(example(1))
            shutil.copytree(home, home / "crashed")
        failing = Failing()
        failing.fails_at = lambda statement: statement.startswith(("INSERT", "UPDATE"))
        journal = Journal(home / "crashed" / "journal.db", connect=failing.connect)
        published = home / "published"
        with monkeypatch.context() as patch:
            patch.setattr("aioreplica.online._publishing.publish_snapshot", full)
            program = Counting(home / "crashed", journal=journal, publish_to=published)
            await program.__aenter__()
            learner = program.learner
            assert learner.snapshot()[program.counts] is not None
            await asyncio.sleep(5.0)
            now = learner.statistics()
            assert (learner.state, learner.is_ready) == ("retrying", False)
            assert "No space" in now.publish_error
            assert "disk I/O error" in now.retry_error
            assert now.num_steps == 0
            with pytest.raises(JournalError):
                await learner.submit(example(2))
        failing.fails_at = lambda _statement: False
        await asyncio.sleep(60.0)
        assert learner.state == "running"
        await learner.submit(example(2))
        assert learner.is_ready
        await asyncio.sleep(60.0)
        with SnapshotReader(published) as reader:
            assert reader.read().version == learner.version > 1
        assert program.learned() == [1, 1, 1]
        await program.aclose()

    art.run(main)
