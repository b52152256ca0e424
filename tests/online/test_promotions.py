"""Promotions: another model is served, once and for all, whatever ends meanwhile."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.checkpoint import Savepoint
from aioreplica.errors import CheckpointError, ContextError, JournalError, PoisonedExampleError
from aioreplica.online import Journal, SnapshotReader

from .program import RAISES, Counting, example
from .test_journal import Failing
from .test_models import Options, models, take, until, until_caught_up


@pytest.mark.asyncio
async def test_a_promoted_model_is_served_and_so_it_is_after_a_restart(folder: Path) -> None:
    published = folder / "published"
    async with models(folder, publish_to=published) as found:
        first = found["main"].learner
        await take(found, 0, 1)
        await until_caught_up(found)
        before = first.version
        version = await first.promote("b")
        assert version > before
        assert (first.champion, first.version) == ("b", version)
        assert found["b"].counts in first.snapshot()
        seen = await (await first.submit(example(2)))
        assert seen == first.version > version
        with SnapshotReader(published) as reader:
            await until(lambda: reader.read().version == first.version)
            for snapshot in (reader.read(), first.snapshot()):  # by the keys of its own state
                assert snapshot["counts"].tolist()[:3] == [1, 1, 1]
                assert ("weight" in snapshot, "deep/weight" in snapshot) == (True, False)
        assert await first.promote("b") == first.version
    async with models(folder, publish_to=published) as found:
        first = found["main"].learner
        assert first.champion == "b"
        assert found["b"].counts in first.snapshot()
        assert first.version == seen
        again = await first.promote("main")
        assert again > seen
        assert found["main"].counts in first.snapshot()
        await take(found, 3)
    async with models(folder, publish_to=published) as found:
        assert found["main"].learner.champion == "main"
        assert found["main"].learned() == found["b"].learned() == [1] * 4


@pytest.mark.asyncio
async def test_the_first_model_holds_nobody_up_once_another_is_served(folder: Path) -> None:
    async with models(folder, queue_size=2, max_lag=9) as found:
        first = found["main"].learner
        await take(found, 0)
        await until_caught_up(found)
        await first.checkpoint()
        await first.promote("b")
        await first.pause()
        assert first.is_ready
        await take(found, *range(1, 12))
        await until(lambda: first.state == "detached")
        assert first.is_ready
        with pytest.raises(ValueError, match="'main' cannot be promoted, as it is detached"):
            await first.promote("main")
    async with models(folder) as found:
        first = found["main"].learner
        assert first.champion == "b"
        assert first.statistics().began == "with the champion's checkpoint 12"
        assert found["main"].learned() == [1] * 12
        await take(found, 12)
        await until_caught_up(found)
        assert found["main"].learned() == found["b"].learned() == [1] * 13


@pytest.mark.asyncio
async def test_tickets_wait_for_who_is_served_when_they_are_settled(folder: Path) -> None:
    gate = asyncio.Event()

    class Moody(Counting):
        async def step(self, ctx: ar.ReplicaContext, batch: Any) -> dict[str, float]:
            if (batch["id"] == 2).any():
                raise ValueError("not for me")
            if (batch["id"] == 3).any():
                await gate.wait()
            return await super().step(ctx, batch)

    given: Options = {"journal": None, "num_replicas": 1, "max_batch": 1, "max_delay_s": 0.0}
    async with models(folder, rivals={"b": Moody(folder / "b", **given)}) as found:
        first, second = found["main"].learner, found["b"].learner
        await take(found, 0)
        await until_caught_up(found)
        await second.checkpoint()
        await first.pause()
        ahead = [await first.submit(example(i)) for i in (1, 2)]
        await until(lambda: second.statistics().learned_number == 3)
        behind = await first.submit(example(3))
        assert not any(each.is_done for each in (*ahead, behind))
        version = await first.promote("b")
        assert await ahead[0] == version
        with pytest.raises(PoisonedExampleError, match=r"Example 3 was set aside: .*not for me"):
            await ahead[1]
        assert not behind.is_done
        first.resume()
        await until(lambda: first.statistics().learned_number == 4)
        assert not behind.is_done
        gate.set()
        assert await behind > version
        assert first.statistics().queue_depth == 0


@pytest.mark.asyncio
async def test_letters_of_who_is_served_are_taken_again_for_it_alone(folder: Path) -> None:
    moody = True

    class Moody(Counting):
        async def step(self, ctx: ar.ReplicaContext, batch: Any) -> dict[str, float]:
            if moody and (batch["id"] == 1).any():
                raise ValueError("not for me")
            return await super().step(ctx, batch)

    given: Options = {"journal": None, "num_replicas": 1, "max_batch": 1, "max_delay_s": 0.0}
    async with models(folder, rivals={"b": Moody(folder / "b", **given)}) as found:
        first, second = found["main"].learner, found["b"].learner
        await take(found, 0, 1, 2)
        await until_caught_up(found)
        await first.promote("b")
        with pytest.raises(ContextError, match="'main' is not served"):
            await first.retry(2)
        moody = False
        ticket = await second.retry(2)
        assert ticket.number == 4
        assert await ticket == first.version
        await take(found, 3)
        await until_caught_up(found)
    async with models(folder) as found:
        assert found["main"].learned() == found["b"].learned() == [1] * 4


@pytest.mark.asyncio
async def test_a_letter_taken_again_though_its_commit_failed_holds_one_place(folder: Path) -> None:
    """Its row is there, and only for the model that is served."""
    moody, disk = True, Failing()

    class Moody(Counting):
        async def step(self, ctx: ar.ReplicaContext, batch: Any) -> dict[str, float]:
            if moody and (batch["id"] == 1).any():
                raise ValueError("not for me")
            return await super().step(ctx, batch)

    given: Options = {"journal": None, "num_replicas": 1, "max_batch": 1, "max_delay_s": 0.0}
    journal = Journal(folder / "journal.db", connect=disk.connect)
    bad = Moody(folder / "b", **given)
    async with models(folder, rivals={"b": bad}, journal=journal) as found:
        first = found["main"].learner
        await take(found, 0, 1)
        await until_caught_up(found)
        await first.promote("b")
        moody = False
        disk.commits_first, disk.fails_at = True, lambda statement: statement == "COMMIT"
        with pytest.raises(JournalError, match="disk I/O error"):
            await bad.learner.retry(2)
        disk.fails_at = lambda _statement: False
        assert first.statistics().queue_depth == 0
        await first.pause()
        await bad.learner.pause()
        ticket = await first.submit(example(2))
        assert (ticket.number, first.statistics().queue_depth) == (4, 2)
        bad.learner.resume()
        await ticket
        assert first.statistics().queue_depth == 0
        first.resume()
        await until_caught_up(found)
        assert found["main"].learned() == bad.learned() == [1, 1, 1]


@pytest.mark.asyncio
async def test_a_served_model_that_cannot_undo_a_step_says_why_it_has_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(RuntimeWarning, match="'b' was not closed in order: The learner"):  # noqa: PT031
        async with models(folder) as found:
            first, second = found["main"].learner, found["b"].learner
            await take(found, 0)
            await until_caught_up(found)
            await first.promote("b")
            await first.pause()
            put_back = Savepoint.put_back

            def broken(savepoint: Savepoint) -> None:
                put_back(savepoint)
                raise RuntimeError("no way back")

            monkeypatch.setattr(Savepoint, "put_back", broken)
            await first.submit(example(1, RAISES))
            await until(lambda: second.state == "closed")
            monkeypatch.undo()
            assert not first.is_ready
            assert "could not be undone: RuntimeError: no way back" in second.statistics().failure
            assert first.statistics().challengers["b"].failure == second.statistics().failure
            first.resume()
            await until(lambda: first.statistics().learned_number == 2)
            await first.promote("main")
            assert first.statistics().failure == ""


@pytest.mark.asyncio
async def test_the_champion_has_to_be_there(folder: Path) -> None:
    async with models(folder) as found:
        await take(found, 0)
        await until_caught_up(found)
        await found["main"].learner.promote("b")
    with pytest.raises(JournalError, match="'b' is the champion of the journal, and there are 'ma"):
        await Counting(folder).__aenter__()
    (folder / "b").rename(folder / "gone")
    shutil.copytree(folder / "checkpoints", folder / "b" / "checkpoints")
    with pytest.raises(JournalError, match="those of the model 'main', not of 'b'"):
        async with models(folder):
            pass
    shutil.rmtree(folder / "b")
    (folder / "gone").rename(folder / "b")
    async with models(folder) as found:
        assert found["main"].learner.champion == "b"


@pytest.mark.asyncio
async def test_one_that_has_not_caught_up_is_not_promoted(folder: Path) -> None:
    async with models(folder) as found:
        await take(found, 0)
        await until_caught_up(found)
        await found["b"].learner.checkpoint()
        await found["b"].learner.pause()
        await take(found, 1, 2)
        shutil.copytree(folder, folder / "killed")
    gate = asyncio.Event()

    class Slow(Counting):
        async def step(self, ctx: ar.ReplicaContext, batch: Any) -> dict[str, float]:
            await gate.wait()
            return await super().step(ctx, batch)

    slow = Slow(folder / "killed" / "b", journal=None, num_replicas=1)
    async with models(folder / "killed", rivals={"b": slow}) as found:
        said = "'b' cannot be promoted, as it is recovering: 2 examples"
        with pytest.raises(ValueError, match=said):
            await found["main"].learner.promote("b")
        gate.set()
        await until_caught_up(found)
        await found["main"].learner.promote("b")


@pytest.mark.asyncio
async def test_a_crash_behind_a_promotion_serves_no_number_again(folder: Path) -> None:
    """What is restored was saved under a number that the champion before has served, too."""
    async with models(folder) as found:
        first = found["main"].learner
        await take(found, 0, 1, 2)
        await until_caught_up(found)
        await found["b"].learner.checkpoint()
        assert first.version == 3
        version = await first.promote("b")
        shutil.copytree(folder, folder / "killed")
    async with models(folder / "killed") as found:
        first = found["main"].learner
        assert first.champion == "b"
        assert first.version > version
        restored = first.version
        await take(found, 3)
        assert first.version == restored + 1
        await first.checkpoint()
        await found["b"].learner.checkpoint()
        shutil.copytree(folder / "killed", folder / "again")
    async with models(folder / "again") as found:
        assert found["main"].learner.version == restored + 1
        assert found["b"].learned() == found["main"].learned() == [1] * 4


@pytest.mark.asyncio
async def test_closing_waits_for_who_is_served(folder: Path) -> None:
    async with models(folder) as found:
        first, second = found["main"].learner, found["b"].learner
        await take(found, 0)
        await until_caught_up(found)
        await first.promote("b")
        await second.pause()
        tickets = [await first.submit(example(i)) for i in range(1, 9)]
        await first.aclose()
        assert all([await ticket for ticket in tickets])
        assert found["b"].learned() == [1] * 9


@pytest.mark.asyncio
@pytest.mark.parametrize("is_open", [True, False])
async def test_a_late_model_that_is_promoted_survives_a_crash(folder: Path, is_open: bool) -> None:
    async with models(folder, rivals={}) as found:
        await take(found, *range(5))
    async with models(folder) as found:
        if is_open:
            await found["main"].learner.promote("b")
        shutil.copytree(folder, folder / "killed")
    if not is_open:
        file = Journal(folder / "killed" / "journal.db").file()
        file.open()
        file.promote("b")
        file.close()
    async with models(folder / "killed") as found:
        assert found["main"].learner.champion == "b"
        await take(found, 5)
        await until_caught_up(found)
        assert found["main"].learned() == found["b"].learned() == [1] * 6


@pytest.mark.asyncio
async def test_a_model_is_promoted_once_it_has_a_checkpoint(folder: Path) -> None:
    async with models(folder) as found:
        first, manager = found["main"].learner, found["b"].manager
        save = manager.save

        async def fail(*_args: Any, **_options: Any) -> None:
            raise OSError("no room")

        manager.save = fail
        with pytest.raises(CheckpointError, match="No checkpoint was saved: no room"):
            await first.promote("b")
        assert first.champion == "main"
        manager.save = save
        await first.promote("b")
        assert (first.champion, manager.steps()) == ("b", (0,))


@pytest.mark.asyncio
async def test_a_promotion_of_a_model_that_ends_meanwhile_is_refused(folder: Path) -> None:
    async with models(folder) as found:
        first, manager = found["main"].learner, found["b"].manager
        engine = found["b"].learner._engine
        assert engine is not None
        assert engine._main is not None
        aclose, asked = manager.aclose, list[asyncio.Future[int]]()

        async def closing() -> None:
            asked.append(asyncio.ensure_future(first.promote("b")))
            await until(lambda: engine.saving._waiters)
            await aclose()

        manager.aclose = closing
        engine._main.cancel()
        await until(lambda: asked)
        with pytest.raises(CheckpointError, match="No checkpoint was saved: the learner was clos"):
            await asked[0]
        assert first.champion == "main"


@pytest.mark.asyncio
async def test_the_first_model_goes_on_alone_behind_all_versions(folder: Path) -> None:
    async with models(folder) as found:
        first = found["main"].learner
        await take(found, 0, 1)
        await until_caught_up(found)
        await first.promote("b")
        await take(found, 2)
        await until_caught_up(found)
        await first.checkpoint()
        seen = await first.promote("main")
        shutil.copytree(folder, folder / "killed")
    async with Counting(folder / "killed", max_batch=1) as alone:
        assert alone.learner.version > seen
        assert alone.learned() == [1] * 3


@pytest.mark.asyncio
async def test_a_promotion_that_was_given_up_does_not_undo_a_later_one(folder: Path) -> None:
    async with models(folder) as found:
        await take(found, 0)
        await until_caught_up(found)
        first = found["main"].learner
        assert first._engine is not None
        those = first._engine.models.promotions
        promote, began, gate = those._promote, asyncio.Event(), asyncio.Event()

        async def slow(name: str) -> int:
            began.set()
            await gate.wait()
            return await promote(name)

        those._promote = slow  # type: ignore[method-assign]
        given_up = asyncio.ensure_future(first.promote("b"))
        await began.wait()
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        later = asyncio.ensure_future(first.promote("main"))
        gate.set()
        await later
        assert first.champion == "main"
    assert first.champion == "main"


@pytest.mark.asyncio
async def test_one_that_is_paused_or_further_behind_than_the_queue_is_not_promoted(
    folder: Path,
) -> None:
    gate = asyncio.Event()

    class Slow(Counting):
        async def step(self, ctx: ar.ReplicaContext, batch: Any) -> dict[str, float]:
            await gate.wait()
            return await super().step(ctx, batch)

    slow = Slow(folder / "b", journal=None, num_replicas=1, max_delay_s=0.0)
    async with models(folder, rivals={"b": slow}, queue_size=2) as found:
        first, second = found["main"].learner, found["b"].learner
        await take(found, 0, 1, 2)
        said = "as it is behind by more than the queue takes: 3 examples are not learned"
        with pytest.raises(ValueError, match=said):
            await first.promote("b")
        gate.set()
        await second.pause()
        with pytest.raises(ValueError, match="'b' cannot be promoted, as it is paused"):
            await first.promote("b")
        second.resume()
        await until_caught_up(found)
        await first.promote("b")


@pytest.mark.asyncio
async def test_one_that_hangs_before_the_journal_gives_way_to_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioreplica.online._models.TURN_S", 0.05)
    async with models(folder, rivals={"b": {}, "c": {}}) as found, asyncio.timeout(60):
        learner, go = found["main"].learner, asyncio.Event()
        await take(found, 0)
        await until_caught_up(found)
        first = await begun(found, go)
        version = await learner.promote("c")
        with pytest.raises(ContextError, match=r"'b' was not promoted: .* had no checkpoint yet"):
            await first
        assert (learner.champion, learner.version) == ("c", version)
        go.set()
        assert await learner.promote("b") > version
    async with models(folder, rivals={"b": {}, "c": {}}) as found:
        assert found["main"].learner.champion == "b"


@pytest.mark.asyncio
@pytest.mark.parametrize("asked", ["typo", "c", "b", "main"])
async def test_one_that_hangs_gives_way_only_to_another_one_that_is_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    async with models(folder, rivals={"b": {}, "c": {}}) as found, asyncio.timeout(60):
        learner, go = found["main"].learner, asyncio.Event()
        await take(found, 0)
        await until_caught_up(found)
        await found["c"].learner.pause()
        first = await begun(found, go)
        with monkeypatch.context() as waiting:
            waiting.setattr("aioreplica.online._models.ends_in", is_too_late)
            second = asyncio.ensure_future(learner.promote(asked))
            await asyncio.sleep(0)  # now it has given up the first one, if it ever does
            if asked != "b":
                await asyncio.wait([second])
        assert second.done() == (asked != "b")
        go.set()
        told = await asyncio.gather(first, second, return_exceptions=True)
        assert learner.champion == ("main" if asked == "main" else "b")
        if asked == "main":  # is served again, before it was not
            assert "'b' was not promoted" in str(told[0])
            assert told[1] == 1
        elif asked == "b":
            assert told == [learner.version] * 2
        else:
            assert told[0] == learner.version
            assert isinstance(told[1], ValueError)


@pytest.mark.asyncio
async def test_one_that_is_cancelled_while_it_waits_its_turn_is_not_promoted(folder: Path) -> None:
    async with models(folder, rivals={"b": {}, "c": {}}) as found, asyncio.timeout(60):
        learner, go = found["main"].learner, asyncio.Event()
        await take(found, 0)
        await until_caught_up(found)
        first = await begun(found, go)
        second = asyncio.ensure_future(learner.promote("c"))
        await asyncio.sleep(0)  # now it waits for the first one
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        go.set()
        await first
    assert learner.champion == "b"


async def is_too_late(*_: object) -> bool:
    return False


async def begun(found: dict[str, Counting], go: asyncio.Event) -> asyncio.Future[int]:
    """Ask for "b", whose checkpoint comes behind `go`."""
    manager, asked = found["b"].manager, asyncio.Event()
    assert manager is not None
    save = manager.save

    async def later(*args: Any, **options: Any) -> None:
        asked.set()
        await go.wait()
        await save(*args, **options)

    manager.save = later  # type: ignore[method-assign]
    promoting = asyncio.ensure_future(found["main"].learner.promote("b"))
    await asked.wait()
    return promoting


# ---- disks -------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["not written", "written", "unknown"])
async def test_a_promotion_that_fails_is_old_or_new(folder: Path, what: str) -> None:
    async with models(folder) as found:
        await take(found, 0)
        await until_caught_up(found)
        first = found["main"].learner
        engine = first._engine
        assert engine is not None
        assert engine.journal is not None
        file = engine.journal._file
        promote, champion = file.promote, file.champion

        def fail(*args: Any) -> None:
            if what != "not written":
                promote(*args)
            raise JournalError("the disk is gone")

        def unread() -> str:
            raise JournalError("not readable either")

        file.promote = fail  # type: ignore[method-assign]
        if what == "unknown":
            file.champion = unread  # type: ignore[method-assign]
        if what == "written":
            await first.promote("b")
        else:
            said = "Nobody knows whether 'b'" if what == "unknown" else "the disk is gone"
            with pytest.raises(JournalError, match=said):
                await first.promote("b")
        assert first.champion == ("b" if what == "written" else "main")
        file.promote, file.champion = promote, champion  # type: ignore[method-assign]
    async with models(folder) as found:
        assert found["main"].learner.champion == ("main" if what == "not written" else "b")


@pytest.mark.asyncio
async def test_one_that_hangs_in_the_journal_is_told_to_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioreplica.online._models.TURN_S", 0.05)
    disk, begun, go = Failing(), threading.Event(), threading.Event()

    def hangs(statement: str) -> bool:
        begun.set()
        return not go.wait(60)

    journal = Journal(folder / "journal.db", connect=disk.connect)
    rivals: dict[str, Any] = {"b": {}, "c": {}}
    async with models(folder, rivals=rivals, journal=journal) as found, asyncio.timeout(60):
        learner = found["main"].learner
        await take(found, 0)
        await until_caught_up(found)
        await found["b"].learner.checkpoint()
        disk.fails_at = lambda statement: statement == "COMMIT" and hangs(statement)
        first = asyncio.ensure_future(learner.promote("b"))
        await until(begun.is_set)
        try:
            with pytest.raises(JournalError, match="'c' is not promoted: the journal has not"):
                await learner.promote("c")
        finally:
            go.set()
        await first
        assert learner.champion == "b"
        await learner.promote("c")
        assert learner.champion == "c"


@pytest.mark.asyncio
async def test_a_promotion_goes_on_when_who_asked_has_gone(folder: Path) -> None:
    async with models(folder) as found:
        await take(found, 0)
        await until_caught_up(found)
        first = found["main"].learner
        asking = asyncio.ensure_future(first.promote("b"))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert first.champion == "b"
    async with models(folder) as found:
        assert found["main"].learner.champion == "b"
