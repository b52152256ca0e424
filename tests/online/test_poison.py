"""Poisoned examples: found among the good ones, whatever they do; nothing of them stays."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aioreplica as ar
from aioreplica import testing as art
from aioreplica.checkpoint import Savepoint
from aioreplica.errors import ContextError, PoisonedExampleError

from .program import RAISES, WRITES_NAN, Counting, example


@settings(max_examples=25)
@given(
    moods=st.lists(st.sampled_from([0.0, 0.0, RAISES, WRITES_NAN]), min_size=1, max_size=12),
    max_batch=st.integers(1, 12),
)
def test_exactly_the_poisoned_are_set_aside(moods: list[float], max_batch: int) -> None:
    async def main() -> None:
        async with Counting(max_batch=max_batch, max_failures_in_a_row=None) as program:
            learner = program.learner
            await learner.pause()
            tickets = [await learner.submit(example(i, mood)) for i, mood in enumerate(moods)]
            learner.resume()
            for ticket, mood in zip(tickets, moods, strict=True):
                if mood:
                    cause = "NonFiniteError" if mood == WRITES_NAN else "ValueError"
                    with pytest.raises(PoisonedExampleError, match=f"set aside: {cause}"):
                        await ticket
                else:
                    assert await ticket > 0
                assert program.is_one_version()
            good = [i for i, mood in enumerate(moods) if not mood]
            counts = program.learned()
            assert [i for i, count in enumerate(counts) if count] == good
            assert max(counts, default=1) == 1
            # Steps of undone batches left nothing in the optimizer either.
            assert program.adam.iterations.value == learner.statistics().num_steps

    art.run(main)


@pytest.mark.asyncio
async def test_an_error_in_the_first_step_leaves_no_slots() -> None:
    async with Counting() as program:
        learner = program.learner
        with pytest.raises(PoisonedExampleError, match=r"NonFiniteError.*'sums'"):
            await (await learner.submit(example(0, WRITES_NAN)))
        assert program.adam.get_slot(program.weight, "m") is None
        assert program.adam.iterations.value == 0
        assert program.weight.value == 0.0
        await (await learner.submit(example(1)))
        assert learner.snapshot().version == 1
        reference = Counting()
        async with reference:
            await (await reference.learner.submit(example(1)))
        assert np.array_equal(reference.weight.value, program.weight.value)


@pytest.mark.asyncio
async def test_examples_of_other_shapes_are_learned_apart() -> None:
    async with Counting() as program:
        learner = program.learner
        await learner.pause()
        wide = example(1) | {"x": np.zeros(3)}
        odd = {"id": 2}
        tickets = [await learner.submit(each) for each in (example(0), wide, odd, example(3))]
        learner.resume()
        await tickets[3]
        with pytest.raises(PoisonedExampleError, match="KeyError"):
            await tickets[2]
        assert program.learned() == [1, 1, 0, 1]


@pytest.mark.asyncio
async def test_results_of_a_step_are_checked() -> None:
    async def step(ctx: ar.ReplicaContext, batch: Any) -> Any:
        return "fine"

    async with Counting() as program:
        program.learner.step_fn = step
        with pytest.raises(PoisonedExampleError, match="None, a number or a dict of numbers"):
            await (await program.learner.submit(example(0)))


@pytest.mark.asyncio
async def test_a_savepoint_puts_everything_back() -> None:
    rng = np.random.default_rng(1)
    async with Counting() as program:
        with program.strategy.scope():
            mean = ar.metrics.Mean()
        state: dict[str, Any] = {**program.variables, "rng": rng, "notes": [1], "mean": mean}

        async def step() -> None:
            await program.adam.apply_gradients([(np.ones(1), program.weight)])
            mean.update_state(3.0)

        await program.strategy.run(step)
        savepoint = Savepoint(state)
        drawn = rng.random()
        state["notes"].append(2)
        slot = program.adam.get_slot(program.weight, "m")
        assert slot is not None
        before = [v.value.copy() for v in (program.weight, slot, program.adam.iterations)]
        version = program.weight.version
        await program.strategy.run(step)
        await program.strategy.run(step)
        assert {key for key, _ in savepoint.written()} == {
            "weight", "adam/iterations", "adam/slots/weight/m", "adam/slots/weight/v",
            "mean/0", "mean/1",
        }  # fmt: skip
        savepoint.put_back()
        after = [v.value for v in (program.weight, slot, program.adam.iterations)]
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        assert (rng.random(), state["notes"], mean.result()) == (drawn, [1], 3.0)
        assert program.weight.version == version + 3


@pytest.mark.asyncio
async def test_changes_of_containers_in_the_state_are_undone() -> None:
    async with Counting() as program:
        table = np.zeros(2)
        state: dict[str, Any] = {"w": program.weight, "loss": 0.0, "table": table, "parts": [table]}
        savepoint = Savepoint(state)

        async def step() -> None:
            await program.adam.apply_gradients([(np.ones(1), program.weight)])

        await program.strategy.run(step)
        table[:] = 5
        state["loss"] = np.float64(3.0)  # of another kind than it was
        state["table"] = np.ones(3)
        state["parts"].clear()
        state["seen"] = 1
        savepoint.put_back()
        assert program.weight.value == 0.0
        assert state["loss"] == 0.0
        assert state["table"] is state["parts"][0] is table
        assert np.array_equal(table, np.zeros(2))


@pytest.mark.asyncio
async def test_a_step_that_cannot_be_undone_ends_the_learner(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_self: Savepoint) -> None:
        raise RuntimeError("no way back")

    program = Counting(folder)
    assert program.manager is not None
    async with program.strategy, program.manager:
        learner = program.learner
        await learner.__aenter__()
        await (await learner.submit(example(0)))
        monkeypatch.setattr(Savepoint, "put_back", broken)
        ticket = await learner.submit(example(1, RAISES))
        with pytest.raises(ContextError, match="The journal has it"):
            await ticket
        assert program.counts.value[1] == 1  # of half a step: nobody may see that
        assert learner.snapshot()[program.counts][1] == 0
        with pytest.raises(ContextError, match="could not be undone: RuntimeError: no way back"):
            await learner.aclose()
        assert program.manager.steps() == ()
    monkeypatch.undo()
    async with Counting(folder) as program:
        await (await program.learner.submit(example(2)))
        assert program.learned() == [1, 0, 1]
        assert [letter.number for letter in await program.learner.dead_letters()] == [2]


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a bad \ud800 text"), r"ValueError: a bad \ud800 text"),
        (UnspeakableError(), "UnspeakableError, whose text cannot be shown"),
    ],
)
async def test_a_dead_letter_holds_the_errors_of_all_replicas(
    folder: Path, error: Exception, said: str
) -> None:
    async def step(ctx: ar.ReplicaContext, batch: Any) -> None:
        await ctx.barrier()
        raise type(error)(*error.args)

    async with Counting(folder) as program:
        learner = program.learner
        learner.step_fn = step
        with pytest.raises(PoisonedExampleError):
            await (await learner.submit(example(0)))
        [letter] = await learner.dead_letters()
        assert letter.error.startswith(said)
        learner.step_fn = program.step
        await (await learner.submit(example(1)))
        assert await learner.checkpoint() == 2
