"""Sources: each example is taken once with its offset, whatever fails or comes between."""

import asyncio
import itertools
import logging
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.errors import JournalError
from aioreplica.online import ExampleSpec, FolderSource, Journal, OnlineLearner
from aioreplica.online._journal_format import Entry, Progress
from aioreplica.online._journal_keys import offset
from tests.checkpoint.simulated_files import SimulatedFiles, SimulatedStorage

from .program import RAISES, Counting, example
from .test_simulated_disk import Disk, Recorder, crashes


class Listed:
    """A source of a list; `failures` are raised first, and it waits at the end."""

    def __init__(
        self, examples: Sequence[object], failures: Sequence[Exception] = (), size: int = 3
    ) -> None:
        self.examples = list(examples)
        self.failures = list(failures)
        self.size = size
        self.asked: list[str | None] = []

    async def read(self, *, after: str | None) -> Sequence[tuple[str, object]]:
        self.asked.append(after)
        if self.failures:
            raise self.failures.pop(0)
        begin = 0 if after is None else int(after)
        found = self.examples[begin : begin + self.size]
        if not found:
            await asyncio.Event().wait()
        return [(str(begin + i), each) for i, each in enumerate(found, 1)]


async def until_learned(learner: OnlineLearner, number: int, pause_s: float = 0.0) -> None:
    while learner.statistics().learned_number < number:
        await asyncio.sleep(pause_s)


@pytest.mark.asyncio
async def test_examples_are_learned_once_across_restarts(folder: Path) -> None:
    source = Listed([example(i) for i in range(5)], size=4)
    async with Counting(folder, sources={"list": source}, queue_size=3) as program:
        await until_learned(program.learner, 5)
        assert source.asked[:2] == [None, "4"]
        found = program.learner.statistics().sources["list"]
        assert (found.offset, found.num_taken, found.num_refused, found.error) == ("5", 5, 0, "")
    source = Listed([example(i) for i in range(8)])
    async with Counting(folder, sources={"list": source}) as again:
        await until_learned(again.learner, 8)
        assert source.asked[0] == "5"
        assert again.learned() == [1] * 8


@pytest.mark.asyncio
async def test_what_is_no_example_is_passed_counted_and_logged(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = [example(0), {"id": "text"}, ValueError("no JSON"), example(1), example(2, RAISES)]
    source = Listed([*given, {"id": 1.5}])
    spec = ExampleSpec(example(0))
    with caplog.at_level(logging.WARNING, "aioreplica.online"):
        async with Counting(folder, sources={"list": source}, validate=spec) as program:
            await until_learned(program.learner, 3)
            while program.learner.statistics().sources["list"].offset != "6":
                await asyncio.sleep(0)
            found = program.learner.statistics().sources["list"]
            assert (found.num_taken, found.num_refused) == (3, 3)
            assert found.refused.startswith("at 6: ValueError: The example")
            assert program.learned() == [1, 1]
            assert program.learner.statistics().num_dead == 1
    assert "The source 'list' has no example at 3: ValueError: ValueError: no JSON" in caplog.text


def test_a_source_that_fails_is_asked_again_later_and_later(folder: Path) -> None:
    times: list[float] = []

    class Timed(Listed):
        async def read(self, *, after: str | None) -> Sequence[tuple[str, object]]:
            times.append(asyncio.get_running_loop().time())
            return await super().read(after=after)

    async def main() -> None:
        source = Timed([example(0)], [ConnectionError("no route")] * 3)
        async with Counting(folder, sources={"list": source}) as program:
            learner = program.learner
            while not source.asked:
                await asyncio.sleep(0.01)  # virtual
            assert learner.statistics().sources["list"].error == "ConnectionError: no route"
            await until_learned(learner, 1, 0.01)
            assert learner.statistics().sources["list"].error == ""

    art.run(main)
    waited = [round(b - a, 1) for a, b in itertools.pairwise(times)]
    assert waited[:3] == [0.1, 0.2, 0.4]


@pytest.mark.parametrize("is_written", [False, True])
def test_a_commit_that_fails_or_seems_to_is_neither_lost_nor_repeated(
    folder: Path, is_written: bool
) -> None:
    left = 2

    class Failing:
        def __init__(self, connection: Any) -> None:
            self.connection = connection
            self.has_offset = False

        def execute(self, statement: str, *values: Any) -> Any:
            nonlocal left
            self.has_offset |= statement.startswith("INSERT OR REPLACE INTO offsets")
            if statement == "COMMIT" and self.has_offset and left:
                left -= 1
                if is_written:
                    self.connection.execute("COMMIT")
                raise sqlite3.OperationalError("disk I/O error")
            return self.connection.execute(statement, *values)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.connection, name)

    journal = Journal(
        folder / "journal.db",
        connect=lambda *args, **options: Failing(sqlite3.connect(*args, **options)),
    )

    async def main() -> None:
        source = Listed([example(i) for i in range(7)])
        async with Counting(folder, journal=journal, sources={"list": source}) as program:
            while program.learner.statistics().sources["list"].offset != "7":
                await asyncio.sleep(0.01)  # virtual
            await until_learned(program.learner, 7, 0.01)
            assert program.learned() == [1] * 7

    art.run(main)


@pytest.mark.asyncio
async def test_a_source_waits_for_room_and_goes_on(folder: Path) -> None:
    source = Listed([example(i) for i in range(9)])
    options: dict[str, Any] = {"queue_size": 3, "max_batch": 2}
    async with Counting(folder, sources={"list": source}, **options) as program:
        learner = program.learner
        await learner.pause()
        while learner.statistics().queue_depth < 3:
            await asyncio.sleep(0)
        assert learner.statistics().sources["list"].num_taken <= 3
        learner.resume()
        await until_learned(learner, 9)
        assert program.learned() == [1] * 9


@pytest.mark.asyncio
async def test_closing_ends_a_read_and_learns_what_was_taken(folder: Path) -> None:
    source = Listed([example(i) for i in range(3)])
    async with Counting(folder, sources={"list": source}) as program:
        while program.learner.statistics().sources["list"].num_taken < 3:
            await asyncio.sleep(0)
    assert program.learned() == [1, 1, 1]
    assert source.asked == [None, "3"]


def test_closing_ends_a_source_that_swallows_a_cancellation(folder: Path) -> None:
    class Stubborn:
        num_swallowed = 0

        async def read(self, *, after: str | None) -> Any:
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    if self.num_swallowed == 2:
                        raise
                    self.num_swallowed += 1

    async def main() -> None:
        source = Stubborn()
        async with Counting(folder, sources={"stubborn": source}) as program:
            await (await program.learner.submit(example(0)))
        assert source.num_swallowed == 2
        assert program.learned() == [1]

    art.run(main)


def test_an_offset_that_is_not_the_next_one_changes_nothing(folder: Path) -> None:
    file = Journal(folder / "journal.db").file()
    file.open()
    try:
        first = Entry([example(0)], progress=Progress("a", None, "1"))
        assert file.append([first], 0.0).results == [(1, False)]
        [error] = file.append([first], 0.0).results
        assert isinstance(error, JournalError)
        assert "stands at '1' in the journal, not at None" in str(error)
        assert (file.read(offset, "a"), file.read(offset, "b")) == ("1", None)
        other = Entry([example(0)], progress=Progress("b", None, "x"))
        assert file.append([other], 0.0).results == [(2, False)]
    finally:
        file.close()


def test_what_is_no_source_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="sources need a journal"):
        Counting(sources={"list": Listed([])})
    for bad in ([Listed([])], {"a": object()}, {1: Listed([])}, {"\udcff": Listed([])}):
        with pytest.raises(TypeError, match="sources are"):
            Counting(folder, sources=bad)
    with pytest.raises(ValueError, match="greater than 0"):
        FolderSource(folder, poll_s=0.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("offset", [1, "\udcff"])
async def test_an_offset_that_no_file_takes_is_the_sources_error(
    folder: Path, offset: object
) -> None:
    class Wrong:
        async def read(self, *, after: str | None) -> Any:
            return [(offset, example(0))]

    async with Counting(folder, sources={"wrong": Wrong()}) as program:
        while not program.learner.statistics().sources["wrong"].error:
            await asyncio.sleep(0)
        now = program.learner.statistics()
        assert now.sources["wrong"].error == (
            "TypeError: A source gives pairs of an offset, which is text without lone surrogates; "
            f"got {offset!r}."
        )
        assert now.journal_error == ""


# ---- schedules and crashes -----------------------------------------------------------------


@pytest.mark.slow
def test_sources_clients_and_a_restart_in_any_order(folder: Path) -> None:
    async def main() -> None:
        at = folder / "run"
        shutil.rmtree(at, ignore_errors=True)
        at.mkdir()
        options: dict[str, Any] = {"num_replicas": 1, "queue_size": 2, "max_batch": 2}
        async with Counting(at, sources={"a": Listed([example(0), example(1)])}, **options) as one:
            await asyncio.gather(*(one.learner.submit(example(i)) for i in (5, 6)))
        sources = {"a": Listed([example(i) for i in range(4)]), "b": Listed([example(4)])}
        async with Counting(at, sources=sources, **options) as two:
            await until_learned(two.learner, 7, 0.01)  # virtual
            assert two.learned() == [1] * 7

    art.explore(main, schedules=20).check()


NUM_EXAMPLES = 8
CRASHES = [20, pytest.param(60, marks=pytest.mark.xslow)]


def on_disk(files: SimulatedFiles, folder: Path) -> Counting:
    return Counting(
        journal=Journal(folder / "journal.db", connect=Disk(files).connect),
        checkpoints=ar.CheckpointManager(SimulatedStorage(files), max_to_keep=2),
        sources={"list": Listed([example(i) for i in range(NUM_EXAMPLES)], size=2)},
        max_batch=2,
    )


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore:Restored step")
@pytest.mark.parametrize("num_crashes", CRASHES)
async def test_offsets_survive_any_loss_of_unsynced_data(num_crashes: int, folder: Path) -> None:
    files = SimulatedFiles()
    recorder = Recorder(files, set())
    async with on_disk(files, folder) as program:
        for number in (3, NUM_EXAMPLES):
            await until_learned(program.learner, number)
            await program.learner.checkpoint()
    for disk, _ in crashes(files, recorder, num_crashes, seed=1):
        async with on_disk(disk, folder) as program:
            await until_learned(program.learner, NUM_EXAMPLES)
            assert program.learned() == [1] * NUM_EXAMPLES
            assert program.learner.statistics().last_number == NUM_EXAMPLES
