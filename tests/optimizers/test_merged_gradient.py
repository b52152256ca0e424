"""MergedGradient: parts of several replicas become one gradient, divided once."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioreplica as ar
from aioreplica.optimizers import SGD, ScaledGradient
from aioreplica.optimizers._merged_gradient import MergedGradient, merge_gradients
from tests.conftest import mirrored

NUMBERS = st.floats(-1e6, 1e6)


def merged(gradient: Any, *, is_mean: bool = False) -> MergedGradient:
    column = column_of(gradient)
    [found] = merge_gradients([variable_for(gradient)], [column], is_mean=is_mean)
    if found.needs_sum:
        found.sum_parts()
    return found


def column_of(gradient: Any) -> list[Any]:
    """The parts of a gradient, one per replica."""
    if isinstance(gradient, ar.Weighted):
        return [
            ar.Weighted(*pair)
            for pair in zip(*map(column_of, (gradient.total, gradient.weight)), strict=True)
        ]
    return list(gradient.values) if isinstance(gradient, ar.PerReplica) else [gradient]


def variable_for(gradient: Any) -> ar.Variable:
    total = gradient.total if isinstance(gradient, ar.Weighted) else gradient
    first = total[0] if isinstance(total, ar.PerReplica) else total
    if isinstance(first, ScaledGradient):
        first = first.values
    if isinstance(first, ar.IndexedSlices):
        return ar.Variable(np.zeros(first.dense_shape, first.dtype), name="w")
    return ar.Variable(np.zeros_like(first), name="w")


def aggregate(gradient: Any, **options: Any) -> Any:
    return merged(gradient, **options).dense()


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 50)), min_size=1, max_size=6))
def test_aggregating_is_dividing_the_sum_of_totals_by_the_sum_of_weights(parts: Any) -> None:
    totals = [np.array([total]) if weight else np.array([np.nan]) for total, weight in parts]
    weights = [weight for _, weight in parts]
    gradient = ar.Weighted(ar.PerReplica(totals), ar.PerReplica(weights))
    if not sum(weights):
        with pytest.raises(ValueError, match=r"'w' has total weight 0.*weights \[0"):
            merged(gradient)
        return

    combined = aggregate(gradient)

    expected = sum(total for total, weight in parts if weight) / sum(weights)
    np.testing.assert_allclose(combined, [expected], rtol=1e-12, atol=1e-9)


@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_plain_gradients_are_summed_in_order(values: Any) -> None:
    combined = aggregate(ar.PerReplica([np.array(value) for value in values]))

    total = values[0]
    for value in values[1:]:
        total += value
    assert combined == total


def test_plain_values_count_as_one_replica() -> None:
    gradient = np.array([2.0, 4.0])

    np.testing.assert_array_equal(aggregate(gradient), gradient)
    np.testing.assert_array_equal(aggregate(ar.Weighted(gradient, 2)), [1.0, 2.0])


def test_a_mean_divides_by_the_number_of_replicas_unless_there_are_weights() -> None:
    parts = ar.PerReplica([np.array([2.0]), np.array([4.0])])

    assert aggregate(parts, is_mean=True) == [3.0]
    assert aggregate(ar.Weighted(parts, ar.PerReplica([1, 3])), is_mean=True) == [1.5]


def test_single_precision_stays_single() -> None:
    parts = ar.PerReplica([np.ones(2, np.float32)] * 2)

    assert aggregate(parts).dtype == np.float32
    assert aggregate(ar.Weighted(parts, ar.PerReplica([1, 2]))).dtype == np.float32


def test_a_part_of_weight_zero_is_left_out() -> None:
    nan, one = np.array([np.nan]), np.array([1.0])

    found = merged(ar.Weighted(ar.PerReplica([nan, one, nan]), ar.PerReplica([0, 2, 0])))

    assert (list(found.members), found.dense()) == ([1], 0.5)


def test_sparse_parts_are_joined_and_empty_ones_left_out() -> None:
    def rows(values: Any, indices: Any) -> ar.IndexedSlices:
        return ar.IndexedSlices(np.array(values, float), indices, (4,))

    parts = ar.PerReplica([rows([1.0, 2.0], [3, 3]), rows([np.nan], [0]), rows([4.0], [1])])
    total = merged(ar.Weighted(parts, ar.PerReplica([1, 0, 1])))

    assert total.is_sparse
    assert total.summed().indices.tolist() == [1, 3]
    assert total.dense().tolist() == [0.0, 2.0, 0.0, 1.5]
    alone = merged(ar.PerReplica([rows([1.0, 2.0], [3, 3])]))
    assert alone.summed().indices.tolist() == [3]


def test_sparse_and_dense_parts_do_not_mix() -> None:
    sparse = ar.IndexedSlices([1.0], [0], (2,))

    with pytest.raises(TypeError, match=r"'w' is an IndexedSlices on replicas \[1\].*\[0, 2\]"):
        merged(ar.PerReplica([np.zeros(2), sparse, np.zeros(2)]))


def test_gradients_scaled_differently_are_brought_to_one_scale() -> None:
    parts = ar.PerReplica(
        [ScaledGradient(np.array([8.0]), 8.0), ScaledGradient(np.array([4.0]), 2.0)]
    )

    assert aggregate(parts) == [3.0]
    assert aggregate(ar.PerReplica([parts[0], np.array([2.0])])) == [3.0]  # plain: not scaled
    rows = [ar.IndexedSlices([x], [0], (2,)) for x in (8.0, 4.0)]
    sparse = ar.PerReplica([ScaledGradient(rows[0], 8.0), ScaledGradient(rows[1], 2.0)])
    assert aggregate(sparse).tolist() == [3.0, 0.0]


@given(st.integers(-90, 90), st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8))
def test_dividing_by_a_power_of_two_changes_no_bit(exponent: int, values: list[float]) -> None:
    part = np.array(values, np.float32)
    w = ar.Variable(np.zeros_like(part), name="w")

    with np.errstate(all="ignore"):
        expected = part / np.float32(2.0**exponent)
        found = MergedGradient(w, [part], [0], 2.0**exponent).dense()

    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([np.ones((2, 3)), np.ones((2, 3))], False),
        ([np.ones((2, 3)), np.asfortranarray(np.ones((2, 3)))], True),
        ([np.ones((2, 3), np.float16)] * 2, True),  # has to be summed in float32
        ([ar.IndexedSlices([[1.0] * 3], [0], (2, 3))], True),
    ],
)
def test_which_parts_have_to_be_summed_before_they_are_read(parts: Any, expected: bool) -> None:
    gradient = ar.PerReplica(parts)
    [found] = merge_gradients([variable_for(gradient)], [parts], is_mean=False)

    assert found.needs_sum is expected


@pytest.mark.asyncio
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize("size", [7, 4096, 100_001])
async def test_sums_are_those_of_all_reduce_bit_by_bit(num_replicas: int, size: int) -> None:
    rngs = [np.random.default_rng(i) for i in range(num_replicas)]
    parts = [rng.normal(size=size).astype(np.float32) for rng in rngs]
    async with mirrored(num_replicas) as strategy:
        with strategy.scope():
            w, sgd = ar.Variable(np.zeros(size, np.float32)), SGD(1.0)

        async def step(part: Any) -> Any:
            ctx = ar.get_replica_context()
            assert ctx is not None
            await sgd.apply_gradients([(part, w)])
            return await ctx.all_reduce("sum", part)

        [whole, *_] = await strategy.run(step, args=(ar.PerReplica(parts),))

    assert (-w.value).tobytes() == np.asarray(whole).tobytes()
