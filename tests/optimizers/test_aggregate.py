"""Aggregation: parts of several replicas become one gradient, divided once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioreplica as ar
from aioreplica.collectives import CommunicationOptions, Float16, Reducer
from aioreplica.optimizers._aggregate import Aggregation
from aioreplica.optimizers._total import Total

NUMBERS = st.floats(-1e6, 1e6)


def aggregation(gradient: Any, scales: Sequence[float] | None = None, **options: Any) -> Any:
    options = {"is_mean": False} | options
    return Aggregation([column_of(gradient)], [variable_for(gradient)], scales, **options)


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
    if isinstance(first, ar.IndexedSlices):
        return ar.Variable(np.zeros(first.dense_shape, first.dtype), name="w")
    return ar.Variable(np.zeros_like(first), name="w")


def total_of(gradient: Any, scales: Sequence[float] | None = None, **options: Any) -> Total:
    found = aggregation(gradient, scales, **options)
    [total] = found.totals(found.reduce(Reducer()))
    return total


def aggregate(gradient: Any, **options: Any) -> Any:
    return total_of(gradient, **options).dense()


@given(st.lists(st.tuples(NUMBERS, st.integers(0, 50)), min_size=1, max_size=6))
def test_aggregating_is_dividing_the_sum_of_totals_by_the_sum_of_weights(parts: Any) -> None:
    totals = [np.array([total]) if weight else np.array([np.nan]) for total, weight in parts]
    weights = [weight for _, weight in parts]
    gradient = ar.Weighted(ar.PerReplica(totals), ar.PerReplica(weights))
    if not sum(weights):
        with pytest.raises(ValueError, match=r"'w' has total weight 0.*weights \[0"):
            aggregation(gradient)
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


def test_a_part_of_weight_zero_is_left_out_where_others_count() -> None:
    a, b = ar.Variable([0.0], name="a"), ar.Variable([0.0], name="b")
    nan, one = np.array([np.nan]), np.array([1.0])
    gradients = [
        ar.Weighted(ar.PerReplica([one, nan, nan]), ar.PerReplica([1, 0, 0])),
        ar.Weighted(ar.PerReplica([nan, one, nan]), ar.PerReplica([0, 2, 0])),
    ]

    found = Aggregation(list(map(column_of, gradients)), [a, b], None, is_mean=False)
    first, second = found.totals(found.reduce(Reducer()))

    assert found.members == [0, 1]  # replica 2 brought nothing at all
    assert (first.dense(), second.dense()) == (1.0, 0.5)


def test_sparse_parts_are_joined_and_empty_ones_left_out() -> None:
    def rows(values: Any, indices: Any) -> ar.IndexedSlices:
        return ar.IndexedSlices(np.array(values, float), indices, (4,))

    parts = ar.PerReplica([rows([1.0, 2.0], [3, 3]), rows([np.nan], [0]), rows([4.0], [1])])
    total = total_of(ar.Weighted(parts, ar.PerReplica([1, 0, 1])))

    assert total.is_sparse
    assert total.summed.indices.tolist() == [1, 3]
    assert total.dense().tolist() == [0.0, 2.0, 0.0, 1.5]
    alone = total_of(ar.PerReplica([rows([1.0, 2.0], [3, 3])]))
    assert alone.summed.indices.tolist() == [3]


def test_sparse_and_dense_parts_do_not_mix() -> None:
    sparse = ar.IndexedSlices([1.0], [0], (2,))

    with pytest.raises(TypeError, match=r"'w' is an IndexedSlices on replicas \[1\].*\[0, 2\]"):
        aggregation(ar.PerReplica([np.zeros(2), sparse, np.zeros(2)]))


def test_gradients_scaled_differently_are_brought_to_one_scale() -> None:
    parts = ar.PerReplica([np.array([8.0]), np.array([4.0])])

    assert total_of(parts, scales=[8.0, 2.0]).dense() == [3.0]
    sparse = ar.PerReplica([ar.IndexedSlices([x], [0], (2,)) for x in (8.0, 4.0)])
    assert total_of(sparse, scales=[8.0, 2.0]).dense().tolist() == [3.0, 0.0]


@pytest.mark.asyncio
async def test_compression_is_that_of_the_strategy() -> None:
    reducer = Reducer(CommunicationOptions(compression=Float16()))
    found = aggregation(ar.Weighted(ar.PerReplica([np.array([1 / 3])]), ar.PerReplica([100_000])))

    [total] = found.totals(await found.reduce(reducer))

    assert total.summed == np.float64(np.float16(1 / 3))
    assert total.divisor == 100_000  # weights are not coded


def test_bytes_count_every_replica() -> None:
    parts = ar.PerReplica([np.ones(2), np.ones(2)])

    assert aggregation(parts).num_bytes == 32
    assert aggregation(ar.Weighted(parts, ar.PerReplica([1, 2]))).num_bytes == 32


@given(st.integers(-90, 90), st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=8))
def test_dividing_by_a_power_of_two_changes_no_bit(exponent: int, values: list[float]) -> None:
    part = np.array(values, np.float32)
    w = ar.Variable(np.zeros_like(part), name="w")

    with np.errstate(all="ignore"):
        expected = part / np.float32(2.0**exponent)
        found = Total(w, [part], 2.0**exponent).dense()

    assert found.tobytes() == expected.tobytes()


def test_half_precision_is_divided_as_it_is() -> None:
    part = np.array([1.0, 3e-5], np.float16)
    w = ar.Variable(np.zeros_like(part), name="w")

    assert (Total(w, [part], 2.0**12).dense() == part / np.float16(2.0**12)).all()


@pytest.mark.parametrize("divisor", [1e5, 2.0**20, 2.0**26, 2.0**40])
def test_divisors_beyond_half_precision_are_not_infinite(divisor: float) -> None:
    part = np.array([6e4, -3e4], np.float16)
    w = ar.Variable(np.zeros_like(part), name="w")
    total = Total(w, [part], divisor)

    expected = (part.astype(np.float64) / divisor).astype(np.float16)
    np.testing.assert_array_equal(total.dense(), expected)
    assert total.squares() == pytest.approx(((part.astype(np.float64) / divisor) ** 2).sum())


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([np.ones((2, 3)), np.ones((2, 3))], True),
        ([np.ones((2, 3)), np.asfortranarray(np.ones((2, 3)))], False),
        ([np.ones((2, 3), np.float16)] * 2, False),  # has to be summed in float32
        ([ar.IndexedSlices([[1.0] * 3], [0], (2, 3))], False),
    ],
)
def test_which_sums_can_be_left_to_the_rule(parts: Any, expected: bool) -> None:
    found = aggregation(ar.PerReplica(parts))

    assert found.can_wait(Reducer()) is expected
    assert not found.can_wait(Reducer(CommunicationOptions(compression=Float16())))


def test_sums_left_to_the_rule_have_the_bits_of_the_reducer() -> None:
    parts = [np.random.default_rng(i).normal(size=1000).astype(np.float32) for i in range(4)]
    found = aggregation(ar.PerReplica(parts))
    out, scratch = np.empty(1000, np.float32), np.empty(1000, np.float32)

    [unsummed], [summed] = found.unsummed(), found.totals(found.reduce(Reducer()))

    assert unsummed.gradient(0, 1000, out, scratch).tobytes() == summed.dense().tobytes()
    assert unsummed.summed.tobytes() == summed.summed.tobytes()
    assert (unsummed.num_bytes, summed.num_bytes) == (16_000, 4_000)
