"""KeyedPermutation: a permutation that is a pure function of seed, epoch and index."""

from collections import Counter
from math import factorial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioreplica.input import KeyedPermutation

GOLDEN_SMALL = {1: [0, 9, 2, 8, 6, 3, 4, 5, 1, 7], 2: [9, 0, 7, 2, 5, 3, 6, 1, 8, 4]}
GOLDEN_LARGE = [870078, 151090, 495745, 911404]


def whole_order(n: int, seed: int, **options: Any) -> list[int]:
    return KeyedPermutation(n, seed=seed, epoch=1, **options)(np.arange(n)).tolist()


def chi_squared(counts: Any, expected: float) -> float:
    """Return by how many standard deviations the statistic lies above what chance gives."""
    counts = np.asarray(counts, float)
    freedom = counts.size - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@given(st.integers(0, 5000), st.integers(0, 2**70), st.integers(0, 100), st.sampled_from([1, 2]))
def test_it_is_a_permutation(n: int, seed: int, epoch: int, version: int) -> None:
    permutation = KeyedPermutation(n, seed=seed, epoch=epoch, version=version)

    assert sorted(permutation(np.arange(n)).tolist()) == list(range(n))


@given(st.integers(1, 500), st.data())
def test_each_index_stands_alone(n: int, data: st.DataObject) -> None:
    permutation = KeyedPermutation(n, seed=1, epoch=2)
    chosen = data.draw(st.lists(st.integers(0, n - 1)))

    whole = permutation(np.arange(n))

    assert permutation(np.array(chosen, int)).tolist() == [int(whole[i]) for i in chosen]


def test_the_order_never_changes() -> None:
    """States saved by an earlier release must mean the same examples."""
    for version, order in GOLDEN_SMALL.items():
        small = KeyedPermutation(10, seed=0, epoch=0, version=version)
        assert small(np.arange(10)).tolist() == order
        million = KeyedPermutation(1_000_000, seed=7, epoch=3, version=version)
        assert million([0, 1, 2, 999_999]).tolist() == GOLDEN_LARGE


def test_only_a_few_thousand_are_sorted() -> None:
    for n, is_old in ((4096, False), (4097, True)):
        assert (whole_order(n, 3) == whole_order(n, 3, version=1)) == is_old


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_every_order_of_a_few_comes_about_equally_often(n: int) -> None:
    num_keys = 10 * factorial(n)
    orders = Counter(tuple(whole_order(n, seed)) for seed in range(num_keys))

    assert len(orders) == factorial(n)
    assert abs(chi_squared(list(orders.values()), 10)) < 4  # fixed keys, so a fixed number


@pytest.mark.parametrize("n", [8, 9, 24, 25, 49, 81, 121])
def test_half_of_the_orders_are_odd_permutations(n: int) -> None:
    """Only even ones came of squares of odd numbers, where every shift is one."""
    num_keys = 400
    num_odd = sum(is_odd(whole_order(n, seed)) for seed in range(num_keys))

    assert abs(num_odd - num_keys / 2) < 3 * num_keys**0.5 / 2


def is_odd(order: list[int]) -> bool:
    """Whether an odd number of swaps makes the order."""
    num_cycles, seen = 0, set[int]()
    for start in range(len(order)):
        num_cycles += start not in seen
        place = start
        while place not in seen:
            seen.add(place)
            place = order[place]
    return (len(order) - num_cycles) % 2 == 1


@pytest.mark.parametrize("n", [8, 9, 24, 25])
def test_pairs_of_neighbours_are_spread_evenly(n: int) -> None:
    num_keys = 40 * n
    counts = np.zeros((n, n))
    for seed in range(num_keys):
        order = whole_order(n, seed)
        np.add.at(counts, (order[:-1], order[1:]), 1)

    pairs = counts[~np.eye(n, dtype=bool)]
    assert abs(chi_squared(pairs, num_keys * (n - 1) / pairs.size)) < 4


@pytest.mark.parametrize("n", [6, 50])
def test_places_are_spread_evenly(n: int) -> None:
    num_keys = 1000
    counts = np.zeros((n, n))
    for seed in range(num_keys):
        counts[np.arange(n), KeyedPermutation(n, seed=seed, epoch=0)(np.arange(n))] += 1

    expected = num_keys / n
    statistic = ((counts - expected) ** 2 / expected).sum()

    assert abs(statistic - (n - 1) ** 2) < 5 * (2 * (n - 1) ** 2) ** 0.5


def test_a_billion_examples_need_no_list_of_them() -> None:
    permutation = KeyedPermutation(10**9, seed=0, epoch=0)

    assert len(set(permutation(np.arange(1000)).tolist())) == 1000


@pytest.mark.parametrize("indices", [[-1], [5], [0, 7]])
def test_indices_outside_are_refused(indices: list[int]) -> None:
    with pytest.raises(IndexError, match="5 examples"):
        KeyedPermutation(5, seed=0, epoch=0)(indices)
