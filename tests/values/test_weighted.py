"""Weighted: a total and the weight behind it."""

import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import optree
import pytest

import aioreplica as ar
from aioreplica.tree import map_leaves


def test_the_mean_is_total_over_weight() -> None:
    assert ar.Weighted(6.0, 3).mean() == 2.0
    assert ar.Weighted(np.array([3.0, 6.0]), 3).mean().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("weight", [0, 0.0])
def test_the_mean_over_nothing_is_a_value_error(weight: float) -> None:
    with pytest.raises(ValueError, match="weight 0"):
        ar.Weighted(0.0, weight).mean()


def test_it_is_a_pytree_node_for_users_and_inside() -> None:
    value = ar.Weighted(6.0, 3)

    assert optree.tree_leaves(value, namespace="aioreplica") == [6.0, 3]
    assert map_leaves(lambda leaf: leaf * 2, value) == ar.Weighted(12.0, 6)


def test_it_is_an_immutable_value() -> None:
    value = ar.Weighted(6.0, 3)

    with pytest.raises(FrozenInstanceError):
        value.total = 7.0  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(value)) == value
    assert repr(value) == "Weighted(total=6.0, weight=3)"


@pytest.mark.asyncio
async def test_unequal_parts_are_weighted_exactly(triple: ar.MirroredStrategy) -> None:
    parts = [np.arange(5.0), np.array([10.0]), np.array([])]

    async def step(part: np.ndarray) -> float:
        local = ar.Weighted(float(part.sum()), part.size)
        return (await ar.get_replica_context().all_reduce("sum", local)).mean()

    results = await triple.run(step, args=(ar.PerReplica(parts),))

    assert results.values == (np.concatenate(parts).mean(),) * 3


TOTALS = {
    "number": (float("nan"), 6.0),
    "array": (np.array([np.nan, np.inf]), np.array([6.0, 6.0])),
    "rows": (ar.IndexedSlices([np.nan], [0], (1,)), ar.IndexedSlices([6.0], [0], (1,))),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", TOTALS)
@pytest.mark.parametrize("is_nested", [False, True])
async def test_a_total_of_weight_zero_contributes_nothing_to_a_reduction(
    pair: ar.MirroredStrategy, kind: str, is_nested: bool
) -> None:
    parts = ar.PerReplica(TOTALS[kind])

    async def step(total: object, weight: int) -> object:
        ctx = ar.get_replica_context()
        assert ctx is not None
        value = ar.Weighted(total, weight)
        found = await ctx.all_reduce("sum", {"loss": [value]} if is_nested else value)
        one = found["loss"][0] if is_nested else found
        plain = await ctx.run_on_device(lambda: ctx.blocking.all_reduce("sum", value))
        assert values_of(plain) == values_of(one)
        return values_of(one), value

    (values, weights), returned = await pair.run(step, args=(parts, ar.PerReplica([0, 3])))
    outside = await pair.reduce("sum", {"loss": returned} if is_nested else returned)
    one = outside["loss"] if is_nested else outside
    whole = await pair.reduce(
        "sum", ar.PerReplica([ar.Weighted(*p) for p in zip(parts, (0, 3), strict=True)])
    )

    for found, weight in ((values[0], weights[0]), values_of(one), values_of(whole)):
        assert (set(found), weight) == ({6.0}, 3)


def values_of(value: ar.Weighted) -> tuple[tuple[float, ...], int]:
    total = value.total.to_dense() if isinstance(value.total, ar.IndexedSlices) else value.total
    return tuple(np.ravel(total).tolist()), value.weight
