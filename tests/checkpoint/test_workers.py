"""Checkpoints of several workers: one writes, all restore, on any division into workers."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import Savepoint
from aioreplica.checkpoint._state import look, read_state
from aioreplica.errors import CheckpointError, CheckpointNotCommittedError, MergeMismatchError
from tests.strategies.workers import on_workers, outcomes, strategies

pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_task_left")]


async def make(strategy: ar.Strategy) -> dict[str, Any]:
    with strategy.scope():
        w = ar.Variable(np.zeros(2), name="w")
        adam = ar.optimizers.Adam(0.1)
        total = ar.Variable(
            0, name="total", synchronization="on_read", aggregation="sum", dtype="int64"
        )

    async def step() -> None:
        ctx = ar.get_replica_context()
        assert ctx is not None
        await adam.apply_gradients([(np.full(2, 1.0 + ctx.replica_id_in_sync_group), w)])
        await total.assign_add(1 + ctx.replica_id_in_sync_group)

    return {"step": step, "state": {"w": w, "adam": adam, "total": total, "epoch": 0}}


async def total_of(strategy: ar.Strategy, made: dict[str, Any]) -> int:
    return int(await strategy.extended.read_var(made["state"]["total"]))


@pytest.mark.parametrize("wait", [True, False])
async def test_the_first_worker_saves_and_any_division_restores(tmp_path: Path, wait: bool) -> None:
    async def save(strategy: ar.Strategy) -> Any:
        made = await make(strategy)
        await strategy.run(made["step"])
        made["state"]["epoch"] = 7
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(3, made["state"], wait=wait)
            await strategy.run(made["step"])
            await manager.wait()
        return made["state"]["w"].value.tolist()

    async def restore(strategy: ar.Strategy) -> Any:
        made = await make(strategy)
        async with ar.CheckpointManager(tmp_path) as manager:
            assert await manager.restore(made["state"]) == 3
        assert made["state"]["epoch"] == 7
        assert await total_of(strategy, made) == 10
        components = [int(each) for each in made["state"]["total"].components]
        await strategy.run(made["step"])
        return made["state"]["w"].value.tolist(), components

    saved = await on_workers(2, 2, save)
    assert list(tmp_path.iterdir())

    same = await on_workers(2, 2, restore)
    assert [w for w, _ in same] == saved  # it went on as the ones that were not stopped
    assert [components for _, components in same] == [[1, 2], [3, 4]]
    assert [c for _, c in await on_workers(3, 1, restore)] == [[4], [3], [3]]
    async with ar.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2", "cpu:3"]) as strategy:
        assert (await restore(strategy))[1] == [1, 2, 3, 4]


async def test_a_save_that_fails_is_raised_on_every_worker(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")

    async def program(strategy: ar.Strategy) -> None:
        made = await make(strategy)
        async with ar.CheckpointManager(tmp_path / "file") as manager:
            await manager.save(1, made["state"])

    results = await outcomes(strategies(2, 1), [program] * 2)

    assert isinstance(results[0], OSError)
    assert isinstance(results[1], CheckpointNotCommittedError)
    assert "Worker 0 could not save step 1" in str(results[1])


async def test_workers_that_save_or_restore_different_steps_raise(tmp_path: Path) -> None:
    async def program(strategy: ar.Strategy) -> None:
        made, rank = await make(strategy), strategy._runtime.workers.rank
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(rank, made["state"])

    for result in await outcomes(strategies(2, 1), [program] * 2):
        assert isinstance(result, MergeMismatchError)
        assert "disagree in CheckpointManager.save" in result.reason

    async def elsewhere(strategy: ar.Strategy) -> None:
        made, rank = await make(strategy), strategy._runtime.workers.rank
        async with ar.CheckpointManager(tmp_path / str(rank)) as manager:
            await manager.save(1, made["state"])
            await manager.restore(made["state"])

    results = await outcomes(strategies(2, 1), [elsewhere] * 2)
    assert isinstance(results[1], CheckpointError)  # its directory is not the first worker's
    await asyncio.sleep(0)


async def restored_apart(
    folder: Path, *steps: tuple[int, ...], damaged: str = ""
) -> list[tuple[str, list[float]]]:
    """Restore on workers with a folder each; return what each raises, and then holds.

    Args:
        folder: Where these are made.
        steps: What each one has.
        damaged: A folder of a step in which a byte is changed.
    """
    for rank, own in enumerate(steps):
        for step in own:
            v = ar.Variable(np.full(2, float(step)))
            await ar.CheckpointManager(folder / str(rank)).save(step, {"v": v})
    if damaged:
        [path] = folder.glob(f"{damaged}/data-*")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    async def program(strategy: ar.MultiWorkerMirroredStrategy) -> tuple[str, list[float]]:
        with strategy.scope():
            v = ar.Variable(np.zeros(2))
        workers = strategy._runtime.workers
        assert workers is not None
        try:
            await ar.CheckpointManager(folder / str(workers.rank)).restore({"v": v})
        except MergeMismatchError as error:
            return error.reason, v.value.tolist()
        return "", v.value.tolist()

    return await on_workers(len(steps), 1, program)


async def test_workers_that_find_different_steps_change_nothing(tmp_path: Path) -> None:
    for raised, held in await restored_apart(tmp_path, (1, 2), (1,)):
        assert "disagree in CheckpointManager.restore" in raised
        assert held == [0.0, 0.0]


async def test_a_step_that_is_damaged_for_one_worker_is_so_for_all(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="Restored step 1 .* as worker 1 has found"):
        found = await restored_apart(tmp_path, (1, 2), (1, 2), damaged="1/step-0000000002")
    assert found == [("", [1.0, 1.0])] * 2


async def test_the_newest_savepoint_is_put_back_on_every_worker() -> None:
    """Its arrays come from the worker that has done most steps; the others have older ones."""

    async def program(strategy: ar.MultiWorkerMirroredStrategy) -> Any:
        with strategy.scope():
            w = ar.Variable(np.zeros(3), name="w")
        rank = strategy._runtime.workers.rank
        await w.assign(np.arange(3.0))
        savepoint = Savepoint({"w": w})
        if rank == 1:
            savepoint._cut = replace(
                savepoint._cut, next_steps=(9,), arrays={"w": [np.full(3, 5.0)]}
            )
        await savepoint.put_back_newest(strategy._runtime.workers)
        return w.value.tolist(), look(read_state({"w": w})).next_steps

    assert await on_workers(3, 1, program) == [([5.0] * 3, (9,))] * 3


class Hold:
    """Holds so many replicas in the middle of the fourth step, until all are there and it ends."""

    def __init__(self, count: int) -> None:
        self.missing = count
        self.is_full, self.is_over = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.missing -= 1
        if not self.missing:
            self.is_full.set()
        await self.is_over.wait()


def in_loops(strategy: ar.Strategy, hold: Hold | None = None) -> tuple[dict[str, Any], Any]:
    """Return a state, and what trains on it in device loops of two steps."""
    with strategy.scope():
        seen = ar.Variable(np.zeros(24), name="seen")
        sgd = ar.optimizers.SGD(1.0, momentum=0.5)
    data = ar.ArrayDataset(np.arange(24), batch_size=4)
    batches = strategy.distribute_dataset(data, ar.InputOptions(sharding="data"))
    state = {"seen": seen, "sgd": sgd, "batches": batches, "loops": 0}

    def step(ctx: Any, x: Any) -> None:
        if hold is not None and 12 <= x[0] < 16:
            ar.outside_compilation(hold)
        gradient = np.zeros(24)
        gradient[x] = -1.0
        sgd.blocking.apply_gradients([(gradient, seen)])
        ctx.set_last_step_output("examples", len(x), "sum")

    async def train() -> Any:
        iterator = aiter(batches)
        while (await strategy.run_steps(step, iterator, 2)).steps_run:
            state["loops"] += 1
        return seen.value.tolist(), sgd.iterations.value.item()

    return state, train


async def trained() -> Any:
    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        state, train = in_loops(strategy)
        async with state["batches"]:
            return await train()


async def test_loops_go_on_from_a_checkpoint_with_another_division(tmp_path: Path) -> None:
    """All workers are told to stop in a step, as launchers do, and save behind the loop."""
    hold = Hold(4)

    async def stop(strategy: ar.Strategy) -> None:
        state, train = in_loops(strategy, hold)
        async with state["batches"], ar.CheckpointManager(tmp_path) as manager:

            async def work() -> None:
                await manager.save_on_cancel(train(), state, lambda: state["loops"])

            task = asyncio.create_task(work())
            await hold.is_full.wait()
            task.cancel()
            await asyncio.sleep(0)
            hold.is_over.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    async def resume(strategy: ar.Strategy) -> Any:
        state, train = in_loops(strategy)
        async with state["batches"], ar.CheckpointManager(tmp_path) as manager:
            assert await manager.restore(state) == 1
            assert state["sgd"].iterations.value == 4
            return await train()

    await on_workers(2, 2, stop)
    expected = await trained()
    assert expected[1] == 6
    assert await on_workers(3, 1, resume) == [expected] * 3


@pytest.mark.parametrize("is_metric", [False, True])
async def test_state_that_all_workers_have_parts_of_is_refused_before_the_work_begins(
    tmp_path: Path, is_metric: bool
) -> None:
    """Worker 0 saved what it had itself, and a restore took that for the whole."""

    async def program(strategy: ar.Strategy) -> None:
        made = await make(strategy)
        with strategy.scope():
            part = ar.metrics.Mean() if is_metric else made["state"]["total"]
        state = {"w": made["state"]["w"], "part": part}
        async with ar.CheckpointManager(tmp_path) as manager:
            with pytest.raises(CheckpointNotCommittedError, match=r"'part.* \(on_read\) of all w"):
                await manager.save_on_cancel(strategy.run(made["step"]), state, lambda: 1)
        assert state["w"].value.tolist() == [0.0, 0.0]

    await on_workers(2, 1, program)
    assert ar.CheckpointManager(tmp_path).steps() == ()


async def test_a_single_worker_that_is_told_to_stop_saves_all_it_has(tmp_path: Path) -> None:
    async def program(strategy: ar.Strategy) -> Any:
        made, has_trained = await make(strategy), asyncio.Event()

        async def train() -> None:
            await strategy.run(made["step"])
            has_trained.set()
            await asyncio.Event().wait()

        async with ar.CheckpointManager(tmp_path) as manager:
            saving = manager.save_on_cancel(train(), made["state"], lambda: 1)
            task = asyncio.create_task(saving)
            await has_trained.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await strategy.run(made["step"])
            assert await manager.restore(made["state"]) == 1
        return await total_of(strategy, made)

    assert await on_workers(1, 2, program) == [3]


async def test_a_save_beside_a_loop_has_all_of_it(tmp_path: Path) -> None:
    hold = Hold(2)

    async def program(strategy: ar.Strategy) -> Any:
        state, train = in_loops(strategy, hold)
        async with state["batches"], ar.CheckpointManager(tmp_path) as manager:
            training = asyncio.create_task(train())
            await hold.is_full.wait()
            saving = asyncio.create_task(manager.save(1, state))
            await asyncio.sleep(0)
            hold.is_over.set()
            await saving
            found = await training
            assert await manager.restore(state) == 1
            return found, state["sgd"].iterations.value.item(), state["loops"]

    assert await on_workers(2, 1, program) == [(await trained(), 4, 1)] * 2


class Loader:
    """A source with a state of its own, which is of no use to another worker."""

    def __init__(self, worker: int) -> None:
        self.batches = np.split(rows_of(worker), range(3, 9, 3))
        self.worker = worker
        self.first = self.number = 0

    def __iter__(self) -> Iterator[Any]:
        self.number, self.first = self.first, 0
        for batch in self.batches[self.number :]:
            self.number += 1
            yield batch

    def state_dict(self) -> Any:
        return {"number": self.number, "worker": self.worker}

    def load_state_dict(self, state: Any) -> None:
        assert state["worker"] == self.worker
        self.first = state["number"]


def rows_of(worker: int) -> np.ndarray:
    """Return the examples of a worker, three batches of 3; the first worker has one more."""
    return np.arange(100 * worker, 100 * worker + (9 if worker == 0 else 8))


PER_REPLICA = ar.InputOptions(fetch_to_device=False, replication_mode="per_replica")  # type: ignore[arg-type]
OWN: dict[str, Any] = {
    "off": lambda strategy: strategy.distribute_dataset(
        ar.ArrayDataset(rows_of(strategy._runtime.workers.rank), 3),
        ar.InputOptions(sharding="off"),
    ),
    "function": lambda strategy: strategy.distribute_datasets_from_function(
        lambda context: ar.ArrayDataset(
            rows_of(context.input_pipeline_id), 3, shuffle=True, seed=context.input_pipeline_id
        )
    ),
    "per replica": lambda strategy: strategy.distribute_datasets_from_function(
        lambda context: ar.ArrayDataset(rows_of(context.input_pipeline_id), 3), PER_REPLICA
    ),
    "own state": lambda strategy: strategy.distribute_datasets_from_function(
        lambda context: Loader(context.input_pipeline_id)
    ),
}


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
async def test_workers_with_datasets_of_their_own_go_on_from_the_state_of_the_first(
    tmp_path: Path, kind: str, num_steps: int
) -> None:
    """As a checkpoint holds it, and as `shrink` puts it back."""

    def made(strategy: ar.MultiWorkerMirroredStrategy) -> dict[str, Any]:
        with strategy.scope():
            return {"batches": OWN[kind](strategy), "w": ar.Variable(0.0, name="w")}

    async def rest(strategy: ar.Strategy, loop: Any) -> list[list[int]]:
        return [strategy.local_results(batch)[0].tolist() async for batch in loop]

    async def save(strategy: ar.MultiWorkerMirroredStrategy) -> Any:
        state, workers = made(strategy), strategy._runtime.workers
        assert workers is not None
        async with state["batches"] as batches, ar.CheckpointManager(tmp_path) as manager:
            loop = aiter(batches)
            seen = [strategy.local_results(await anext(loop))[0] for _ in range(num_steps)]
            await manager.save(1, state)
            savepoint = Savepoint(state)
            left = await rest(strategy, loop)
            assert sorted(sum(left, [x for part in seen for x in part])) == [*rows_of(workers.rank)]
            await savepoint.put_back_newest(workers)
            assert await rest(strategy, batches) == left
        return left

    async def restore(strategy: ar.MultiWorkerMirroredStrategy) -> Any:
        state = made(strategy)
        async with state["batches"] as batches, ar.CheckpointManager(tmp_path) as manager:
            await manager.restore(state)
            return await rest(strategy, batches)

    left = await on_workers(2, 1, save)
    assert [len(of_worker) for of_worker in left] == [3 - num_steps] * 2
    assert await on_workers(2, 1, restore) == left
