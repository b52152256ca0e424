"""Optimizers of variables whose rows are divided among workers update parts, with the same bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.checkpoint import LocalStorage
from aioreplica.errors import CheckpointError, MergeMismatchError, NonFiniteError, WorkerLostError
from aioreplica.values import DividedVariable
from tests.checkpoint.simulated_files import FaultyStorage
from tests.strategies.workers import communicator_of, on_workers, outcomes, strategies

pytestmark = pytest.mark.asyncio

SHAPES = {"table": (211, 300), "rows": (5, 3), "vector": (70_001,)}


class CountingStorage(FaultyStorage):
    """A folder that counts the bytes that are read of data files, or cannot read them."""

    def __init__(self, directory: Path, read: list[int], *, is_broken: bool = False) -> None:
        super().__init__(LocalStorage(directory), OSError, None)
        self.read, self.is_broken = read, is_broken

    def open(self, path: str) -> Any:
        source = super().open(path)
        if not path.endswith(".safetensors"):
            return source
        read_into = source.read_into  # of the file itself

        def counted(offset: int, buffer: memoryview) -> int:
            if self.is_broken:
                raise OSError(5, "Input/output error")
            self.read.append(len(buffer))
            return int(read_into(offset, buffer))

        source.read_into = counted
        return source


class Model:
    """Divided variables and a whole one, whose gradients follow from step, replica and name."""

    def __init__(self, strategy: ar.Strategy, optimizer: Any, *, is_divided: bool = True) -> None:
        rng = np.random.default_rng(3)
        sharding = ar.Shard() if is_divided else None
        self.strategy = strategy
        with strategy.scope():
            self.variables: list[Any] = [
                ar.Variable(start(rng, shape), name=name, sharding=sharding)
                for name, shape in SHAPES.items()
            ]
            self.variables.append(ar.Variable(start(rng, (40, 7)), name="whole"))
            self.optimizer = optimizer()

    async def step(self, number: int) -> None:
        ctx = ar.get_replica_context()
        assert ctx is not None
        replica = ctx.replica_id_in_sync_group
        pairs = [(gradient_of(number, replica, v), v) for v in self.variables]
        await self.optimizer.apply_gradients(pairs)

    async def train(self, num_steps: int, first: int = 0) -> None:
        for number in range(first, first + num_steps):
            await self.strategy.run(self.step, (number,))

    async def bits(self) -> dict[str, bytes]:
        found = {}
        for variable in [*self.variables, *self.optimizer.variables]:
            is_divided = isinstance(variable, DividedVariable)
            value = await variable.read() if is_divided else variable.value
            assert value.shape == variable.shape
            found[variable.name] = value.tobytes()
        return found

    def state(self) -> dict[str, Any]:
        return {"variables": self.variables, "optimizer": self.optimizer}


def start(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    return rng.standard_normal(shape).astype(dtype)


def gradient_of(number: int, replica: int, variable: ar.Variable) -> Any:
    seed = [number, replica, len(variable.name)]
    return np.random.default_rng(seed).standard_normal(variable.shape).astype(np.float32)


def adam(**options: Any) -> Any:
    return ar.optimizers.Adam(0.01, shard_state=True, **options)


@pytest.mark.parametrize("division", [(2, 1), (3, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("options", [{}, {"clipvalue": 0.1, "loss_reduction": "mean"}])
async def test_a_step_has_the_bits_of_one_with_whole_variables(
    division: tuple[int, int], options: dict[str, Any]
) -> None:
    async def program(strategy: ar.Strategy, *, is_divided: bool) -> dict[str, bytes]:
        model = Model(strategy, lambda: adam(**options), is_divided=is_divided)
        await model.train(3)
        return await model.bits()

    whole = await on_workers(*division, lambda s: program(s, is_divided=False))
    parts = await on_workers(*division, lambda s: program(s, is_divided=True))

    assert parts == whole


async def test_a_norm_is_that_of_the_whole() -> None:
    async def program(strategy: ar.Strategy, *, is_divided: bool) -> Any:
        make = lambda: ar.optimizers.SGD(0.1, global_clipnorm=1.0, shard_state=True)  # noqa: E731
        model = Model(strategy, make, is_divided=is_divided)
        await model.train(2)
        return [await v.read() if is_divided else v.value for v in model.variables[:3]]

    for whole, parts in zip(
        (await on_workers(2, 1, lambda s: program(s, is_divided=False)))[0],
        (await on_workers(2, 1, lambda s: program(s, is_divided=True)))[1],
        strict=True,
    ):
        np.testing.assert_allclose(parts, whole, rtol=1e-6, atol=1e-7)


async def test_half_precision_keeps_masters_of_its_parts() -> None:
    async def program(strategy: ar.Strategy, *, is_divided: bool) -> Any:
        with strategy.scope():
            value = start(np.random.default_rng(1), (41, 9), "float16")
            sharding = ar.Shard() if is_divided else None
            w: Any = ar.Variable(value, name="w", sharding=sharding)
            optimizer = adam()

        async def step(number: int) -> None:
            await optimizer.apply_gradients([(gradient_of(number, 0, w), w)])

        for number in range(3):
            await strategy.run(step, (number,))
        await w.assign_add(np.full((41, 9), 0.5, "float16"))  # the master follows
        await strategy.run(step, (3,))
        master = optimizer.get_slot(w, "master")
        assert isinstance(master, DividedVariable)
        assert master.shape == (41, 9)
        found = [await master.read(), await w.read() if is_divided else w.value]
        return [each.tobytes() for each in found]

    whole = await on_workers(2, 1, lambda s: program(s, is_divided=False))
    parts = await on_workers(2, 1, lambda s: program(s, is_divided=True))

    assert parts == whole


async def test_a_gradient_of_the_part_is_added_up_on_its_worker() -> None:
    async def program(strategy: ar.Strategy, *, of_parts: bool) -> dict[str, bytes]:
        model = Model(strategy, adam)

        async def step() -> None:
            pairs = []
            for v in model.variables:
                gradient = gradient_of(0, 0, v)
                if of_parts and isinstance(v, DividedVariable):
                    pairs.append((gradient[v.local_rows], v))
                else:
                    ctx = ar.get_replica_context()
                    assert ctx is not None
                    first = ctx.replica_id_in_sync_group == 0
                    pairs.append(
                        (gradient if first or (v.name != "whole" and of_parts) else 0 * gradient, v)
                    )
            await model.optimizer.apply_gradients(pairs)

        await strategy.run(step)
        return {k: v for k, v in (await model.bits()).items() if not k.startswith("whole")}

    parts = await on_workers(2, 1, lambda s: program(s, of_parts=True))
    whole = await on_workers(2, 1, lambda s: program(s, of_parts=False))
    assert parts == whole


async def test_workers_that_bring_parts_and_wholes_are_told() -> None:
    async def program(strategy: ar.Strategy) -> None:
        with strategy.scope():
            w: Any = ar.Variable(np.ones((4, 2)), name="w", sharding=ar.Shard())
            optimizer = adam()

        async def step() -> None:
            whole = np.ones((4, 2))
            gradient = whole if w.local_rows.start else whole[w.local_rows]
            await optimizer.apply_gradients([(gradient, w)])

        await strategy.run(step)

    found = await outcomes(strategies(2, 1), [program] * 2)
    assert [type(each) for each in found] == [MergeMismatchError] * 2
    assert "float64[4, 2], of parts" in str(found[0])


async def test_a_gradient_that_is_not_finite_is_named_by_its_place_in_the_whole() -> None:
    async def program(strategy: ar.Strategy) -> None:
        model = Model(strategy, adam)
        w = model.variables[0]

        async def step() -> None:
            gradient = np.ones(w.shape, "float32")
            gradient[209, 7] = np.nan
            await model.optimizer.apply_gradients([(gradient, w)])

        with pytest.raises(NonFiniteError, match=r"'table' is not finite.*index \(209, 7\)"):
            await strategy.run(step)
        assert w.version == 0

    await on_workers(2, 1, program)


async def test_accumulated_gradients_and_averages_are_those_of_whole_variables() -> None:
    async def program(strategy: ar.Strategy, *, is_divided: bool) -> list[bytes]:
        model = Model(strategy, adam, is_divided=is_divided)
        with strategy.scope():
            average = ar.optimizers.ExponentialMovingAverage(model.variables, 0.9)
            accumulator = ar.GradientAccumulator(model.optimizer)

        async def step(number: int) -> None:
            ctx = ar.get_replica_context()
            assert ctx is not None
            replica = ctx.replica_id_in_sync_group
            pairs = [(gradient_of(number, replica, v), v) for v in model.variables]
            await accumulator.add(pairs)
            if number % 2:
                await accumulator.apply()
            await average.update()

        for number in range(4):
            await strategy.run(step, (number,))
        found = []
        for variable in model.variables:
            async with average.swapped():
                is_part = isinstance(variable, DividedVariable)
                value = await variable.read() if is_part else variable.value
            found.append(value.tobytes())
        return found

    whole = await on_workers(2, 2, lambda s: program(s, is_divided=False))
    parts = await on_workers(2, 2, lambda s: program(s, is_divided=True))

    assert parts == whole


async def test_what_does_not_fit_is_refused() -> None:
    async def program(strategy: ar.Strategy) -> None:
        with strategy.scope():
            w: Any = ar.Variable(np.ones((4, 2)), name="w", sharding=ar.Shard())
            whole_state = ar.optimizers.SGD(0.1)
            divided_state = adam()

        async def step(optimizer: Any, gradient: Any) -> None:
            await optimizer.apply_gradients([(gradient, w)])

        for optimizer, gradient, error, text in (
            (whole_state, np.ones((4, 2)), ValueError, "Make the optimizer with shard_state=True"),
            (divided_state, np.ones((3, 2)), ValueError, r"shape \(3, 2\), but the variable has"),
            (divided_state, ar.IndexedSlices(np.ones((1, 2)), np.array([1]), (4, 2)), TypeError,
             "which takes arrays"),
        ):  # fmt: skip
            with pytest.raises(error, match=text):
                await strategy.run(step, (optimizer, gradient))

    await on_workers(2, 1, program)


@pytest.mark.parametrize("later", [(1, 2), (3, 1), (2, 1)])
async def test_a_checkpoint_goes_on_with_any_number_of_workers(
    later: tuple[int, int], tmp_path: Path
) -> None:
    def mean() -> Any:
        return adam(loss_reduction="mean")

    async def begin(strategy: ar.Strategy) -> dict[str, bytes]:
        model = Model(strategy, mean)
        await model.train(2)
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(2, model.state())
        return await model.bits()

    async def go_on(strategy: ar.Strategy) -> dict[str, bytes]:
        model = Model(strategy, mean)
        async with ar.CheckpointManager(tmp_path) as manager:
            assert await manager.restore(model.state()) == 2
            found = await manager.read(2, "variables/0", np.s_[3:5, :2])
            assert found.tobytes() == (await model.variables[0].read(np.s_[3:5, :2])).tobytes()
        bits = await model.bits()
        await model.train(1, first=2)
        async with ar.CheckpointManager(tmp_path) as manager:  # now that slots are there
            assert await manager.restore(model.state()) == 2
        assert await model.bits() == {**saved, **await model.bits()} == saved
        return bits

    saved = (await on_workers(2, 1, begin))[0]
    for found in await on_workers(*later, go_on):
        assert {key: saved[key] for key in found} == found


async def test_each_worker_reads_its_part_of_a_checkpoint_only(tmp_path: Path) -> None:
    shape = (4096, 512)  # 8 MiB

    async def save(strategy: ar.Strategy) -> None:
        with strategy.scope():
            w = ar.Variable(start(np.random.default_rng(0), shape), name="w")
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(1, {"w": w})

    async def restore(strategy: ar.Strategy) -> Any:
        with strategy.scope():
            w: Any = ar.Variable(
                lambda begin, end: np.zeros((end - begin, shape[1]), "float32"),
                shape=shape, sharding=ar.Shard(), name="w",
            )  # fmt: skip
        async with ar.CheckpointManager(CountingStorage(tmp_path, read)) as manager:
            await manager.restore({"w": w})
        return w.local_rows, w.local.copy()

    read: list[int] = []
    await on_workers(1, 1, save)
    expected = start(np.random.default_rng(0), shape)
    for rows, part in await on_workers(4, 1, restore):
        assert part.tobytes() == expected[rows].tobytes()
    assert sum(read) < 9 * 2**20 + 4 * 2**20  # four times a quarter, and the ends of chunks


def damage_the_last_row(folder: Path) -> None:
    [path] = folder.glob("step-*2/data-*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


async def test_damage_in_the_part_of_one_worker_is_damage_for_all(tmp_path: Path) -> None:
    async def save(strategy: ar.Strategy) -> None:
        with strategy.scope():
            w = ar.Variable(np.ones((1024, 1024), "float32"), name="w")
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(1, {"w": w})
            await w.assign_add(w)
            await manager.save(2, {"w": w})

    await on_workers(1, 1, save)
    damage_the_last_row(tmp_path)

    async def restore(strategy: ar.Strategy) -> Any:
        with strategy.scope():
            w: Any = ar.Variable(np.zeros((1024, 1024), "float32"), sharding=ar.Shard(), name="w")
        async with ar.CheckpointManager(tmp_path) as manager:
            with pytest.raises(CheckpointError, match=r"fail.* checksum, as worker 1 has found"):
                await manager.restore({"w": w}, 2)
            assert w.version == 0
            assert await manager.restore({"w": w}) == 1
        return float(w.local.sum())

    with pytest.warns(RuntimeWarning, match="as worker 1 has found"):
        found = await on_workers(2, 1, restore)
    assert found == [512 * 1024.0] * 2


async def test_a_worker_that_cannot_read_its_part_ends_the_restore_of_all(tmp_path: Path) -> None:
    async def save(strategy: ar.Strategy) -> None:
        with strategy.scope():
            w = ar.Variable(np.ones((1024, 1024), "float32"), name="w")
        async with ar.CheckpointManager(tmp_path) as manager:
            await manager.save(1, {"w": w})

    async def restore(strategy: ar.Strategy) -> None:
        with strategy.scope():
            w: Any = ar.Variable(np.zeros((1024, 1024), "float32"), sharding=ar.Shard(), name="w")
        is_broken = w.local_rows.start > 0
        storage = CountingStorage(tmp_path, [], is_broken=is_broken)
        try:
            async with ar.CheckpointManager(storage) as manager:
                await manager.restore({"w": w})
        finally:
            assert w.version == 0

    await on_workers(1, 1, save)
    first, second = await outcomes(strategies(2, 1), [restore] * 2)
    assert isinstance(second, CheckpointError)
    assert isinstance(first, WorkerLostError)
    assert "CheckpointError" in str(first)


async def test_a_write_during_a_step_ends_the_group_on_all_workers() -> None:
    async def program(strategy: ar.Strategy) -> Any:
        model = Model(strategy, adam)
        await model.train(1)
        communicator = communicator_of(strategy)
        if model.variables[0].local_rows.start == 0:  # on the first worker only
            gathers, iterations = communicator.all_gather, model.optimizer.iterations

            def writes(x: Any, sizes: Any = ()) -> Any:
                iterations.store.write({iterations: (iterations.components[0],)})
                return gathers(x, sizes)

            communicator.all_gather = writes

        await model.train(2, first=1)

    first, second = await outcomes(strategies(2, 1), [program] * 2)
    assert isinstance(first, RuntimeError)
    assert "written meanwhile on this worker" in str(first)
    assert isinstance(second, ConnectionError)
    assert "written meanwhile on this worker" in str(second)
