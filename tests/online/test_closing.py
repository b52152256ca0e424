"""Closing while models hang: within its grace, and nobody loses what another one does."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.errors import CheckpointError, ContextError, StallError
from aioreplica.online import Journal, Prequential

from .program import Counting, example
from .test_journal import Failing
from .test_models import models, rival, take, until, until_caught_up
from .test_promotions import begun


class Stuck(Counting):
    """A model whose step of a later example than the first one cannot be ended, until `go`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.go, self.begun = asyncio.Event(), asyncio.Event()

    async def step(self, ctx: ar.ReplicaContext, batch: Any) -> dict[str, float]:
        while (batch["id"] > 0).any() and not self.go.is_set():
            self.begun.set()
            try:
                await self.go.wait()
            except asyncio.CancelledError:  # as a function on a thread goes on
                continue
        return await super().step(ctx, batch)


def stuck(folder: Path, name: str, **options: Any) -> Stuck:
    given = {"journal": None, "num_replicas": 1, "max_batch": 1, "max_delay_s": 0.0}
    return Stuck(folder / name, **(given | options))


LONG = [pytest.param(each, marks=pytest.mark.xslow) for each in (10.0, None)]


@pytest.mark.xslow
@pytest.mark.parametrize("grace_s", [0.5, *LONG])
def test_challengers_that_hang_are_left_behind_and_the_champion_has_saved(
    folder: Path, grace_s: float | None
) -> None:
    async def main() -> None:
        loop, bad = asyncio.get_running_loop(), {name: stuck(folder, name) for name in "bc"}
        async with models(folder, rivals={**bad, "d": {}}, grace_s=grace_s) as found:
            learner = found["main"].learner
            await take(found, 0)
            await until_caught_up(found)
            await take(found, 1, 2)
            await until(lambda: all(each.learner.statistics().lag for each in bad.values()))
            began = loop.time()
            with pytest.warns(RuntimeWarning) as warned:
                await learner.aclose()
            most = {10.0: 10.0, 0.5: 1.5, None: 11.0}[grace_s]
            assert loop.time() - began <= most + 0.1
            assert learner.state == found["d"].learner.state == "closed"
            for name, each in bad.items():
                [text] = [str(each.message) for each in warned if repr(name) in str(each.message)]
                assert f"The challenger {name!r} was not closed in order: The model" in text
                assert "on the thread of a device (cpu:0), where nothing can end it" in text
                assert (each.learner.state, learner.champion) == ("closing", "main")
                assert each.learner.statistics().failure in text
            for name in ("main", "d"):
                assert found[name].manager.steps()[-1] == 3
                assert found[name].learned() == [1] * 3
            for each in bad.values():
                each.go.set()  # the threads end, after all: half a step is undone
                await until(lambda each=each: each.learner.state == "closed")
                assert each.learned() == [1]
        async with models(folder, rivals={"b": {}, "c": {}, "d": {}}) as found:
            await until_caught_up(found)
            assert [each.learned() for each in found.values()] == [[1] * 3] * 4

    art.run(main)


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_a_served_model_is_saved_although_the_first_one_hangs(folder: Path) -> None:
    async with models(folder) as found:
        await take(found, 0)
        await until_caught_up(found)
        await found["main"].learner.checkpoint()
        await found["main"].learner.promote("b")
    first = Stuck(folder, challengers={"b": (second := rival(folder)).learner}, grace_s=2.0)
    async with second.strategy, first.strategy:
        learner = await first.learner.__aenter__()
        for i in (1, 2):
            await (await learner.submit(example(i)))
        with pytest.raises(StallError, match=r"The learner cannot be closed.*cpu:0.*End the"):
            await learner.aclose()
        assert second.learned() == [1] * 3
        assert second.manager is not None
        assert second.manager.steps()[-1] == 3
        first.go.set()
        await until(lambda: learner.state == "closed")
    async with models(folder) as found:
        assert found["main"].learner.champion == "b"
        await until_caught_up(found)
        assert found["main"].learned() == found["b"].learned() == [1] * 3


@pytest.mark.slow
@pytest.mark.asyncio
async def test_closing_that_is_cancelled_waits_for_no_challenger(folder: Path) -> None:
    bad = stuck(folder, "b")
    async with models(folder, rivals={"b": bad}) as found:
        await take(found, 0)
        await until_caught_up(found)
        await take(found, 1)
        await bad.begun.wait()  # one that has not begun its step ends in order
        closing = asyncio.ensure_future(found["main"].learner.aclose())
        await until(lambda: bad.learner.state == "closing")
        closing.cancel()
        with (
            pytest.warns(RuntimeWarning, match="'b' cannot be closed: a step has been"),
            pytest.raises(asyncio.CancelledError),
        ):
            await closing
        assert found["main"].learner.state == "closed"
        assert found["main"].learned() == [1, 1]
        bad.go.set()
        await until(lambda: bad.learner.state == "closed")


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_a_challenger_on_a_thread_that_hangs_is_left_behind(folder: Path) -> None:
    go, begun = threading.Event(), threading.Event()

    def step(ctx: ar.ReplicaContext, batch: Any) -> None:
        begun.set()
        go.wait(60)

    bad = rival(folder)
    bad.learner.step_fn = step
    async with models(folder, rivals={"b": bad}, grace_s=6.0) as found:
        learner = found["main"].learner
        await take(found, 0)
        await until(begun.is_set)
        try:
            with pytest.warns(RuntimeWarning, match="'b' was not closed in order: The model 'b' c"):
                await learner.aclose()
        except BaseException:
            go.set()  # or whatever is wrong here would be hidden by the wait for the thread
            raise
        assert learner.state == "closed"
        assert found["main"].manager is not None
        assert found["main"].manager.steps() == (1,)
        assert "on the thread of a device (cpu:0)" in bad.learner.statistics().failure
        go.set()
        await until(lambda: bad.learner.state == "closed")


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_who_waits_for_a_promotion_that_closing_ends_is_told(folder: Path) -> None:
    async with models(folder, grace_s=3.0) as found:
        learner, manager = found["main"].learner, found["b"].manager
        assert manager is not None
        await take(found, 0)
        await until_caught_up(found)
        asked = asyncio.Event()

        async def hangs(*_args: Any, **_options: Any) -> None:
            asked.set()
            await asyncio.Event().wait()

        manager.save = hangs  # type: ignore[method-assign]
        first = asyncio.ensure_future(learner.promote("b"))
        second = asyncio.ensure_future(learner.promote("main"))
        await asked.wait()
        with pytest.warns(RuntimeWarning, match="The model 'b' was closed after"):
            await learner.aclose()
        with pytest.raises(ContextError, match=r"closed while 'b' was promoted: .*`champion` of"):
            await first
        with pytest.raises(ContextError, match="The learner is closed"):
            await second
        assert learner.champion == "main"


@pytest.mark.asyncio
async def test_who_waits_its_turn_takes_none_from_a_promotion_that_closing_waits_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, go = asyncio.Event(), asyncio.Event()

    async def is_too_late(*_: object) -> bool:
        await late.wait()
        return False

    async with models(folder, rivals={"b": {}, "c": {}}) as found, asyncio.timeout(60):
        learner = found["main"].learner
        await take(found, 0)
        await until_caught_up(found)
        first = await begun(found, go)
        with monkeypatch.context() as waiting:
            waiting.setattr("aioreplica.online._models.ends_in", is_too_late)
            second = asyncio.ensure_future(learner.promote("c"))
            await asyncio.sleep(0)  # now it waits for the first one
            closing = asyncio.ensure_future(learner.aclose())
            await until(lambda: learner.state == "closing")
            late.set()
            with pytest.raises(ContextError, match="The learner is closed"):
                await second
        go.set()
        await closing
        await first
    assert learner.champion == "b"


@pytest.mark.xslow
@pytest.mark.asyncio
@pytest.mark.parametrize("has_rival", [False, True])
async def test_who_waits_for_a_learner_that_hangs_is_told_when_it_is_closed(
    folder: Path, has_rival: bool
) -> None:
    second = rival(folder)
    given: dict[str, Any] = {"challengers": {"b": second.learner}} if has_rival else {}
    first = Stuck(folder, **given, grace_s=0.2, max_batch=1, queue_size=4)
    async with asyncio.timeout(60), second.strategy, first.strategy:
        learner = await first.learner.__aenter__()
        await (await learner.submit(example(0)))
        records = learner.records()
        tickets = [await learner.submit(example(i), key=str(i)) for i in (1, 2, 3)]
        tickets.append(await learner.submit(example(2), key="2"))
        tickets.append(await learner.submit(example(4)))
        asked = [learner.checkpoint(), learner.rollback(to=1), learner.submit(example(5))]
        tasks = [asyncio.ensure_future(each) for each in asked]
        await asyncio.sleep(0)  # now they all wait
        await until(lambda: learner.statistics().step_running_s)
        try:
            with pytest.raises(StallError):
                await learner.aclose()
            async with asyncio.timeout(10):
                told = await asyncio.gather(*tickets, *tasks, return_exceptions=True)
                assert [each async for each in records] == []
            assert learner.state == "closing"  # the journal is its own still
        finally:
            first.go.set()
        said = "The learner was closed before the example was learned. The journal has it."
        assert [str(each) for each in told[:5]] == [said] * 5
        kinds = [CheckpointError, ContextError, ContextError]
        assert [type(each) for each in told[5:]] == kinds
        await until(lambda: learner.state == "closed")
        assert first.learned() == [1]
    async with Counting(folder, max_batch=1) as again:
        await until(lambda: not again.learner.statistics().backlog)
        assert again.learned() == [1] * 5


@pytest.mark.asyncio
async def test_who_waits_for_a_disk_that_hangs_is_told_when_the_learner_is_closed(
    folder: Path,
) -> None:
    disk, begun, go = Failing(), threading.Event(), threading.Event()

    def hangs(statement: str) -> bool:
        begun.set()
        return not go.wait(60)

    journal = Journal(folder / "journal.db", connect=disk.connect)
    program = Counting(folder, journal=journal, grace_s=0.1)
    async with asyncio.timeout(60), program.strategy:
        learner = await program.learner.__aenter__()
        await (await learner.submit(example(0)))
        disk.fails_at = lambda statement: statement == "COMMIT" and hangs(statement)
        first = asyncio.ensure_future(learner.submit(example(1)))
        await until(begun.is_set)
        second = asyncio.ensure_future(learner.submit(example(2)))
        await asyncio.sleep(0)  # behind the commit under way
        try:
            with pytest.raises(StallError, match="the disk does not take what it has to write"):
                await learner.aclose()
            async with asyncio.timeout(10):
                told = await asyncio.gather(first, second, return_exceptions=True)
        finally:
            go.set()
        assert ["so it may be in the journal or not" in str(each) for each in told] == [True] * 2
        await until(lambda: learner.state == "closed")


@pytest.mark.asyncio
async def test_who_asks_for_a_checkpoint_while_one_begins_is_told_too(folder: Path) -> None:
    async with asyncio.timeout(60), Counting(folder) as program:
        learner, asked = program.learner, asyncio.Event()

        async def hangs(*_args: Any, **_options: Any) -> None:
            asked.set()
            await asyncio.Event().wait()

        assert program.manager is not None
        program.manager.save = hangs  # type: ignore[method-assign]
        await (await learner.submit(example(0)))
        tasks = [asyncio.ensure_future(learner.checkpoint())]
        await asked.wait()
        tasks.append(asyncio.ensure_future(learner.checkpoint()))
        closing = asyncio.ensure_future(learner.aclose())
        await until(lambda: learner.state == "closing")
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        told = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(each) for each in told] == [
            "No checkpoint was saved: the learner was closed"
        ] * 2


# ---- gates and hooks that hang -------------------------------------------------------------


class Hanging:
    """A gate, or a hook behind a detector that finds a drift in everything, which never ends."""

    drift_detected = True

    def __init__(self, *, swallows: bool = False) -> None:
        self.asked, self.go, self.swallows = asyncio.Event(), asyncio.Event(), swallows

    def update(self, _x: float) -> None:
        """Take a value."""

    async def __call__(self, *_given: object) -> bool:
        self.asked.set()
        while not self.go.is_set():
            try:
                await self.go.wait()
            except asyncio.CancelledError:
                if not self.swallows:
                    raise
        return True


@pytest.mark.parametrize("where", ["gate", "hook"])
@pytest.mark.parametrize("grace_s", [1.0, None])
def test_who_waits_for_a_ticket_is_told_if_closing_ends_a_gate_or_a_hook(
    where: str, grace_s: float | None
) -> None:
    async def main() -> None:
        hanging = Hanging()
        options: dict[str, Any] = {"publish_if": hanging}
        if where == "hook":
            drifts = Prequential(
                lambda _snapshot, ids: ids, {}, detector=lambda: hanging, on_drift=hanging,
                split=lambda batch: (batch["id"], batch["id"]),
            )  # fmt: skip
            options = {"prequential": drifts}
        program = Counting(max_batch=1, grace_s=grace_s, **options)
        async with asyncio.timeout(60), program.strategy:
            learner = await program.learner.__aenter__()
            records = learner.records()
            tickets = [await learner.submit(example(i)) for i in range(2)]
            await hanging.asked.wait()
            closing = asyncio.ensure_future(learner.aclose())
            await until(lambda: learner.state == "closing")
            if grace_s is None:
                closing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await closing
            else:
                with pytest.warns(RuntimeWarning, match="after 1 s with 1 examples left"):
                    await closing
            assert await tickets[0] == 1
            with pytest.raises(ContextError, match="closed before the example was learned"):
                await tickets[1]
            [record] = [each async for each in records]
            held = "" if where == "hook" else "publish_if was ended before it has judged it"
            assert (record.version, record.held) == (1, held)
            now = learner.statistics()
            assert (now.num_learned, now.held) == (1, held)
            assert now.version == (1 if where == "hook" else 0)

    art.run(main)


@pytest.mark.parametrize("is_journalled", [True, False])
def test_who_waits_for_a_ticket_is_told_if_a_gate_cannot_be_ended(
    folder: Path, is_journalled: bool
) -> None:
    async def main() -> None:
        gate = Hanging(swallows=True)
        program = Counting(folder if is_journalled else None, publish_if=gate, grace_s=1.0)
        async with asyncio.timeout(60), program.strategy:
            learner = await program.learner.__aenter__()
            ticket = await learner.submit(example(0))
            await gate.asked.wait()
            with pytest.raises(StallError):
                await learner.aclose()
            with pytest.raises(ContextError, match="closed before the example was learned"):
                await ticket
            gate.go.set()
            await until(lambda: learner.state == "closed")
            assert program.learned() == [1]

    art.run(main)


def test_what_was_not_judged_is_not_served_when_the_learner_is_opened_again() -> None:
    async def main() -> None:
        gate = Hanging()
        program = Counting(publish_if=gate, grace_s=1.0)
        async with asyncio.timeout(60), program.strategy:
            learner = await program.learner.__aenter__()
            await learner.submit(example(0))
            await gate.asked.wait()
            with pytest.warns(RuntimeWarning, match="was closed after 1 s"):
                await learner.aclose()
            async with learner:
                assert not learner.snapshot()[program.counts].any()
                assert learner.statistics().held == "publish_if was ended before it has judged it"
                gate.go.set()
                assert await (await learner.submit(example(1))) == learner.version == 2
                assert program.learned() == [1, 1]

    art.run(main)


@pytest.mark.asyncio
async def test_a_model_that_is_served_is_closed_by_its_learner_alone(folder: Path) -> None:
    async with models(folder, rivals={"b": {}, "c": {}}) as found:
        learner = found["main"].learner
        await take(found, 0)
        await until_caught_up(found)
        await learner.promote("b")
        with pytest.raises(ContextError, match=r"The model 'b' is served.*Promote another one"):
            await found["b"].learner.aclose()
        await take(found, 1)
        promoting = asyncio.ensure_future(learner.promote("c"))
        closing = asyncio.ensure_future(found["c"].learner.aclose())
        await promoting
        with pytest.raises(ContextError, match="The model 'c' is served"):
            await closing
        await found["b"].learner.aclose()
        await found["b"].learner.aclose()
        assert (learner.champion, found["b"].learner.state) == ("c", "closed")
        with pytest.raises(ValueError, match="'b' cannot be promoted, as it is closed"):
            await learner.promote("b")
        await take(found, 2)
        assert found["c"].learned() == [1] * 3
    await found["c"].learner.aclose()  # it is closed already


@pytest.mark.xslow
@pytest.mark.asyncio
@pytest.mark.parametrize("grace_s", [0.2, None])
async def test_a_promotion_that_waits_holds_up_no_closing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, grace_s: float | None
) -> None:
    monkeypatch.setattr("aioreplica.online._models.CLOSE_S", 0.1)
    bad = stuck(folder, "b", grace_s=grace_s)
    async with models(folder, rivals={"b": bad, "c": {}}, grace_s=10.0) as found:
        learner = found["main"].learner
        await take(found, 0)
        await until_caught_up(found)
        await take(found, 1)
        await until(lambda: bad.learner.statistics().step_running_s)
        promoting = [asyncio.ensure_future(learner.promote(name)) for name in "bc"]
        await asyncio.sleep(0)  # now the first one waits for a checkpoint, the other one for that
        try:
            async with asyncio.timeout(10):
                await found["c"].learner.aclose()
                assert (found["c"].learner.state, bad.learner.state) == ("closed", "running")
                assert not promoting[0].done()
                closing = asyncio.ensure_future(bad.learner.aclose())
                with pytest.raises(CheckpointError, match="saved: the learner was closed"):
                    await promoting[0]
                with pytest.raises(ValueError, match="'c' cannot be promoted, as it is closed"):
                    await promoting[1]
                if grace_s is not None:
                    with pytest.raises(StallError, match="The model 'b' cannot be closed: a step"):
                        await closing
            assert (learner.champion, bad.learner.state) == ("main", "closing")
        finally:
            bad.go.set()
        if grace_s is None:
            await closing
        await until(lambda: bad.learner.state == "closed")
        await take(found, 2)
        assert (learner.champion, found["main"].learned()) == ("main", [1] * 3)


@pytest.mark.asyncio
@pytest.mark.filterwarnings("ignore:The model 'b' was closed after 0.1 s")  # at the end, if so
async def test_a_model_whose_promotion_is_being_written_is_not_closed(folder: Path) -> None:
    disk, begun, go = Failing(), threading.Event(), threading.Event()

    def hangs(statement: str) -> bool:
        begun.set()
        return not go.wait(60)

    journal = Journal(folder / "journal.db", connect=disk.connect)
    async with models(folder, rivals={"b": {"grace_s": 0.1}}, journal=journal) as found:
        learner, second = found["main"].learner, found["b"].learner
        await take(found, 0)
        await until_caught_up(found)
        await second.checkpoint()
        disk.fails_at = lambda statement: statement == "COMMIT" and hangs(statement)
        promoting = asyncio.ensure_future(learner.promote("b"))
        await until(begun.is_set)
        try:
            async with asyncio.timeout(10):
                with pytest.raises(ContextError, match=r"'b' is being promoted, so it is closed w"):
                    await second.aclose()
        finally:
            go.set()
        await promoting
        await take(found, 1)
        assert (learner.champion, second.state, second.version) == ("b", "running", learner.version)
