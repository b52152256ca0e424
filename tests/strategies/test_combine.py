"""reduce, gather, local_results and distribute_values_from_function, against NumPy."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError

pytestmark = pytest.mark.usefixtures("no_task_left")

NAIVE = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max}
LARGE = 256 * 1024


def parts(strategy: ar.Strategy, *shape: int, dtype: str = "f8") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 9, shape).astype(dtype) for _ in range(strategy.num_replicas_in_sync)]


# ---- reduce -------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("op", NAIVE)
async def test_reduce_over_replicas(strategy: ar.Strategy, op: str) -> None:
    for dtype in ("f8", "f4", "f2", "i8"):
        values = parts(strategy, 2, 3, dtype=dtype)

        result = await strategy.reduce(op.lower(), ar.PerReplica(values))

        expected = NAIVE[op](np.stack(values).astype("f8"), axis=0)
        np.testing.assert_array_equal(result, expected.astype(result.dtype))
        assert result.dtype == ("f8" if op == "MEAN" and dtype == "i8" else dtype)


@pytest.mark.asyncio
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3, (0,), (0, 1), (0, -1), (2, 0, 1)], ids=str)
async def test_reduce_over_axes(strategy: ar.Strategy, axis: Any) -> None:
    values = parts(strategy, 2, 3, 4)
    axes = axis if isinstance(axis, tuple) else (axis,)
    positive = tuple(a % 3 + 1 for a in axes)

    for op, naive in NAIVE.items():
        result = await strategy.reduce(op, ar.PerReplica(values), axis=axis)

        np.testing.assert_allclose(result, naive(np.stack(values), axis=(0, *positive)), rtol=1e-14)


@pytest.mark.asyncio
@pytest.mark.parametrize("op", NAIVE)
async def test_uneven_parts_are_exact(gang: ar.MirroredStrategy, op: str) -> None:
    """The last batch: full, partial, and nothing at all."""
    values = [np.arange(n, dtype="f8") + n for n in [5, 2, 0, 1][: gang.num_replicas_in_sync]]

    result = await gang.reduce(op, ar.PerReplica(values), axis=0)

    assert result == NAIVE[op](np.concatenate(values))


@pytest.mark.asyncio
async def test_a_mean_of_uneven_integers_is_float64(pair: ar.MirroredStrategy) -> None:
    result = await pair.reduce("mean", ar.PerReplica([np.array([1, 2]), np.array([6])]), axis=0)

    assert result == 3.0
    assert result.dtype == np.float64


@pytest.mark.asyncio
async def test_half_precision_over_an_axis(pair: ar.MirroredStrategy) -> None:
    ones = np.ones(3000, "f2")

    total = await pair.reduce("sum", ar.PerReplica([ones, ones]), axis=0)
    mean = await pair.reduce("mean", ar.PerReplica([ones * 60000] * 2), axis=0)

    assert (total, total.dtype) == (6000, np.float16)
    assert (mean, mean.dtype) == (np.float16(60000), np.float16)


@pytest.mark.asyncio
async def test_python_numbers(strategy: ar.Strategy) -> None:
    ids = ar.PerReplica(range(strategy.num_replicas_in_sync))

    assert await strategy.reduce("sum", ids) == sum(ids)
    assert await strategy.reduce("mean", ids) == sum(ids) / len(ids)
    assert await strategy.reduce("min", ids) == 0
    assert await strategy.reduce(ar.ReduceOp.MAX, ids) == len(ids) - 1


@pytest.mark.asyncio
async def test_pytrees(strategy: ar.Strategy) -> None:
    async def step() -> Any:
        i = ar.get_replica_context().replica_id_in_sync_group
        return {"loss": float(i), "deep": [(np.full(2, i), 1)]}

    result = await strategy.reduce("sum", await strategy.run(step))

    count = strategy.num_replicas_in_sync
    total = sum(range(count))
    assert result["loss"] == total
    assert result["deep"][0][0].tolist() == [total] * 2
    assert result["deep"][0][1] == count


@pytest.mark.asyncio
async def test_large_parts_are_reduced_off_the_loop(gang: ar.MirroredStrategy) -> None:
    values = [np.full(LARGE, i, "f8") for i in range(gang.num_replicas_in_sync)]

    result = await gang.reduce("sum", ar.PerReplica(values))

    np.testing.assert_array_equal(result, np.sum(values, axis=0))


@pytest.mark.asyncio
async def test_of_a_mirrored(gang: ar.MirroredStrategy) -> None:
    value = ar.Mirrored([np.arange(3.0)] * gang.num_replicas_in_sync)

    for op in ("mean", "min", "max"):
        np.testing.assert_array_equal(await gang.reduce(op, value), np.arange(3.0))
    assert await gang.reduce("mean", value, axis=0) == 1.0
    with pytest.raises(ValueError, match="num_replicas_in_sync"):
        await gang.reduce("sum", value)


@pytest.mark.asyncio
async def test_of_a_variable(gang: ar.MirroredStrategy) -> None:
    with gang.scope():
        variable = ar.Variable(2.0)

    assert await gang.reduce("mean", variable) == 2.0
    with pytest.raises(ValueError, match="mirrored"):
        await gang.reduce("sum", variable)


@pytest.mark.asyncio
async def test_of_a_plain_value(strategy: ar.Strategy) -> None:
    if strategy.num_replicas_in_sync == 1:
        assert await strategy.reduce("sum", 3.0) == 3.0
        assert (await strategy.gather(np.ones(2), 0)).tolist() == [1.0, 1.0]
        return
    for value in (3.0, np.ones(2), {"deep": 1.0}):
        with pytest.raises(ValueError, match="plain"):
            await strategy.reduce("sum", value)
        with pytest.raises(ValueError, match="plain"):
            await strategy.gather(value, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("values", "axis", "error", "text"),
    [
        ([np.ones(2), np.ones(3)], None, ValueError, r"\(2,\) and \(3,\)"),
        ([np.ones(2), np.ones(2, "f4")], None, ValueError, "dtypes"),
        ([{"a": 1}, {"b": 1}], None, ValueError, "structures"),
        (["a", "b"], None, TypeError, "'a'"),
        ([None, None], None, TypeError, "None"),
        ([np.ones(2), np.ones(2)], 1, ValueError, "axis=1"),
        ([np.ones(2), np.ones(2)], -2, ValueError, "axis=-2"),
        ([np.ones(2), np.ones(2)], (0, 0), ValueError, "axis"),
        ([np.ones(2), np.ones(2)], (0, -1), ValueError, "axis"),
        ([1.0, 2.0], 0, ValueError, "axis=0"),
        ([np.ones((2, 2)), np.ones((2, 3))], 0, ValueError, "shapes"),
        ([np.ones((0, 2)), np.ones((0, 2))], 0, ValueError, "empty"),
        ([np.ones(2), np.ones(2)], "0", ValueError, "axis"),
        ([np.ones(2), np.ones(3, "f4")], 0, ValueError, "dtypes float64 and float32 differ"),
        ([np.ones(2, int), np.ones(2)], 0, ValueError, "dtypes int64 and float64 differ"),
    ],
    ids=["shape", "dtype", "structure", "text", "none", "axis", "negative axis", "twice",
         "twice from both ends", "scalar", "other axes", "empty", "no axis", "dtype, over an axis",
         "integers, over an axis"],
)  # fmt: skip
async def test_values_that_cannot_be_reduced(
    pair: ar.MirroredStrategy, values: Any, axis: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await pair.reduce("mean", ar.PerReplica(values), axis=axis)


@pytest.mark.asyncio
@pytest.mark.parametrize(("op", "result"), [("sum", 2), ("mean", 2 / 3), ("max", 1)])
@pytest.mark.parametrize("is_first", [False, True])
async def test_a_component_without_elements_has_no_say_in_the_dtype(
    pair: ar.MirroredStrategy, op: Any, result: float, is_first: bool
) -> None:
    """A list without numbers is an array of floats."""
    parts = [np.array([1, 0, 1]), np.array([])]
    found = await pair.reduce(op, ar.PerReplica(parts[::-1] if is_first else parts), axis=0)

    assert found == pytest.approx(result)
    assert np.asarray(found).dtype == (np.float64 if op == "mean" else np.int64)


@pytest.mark.asyncio
async def test_operators_and_lengths_are_checked(gang: ar.MirroredStrategy) -> None:
    with pytest.raises(ValueError, match="SUM, MEAN, MIN, MAX"):
        await gang.reduce("product", ar.PerReplica([1] * gang.num_replicas_in_sync))
    with pytest.raises(ValueError, match="3 values"):
        await gang.reduce("sum", ar.PerReplica([1, 2, 3]))
    with pytest.raises(ValueError, match="3 values"):
        await gang.gather(ar.PerReplica([np.ones(1)] * 3), 0)


# ---- gather -------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_gather_does_not_drop_masks(strategy: ar.Strategy) -> None:
    masked = np.ma.array([1.0, 999.0], mask=[False, True])

    with pytest.raises(TypeError, match="gather would drop the mask"):
        await strategy.gather(ar.PerReplica([masked] * strategy.num_replicas_in_sync), 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("axis", [0, 1, -1, -2])
async def test_gather_joins_uneven_parts(strategy: ar.Strategy, axis: int) -> None:
    values = []
    for i in range(strategy.num_replicas_in_sync):
        shape = [2, 2]
        shape[axis] = i
        values.append(np.full(shape, i))

    result = await strategy.gather({"deep": [ar.PerReplica(values)]}, axis)

    np.testing.assert_array_equal(result["deep"][0], np.concatenate(values, axis))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("values", "axis", "text"),
    [
        ([1.0, 2.0], 0, "scalar"),
        ([np.ones(1), np.ones(1)], 1, "axis=1"),
        ([np.ones((1, 2)), np.ones((1, 3))], 0, "axis 0"),
        ([np.ones(1), np.ones((1, 1))], 0, "rank"),
        ([np.ones(1), np.ones(1, "i4")], 0, "dtypes"),
    ],
    ids=["scalar", "axis", "shape", "rank", "dtype"],
)
async def test_values_that_cannot_be_gathered(
    pair: ar.MirroredStrategy, values: Any, axis: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        await pair.gather(ar.PerReplica(values), axis)


# ---- local_results and distribute_values_from_function ------------------------------------------


@pytest.mark.asyncio
async def test_local_results_selects_through_pytrees(gang: ar.MirroredStrategy) -> None:
    count = gang.num_replicas_in_sync
    with gang.scope():
        variable = ar.Variable(1.0)
    ids = ar.PerReplica(range(count))

    results = gang.local_results({"a": [ids, None], "b": ar.Mirrored(["x"] * count), "c": "c"})

    assert results == tuple({"a": [i, None], "b": "x", "c": "c"} for i in range(count))
    assert gang.local_results(ids) == tuple(range(count))
    assert [float(part) for part in gang.local_results(variable)] == [1.0] * count


@pytest.mark.asyncio
async def test_a_value_with_nothing_distributed_is_one_result(strategy: ar.Strategy) -> None:
    for value in (3, None, "s", [1, {"a": None}], ()):
        assert strategy.local_results(value) == (value,)


@pytest.mark.asyncio
async def test_values_from_a_function(strategy: ar.Strategy) -> None:
    seen: list[ar.ValueContext] = []

    def value_fn(context: ar.ValueContext) -> int:
        seen.append(context)
        return 10 * context.replica_id_in_sync_group

    result = strategy.distribute_values_from_function(value_fn)

    count = strategy.num_replicas_in_sync
    assert seen == [ar.ValueContext(i, count) for i in range(count)]
    if isinstance(strategy, ar.DefaultStrategy):
        assert result == 0
    else:
        assert type(result) is ar.PerReplica
        assert result.values == tuple(10 * i for i in range(count))
    with pytest.raises(TypeError, match="ValueContext"):
        strategy.distribute_values_from_function(3)


# ---- where --------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_in_a_replica_they_name_their_twin(strategy: ar.Strategy) -> None:
    async def step() -> None:
        with pytest.raises(ContextError, match=r"ctx\.all_reduce"):
            await strategy.reduce("sum", 1)
        with pytest.raises(ContextError, match=r"ctx\.all_gather"):
            await strategy.gather(np.ones(1), 0)
        with pytest.raises(ContextError):
            strategy.distribute_values_from_function(lambda _c: 1)

    await strategy.run(step)


@pytest.mark.asyncio
async def test_in_scope_merge_function_and_outside(strategy: ar.Strategy) -> None:
    ones = ar.PerReplica([1] * strategy.num_replicas_in_sync)

    async def merge(current: ar.Strategy) -> Any:
        return await current.reduce("sum", ones)

    async def step() -> Any:
        return await ar.get_replica_context().merge_call(merge)

    total = strategy.num_replicas_in_sync
    assert await strategy.reduce("sum", ones) == total
    with strategy.scope():
        assert await strategy.reduce("sum", ones) == total
    assert strategy.local_results(await strategy.run(step)) == (total,) * total


@pytest.mark.asyncio
async def test_under_another_strategys_scope_they_are_refused(
    gang: ar.MirroredStrategy, solo: ar.OneDeviceStrategy
) -> None:
    with gang.scope():
        variable = ar.Variable(0.0)
    values = ar.PerReplica([np.ones(1)] * gang.num_replicas_in_sync)

    with solo.scope():
        for call in (
            lambda: gang.run(int),
            lambda: gang.reduce("sum", values),
            lambda: gang.gather(values, 0),
            lambda: gang.extended.update(variable, lambda v: v.assign(1.0)),
        ):
            with pytest.raises(ContextError):
                await call()
        with pytest.raises(ContextError):
            gang.distribute_values_from_function(lambda _c: 1)
    assert variable.value == 0.0
