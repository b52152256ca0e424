"""IndexedSlices over replicas: like their dense arrays, differences found, MIN and MAX refused."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.collectives import concatenate, leaf_difference, pieces, reduce_leaves, share_cut
from aioreplica.errors import MergeMismatchError

pytestmark = pytest.mark.usefixtures("no_task_left")

SHAPE = (7, 3)


def parts(num: int, dtype: str = "f8", num_rows: int = 4) -> list[ar.IndexedSlices]:
    """One per replica, with a different number of rows each, none among them."""
    rng = np.random.default_rng(3)
    made = []
    for replica_id in range(num):
        rows = replica_id * num_rows
        values = rng.integers(0, 9, (rows, *SHAPE[1:])).astype(dtype)
        made.append(ar.IndexedSlices(values, rng.integers(0, SHAPE[0], rows), SHAPE))
    return made


def sparse(value: float = 1.0, shape: tuple[int, ...] = (2,), dtype: str = "f8") -> Any:
    return ar.IndexedSlices(np.full((1, *shape[1:]), value, dtype), [0], shape)


# --- where results live -------------------------------------------------------------------------


@pytest.mark.slow  # torch is imported
def test_parts_go_to_the_devices_of_the_inputs() -> None:
    torch = pytest.importorskip("torch")
    whole, inputs = torch.arange(4.0), [torch.zeros(2), torch.zeros(2, device="meta")]

    first, second = share_cut(pieces(whole, 2, 0), inputs)

    assert [part.device.type for part in (first, second)] == ["cpu", "meta"]
    whole.zero_()
    assert first.tolist() == [0.0, 1.0]
    joined: Any = concatenate([whole, whole], 0, inputs[1])
    assert (joined.device.type, joined.shape) == ("meta", (8,))


# --- reduce_leaves ----------------------------------------------------------------------------


@pytest.mark.parametrize("op", [ar.ReduceOp.SUM, ar.ReduceOp.MEAN])
@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "u1", "c16"])
@pytest.mark.parametrize("num", [1, 2, 4])
def test_sparse_and_dense_give_the_same(op: ar.ReduceOp, dtype: str, num: int) -> None:
    values = parts(num, dtype)

    result = reduce_leaves(op, values)

    dense = reduce_leaves(op, [part.to_dense() for part in values])
    assert result.dtype == dense.dtype
    np.testing.assert_array_equal(result.to_dense(), dense)
    assert result.indices.tolist() == sorted(set(np.concatenate([v.indices for v in values])))
    assert not result.values.flags.writeable
    assert not any(np.shares_memory(result.values, part.values) for part in values)


def test_rows_are_added_in_replica_order() -> None:
    def total(*values: float) -> float:
        return float(reduce_leaves(ar.ReduceOp.SUM, [sparse(v) for v in values]).values[0])

    assert total(1e20, -1e20, 1.0) == 1.0
    assert total(1.0, 1e20, -1e20) == 0.0


def test_a_mean_in_half_precision_does_not_overflow() -> None:
    mean = reduce_leaves(ar.ReduceOp.MEAN, [sparse(60000, dtype="f2")] * 4)

    assert mean.values.tolist() == [60000.0]
    assert mean.dtype == np.float16


@pytest.mark.parametrize("op", [ar.ReduceOp.MIN, ar.ReduceOp.MAX])
def test_min_and_max_have_no_meaning(op: ar.ReduceOp) -> None:
    with pytest.raises(ValueError, match=f"{op.name} takes no IndexedSlices"):
        reduce_leaves(op, [sparse()])


DIFFERENT = [
    (sparse(), sparse(shape=(3,)), r"dense shapes \(2,\) and \(3,\)"),
    (sparse(), sparse(dtype="f4"), "dtypes float64 and float32"),
    (sparse(), np.ones(2), "types IndexedSlices and ndarray"),
    (np.ones(2), sparse(), "types ndarray and IndexedSlices"),
    (sparse(), 1.0, "types IndexedSlices and float"),
]


def test_values_that_can_be_reduced_together() -> None:
    first, other = parts(2)

    assert leaf_difference(first, other) is None


# --- in a step --------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("op", ["sum", "mean"])
async def test_all_reduce(strategy: ar.Strategy, op: str) -> None:
    values = parts(strategy.num_replicas_in_sync)

    async def step() -> Any:
        context = ar.get_replica_context()
        mine = values[context.replica_id_in_sync_group]
        return await context.all_reduce(op, {"table": mine, "loss": 2.0})

    results = strategy.local_results(await strategy.run(step))

    dense = reduce_leaves(ar.ReduceOp.parse(op), [part.to_dense() for part in values])
    for result in results:
        np.testing.assert_array_equal(result["table"].to_dense(), dense)
        assert result["table"] is results[0]["table"]
        assert result["loss"] == (2.0 * len(values) if op == "sum" else 2.0)


@pytest.mark.asyncio
@pytest.mark.parametrize("replica_with_rows", [0, 1])
async def test_many_rows_of_any_replica(pair: ar.MirroredStrategy, replica_with_rows: int) -> None:
    big = ar.IndexedSlices(np.ones((40_000, 2)), np.arange(40_000) % 5, (5, 2))
    none = ar.IndexedSlices(np.ones((0, 2)), [], (5, 2))

    async def step() -> Any:
        context = ar.get_replica_context()
        mine = big if context.replica_id_in_sync_group == replica_with_rows else none
        return await context.all_reduce("sum", mine)

    result = (await pair.run(step))[0]

    np.testing.assert_array_equal(result.to_dense(), np.full((5, 2), 8000.0))


@pytest.mark.asyncio
@pytest.mark.parametrize(("first", "other", "text"), DIFFERENT)
async def test_differences_are_mismatches(
    pair: ar.MirroredStrategy, first: Any, other: Any, text: str
) -> None:
    async def step() -> None:
        context = ar.get_replica_context()
        mine = (first, other)[context.replica_id_in_sync_group]
        await context.all_reduce("sum", mine)

    with pytest.raises(MergeMismatchError, match=text):
        await pair.run(step)


@pytest.mark.asyncio
async def test_values_that_replicas_may_not_reduce(gang: ar.MirroredStrategy) -> None:
    async def step() -> None:
        context = ar.get_replica_context()
        for op in ("min", "max"):
            with pytest.raises(ValueError, match=r"all_reduce M\w\w takes no IndexedSlices"):
                context.all_reduce(op, {"a": sparse()})
        with pytest.raises(TypeError, match="all_gather takes no IndexedSlices"):
            context.all_gather(sparse(), 0)

    await gang.run(step)


@pytest.mark.asyncio
async def test_the_same_refusal_everywhere_is_one_error(gang: ar.MirroredStrategy) -> None:
    async def step() -> None:
        await ar.get_replica_context().all_reduce("max", sparse())

    with pytest.raises(ValueError, match="MAX takes no IndexedSlices"):
        await gang.run(step)


# --- outside ----------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("op", ["sum", "mean"])
async def test_strategy_reduce(gang: ar.MirroredStrategy, op: str) -> None:
    values = parts(gang.num_replicas_in_sync)

    result = await gang.reduce(op, [ar.PerReplica(values)])

    dense = reduce_leaves(ar.ReduceOp.parse(op), [part.to_dense() for part in values])
    np.testing.assert_array_equal(result[0].to_dense(), dense)


@pytest.mark.asyncio
async def test_the_mean_of_a_mirrored_is_its_value(gang: ar.MirroredStrategy) -> None:
    mirrored = ar.Mirrored([sparse(5.0)] * gang.num_replicas_in_sync)

    assert (await gang.reduce("mean", mirrored)).values.tolist() == [5.0]


@pytest.mark.asyncio
@pytest.mark.parametrize(("first", "other", "text"), DIFFERENT)
async def test_differences_are_value_errors(
    pair: ar.MirroredStrategy, first: Any, other: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        await pair.reduce("sum", ar.PerReplica([first, other]))


@pytest.mark.asyncio
async def test_values_that_strategies_may_not_reduce(pair: ar.MirroredStrategy) -> None:
    value = ar.PerReplica([sparse(), sparse()])

    with pytest.raises(ValueError, match="reduce MIN takes no IndexedSlices"):
        await pair.reduce("min", value)
    with pytest.raises(TypeError, match="reduce over axis 0 takes no IndexedSlices"):
        await pair.reduce("sum", value, axis=0)
    with pytest.raises(TypeError, match="gather takes no IndexedSlices"):
        await pair.gather(value, 0)
