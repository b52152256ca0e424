"""Variables whose rows are divided among workers."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError, MergeMismatchError
from aioreplica.values import DividedVariable
from tests.strategies.workers import on_workers, outcomes, strategies

pytestmark = pytest.mark.asyncio

WHOLE = np.arange(21.0).reshape(7, 3)


def table(strategy: ar.Strategy, value: Any = WHOLE, **options: Any) -> Any:
    with strategy.scope():
        return ar.Variable(value, sharding=ar.Shard(axis=0), **options)


async def test_each_worker_has_its_rows() -> None:
    async def program(strategy: ar.Strategy) -> Any:
        w = table(strategy, name="w")
        assert (w.shape, w.dtype, w.trainable) == ((7, 3), np.float64, True)
        assert w in strategy.trainable_variables
        assert repr(w) == "<DividedVariable w | float64 (7, 3), v0>"
        assert (w.local == WHOLE[w.local_rows]).all()
        assert w.local.base is None or w.local.base.size == w.local.size  # not the whole
        assert not w.local.flags.writeable
        return w.local_rows

    assert await on_workers(3, 1, program) == [slice(0, 3), slice(3, 5), slice(5, 7)]


async def test_a_value_names_read_instead_of_communicating() -> None:
    async def program(strategy: ar.Strategy) -> None:
        w = table(strategy, name="w")
        for read in (
            lambda: w.value,
            lambda: w + 1,
            lambda: strategy.snapshot(w)[w],
            lambda: np.asarray(w),
        ):
            with pytest.raises(ContextError, match=r"'w' is divided.*`await variable\.read"):
                read()

        for op in ("sum", "mean"):
            with pytest.raises(ContextError, match=r"await variable\.read"):
                await strategy.reduce(op, w)
        with pytest.raises(ContextError, match=r"await variable\.read"):
            await strategy.gather(w, axis=0)
        with pytest.raises(ContextError, match=r"await variable\.read"):
            await strategy.extended.update(w, lambda v: v.assign_add(WHOLE))
        assert [each.shape for each in strategy.local_results(w)] == [w.local.shape] * 2

        async def step() -> None:
            with pytest.raises(ContextError, match=r"await variable\.read"):
                _ = w.value
            with pytest.raises(ContextError, match="has no assign here: replicas do not write it"):
                await w.assign(WHOLE)

        await strategy.run(step)

    await on_workers(2, 2, program)


INDICES = [
    None, ..., 4, -1, slice(None), slice(2, 6), slice(None, None, -2), slice(6, 0, -3),
    slice(3, 3), (slice(1, None, 2), 1), (..., 0), (5, slice(None, None, -1)), (2, 2), slice(5, 6),
    slice(-10, None, -1), (slice(1, 3), slice(-5, None, -2)), (slice(-10, None, -1), 0),
]  # fmt: skip


@pytest.mark.parametrize("num_workers", [1, 2, 3])
async def test_what_is_read_is_what_numpy_would_give(num_workers: int) -> None:
    async def program(strategy: ar.Strategy) -> None:
        w = table(strategy)

        async def step(index: Any) -> Any:
            return await w.read(index)

        for index in INDICES:
            expected = WHOLE if index is None else WHOLE[index]
            found = await w.read(index)
            assert (found.shape, found.tobytes()) == (expected.shape, expected.tobytes())
            assert not found.flags.writeable
            for each in strategy.local_results(await strategy.run(step, (index,))):
                assert (each.shape, each.tobytes()) == (expected.shape, expected.tobytes())
        for wrong, error in ((7, IndexError), ((0, 0, 0), IndexError), ([1, 2], TypeError)):
            with pytest.raises(error):
                await w.read(wrong)

    await on_workers(num_workers, 2, program)


async def test_a_merge_function_reads_and_a_plain_step_is_refused() -> None:
    async def program(strategy: ar.Strategy) -> Any:
        w = table(strategy, name="w")

        async def merge(_strategy: object) -> Any:
            return (await w.read(-1)).tolist()

        async def step() -> Any:
            ctx = ar.get_replica_context()
            assert ctx is not None
            return await ctx.merge_call(merge)

        def plain() -> None:
            with pytest.raises(ContextError, match="read was called in a plain function") as told:
                w.read()
            assert "blocking" not in str(told.value)  # there is no twin that waits on the thread
            assert "pass the value" in str(told.value)

        async def forgets() -> None:
            w.read(0)

        await strategy.run(plain)
        with pytest.raises(ContextError, match="A call was never awaited"):
            await strategy.run(forgets)
        return strategy.local_results(await strategy.run(step))

    assert await on_workers(2, 2, program) == [(WHOLE[-1].tolist(),) * 2] * 2


async def test_only_what_is_read_travels() -> None:
    sent: list[int] = []

    async def program(strategy: ar.Strategy) -> None:
        w = table(strategy, lambda begin, end: np.ones((end - begin, 1000)), shape=(100, 1000))

        class Counted:
            def __init__(self, wire: Any) -> None:
                self.wire = wire

            def broadcast(self, x: Any, root: int) -> Any:
                sent.append(x.nbytes)
                return self.wire.broadcast(x, root)

        workers: Any = w.store.owner.workers
        async with workers.operation("read", "") as turn:

            async def gather(wire: Any, _slots: Any) -> Any:
                return await w._gathered(Counted(wire), slice(49, 51))

            assert (await turn.exchange(b"", gather)).shape == (2, 1000)

    await on_workers(2, 1, program)
    assert sent == [8000] * 4  # a row of each worker, on both


async def test_workers_and_replicas_that_read_different_parts_are_told() -> None:
    async def program(strategy: ar.Strategy) -> None:
        w = table(strategy)
        await w.read(slice(w.local_rows.start, 5))

    found = await outcomes(strategies(2, 1), [program, program])
    assert [type(each) for each in found] == [MergeMismatchError] * 2

    async def replicas(strategy: ar.Strategy) -> None:
        w = table(strategy, name="w")

        async def step() -> None:
            ctx = ar.get_replica_context()
            assert ctx is not None
            await w.read(ctx.replica_id_in_sync_group % 2)

        await strategy.run(step)

    with pytest.raises(MergeMismatchError, match="argument 1 is '0' here and '1' there"):
        await on_workers(1, 2, replicas)


async def test_rows_are_made_by_the_worker_that_has_them() -> None:
    made: list[tuple[int, int]] = []

    def rows(begin: int, end: int) -> Any:
        made.append((begin, end))
        return WHOLE[begin:end]

    async def program(strategy: ar.Strategy) -> Any:
        w = table(strategy, rows, shape=WHOLE.shape, dtype="float32")
        assert w.local.dtype == np.float32
        return (await w.read()).tolist()

    assert await on_workers(2, 1, program) == [WHOLE.tolist()] * 2
    assert sorted(made) == [(0, 4), (4, 7)]


async def test_writes_outside_replicas_take_each_worker_its_rows() -> None:
    async def program(strategy: ar.Strategy) -> Any:
        w = table(strategy)
        await w.assign_add(np.ones((7, 3)))
        slices = ar.IndexedSlices(np.full((3, 3), 10.0), np.array([6, 0, 6]), (7, 3))
        await w.assign_add(slices)
        with pytest.raises(ValueError, match="cannot assign a value of shape"):
            await w.assign(w.local)

        async def step() -> None:
            ctx = ar.get_replica_context()
            assert ctx is not None
            await ctx.merge_call(lambda _strategy: w.assign_sub(np.full((7, 3), 0.5)))

        await strategy.run(step)
        assert w.version == 3
        return (await w.read()).tolist()

    expected = WHOLE + 0.5
    expected[0] += 10
    expected[6] += 20
    assert await on_workers(2, 2, program) == [expected.tolist()] * 2


async def test_what_cannot_be_divided_is_refused() -> None:
    async def program(strategy: ar.Strategy) -> None:
        for value, options, error, text in (
            (np.ones((1, 3)), {}, ValueError, "cannot be divided among 2 workers"),
            (np.ones((3, 0)), {}, ValueError, "cannot be divided among 2 workers"),
            (1.0, {}, ValueError, "cannot be divided among 2 workers"),
            (WHOLE, {"constraint": np.abs}, ValueError, "takes a whole value"),
            (WHOLE, {"synchronization": "on_read"}, ValueError, "takes a whole value"),
            (WHOLE, {"shape": (7, 3)}, TypeError, "must be a function"),
        ):
            with pytest.raises(error, match=text):
                table(strategy, value, **options)
        with strategy.scope(), pytest.raises(TypeError, match=r"sharding is an ar.Shard\(\) or"):
            ar.Variable(WHOLE, sharding=0)  # type: ignore[arg-type]
        w = table(strategy, name="w")
        with pytest.raises(TypeError, match="is divided among workers, and a Savepoint is kept by"):
            ar.checkpoint.Savepoint({"w": w})

    await on_workers(2, 1, program)
    with pytest.raises(ValueError, match="make it in the scope of a MultiWorkerMirroredStrategy"):
        ar.Variable(WHOLE, sharding=ar.Shard())
    with pytest.raises(ValueError, match="only the first axis can be cut"):
        ar.Shard(axis=1)
    with pytest.raises(TypeError, match="an int"):
        ar.Shard(axis=True)


@pytest.mark.parametrize("make", [ar.MirroredStrategy, lambda _: ar.OneDeviceStrategy("cpu:0")])
async def test_in_one_process_all_replicas_share_the_whole(make: Any) -> None:
    async with make(["cpu:0", "cpu:1"]) as strategy:
        w = table(strategy, name="w")
        adam = ar.optimizers.Adam(0.1)

        async def step() -> Any:
            await adam.apply_gradients([(np.ones((7, 3)), w)])
            return (w.value == await w.read()).all() and (w.local == w.value).all()

        assert isinstance(w, DividedVariable)
        for index in INDICES:
            np.testing.assert_array_equal(
                await w.read(index), WHOLE[... if index is None else index]
            )
        assert w.is_mirrored
        assert w.local_rows == slice(0, 7)
        assert (w.value == WHOLE).all()
        assert all(strategy.local_results(await strategy.run(step)))
        assert len({*map(id, w.components)}) == 1
        assert (w.value < WHOLE).all()
