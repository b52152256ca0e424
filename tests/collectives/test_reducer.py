"""The reducer: whole trees, inline or on threads, bitwise the same whatever the circumstances."""

import asyncio
import hashlib
import itertools
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.collectives import INLINE_SUM_BYTES, Reducer
from aioreplica.typing import ReduceOp
from aioreplica.values import CAN_COUNT_REFERENCES
from tests.collectives.folds import DTYPES, all_bits, bits, fold, mixed_row, numbers
from tests.conftest import mirrored
from tests.replica.gated import me, my_id

pytestmark = pytest.mark.usefixtures("no_task_left")

OPS = list(ReduceOp)
LARGE = INLINE_SUM_BYTES // 8 + 1001  # float64 elements of one replica alone
ROOT = Path(__file__).resolve().parents[2]


async def reduced(
    rows: Sequence[Sequence[Any]], op: ReduceOp = ReduceOp.SUM, pack: int = 0
) -> list[Any]:
    result = Reducer(ar.CommunicationOptions(bytes_per_pack=pack)).reduce(op, rows)
    return result if isinstance(result, list) else await result


def large_rows(count: int = 3) -> list[list[Any]]:
    return [
        [*mixed_row(i), numbers(np.random.default_rng(i), (LARGE,), "f8")] for i in range(count)
    ]


# ---- inline and off the loop -------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("op", "dtype"),
    [*((op, "f4") for op in OPS), *((ReduceOp.SUM, dtype) for dtype in DTYPES if dtype != "f4")],
)
async def test_large_arrays_against_a_fold(op: ReduceOp, dtype: str) -> None:
    size = 2 * INLINE_SUM_BYTES // np.dtype(dtype).itemsize // 3 + 7
    column = [np.resize(numbers(np.random.default_rng(i), (9973,), dtype), size) for i in range(3)]

    result = Reducer().reduce(op, [[array] for array in column])

    assert not isinstance(result, list)
    assert bits((await result)[0]) == bits(fold(op, column))


@pytest.mark.asyncio
async def test_small_trees_are_reduced_at_once() -> None:
    for row in ([1.0], [np.ones(3)], [np.ones(3), 2, np.ones((2, 2), "f4")], []):
        assert isinstance(Reducer().reduce(ReduceOp.SUM, [row, row]), list)


@pytest.mark.asyncio
async def test_mixed_trees_are_the_same_off_the_loop() -> None:
    """The large leaf sends all of them there; beside it each is what it is alone."""
    rows = large_rows()

    together = await reduced(rows)

    alone = [(await reduced([[leaf] for leaf in column]))[0] for column in zip(*rows, strict=True)]
    assert all_bits(together) == all_bits(alone)


@pytest.mark.asyncio
@pytest.mark.parametrize("order", ["C", "F", "strided"])
@pytest.mark.parametrize("shape", [(1500, 700), (2, 300_000), (300_000, 2), (100, 100, 100)])
async def test_large_arrays_of_any_layout(order: str, shape: tuple[int, ...]) -> None:
    def make(i: int) -> np.ndarray:
        if order == "strided":
            wide = np.ones((*shape[:-1], 2 * shape[-1])) * (i + 0.1)
            return wide[..., ::2]
        return np.asarray(np.full(shape, i + 0.1), order=order)

    column = [make(i) for i in range(3)]

    [result] = await reduced([[array] for array in column])

    assert bits(result) == bits(fold(ReduceOp.SUM, column))


@pytest.mark.asyncio
async def test_layouts_may_differ_between_replicas() -> None:
    base = numbers(np.random.default_rng(0), (900, 400), "f8")
    column = [base, np.asfortranarray(base), np.repeat(base, 2, axis=1)[:, ::2]]

    [result] = await reduced([[array] for array in column])

    assert bits(result) == bits(fold(ReduceOp.SUM, column))


@pytest.mark.asyncio
async def test_a_tree_without_arrays_is_reduced() -> None:
    assert await reduced([[1, 2.0, True], [3, 4.0, False]]) == [4, 6.0, 1]


# ---- memory ------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.skipif(not CAN_COUNT_REFERENCES, reason="no memory is reused here")
async def test_memory_is_used_again_but_never_under_a_result() -> None:
    reducer = Reducer()
    kept: list[tuple[float, Any]] = []
    addresses = set()
    for k in range(12):
        [result] = await reducer.reduce(ReduceOp.SUM, [[np.full(LARGE, float(k))]] * 2)
        addresses.add(result.__array_interface__["data"][0])
        if k % 4 == 0:
            kept.append((2.0 * k, result[17:18]))
        del result

    assert [part.tolist() for _, part in kept] == [[value] for value, _ in kept]
    assert len(addresses) < 12


@pytest.mark.asyncio
async def test_memory_that_is_not_used_again_is_let_go() -> None:
    """Sizes that came once only: their buffers go after a few more reductions."""
    reducer = Reducer()
    made = []
    for size in range(30):
        result = reducer.reduce(ReduceOp.SUM, [[np.ones(20_000 + size)], [np.ones(20_000 + size)]])
        [array] = result if isinstance(result, list) else await result
        buffer = array
        while isinstance(buffer.base, np.ndarray):
            buffer = buffer.base
        made.append(weakref.ref(buffer))
        del array, result, buffer

    assert sum(ref() is not None for ref in made) < 15


@pytest.mark.asyncio
async def test_clear_does_not_touch_results() -> None:
    reducer = Reducer()
    [result] = await reducer.reduce(ReduceOp.SUM, [[np.ones(LARGE)]] * 2)

    reducer.clear()
    [other] = await reducer.reduce(ReduceOp.SUM, [[np.zeros(LARGE)]] * 2)

    assert set(np.unique(result)) == {2.0}
    assert set(np.unique(other)) == {0.0}


@pytest.mark.asyncio
async def test_reductions_at_the_same_time() -> None:
    """Several in flight on one reducer do not share memory, and none changes another."""
    reducer = Reducer()
    values = [float(k) for k in range(6)]
    pending = [reducer.reduce(ReduceOp.SUM, [[np.full(LARGE, v)]] * 2) for v in values]

    results = await asyncio.gather(*pending)

    assert [set(np.unique(array)) for [array] in results] == [{2 * v} for v in values]


@pytest.mark.asyncio
async def test_a_cancelled_reduction_keeps_nothing() -> None:
    reducer = Reducer()
    task = asyncio.get_running_loop().create_task(_await(reducer))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    [result] = await reducer.reduce(ReduceOp.SUM, [[np.ones(LARGE)]] * 2)
    assert set(np.unique(result)) == {2.0}


async def _await(reducer: Reducer) -> Any:
    return await reducer.reduce(ReduceOp.SUM, [[np.full(LARGE, 7.0)]] * 2)


# ---- the same bits -----------------------------------------------------------------------------


async def digest(order: Sequence[int], pack: int, *, is_large: bool) -> str:
    """Reduce a tree in a run whose replicas arrive in the given order; return what came out."""
    gates = [asyncio.Event() for _ in order]
    gates[0].set()
    options = ar.CommunicationOptions(bytes_per_pack=pack)

    async def step() -> Any:
        turn = list(order).index(my_id())
        await gates[turn].wait()
        if turn + 1 < len(order):
            asyncio.get_running_loop().call_soon(gates[turn + 1].set)
        row = mixed_row(my_id())
        if is_large:
            row.append(numbers(np.random.default_rng(my_id()), (LARGE // 2,), "f8"))
        return [await me().all_reduce("sum", row, options)]

    async with mirrored(len(order)) as strategy:
        results = strategy.local_results(await strategy.run(step))
    digests = {hashlib.sha256(repr(all_bits(row)).encode()).hexdigest() for [row] in results}
    [one] = digests
    return one


@pytest.mark.asyncio
@pytest.mark.parametrize("is_large", [False, True], ids=["inline", "off the loop"])
@pytest.mark.xslow
async def test_arrival_orders_change_no_bit(is_large: bool) -> None:
    """Every order with every size of packs; of large trees, six orders."""
    expected = await digest(range(4), 0, is_large=is_large)
    cells = list(itertools.product([0, 1, 4096], itertools.permutations(range(4))))
    for pack, order in cells[:: 13 if is_large else 1]:
        assert await digest(order, pack, is_large=is_large) == expected, (pack, order)


@pytest.mark.asyncio
async def test_two_arrival_orders_change_no_bit() -> None:
    assert await digest((3, 1, 0, 2), 4096, is_large=False) == await digest(
        range(4), 0, is_large=False
    )


PROGRAM = """
import asyncio, sys
from aioreplica.devices import num_collective_streams, set_lane_options
set_lane_options(num_collective_streams=int(sys.argv[1]))
assert num_collective_streams() == int(sys.argv[1])
from tests.collectives.test_reducer import digest
for pack in (0, 1, 4096):
    print(asyncio.run(digest((2, 0, 3, 1), pack, is_large=True)))
"""


@pytest.mark.xslow
def test_the_number_of_threads_changes_no_bit() -> None:
    lines: set[str] = set()
    for streams in range(1, 5):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(streams)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.split()) == 3
        lines |= set(done.stdout.split())
    assert len(lines) == 1
