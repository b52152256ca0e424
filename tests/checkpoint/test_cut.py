"""The cut: between steps, never in one; held-back steps, device loops, datasets, interruptions."""

import asyncio
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica import testing as art
from aioreplica._gil import has_gil
from aioreplica.checkpoint import CheckpointManager
from aioreplica.errors import CheckpointNotCommittedError, ContextError
from tests.conftest import mirrored
from tests.sequencer import idle
from tests.strategies.test_quiet_runs import run as run_without_waiting

from .simulated_files import SimulatedFiles, SimulatedStorage

NUM_BATCHES = 8


class Training:
    """Steps that add what their batch holds to a sum, twice, with a meeting in between."""

    def __init__(self, files: Any, *, is_looped: bool = False) -> None:
        self.strategy = mirrored(2)
        with self.strategy.scope():
            self.sum = ar.Variable(0.0, aggregation="sum")
            self.again = ar.Variable(0.0, aggregation="sum")
        source = ar.ArrayDataset(np.arange(2.0 * NUM_BATCHES), 2, shuffle=True, seed=3)
        self.data = self.strategy.distribute_dataset(source)
        self.state = {"sum": self.sum, "again": self.again, "data": self.data}
        self.manager = CheckpointManager(files)
        self.is_looped = is_looped

    async def step(self, batch: Any) -> None:
        await self.sum.assign_add(batch.sum())
        await self.again.assign_add(batch.sum())

    def looped_step(self, ctx: ar.MultiStepContext, batch: Any) -> None:
        self.sum.blocking.assign_add(batch.sum())
        self.again.blocking.assign_add(batch.sum())

    async def train(self) -> None:
        if self.data.epoch > 0:
            return
        if self.is_looped:
            batches = aiter(self.data)
            while True:
                done = await self.strategy.run_steps(self.looped_step, batches, 3)
                if done.steps_run < 3:
                    return
        async for batch in self.data:
            await self.strategy.run(self.step, args=(batch,))

    async def aclose(self) -> None:
        try:
            await self.manager.aclose()
        finally:
            await self.data.aclose()
            await self.strategy.aclose()


TOTAL = float(sum(range(2 * NUM_BATCHES)))


async def finishes_from(files: SimulatedFiles, *, is_looped: bool = False) -> None:
    """Check that the newest step is one cut: going on from it every example counts once."""
    other = Training(SimulatedStorage(files), is_looped=is_looped)
    try:
        await other.manager.restore(other.state)
        assert other.sum.value == other.again.value
        await other.train()
        assert other.sum.value == other.again.value == TOTAL
    finally:
        await other.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("is_looped", [False, True], ids=["run", "run_steps"])
def test_a_save_at_any_time_is_a_cut_between_steps(is_looped: bool) -> None:
    """Whatever the order of a save and the steps beside it, no example is lost or counted twice."""

    async def main() -> None:
        files = SimulatedFiles()
        training = Training(SimulatedStorage(files), is_looped=is_looped)
        async with asyncio.TaskGroup() as group:
            group.create_task(training.train())
            for number in range(2):
                await asyncio.sleep(0.002)
                await training.manager.save(number, training.state, wait=False)
        await training.aclose()
        assert training.sum.value == TOTAL
        await finishes_from(files, is_looped=is_looped)

    art.explore(main, schedules=25).check()


@pytest.mark.slow
def test_saves_cancellations_and_closing_against_each_other() -> None:
    async def main() -> None:
        files = SimulatedFiles()
        v = ar.Variable(0.0)
        manager = CheckpointManager(SimulatedStorage(files), max_to_keep=1)
        await manager.save(0, {"v": v})

        async def save(step: int, *, wait: bool) -> None:
            await manager.save(step, {"v": v}, wait=wait)

        async def write() -> None:
            await v.assign(1.0)

        tasks = [
            asyncio.create_task(save(1, wait=True)),
            asyncio.create_task(save(2, wait=False)),
            asyncio.create_task(write()),
        ]
        await asyncio.sleep(0.001)
        tasks[0].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results)
        await manager.aclose()
        assert files.num_open == 0

        fresh = ar.Variable(-1.0)
        reader = CheckpointManager(SimulatedStorage(files))
        assert await reader.restore({"v": fresh}) in {1, 2}
        assert float(fresh.value) in {0.0, 1.0}
        await reader.aclose()
        async with CheckpointManager(SimulatedStorage(files), max_to_keep=1) as writer:
            await writer.save(3, {"v": v})  # what a save cancelled at its end has left is removed
        assert writer.steps() == (3,)

    art.explore(main, schedules=60).check()


@pytest.mark.slow
def test_a_save_cancelled_at_every_await_has_saved_all_or_nothing() -> None:
    async def main() -> None:
        files = SimulatedFiles()
        v = ar.Variable(1.0)
        manager = CheckpointManager(SimulatedStorage(files))
        try:
            await manager.save(1, {"v": v})
        finally:
            await check(files)

    async def check(files: SimulatedFiles) -> None:
        assert files.num_open == 0
        reader = CheckpointManager(SimulatedStorage(files))
        for step in reader.steps():
            await reader.verify(step)

    art.cancel_everywhere(main).check()


@pytest.mark.slow
def test_a_restore_cancelled_at_every_await_has_changed_all_or_nothing() -> None:
    async def main() -> None:
        files = SimulatedFiles()
        state = {"v": ar.Variable(1.0), "w": ar.Variable([1.0]), "x": 1.0}
        await CheckpointManager(SimulatedStorage(files)).save(1, state)
        fresh = {"v": ar.Variable(0.0), "w": ar.Variable([0.0]), "x": 0.0}
        try:
            await CheckpointManager(SimulatedStorage(files)).restore(fresh)
        finally:
            assert len({float(fresh["v"].value), float(fresh["w"].value[0]), fresh["x"]}) == 1

    art.cancel_everywhere(main).check()


@pytest.mark.asyncio
async def test_a_save_waits_for_the_step_under_way_and_holds_the_next_one_back(
    pair: ar.Strategy, tmp_path: Path
) -> None:
    with pair.scope():
        v = ar.Variable(0.0, aggregation="sum")
    entered, go_on, begun = asyncio.Event(), asyncio.Event(), []

    async def step(number: int) -> None:
        begun.append(number)
        await v.assign_add(0.5)
        entered.set()
        if number == 1:
            await go_on.wait()
        await v.assign_add(0.5)

    manager = ar.CheckpointManager(tmp_path)
    first = asyncio.create_task(pair.run(step, args=(1,)))
    await entered.wait()
    saving = asyncio.create_task(manager.save(1, {"v": v}))
    await asyncio.sleep(0)
    second = asyncio.create_task(pair.run(step, args=(2,)))
    await idle()
    assert begun == [1, 1]
    assert not saving.done()

    go_on.set()
    await asyncio.gather(first, second, saving)
    assert v.value == 4.0
    await manager.restore({"v": v})
    assert v.value == 2.0
    assert "open" in repr(v.store.gate)


@pytest.mark.asyncio
async def test_a_cancelled_save_lets_the_steps_go_on(pair: ar.Strategy, tmp_path: Path) -> None:
    with pair.scope():
        v = ar.Variable(0.0)
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def step() -> None:
        entered.set()
        await go_on.wait()

    first = asyncio.create_task(pair.run(step))
    await entered.wait()
    manager = ar.CheckpointManager(tmp_path)
    saving = asyncio.create_task(manager.save(1, {"v": v}))
    await asyncio.sleep(0)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    second = asyncio.create_task(pair.run(step))
    go_on.set()
    await asyncio.gather(first, second)
    assert manager.steps() == ()
    await manager.save(1, {"v": v})


@pytest.mark.asyncio
async def test_steps_inside_a_step_are_not_held_back(pair: ar.Strategy, tmp_path: Path) -> None:
    """A save waits for the outer step, which waits for the inner one."""
    with pair.scope():
        v = ar.Variable(0.0)
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def inner() -> int:
        return 1

    async def merge(strategy: ar.Strategy) -> None:
        entered.set()
        await go_on.wait()
        await strategy.run(inner)

    async def outer() -> None:
        context = ar.get_replica_context()
        assert context is not None
        await context.merge_call(merge)

    running = asyncio.create_task(pair.run(outer))
    await entered.wait()
    saving = asyncio.create_task(ar.CheckpointManager(tmp_path).save(1, {"v": v}))
    await asyncio.sleep(0)
    go_on.set()
    async with asyncio.timeout(30):
        await asyncio.gather(running, saving)


@pytest.mark.asyncio
async def test_old_versions_are_let_go_of_tensor_by_tensor_while_training_goes_on() -> None:
    variables = [ar.Variable(np.zeros(1000)) for _ in range(4)]
    old = [weakref.ref(v.components[0]) for v in variables]
    storage = SimulatedStorage(SimulatedFiles())
    create, trained, alive = storage.create, threading.Event(), []

    def watched(path: str) -> Any:
        trained.wait(30)
        sink: Any = create(path)
        write = sink.write

        def watch(data: memoryview) -> None:
            alive.append(sum(ref() is not None for ref in old))
            write(data)

        sink.write = watch
        return sink

    storage.create = watched
    async with CheckpointManager(storage) as manager:
        await manager.save(1, variables, wait=False)
        for v in variables:
            await v.assign(np.ones(1000))
            await v.assign(np.ones(1000))  # a variable keeps the value before its newest one
        assert all(ref() is not None for ref in old)
        trained.set()
        await manager.wait()
        assert await manager.restore(variables) == 1

    gc.collect()
    if has_gil():  # else the memory is freed by the thread that made the arrays, which sleeps
        assert alive == [4, 4, 3, 2, 1]  # the header, then each tensor
    assert [ref() for ref in old] == [None] * 4
    assert [v.value.sum() for v in variables] == [0.0] * 4


# --- several strategies -----------------------------------------------------------------------


class Pair:
    """Two trainings with one manager; a step of the first goes on until it is let."""

    def __init__(self, folder: Path) -> None:
        self.held, self.free = Training(folder), Training(folder)
        self.entered, self.go_on = asyncio.Event(), asyncio.Event()
        self.manager = self.free.manager
        self.state = {"held": self.held.state, "free": self.free.state}

    async def hold(self) -> None:
        self.entered.set()
        await self.go_on.wait()

    async def save_held_back(self) -> "asyncio.Task[None]":
        """Begin a save that waits for a step of the first training."""
        self.running = asyncio.create_task(self.held.strategy.run(self.hold))
        await self.entered.wait()
        saving = asyncio.create_task(self.manager.save(1, self.state))
        await idle()
        assert not saving.done()
        return saving

    async def aclose(self) -> None:
        await self.held.aclose()
        await self.free.aclose()


@pytest.mark.asyncio
async def test_a_loop_gets_no_batch_while_its_steps_are_held_back(tmp_path: Path) -> None:
    """A save over two strategies waits for a step of one, and finds the place of the other."""
    pair, after = Pair(tmp_path), Pair(tmp_path)
    batches = aiter(pair.free.data)
    await pair.free.strategy.run(pair.free.step, args=(await anext(batches),))
    saving = await pair.save_held_back()

    taking = asyncio.ensure_future(anext(batches))
    await idle()
    assert not taking.done()
    assert pair.free.data.statistics().num_delivered == 1
    pair.go_on.set()
    await asyncio.gather(pair.running, saving, taking)

    assert pair.free.data.statistics().num_delivered == 2
    await after.manager.restore(after.state)
    await after.free.train()
    assert after.free.sum.value == TOTAL
    await pair.aclose()
    await after.aclose()


@pytest.mark.asyncio
async def test_a_loop_that_is_cancelled_while_it_is_held_loses_no_batch(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    batches = aiter(pair.free.data)
    saving = await pair.save_held_back()
    taking = asyncio.ensure_future(anext(batches))
    await idle()

    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    pair.go_on.set()
    await asyncio.gather(pair.running, saving)

    seen = [pair.free.strategy.local_results(batch) async for batch in batches]
    assert sum(float(part.sum()) for parts in seen for part in parts) == TOTAL
    await pair.aclose()


@pytest.mark.asyncio
async def test_a_loop_whose_state_is_loaded_while_it_is_held_is_told(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    await pair.manager.save(0, pair.state)
    batches = aiter(pair.free.data)
    await anext(batches)
    pair.running = asyncio.create_task(pair.held.strategy.run(pair.hold))
    await pair.entered.wait()
    restoring = asyncio.create_task(pair.manager.restore(pair.state))
    async with asyncio.timeout(60):
        while not pair.free.sum.store.gate.is_closed:  # the files are read first
            await asyncio.sleep(0)
    taking = asyncio.ensure_future(anext(batches))
    await idle()

    pair.go_on.set()
    await asyncio.gather(pair.running, restoring)

    with pytest.raises(ContextError, match="a state was loaded"):
        await taking
    await pair.free.train()
    assert pair.free.sum.value == TOTAL
    await pair.aclose()


@pytest.mark.asyncio
async def test_a_step_may_wait_for_a_loop_over_its_own_batches(tmp_path: Path) -> None:
    """A save waits for the step, which waits for the loop: so the loop is not held."""
    training = Training(tmp_path)
    queue: asyncio.Queue[Any] = asyncio.Queue()

    async def feed() -> None:
        async for batch in training.data:
            await queue.put(batch)

    async def step() -> None:
        context = ar.get_replica_context()
        assert context is not None
        if context.replica_id_in_sync_group == 0:
            await queue.get()

    running = asyncio.create_task(training.strategy.run(step))
    await idle()
    saving = asyncio.create_task(training.manager.save(1, training.state))
    await idle()
    feeding = asyncio.create_task(feed())

    async with asyncio.timeout(30):
        await asyncio.gather(running, saving, feeding)
    await training.aclose()


def test_a_loop_that_is_held_for_long_is_warned_of_once_and_stays_held(tmp_path: Path) -> None:
    """The step that the save waits for may wait for the loop: nothing else would tell."""

    async def main() -> None:
        pair = Pair(tmp_path)
        saving = await pair.save_held_back()
        taking = asyncio.ensure_future(anext(aiter(pair.free.data)))
        await asyncio.sleep(9.5)
        loop: Any = asyncio.get_running_loop()
        assert loop.told == []
        await asyncio.sleep(90)
        assert len(loop.told) == 1
        assert not taking.done()

        saving.cancel()  # as it says
        await taking
        pair.go_on.set()
        await pair.running
        await pair.aclose()

    [text] = run_without_waiting(main)[0]
    assert text.startswith("epoch 0 of ")
    assert "gets no batch since 10 s" in text
    assert "cancel the save" in text


@pytest.mark.slow
def test_a_save_over_two_strategies_is_a_cut_between_steps_of_both() -> None:
    async def finish(first: Training, second: Training) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(first.train())
            group.create_task(second.train())
        for each in (first, second):
            assert each.sum.value == each.again.value == TOTAL

    async def main() -> None:
        files = SimulatedFiles()
        pairs = [[Training(SimulatedStorage(files)) for _ in range(2)] for _ in range(2)]
        states = [[training.state for training in pair] for pair in pairs]
        async with asyncio.TaskGroup() as group:
            group.create_task(finish(*pairs[0]))
            await asyncio.sleep(0.003)
            await pairs[0][0].manager.save(1, states[0])
        await pairs[1][0].manager.restore(states[1])
        await finish(*pairs[1])
        for training in (*pairs[0], *pairs[1]):
            await training.aclose()

    art.explore(main, schedules=30).check()


# --- told to stop -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_looped", [False, True], ids=["run", "run_steps"])
def test_a_cancelled_run_saves_between_two_steps(is_looped: bool) -> None:
    async def main() -> None:
        files = SimulatedFiles()
        training = Training(SimulatedStorage(files), is_looped=is_looped)
        began = asyncio.Event()

        async def work() -> None:
            began.set()
            await training.manager.save_on_cancel(training.train(), training.state, lambda: 7)

        task = asyncio.create_task(work())
        await began.wait()
        await asyncio.sleep(0.003)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            await training.aclose()
            await finishes_from(files, is_looped=is_looped)
        else:
            await training.aclose()
            assert training.sum.value == TOTAL

    art.explore(main, schedules=60).check()


async def trained(files: SimulatedFiles, num_steps: int) -> dict[str, Any]:
    """Go on from the newest step, saving behind each one; return all that the state holds."""
    strategy, manager = mirrored(2), CheckpointManager(SimulatedStorage(files))
    with strategy.scope():
        v, adam = ar.Variable(np.ones(2)), ar.optimizers.Adam(0.1)
    source = ar.ArrayDataset(np.arange(8.0), 2, shuffle=True, seed=3)  # epochs of four steps
    data, rng = strategy.distribute_dataset(source), np.random.default_rng(5)
    history: list[float] = []
    state = {"v": v, "adam": adam, "history": history, "rng": rng, "data": data}

    async def step(batch: Any) -> None:
        context = ar.get_replica_context()
        assert context is not None
        noise = context.rng("noise").normal()
        await adam.apply_gradients([(v.value * batch.mean() + noise, v)])
        if context.replica_id_in_sync_group == 0:
            history.append(float(rng.random()))

    async def work() -> None:
        while len(history) < num_steps:
            async for batch in data:
                await strategy.run(step, args=(batch,))
                await manager.save(len(history), state, wait=False)
                if len(history) == num_steps:
                    break

    try:
        if manager.latest() is not None:
            await manager.restore(state)
        await manager.save_on_cancel(work(), state, lambda: len(history))
        slots = {slot.name: slot.value.tolist() for slot in adam.variables}
        return {
            "v": v.value.tolist(), "adam": slots, "history": [*history],
            "rng": rng.bit_generator.state, "data": data.state_dict(),
        }  # fmt: skip
    finally:
        await manager.aclose()
        await data.aclose()
        await strategy.aclose()


@pytest.mark.xslow
def test_a_training_stopped_at_any_await_goes_on_to_the_same_bits() -> None:
    """Saved in the background or when it was told to stop, and also behind its last step."""
    whole = asyncio.run(trained(SimulatedFiles(), 6))

    async def main() -> None:
        files = SimulatedFiles()
        try:
            await trained(files, 5)
        finally:
            assert await trained(files, 6) == whole

    art.cancel_everywhere(main).check()


@pytest.mark.asyncio
async def test_work_that_ends_or_fails_saves_nothing(tmp_path: Path) -> None:
    async def fail() -> None:
        raise KeyError("batch")

    async def succeed() -> str:
        return "done"

    async with ar.CheckpointManager(tmp_path) as manager:
        assert await manager.save_on_cancel(succeed(), {"x": 1}, lambda: 1) == "done"
        with pytest.raises(KeyError, match="batch"):
            await manager.save_on_cancel(fail(), {"x": 1}, lambda: 1)
    assert manager.steps() == ()


@pytest.mark.asyncio
async def test_a_step_that_does_not_end_in_time_is_said(pair: ar.Strategy, tmp_path: Path) -> None:
    with pair.scope():
        v = ar.Variable(0.0)
    entered = asyncio.Event()

    async def step() -> None:
        entered.set()
        await asyncio.Event().wait()

    async with ar.CheckpointManager(tmp_path) as manager:
        work = manager.save_on_cancel(pair.run(step), {"v": v}, lambda: 1, grace_s=0.0)
        task = asyncio.create_task(work)
        await entered.wait()
        task.cancel()
        with pytest.raises(CheckpointNotCommittedError, match="did not end within"):
            await task
    assert manager.steps() == ()
