"""all_reduce and all_gather against NumPy, and every way in which replicas can differ."""

from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import MergeMismatchError
from tests.sequencer import Sequencer

pytestmark = pytest.mark.usefixtures("no_task_left")

NAIVE: dict[str, Callable[..., Any]] = {
    "SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max,
}  # fmt: skip
LARGE = 1200 * 1024  # float64 elements: beyond what is reduced on the event loop


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def my_id() -> int:
    return me().replica_id_in_sync_group


async def all_reduce(strategy: ar.Strategy, op: Any, value_of: Callable[[int], Any]) -> Any:
    """What replica 0 gets; the others must get the same objects."""

    async def step() -> list[Any]:
        return [await me().all_reduce(op, value_of(my_id()))]

    [first], *others = strategy.local_results(await strategy.run(step))
    for [other] in others:
        if isinstance(first, np.ndarray):
            assert other is first
        else:
            np.testing.assert_equal(other, first)
    return first


def data(replica_id: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(replica_id)
    return np.asarray(rng.integers(0, 100, shape)).astype(dtype)


# ---- all_reduce ------------------------------------------------------------------------------


CASES = [
    ("SUM", "f8", (2, 3)), ("MEAN", "f4", (3,)), ("MIN", "f2", ()), ("MAX", "u1", (0,)),
    ("MEAN", "i8", (2, 3)), ("SUM", "c16", (3,)),
]  # fmt: skip
"""Each operator, kind of number and kind of shape; the kernels are tested in tests/collectives."""


@pytest.mark.asyncio
@pytest.mark.parametrize(("op", "dtype", "shape"), CASES, ids=str)
async def test_arrays_against_numpy(
    strategy: ar.Strategy, op: str, dtype: str, shape: tuple[int, ...]
) -> None:
    parts = [data(i, dtype, shape) for i in range(strategy.num_replicas_in_sync)]
    wide = [part.astype("f4") for part in parts] if dtype == "f2" else parts

    result = await all_reduce(strategy, op, parts.__getitem__)

    mean_of_integers = op == "MEAN" and parts[0].dtype.kind in "iu"
    expected = NAIVE[op](np.stack(wide), axis=0)
    assert result.dtype == (np.dtype("f8") if mean_of_integers else parts[0].dtype)
    np.testing.assert_array_equal(result, expected.astype(result.dtype))


@pytest.mark.asyncio
async def test_a_sum_of_bools_counts(gang: ar.MirroredStrategy) -> None:
    result = await all_reduce(gang, "sum", lambda _i: np.array([True, False]))

    assert result.tolist() == [gang.num_replicas_in_sync, 0]


@pytest.mark.asyncio
@pytest.mark.parametrize("op", NAIVE)
async def test_half_precision_is_accumulated_in_single(gang: ar.MirroredStrategy, op: str) -> None:
    """In float16, 2048 + 1 is 2048 again."""
    count = gang.num_replicas_in_sync
    parts = [np.float16([2048 if i == 0 else 1]) for i in range(count)]

    result = await all_reduce(gang, op, parts.__getitem__)

    exact = NAIVE[op](np.stack(parts).astype("f8"), axis=0)
    np.testing.assert_array_equal(result, exact.astype("f2"))


@pytest.mark.asyncio
async def test_a_mean_of_half_precision_does_not_overflow(gang: ar.MirroredStrategy) -> None:
    result = await all_reduce(gang, "mean", lambda _i: np.float16([60000]))

    assert result.tolist() == [np.float16(60000)]


@pytest.mark.asyncio
async def test_results_are_read_only_and_shared(gang: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        mine = np.ones(4)
        result = await me().all_reduce("sum", mine)
        assert not result.flags.writeable
        assert mine.flags.writeable
        assert not np.shares_memory(mine, result)
        return result

    results = gang.local_results(await gang.run(step))

    assert all(result is results[0] for result in results)


@pytest.mark.asyncio
async def test_python_numbers_stay_python_numbers(strategy: ar.Strategy) -> None:
    count = strategy.num_replicas_in_sync
    ids = range(count)
    for op, values, expected in (
        ("sum", list(ids), sum(ids)),
        ("sum", [float(i) for i in ids], float(sum(ids))),
        ("mean", [float(i) for i in ids], sum(ids) / count),
        ("mean", list(ids), sum(ids) / count),
        ("min", list(ids), 0),
        ("max", list(ids), count - 1),
        ("sum", [1j] * count, 1j * count),
        ("sum", [2**80] * count, 2**80 * count),
        ("sum", [True] * count, count),
    ):
        result = await all_reduce(strategy, op, values.__getitem__)
        assert result == expected
        assert type(result) is type(expected), (op, values)


@pytest.mark.asyncio
async def test_huge_python_ints_are_compared_exactly(strategy: ar.Strategy) -> None:
    """A detour through int64 or float64 would lose them."""
    values = [2**80 + i for i in range(strategy.num_replicas_in_sync)]

    assert await all_reduce(strategy, "min", values.__getitem__) == values[0]
    assert await all_reduce(strategy, "max", values.__getitem__) == values[-1]


@pytest.mark.asyncio
@pytest.mark.parametrize("op", ["min", "max", "sum", "mean"])
async def test_nan_wins_everywhere(gang: ar.MirroredStrategy, op: str) -> None:
    for position in range(gang.num_replicas_in_sync):
        values = [float("nan") if i == position else 1.0 for i in range(4)]
        assert np.isnan(await all_reduce(gang, op, values.__getitem__))
        assert np.isnan(await all_reduce(gang, op, lambda i, v=values: np.array([v[i]])))


@pytest.mark.asyncio
async def test_pytrees_keep_their_structure(strategy: ar.Strategy) -> None:
    count = strategy.num_replicas_in_sync

    result = await all_reduce(
        strategy,
        "sum",
        lambda i: {"w": np.full(2, i), "b": (float(i), [np.float32(i)]), "empty": []},
    )

    total = sum(range(count))
    assert result["w"].tolist() == [total] * 2
    assert result["b"] == (float(total), [np.float32(total)])
    assert type(result["b"][1][0]) is np.float32
    assert result["empty"] == []


@pytest.mark.asyncio
async def test_large_arrays_are_reduced_off_the_loop(strategy: ar.Strategy) -> None:
    parts = [np.arange(LARGE, dtype="f8") * (i + 1) for i in range(strategy.num_replicas_in_sync)]

    result = await all_reduce(strategy, "mean", lambda i: {"deep": parts[i]})

    np.testing.assert_array_equal(result["deep"], sum(parts) / len(parts))
    assert not result["deep"].flags.writeable


@pytest.mark.asyncio
async def test_arrays_of_any_layout(gang: ar.MirroredStrategy) -> None:
    for make in (
        lambda i: np.asfortranarray(data(i, "f8", (3, 4))),
        lambda i: data(i, "f8", (6, 8))[::2, ::-2],
        lambda i: data(i, ">f8", (3, 4)),
    ):
        parts = [make(i) for i in range(gang.num_replicas_in_sync)]
        result = await all_reduce(gang, "sum", parts.__getitem__)
        np.testing.assert_array_equal(result, sum(parts))


@pytest.mark.asyncio
@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
async def test_the_sum_is_in_replica_order(
    triple: ar.MirroredStrategy, order: tuple[int, ...]
) -> None:
    """Another order of these three would give 0.0 or another bit."""
    parts = [1e16, 1.0, -1e16]
    sequencer = Sequencer(order)

    async def step() -> list[Any]:
        await sequencer.turn(my_id())
        both = (parts[my_id()], np.array([parts[my_id()]]))
        return [await me().all_reduce("sum", both)]

    [[number, array], *_] = [r for [r] in triple.local_results(await triple.run(step))]

    assert number == array[0] == (1e16 + 1.0) + -1e16


@pytest.mark.asyncio
async def test_operators_by_name_in_any_case(strategy: ar.Strategy) -> None:
    for op in ("sum", "Sum", "SUM", ar.ReduceOp.SUM):
        assert await all_reduce(strategy, op, lambda _i: 1) == strategy.num_replicas_in_sync


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("op", "value", "error", "text"),
    [
        ("median", 1.0, ValueError, "SUM, MEAN, MIN, MAX"),
        (None, 1.0, TypeError, "ReduceOp"),
        ("sum", "text", TypeError, "text"),
        ("sum", {"deep": [None]}, TypeError, "None"),
        ("sum", np.array([object()]), TypeError, "object"),
    ],
    ids=["unknown op", "no op", "string", "none", "objects"],
)
async def test_bad_arguments_are_refused_at_the_call(
    strategy: ar.Strategy, op: Any, value: Any, error: type[Exception], text: str
) -> None:
    async def step() -> None:
        with pytest.raises(error, match=text):
            me().all_reduce(op, value)

    await strategy.run(step)


# ---- all_gather ------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("axis", [0, 1, -1, -2])
@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
async def test_gather_against_numpy(strategy: ar.Strategy, axis: int, even: bool) -> None:
    def part(replica_id: int) -> np.ndarray:
        shape = [3, 3]
        shape[axis] = 2 if even else replica_id
        return data(replica_id, "f4", tuple(shape))

    async def step() -> Any:
        result = await me().all_gather({"deep": part(my_id())}, axis)
        assert not result["deep"].flags.writeable
        return result

    count = strategy.num_replicas_in_sync
    expected = np.concatenate([part(i) for i in range(count)], axis)
    results = strategy.local_results(await strategy.run(step))
    assert all(result["deep"] is results[0]["deep"] for result in results)
    np.testing.assert_array_equal(results[0]["deep"], expected)
    assert results[0]["deep"].dtype == np.float32


@pytest.mark.asyncio
async def test_large_arrays_are_gathered_off_the_loop(gang: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        return await me().all_gather(np.full(LARGE, my_id()), 0)

    result = gang.local_results(await gang.run(step))[0]

    assert result[::LARGE].tolist() == list(range(gang.num_replicas_in_sync))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("value", "axis"),
    [(1.0, 0), (np.float32(1), 0), (np.array(1), 0), (np.ones(2), 1), (np.ones(2), -2)],
    ids=["number", "numpy scalar", "0-d", "too large", "too small"],
)
async def test_gather_refuses_scalars_and_missing_axes(
    strategy: ar.Strategy, value: Any, axis: int
) -> None:
    async def step() -> None:
        with pytest.raises(ValueError, match="all_gather"):
            me().all_gather(value, axis)

    await strategy.run(step)


# ---- differences -----------------------------------------------------------------------------


DIFFERENT: dict[str, tuple[Callable[[ar.ReplicaContext, bool], Any], str]] = {
    "op": (lambda ctx, odd: ctx.all_reduce("min" if odd else "max", 1), "MAX and MIN"),
    "structure": (lambda ctx, odd: ctx.all_reduce("sum", {"b" if odd else "a": 1}), "structure"),
    "length": (lambda ctx, odd: ctx.all_reduce("sum", [1] * (2 + odd)), "structure"),
    "shape": (lambda ctx, odd: ctx.all_reduce("sum", np.ones(2 + odd)), r"\(2,\) and \(3,\)"),
    "rank": (lambda ctx, odd: ctx.all_reduce("sum", np.ones((2,) * (1 + odd))), "shapes"),
    "dtype": (
        lambda ctx, odd: ctx.all_reduce("sum", np.ones(2, "f4" if odd else "f8")),
        "float64 and float32",
    ),
    "number and array": (
        lambda ctx, odd: ctx.all_reduce("sum", np.array(1.0) if odd else 1.0),
        "types float and ndarray",
    ),
    "leaf deep inside": (
        lambda ctx, odd: ctx.all_reduce("sum", {"w": [1.0, np.ones(2 + odd)]}),
        r"\['w'\]\[1\]",
    ),
    "gather axis": (lambda ctx, odd: ctx.all_gather(np.ones((2, 2)), int(odd)), "axes 0 and 1"),
    "gather dtype": (
        lambda ctx, odd: ctx.all_gather(np.ones(2, "i4" if odd else "i8"), 0),
        "int64 and int32",
    ),
    "gather shape": (
        lambda ctx, odd: ctx.all_gather(np.ones((2, 2 + odd)), 0),
        "outside axis 0",
    ),
    "gather rank": (lambda ctx, odd: ctx.all_gather(np.ones((2,) * (1 + odd)), 0), "rank"),
    "collective": (
        lambda ctx, odd: ctx.barrier() if odd else ctx.all_reduce("sum", 1),
        "all_reduce #1 .*barrier #1",
    ),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", DIFFERENT)
async def test_differences_are_a_mismatch_with_a_table(
    gang: ar.MirroredStrategy, kind: str
) -> None:
    call, text = DIFFERENT[kind]
    line = call.__code__.co_firstlineno

    async def step() -> None:
        await call(me(), my_id() == 1)

    with pytest.raises(MergeMismatchError, match=text) as caught:
        await gang.run(step)

    error = caught.value
    assert error.step == 0
    assert [row.replica_id for row in error.rows] == list(range(gang.num_replicas_in_sync))
    assert [row.device for row in error.rows] == list(gang._runtime.device_names)
    for row in error.rows[:2]:
        file, _, number = row.site.rpartition(":")
        assert file == __file__
        assert line <= int(number) <= line + 1
        assert row.state == "waiting"
        assert f"{row.device}   waiting" in str(error)
        assert row.site in str(error)
    assert "Replicas 0 and 1" in error.reason or "Replica 0 is in" in error.reason


@pytest.mark.asyncio
async def test_python_ints_and_floats_may_be_mixed(gang: ar.MirroredStrategy) -> None:
    """A loss that is 0 on one replica and 0.5 on another is no mistake."""
    assert await all_reduce(gang, "sum", lambda i: 0.5 if i else 0) == 0.5 * (
        gang.num_replicas_in_sync - 1
    )
