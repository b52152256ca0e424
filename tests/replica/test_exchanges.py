"""reduce_scatter, all_to_all, all_gather and broadcast against NumPy."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import MergeMismatchError
from aioreplica.telemetry import Observer, observe_everywhere
from tests.conftest import mirrored
from tests.replica.gated import me, my_id

pytestmark = pytest.mark.usefixtures("no_task_left")

COUNTS = pytest.mark.parametrize("count", [1, 2, 3, 4])
SHAPES = [((5,), 0), ((4,), -1), ((0,), 0), ((2, 3), 0), ((2, 3), 1), ((3, 2, 4), -2), ((2, 0), 0)]
ALONG = pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
DTYPES = ["f8", "f4", "f2", "i8", "i1", "u2", "c16", "c8", "?", ">f8", ">i4", "longdouble"]
OPS: dict[str, Callable[..., Any]] = {
    "sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max,
}  # fmt: skip
LARGE = 1200 * 1024  # float64 elements: off the event loop


async def each(count: int, call: Callable[[ar.ReplicaContext], Any]) -> list[Any]:
    """What every one of `count` replicas gets of a call."""
    got: list[Any] = [None] * count

    async def step() -> None:
        got[my_id()] = await call(me())

    async with mirrored(count) as strategy:
        await strategy.run(step)
    return got


@pytest.mark.asyncio
async def test_small_ones_need_no_other_thread(pair: ar.MirroredStrategy) -> None:
    queued: list[str] = []
    stop = observe_everywhere(Observer(op_queued=lambda op, lane: queued.append(lane)))

    async def step() -> None:
        ctx = me()
        await ctx.broadcast(np.ones(4))
        await ctx.all_gather(np.ones(4), axis=0)
        await ctx.reduce_scatter("sum", np.ones(4))

    try:
        await pair.run(step)
    finally:
        stop()

    assert queued == []


def data(i: int, shape: tuple[int, ...], dtype: str = "f8") -> np.ndarray:
    numbers = np.random.default_rng(i).integers(0, 50, shape)
    return np.asarray(numbers).astype(dtype)


def same(result: Any, expected: Any, dtype: Any = None) -> None:
    expected = np.asarray(expected)
    assert isinstance(result, np.ndarray)
    assert result.shape == expected.shape
    assert result.dtype == (expected.dtype if dtype is None else np.dtype(dtype))
    np.testing.assert_array_equal(result, expected)
    assert not result.flags.writeable


def pieces(parts: list[np.ndarray], axis: int) -> list[np.ndarray]:
    """all_to_all in plain NumPy."""
    cut = [np.array_split(part, len(parts), axis) for part in parts]
    return [np.concatenate([own[i] for own in cut], axis) for i in range(len(parts))]


# ---- reduce_scatter ----------------------------------------------------------------------------


@pytest.mark.asyncio
@COUNTS
@ALONG
async def test_reduce_scatter(count: int, shape: tuple[int, ...], axis: int) -> None:
    parts = [data(i, shape) for i in range(count)]

    got = await each(count, lambda ctx: ctx.reduce_scatter("sum", parts[my_id()], axis))

    expected = np.array_split(np.sum(np.stack(parts), axis=0), count, axis)
    for result, part in zip(got, expected, strict=True):
        same(result, part)


@pytest.mark.asyncio
@pytest.mark.parametrize("op", OPS)
async def test_reduce_scatter_of_every_op(op: str) -> None:
    parts = [data(i, (5, 2)) for i in range(3)]

    got = await each(3, lambda ctx: ctx.reduce_scatter(op, parts[my_id()]))

    for result, part in zip(got, np.array_split(OPS[op](np.stack(parts), axis=0), 3), strict=True):
        same(result, part)


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
async def test_reduce_scatter_is_all_reduce_cut(dtype: str, op: str) -> None:
    if op == "max" and dtype.startswith("c"):
        return
    parts = [data(i, (5, 2), dtype) for i in range(3)]

    scattered = await each(3, lambda ctx: ctx.reduce_scatter(op, parts[my_id()]))
    whole = await each(3, lambda ctx: ctx.all_reduce(op, parts[my_id()]))

    for result, part in zip(scattered, np.array_split(whole[0], 3, 0), strict=True):
        same(result, part)


@pytest.mark.asyncio
async def test_reduce_scatter_of_fewer_rows_than_replicas() -> None:
    got = await each(4, lambda ctx: ctx.reduce_scatter("sum", np.ones((2, 3))))

    assert [part.shape for part in got] == [(1, 3), (1, 3), (0, 3), (0, 3)]


@pytest.mark.asyncio
async def test_half_precision_is_scattered_after_single_precision_sums() -> None:
    """In float16, 2048 + 1 is 2048 again."""
    parts = [np.float16([2048, 2048, 2048])] + [np.float16([1, 1, 1])] * 2

    got = await each(3, lambda ctx: ctx.reduce_scatter("sum", parts[my_id()]))

    assert [part.tolist() for part in got] == [[2050.0]] * 3


# ---- all_to_all --------------------------------------------------------------------------------


@pytest.mark.asyncio
@COUNTS
@ALONG
async def test_all_to_all(count: int, shape: tuple[int, ...], axis: int) -> None:
    parts = [data(i, shape) for i in range(count)]

    got = await each(count, lambda ctx: ctx.all_to_all(parts[my_id()], axis))

    for result, expected in zip(got, pieces(parts, axis), strict=True):
        same(result, expected)


@pytest.mark.asyncio
@pytest.mark.parametrize("axis", [0, 1, -1, -2])
async def test_all_to_all_of_uneven_sizes(axis: int) -> None:
    def part(i: int) -> np.ndarray:
        shape = [3, 3]
        shape[axis] = 4 * i
        return data(i, tuple(shape))

    parts = [part(i) for i in range(3)]
    got = await each(3, lambda ctx: ctx.all_to_all(parts[my_id()], axis))

    for result, expected in zip(got, pieces(parts, axis), strict=True):
        same(result, expected)


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", [*DTYPES, "datetime64[s]"])
async def test_all_to_all_keeps_dtypes(dtype: str) -> None:
    """Nothing is computed, so what cannot be added up can be handed around."""
    parts = [data(i, (4,), "i8").astype(dtype) for i in range(2)]

    got = await each(2, lambda ctx: ctx.all_to_all(parts[my_id()]))

    for result, expected in zip(got, pieces(parts, 0), strict=True):
        same(result, expected, parts[0].dtype if dtype[0] != ">" else expected.dtype)


@pytest.mark.asyncio
async def test_all_to_all_twice_is_back(gang: ar.MirroredStrategy) -> None:
    async def step() -> None:
        count = me().num_replicas_in_sync
        mine = data(my_id(), (count, 3))
        same(await me().all_to_all(await me().all_to_all(mine)), mine)

    await gang.run(step)


# ---- all_gather --------------------------------------------------------------------------------


@pytest.mark.asyncio
@COUNTS
@ALONG
async def test_all_gather(count: int, shape: tuple[int, ...], axis: int) -> None:
    parts = [data(i, shape) for i in range(count)]

    got = await each(count, lambda ctx: ctx.all_gather(parts[my_id()], axis))

    same(got[0], np.concatenate(parts, axis))
    assert all(result is got[0] for result in got)


@pytest.mark.asyncio
@pytest.mark.parametrize("sizes", [(0, 0, 0), (0, 2, 1), (3, 0, 0), (0, 0, 5)], ids=str)
@pytest.mark.parametrize("axis", [0, 1, -1])
async def test_all_gather_of_uneven_and_empty(sizes: tuple[int, ...], axis: int) -> None:
    def part(i: int) -> np.ndarray:
        shape = [2, 2]
        shape[axis] = sizes[i]
        return data(i, tuple(shape), "f4")

    got = await each(3, lambda ctx: ctx.all_gather(part(my_id()), axis))

    same(got[0], np.concatenate([part(i) for i in range(3)], axis))


@pytest.mark.asyncio
@pytest.mark.parametrize("dtype", [*DTYPES, "datetime64[s]"])
async def test_all_gather_keeps_dtypes(dtype: str) -> None:
    parts = [data(i, (2,), "i8").astype(dtype) for i in range(3)]

    got = await each(3, lambda ctx: ctx.all_gather(parts[my_id()], 0))

    same(got[0], np.concatenate(parts))


# ---- broadcast ---------------------------------------------------------------------------------


@pytest.mark.asyncio
@COUNTS
async def test_broadcast(count: int) -> None:
    parts = [data(i, (i + 1, 2)) for i in range(count)]
    for source in range(count):
        got = await each(count, lambda ctx, s=source: ctx.broadcast(parts[my_id()], s))
        for result in got:
            same(result, parts[source])


@pytest.mark.asyncio
async def test_broadcast_takes_anything(gang: ar.MirroredStrategy) -> None:
    class Thing:
        pass

    thing = Thing()
    value = {"a": [1, "text", None], "b": (thing, np.float32(2), True)}

    async def step() -> None:
        got = await me().broadcast(value if my_id() == 1 else my_id(), np.int64(1))
        assert got["a"] == [1, "text", None]
        assert got["b"][0] is thing
        assert got["b"][1] == 2
        assert type(got["b"][1]) is np.float32
        assert got["b"][2] is True

    await gang.run(step)


@pytest.mark.asyncio
async def test_broadcast_values_are_independent_of_the_source(gang: ar.MirroredStrategy) -> None:
    """The giver may write its array at once; nobody's copy changes, and nobody's can be written."""

    async def step() -> None:
        mine = np.full(4, float(my_id()))
        got = await me().broadcast(mine)
        mine[:] = 99
        await me().barrier()
        same(got, np.zeros(4))

    await gang.run(step)


class Own(np.ndarray):
    """A user's kind of array."""


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["memmap", "matrix", "own"])
async def test_broadcast_copies_arrays_of_subclasses(
    gang: ar.MirroredStrategy, tmp_path: Path, kind: str
) -> None:
    """All get one array of that kind, in memory, that nobody can write."""
    mine: Any = np.arange(4.0).reshape(2, 2)
    if kind == "memmap":
        np.save(tmp_path / "table.npy", mine)
        mine = np.load(tmp_path / "table.npy", mmap_mode="r+")[:]
    else:
        mine = mine.view(np.matrix if kind == "matrix" else Own)
    got: list[Any] = []

    async def step() -> None:
        got.append(await me().broadcast(mine))

    await gang.run(step)
    mine[:] = 99
    assert all(result is got[0] for result in got)
    assert type(got[0]) is type(mine)
    assert not np.shares_memory(got[0], mine)
    assert not got[0].flags.writeable
    assert np.asarray(got[0]).tolist() == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (2, ValueError, "source=2"),
        (-1, ValueError, "source=-1"),
        (1.0, TypeError, "1.0"),
        ("0", TypeError, "'0'"),
        (None, TypeError, "None"),
    ],
)
async def test_an_invalid_source_is_refused(
    pair: ar.MirroredStrategy, source: Any, error: type[Exception], text: str
) -> None:
    async def step() -> int:
        with pytest.raises(error, match=text):
            me().broadcast(1, source)
        return await me().broadcast(my_id(), 1)

    assert pair.local_results(await pair.run(step)) == (1, 1)


# ---- all of them -------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda ctx, value: ctx.all_reduce("sum", value),
    "reduce_scatter": lambda ctx, value: ctx.reduce_scatter("sum", value),
    "all_gather": lambda ctx, value: ctx.all_gather(value, 0),
    "all_to_all": lambda ctx, value: ctx.all_to_all(value),
    "broadcast": lambda ctx, value: ctx.broadcast(value),
}
every_call = pytest.mark.parametrize("name", CALLS)


def reference(name: str, parts: list[Any]) -> list[Any]:
    count = len(parts)
    if name == "all_reduce":
        return [sum(parts[1:], parts[0])] * count
    if name == "reduce_scatter":
        return list(np.array_split(sum(parts[1:], parts[0]), count))
    if name == "all_gather":
        return [np.concatenate(parts)] * count
    return pieces(parts, 0) if name == "all_to_all" else [parts[0]] * count


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


LAYOUTS: dict[str, Callable[[int], np.ndarray]] = {
    "contiguous": lambda i: data(i, (4, 3)),
    "every other row": lambda i: data(i, (8, 3))[::2],
    "backwards": lambda i: data(i, (4, 3))[::-1, ::-1],
    "transposed": lambda i: data(i, (3, 4)).T,
    "fortran": lambda i: np.asfortranarray(data(i, (4, 3))),
    "broadcast": lambda i: np.broadcast_to(data(i, (3,)), (4, 3)),
    "read-only": lambda i: read_only(data(i, (4, 3))),
    "zero rows": lambda i: data(i, (0, 3)),
    "zero columns": lambda i: data(i, (4, 0)),
    "big-endian": lambda i: data(i, (4, 3), ">f8"),
    "unaligned": lambda i: (
        np.frombuffer(b"\0" + data(i, (4, 3)).tobytes(), "u1")[1:].view("f8").reshape(4, 3)
    ),
}


@pytest.mark.asyncio
@every_call
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_inputs_of_any_layout_stay_as_they_are(name: str, layout: str) -> None:
    parts = [LAYOUTS[layout](i) for i in range(3)]
    copies = [part.copy() for part in parts]
    flags = [str(part.flags) for part in parts]

    got = await each(3, lambda ctx: CALLS[name](ctx, parts[my_id()]))

    for result, expected in zip(got, reference(name, copies), strict=True):
        np.testing.assert_array_equal(result, expected)
        assert result.shape == expected.shape
        assert not result.flags.writeable
        assert not any(np.shares_memory(result, part) for part in parts)
    for part, copy, flag in zip(parts, copies, flags, strict=True):
        np.testing.assert_array_equal(part, copy)
        assert str(part.flags) == flag


@pytest.mark.asyncio
@every_call
async def test_one_replica_gets_a_read_only_copy_too(name: str) -> None:
    mine = data(0, (4, 3))

    [result] = await each(1, lambda ctx: CALLS[name](ctx, mine))

    same(result, mine)
    assert not np.shares_memory(result, mine)
    assert mine.flags.writeable


@pytest.mark.asyncio
@every_call
async def test_pytrees(name: str) -> None:
    def tree(i: int) -> Any:
        return {"w": data(i, (4, 2)), "b": (data(i, (3,), "f4"), [data(i, (2,), "i4")]), "e": []}

    got = await each(3, lambda ctx: CALLS[name](ctx, tree(my_id())))

    trees = [tree(i) for i in range(3)]
    for i, result in enumerate(got):
        same(result["w"], reference(name, [t["w"] for t in trees])[i])
        same(result["b"][0], reference(name, [t["b"][0] for t in trees])[i])
        same(result["b"][1][0], reference(name, [t["b"][1][0] for t in trees])[i])
        assert result["e"] == []


@pytest.mark.asyncio
@every_call
async def test_trees_without_leaves(name: str) -> None:
    got = await each(3, lambda ctx: CALLS[name](ctx, {"a": [], "b": ()}))

    assert got == [{"a": [], "b": ()}] * 3


@pytest.mark.asyncio
@every_call
async def test_large_arrays_do_not_hold_up_the_loop(name: str) -> None:
    """The work is not done within a step of the loop: others run before it has ended."""
    parts = [np.full(LARGE, float(i)) for i in range(2)]
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    async def call(ctx: ar.ReplicaContext) -> Any:
        await ctx.barrier()
        before = ticks
        result = await CALLS[name](ctx, parts[my_id()])
        assert ticks > before + 1
        return result

    ticking = asyncio.get_running_loop().create_task(tick())
    got = await each(2, call)
    ticking.cancel()
    await asyncio.gather(ticking, return_exceptions=True)

    for result, expected in zip(got, reference(name, parts), strict=True):
        same(result, expected)


NO_SCALARS = ["reduce_scatter", "all_gather", "all_to_all"]


@pytest.mark.asyncio
@pytest.mark.parametrize("name", NO_SCALARS)
@pytest.mark.parametrize("value", [1, 1.5, True, np.float32(1), np.array(2.0)], ids=repr)
async def test_scalars_have_nothing_to_cut_or_join(
    either: ar.Strategy, name: str, value: Any
) -> None:
    async def step() -> int:
        for tree in (value, {"deep": [np.ones(3), value]}):
            with pytest.raises(ValueError, match=name):
                CALLS[name](me(), tree)
        return await me().all_reduce("sum", 1)

    count = either.num_replicas_in_sync
    assert either.local_results(await either.run(step)) == (count,) * count


@pytest.mark.asyncio
@pytest.mark.parametrize("name", NO_SCALARS)
async def test_slices_are_refused(strategy: ar.Strategy, name: str) -> None:
    slices = ar.IndexedSlices(np.ones((2, 3)), [0, 1], (4, 3))

    async def step() -> None:
        with pytest.raises(TypeError, match="IndexedSlices") as caught:
            CALLS[name](me(), [slices])
        assert name in str(caught.value)

    await strategy.run(step)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize(
    "value",
    [np.array([None]), np.array(["a"]), np.array([b"a"]), np.zeros(2, "M8[s]"),
     np.zeros(2, "m8[s]"), np.zeros(2, [("a", "f8")]), np.array([object(), 1])],
    ids=["object", "str", "bytes", "time", "duration", "record", "mixed"],
)  # fmt: skip
async def test_values_that_are_not_numbers_are_not_reduced(
    either: ar.Strategy, name: str, value: np.ndarray
) -> None:
    async def step() -> None:
        with pytest.raises(TypeError, match=name) as caught:
            CALLS[name](me(), {"deep": value})
        assert str(value.dtype) in str(caught.value)

    await either.run(step)


@pytest.mark.asyncio
@every_call
async def test_masks_are_not_dropped(either: ar.Strategy, name: str) -> None:
    masked = np.ma.array([1.0, 999.0], mask=[False, True])

    async def step() -> Any:
        call = CALLS[name]
        if name == "broadcast":  # only the giver's value counts
            call = lambda ctx, value: ctx.broadcast(value, my_id())  # noqa: E731
        with pytest.raises(TypeError, match=f"{name} would drop the mask"):
            call(me(), {"deep": masked})
        return await CALLS[name](me(), {"deep": masked.filled(0.0)})

    await either.run(step)


@pytest.mark.asyncio
async def test_only_the_giver_of_a_broadcast_is_asked_for_masks(pair: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        return await me().broadcast(my_id() or np.ma.array([1.0], mask=[True]), 1)

    assert pair.local_results(await pair.run(step)) == (1, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", NO_SCALARS)
@pytest.mark.parametrize(
    ("axis", "error"),
    [(2, ValueError), (-3, ValueError), (1.0, TypeError), (True, TypeError), (None, TypeError)],
    ids=repr,
)
async def test_bad_axes(either: ar.Strategy, name: str, axis: Any, error: type[Exception]) -> None:
    async def step() -> None:
        args = ("sum",) if name == "reduce_scatter" else ()
        with pytest.raises(error, match=name):
            getattr(me(), name)(*args, np.ones((2, 2)), axis)

    await either.run(step)


DIFFERENT: dict[str, tuple[Callable[[Any, bool], Any], str]] = {
    "scatter op": (
        lambda c, odd: c.reduce_scatter("min" if odd else "max", np.ones(2)), "MAX and MIN",
    ),
    "scatter axis": (
        lambda c, odd: c.reduce_scatter("sum", np.ones((2, 2)), int(odd)), "axes 0 and 1",
    ),
    "scatter shape": (lambda c, odd: c.reduce_scatter("sum", np.ones(2 + odd)), "shapes"),
    "scatter dtype": (
        lambda c, odd: c.reduce_scatter("sum", np.ones(2, "f4" if odd else "f8")), "dtypes",
    ),
    "swap axis": (lambda c, odd: c.all_to_all(np.ones((2, 2)), int(odd)), "axes 0 and 1"),
    "swap rank": (lambda c, odd: c.all_to_all(np.ones((2,) * (1 + odd))), "rank"),
    "swap shape": (lambda c, odd: c.all_to_all(np.ones((2, 2 + odd))), "outside axis 0"),
    "swap structure": (lambda c, odd: c.all_to_all([np.ones(2)] * (1 + odd)), "structures"),
    "swap dtype": (lambda c, odd: c.all_to_all(np.ones(2, "f4" if odd else "f8")), "dtypes"),
    "source": (lambda c, odd: c.broadcast(1, int(odd)), "sources 0 and 1"),
}  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", DIFFERENT)
async def test_differences_are_a_mismatch(gang: ar.MirroredStrategy, kind: str) -> None:
    call, text = DIFFERENT[kind]

    async def step() -> None:
        await call(me(), my_id() == 1)

    with pytest.raises(MergeMismatchError, match=text) as caught:
        await gang.run(step)
    assert caught.value.reason.startswith("Replicas 0 and 1 disagree in ")
    assert [row.state for row in caught.value.rows[:2]] == ["waiting"] * 2


@pytest.mark.asyncio
@every_call
async def test_bfloat16(name: str) -> None:
    dtype = pytest.importorskip("ml_dtypes").bfloat16
    parts = [data(i, (4, 3)).astype(dtype) for i in range(3)]

    got = await each(3, lambda ctx: CALLS[name](ctx, parts[my_id()]))

    wide = [part.astype("f4") for part in parts]
    for result, expected in zip(got, reference(name, wide), strict=True):
        same(result, expected.astype(dtype))


@pytest.mark.asyncio
@pytest.mark.parametrize("op", OPS)
async def test_bfloat16_is_accumulated_in_single(op: str) -> None:
    """In bfloat16, 256 + 1 is 256 again."""
    dtype = pytest.importorskip("ml_dtypes").bfloat16
    parts = [np.array([256.0 if i == 0 else 1.0] * 3).astype(dtype) for i in range(4)]
    exact = OPS[op](np.stack(parts).astype("f8"), axis=0).astype(dtype)

    for tree in (lambda: parts[my_id()], lambda: [parts[my_id()]] * 3):
        for result in await each(4, lambda ctx, t=tree: ctx.all_reduce(op, t())):
            for leaf in [result] if isinstance(result, np.ndarray) else result:
                same(leaf, exact)
