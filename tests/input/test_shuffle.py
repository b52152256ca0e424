"""KeyedPermutation: a permutation that is a pure function of seed, epoch and index."""

from collections import Counter
from math import factorial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioreplica.input import KeyedPermutation

GOLDEN_SMALL = [0, 9, 2, 8, 6, 3, 4, 5, 1, 7]
GOLDEN_LARGE = [870078, 151090, 495745, 911404]


@given(st.integers(0, 3000), st.integers(0, 2**70), st.integers(0, 100))
def test_it_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    permutation = KeyedPermutation(n, seed=seed, epoch=epoch)

    assert sorted(permutation(np.arange(n)).tolist()) == list(range(n))


@given(st.integers(1, 500), st.data())
def test_each_index_stands_alone(n: int, data: st.DataObject) -> None:
    permutation = KeyedPermutation(n, seed=1, epoch=2)
    chosen = data.draw(st.lists(st.integers(0, n - 1)))

    whole = permutation(np.arange(n))

    assert permutation(np.array(chosen, int)).tolist() == [int(whole[i]) for i in chosen]


def test_the_order_never_changes() -> None:
    """States saved by an earlier release must mean the same examples."""
    assert KeyedPermutation(10, seed=0, epoch=0)(np.arange(10)).tolist() == GOLDEN_SMALL
    million = KeyedPermutation(1_000_000, seed=7, epoch=3)
    assert million([0, 1, 2, 999_999]).tolist() == GOLDEN_LARGE


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_order_of_a_few_comes_about_equally_often(n: int) -> None:
    num_keys = 2000
    orders = Counter(
        tuple(KeyedPermutation(n, seed=seed, epoch=1)(np.arange(n))) for seed in range(num_keys)
    )

    assert len(orders) == factorial(n)
    expected = num_keys / factorial(n)
    chi_squared = sum((count - expected) ** 2 / expected for count in orders.values())
    assert chi_squared < 3 * factorial(n)  # fixed keys, so a fixed number


def test_places_are_spread_evenly() -> None:
    n, num_keys = 50, 1000
    counts = np.zeros((n, n))
    for seed in range(num_keys):
        counts[np.arange(n), KeyedPermutation(n, seed=seed, epoch=0)(np.arange(n))] += 1

    expected = num_keys / n
    chi_squared = ((counts - expected) ** 2 / expected).sum()

    assert abs(chi_squared - (n - 1) ** 2) < 5 * (2 * (n - 1) ** 2) ** 0.5


def test_a_billion_examples_need_no_list_of_them() -> None:
    permutation = KeyedPermutation(10**9, seed=0, epoch=0)

    assert len(set(permutation(np.arange(1000)).tolist())) == 1000


@pytest.mark.parametrize("indices", [[-1], [5], [0, 7]])
def test_indices_outside_are_refused(indices: list[int]) -> None:
    with pytest.raises(IndexError, match="5 examples"):
        KeyedPermutation(5, seed=0, epoch=0)(indices)
