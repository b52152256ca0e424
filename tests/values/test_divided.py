"""Divisions cover an array without gaps, and a divided variable knows for whom it was divided."""

from itertools import pairwise

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from aioreplica.values import DividedVariable, VariableOptions, default_store, divided
from aioreplica.values._division import Division


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (8,), (9, 4), (33, 3)])
def test_ranges_cover_everything_in_units(shape: tuple[int, ...], num_workers: int) -> None:
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    made = [divided("w", shape, rank, num_workers, 4) for rank in range(num_workers)]

    ranges = made[0].ranges
    assert all(each.ranges == ranges for each in made)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == whole.size
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert all(begin % 4 == 0 or begin == whole.size for begin, _ in ranges)
    counts = [-(-(end - begin) // 4) for begin, end in ranges]
    assert max(counts) - min(counts) <= 1
    joined = np.concatenate([each.part_of(whole) for each in made])
    assert joined.tobytes() == whole.tobytes()


def test_names_decide_who_has_more() -> None:
    owners = {
        [end > begin for begin, end in divided(f"bias_{i}", (5,), 0, 4, 8).ranges].index(True)
        for i in range(64)
    }

    assert owners == {0, 1, 2, 3}


def test_it_knows_how_many_workers_it_was_divided_among() -> None:
    options = VariableOptions(
        "w/m", trainable=False, aggregation=ar.VariableAggregation.NONE,
        division=Division((4,), ((0, 2), (2, 4)), 1, 1, 0),
    )  # fmt: skip
    slot = DividedVariable(np.array([3.0, 4.0]), options, 1, default_store())

    slot.require_current(2)
    assert slot.shape == (4,)
    assert slot.local.tolist() == [3.0, 4.0]
    with pytest.raises(ContextError, match="divided among 2 workers, and now there are 3"):
        slot.require_current(3)
    with pytest.raises(ContextError, match="cannot be read without waiting"):
        np.asarray(slot)
