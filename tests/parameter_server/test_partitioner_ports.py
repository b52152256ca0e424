"""What TensorFlow tests of partitioners in sharded_variable_test, asked of these."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aioreplica import FixedShardsPartitioner, MaxSizePartitioner, MinSizePartitioner


@pytest.mark.parametrize(
    ("partitioner", "shape", "expected"),
    [
        (FixedShardsPartitioner(2), (10, 3), [2, 1]),
        (FixedShardsPartitioner(20), (10, 3), [10, 1]),
        (MinSizePartitioner(min_shard_bytes=4, max_shards=2), (6, 1), [2, 1]),
        (MinSizePartitioner(min_shard_bytes=4, max_shards=10), (6, 1), [6, 1]),
        (MinSizePartitioner(min_shard_bytes=12, max_shards=10), (6, 1), [2, 1]),
        (MinSizePartitioner(min_shard_bytes=1024, max_shards=10), (6, 1), [1, 1]),
        (MinSizePartitioner(), (6, 1), [1, 1]),
        (MaxSizePartitioner(max_shard_bytes=4), (6, 1), [6, 1]),
        (MaxSizePartitioner(max_shard_bytes=4, max_shards=2), (6, 1), [2, 1]),
        (MaxSizePartitioner(max_shard_bytes=1024), (6, 1), [1, 1]),
        (MaxSizePartitioner(max_shard_bytes=12), (6, 1), [2, 1]),
        (MaxSizePartitioner(max_shard_bytes=1), (6, 8), [6, 1]),
    ],
    ids=str,
)
def test_partitioners(partitioner: Any, shape: tuple[int, ...], expected: list[int]) -> None:
    assert list(partitioner(shape, np.dtype(np.float32))) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: FixedShardsPartitioner(0),
        lambda: FixedShardsPartitioner(-1),
        lambda: MinSizePartitioner(min_shard_bytes=0),
        lambda: MinSizePartitioner(max_shards=0),
        lambda: MaxSizePartitioner(max_shard_bytes=0),
        lambda: MaxSizePartitioner(max_shard_bytes=4, max_shards=0),
    ],
)
def test_partitioners_with_nothing_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"at least 1|-1|0"):
        make()
