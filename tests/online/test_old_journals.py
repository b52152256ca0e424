"""Journals of older releases: a dump of each version is opened, learned and gone on with."""

import sqlite3
from pathlib import Path

import pytest

from aioreplica.errors import JournalError, PoisonedExampleError
from aioreplica.online import Journal
from aioreplica.online._journal_format import VERSION

from .program import RAISES, Counting, example

STORED = Path(__file__).parent / "stored"


def restore(version: int, path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.executescript((STORED / f"journal_{version}.sql").read_text(encoding="utf-8"))
    connection.close()


def version_of(path: Path) -> int:
    connection = sqlite3.connect(path)
    [[version]] = connection.execute("PRAGMA user_version")
    connection.close()
    return int(version)


def test_there_is_a_dump_of_each_older_version() -> None:
    stored = {int(path.stem.rpartition("_")[2]) for path in STORED.glob("journal_*.sql")}
    assert stored == {*range(1, VERSION)}


@pytest.mark.asyncio
@pytest.mark.parametrize("version", range(1, VERSION))
async def test_they_are_learned_and_gone_on_with(folder: Path, version: int) -> None:
    path = folder / "journal.db"
    restore(version, path)
    journal = Journal(path, label_ttl_s=60.0)
    async with Counting(folder, max_batch=1, journal=journal) as program:
        learner = program.learner
        again = await learner.submit(example(0), key="a")
        assert (again.number, again.is_duplicate) == (1, True)
        for key, i, number in (("c", 3, 4), ("d", 4, 5)):
            dead = await learner.submit(example(i, RAISES), key=key)
            assert dead.number == number
            with pytest.raises(PoisonedExampleError, match="set aside"):
                await dead
        learner.expect(example(0), prediction_id="x")
        await (await learner.submit(example(6)))
        assert "input" in await learner.expected("x")
        if version >= 3:
            assert (await learner.expected("old"))["input"]["id"] == 7
        assert program.learned() == [1, 1, 1, 0, 0, 1, 1]
        assert await learner.checkpoint() == 7
        await learner.rollback(7)
    assert version_of(path) == VERSION
    async with Counting(folder) as reopened:
        assert reopened.learned() == [1, 1, 1, 0, 0, 1, 1]


def test_newer_ones_are_refused_and_stay_as_they_are(folder: Path) -> None:
    path = folder / "journal.db"
    restore(1, path)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()
    said = rf"version {VERSION + 1} of the format.*versions 1 to {VERSION}"
    with pytest.raises(JournalError, match=said):
        Journal(path).file().open()
    assert version_of(path) == VERSION + 1
