"""`online show` and `online rollback`: what they print, what they change, and how they end."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from aioreplica.cli import main
from aioreplica.online import Journal
from aioreplica.online._journal_format import Dead
from tests.online.program import RAISES, Counting, example

pytest.importorskip("typer")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three examples, of which the last one is a dead letter; checkpoints behind the first two."""

    async def learn() -> None:
        async with Counting(tmp_path, max_batch=1) as program:
            for i in range(3):
                ticket = await program.learner.submit(example(i, RAISES if i == 2 else 0.0))
                while not ticket.is_done:
                    await asyncio.sleep(0)
                if i < 2:
                    await program.learner.checkpoint()

    asyncio.run(learn())
    return tmp_path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["online", *map(str, arguments)])
        assert isinstance(end.value.code, int)
        return end.value.code, *capsys.readouterr()

    return call


def test_a_closed_learner_is_rolled_back(folder: Path, run: Run) -> None:
    journal, checkpoints = folder / "journal.db", folder / "checkpoints"
    code, out, err = run("rollback", journal, checkpoints, "--to", 1, "--skip", 2)
    assert (code, err) == (0, "")
    assert out == "begins with checkpoint\t1\nleaves out\t2\n"

    code, out, err = run("show", journal)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[:2] == ["examples\t2 to 3", "rollback 1\tto 1"]
    assert [line.split("\t")[::2] for line in lines[2:]] == [
        ["2", "Left out by the rollback to 1"],
        ["3", "ValueError: a bad mood"],
    ]

    async def look() -> list[int]:
        async with Counting(folder) as program:
            return program.learned()

    assert asyncio.run(look()) == [1]


def test_another_model_is_promoted(folder: Path, run: Run) -> None:
    journal = folder / "journal.db"
    file = Journal(journal).file()
    file.open()
    for model in ("second", "third"):
        file.attach(model, 2, 0.0)
    file.detach("third", "it was late")
    file.close()
    assert run("promote", journal, "second") == (0, "champion\tsecond\n", "")
    code, out, _ = run("show", journal)
    assert code == 0
    assert out.splitlines()[1:4] == [
        "model main\tup to 2",
        "model second\tup to 2, champion",
        "model third\tup to 2, detached: it was late",
    ]
    code, _, err = run("promote", journal, "fourth")
    assert (code, err.count("there are only 'main', 'second', 'third'.")) == (1, 1)
    code, _, err = run("promote", journal, "third")
    assert code == 1
    assert "is detached: it was late" in err


def test_what_is_not_possible_is_said(folder: Path, run: Run) -> None:
    journal, checkpoints = folder / "journal.db", folder / "checkpoints"
    code, out, err = run("rollback", journal, checkpoints, "--to", 0)
    assert (code, out) == (1, "")
    assert "the oldest one is 1" in err
    assert run("rollback", journal, checkpoints)[0] == 2
    assert run("show", folder / "none.db")[0] == 2
    (folder / "text").write_text("no journal, but long enough for a header" * 9)
    code, out, err = run("show", folder / "text")
    assert (code, out) == (1, "")
    assert "NOTADB" in err


def test_dead_letters_and_rollbacks_of_all_models_are_shown(folder: Path, run: Run) -> None:
    journal = folder / "journal.db"
    file = Journal(journal).file()
    file.open()
    file.attach("second", 1, 0.0)
    file.set_aside([Dead(2, "ValueError: another mood", 0.0)], "second")
    file.roll_back(1, 2, [], 0.0, "second")
    file.close()

    code, out, err = run("show", journal)

    assert (code, err) == (0, "")
    lines = [line.split("\t") for line in out.splitlines()]
    assert ["rollback second 1", "to 2"] in lines
    assert [line[::2] for line in lines if len(line) == 3] == [
        ["3 (main)", "ValueError: a bad mood"],
        ["2 (second)", "ValueError: another mood"],
    ]


@pytest.mark.parametrize("has_tables", [True, False])
def test_what_is_no_journal_is_left_as_it_is(folder: Path, run: Run, has_tables: bool) -> None:
    other = folder / "other.db"
    other.touch()
    if has_tables:
        with closing(sqlite3.connect(other)) as connection:
            connection.execute("CREATE TABLE users (name)")
    before = other.read_bytes()

    code, out, err = run("show", other)

    assert (code, out) == (1, "")
    assert ("not a journal" if has_tables else "is empty") in err
    assert other.read_bytes() == before
    assert [path.name for path in folder.glob("other*")] == ["other.db"]


def test_an_older_journal_is_shown_and_stays_one(folder: Path, run: Run) -> None:
    older = folder / "older.db"
    stored = Path(__file__).parents[1] / "online" / "stored" / "journal_3.sql"
    with closing(sqlite3.connect(older)) as connection:
        connection.executescript(stored.read_text(encoding="utf-8"))
    before = older.read_bytes()

    code, out, err = run("show", older)

    assert (code, err) == (0, "")
    assert out.startswith("examples\t")
    assert older.read_bytes() == before


def test_a_learner_that_is_open_has_its_journal_to_itself(folder: Path, run: Run) -> None:
    async def main() -> None:
        async with Counting(folder):
            code, _, err = run("show", folder / "journal.db")
            assert code == 1
            assert "is in use" in err

    asyncio.run(main())
