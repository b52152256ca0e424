"""Rollbacks: what was learned counts no more, and is learned again without some examples."""

import asyncio
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.checkpoint import LocalStorage, remove_step
from aioreplica.errors import CheckpointError, ContextError, JournalError, PoisonedExampleError
from aioreplica.online import Journal, roll_back_closed
from aioreplica.online import _generations as generations
from aioreplica.online._journal_format import Rollback
from tests.checkpoint.simulated_files import SimulatedFiles, SimulatedStorage

from .program import RAISES, Counting, example
from .test_simulated_disk import CRASHES, Disk, Recorder, crashes


async def learn(program: Counting, *numbers: int, checkpoint: bool = True) -> None:
    for i in numbers:
        await (await program.learner.submit(example(i)))
    if checkpoint:
        await program.learner.checkpoint()


async def until_caught_up(program: Counting) -> None:
    while not program.learner.is_ready:
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_examples_behind_it_are_learned_again_but_for_some(folder: Path) -> None:
    async with Counting(folder, max_batch=1) as program:
        learner = program.learner
        await learn(program, 0, 1, 2)
        await learn(program, 3, 4)
        await learn(program, 5, checkpoint=False)
        seen, weight = learner.version, learner.snapshot()[program.weight]
        assert await learner.rollback(to=4, skip=[5]) == 3
        assert program.manager is not None
        assert program.manager.steps() == (3,)
        now = learner.statistics()
        assert (now.generation, now.rollback_from, now.checkpoint_number) == (1, 3, 3)
        assert learner.version > seen
        await until_caught_up(program)
        assert program.learned() == [1, 1, 1, 1, 0, 1]
        assert program.adam.iterations.value == 5
        assert learner.snapshot()[program.weight] != weight
        [letter] = await learner.dead_letters()
        assert (letter.number, letter.error) == (5, "Left out by the rollback to 4")
        await learn(program, 6)
        version = learner.version
        again = await learner.retry(5)
        await again
    async with Counting(folder) as restarted:
        await until_caught_up(restarted)
        assert restarted.learned() == [1] * 7
        assert restarted.learner.version > version
        assert restarted.learner.statistics().generation == 1


@pytest.mark.asyncio
async def test_the_bits_are_those_of_a_run_without_the_examples(folder: Path) -> None:
    async with Counting(folder, max_batch=1) as program:
        await learn(program, 0, 1)
        await learn(program, *range(2, 9), checkpoint=False)
        await program.learner.rollback(to=2, skip=[4, 9])
        await until_caught_up(program)
        found = program.learner.snapshot()[program.weight]
    async with Counting(max_batch=1) as offline:
        await learn(offline, 0, 1, 2, 4, 5, 6, 7, checkpoint=False)
        assert offline.learner.snapshot()[offline.weight].tobytes() == found.tobytes()


@pytest.mark.asyncio
async def test_queued_examples_are_left_out_too_and_their_tickets_say_so(folder: Path) -> None:
    async with Counting(folder, queue_size=4) as program:
        learner = program.learner
        await learn(program, 0)
        await learner.pause()
        tickets = [await learner.submit(example(i)) for i in range(1, 5)]
        assert learner.statistics().queue_depth == 4
        await learner.rollback(to=1, skip=[3])
        with pytest.raises(PoisonedExampleError, match="Left out by the rollback to 1"):
            await tickets[1]
        assert learner.statistics().queue_depth == 3
        assert learner.state == "paused"
        learner.resume()
        await tickets[3]
        assert program.learned() == [1, 1, 0, 1, 1]
    async with Counting(folder) as again:
        assert again.learned() == [1, 1, 0, 1, 1]


@pytest.mark.asyncio
async def test_a_learner_that_failed_goes_on(folder: Path) -> None:
    async with Counting(folder, max_batch=1) as program:
        learner = program.learner
        await learn(program, 0)
        tickets = [await learner.submit(example(i, RAISES)) for i in range(1, 7)]
        while learner.state != "failed":
            await asyncio.sleep(0)
        await learner.rollback(to=1, skip=range(2, 8))
        await until_caught_up(program)
        await learn(program, 9)
        assert tickets[-1].is_done
        assert program.learned() == [1] + [0] * 8 + [1]


@pytest.mark.asyncio
async def test_impossible_ones_change_nothing(folder: Path) -> None:
    async with Counting(folder, max_batch=1) as program:
        learner, before = program.learner, program.counts.value
        wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"to": 0}, ValueError, "behind which the journal has all examples: there is none"),
            ({"to": -1}, ValueError, "not be negative"),
            ({"to": 1.0}, TypeError, "to must be an int"),
            ({"to": 1, "skip": [1]}, ValueError, "learned by then. Go back to 0 or before"),
            ({"to": 1, "skip": ["2"]}, TypeError, "numbers of examples"),
            ({"to": 9}, ValueError, "Only 0 examples are learned: there is no way back to 9"),
        ]
        for arguments, error, said in wrong:
            with pytest.raises(error, match=said):
                await learner.rollback(**arguments)
        await learn(program, 0, 1)
        with pytest.raises(ValueError, match="oldest one is 2"):
            await learner.rollback(to=1)
        with pytest.raises(ValueError, match="no examples of these numbers to leave out: 7, 8"):
            await learner.rollback(to=2, skip=[7, 8])
        assert learner.statistics().generation == 0
        assert program.learned() == [1, 1]
        assert before.sum() == 0
    async with Counting() as bare:
        with pytest.raises(ContextError, match="a journal and checkpoints"):
            await bare.learner.rollback(to=1)


@pytest.mark.asyncio
async def test_a_damaged_checkpoint_is_said_and_nothing_changes(folder: Path) -> None:
    async with Counting(folder, max_batch=1) as program:
        await learn(program, 0)
        await learn(program, 1, 2, checkpoint=False)
        [data] = (folder / "checkpoints").glob("*0001/*.safetensors")
        data.write_bytes(data.read_bytes()[:-64] + b"?" * 64)
        with pytest.raises(CheckpointError, match="checksum"):
            await program.learner.rollback(to=1)
        assert program.learned() == [1, 1, 1]
        await learn(program, 3)
        assert program.learner.statistics().generation == 0
        assert program.adam.iterations.value == 4


class Failing:
    """SQLite that fails at statements that begin so, before or behind them."""

    def __init__(self) -> None:
        self.at: dict[str, str] = {}

    def connect(self, path: str, **options: Any) -> Any:
        inner = sqlite3.connect(path, **options)
        failing = self

        class Connection:
            close, executemany = inner.close, inner.executemany

            def execute(self, statement: str, *values: Any) -> Any:
                for begin, when in failing.at.items():
                    if statement.startswith(begin):
                        if when == "behind":
                            inner.execute(statement, *values)
                        raise sqlite3.OperationalError("disk I/O error")
                return inner.execute(statement, *values)

        return Connection()


@pytest.mark.asyncio
@pytest.mark.parametrize("when", ["before", "behind"])
async def test_a_commit_that_fails_is_looked_up(folder: Path, when: str) -> None:
    failing = Failing()
    journal = Journal(folder / "journal.db", connect=failing.connect)
    async with Counting(folder, journal=journal, max_batch=1) as program:
        learner = program.learner
        await learn(program, 0)
        await learn(program, 1, 2, checkpoint=False)
        await learner.pause()
        failing.at = {"COMMIT": when}
        if when == "before":
            with pytest.raises(JournalError, match="could not be rolled back"):
                await learner.rollback(to=1, skip=[2])
            assert program.learned() == [1, 1, 1]
            assert program.adam.iterations.value == 3
        else:
            assert await learner.rollback(to=1, skip=[2]) == 1
            assert program.learned() == [1]
            assert learner.state in {"paused", "retrying"}
        failing.at = {}
        learner.resume()
        await learn(program, 3)
        assert program.learned() == [1, int(when == "before"), 1, 1]
    async with Counting(folder) as again:
        assert again.learned() == [1, int(when == "before"), 1, 1]


@pytest.mark.asyncio
async def test_a_learner_that_does_not_know_ends(folder: Path) -> None:
    failing = Failing()
    journal = Journal(folder / "journal.db", connect=failing.connect)
    program = Counting(folder, journal=journal, max_batch=1)
    await program.__aenter__()
    await learn(program, 0)
    await learn(program, 1, checkpoint=False)
    failing.at = {"COMMIT": "behind", "PRAGMA journal_mode": "before"}
    with pytest.raises(JournalError, match="may be in the journal or not"):
        await program.learner.rollback(to=1, skip=[2])
    failing.at = {}
    with pytest.raises(JournalError, match="may be in the journal or not"):
        await program.aclose()
    async with Counting(folder) as again:
        await until_caught_up(again)
        assert again.learned() == [1]


@pytest.mark.asyncio
async def test_a_pin_stays(folder: Path) -> None:
    async with Counting(folder, max_batch=1) as program:
        await learn(program, 0, 1)
        await learn(program, 2)
        await program.learner.pin()
        await program.learner.rollback(to=2, skip=[3])
        assert program.learner.version == 3
    async with Counting(folder) as again:
        assert (again.learner.version, again.learned()) == (3, [1, 1])


@pytest.mark.asyncio
async def test_void_checkpoints_are_never_restored(folder: Path) -> None:
    """Their folder cannot be written when it is rolled back; the next opening removes them."""
    async with Counting(folder, max_batch=1) as program:
        await learn(program, 0)
        await learn(program, 1, 2)
        shutil.copytree(folder / "checkpoints", folder / "copy")
        await program.learner.rollback(to=1, skip=[2])
        await learn(program, 3)
        assert program.manager is not None
        assert program.manager.steps() == (1, 4)
    for step in (folder / "copy").iterdir():  # as if they had come back
        if step.is_dir() and not (folder / "checkpoints" / step.name).exists():
            shutil.copytree(step, folder / "checkpoints" / step.name)
    async with Counting(folder) as again:
        assert again.learned() == [1, 0, 1, 1]
        assert again.manager is not None
        assert again.manager.steps() == (1, 4)


@pytest.mark.asyncio
async def test_without_a_way_back_nothing_is_removed(folder: Path) -> None:
    async with Counting(folder, max_batch=1) as program:
        await learn(program, 0)
        await learn(program, 1)
    file = Journal(folder / "journal.db").file()
    file.open()
    file.compact([1], 0.0)
    file.roll_back(1, 1, [], 0.0)
    file.close()
    remove_step(LocalStorage(folder / "checkpoints"), 1)
    with pytest.raises(JournalError, match=r"rolled back to 1\. There is no checkpoint"):
        await Counting(folder).__aenter__()
    assert ar.CheckpointManager(folder / "checkpoints").steps() == (2,)


@pytest.mark.asyncio
async def test_a_closed_learner_is_rolled_back_for_the_next_one(folder: Path) -> None:
    journal, manager = Journal(folder / "journal.db"), ar.CheckpointManager(folder / "checkpoints")
    async with Counting(folder, max_batch=1) as program:
        await learn(program, 0)
        await learn(program, 1, 2)
        version = program.learner.version
        with pytest.raises(JournalError, match="in use"):
            roll_back_closed(journal, manager, 1, [2])
    wrong = {
        (4, ()): "only 3 examples, no 4",
        (1, (9,)): "numbers to leave out: 9",
        (0, ()): "is 1",
    }
    for (to, skip), said in wrong.items():
        with pytest.raises(ValueError, match=said):
            roll_back_closed(journal, manager, to, skip)
    assert roll_back_closed(journal, manager, 2, [3]) == 1
    assert roll_back_closed(journal, manager, 3, []) == 1  # the other one is void already
    async with Counting(folder, max_batch=1) as again:
        await until_caught_up(again)
        assert again.learned() == [1, 1]
        assert again.learner.version > version
        assert again.learner.statistics().generation == 2
        await learn(again, 3)


@pytest.mark.asyncio
async def test_an_older_copy_of_the_journal_is_noticed(folder: Path) -> None:
    async with Counting(folder, max_batch=1) as program:
        await learn(program, 0, 1)
    shutil.copy(folder / "journal.db", folder / "copy.db")
    async with Counting(folder, max_batch=1) as program:
        await program.learner.rollback(to=2)
        await program.learner.checkpoint()
    shutil.copy(folder / "copy.db", folder / "journal.db")
    with pytest.raises(JournalError, match=r"generation 1.*rolled back 0 times only"):
        await Counting(folder).__aenter__()


@pytest.mark.asyncio
async def test_who_asked_is_told_when_the_learner_closes(folder: Path) -> None:
    async with Counting(folder) as program:
        await learn(program, 0)
        asking = asyncio.ensure_future(program.learner.rollback(to=1))
        closing = asyncio.ensure_future(program.learner.aclose())
        await asyncio.wait([asking, closing])
        error = asking.exception()
        assert error is None or "closed before it was rolled back" in str(error)


# ---- how far back --------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_the_journal_is_kept_from_the_oldest_checkpoint_within_its_bytes(
    folder: Path,
) -> None:
    async def live(max_bytes: int | None) -> tuple[int | None, int | None]:
        at = folder / str(max_bytes)
        at.mkdir()
        journal = Journal(at / "journal.db", max_bytes=max_bytes)
        async with Counting(at, journal=journal, max_batch=1) as program:
            for i in range(0, 20, 2):
                await learn(program, i, i + 1)
            kept = program.learner.statistics().rollback_from
            if kept != 20:
                with pytest.raises(ValueError, match=f"oldest one is {kept}"):
                    await program.learner.rollback(to=(kept or 0) - 1)
        async with Counting(at) as again:
            return kept, again.learner.statistics().rollback_from

    body = len(sqlite_body(folder))
    assert await live(None) == (16, 16)
    assert await live(4 * body) == (16, 16)
    assert await live(4 * body - 1) == (18, 18)
    assert await live(1) == (20, 20)


def sqlite_body(folder: Path) -> bytes:
    from aioreplica.online._example import as_example, pack_example

    return pack_example(as_example(example(0)))


def test_void_checkpoints_of_several_rollbacks() -> None:
    rollbacks = (Rollback(1, 50), Rollback(2, 70), Rollback(3, 60))
    void = {
        generation: [step for step in (40, 50, 60, 65, 70, 80)
                     if generations.is_void(step, generation, rollbacks)]
        for generation in range(4)
    }  # fmt: skip
    assert void == {0: [60, 65, 70, 80], 1: [65, 70, 80], 2: [65, 70, 80], 3: []}


# ---- the format ----------------------------------------------------------------------------


# ---- schedules and crashes -----------------------------------------------------------------


@pytest.mark.xslow
def test_clients_checkpoints_and_rollbacks_in_any_order(folder: Path) -> None:
    async def main() -> None:
        at = folder / "run"
        shutil.rmtree(at, ignore_errors=True)
        at.mkdir()
        async with Counting(at, max_batch=2, num_replicas=1) as program:
            learner = program.learner
            await learn(program, 0, 1)

            async def client(first: int) -> None:
                for i in range(first, first + 3):
                    await (await learner.submit(example(i)))

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(client(2))
                tasks.create_task(client(5))
                tasks.create_task(learner.checkpoint())
                base = await learner.rollback(to=2)
            assert base == 2
            await until_caught_up(program)
            assert program.learned() == [1] * 8
        async with Counting(at, num_replicas=1) as again:
            assert again.learned() == [1] * 8

    art.explore(main, schedules=40).check()


NUM_EXAMPLES = 7


def on_disk(files: SimulatedFiles, folder: Path) -> Counting:
    journal = Journal(folder / "journal.db", connect=Disk(files).connect)
    manager = ar.CheckpointManager(SimulatedStorage(files), max_to_keep=2)
    return Counting(journal=journal, checkpoints=manager, max_batch=3)


async def live_with_rollbacks(files: SimulatedFiles, folder: Path) -> Recorder:
    """Learn 7 examples, and leave out the third and the sixth; `100 + i` says that i is."""
    acknowledged: set[int] = set()
    recorder = Recorder(files, acknowledged)
    async with on_disk(files, folder) as program:
        learner = program.learner
        for i in range(NUM_EXAMPLES):
            ticket = await learner.submit(example(i))
            acknowledged.add(i)
            await ticket
            if i in {1, 3, 5}:
                await learner.checkpoint()
            if i == 3:
                await learner.rollback(to=2, skip=[3])
                acknowledged.add(102)
            if i == 6:
                await learner.rollback(to=4, skip=[6])
                acknowledged.add(105)
    return recorder


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore:Restored step")
@pytest.mark.parametrize("num_crashes", CRASHES)
async def test_rollbacks_survive_any_loss_of_unsynced_data(num_crashes: int, folder: Path) -> None:
    files = SimulatedFiles()
    recorder = await live_with_rollbacks(files, folder)
    assert {102, 105} < recorder.points[-1][1]
    for disk, acknowledged in crashes(files, recorder, num_crashes, seed=1):
        await check(disk, folder, acknowledged)


async def check(disk: SimulatedFiles, folder: Path, acknowledged: set[int]) -> None:
    async with on_disk(disk, folder) as program:
        await until_caught_up(program)
        counts = dict(enumerate(program.learned()))
        dead = {letter.number - 1 for letter in await program.learner.dead_letters()}
        assert dead <= {2, 5}
        assert {i - 100 for i in acknowledged if i >= 100} <= dead
        for i in range(NUM_EXAMPLES):
            fate = counts.get(i, 0) + (i in dead)
            assert fate <= 1
            assert fate == 1 or i not in acknowledged
