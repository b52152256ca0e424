"""Loss of the whole cluster, and another one in its place: what is told, and what goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.cluster import LocalClosureEngine
from aioreplica.errors import CheckpointError, ContextError, WorkerLostError
from aioreplica.strategies.parameter_server._progress import MAX_CUTS, MAX_NAMED, ClosureProgress
from aioreplica.strategies.parameter_server._splits import Leases
from tests.parameter_server.coordinating import Gate

NUM_ROWS = 12


def rows_of(context: Any) -> Any:
    return range(context.input_pipeline_id, NUM_ROWS, context.num_input_pipelines)


def learn(job: tuple[Any, Any, Any], gate: Gate | None = None) -> int:
    """Take a row and descend by 1 there; at a gate in between, if there is one."""
    table, optimizer, iterator = job
    row: int = next(iterator)
    if gate is not None:
        gate.pass_through()
    slices = ar.IndexedSlices(np.ones((1, 2)), [row], table.shape)
    optimizer.apply_gradients([(slices, table)])
    return row


async def learn_in_coroutine(job: tuple[Any, Any, Any], gate: Gate) -> int:
    await gate.apass_through()
    return learn(job)


def add(count: Any, gate: Gate | None = None) -> None:
    if gate is not None:
        gate.pass_through()
    count.assign_add(np.ones(count.shape))


class Program:
    """A strategy with its coordinator, a table, its optimizer and a place for checkpoints."""

    def __init__(self, strategy: Any, coordinator: Any, saved: Any) -> None:
        self.strategy, self.coordinator, self.saved = strategy, coordinator, saved
        self.engine = strategy.engine
        with strategy.scope():
            self.table = ar.Variable(np.zeros((NUM_ROWS, 2)), name="table")
            self.optimizer = ar.optimizers.SGD(1.0, momentum=0.5)
        self.state = {"table": self.table, "optimizer": self.optimizer}
        self.iterator = iter(coordinator.create_per_worker_dataset(rows_of))
        self.job = self.table, self.optimizer, self.iterator

    async def learn(self, count: int, gate: Gate | None = None, fn: Any = learn) -> list[Any]:
        args = (self.job,) if gate is None else (self.job, gate)
        return [await self.coordinator.schedule(fn, args) for _ in range(count)]

    async def learned(self, count: int) -> list[int]:
        remotes = await self.learn(count)
        await self.coordinator.join()
        found: list[int] = await self.coordinator.fetch(remotes)
        return found

    async def reopen(self, *target: object) -> Any:
        return await self.strategy.reopen(*target, manager=self.saved, state=self.state)


@asynccontextmanager
async def program(folder: Path, **options: Any) -> AsyncIterator[Program]:
    strategy = ar.ParameterServerStrategy(
        LocalClosureEngine(2), num_ps=2, variable_partitioner=ar.FixedShardsPartitioner(2),
        **options,
    )  # fmt: skip
    coordinator = ar.ClusterCoordinator(strategy, queue_size=8)
    async with (
        asyncio.timeout(60),
        ar.CheckpointManager(folder) as saved,
        strategy,
        coordinator,
    ):
        yield Program(strategy, coordinator, saved)


async def assert_lost(program: Program, *calls: Any) -> None:
    table = program.table
    own = program.coordinator.join, table.read, lambda: table.assign(np.ones(table.shape))
    for call in (*calls, *own, lambda: program.learn(1)):
        with pytest.raises(WorkerLostError, match=r"strategy\.reopen\(") as caught:
            await call()
        assert caught.value.variables[0] == "table"


@pytest.mark.asyncio
@pytest.mark.parametrize("replicate", [False, True])
@pytest.mark.parametrize("fn", [learn, learn_in_coroutine])
async def test_it_goes_back_to_the_last_checkpoint(
    tmp_path: Path, fn: Any, *, replicate: bool
) -> None:
    async with program(tmp_path, replicate=replicate) as it:
        kept = await it.learned(4)
        await it.saved.save(1, it.state)
        value, table = await it.table.read(), it.table
        finished = await it.learn(3)
        await it.coordinator.join()
        gate = Gate()
        unfinished = await it.learn(4, gate, fn)
        await gate.reached(2)
        it.engine.lose_cluster()

        await assert_lost(it, *(each.fetch for each in (*unfinished, finished[0])))
        assert it.strategy.lost_variables[0] == "table"
        with pytest.raises(WorkerLostError, match="reopen"):
            await it.saved.restore(it.state)  # refused before anything has changed
        found = await it.reopen()

        assert found.step == 1
        assert found.undone == ("learn #4", "learn #5", "learn #6")
        assert found.unfinished == tuple(f"{fn.__name__} #{i}" for i in range(7, 11))
        assert found.iterators
        assert it.strategy.lost_variables == ()
        assert it.table is table
        gate.open()  # what the former cluster still does is nothing any more
        np.testing.assert_array_equal(await it.table.read(), value)
        kept += await it.learned(NUM_ROWS - 4)
        assert sorted(kept) == [*range(NUM_ROWS)]
        assert int(await it.optimizer.iterations.read()) == NUM_ROWS
        np.testing.assert_array_equal(await it.table.read(), -np.ones((NUM_ROWS, 2)))
        with pytest.raises(WorkerLostError, match="not made again"):
            await finished[0].fetch()


@pytest.mark.asyncio
async def test_slots_and_settings_go_on_as_in_a_program_that_lost_nothing(tmp_path: Path) -> None:
    values = []
    for is_lost in (False, True):
        async with program(tmp_path / str(is_lost)) as it:
            for target in (1.0, 2.0):  # one by one: a rule with momentum minds their order
                await it.coordinator.schedule(descend, (it.table, it.optimizer, target))
                await it.coordinator.join()
            await it.saved.save(1, it.state)
            if is_lost:
                await it.coordinator.schedule(descend, (it.table, it.optimizer, 9.0))
                await it.coordinator.join()
                it.engine.lose_cluster()
                await it.reopen()
            await it.coordinator.schedule(descend, (it.table, it.optimizer, 3.0))
            await it.coordinator.join()
            values.append(await it.table.read())
    np.testing.assert_array_equal(*values)


def descend(w: Any, optimizer: Any, target: float) -> None:
    optimizer.apply_gradients([(w.value - target, w)])


@pytest.mark.asyncio
async def test_it_is_lost_and_reopened_again_and_again(tmp_path: Path) -> None:
    async with program(tmp_path) as it:
        kept: list[int] = []
        for turn in range(3):
            kept += await it.learned(2)
            await it.saved.save(turn, it.state)
            await it.learned(1)
            it.engine.lose_cluster()
            found = await it.reopen()
            assert (found.step, found.num_undone, found.unfinished) == (turn, 1, ())
        kept += await it.learned(NUM_ROWS - 6)
        assert sorted(kept) == [*range(NUM_ROWS)]


@pytest.mark.asyncio
async def test_another_engine_takes_its_place(tmp_path: Path) -> None:
    async with program(tmp_path) as it:
        counter = it.coordinator.create_per_worker_variable(7)
        kept = await it.learned(4)
        await it.saved.save(1, it.state)
        it.engine.lose_cluster()
        other = LocalClosureEngine(1)
        await it.reopen(other)
        assert it.strategy.engine is other
        assert it.strategy.num_workers == 1
        kept += await it.learned(NUM_ROWS - 4)
        assert sorted(kept) == [*range(NUM_ROWS)]
        with pytest.warns(RuntimeWarning, match="2 workers were lost"):
            assert await counter.read_all() == [7]


@pytest.mark.asyncio
async def test_strategies_that_share_an_engine_are_each_reopened(tmp_path: Path) -> None:
    async with program(tmp_path / "a") as it:
        async with ar.ParameterServerStrategy(it.engine) as other:
            with other.scope():
                count = ar.Variable(3.0, name="count")
            await count.read()
            await it.saved.save(1, it.state)
            it.engine.lose_cluster()
            await it.reopen()
            with pytest.raises(WorkerLostError, match="count"):
                await count.read()
            assert (await other.reopen()).step is None
            await count.assign(np.float64(4.0))
            assert float(await count.read()) == 4.0
        assert len(await it.learned(2)) == 2


@pytest.mark.asyncio
async def test_without_a_checkpoint_what_was_lost_stays_lost(tmp_path: Path) -> None:
    async with program(tmp_path) as it:
        await it.learned(2)
        await it.saved.save(1, it.state)
        value = await it.table.read()
        it.engine.lose_cluster()
        found = await it.strategy.reopen()
        assert (found.step, found.undone, found.iterators) == (
            None,
            ("learn #0", "learn #1"),
            False,
        )
        with pytest.raises(WorkerLostError, match=r"manager\.restore"):
            await it.table.read()
        await it.saved.restore(it.state)
        np.testing.assert_array_equal(await it.table.read(), value)
        await it.learn(1)
        with pytest.raises(WorkerLostError, match="begin the epoch anew"):
            await it.coordinator.join()


@pytest.mark.asyncio
async def test_a_lost_server_is_reason_enough(tmp_path: Path) -> None:
    async with program(tmp_path) as it:
        kept = await it.learned(4)
        await it.saved.save(1, it.state)
        await it.learned(2)
        it.engine.lose_server(0)
        await it.learn(3)
        with pytest.raises(WorkerLostError, match="Parameter server 0"):
            await it.coordinator.join()
        found = await it.reopen()
        assert (found.num_undone, found.iterators) == (2, True)
        kept += await it.learned(NUM_ROWS - 4)
        assert sorted(kept) == [*range(NUM_ROWS)]


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["cluster", "checkpoint", "damaged"])
async def test_one_that_is_cancelled_or_fails_leaves_it_lost(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with program(tmp_path) as it:
        await it.learned(4)
        await it.saved.save(1, it.state)
        value = await it.table.read()
        gate = Gate()
        await it.learn(2, gate)
        await gate.reached(2)
        it.engine.lose_cluster()
        reached, thing = asyncio.Event(), it.engine if where == "cluster" else it.saved
        name = "reopen" if where == "cluster" else "restore"
        call = getattr(thing, name)

        async def reach_and_wait(*args: Any) -> None:
            await call(*args)
            reached.set()
            if where == "damaged":
                raise CheckpointError("Step 1 is damaged.")
            await asyncio.Event().wait()

        monkeypatch.setattr(thing, name, reach_and_wait)
        reopening = asyncio.ensure_future(it.reopen())
        await reached.wait()
        if where != "damaged":
            with pytest.raises(ContextError, match="is being reopened"):
                await it.reopen()
            await assert_lost(it)
            reopening.cancel()
        with pytest.raises(CheckpointError if where == "damaged" else asyncio.CancelledError):
            await reopening
        await assert_lost(it)
        monkeypatch.undo()

        found = await it.reopen()
        assert found.unfinished == ("learn #4", "learn #5")
        np.testing.assert_array_equal(await it.table.read(), value)
        assert len(await it.learned(2)) == 2
        gate.open()


@pytest.mark.asyncio
async def test_one_that_is_cancelled_while_it_waits_for_servers_leaves_all_lost(
    tmp_path: Path,
) -> None:
    async with program(tmp_path) as it:
        await it.learned(2)
        await it.saved.save(1, it.state)
        it.engine.lose_server(0)
        servers = it.strategy.servers
        async with servers.lock:
            reopening = asyncio.create_task(it.reopen())
            while it.coordinator._runner.is_open:
                await asyncio.sleep(0)
            reopening.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reopening
        await assert_lost(it)
        assert (await it.reopen()).step == 1
        await it.learned(1)


@pytest.mark.asyncio
async def test_closures_that_a_restore_has_undone_are_not_told_again(tmp_path: Path) -> None:
    async with program(tmp_path) as it:
        await it.learned(2)
        await it.saved.save(1, it.state)
        await it.learned(2)
        gate = Gate()
        await it.learn(2, gate)
        await gate.reached(2)
        it.engine.lose_server(1)  # the other keeps the leases of iterators
        gate.open()
        with pytest.raises(WorkerLostError):
            await it.coordinator.join()
        await it.saved.restore(it.state)
        later = await it.learn(3)
        await it.coordinator.join()
        assert len(await it.coordinator.fetch(later)) == 3
        it.engine.lose_cluster()
        found = await it.reopen()
        assert (found.num_undone, found.unfinished) == (3, ())
        assert found.iterators


@pytest.mark.asyncio
@pytest.mark.parametrize("is_back", [False, True])
async def test_a_look_at_an_older_checkpoint_leaves_the_newest_known(
    tmp_path: Path, *, is_back: bool
) -> None:
    async with program(tmp_path) as it:
        rows = await it.learned(2)
        await it.saved.save(1, it.state)
        rows += await it.learned(2)
        await it.saved.save(2, it.state)
        await it.saved.restore(it.state, 1)
        if is_back:
            await it.saved.restore(it.state, 2)
        await it.learned(1)
        it.engine.lose_cluster()
        found = await it.reopen()
        assert (found.step, found.undone, found.iterators) == (2, ("learn #4",), True)
        rows += await it.learned(NUM_ROWS - 4)
        assert sorted(rows) == [*range(NUM_ROWS)]


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["lose_cluster", "lose_server"])
async def test_isolated_closures_that_were_lost_are_told(tmp_path: Path, what: str) -> None:
    async with program(tmp_path) as it:
        await it.saved.save(1, it.state)
        gate = Gate()
        for _ in range(3):
            last = await it.coordinator.schedule(add, (it.table, gate), isolate=True)
        await gate.reached(2)
        getattr(it.engine, what)(*((1,) if what == "lose_server" else ()))
        gate.open()
        with pytest.raises(WorkerLostError):
            await last.fetch()
        found = await it.reopen()
        assert found.unfinished == ("add #0", "add #1", "add #2")


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["cluster", "checkpoint", "end"])
async def test_closing_the_strategy_ends_it(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with program(tmp_path) as it:
        await it.learned(2)
        await it.saved.save(1, it.state)
        it.engine.lose_cluster()
        servers, reached, other = it.strategy.servers, asyncio.Event(), LocalClosureEngine(2)
        thing, name = {
            "cluster": (other, "start"),
            "checkpoint": (it.saved, "restore"),
            "end": (servers, "go_back"),
        }[where]
        call = getattr(thing, name)

        async def reach_and_wait(*args: Any) -> None:
            await call(*args)
            reached.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(thing, name, reach_and_wait)
        reopening = asyncio.ensure_future(it.reopen(other))
        await reached.wait()
        await it.strategy.aclose()
        with pytest.raises(ContextError, match="is closed"):
            await reopening
        assert not servers.is_started
        assert not servers.is_reopening
        with pytest.raises(ContextError, match="closed"):
            await it.table.read()
        assert it.engine._num_users == 0
        assert other._num_users == (where == "cluster")  # its start was not seen to the end


@pytest.mark.asyncio
async def test_who_waits_hears_of_the_loss(tmp_path: Path) -> None:
    async with program(tmp_path) as it:
        gate = Gate()
        await it.learn(2, gate)
        await gate.reached(2)
        joining = asyncio.ensure_future(it.coordinator.join())
        await it.learn(8 + 8, gate)
        scheduling = asyncio.ensure_future(it.learn(1))
        await asyncio.sleep(0)
        assert not scheduling.done()
        it.engine.lose_cluster()
        for waiting in (joining, scheduling):
            with pytest.raises(WorkerLostError, match="reopen"):
                await waiting
        gate.open()


@pytest.mark.asyncio
async def test_a_result_that_is_made_again_is_lost_too(tmp_path: Path) -> None:
    async with program(tmp_path) as it:
        [remote] = await it.learn(1)
        await it.coordinator.join()
        for worker in [*it.engine.workers_now]:
            it.engine.lose_worker(worker)
        fetching = asyncio.ensure_future(remote.fetch())
        await asyncio.sleep(0)
        it.engine.lose_cluster()
        with pytest.raises(WorkerLostError):
            await fetching


RUNS: list[int] = []


def pass_in_turn(*gates: Gate) -> None:
    """Pass through the first gate in the first run, through the second in the next."""
    RUNS.append(0)
    gates[len(RUNS) - 1].pass_through()


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ["reopen", "close"])
async def test_a_result_that_is_being_made_again_is_lost_too(tmp_path: Path, what: str) -> None:
    async with program(tmp_path) as it:
        RUNS.clear()
        first, again = Gate(), Gate()
        remote = await it.coordinator.schedule(pass_in_turn, (first, again))
        await first.reached()
        first.open()
        await it.coordinator.join()
        for worker in [*it.engine.workers_now]:
            it.engine.lose_worker(worker)
        it.engine.add_worker()
        fetching = asyncio.ensure_future(remote.fetch())
        await again.reached()
        if what == "close":
            await it.coordinator.aclose()
        else:
            await it.saved.save(1, it.state)
            it.engine.lose_server(0)
            await it.reopen()
        with pytest.raises(WorkerLostError if what == "reopen" else ContextError):
            await fetching
        again.open()
        if what == "reopen":
            assert await (await it.coordinator.schedule(abs, (-1,))).fetch() == 1


@pytest.mark.asyncio
async def test_what_cannot_be_reopened_is_refused(tmp_path: Path) -> None:
    async with program(tmp_path) as it:
        await it.learned(1)
        with pytest.raises(ContextError, match="has not lost its cluster"):
            await it.strategy.reopen()
        it.engine.lose_cluster()
        for options in ({"manager": it.saved}, {"state": it.state}, {"security": object()}):
            with pytest.raises(ValueError, match="together with"):
                await it.strategy.reopen(**options)
        with pytest.raises(TypeError, match="must be a CheckpointManager, got 'steps'"):
            await it.strategy.reopen(manager="steps", state=it.state)
        with pytest.raises(CheckpointError):
            await it.reopen()  # nothing was saved
        await assert_lost(it)
    with pytest.raises(ContextError, match="closed"):
        await it.strategy.reopen()


@pytest.mark.asyncio
async def test_an_error_that_nobody_has_seen_is_seen_afterwards(tmp_path: Path) -> None:
    async with program(tmp_path) as it:
        await it.saved.save(1, it.state)
        remote = await it.coordinator.schedule(add, (5,))
        with pytest.raises(AttributeError):
            await remote.fetch()
        it.engine.lose_cluster()
        await it.reopen()
        with pytest.raises(AttributeError):
            await it.coordinator.join()
        assert len(await it.learned(2)) == 2


def finish(progress: ClosureProgress, *numbers: int) -> None:
    for number in numbers:
        progress.finished(SimpleNamespace(number=number, fn_name="fn"))  # type: ignore[arg-type]


def test_cuts_with_the_same_next_step_are_told_apart() -> None:
    progress = ClosureProgress()
    finish(progress, 1)
    assert progress.cut(9, {}) == 9
    finish(progress, 0, 4)
    assert progress.cut(9, {0: Leases(1)}) == 10
    assert progress.cut(10, {0: Leases(1)}) == 10
    finish(progress, 3, 2)
    progress.forget_iterators([0])
    cut = progress.found(10)
    assert cut is not None
    assert cut.leases == {}
    assert progress.go_back(1, cut).undone == ("fn #2", "fn #3")
    assert progress.go_back(1, progress.found(9)).undone == ("fn #0", "fn #4")
    assert progress.go_back(2, progress.found(10)).num_undone == 0


def test_what_is_undone_is_what_the_variables_have_and_the_checkpoint_has_not() -> None:
    progress = ClosureProgress()
    finish(progress, 0, 1)
    older = progress.cut(2, {})
    finish(progress, 2, 3)
    newer = progress.cut(4, {})
    assert progress.go_back(1, progress.found(older)).undone == ("fn #2", "fn #3")
    finish(progress, 4)
    assert progress.cut(4, {}) == 5
    found = progress.go_back(2, progress.found(newer))
    assert (found.undone, found.num_undone) == (("fn #4",), 1)
    finish(progress, 5)
    found = progress.go_back(None, None)
    assert found.undone == ("fn #0", "fn #1", "fn #2", "fn #3", "fn #5")
    assert found.num_undone == 5


def test_what_is_remembered_is_bounded() -> None:
    progress = ClosureProgress()
    for number in range(MAX_CUTS + 2):
        progress.cut(number, {})
    assert progress.found(1) is None
    assert progress.found(2) is not None
    finish(progress, *range(MAX_NAMED + 5))
    found = progress.go_back(None, None)
    assert (found.num_undone, len(found.undone)) == (MAX_NAMED + 5, MAX_NAMED)
    assert found.undone[-1] == f"fn #{MAX_NAMED + 4}"
