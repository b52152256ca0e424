"""Plans and packs: however leaves are put together and dealt out, every bit is the same."""

import random
from typing import Any

import numpy as np
import pytest

from aioreplica.collectives import BufferPool, deal
from aioreplica.collectives._plan import Layout, ReductionPlan
from aioreplica.typing import ReduceOp
from aioreplica.values import IndexedSlices
from tests.collectives.folds import DTYPES, all_bits, bits, fold, mixed_row, numbers

OPS = list(ReduceOp)
PACKS = [0, 1, 4096, 1 << 30]
MANY = 65536  # float64 elements: cut into ranges below


def planned(op: ReduceOp, rows: list[list[Any]], pack: int = 0) -> list[Any]:
    return plan_of(op, rows, pack).run()


def plan_of(op: ReduceOp, rows: list[list[Any]], pack: int = 0) -> ReductionPlan:
    return ReductionPlan(op, rows, Layout(rows[0], pack), BufferPool())


def mixed_rows(op: ReduceOp, count: int = 4) -> list[list[Any]]:
    sums = op in {ReduceOp.SUM, ReduceOp.MEAN}
    return [mixed_row(i, with_slices=sums) for i in range(count)]


# ---- against a fold ----------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_op_against_a_fold(op: ReduceOp, dtype: str) -> None:
    rng = np.random.default_rng(1)
    shapes = [(), (0,), (5,), (2, 3), (17,), (700,), (1,)]
    rows = [[numbers(rng, shape, dtype) for shape in shapes] for _ in range(4)]
    expected = [bits(fold(op, column)) for column in zip(*rows, strict=True)]

    for pack in PACKS:
        assert all_bits(planned(op, rows, pack)) == expected, f"packs of {pack} bytes"


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("op", OPS)
def test_any_number_of_replicas(op: ReduceOp, count: int) -> None:
    rng = np.random.default_rng(2)
    rows = [[numbers(rng, (3,), "f4") for _ in range(5)] for _ in range(count)]

    results = planned(op, rows)

    for result, column in zip(results, zip(*rows, strict=True), strict=True):
        assert bits(result) == bits(fold(op, column))


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("op", OPS)
def test_mixed_trees_against_a_fold(op: ReduceOp, pack: int) -> None:
    rows = mixed_rows(op)

    results = planned(op, rows, pack)

    for result, column in zip(results, zip(*rows, strict=True), strict=True):
        if type(result) is IndexedSlices:
            dense = fold(op, [part.to_dense() for part in column])
            np.testing.assert_allclose(result.to_dense(), dense, rtol=1e-5)
        elif isinstance(result, np.ndarray):
            assert bits(result) == bits(fold(op, column))
        elif isinstance(result, np.generic):
            assert result.tobytes() == fold(op, column).tobytes()
        else:
            assert type(result) in {int, float, complex, bool}
            assert result == fold(op, [np.asarray(one, "c16") for one in column])


@pytest.mark.parametrize("op", OPS)
def test_the_pack_size_changes_no_bit(op: ReduceOp) -> None:
    rows = mixed_rows(op)
    expected = all_bits(planned(op, rows))

    for pack in (*PACKS, 2, 7, 64, 100, 1000, 65536, 10**9):
        assert all_bits(planned(op, rows, pack)) == expected, pack


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("pack", PACKS)
def test_nan_and_infinities_as_numpy(op: ReduceOp, pack: int) -> None:
    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1e308])
    for dtype in ("f8", "f4", "f2"):
        with np.errstate(over="ignore", invalid="ignore"):
            values = special.astype(dtype)
            rows = [[np.repeat(values, 8), np.ones(3, dtype)], [np.tile(values, 8)] * 1]
            rows[1].append(np.zeros(3, dtype))
            expected = [fold(op, column) for column in zip(*rows, strict=True)]
            results = planned(op, rows, pack)
        for result, one in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, one)


# ---- shares for threads ------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("op", OPS)
def test_shares_in_any_order_change_no_bit(op: ReduceOp, count: int) -> None:
    rows = [
        [*row, numbers(np.random.default_rng(i), (MANY,), "f8")]
        for i, row in enumerate(mixed_rows(op, 3))
    ]
    expected = all_bits(planned(op, rows))
    for seed in range(3):
        plan = plan_of(op, rows)
        plan.cut(plan.num_bytes // count)
        shares = deal(plan.jobs, count)
        assert len(shares) <= count
        random.Random(seed).shuffle(shares)
        for share in shares:
            share()
        assert all_bits(plan.results) == expected


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i4", "c16", "?"])
@pytest.mark.parametrize("num_bytes", [1000, 4097, 100_000])
def test_ranges_of_a_large_array_change_no_bit(dtype: str, num_bytes: int) -> None:
    rows = [[numbers(np.random.default_rng(i), (MANY // 4 + 3,), dtype)] for i in range(3)]
    for op in OPS:
        plan = plan_of(op, rows)
        plan.cut(num_bytes)
        shares = deal(plan.jobs, 1000)
        assert (len(shares) > 1) is (plan.num_bytes > num_bytes)
        for share in reversed(shares):
            share()
        assert bits(plan.results[0]) == bits(fold(op, [row[0] for row in rows]))


@pytest.mark.parametrize(
    "make",
    [np.asfortranarray, lambda a: a[::2], lambda a: a[:, ::-1], lambda a: a.T, lambda a: a[:1]],
    ids=["fortran", "every other", "backwards", "transposed", "one row"],
)
def test_large_arrays_of_any_layout_can_be_cut(make: Any) -> None:
    rows = [[make(numbers(np.random.default_rng(i), (200, 300), "f8"))] for i in range(3)]
    plan = plan_of(ReduceOp.SUM, rows)
    plan.cut(10_000)
    for share in deal(plan.jobs, 4):
        share()

    assert bits(plan.results[0]) == bits(fold(ReduceOp.SUM, [row[0] for row in rows]))


def test_shares_read_about_as_much() -> None:
    """What each of four shares reads, seen from how many pieces of equal size it holds."""
    rows = [[np.ones(100_000) for _ in range(8)] for _ in range(2)]

    shares = deal(plan_of(ReduceOp.SUM, rows).jobs, 4)

    assert [len(share.args[0]) for share in shares] == [2] * 4


def test_num_bytes_counts_the_arrays_that_are_read() -> None:
    rows = [[np.ones(10), np.ones((2, 2), "f4"), 3, np.ones(0)] for _ in range(3)]

    assert plan_of(ReduceOp.SUM, rows).num_bytes == 3 * (80 + 16)


# ---- results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", PACKS)
def test_results_cannot_be_written(pack: int) -> None:
    rows = [[np.ones(5), np.ones((2, 2)), np.ones(100_000), np.ones(()), np.ones(0)]] * 2

    for result in planned(ReduceOp.SUM, rows, pack):
        assert not result.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            result[...] = 2.0


@pytest.mark.parametrize("pack", PACKS)
def test_inputs_are_not_results(pack: int) -> None:
    """One replica too: its own arrays stay its own."""
    rows = [[np.ones(5), np.ones((2, 2)), np.ones(100_000)]]

    for result, own in zip(planned(ReduceOp.SUM, rows, pack), rows[0], strict=True):
        assert not np.shares_memory(result, own)
        assert own.flags.writeable


def test_nothing_to_reduce() -> None:
    assert planned(ReduceOp.SUM, [[], []]) == []


def test_a_pack_of_layouts() -> None:
    rng = np.random.default_rng(3)
    columns = [
        [numbers(rng, (3, 4), "f8").T, numbers(rng, (8,), "f8")[::2], numbers(rng, (), "f8")]
        for _ in range(2)
    ]

    results = planned(ReduceOp.SUM, columns)

    assert len(Layout(columns[0], 0).packs) == 1
    for result, column in zip(results, zip(*columns, strict=True), strict=True):
        np.testing.assert_array_equal(result, fold(ReduceOp.SUM, column))


def test_results_of_a_pack_lie_one_behind_the_other() -> None:
    likes = [
        np.array([[0.0, 1.0], [2.0, 3.0]]),
        np.array(4.0),
        np.ones((0, 3)),
        np.arange(5.0, 8.0),
    ]

    results = planned(ReduceOp.SUM, [likes])

    assert [result.tolist() for result in results] == [[[0, 1], [2, 3]], 4, [], [5, 6, 7]]
    assert [result.shape for result in results] == [like.shape for like in likes]
    starts = [
        result.__array_interface__["data"][0] for result in (results[0], results[1], results[3])
    ]
    assert (starts[1] - starts[0], starts[2] - starts[1]) == (32, 8)


def test_packs_of_bfloat16() -> None:
    dtype = pytest.importorskip("ml_dtypes").bfloat16
    rng = np.random.default_rng(4)
    rows = [[numbers(rng, (5,), "f4").astype(dtype) for _ in range(20)] for _ in range(3)]

    for pack in PACKS:
        results = planned(ReduceOp.SUM, rows, pack)
        for result, column in zip(results, zip(*rows, strict=True), strict=True):
            assert result.dtype == dtype
            assert result.tobytes() == fold(ReduceOp.SUM, column).tobytes()
