"""What every communicator has to do, as coroutines that each worker of a group runs."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aioreplica.cluster import Communicator
from aioreplica.cluster._communicator import AGREE, NOTHING, Call
from aioreplica.devices.backends import reduce_arrays
from aioreplica.typing import ReduceOp

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.int64, np.uint16,
          np.bool_, np.complex64)  # fmt: skip
SHAPES = ((), (0,), (1,), (3, 4), (70_003,))
LONG = 1_200_003  # more than one segment of float32


def brought_by(rank: int, shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Any:
    """What a worker brings: every worker can compute that of every other one."""
    rng = np.random.default_rng([seed, rank])
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4)
    return np.asarray(np.round(values) if np.dtype(dtype).kind in "iub" else values).astype(dtype)


def same_bits(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


async def reduces_in_rank_order(c: Communicator) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        for shape in SHAPES:
            for dtype in DTYPES if np.prod(shape) < 1000 else (np.float32, np.float16, np.int64):
                all_of_them = [brought_by(rank, shape, dtype) for rank in range(c.size)]
                for op in ("sum", "mean", "min", "max"):
                    if dtype is np.complex64 and op in ("min", "max"):
                        continue
                    total = await c.all_reduce(all_of_them[c.rank], op)
                    expected = reduce_arrays(ReduceOp.parse(op), all_of_them)
                    assert same_bits(total, expected), (shape, dtype, op)
    for dtype in (np.float32, np.float16):
        long = [brought_by(rank, (LONG,), dtype) for rank in range(c.size)]
        assert same_bits(await c.all_reduce(long[c.rank]), reduce_arrays(ReduceOp.SUM, long))


async def gathers_scatters_broadcasts(c: Communicator) -> None:
    for shape in SHAPES:
        for dtype in (np.float32, ml_dtypes.bfloat16, np.bool_):
            all_of_them = [brought_by(rank, shape, dtype, 1) for rank in range(c.size)]
            own = all_of_them[c.rank]
            assert same_bits(await c.all_gather(own), np.stack(all_of_them))
            for root in range(c.size):
                assert same_bits(await c.broadcast(own, root), all_of_them[root])
            if shape and dtype is not np.bool_:
                part = await c.reduce_scatter(own)
                total = reduce_arrays(ReduceOp.SUM, all_of_them)
                assert same_bits(part, np.array_split(total, c.size)[c.rank])
    await c.barrier()


async def cuts_as_it_is_told(c: Communicator) -> None:
    """Parts of any sizes, none among them; some larger than what goes at once."""
    for dtype in (np.float32, np.float16, np.bool_, np.int64):
        for most in (0, 3, 700_001):
            sizes = [most * ((c.size - rank) % 3) for rank in range(c.size)]
            all_of_them = [brought_by(rank, (sum(sizes),), dtype, 3) for rank in range(c.size)]
            begin = sum(sizes[: c.rank])
            own = slice(begin, begin + sizes[c.rank])
            part = await c.reduce_scatter(all_of_them[c.rank], "sum", sizes)
            assert same_bits(part, reduce_arrays(ReduceOp.SUM, all_of_them)[own])
            whole = np.zeros_like(all_of_them[0])
            whole[own] = all_of_them[0][own]
            assert await c.all_gather(whole, sizes) is whole
            assert same_bits(whole, all_of_them[0])


async def reduces_behind_what_agrees(c: Communicator) -> None:
    """Frames first, then what follows from them: reduced in the same go, or not at all."""

    def agrees(rows: Any) -> bool:
        return bool((rows == rows[0]).all())

    summands = [brought_by(c.rank, shape, np.float32, 2) for shape in ((3, 4), (70_003,), (0,))]
    expected = [await c.all_reduce(each, "mean") for each in summands]
    rows, totals = await c.all_gather_then_reduce([7, 7], agrees, summands, "mean")
    assert same_bits(rows, np.full((c.size, 2), 7))
    assert totals is not None
    assert all(same_bits(total, each) for total, each in zip(totals, expected, strict=True))

    differ = [c.rank, 7]
    rows, totals = await c.all_gather_then_reduce(differ, agrees, summands[: c.rank + 1], "sum")
    assert same_bits(rows, np.stack([[rank, 7] for rank in range(c.size)]))
    assert totals is None or c.size == 1
    assert await c.all_reduce(1) == c.size  # calls are in step again


async def makes_arrays_when_they_are_sent(c: Communicator) -> None:
    """Who has asked is called with the future when it is done, and there is no other to await."""
    come: asyncio.Future[asyncio.Future[Any]] = asyncio.get_running_loop().create_future()
    mine = np.full(70_003, 1.0 + c.rank)
    after: list[Any] = []

    def agrees(rows: Any) -> bool:
        after.append(mine)
        return bool((rows == 7).all())

    c._launch(
        Call(
            AGREE, NOTHING, ReduceOp.SUM, agrees=agrees, summands=after,
            brings=lambda: np.array([7, 7]), then=come.set_result,
        )
    )  # fmt: skip
    came = await come
    assert came.done()
    rows, [total] = came.result()
    assert same_bits(rows, np.full((c.size, 2), 7))
    assert same_bits(total, await c.all_reduce(mine))


async def takes_what_numpy_takes(c: Communicator) -> None:
    assert await c.all_reduce(1) == c.size
    assert same_bits(await c.all_reduce([1.0, 2.0]), np.array([1.0, 2.0]) * c.size)
    grid = np.arange(60_000.0).reshape(300, 200)
    assert same_bits(await c.all_reduce(grid.T[::2]), grid.T[::2] * c.size)
    assert same_bits(await c.all_reduce(grid.astype(">f8")), grid * c.size)
    grid.flags.writeable = False
    assert same_bits(await c.broadcast(await c.all_reduce(grid)), grid * c.size)


async def keeps_the_order_of_calls(c: Communicator) -> None:
    sizes = [3, 300_000, 1, 70_000] * 3
    started = [c.all_reduce(np.full(size, number)) for number, size in enumerate(sizes)]
    for number in reversed(range(len(started))):
        assert (await started[number] == number * c.size).all()
    assert c.statistics().pending == 0


async def results_are_the_callers(c: Communicator) -> None:
    mine = np.full(100_000, 1.0 + c.rank)
    first = await c.all_reduce(mine)
    again = first.copy()
    await c.all_reduce(mine * 2)
    assert same_bits(first, again)
    assert (mine == 1.0 + c.rank).all()


async def an_abandoned_call_goes_on(c: Communicator) -> None:
    """Cancelled awaits, their arrays dropped and the memory used again; nobody notices."""
    for turn in range(4):
        size = 2 * 1024 * 1024
        task = asyncio.get_running_loop().create_task(_reduced(c, size))
        await asyncio.sleep(0)
        if turn % 2 == c.rank % 2:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gc.collect()
            other = np.full(size, np.nan)  # in the same memory, if it was given back
            del other
        else:
            assert (await task == c.size).all()
        assert await c.all_reduce(turn) == turn * c.size
    assert c.statistics().failure == ""


async def _reduced(c: Communicator, size: int) -> Any:
    return await c.all_reduce(np.ones(size))


async def takes_integers_of_numpy(c: Communicator) -> None:
    sizes: Any = np.ones(c.size, np.int64)
    assert (await c.reduce_scatter(np.arange(c.size), "sum", sizes)).tolist() == [c.rank * c.size]
    whole = np.full(c.size, c.rank)
    assert (await c.all_gather(whole, sizes)).tolist() == [*range(c.size)]
    last: Any = np.int64(c.size - 1)
    assert await c.broadcast(c.rank, root=last) == c.size - 1
    ranks: Any = np.arange(c.size)
    async with c.split(ranks) as split:
        assert await split.all_reduce(1) == c.size


async def bad_arguments_change_nothing(c: Communicator) -> None:
    before = c.statistics().calls
    with pytest.raises(TypeError, match="numbers, got list of dtype <U1"):
        c.all_reduce(["a"])
    with pytest.raises(TypeError, match="dtype object"):
        c.broadcast(object())
    with pytest.raises(TypeError, match="mask"):
        c.all_gather(np.ma.masked_array([1.0, 2.0], [True, False]))
    with pytest.raises(ValueError, match="Unknown reduce op 'plus'"):
        c.all_reduce(1, "plus")
    with pytest.raises(ValueError, match=f"root must be a rank from 0 to {c.size - 1}, got 99"):
        c.broadcast(1, root=99)
    with pytest.raises(ValueError, match="axis to cut"):
        c.reduce_scatter(1.0)
    for sizes in ([9] * c.size, [*[0] * c.size, 4], [-1, *[0] * (c.size - 2), 5]):
        with pytest.raises(ValueError, match=f"Parts of {c.size} workers have {c.size} sizes"):
            c.reduce_scatter(np.ones(4), "sum", sizes)
        with pytest.raises(ValueError, match=f"Parts of {c.size} workers have {c.size} sizes"):
            c.all_gather(np.ones(4), sizes)
    with pytest.raises(TypeError, match=r"sizes are integers, one per worker, got \[1.0"):
        c.reduce_scatter(np.ones(c.size), "sum", [1.0] * c.size)  # type: ignore[list-item]
    for array in ([1.0] * c.size, np.frombuffer(bytes(c.size), np.uint8), np.ones(2 * c.size)[::2]):
        with pytest.raises(ValueError, match="fills in an array where it is"):
            c.all_gather(array, [1] * c.size)
    with pytest.raises(ValueError, match="different ranks"):
        c.split([c.rank, c.rank])
    with pytest.raises(ValueError, match="not in the group"):
        c.split([rank for rank in range(c.size) if rank != c.rank])
    with pytest.raises(TypeError, match="reason is a string"):
        c.abort(None)  # type: ignore[arg-type]
    assert c.statistics().calls == before
    await c.barrier()


async def splits(c: Communicator) -> None:
    pair = c.split([0, 1]) if c.rank < 2 else None
    if pair is not None:
        assert (pair.rank, pair.size) == (c.rank, 2)
        total = await pair.all_reduce(np.full(300_000, 1.0 + c.rank))
        assert (total == 3.0).all()
        assert (await pair.all_gather(c.rank)).tolist() == [0, 1]
        assert await pair.broadcast(c.rank * 7, root=1) == 7
        assert (await pair.reduce_scatter(np.arange(4))).tolist() == [[0, 2], [4, 6]][c.rank]
        await pair.barrier()
        await pair.aclose()
    alone = c.split([c.rank])
    assert await alone.all_reduce(5) == 5
    await alone.aclose()
    await c.barrier()


CHECKS = (
    reduces_in_rank_order,
    gathers_scatters_broadcasts,
    cuts_as_it_is_told,
    reduces_behind_what_agrees,
    makes_arrays_when_they_are_sent,
    takes_what_numpy_takes,
    keeps_the_order_of_calls,
    results_are_the_callers,
    an_abandoned_call_goes_on,
    takes_integers_of_numpy,
    bad_arguments_change_nothing,
    splits,
)
