"""Partitioners, and what becomes of their results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.strategies.parameter_server._partition import cut_rows

FLOAT = np.dtype("float32")


@pytest.mark.parametrize(
    ("partitioner", "parts"),
    [
        (ar.FixedShardsPartitioner(2), 2),
        (ar.FixedShardsPartitioner(99), 6),
        (ar.MinSizePartitioner(4, max_shards=2), 2),
        (ar.MinSizePartitioner(4, max_shards=10), 6),
        (ar.MinSizePartitioner(12, max_shards=10), 2),
        (ar.MinSizePartitioner(13, max_shards=10), 1),
        (ar.MinSizePartitioner(), 1),
        (ar.MaxSizePartitioner(4), 6),
        (ar.MaxSizePartitioner(4, max_shards=2), 2),
        (ar.MaxSizePartitioner(9), 3),
        (ar.MaxSizePartitioner(1024), 1),
        (ar.MaxSizePartitioner(1), 6),
    ],
)
def test_sizes(partitioner: Any, parts: int) -> None:
    assert partitioner((6, 1), "float32") == [parts, 1]


def test_earlier_shards_get_the_remainder() -> None:
    cuts = cut_rows(ar.FixedShardsPartitioner(3), "w", (8, 2), FLOAT)
    assert cuts == [(0, 3), (3, 6), (6, 8)]
    assert cut_rows(ar.FixedShardsPartitioner(3), "w", (0, 2), FLOAT) == [(0, 0)]
    assert cut_rows(ar.FixedShardsPartitioner(3), "w", (), FLOAT) == [(0, 1)]


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        ([1, 2], ValueError, "Only the first axis"),
        ([0, 1], ValueError, "into 0 shards"),
        ([9, 1], ValueError, "into 9 shards"),
        ([2], ValueError, "Only the first axis"),
        (2, TypeError, "must return a list"),
    ],
)
def test_invalid_partitions_are_refused(result: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        cut_rows(lambda shape, dtype: result, "w", (4, 2), FLOAT)


@pytest.mark.parametrize(
    "make", [ar.FixedShardsPartitioner, ar.MinSizePartitioner, ar.MaxSizePartitioner]
)
def test_no_shards_at_all(make: Any) -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        make(0)
    with pytest.raises(TypeError, match="must be an int"):
        make(1.5)
