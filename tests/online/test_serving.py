"""Gates: steps that are undone, versions that are held back, and one that is pinned."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.errors import ContextError, PoisonedExampleError
from aioreplica.online import Candidate, SnapshotReader, StepLimits
from tests.conftest import mirrored

from .program import Counting, example

BAD = 7  # the example that the gates of these tests refuse


def has_learned(candidate: Candidate, program: Counting, number: int) -> bool:
    return bool(candidate.after[program.counts][number])


def gated(folder: Path | None, gate: str, **options: Any) -> Counting:
    """A program with a gate that refuses whatever has learned the bad example."""

    def refuse(candidate: Candidate) -> str:
        return "it has learned 7" if has_learned(candidate, program, BAD) else ""

    program = Counting(folder, **{gate: refuse}, **options)
    return program


@pytest.mark.parametrize("bad", [3, 7])
def test_a_refused_step_is_undone_and_the_example_found(bad: int) -> None:
    async def main() -> None:
        seen: list[tuple[int, int, int]] = []

        async def refuse(candidate: Candidate) -> bool:
            change = candidate.after[program.counts] - candidate.before[program.counts]
            seen.append((candidate.num_examples, int(change.sum()), candidate.after.version))
            assert candidate.scalars["size"] > 0
            return not candidate.after[program.counts][bad]

        program = Counting(max_batch=8, step_check=refuse)
        async with program:
            learner = program.learner
            await learner.pause()
            tickets = [await learner.submit(example(i)) for i in range(8)]
            learner.resume()
            for i, ticket in enumerate(tickets):
                if i == bad:
                    with pytest.raises(PoisonedExampleError, match="has refused"):
                        await ticket
                else:
                    await ticket
            assert program.learned() == [int(i != bad) for i in range(8 - (bad == 7))]
            assert all(num == changed for num, changed, _ in seen)
            [letter] = await learner.dead_letters()
            assert letter.number == bad + 1
            assert letter.error.startswith("ValueError: step_check has refused the step: ")
            assert learner.statistics().num_rollbacks == len(seen) - learner.statistics().num_steps

    art.run(main)


@pytest.mark.asyncio
async def test_a_gate_that_refuses_all_is_the_fault_of_the_step() -> None:
    async with Counting(step_check=lambda _: "no", max_batch=1) as program:
        for i in range(6):
            await program.learner.submit(example(i))
        while program.learner.state != "failed":
            await asyncio.sleep(0)
        assert await program.learner.dead_letters() == ()
        assert "5 examples in a row" in program.learner.statistics().failure


def test_a_check_that_hangs_ends_with_the_time_of_the_step() -> None:
    async def hang(_candidate: Candidate) -> str:
        await asyncio.Event().wait()
        return ""

    async def main() -> None:
        async with Counting(step_check=hang, step_timeout_s=5.0) as program:
            await program.learner.submit(example(0))
            while not program.learner.statistics().failure.endswith("it was ended."):
                await asyncio.sleep(0.1)
            assert program.learned() == []

    art.run(main)


def test_a_verdict_that_hangs_ends_with_the_time_of_a_step_and_holds_back() -> None:
    async def main() -> None:
        async def hang(candidate: Candidate) -> str:
            if has_learned(candidate, program, BAD):
                await asyncio.Event().wait()
            return ""

        program = Counting(publish_if=hang, step_timeout_s=5.0, max_batch=1)
        async with asyncio.timeout(60), program:
            learner = program.learner
            assert await (await learner.submit(example(0))) == 1
            assert await (await learner.submit(example(BAD))) == 2
            now = learner.statistics()
            assert now.held == "publish_if has failed: it took longer than 5 s"
            assert (now.version, now.newest_version, now.num_learned) == (1, 2, 2)
            await learner.pause()

    art.run(main)


@pytest.mark.asyncio
@pytest.mark.parametrize("is_good", [True, False])
async def test_unpin_serves_no_version_that_is_being_judged(folder: Path, is_good: bool) -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    async def gate(_candidate: Candidate) -> bool:
        asked.set()
        await go.wait()
        return is_good

    async with Counting(folder, publish_if=gate, publish_to=folder / "model") as program:
        learner = program.learner
        await learner.pin()
        ticket = await learner.submit(example(0))
        await asked.wait()
        unpinning = asyncio.ensure_future(learner.unpin())
        while learner.statistics().is_pinned:
            await asyncio.sleep(0)
        version = learner.version
        go.set()
        assert (version, await ticket) == (0, 1)
        await unpinning
        assert learner.version == int(is_good)
        assert bool(learner.statistics().held) is not is_good
    async with Counting(folder, publish_if=gate) as again:
        now = again.learner.statistics()
        assert (now.version, now.newest_version) == (int(is_good), 1)
        assert bool(now.held) is not is_good


@pytest.mark.asyncio
async def test_a_version_is_held_back_until_the_gate_lets_one_through(folder: Path) -> None:
    is_open = False

    def gate(candidate: Candidate) -> str | None:
        assert candidate.before.version == served[-1]
        return None if is_open or not has_learned(candidate, program, 1) else "1 is suspicious"

    served = [0]
    program = Counting(folder, publish_if=gate, max_batch=1, publish_to=folder / "model")
    async with program:
        learner = program.learner
        records = learner.records()
        for i in range(3):
            version = await (await learner.submit(example(i)))
            assert version == i + 1
            served.append(learner.version)
            assert (await anext(records)).held == ("" if i == 0 else "1 is suspicious")
        assert served == [0, 1, 1, 1]
        assert learner.snapshot()[program.counts][:3].tolist() == [1, 0, 0]
        assert program.learned() == [1, 1, 1]  # learning goes on
        now = learner.statistics()
        assert (now.version, now.newest_version, now.held) == (1, 3, "1 is suspicious")
        is_open = True
        await (await learner.submit(example(3)))
        assert learner.version == 4
        assert learner.statistics().held == ""
    with SnapshotReader(folder / "model") as reader:
        assert reader.read().version == 4


@pytest.mark.asyncio
@pytest.mark.parametrize("says", [ZeroDivisionError("oh"), 3])
async def test_a_broken_gate_holds_back_and_says_so(says: Any) -> None:
    def gate(_candidate: Candidate) -> Any:
        if isinstance(says, Exception):
            raise says
        return says

    async with Counting(publish_if=gate) as program:
        await (await program.learner.submit(example(0)))
        now = program.learner.statistics()
        assert "publish_if has failed: " in now.held
        assert (now.version, now.newest_version, now.state) == (0, 1, "running")


# ---- what is served after a restart --------------------------------------------------------


@pytest.mark.asyncio
async def test_a_restart_does_not_serve_what_was_held_back(folder: Path) -> None:
    async with gated(folder, "publish_if", publish_to=folder / "model") as program:
        for i in (1, BAD, 2):
            await (await program.learner.submit(example(i)))
        assert program.learner.version == 1
    again = gated(folder, "publish_if", num_replicas=3, publish_to=folder / "model")
    async with again:
        learner = again.learner
        now = learner.statistics()
        assert (now.version, now.newest_version, now.held) == (1, 3, "it has learned 7")
        snapshot = learner.snapshot()
        assert snapshot[again.counts][:8].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
        assert snapshot[again.weight] == program.learner.snapshot()[program.weight]
        assert not snapshot[again.counts].flags.writeable
        assert again.learned() == [0, 1, 1, 0, 0, 0, 0, 1]
        with SnapshotReader(folder / "model") as reader:
            assert reader.read().version == 1
        await learner.pin(3)  # all the same
        assert learner.version == 3


@pytest.mark.asyncio
async def test_a_pin_stays_through_steps_restarts_and_openings(folder: Path) -> None:
    program = Counting(folder, max_batch=1)
    async with program:
        learner = program.learner
        for i in range(2):
            await (await learner.submit(example(i)))
        await learner.pin()
        await (await learner.submit(example(2)))
        assert (learner.version, learner.statistics().newest_version) == (2, 3)
        with pytest.raises(ValueError, match=r"Version 1 cannot be pinned.*there are 3 and 2"):
            await learner.pin(1)
        assert learner.statistics().is_pinned
    async with program:  # the same object
        assert program.learner.version == 2
    async with Counting(folder) as again:
        learner = again.learner
        assert (learner.version, again.learned()) == (2, [1, 1, 1])
        assert learner.snapshot()[again.counts][:3].tolist() == [1, 1, 0]
        await (await learner.submit(example(3)))
        assert learner.version == 2
        await learner.unpin()
        assert learner.version == 4
    async with Counting(folder) as last:
        assert (last.learner.version, last.learner.statistics().is_pinned) == (4, False)


@pytest.mark.asyncio
async def test_a_pin_is_on_disk_when_it_returns(folder: Path) -> None:
    async with Counting(folder, max_batch=1) as program:
        await (await program.learner.submit(example(0)))
        await program.learner.pin()
        assert program.manager is not None
        copy = Counting(num_replicas=2)
        found = ar.CheckpointManager(folder / "checkpoints")
        state: dict[str, Any] = {"variables": copy.variables, "online": {}}
        await found.restore(state)
        assert state["online"]["served"]["version"] == 1
        assert state["online"]["served"]["is_pinned"] is True


@pytest.mark.asyncio
async def test_without_checkpoints_a_pin_lasts_as_long_as_the_learner() -> None:
    async with Counting() as program:
        await program.learner.pin()
        await (await program.learner.submit(example(0)))
        assert program.learner.version == 0
        await program.learner.unpin()
        assert program.learner.version == 1
    with pytest.raises(ContextError):
        await program.learner.pin()


@pytest.mark.asyncio
async def test_checkpoints_of_older_releases_are_restored(folder: Path) -> None:
    old = Counting()
    async with old:
        await (await old.learner.submit(example(0)))
    progress = {"journal": "", "learned": 1, "version": 1}
    async with ar.CheckpointManager(folder / "checkpoints") as manager:
        await manager.save(1, {"variables": old.variables, "online": progress})
    async with Counting(folder, journal=None) as program:
        assert (program.learned(), program.learner.version) == ([1], 1)
        assert program.learner.statistics().learned_number == 1


# ---- limits --------------------------------------------------------------------------------


def judge(limits: StepLimits, **about: Any) -> str:
    before, after = about.pop("before", 1.0), about.pop("after", 1.0)
    with mirrored(2).scope():
        w = ar.Variable(np.full(4, before))
        n = ar.Variable(np.zeros(1, np.int64))
    snapshots = [
        ar.Snapshot(i, {w: (np.full(4, value),), n: (np.full(1, i * 10**9),)})
        for i, value in enumerate([before, after])
    ]
    return asyncio.run(limits(Candidate(snapshots[0], snapshots[1], about, 1)))


@pytest.mark.parametrize(
    ("limits", "after", "said"),
    [
        ({"change": 1.0}, 1.49, ""),
        ({"change": 1.0}, 1.51, "norm 1.02, more than 1"),
        ({"change": 1.0}, 1e200, "norm 2e+200"),
        ({"change": 1.0}, math.inf, "norm inf"),
        ({"change": 1.0}, math.nan, "norm nan"),
        ({"relative_change": 0.5}, 0.51, ""),
        ({"relative_change": 0.5}, 0.49, "more than 0.5 of the 2 of all values"),
    ],
)
def test_the_norm_of_the_change_is_limited(
    limits: dict[str, float], after: float, said: str
) -> None:
    found = judge(StepLimits(**limits), after=after)
    assert said in found
    assert bool(found) == bool(said)


def test_a_relative_limit_lets_the_first_values_be_set() -> None:
    assert judge(StepLimits(relative_change=0.1), before=0.0, after=5.0) == ""


@pytest.mark.asyncio
async def test_a_large_model_is_compared_on_a_thread() -> None:
    with mirrored(1).scope():
        w = ar.Variable(np.zeros(100_000))
    before, after = (ar.Snapshot(i, {w: (np.full(100_000, float(i)),)}) for i in range(2))
    assert "norm 316.2" in await StepLimits(change=316.0)(Candidate(before, after, {}, 1))


def test_a_loss_is_compared_with_the_median_of_those_before() -> None:
    limits = StepLimits(loss=4.0, window=20)
    assert [judge(limits, loss=loss) for loss in [900.0, *[1.0] * 9]] == [""] * 10
    assert judge(limits, loss=3.9) == ""
    assert judge(limits, loss=1e60) == "loss is 1e+60, more than 4 times 1"
    assert judge(limits, loss=math.nan) == "loss is nan"
    refused = [bool(judge(limits, loss=5.0)) for _ in range(20)]
    assert refused == [True] * 6 + [False] * 14  # a level that stays is let through in the end


def test_a_loss_of_another_name() -> None:
    limits = StepLimits(loss=2.0, name="regret")
    for _ in range(10):
        assert judge(limits, regret=1.0, loss=9.0) == ""
    assert "regret is 2.5" in judge(limits, regret=2.5)
    with pytest.raises(ValueError, match="'regret', it returns 'loss'"):
        judge(limits, loss=1.0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: StepLimits(), "at least one"),
        (lambda: StepLimits(change=0.0), "change must be above 0"),
        (lambda: StepLimits(loss=math.nan), "loss must be above 0"),
        (lambda: StepLimits(loss=2.0, window=9), "window must be at least 10"),
    ],
)
def test_wrong_limits_are_said(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_gates_that_are_none_are_said() -> None:
    with pytest.raises(TypeError, match="publish_if must be callable, got 'yes'"):
        Counting(publish_if="yes")
    limits = StepLimits(change=1.0)
    with pytest.raises(ValueError, match="Give each one of its own"):
        Counting(publish_if=limits, step_check=limits)


@pytest.mark.asyncio
async def test_one_example_of_1e60_is_stopped_while_predictions_go_on() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        w, sgd = ar.Variable(np.zeros(2)), ar.optimizers.SGD(0.1)

    async def step(ctx: ar.ReplicaContext, batch: Any) -> float:
        error = batch["x"] @ w.value - batch["y"]
        gradient = batch["x"].T @ error / max(1, len(error))
        await sgd.apply_gradients([(gradient, w)])
        return float(error @ error) / max(1, len(error))

    rng = np.random.default_rng(0)
    async with strategy, ar.online.OnlineLearner(
        strategy, step, {"w": w, "sgd": sgd}, max_batch=4, max_delay_s=0.0, queue_size=64,
        step_check=StepLimits(change=100.0, loss=1e6),
    ) as learner:  # fmt: skip
        tickets = []
        for i in range(40):
            x = rng.normal(size=2) if i != 20 else np.full(2, 1e60)
            tickets.append(await learner.submit({"x": x, "y": x.sum() if i != 20 else 0.0}))
        for i, ticket in enumerate(tickets):
            if i == 20:
                with pytest.raises(PoisonedExampleError, match="step_check has refused"):
                    await ticket
            else:
                await ticket
                assert np.abs(learner.snapshot()[w]).max() < 10
        [letter] = await learner.dead_letters()
        assert letter.number == 21
