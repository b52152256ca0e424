"""Labels that come later: an input waits under an id, and becomes one example with its label."""

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.errors import ContextError, JournalError, KeyReusedError
from aioreplica.online import ExampleSpec, Journal, OnlineLearner
from aioreplica.online import _intake as intake
from aioreplica.online._journal_format import Dead, Entry, Label, Waiting
from tests.conftest import mirrored

TTL_S = 60.0


class Seen:
    """A learner whose variables say which inputs were learned with which targets."""

    def __init__(self, folder: Path | None, **options: Any) -> None:
        self.strategy = mirrored(1)
        with self.strategy.scope():
            self.targets = ar.Variable(np.zeros(50), aggregation="sum")
            self.counts = ar.Variable(np.zeros(50, np.int64), aggregation="sum")
        journal = None if folder is None else Journal(folder / "journal.db", label_ttl_s=TTL_S)
        settings: dict[str, Any] = {
            "max_batch": 4, "max_delay_s": 0.0, "queue_size": 20, "journal": journal
        }  # fmt: skip
        variables = {"targets": self.targets, "counts": self.counts}
        self.learner = OnlineLearner(self.strategy, self.step, variables, **(settings | options))

    async def step(self, ctx: ar.ReplicaContext, batch: Any) -> None:
        await self.targets.assign_add(np.bincount(batch["input"], batch["target"], 50))
        await self.counts.assign_add(np.bincount(batch["input"], minlength=50))

    def learned(self) -> dict[int, float]:
        assert self.counts.value.max() <= 1
        return {int(i): float(self.targets.value[i]) for i in np.flatnonzero(self.counts.value)}


@asynccontextmanager
async def opened(folder: Path | None, **options: Any) -> AsyncIterator[Seen]:
    program = Seen(folder, **options)
    async with program.strategy, program.learner:
        yield program


@pytest.mark.asyncio
async def test_an_input_and_its_label_become_one_example(folder: Path) -> None:
    async with opened(folder) as program:
        learner = program.learner
        names = [learner.expect(i, np.array([i / 2])) for i in range(3)]
        assert len({*names}) == 3
        ticket = await learner.label(names[1], 7.0)
        assert (ticket.number, ticket.is_duplicate) == (1, False)
        await ticket
        assert program.learned() == {1: 7.0}
        assert (await learner.expected(names[2]))["prediction"] == np.array([1.0])
        with pytest.raises(KeyError, match=names[1]):
            await learner.expected(names[1])
        now = learner.statistics()
        counts = (now.num_expected, now.num_labelled, now.num_unknown_labels, now.num_taken)
        assert counts == (3, 1, 0, 1)
    async with opened(folder) as again:  # it waits through a restart, and the label comes then
        await (await again.learner.label(names[2], 9.0))
        assert again.learned() == {1: 7.0, 2: 9.0}


@pytest.mark.asyncio
async def test_a_label_sent_again_gives_the_first_number(folder: Path) -> None:
    async with opened(folder) as program:
        learner = program.learner
        name = learner.expect(4)
        first = await learner.label(name, 1.0)
        again = await learner.label(name, 1.0)
        assert (again.number, again.is_duplicate) == (first.number, True)
        assert await again == await first
        with pytest.raises(KeyReusedError, match=rf"{name}.* had another label before; example 1"):
            await learner.label(name, 2.0)
        assert program.learned() == {4: 1.0}
        assert learner.statistics().num_unknown_labels == 0
        assert learner.statistics().queue_depth == 0


@pytest.mark.asyncio
async def test_unknown_ones_are_refused_and_counted(folder: Path) -> None:
    async with opened(folder) as program:
        learner = program.learner
        with pytest.raises(KeyError, match="nobody"):
            await learner.label("nobody", 1.0)
        with pytest.raises(KeyError, match="nobody"):
            await learner.expected("nobody")
        now = learner.statistics()
        assert (now.num_unknown_labels, now.queue_depth, now.num_taken) == (1, 0, 0)
        for bad in ("", "a" * 201, "\0label x", "\ud800"):
            with pytest.raises(ValueError, match="text of 1 to 200 characters"):
                learner.expect(1, prediction_id=bad)
            with pytest.raises(ValueError, match="text of 1 to 200 characters"):
                await learner.submit({"input": 1, "target": 1.0}, key=bad)
        with pytest.raises(TypeError, match="made of dicts"):
            learner.expect("text")


@pytest.mark.asyncio
async def test_what_validate_refuses_goes_on_waiting(folder: Path) -> None:
    spec = ExampleSpec({"input": 0, "target": 0.0})
    async with opened(folder, validate=spec) as program:
        learner = program.learner
        name = learner.expect(4)
        with pytest.raises(ValueError, match="expected float"):
            await learner.label(name, np.zeros(2))
        await (await learner.label(name, 2))
        assert program.learned() == {4: 2.0}


@pytest.mark.asyncio
async def test_without_a_time_to_live_nothing_is_kept(folder: Path) -> None:
    for journal in (None, folder / "journal.db"):
        async with opened(None, journal=journal) as program:
            assert not program.learner.keeps_inputs
            with pytest.raises(ContextError, match="label_ttl_s=86400"):
                program.learner.expect(1)
            with pytest.raises(ContextError, match="label_ttl_s=86400"):
                await program.learner.label("x", 1.0)


@pytest.mark.asyncio
async def test_a_label_with_an_id_of_the_caller_takes_the_newest_input(folder: Path) -> None:
    async with opened(folder) as program:
        learner = program.learner
        for i in (1, 2):
            assert learner.expect(i, prediction_id="ad 7") == "ad 7"
        await (await learner.label("ad 7", 3.0))
        assert program.learned() == {2: 3.0}


@pytest.mark.asyncio
async def test_predictions_do_not_wait_for_a_disk_that_is_full(folder: Path) -> None:
    fails = True

    class Failing:
        def __init__(self, connection: Any) -> None:
            self.connection = connection

        def execute(self, statement: str, *values: Any) -> Any:
            if fails and statement.startswith("INSERT OR REPLACE INTO pending"):
                raise sqlite3.OperationalError("database or disk is full")
            return self.connection.execute(statement, *values)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.connection, name)

    journal = Journal(
        folder / "journal.db",
        label_ttl_s=TTL_S,
        connect=lambda *args, **options: Failing(sqlite3.connect(*args, **options)),
    )
    async with opened(None, journal=journal) as program:
        learner = program.learner
        name = learner.expect(1)
        with pytest.raises(JournalError, match="disk is full"):
            await learner.label(name, 1.0)
        assert "disk is full" in learner.statistics().journal_error
        for i in range(intake.MAX_WAITING - 1):  # they wait in memory, but not without end
            learner.expect(i % 50)
        with pytest.raises(anyio.WouldBlock):
            learner.expect(0)
        assert learner.statistics().num_expected == 0
        fails = False
        await (await learner.label(name, 1.0))
        assert learner.statistics().num_expected == intake.MAX_WAITING
        assert learner.expect(3)
        assert program.learned() == {1: 1.0}


def file_of(folder: Path, keep_keys_s: float = 86400.0) -> Any:
    file = Journal(folder / "journal.db", label_ttl_s=10.0, keep_keys_s=keep_keys_s).file()
    file.open()
    return file


def labelled(name: str, x: int, target: float) -> Entry:
    return Entry([{"input": x, "target": target}], label=Label(name, target))


def test_they_are_forgotten_by_the_journals_clock(folder: Path) -> None:
    file = file_of(folder, keep_keys_s=100.0)
    try:
        file.append([], 0.0, [Waiting(name, {"input": 1}) for name in "ab"])
        assert file.waiting("a", 10.0) is not None
        assert file.waiting("a", 10.5) is None
        assert file.append([labelled("a", 1, 2.0)], 10.0).results == [(1, False)]
        [error] = file.append([labelled("b", 1, 2.0)], 10.5).results
        assert isinstance(error, KeyError)
        assert file.append([labelled("a", 1, 2.0)], 90.0).results == [(1, True)]
        file.compact([0], 10.5)
        assert file.waiting("b", 0.0) is None  # its row is gone
        [error] = file.append([labelled("a", 1, 2.0)], 110.5).results
        assert isinstance(error, KeyError)  # as unknown as it would be to a new journal
    finally:
        file.close()


def test_keys_of_submissions_and_ids_do_not_meet(folder: Path) -> None:
    file = file_of(folder)
    try:
        file.append([Entry([{"input": 5}], key="a")], 0.0, [Waiting("a", {"input": 1})])
        assert file.append([labelled("a", 1, 2.0)], 0.0).results == [(2, False)]
        file.set_aside([Dead(2, "bad", 0.0)])
        assert file.discard(2)
        assert file.append([labelled("a", 1, 2.0)], 0.0).results == [(2, True)]
        assert file.fates([2]) == {2: 0}
    finally:
        file.close()


def test_a_damaged_row_is_said(folder: Path) -> None:
    file = file_of(folder)
    try:
        file.append([], 0.0, [Waiting("a", {"input": 1})])
        connection = sqlite3.connect(folder / "journal.db")
        connection.execute("UPDATE pending SET crc32 = crc32 + 1")
        connection.commit()
        connection.close()
        with pytest.raises(JournalError, match=r"The prediction 'a' .* is damaged"):
            file.waiting("a", 0.0)
    finally:
        file.close()


@pytest.mark.slow
def test_predictions_labels_and_their_repetitions_in_any_order(folder: Path) -> None:
    async def main() -> None:
        at = folder / "run"
        shutil.rmtree(at, ignore_errors=True)
        at.mkdir()
        async with opened(at) as program:
            learner = program.learner
            numbers: set[int] = set()

            async def client(i: int, name: str) -> None:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(2):
                        tasks.create_task(give(name, float(i)))

            async def give(name: str, target: float) -> None:
                ticket = await learner.label(name, target)
                await ticket
                assert ticket.number is not None
                numbers.add(ticket.number)

            async with asyncio.TaskGroup() as tasks:
                for i in range(1, 4):
                    tasks.create_task(client(i, learner.expect(i)))
            assert numbers == {1, 2, 3}
            assert program.learned() == {1: 1.0, 2: 2.0, 3: 3.0}
            assert learner.statistics().queue_depth == 0

    art.explore(main, schedules=60).check()
