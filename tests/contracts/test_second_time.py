"""The second time: what was closed and opened again goes on as if it had not been.

Each test does the same once with one object, and once with a new one for each part of the work, and
compares all that can be seen of both.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.cluster import LocalCommunicator
from aioreplica.errors import CheckpointError, KeyReusedError, PoisonedExampleError
from aioreplica.online import Journal, OnlineLearner
from tests.cluster.thread_engine import ThreadCommunicator
from tests.conftest import mirrored

pytestmark = pytest.mark.slow

Part = Callable[[Any], Awaitable[object]]
Opened = Callable[[], Any]


async def seen_in_parts(opened: Opened, parts: list[Part], *, reopens: bool) -> list[object]:
    """Return what each part has seen of the object, which is one or a new one for each part."""
    seen = []
    async with AsyncExitStack() as stack:
        thing = None if reopens else await stack.enter_async_context(opened())
        for part in parts:
            if reopens:
                async with opened() as own:
                    seen.append(await part(own))
            else:
                seen.append(await part(thing))
    return seen


# ---- checkpoint managers ---------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "steps", [(1, 2, 3), (1, 2, 3, 4, 5, 6, 2), (1, 2, 3, 4, 2, 3, 2, 4), (5, 5, 5, 1, 1)]
)
@pytest.mark.parametrize("max_to_keep", [1, 2, 3])
async def test_managers_keep_the_order_of_saves(
    steps: tuple[int, ...], max_to_keep: int, folder: Path
) -> None:
    """The newest is the one saved last, also where the steps go back and some were removed."""

    def saving(number: int, step: int) -> Part:
        async def part(manager: ar.CheckpointManager) -> object:
            await manager.save(step, {"x": ar.Variable(float(number))})
            x = ar.Variable(-1.0)
            restored = await manager.restore({"x": x})
            return manager.latest(), manager.steps(), restored, float(x.value)

        return part

    parts = [saving(number, step) for number, step in enumerate(steps)]
    expected, kept = [], list[int]()
    for number, step in enumerate(steps):
        kept = [*(each for each in kept if each != step), step][-max_to_keep:]
        expected.append((step, tuple(sorted(kept)), step, float(number)))
    for reopens in (False, True):
        home = folder / str(reopens)

        def opened(home: Path = home) -> ar.CheckpointManager:
            return ar.CheckpointManager(home, max_to_keep=max_to_keep)

        assert await seen_in_parts(opened, parts, reopens=reopens) == expected


@pytest.mark.asyncio
async def test_a_second_manager_of_a_folder_is_refused_until_the_first_is_closed(
    folder: Path,
) -> None:
    state = {"x": ar.Variable(1.0)}
    for step in range(2):
        async with ar.CheckpointManager(folder) as first:
            await first.save(2 * step, state)
            async with ar.CheckpointManager(folder) as second:
                with pytest.raises(CheckpointError, match="in use"):
                    await second.save(2 * step + 1, state)
                assert await second.restore(state) == 2 * step


# ---- windows of gradients --------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("is_weighted", [False, True])
async def test_windows_go_on_in_the_middle(reduction: Any, is_weighted: bool, folder: Path) -> None:
    """Unequal counts of gradients, two windows; saved and restored after each gradient."""
    counts = [(2, 1), (1, 0), (0, 2), (3, 3)]

    @asynccontextmanager
    async def opened(home: Path) -> AsyncIterator[Any]:
        strategy = mirrored(2)
        with strategy.scope():
            w = ar.Variable(np.zeros(2))
            sgd = ar.optimizers.SGD(1.0, momentum=0.5, loss_reduction=reduction)
            window = ar.GradientAccumulator(sgd)
        state = {"w": w, "sgd": sgd, "window": window}
        async with strategy, ar.CheckpointManager(home, max_to_keep=2) as manager:
            if manager.latest() is not None:
                await manager.restore(state)
            yield strategy, w, window, sgd
            await manager.save((manager.latest() or 0) + 1, state)

    def adding(count: tuple[int, int], is_end: bool) -> Part:
        async def part(opened: Any) -> object:
            strategy, w, window, sgd = opened

            async def step(own: Any) -> None:
                for i in range(own):
                    value = np.array([1.0, i + 1.0])
                    await window.add([(ar.Weighted(value, i + 2) if is_weighted else value, w)])
                if is_end:
                    await window.apply()

            await strategy.run(step, args=(ar.PerReplica(list(count)),))
            return w.value.tolist(), int(sgd.iterations.value), window.num_added

        return part

    parts = [adding(count, number % 2 == 1) for number, count in enumerate(counts)]
    once = await seen_in_parts(lambda: opened(folder / "a"), parts, reopens=False)
    again = await seen_in_parts(lambda: opened(folder / "b"), parts, reopens=True)
    assert again == once
    assert once[-1] != once[1]


# ---- groups of workers -----------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [LocalCommunicator, ThreadCommunicator])
@pytest.mark.parametrize("ranks", [(0, 1), (0, 2), (0, 1, 2), (1,)])
async def test_splits_and_groups_made_again(kind: Any, ranks: tuple[int, ...]) -> None:
    """The same split twice, a split of a split, each used while and after another one is closed."""

    async def use(*members: Any) -> list[Any]:
        totals = [c.all_reduce(c.rank + 1) for c in members]
        return [int(total) for total in await asyncio.gather(*totals)]

    async def close(*members: Any) -> None:
        await asyncio.gather(*(c.aclose() for c in members))

    total = len(ranks) * (len(ranks) + 1) // 2
    for _ in range(2):
        group = kind.group(3, timeout=60.0)
        made = [[group[rank].split(ranks) for _ in range(2)] for rank in ranks]
        first, second = zip(*made, strict=True)  # each worker has made both before the next one
        inner = [c.split(range(len(ranks))) for c in first]
        for _ in range(2):
            for members in (first, second, inner):
                assert await use(*members) == [total] * len(ranks)
        await close(*first)
        assert await use(*second) == await use(*inner) == [total] * len(ranks)
        third = [group[rank].split(ranks) for rank in ranks]
        assert await use(*third) == [total] * len(ranks)
        await close(*inner)
        await close(*second)
        assert await use(*third) == [total] * len(ranks)
        assert await use(*group) == [6, 6, 6]
        await close(*group, *third)


# ---- learners and their journals -------------------------------------------------------------


class Learning:
    """A learner over a folder; `total` is the sum of what was learned."""

    def __init__(self, folder: Path, *, has_checkpoints: bool) -> None:
        self.strategy = mirrored(2)
        with self.strategy.scope():
            self.total = ar.Variable(0.0, aggregation="sum")
        manager = ar.CheckpointManager(folder / "steps", max_to_keep=2)
        self.manager = manager if has_checkpoints else None
        self.learner = OnlineLearner(
            self.strategy, self.step, {"total": self.total}, max_batch=4, max_delay_s=0.0,
            queue_size=20, checkpoints=self.manager,
            journal=Journal(folder / "journal.db", keep_keys_s=100.0),
        )  # fmt: skip
        self.stack = AsyncExitStack()

    async def step(self, ctx: ar.ReplicaContext, batch: Any) -> None:
        if (batch["x"] < 0).any():
            raise ValueError("negative")
        await self.total.assign_add(float(batch["x"].sum()))

    async def __aenter__(self) -> Any:
        for thing in (self.strategy, self.manager, self.learner):
            if thing is not None:
                await self.stack.enter_async_context(thing)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.stack.aclose()


def submits(x: float, key: str | None = None) -> Part:
    async def part(learning: Learning) -> object:
        try:
            ticket = await learning.learner.submit({"x": x}, key=key)
        except KeyReusedError as error:
            return str(error)
        async with asyncio.timeout(60):
            try:
                await ticket
            except PoisonedExampleError as error:
                return ticket.number, ticket.is_duplicate, error.number
        return ticket.number, ticket.is_duplicate, float(learning.total.value)

    return part


async def saves(learning: Learning) -> object:
    if learning.manager is not None:
        return await learning.learner.checkpoint() and None
    return None


def on_letters(verb: str, number: int) -> Part:
    async def part(learning: Learning) -> object:
        try:
            done = await getattr(learning.learner, verb)(number)
            if verb == "retry":
                with pytest.raises(PoisonedExampleError):
                    await done
        except KeyError:
            return "none"
        letters = await learning.learner.dead_letters()
        return [letter.number for letter in letters], float(learning.total.value)

    return part


def waits(seconds: float) -> Part:
    async def part(_learning: Learning) -> object:
        return await asyncio.sleep(seconds)

    return part


@pytest.mark.parametrize("has_checkpoints", [False, True])
@pytest.mark.parametrize(
    "parts",
    [
        [submits(1.0, "a"), submits(1.0, "a"), submits(2.0, "b"), submits(1.0, "a"),
         submits(2.0, "b"), submits(3.0, "b")],
        [submits(1.0, "a"), saves, submits(1.0, "a"), submits(2.0), saves, submits(1.0, "a")],
        [submits(-1.0, "a"), submits(-1.0, "a"), on_letters("discard", 1), submits(1.0)],
        [submits(1.0), submits(-1.0), saves, on_letters("retry", 2), on_letters("discard", 3),
         on_letters("discard", 3), on_letters("retry", 2), submits(2.0)],
        [submits(1.0, "a"), waits(60.0), submits(1.0, "a"), waits(39.0), submits(1.0, "a"),
         waits(2.0), submits(1.0, "a"), submits(1.0, "a")],
    ],
    ids=["newest key", "checkpoints", "newest dead letter", "letters", "keys that grow old"],
)  # fmt: skip
def test_learners_go_on_where_the_journal_ends(
    parts: list[Part], has_checkpoints: bool, folder: Path
) -> None:
    async def main() -> None:
        seen = []
        for reopens in (False, True):
            home = Path(tempfile.mkdtemp(dir=folder))  # the schedule may begin twice

            def opened(home: Path = home) -> Learning:
                return Learning(home, has_checkpoints=has_checkpoints)

            seen.append(await seen_in_parts(opened, parts, reopens=reopens))
        assert seen[0] == seen[1]

    art.run(main)
