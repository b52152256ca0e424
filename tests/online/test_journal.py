"""The journal: keys, recovery, compaction, and everything that can be wrong with the file."""

import asyncio
import errno
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.errors import CheckpointError, JournalError, KeyReusedError
from aioreplica.online import Journal, OnlineLearner
from aioreplica.telemetry import Observer, observe_everywhere

from .program import Counting, example


@pytest.mark.asyncio
async def test_a_key_takes_one_example_once(folder: Path) -> None:
    async with Counting(folder) as program:
        learner = program.learner
        await learner.pause()
        first, again = await asyncio.gather(
            learner.submit(example(0), key="a"), learner.submit(example(0), key="a")
        )
        assert {first.number, again.number} == {1}
        assert sorted([first.is_duplicate, again.is_duplicate]) == [False, True]
        learner.resume()
        assert await first == await again == 1
        with pytest.raises(KeyReusedError, match="'a' came with another example before") as caught:
            await learner.submit(example(1), key="a")
        assert caught.value.key == "a"
        many = await learner.submit_many([example(1), example(2)], key="b")
        twice = await learner.submit_many([example(1), example(2)], key="b")
        assert [t.number for t in many] == [t.number for t in twice] == [2, 3]
        with pytest.raises(KeyReusedError):
            await learner.submit_many([example(1)], key="b")
        assert [await t for t in twice] == [2, 2]
        assert learner.statistics().num_duplicates == 3
        assert learner.statistics().queue_depth == 0
        for key in ("", "x" * 201, 3, "half \ud800"):
            with pytest.raises(ValueError, match="1 to 200 characters"):
                await learner.submit(example(1), key=key)  # type: ignore[arg-type]
    async with Counting(folder) as program:  # compacted by the checkpoint, and still known
        late = await program.learner.submit(example(0), key="a")
        assert late.is_duplicate
        assert await late == program.learner.version
        assert program.learned() == [1, 1, 1]


@pytest.mark.asyncio
async def test_telemetry_calls_the_thread_of_the_journal_by_its_name(folder: Path) -> None:
    lanes: set[str] = set()
    remove = observe_everywhere(Observer(op_started=lambda _op, lane: lanes.add(lane)))
    try:
        async with Counting(folder) as program:
            await program.learner.submit(example(0))
    finally:
        remove()
    assert any(name.startswith("journal:") for name in lanes)
    assert not any(name.startswith("input:") for name in lanes)


def test_keys_live_as_long_as_stated_whatever_the_clocks_of_the_machine_show(folder: Path) -> None:
    """The journal counts seconds on the loop's clock, on which nobody can set the time."""

    async def main() -> None:
        journal = Journal(folder / "journal.db", keep_keys_s=100.0)
        for slept, number in [(60.0, 1), (39.0, 1), (2.0, 1), (0.0, 2)]:  # at 0, 60, 99 and 101 s
            async with Counting(folder, journal=journal) as program:
                learner = program.learner
                if slept == 60.0:
                    await learner.submit(example(0), key="k")
                ticket = await learner.submit(example(0), key="k")
                assert ticket.number == number
                await asyncio.sleep(slept)

    art.run(main)


@pytest.mark.asyncio
async def test_unlearned_examples_are_learned_by_the_next_learner(folder: Path) -> None:
    async with Counting(folder) as program:
        await (await program.learner.submit(example(0)))
        await program.learner.checkpoint()
        await (await program.learner.submit(example(1)))
        poisoned = await program.learner.submit(example(2, 1.0))
        await asyncio.wait([asyncio.ensure_future(poisoned.saved())])
        await program.learner.pause()
        await program.learner.submit_many([example(3), example(4)], key="k")
        await cancelled_close(program)
    async with Counting(folder) as program:
        learner = program.learner
        assert learner.state in {"recovering", "running"}
        ticket = await learner.submit(example(5))
        known = await learner.submit_many([example(3), example(4)], key="k")
        await ticket
        for each in known:
            await each
        assert program.learned() == [1, 1, 0, 1, 1, 1]
        assert ticket.number == 6
        assert [letter.number for letter in await learner.dead_letters()] == [3]


async def cancelled_close(program: Counting) -> None:
    """Close a learner as a crash would: nothing more is learned, no checkpoint saved."""
    program.learner.step_fn = never
    program.learner.resume()
    closing = asyncio.create_task(program.learner.aclose())
    while program.learner.state != "closing":
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])


async def never(ctx: ar.ReplicaContext, batch: Any) -> None:
    await asyncio.Event().wait()


@pytest.mark.asyncio
async def test_versions_are_never_used_twice(folder: Path) -> None:
    newest = 0
    for crash in (True, True, False):
        async with Counting(folder, max_batch=1) as program:
            learner = program.learner
            records = learner.records()
            for i in range(3):
                await (await learner.submit(example(i)))
            await learner.pause()
            if crash:
                await cancelled_close(program)
            versions = [record.version for record in [await anext(records) for _ in range(3)]]
        assert versions[0] > newest
        newest = max(learner.version, *versions)


@pytest.mark.asyncio
async def test_compaction_keeps_examples_newer_than_the_oldest_checkpoint(folder: Path) -> None:
    async with Counting(folder) as program:
        for i in range(5):
            await (await program.learner.submit(example(i)))
            assert await program.learner.checkpoint() == i + 1
        assert rows(folder) == [4, 5]  # checkpoints 3, 4 and 5 are there
    for step in (5, 4):
        next((folder / "checkpoints").glob(f"step-*{step}/data*")).write_bytes(b"damaged")
    program = Counting(folder)
    with pytest.warns(RuntimeWarning, match="step 5"):
        await program.__aenter__()
    async with aclosing(program):
        while not program.learner.is_ready:
            await asyncio.sleep(0)
        assert program.learned() == [1] * 5


def rows(folder: Path) -> list[int]:
    connection = sqlite3.connect(folder / "journal.db")
    try:
        return [number for (number,) in connection.execute("SELECT number FROM examples")]
    finally:
        connection.close()


@pytest.mark.asyncio
async def test_two_learners_on_one_journal_are_refused(folder: Path) -> None:
    async with Counting(folder):
        with pytest.raises(JournalError, match=r"in use: a learner of process \d+ has it open"):
            async with Counting(folder):
                pass
    async with Counting(folder):
        pass


async def learn_some(folder: Path, numbers: range, **options: Any) -> None:
    async with Counting(folder, **options) as program:
        for i in numbers:
            await program.learner.submit(example(i))


async def opening_fails(folder: Path, said: str, **options: Any) -> None:
    with pytest.raises(JournalError, match=said):
        async with Counting(folder, **options):
            pass


@pytest.mark.asyncio
async def test_a_journal_that_does_not_belong_to_the_checkpoint_is_refused(folder: Path) -> None:
    journal = folder / "journal.db"
    await learn_some(folder, range(3))
    old = journal.read_bytes()
    await learn_some(folder, range(3, 6))
    new = journal.read_bytes()
    journal.write_bytes(old)
    await opening_fails(
        folder, "learned examples up to 6, but the journal .* ends at 3: it is an older"
    )
    journal.unlink()
    await opening_fails(folder, "belongs to another journal")
    journal.write_bytes(new)
    (folder / "checkpoints").rename(folder / "gone")
    await opening_fails(folder, "begins at example 4, but what is restored has learned .* 0 only")
    (folder / "gone").rename(folder / "checkpoints")
    await learn_some(folder, range(6, 7))


@pytest.mark.asyncio
async def test_the_folder_of_a_journal_is_made(folder: Path) -> None:
    """As that of checkpoints, which stands beside it in the programs of the pages."""
    journal = folder / "data" / "new" / "journal.db"
    async with Counting(folder, journal=journal) as program:
        assert await (await program.learner.submit(example(0))) == 1
    assert journal.exists()


@pytest.mark.asyncio
async def test_a_damaged_journal_or_another_file_is_refused(folder: Path) -> None:
    journal = folder / "journal.db"
    journal.write_bytes(b"a poem\n" * 1000)
    await opening_fails(folder, "NOTADB.*It is damaged, or no journal")
    journal.unlink()
    other = sqlite3.connect(journal)
    other.execute("CREATE TABLE poems (line TEXT)")
    other.close()
    await opening_fails(folder, "an SQLite file but not a journal")
    other = sqlite3.connect(journal)
    assert other.execute("PRAGMA journal_mode").fetchall() == [("delete",)]  # as it was
    other.close()
    journal.unlink()
    (folder / "file").touch()
    await opening_fails(folder, "cannot be opened", journal=folder / "file" / "new" / "journal.db")
    async with Counting(folder, checkpoints=None) as program:
        await program.learner.submit_many([example(i) for i in range(40)])
    whole = journal.read_bytes()
    journal.write_bytes(whole[: len(whole) - 3000])
    await opening_fails(folder, "damaged|malformed", checkpoints=None)
    place = whole.index(b'\\"id\\":30')  # in the body of a row, which SQLite has no checksum for
    journal.write_bytes(whole[: place + 8] + b"1" + whole[place + 9 :])
    async with Counting(folder, checkpoints=None) as program:
        while program.learner.state != "failed":
            await asyncio.sleep(0.001)
        assert "Example 31 in the journal" in program.learner.statistics().failure
        assert program.learned() == [1] * 28  # whole batches before it
    with sqlite3.connect(journal) as other:
        other.execute("DELETE FROM examples WHERE number = 31")
    other.close()
    async with Counting(folder, checkpoints=None) as program:
        await (await program.learner.submit(example(40)))
        assert program.learned() == [1] * 30 + [0] + [1] * 10


@pytest.mark.asyncio
async def test_a_locked_journal_acknowledges_nothing_until_it_is_free(folder: Path) -> None:
    journal = Journal(folder / "journal.db", busy_timeout_s=0.01)
    async with Counting(folder, journal=journal) as program:
        learner = program.learner
        await (await learner.submit(example(0)))
        other = sqlite3.connect(folder / "journal.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JournalError, match=r"SQLITE_BUSY.*Another program has locked it"):
            await learner.submit(example(1))
        assert not learner.is_ready
        assert learner.snapshot().version == 1
        other.execute("ROLLBACK")
        other.close()
        await (await learner.submit(example(2)))
        assert learner.is_ready
    assert program.learned() == [1, 0, 1]


async def fill(learner: OnlineLearner, taken: list[int]) -> None:
    for i in range(1, 100):
        await learner.submit(example(i))
        taken.append(i)


class Failing:
    """Makes connections whose statements fail, when told: as a full disk makes them."""

    def __init__(self) -> None:
        self.fails_at: Callable[[str], bool] = lambda _statement: False
        self.commits_first = False

    def connect(self, *args: Any, **options: Any) -> Any:
        failing = self

        class Connection(sqlite3.Connection):
            def execute(self, statement: str, *values: Any) -> Any:
                if failing.fails_at(statement):
                    if failing.commits_first:
                        super().execute(statement, *values)
                    raise sqlite3.OperationalError("disk I/O error")
                return super().execute(statement, *values)

        return sqlite3.connect(*args, factory=Connection, **options)


@pytest.mark.asyncio
async def test_a_disk_without_room_for_the_index_of_the_log_can_be_read(folder: Path) -> None:
    """As SQLite behaves on one that is full to the last block, after a clean end."""
    is_full, modes = True, list[str]()

    class Connection(sqlite3.Connection):
        mode = "NORMAL"

        def execute(self, statement: str, *values: Any) -> Any:
            if statement == "PRAGMA locking_mode = EXCLUSIVE":
                self.mode = "EXCLUSIVE"
            if statement == "PRAGMA journal_mode = WAL":
                modes.append(self.mode)
                if is_full and self.mode == "NORMAL":
                    error = sqlite3.OperationalError("disk I/O error")
                    error.sqlite_errorname = "SQLITE_IOERR_SHMSIZE"
                    raise error
            if is_full and statement.startswith("INSERT"):
                raise sqlite3.OperationalError("database or disk is full")
            return super().execute(statement, *values)

    def connect(*args: Any, **options: Any) -> Any:
        return sqlite3.connect(*args, factory=Connection, **options)

    async with Counting(folder) as program:
        await (await program.learner.submit(example(0)))
    async with Counting(folder, journal=Journal(folder / "journal.db", connect=connect)) as program:
        assert modes == ["NORMAL", "EXCLUSIVE"]
        assert program.learner.snapshot()[program.counts][0] == 1
        assert await program.learner.dead_letters() == ()
        with pytest.raises(JournalError, match="disk is full"):
            await program.learner.submit(example(1))
        is_full = False
        await (await program.learner.submit(example(1)))
        assert modes[-1] == "NORMAL"  # so others can read it again
        assert program.learned() == [1, 1]


@pytest.mark.asyncio
async def test_a_full_disk_acknowledges_nothing_and_recovers(folder: Path) -> None:
    """The real thing but for the disk: SQLite's own limit of pages is reached, and lifted."""
    limit = 2**30

    class Connection(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> Any:
            if statement == "BEGIN IMMEDIATE":
                super().execute(f"PRAGMA max_page_count = {limit}")
            return super().execute(statement, *values)

    journal = Journal(
        folder / "journal.db", connect=lambda *a, **o: sqlite3.connect(*a, factory=Connection, **o)
    )
    async with Counting(folder, journal=journal, checkpoints=None) as program:
        learner = program.learner
        await (await learner.submit(example(0)))
        limit = 1  # no page more than there are
        taken = [0]
        with pytest.raises(JournalError, match=r"SQLITE_FULL.*Make room on the disk"):
            await fill(learner, taken)
        assert learner.statistics().journal_error
        assert not learner.is_ready
        assert learner.snapshot().version >= 1  # predictions go on
        limit = 2**30
        await (await learner.submit(example(150)))
        assert learner.is_ready
        assert [i for i, n in enumerate(program.learned()) if n] == [*taken, 150]
    async with Counting(folder, checkpoints=None) as program:  # nothing else is in the file
        while not program.learner.is_ready:
            await asyncio.sleep(0.001)
        assert [i for i, n in enumerate(program.learned()) if n] == [*taken, 150]


@pytest.mark.asyncio
@pytest.mark.parametrize("commits_first", [False, True])
async def test_a_commit_that_fails_may_have_kept_the_example(
    folder: Path, commits_first: bool
) -> None:
    """It is not acknowledged; if the file has it all the same it is learned, once, in its place."""
    failing = Failing()
    failing.commits_first = commits_first
    journal = Journal(folder / "journal.db", connect=failing.connect)
    async with Counting(folder, journal=journal) as program:
        learner = program.learner
        await learner.submit(example(0))
        failing.fails_at = lambda statement: statement == "COMMIT"
        with pytest.raises(JournalError, match="disk I/O error"):
            await learner.submit(example(1), key="k")
        failing.fails_at = lambda _statement: False
        again = await learner.submit(example(1), key="k")
        assert (again.number, again.is_duplicate) == (2, commits_first)
        await again
        await (await learner.submit(example(2)))
        assert learner.statistics().queue_depth == 0
    assert program.learned() == [1, 1, 1]
    async with Counting(folder) as program:
        assert program.learned() == [1, 1, 1]


@pytest.mark.asyncio
async def test_after_a_write_that_could_not_be_undone_the_file_says_what_there_is(
    folder: Path,
) -> None:
    """Neither COMMIT nor ROLLBACK comes through: the connection is still in its transaction."""
    failing = Failing()
    journal = Journal(folder / "journal.db", connect=failing.connect)
    async with Counting(folder, journal=journal) as program:
        learner = program.learner
        await learner.submit(example(0))
        failing.fails_at = lambda statement: statement in {"COMMIT", "ROLLBACK"}
        with pytest.raises(JournalError, match="disk I/O error"):
            await learner.submit(example(1), key="k")
        failing.fails_at = lambda _statement: False
        assert rows(folder) == [1]
        again = await learner.submit(example(1), key="k")
        assert (again.number, again.is_duplicate) == (2, False)
        assert rows(folder) == [1, 2]
    assert program.learned() == [1, 1]


@pytest.mark.asyncio
async def test_no_checkpoint_leaves_a_dead_letter_behind(folder: Path) -> None:
    failing = Failing()
    journal = Journal(folder / "journal.db", connect=failing.connect)
    async with Counting(folder, journal=journal) as program:
        learner = program.learner
        failing.fails_at = lambda statement: "INTO dead" in statement
        ticket = await learner.submit(example(0, 1.0))
        with pytest.raises(ar.errors.PoisonedExampleError):
            await ticket
        with pytest.raises(CheckpointError, match="disk I/O error"):
            await learner.checkpoint()
        failing.fails_at = lambda _statement: False
        await (await learner.submit(example(1)))
        assert await learner.checkpoint() == 2
        assert [letter.number for letter in await learner.dead_letters()] == [1]


@pytest.mark.asyncio
async def test_a_dead_letter_that_is_not_written_yet_is_one_for_who_asks_again(
    folder: Path,
) -> None:
    failing = Failing()
    journal = Journal(folder / "journal.db", connect=failing.connect)
    async with Counting(folder, journal=journal) as program:
        learner = program.learner
        failing.fails_at = lambda statement: "INTO dead" in statement
        bad = example(0, 1.0)
        tickets = [await learner.submit(bad, key="k")]
        with pytest.raises(ar.errors.PoisonedExampleError):
            await tickets[0]
        await learner.pause()  # it is behind the step
        tickets += [await learner.submit(bad, key="k"), await learner.ticket(1)]
        for ticket in tickets:
            with pytest.raises(ar.errors.PoisonedExampleError, match="1 was set aside: ValueError"):
                await ticket
        assert await learner.dead_letters() == ()
        failing.fails_at = lambda _statement: False
        learner.resume()
        await (await learner.submit(example(1)))  # there is room again, for the letter too
        assert [letter.number for letter in await learner.dead_letters()] == [1]
        await learner.discard(1)
        with pytest.raises(ar.errors.PoisonedExampleError, match="1 was set aside, and discarded"):
            await (await learner.submit(bad, key="k"))


@pytest.mark.asyncio
async def test_a_checkpoint_that_fails_is_told_and_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Counting(folder) as program:
        learner = program.learner
        await (await learner.submit(example(0)))
        monkeypatch.setattr(
            "aioreplica.checkpoint._storage.os.fsync",
            lambda _fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")),
        )
        with pytest.raises(CheckpointError):
            await learner.checkpoint()
        assert "full" in learner.statistics().checkpoint_error
        monkeypatch.undo()
        assert await learner.checkpoint() == 1
        assert learner.statistics().checkpoint_error == ""
    assert learner.statistics().num_checkpoints == 1


@pytest.mark.asyncio
async def test_a_journal_may_be_begun_later(folder: Path) -> None:
    async with Counting(folder, journal=None) as program:
        await program.learner.submit_many([example(0), example(1)])
    async with Counting(folder) as program:
        ticket = await program.learner.submit(example(2))
        assert ticket.number == 3
    async with Counting(folder) as program:
        assert program.learned() == [1, 1, 1]


def test_checkpoints_are_saved_when_they_are_due(folder: Path) -> None:
    async def main() -> None:
        home = Path(tempfile.mkdtemp(dir=folder))  # the schedule begins twice, as a save pauses
        async with Counting(home, checkpoint_every_s=30.0) as program:
            learner = program.learner
            await (await learner.submit(example(0)))
            await asyncio.sleep(29.0)
            assert learner.statistics().num_checkpoints == 0
            await asyncio.sleep(3.0)
            assert learner.statistics().checkpoint_number == 1
            await asyncio.sleep(100.0)  # nothing new
            assert learner.statistics().num_checkpoints == 1

    art.run(main)


class Cloud(ar.checkpoint.LocalStorage):
    """Fails as a library of another kind of storage may: with an error of its own."""

    is_down = False

    def replace(self, path: str, data: bytes) -> None:
        if self.is_down:
            raise RuntimeError("the cloud is down")
        super().replace(path, data)


@pytest.mark.asyncio
async def test_errors_of_a_foreign_storage_are_reported(folder: Path) -> None:
    cloud = Cloud(folder / "cloud")
    async with Counting(folder, checkpoints=ar.CheckpointManager(cloud)) as program:
        learner = program.learner
        await (await learner.submit(example(0)))
        cloud.is_down = True
        with pytest.raises(CheckpointError, match="the cloud is down"):
            await learner.checkpoint()
        assert "the cloud is down" in learner.statistics().checkpoint_error
        with pytest.raises(CheckpointError, match="the cloud is down"):
            await learner.aclose()
