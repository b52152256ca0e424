"""Compiled calls that end early, or meet others: queues, records, restores, stalls, first calls."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.telemetry import EventLog
from tests.conftest import mirrored
from tests.replica.gated import GatedOp, me, spawn

jax = pytest.importorskip("jax")

from aioreplica.device_loop._compiled import _loop  # noqa: E402
from aioreplica.device_loop._compiled._program import StepProgram  # noqa: E402
from aioreplica.strategies import _run_steps  # noqa: E402
from tests.device_loop.compiled_steps import adam, elements, model  # noqa: E402

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio, pytest.mark.slow]


@pytest.mark.parametrize("ends", ["cancelled", "stalled"])
async def test_a_call_ends_while_the_device_that_leads_is_busy(
    gang: ar.Strategy, ends: str
) -> None:
    """Its op is taken back from the queue then: nobody leads, and the others have to go."""
    w, _, step = model(gang, adam)
    loop, started, queued = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    iterator, busy, followers = iter(elements(gang, 4)), GatedOp(), []

    def holds(ctx: ar.MultiStepContext, x: Any) -> None:
        loop.call_soon_threadsafe(started.set)
        busy()

    def waits(wait: Any) -> None:
        if wait.describe() == "the compiled steps":
            followers.append(wait)
        if len(followers) == gang.num_replicas_in_sync - 1:
            loop.call_soon_threadsafe(queued.set)

    async with mirrored(1) as other:
        held = spawn(other.run_steps(holds, iter([ar.PerReplica([np.ones(3)])]), 1))
        await started.wait()
        remove = gang.observers.add(ar.telemetry.Observer(wait_began=waits))
        run = spawn(gang.run_steps(step, iterator, 4, compile="jax"))
        await queued.wait()
        if ends == "cancelled":
            run.cancel()
        else:
            [group] = gang._runtime.lifecycle.active_groups()
            group.stalled(1.0)
        with pytest.raises(asyncio.CancelledError if ends == "cancelled" else ar.errors.StallError):
            await run
        remove()
        busy.gate.set()
        await held

    result = await gang.run_steps(step, iterator, 4, compile="jax")
    assert (result.steps_run, w.version) == (4, 4)  # with all lanes, and all elements


@pytest.mark.parametrize("records", [lambda ctx: ctx.record, lambda ctx: me().record])
async def test_a_record_needs_a_name(pair: ar.Strategy, records: Any) -> None:
    w, _, step = model(pair, adam)

    def recording(ctx: ar.MultiStepContext, x: Any, y: Any) -> None:
        step(ctx, x, y)
        records(ctx)(7, x[0, 0])

    iterator = iter(elements(pair, 3))
    with pytest.raises(TypeError, match="The name of an event must be a str, got 7"):
        await pair.run_steps(recording, iterator, 3, compile="jax")

    assert w.version == 0
    left = await pair.run_steps(step, iterator, 3, compile="jax")
    assert left.steps_run == 3


async def test_elements_of_steps_that_are_written_do_not_go_back(pair: ar.Strategy) -> None:
    w, _, step = model(pair, adam)

    def recording(ctx: ar.MultiStepContext, x: Any, y: Any) -> None:
        step(ctx, x, y)
        ctx.record("x", x[0, 0])

    iterator = iter(elements(pair, 5))
    with (
        mock.patch.object(EventLog, "add_scalar", side_effect=OSError("full")),
        pytest.raises(OSError, match="full"),
    ):
        await pair.run_steps(recording, iterator, 5, compile="jax", every=2)

    assert w.version == 2
    left = await pair.run_steps(step, iterator, 5, compile="jax")
    assert (left.steps_run, w.version) == (3, 5)


async def test_slots_that_a_restore_lets_go_are_made_anew(
    pair: ar.Strategy, tmp_path: Path
) -> None:
    w, optimizer, step = model(pair, adam)
    state, batches, values, slots = {"w": w, "optimizer": optimizer}, elements(pair, 6), [], []
    async with ar.CheckpointManager(tmp_path) as manager:
        await manager.save(0, state)  # before the first update: without slots
        for _ in range(2):
            await pair.run_steps(step, iter(batches), 6, compile="jax")
            values.append(w.value.copy())
            slots.append(optimizer.get_slot(w, "m"))
            await manager.restore(state, 0)
            assert optimizer.get_slot(w, "m") is None

    np.testing.assert_array_equal(*values)
    first, second = slots
    assert (first.version, second.version) == (6, 6)
    assert first is not second


async def test_a_program_that_runs_is_no_stall(pair: ar.Strategy) -> None:
    _, _, step = model(pair, adam)
    wait, compiled, loop = jax.block_until_ready, StepProgram.compiled, asyncio.get_running_loop()
    moves: dict[str, list[bool]] = {"runs": [], "compiles": [], "waits": []}
    is_idle = asyncio.Event()

    def look(what: str) -> None:
        [group] = pair._runtime.lifecycle.active_groups()
        moves[what].append(group.progress() != group.progress())

    def waited(arrays: Any) -> Any:
        look("runs")
        return wait(arrays)

    def compiles(*args: Any, **options: Any) -> Any:
        look("compiles")
        return compiled(*args, **options)

    def waits(wait: Any) -> None:
        if wait.describe() == "the infeed for step 3":
            loop.call_soon_threadsafe(is_idle.set)

    async def stream() -> AsyncIterator[Any]:
        *others, last = elements(pair, 4)
        for element in others:
            yield element
        await is_idle.wait()
        look("waits")
        yield last

    remove = pair.observers.add(ar.telemetry.Observer(wait_began=waits))
    with (
        mock.patch.object(jax, "block_until_ready", waited),
        mock.patch.object(StepProgram, "compiled", compiles),
    ):
        await pair.run_steps(step, stream(), 4, compile="jax", every=3)
    remove()

    assert {what: set(found) for what, found in moves.items()} == {
        "runs": {True}, "compiles": {True}, "waits": {False},
    }  # fmt: skip


@pytest.mark.parametrize("fails", ["element", "stacking", "prepare"])
async def test_chunks_before_one_that_cannot_be_made_are_published(
    pair: ar.Strategy, fails: str
) -> None:
    """Whatever `every` says."""
    with pair.scope():
        w = ar.Variable(np.zeros(3, np.float32))
        rates = [0.1] * (5 if fails == "prepare" else 9)
        optimizer = ar.optimizers.SGD(lambda number: rates[number])

    def step(ctx: ar.MultiStepContext, x: Any, number: Any) -> None:
        optimizer.blocking.apply_gradients([(x, w)])

    kind, bad = {"element": (np.int64, 2**40), "stacking": (int, 2**70)}.get(fails, (int, 5))
    elements = [
        (ar.PerReplica([np.ones(3, np.float32)] * 2), kind(bad if i == 5 else i)) for i in range(8)
    ]
    iterator = iter(elements)
    with (
        mock.patch.object(_loop, "MAX_CHUNK", 2),
        pytest.raises((OverflowError, KeyError, IndexError)),
    ):
        await pair.run_steps(step, iterator, 8, compile="jax")

    left = await pair.run_steps(lambda ctx, x, number: None, iterator, 8)
    assert (w.version, left.steps_run) == (4, 4)


async def test_first_calls_at_the_same_time_share_what_is_compiled(pair: ar.Strategy) -> None:
    recorded, loaded, load = [], [], _run_steps._load_compiler

    def step(ctx: ar.MultiStepContext, x: Any, y: Any) -> None:
        recorded.append(x.shape)

    def loads(*args: Any) -> Any:
        loaded.append(args)
        return load(*args)

    async def run() -> None:
        await pair.run_steps(step, iter(elements(pair, 2)), 2, compile="jax")

    with mock.patch.object(_run_steps, "_load_compiler", loads):
        await asyncio.gather(run(), run())

    assert len(loaded) == 2
    assert len(recorded) == 2  # shapes, and the loop
