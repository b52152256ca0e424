"""What a learner leaves to others on its event loop: turns between its parts, work on threads."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import JournalError
from aioreplica.online import OnlineLearner, _journal_file, _step
from tests.optimizers.rules import Descent

from .program import Counting, example

SETTINGS: Any = {"max_batch": 4, "max_delay_s": 0.0, "queue_size": 8}


@pytest.mark.asyncio
async def test_others_have_their_turn_between_the_parts_of_a_step(
    pair: ar.MirroredStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, marks = 0, list[tuple[str, int]]()

    async def turn_by_turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    def marked(name: str) -> Any:
        call = getattr(_step, name)

        def noted(*args: Any) -> Any:
            marks.append((name, turns))
            return call(*args)

        return noted

    parts = ("Savepoint", "stack_examples", "PerReplica", "_first_non_finite")
    for name in parts:
        monkeypatch.setattr(_step, name, marked(name))
    with pair.scope():
        w, optimizer = ar.Variable(np.zeros(8)), Descent()

    async def step(ctx: ar.ReplicaContext, batch: Any) -> None:
        marks.append(("step", turns))
        await optimizer.apply_gradients([(np.ones(8), w)])

    other = asyncio.create_task(turn_by_turn())
    state = {"w": w, "optimizer": optimizer}
    async with OnlineLearner(pair, step, state, **SETTINGS) as learner:
        version = await (await learner.submit({"x": 1.0}))
        marks.append(("published", turns))
    other.cancel()

    assert version == 1
    assert [name for name, _ in marks] == [*parts[:3], "step", "step", parts[3], "published"]
    made, stacked, split, begun, _, checked, _ = [turn for _, turn in marks]
    assert made < stacked == split < begun < checked


@pytest.mark.asyncio
@pytest.mark.parametrize(("size", "is_on_loop"), [(8, True), (_step.INLINE_STEP_BYTES // 8, False)])
async def test_steps_over_large_arrays_leave_the_loop(
    pair: ar.MirroredStrategy, size: int, is_on_loop: bool
) -> None:
    threads: list[bool] = []

    def note() -> None:
        threads.append(threading.current_thread() is threading.main_thread())

    with pair.scope():
        w, optimizer = ar.Variable(np.zeros(size)), Descent(in_update=note)

    async def step() -> None:
        await optimizer.apply_gradients([(np.ones(size), w)])

    async def learned(_ctx: ar.ReplicaContext, _batch: Any) -> None:
        await step()

    state = {"w": w, "optimizer": optimizer}
    async with OnlineLearner(pair, learned, state, **SETTINGS) as learner:
        await (await learner.submit({"x": 1.0}))
    assert threads == [is_on_loop]
    assert w.value[-1] == -2.0

    await pair.run(step)  # what is no learner's is done where it is done soonest
    assert threads == [is_on_loop, True]


@pytest.mark.asyncio
async def test_examples_are_packed_on_the_thread_of_the_journal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    pack = _journal_file.pack_example

    def packed(given: Any) -> bytes:
        threads.append(threading.current_thread().name)
        if len(threads) == 1:
            raise MemoryError
        return pack(given)

    monkeypatch.setattr(_journal_file, "pack_example", packed)
    async with Counting(folder) as program:
        with pytest.raises(JournalError, match="MemoryError"):
            await program.learner.submit(example(0), key="a")
        ticket = await program.learner.submit(example(0), key="a")
        assert not ticket.is_duplicate
        assert await ticket == 1
        assert program.learned() == [1]
    assert threading.main_thread().name not in threads
