"""Several models on one journal: each learns every example once, and none disturbs the champion."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import (
    ContextError,
    JournalError,
    PoisonedExampleError,
)
from aioreplica.online import Journal, roll_back_closed
from aioreplica.online._journal_models import ROWS_OF_MODEL

from .program import RAISES, WRITES_NAN, Counting, example
from .test_journal import Failing

Options = dict[str, Any]


@asynccontextmanager
async def models(
    folder: Path, *, rivals: dict[str, Options | Counting] | None = None, **options: Any
) -> AsyncIterator[dict[str, Counting]]:
    """Open a champion and its rivals; gives all by name."""
    given = {"b": {}} if rivals is None else rivals
    made = {
        name: each if isinstance(each, Counting) else rival(folder, name, **each)
        for name, each in given.items()
    }
    challengers = {name: each.learner for name, each in made.items()}
    first = Counting(folder, **({"max_batch": 1, "challengers": challengers} | options))
    async with asyncio.timeout(60):
        for each in made.values():
            await each.strategy.__aenter__()
        try:
            async with first:
                yield {"main": first, **made}
        finally:
            for each in made.values():
                await each.strategy.aclose()


def rival(folder: Path, name: str = "b", **options: Any) -> Counting:
    given = {"journal": None, "num_replicas": 1, "max_delay_s": 0.0}
    return Counting(folder / name, **(given | options))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def until_caught_up(found: dict[str, Counting]) -> None:
    last = found["main"].learner.statistics().last_number
    await until(lambda: all(each.learner.statistics().learned_number == last
                            for each in found.values()))  # fmt: skip


async def take(found: dict[str, Counting], *ids: int) -> None:
    for i in ids:
        await (await found["main"].learner.submit(example(i)))


async def offline(ids: list[list[int]], num_replicas: int = 1) -> bytes:
    """Return the bits of the weight after some batches of a learner without a journal."""
    async with Counting(num_replicas=num_replicas, max_batch=100, max_delay_s=0.0) as program:
        for batch in ids:
            await program.learner.pause()
            tickets = await program.learner.submit_many([example(i) for i in batch])
            program.learner.resume()
            await tickets[-1]
        return program.weight.value.tobytes()


# ---- learning ----------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("max_batch", [1, 3, 50])
async def test_each_model_learns_all_once_in_batches_of_its_own(
    folder: Path, max_batch: int
) -> None:
    rivals: dict[str, Options | Counting] = {"b": {"max_batch": max_batch}, "c": {}}
    async with models(folder, rivals=rivals) as found:
        await take(found, *range(10))
        await until_caught_up(found)
        for each in found.values():
            assert each.learned() == [1] * 10
        batches, bits = found["b"].batches, found["b"].weight.value.tobytes()
        assert max(map(len, batches)) <= max_batch
        now = found["main"].learner.statistics()
        assert (now.model, now.champion, now.challengers["b"].model) == ("main", "main", "b")
        assert now.challengers["b"].num_learned == now.num_learned == 10
        assert now.challengers["b"].lag == now.lag == now.queue_depth == 0
        assert now.challengers["b"].began.startswith("with its own values, behind example 0: the")
    assert await offline([[i] for i in range(10)]) == await offline([[i] for i in range(10)], 2)
    if max_batch == 1:
        assert bits == await offline([[i] for i in range(10)])
    async with models(folder, rivals=rivals) as found:  # from their checkpoints
        assert [each.learned() for each in found.values()] == [[1] * 10] * 3
        await take(found, 11)
        await until_caught_up(found)
        assert [each.learned() for each in found.values()] == [[*[1] * 10, 0, 1]] * 3


@pytest.mark.asyncio
async def test_a_batch_waits_for_its_examples_as_long_as_is_said(folder: Path) -> None:
    rivals: dict[str, Options | Counting] = {"b": {"max_batch": 3, "max_delay_s": 1000.0}}
    seen: list[list[int]] = []

    class Noting(Counting):
        async def step(self, ctx: ar.ReplicaContext, batch: Any) -> dict[str, float]:
            seen.append([int(i) for i in batch["id"]])
            return await super().step(ctx, batch)

    given = {"journal": None, "num_replicas": 1, "max_batch": 3, "max_delay_s": 1000.0}
    rivals["b"] = Noting(folder / "b", **given)
    async with models(folder, rivals=rivals) as found:
        await take(found, *range(4))
        await until(lambda: len(seen) == 1)
        assert found["main"].learner.statistics().challengers["b"].lag == 1
        bits = found["b"].weight.value.tobytes()
        await take(found, 4, 5)
        await until_caught_up(found)
        await take(found, 6)
    assert seen == [[0, 1, 2], [3, 4, 5], [6]]
    assert bits == await offline([[0, 1, 2]])


@pytest.mark.asyncio
async def test_places_are_those_of_the_champion_and_tickets_too(folder: Path) -> None:
    async with models(folder, queue_size=3) as found:
        first, second = found["main"].learner, found["b"].learner
        await second.pause()
        await take(found, *range(8))  # more than the queue has places
        assert second.statistics().lag == 8
        await first.pause()
        tickets = [await first.submit(example(i)) for i in (8, 9, 10)]
        assert first.statistics().queue_depth == 3
        with pytest.raises(anyio.WouldBlock):
            first.submit_nowait(example(11))
        second.resume()
        await until(lambda: second.statistics().learned_number == 11)
        assert not any(ticket.is_done for ticket in tickets)
        first.resume()
        assert [await ticket for ticket in tickets] == [9, 10, 11]
        assert first.statistics().queue_depth == 0


@pytest.mark.asyncio
async def test_a_challenger_takes_nothing_itself_and_is_opened_by_its_champion(
    folder: Path,
) -> None:
    async with models(folder) as found:
        second = found["b"].learner
        with pytest.raises(ContextError, match="'b' is a challenger: it takes no examples"):
            await second.submit(example(0))
        with pytest.raises(ContextError, match="open already"):
            await second.__aenter__()
        with pytest.raises(ContextError, match=r"challenger\. Promote it with"):
            await second.promote("b")
        with pytest.raises(ValueError, match="No model 'c' is open: there are 'main', 'b'"):
            await found["main"].learner.promote("c")
    assert second.state == found["main"].learner.state == "closed"


# ---- bad ones ----------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("mood", [RAISES, WRITES_NAN])
async def test_what_a_challenger_sets_aside_is_its_own(folder: Path, mood: float) -> None:
    class Moody(Counting):
        async def step(self, ctx: ar.ReplicaContext, batch: Any) -> dict[str, float]:
            batch = {**batch, "mood": np.where(batch["id"] == 2, mood, 0.0)}
            return await super().step(ctx, batch)

    for _ in range(2):
        bad = Moody(folder / "b", journal=None, num_replicas=1)
        async with models(folder, rivals={"b": bad}) as found:
            first, second = found["main"].learner, found["b"].learner
            if not first.statistics().learned_number:
                await take(found, *range(5))
            await until_caught_up(found)
            assert (found["main"].learned(), bad.learned()) == ([1] * 5, [1, 1, 0, 1, 1])
            assert await first.dead_letters() == ()
            [letter] = await second.dead_letters()
            assert letter.number == 3
            with pytest.raises(ContextError, match="'b' is not served"):
                await second.retry(3)
    bad = Moody(folder / "b", journal=None, num_replicas=1)
    async with models(folder, rivals={"b": bad}) as found:
        await found["b"].learner.discard(3)
        assert await found["b"].learner.dead_letters() == ()
    async with models(folder) as found:
        assert (found["main"].learned(), found["b"].learned()) == ([1] * 5, [1, 1, 0, 1, 1])


class Hanging(Counting):
    """Waits without end, from the second example on."""

    async def step(self, ctx: ar.ReplicaContext, batch: Any) -> dict[str, float]:
        if (batch["id"] > 0).any():
            await asyncio.Event().wait()
        return await super().step(ctx, batch)


@pytest.mark.asyncio
async def test_one_that_hangs_holds_nobody_up_and_is_detached(folder: Path) -> None:
    stuck = Hanging(folder / "b", journal=None, num_replicas=1, max_batch=1, grace_s=0.0)
    with pytest.warns(RuntimeWarning, match="closed after 0 s with"):  # noqa: PT031 - at its end
        async with models(folder, rivals={"b": stuck}, max_lag=5, queue_size=2) as found:
            first, second = found["main"].learner, found["b"].learner
            await take(found, 0)
            await until(lambda: second.statistics().learned_number == 1)
            await second.checkpoint()
            await take(found, 1, 2, 3, 4)
            assert second.state == "running"
            await take(found, 5, 6)
            await until(lambda: second.state == "detached")
            assert first.is_ready
            now = first.statistics().challengers["b"]
            assert now.detached == "it was 6 examples behind, and max_lag is 5"
            with pytest.raises(ValueError, match="'b' cannot be promoted, as it is detached: it"):
                await first.promote("b")
            await first.checkpoint()
            assert first.statistics().rollback_from == 7
    async with models(folder) as found:  # mended: it begins with the champion's checkpoint
        assert found["b"].learned() == [1] * 7
        assert found["b"].learner.statistics().began == "with the champion's checkpoint 7"
        assert found["b"].learner.statistics().generation == 1
        await take(found, 7)
        await until_caught_up(found)
    async with models(folder) as found:
        assert found["b"].learned() == [1] * 8
        assert found["b"].learner.statistics().began == ""


@pytest.mark.asyncio
async def test_one_that_always_fails_stops_alone(folder: Path) -> None:
    class Broken(Counting):
        async def step(self, ctx: ar.ReplicaContext, batch: Any) -> dict[str, float]:
            raise NameError("a broken release")

    bad = Broken(folder / "b", journal=None, num_replicas=1)
    async with models(folder, rivals={"b": bad}) as found:
        first, second = found["main"].learner, found["b"].learner
        await take(found, *range(20))
        await until(lambda: second.state == "failed")
        assert (first.state, first.is_ready, second.is_ready) == ("running", True, False)
        assert await second.dead_letters() == ()
        with pytest.raises(ValueError, match="'b' cannot be promoted, as it is failed: 5 examples"):
            await first.promote("b")
    async with models(folder) as found:
        await until_caught_up(found)
        assert found["b"].learned() == found["main"].learned() == [1] * 20


@pytest.mark.asyncio
async def test_a_disk_that_fails_a_read_is_asked_again(folder: Path) -> None:
    failing, failed, seen = Failing(), list[str](), [""]

    def once(statement: str) -> bool:
        is_read = seen[-1] != "BEGIN IMMEDIATE" and statement == ROWS_OF_MODEL and not failed
        if statement in {"BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"}:
            seen.append(statement)
        if is_read:
            failed.append(statement)
        return is_read

    async with models(
        folder, journal=Journal(folder / "journal.db", connect=failing.connect)
    ) as found:
        await take(found, 0)
        await until_caught_up(found)
        failing.fails_at = once
        await take(found, 1)
        await until_caught_up(found)
        assert len(failed) == 1
        states = {name: each.learner.state for name, each in found.items()}
        assert states == {"main": "running", "b": "running"}
        assert all(each.learned() == [1, 1] for each in found.values())


@pytest.mark.asyncio
async def test_one_that_ends_is_told_and_the_champion_goes_on(folder: Path) -> None:
    async with models(folder) as found:
        engine = found["b"].learner._engine
        assert engine is not None
        assert engine._main is not None
        engine._main.cancel()
        await until(lambda: found["b"].learner.state == "closed")
        await take(found, 0, 1)
        assert found["main"].learned() == [1, 1]
        with pytest.raises(ValueError, match="as it is closed"):
            await found["main"].learner.promote("b")


@pytest.mark.asyncio
async def test_one_that_cannot_be_opened_is_told(folder: Path) -> None:
    async with models(folder) as found:
        await take(found, 0)
    (folder / "other").mkdir()
    foreign = Counting(folder / "other" / "b", journal=None, num_replicas=1)
    async with models(folder / "other", rivals={"b": foreign}) as found:
        await take(found, 0)
    shutil.rmtree(folder / "b")
    shutil.copytree(folder / "other" / "b", folder / "b")
    async with models(folder) as found:
        now = found["main"].learner.statistics()
        assert now.challengers == {}
        assert "belong to another journal" in now.not_open["b"]
        await take(found, 1)
        with pytest.raises(ValueError, match="No model 'b' is open: JournalError"):
            await found["main"].learner.promote("b")
    assert ar.CheckpointManager(folder / "b" / "checkpoints").steps() == (1,)


# ---- late ones ---------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_late_model_begins_with_the_champions_checkpoint(folder: Path) -> None:
    async with Counting(folder, max_batch=1) as program:
        for i in range(6):
            await (
                await program.learner.submit(example(i, RAISES if i == 4 else 0.0))
            ) if i != 4 else await program.learner.submit(example(4, RAISES))
            if i == 2:
                await program.learner.checkpoint()
        await program.learner.pause()
        await until(lambda: program.learner.statistics().learned_number == 6)
        shutil.copytree(folder, folder / "killed")
    async with models(folder / "killed", rivals={"b": {"max_batch": 1}}) as found:
        assert found["b"].learner.statistics().began == "with the champion's checkpoint 3"
        await until_caught_up(found)
        assert found["b"].learned() == [1, 1, 1, 1, 0, 1]
        assert [each.number for each in await found["b"].learner.dead_letters()] == [5]
        weights = {each.weight.value.tobytes() for each in found.values()}
        assert len(weights) == 1


@pytest.mark.asyncio
async def test_a_late_model_loses_nothing_that_the_champion_takes_again(folder: Path) -> None:
    moody = True

    class Moody(Counting):
        async def step(self, ctx: ar.ReplicaContext, batch: Any) -> dict[str, float]:
            if moody and (batch["id"] == 1).any():
                raise ValueError("not yet")
            return await super().step(ctx, batch)

    async with Moody(folder, max_batch=1) as program:
        for i in range(3):
            await program.learner.submit(example(i))
    moody = False
    async with models(folder) as found:
        first, second = found["main"].learner, found["b"].learner
        assert second.statistics().began == "with the champion's checkpoint 3"
        ticket = await first.retry(2)
        assert await ticket > 0
        await until_caught_up(found)
        assert (found["main"].learned(), found["b"].learned()) == ([1, 1, 1], [1, 0, 1])
        assert [each.number for each in await second.dead_letters()] == [2]
        await first.promote("b")
        for number in (2, 4):
            with pytest.raises(PoisonedExampleError, match="not yet"):
                await (await first.ticket(number))
        await (await second.retry(2))
        await until_caught_up(found)
        assert found["main"].learned() == found["b"].learned() == [1, 1, 1]


@pytest.mark.asyncio
async def test_a_late_model_takes_no_checkpoint_that_counts_no_more(folder: Path) -> None:
    async with models(folder) as found:
        await take(found, 0)
        await until_caught_up(found)
        await found["b"].learner.checkpoint()
        await found["main"].learner.promote("b")
        await take(found, 1, 2)
    file = Journal(folder / "journal.db").file()
    file.open()
    file.roll_back(1, 1, [2], 0.0, "b")
    file.close()
    rivals: dict[str, Options | Counting] = {"c": {}, "b": {}}  # opened in this order
    async with models(folder, rivals=rivals) as found:
        assert found["c"].learner.statistics().began == "with the champion's checkpoint 1"
        await until_caught_up(found)
        assert found["b"].learned() == [1, 0, 1]


@pytest.mark.asyncio
async def test_a_model_that_has_learned_nothing_may_be_opened_again(folder: Path) -> None:
    again = rival(folder)
    for _ in range(2):
        async with models(folder, rivals={"b": again}) as found:
            assert found["main"].learner.statistics().not_open == {}


@pytest.mark.asyncio
async def test_one_that_begins_far_behind_has_time_to_catch_up(folder: Path) -> None:
    async with Counting(folder, max_batch=1) as program:
        await (await program.learner.submit(example(0)))
        await program.learner.checkpoint()
        for i in range(1, 10):
            await (await program.learner.submit(example(i)))

    class Slow(Counting):
        def __init__(self, folder: Path) -> None:
            super().__init__(folder, journal=None, num_replicas=1)
            self.gate = asyncio.Event()

        async def step(self, ctx: ar.ReplicaContext, batch: Any) -> dict[str, float]:
            await self.gate.wait()
            return await super().step(ctx, batch)

    shutil.copytree(folder, folder / "stuck")
    for path, ids in ((folder / "stuck", range(10, 15)), (folder, range(10, 13))):
        slow = Slow(path / "b")
        other_state(slow)
        async with models(path, rivals={"b": slow}, max_lag=4) as found:
            second = found["b"].learner
            await take(found, *ids)
            if path != folder:
                await until(lambda: second.state == "detached")  # noqa: B023 - it is awaited here
                assert second.statistics().detached.startswith("it was 14 examples behind")
                slow.gate.set()
                continue
            slow.gate.set()
            await until(lambda: second.state == "detached" or not second.statistics().lag)  # noqa: B023
            assert slow.learned() == [0, *[1] * 12]
            assert second.state == "running"


def other_state(program: Counting) -> None:
    """Let a model have a variable that no other one has."""
    with program.strategy.scope():
        extra = ar.Variable(np.zeros(2))
    program.learner = ar.online.OnlineLearner(
        program.strategy, program.step, {**program.variables, "extra": extra}, max_batch=1,
        max_delay_s=0.0, queue_size=1, checkpoints=program.manager,
    )  # fmt: skip


@pytest.mark.asyncio
async def test_one_of_another_state_begins_with_its_own_values(folder: Path) -> None:
    async with Counting(folder, max_batch=1) as program:
        for i in range(3):
            await (await program.learner.submit(example(i)))
        await program.learner.checkpoint()
        await program.learner.submit(example(3))

    other = rival(folder, max_batch=1)
    other_state(other)
    async with models(folder, rivals={"b": other}) as found:
        began = found["b"].learner.statistics().began
        assert began.startswith("with its own values, behind example 3: Step 4 does not match")
        await take(found, 5)
        await until_caught_up(found)
        assert other.learned() == [0, 0, 0, 1, 0, 1]  # what the journal still has


# ---- rollbacks ---------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_rollback_is_that_of_one_model(folder: Path) -> None:
    async with models(folder, rivals={"b": {"max_batch": 1}}) as found:
        second = found["b"].learner
        await take(found, 0, 1)
        await until_caught_up(found)
        await second.checkpoint()
        await take(found, 2, 3)
        await until_caught_up(found)
        assert await second.rollback(to=2, skip=[3]) == 2
        await until_caught_up(found)
        assert found["b"].learned() == [1, 1, 0, 1]
        assert found["main"].learned() == [1] * 4
        assert found["main"].learner.statistics().generation == 0
    async with models(folder, rivals={"b": {"max_batch": 1}}) as found:
        assert found["b"].learned() == [1, 1, 0, 1]
        assert found["main"].learned() == [1] * 4


@pytest.mark.asyncio
async def test_a_closed_model_is_rolled_back_by_its_folder(folder: Path) -> None:
    keeping = {"b": Options(max_batch=1)}
    async with models(folder, rivals=keeping) as found:
        await take(found, 0)
        await until_caught_up(found)
        await found["b"].learner.checkpoint()
        await take(found, 1, 2)
        await until_caught_up(found)
        await found["main"].learner.promote("b")
    manager = ar.CheckpointManager(folder / "b" / "checkpoints")
    assert roll_back_closed(Journal(folder / "journal.db"), manager, 1, [2]) == 1
    async with models(folder, rivals=keeping) as found:
        await until_caught_up(found)
        assert found["b"].learned() == [1, 0, 1]
        assert found["main"].learned() == [1, 1, 1]
    other = Journal(folder / "other.db")
    file = other.file()
    file.open()
    file.close()
    with pytest.raises(JournalError, match="belong to another journal"):
        roll_back_closed(other, manager, 1, [])


@pytest.mark.asyncio
async def test_a_model_that_is_not_here_is_detached_once_it_is_too_late(folder: Path) -> None:
    async with models(folder) as found:
        await take(found, 0)
    async with Counting(folder, max_batch=1, max_lag=3) as alone:
        for i in range(1, 6):
            await (await alone.learner.submit(example(i)))
        await until(lambda: alone.learner._engine.models._absent == {})  # type: ignore[union-attr]
    file = Journal(folder / "journal.db").file()
    file.open()
    assert file.consumers()["b"].detached == "it was 4 examples behind, and max_lag is 3"
    file.close()


# ---- arguments ---------------------------------------------------------------------------


def test_what_models_must_not_have_in_common_is_refused(folder: Path) -> None:
    fresh = rival(folder)
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({"main": fresh.learner}, ValueError, "'main' is that of the first model"),
        ({"a b": fresh.learner}, ValueError, "letters, digits"),
        ({"b": 3}, TypeError, "must be an OnlineLearner, got 3"),
        ({"b": Counting(folder / "x").learner}, ValueError, "'b' has journal, which"),
        ({"b": Counting(None).learner}, ValueError, "'b' needs checkpoints"),
        ({"b": rival(folder, ".").learner}, ValueError, "a folder of checkpoints in common"),
        ({"b": fresh.learner, "c": fresh.learner}, ValueError, "'c' has a strategy in common"),
    ]
    for challengers, error, said in wrong:
        with pytest.raises(error, match=said):
            Counting(folder, challengers=challengers)
    with pytest.raises(ValueError, match="challengers need a journal and checkpoints"):
        Counting(None, challengers={"b": fresh.learner})
    with pytest.raises(ValueError, match="max_lag must be at least 1"):
        Counting(folder, max_lag=0)
