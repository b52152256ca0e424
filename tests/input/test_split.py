"""split_batch: contiguous, balanced parts of a global batch."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioreplica as ar
from aioreplica.input import num_examples, split_batch, split_sizes


@pytest.mark.parametrize(
    ("num_examples", "num_replicas", "sizes"),
    [
        (0, 3, (0, 0, 0)),
        (1, 3, (1, 0, 0)),
        (6, 4, (2, 2, 1, 1)),
        (8, 4, (2, 2, 2, 2)),
        (5, 1, (5,)),
    ],
)
def test_earlier_replicas_get_the_remainder(
    num_examples: Any, num_replicas: Any, sizes: Any
) -> None:
    assert split_sizes(num_examples, num_replicas) == sizes


@given(st.integers(0, 100), st.integers(1, 16))
def test_sizes_are_balanced_and_add_up(num_examples: int, num_replicas: int) -> None:
    sizes = split_sizes(num_examples, num_replicas)

    assert sum(sizes) == num_examples
    assert len(sizes) == num_replicas
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)


@given(st.integers(0, 20), st.integers(1, 6))
def test_joining_the_parts_gives_the_batch(num_examples: int, num_replicas: int) -> None:
    x, y = np.arange(2 * num_examples).reshape(num_examples, 2), np.ones(num_examples)
    batch = {"x": x, "y": [y]}

    parts = split_batch(batch, num_replicas)

    assert len(parts) == num_replicas
    np.testing.assert_array_equal(np.concatenate([part["x"] for part in parts]), x)
    np.testing.assert_array_equal(np.concatenate([part["y"][0] for part in parts]), y)


def test_parts_are_views() -> None:
    batch = np.arange(4)

    assert all(np.shares_memory(part, batch) for part in split_batch(batch, 2))


def test_lists_of_numbers_are_leaves_of_their_own() -> None:
    with pytest.raises(ValueError, match="leading axis"):
        split_batch([1, 2, 3], 2)


def test_the_weight_of_a_batch_counts_its_examples() -> None:
    whole = {"x": np.ones((5, 2)), "y": np.ones(5)}
    parts = split_batch(whole, 3)
    distributed = {name: ar.PerReplica([part[name] for part in parts]) for name in whole}

    assert num_examples(whole) == num_examples(distributed) == 5
    assert [num_examples(part) for part in parts] == [2, 2, 1]
    with pytest.raises(ValueError, match="one row per example"):
        num_examples(3.0)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (np.float64(1.0), r"value: \(\)"),
        ((np.ones(2), np.ones(3)), r"\[0\]: \(2,\), \[1\]: \(3,\)"),
        ((), "no leaf"),
    ],
)
def test_leaves_need_one_common_leading_axis(batch: Any, text: Any) -> None:
    with pytest.raises(ValueError, match=text):
        split_batch(batch, 2)
