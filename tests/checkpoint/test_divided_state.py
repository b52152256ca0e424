"""Checkpoints hold divided state as a whole: any number of workers and replicas goes on from it."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import Savepoint
from aioreplica.devices import list_devices
from aioreplica.errors import CheckpointNotCommittedError, ContextError, WorkerLostError
from aioreplica.optimizers._merged_gradient import MEASURED
from aioreplica.strategies import MultiWorkerMirroredStrategy
from aioreplica.values import DividedVariable
from tests.strategies.test_multi_worker_shrink import lose
from tests.strategies.workers import on_workers, outcomes, strategies

pytestmark = pytest.mark.asyncio

SHAPES = {"large": (MEASURED + 7, 2), "bias": (5,)}


class Training:
    """A model whose gradients depend on the step only, so every division gives the same bits."""

    def __init__(self, strategy: ar.Strategy, dtype: str, *, shard_state: bool = True) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.variables = [
                ar.Variable(np.ones(shape, dtype), name=name) for name, shape in SHAPES.items()
            ]
            self.adam = ar.optimizers.Adam(0.01, global_clipnorm=1.0, shard_state=shard_state)
        self.state = {"model": self.variables, "adam": self.adam}

    async def step(self, number: int) -> None:
        rng = np.random.default_rng(number)
        pairs = [(rng.standard_normal(v.shape).astype("float32"), v) for v in self.variables]
        await self.adam.apply_gradients(pairs, aggregate=False)

    async def train(self, first: int, end: int) -> None:
        for number in range(first, end):
            await self.strategy.run(self.step, (number,))

    async def bits(self) -> list[bytes]:
        found = []
        for variable in [*self.variables, *self.adam.variables]:
            is_divided = isinstance(variable, DividedVariable)
            found.append((await variable.read() if is_divided else variable.value).tobytes())
        return found


async def one_worker(dtype: str) -> list[bytes]:
    async with ar.MirroredStrategy(list_devices("cpu")[:2]) as strategy:
        training = Training(strategy, dtype)
        await training.train(0, 4)
        return await training.bits()


@pytest.mark.parametrize(
    ("others", "dtype"),
    [((3, 1), "float32"), ((1, 2), "float32"), ((2, 2), "float32"), ((3, 1), "float16")],
)
async def test_another_number_of_workers_goes_on_with_the_same_bits(
    tmp_path: Path, others: tuple[int, int], dtype: str
) -> None:
    async def begin(strategy: ar.Strategy) -> None:
        training = Training(strategy, dtype)
        await training.train(0, 2)
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(2, training.state)

    async def go_on(strategy: ar.Strategy) -> list[bytes]:
        training = Training(strategy, dtype)
        async with ar.CheckpointManager(tmp_path) as manager:
            restored = await manager.restore(training.state)
        assert restored == 2
        await training.train(2, 4)
        return await training.bits()

    await on_workers(2, 1, begin)
    expected = await one_worker(dtype)

    for found in await on_workers(*others, go_on):
        assert found == expected


async def test_a_restore_in_place_goes_back_and_divides_anew(tmp_path: Path) -> None:
    async def program(strategy: ar.Strategy) -> list[bytes]:
        training = Training(strategy, "float32")
        async with ar.CheckpointManager(tmp_path) as manager:
            await training.train(0, 2)
            await manager.save(2, training.state)
            await training.train(7, 9)
            await manager.restore(training.state)
            await manager.save(3, training.state)  # before a step has made the slots again
            await manager.restore(training.state)
            await training.train(2, 4)
        return await training.bits()

    found = await on_workers(2, 1, program)

    assert found == [await one_worker("float32")] * 2


async def test_slots_are_one_entry_of_the_whole_shape(tmp_path: Path) -> None:
    async def program(strategy: ar.Strategy) -> Any:
        training = Training(strategy, "float32")
        await training.train(0, 1)
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(1, training.state)
        slot = training.adam.get_slot(training.variables[0], "v")
        assert isinstance(slot, DividedVariable)
        return await slot.read()

    whole = (await on_workers(2, 1, program))[0]
    async with ar.CheckpointManager(tmp_path) as manager:
        part = await manager.read(1, "adam/slots/model/0/v", np.s_[10:20])

    np.testing.assert_array_equal(part, whole[10:20])


async def test_a_savepoint_of_divided_state_is_refused() -> None:
    async def program(strategy: ar.Strategy) -> None:
        training = Training(strategy, "float32")
        Savepoint(training.state)  # nothing is divided yet
        await training.train(0, 1)
        with pytest.raises(TypeError, match="adam/slots/model/0/m' is divided among workers"):
            Savepoint(training.state)

    await on_workers(2, 1, program)


async def test_a_worker_that_is_told_to_stop_saves_no_part_of_divided_state(tmp_path: Path) -> None:
    async def program(strategy: ar.Strategy) -> None:
        training = Training(strategy, "float32")
        await training.train(0, 1)
        async with ar.CheckpointManager(tmp_path, max_to_keep=1) as manager:
            await manager.save(1, training.state)
            work = manager.save_on_cancel(
                asyncio.Event().wait(), training.state, step=lambda: 2, exit_on_sigterm=False
            )
            stopped = asyncio.create_task(work)
            await asyncio.sleep(0)
            stopped.cancel()
            with pytest.raises(CheckpointNotCommittedError, match="is divided among workers"):
                await stopped

    await on_workers(2, 1, program)

    async with ar.CheckpointManager(tmp_path) as manager:
        assert manager.steps() == (1,)


async def test_those_left_of_lost_workers_divide_the_state_anew(tmp_path: Path) -> None:
    all_ready = asyncio.Barrier(3)
    found: dict[int, Any] = {}

    async def program(strategy: MultiWorkerMirroredStrategy) -> None:
        workers = strategy._runtime.workers
        assert workers is not None
        rank = workers.rank
        training = Training(strategy, "float32")
        await training.train(0, 2)
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(2, training.state)
            await all_ready.wait()
            if rank == 0:
                lose(strategy)
                return
            with pytest.raises(WorkerLostError):
                await training.train(2, 3)
            await strategy.shrink()
            if rank == 1:  # what the run raises here is told to the other one
                with pytest.raises(ContextError, match="among 3 workers, and now there are 2"):
                    await training.train(2, 3)
            else:
                with pytest.raises((ContextError, WorkerLostError), match="now there are 2"):
                    await training.train(2, 3)
            await manager.restore(training.state)
            await training.train(2, 4)
        slot = training.adam.get_slot(training.variables[0], "m")
        assert isinstance(slot, DividedVariable)
        found[rank] = len(slot.division.ranges), await training.bits()

    await outcomes(strategies(3, 1), [program] * 3)

    expected = await one_worker("float32")
    assert found == {1: (2, expected), 2: (2, expected)}
