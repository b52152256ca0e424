"""GroupView: combining the values of some of the replicas."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import aioreplica as ar
from aioreplica.errors import ContextError
from aioreplica.strategies import GroupView
from tests.conftest import mirrored

MEMBERS = (1, 3)


@pytest_asyncio.fixture
async def quad() -> AsyncIterator[ar.MirroredStrategy]:
    async with mirrored(4) as strategy:
        yield strategy


@pytest.fixture
def view(quad: ar.MirroredStrategy) -> GroupView:
    made = quad._runtime.view_of(MEMBERS)
    assert isinstance(made, GroupView)
    return made


@pytest.mark.asyncio
async def test_the_view_of_all_is_the_strategy(quad: ar.MirroredStrategy) -> None:
    assert quad._runtime.view_of(range(4)) is quad


@pytest.mark.asyncio
async def test_the_repr_names_the_members(quad: ar.MirroredStrategy, view: GroupView) -> None:
    assert view.num_replicas_in_sync == 2
    assert view.members == MEMBERS
    assert view.device_names == ("cpu:1", "cpu:3")
    assert view.strategy is quad
    assert repr(view).startswith("<GroupView (1, 3) of <MirroredStrategy cpu:0, cpu:1")


@pytest.mark.asyncio
async def test_values_have_one_entry_per_member(view: GroupView) -> None:
    value = {"a": ar.PerReplica([np.array([1.0]), np.array([2.0, 3.0])]), "b": 5}
    pair = ar.PerReplica([2, 5])

    assert view.local_results(value)[1]["b"] == 5
    assert view.local_results(pair) == (2, 5)
    assert await view.reduce("sum", pair) == 7
    assert await view.reduce("mean", value["a"], axis=0) == 2.0
    assert (await view.gather(value["a"], axis=0)).tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="got 4 values, but the strategy has 2 replicas"):
        await view.reduce("sum", ar.PerReplica([1, 2, 3, 4]))


@pytest.mark.asyncio
async def test_of_a_variable_the_members_components_are_taken(
    quad: ar.MirroredStrategy, view: GroupView
) -> None:
    with quad.scope():
        counts = ar.Variable(0.0, synchronization="on_read", aggregation="sum")
    counts.store.write({counts: tuple(np.array(10.0**i) for i in range(4))})

    assert view.local_results([counts]) == ([10.0], [1000.0])
    assert await view.reduce("sum", counts) == 1010.0
    assert await quad.reduce("sum", counts) == 1111.0


@pytest.mark.asyncio
async def test_extended_reduces_the_groups_values_and_updates_whole_variables(
    quad: ar.MirroredStrategy, view: GroupView
) -> None:
    with quad.scope():
        weight = ar.Variable(0.0)
    pair = ar.PerReplica([2.0, 3.0])

    on_all = await view.extended.reduce_to("sum", pair, weight)
    on_members = await view.extended.reduce_to("sum", pair, pair)
    await view.extended.update(weight, lambda v, x: v.assign(x), args=(on_all,))

    assert on_all.values == (5.0,) * 4
    assert on_members.values == (5.0,) * 2
    assert weight.components == (5.0,) * 4


@pytest.mark.asyncio
async def test_members_name_their_residuals_when_compressed() -> None:
    kept = ar.collectives.TopK(0.5)
    strategy = ar.MirroredStrategy(
        ["cpu:0", "cpu:1"], options=ar.CommunicationOptions(compression=kept)
    )

    async def reduce_one(member: int) -> Any:
        return await strategy._runtime.view_of([member]).reduce(
            "sum", ar.PerReplica([np.array([3.0, 2.0])])
        )

    assert (await reduce_one(1)).tolist() == [3.0, 0.0]
    assert (await reduce_one(0)).tolist() == [3.0, 0.0]  # without replica 1's residual
    assert (await reduce_one(1)).tolist() == [0.0, 4.0]
    await strategy.aclose()


@pytest.mark.asyncio
async def test_inside_a_replica_it_names_the_collective_of_the_group(
    quad: ar.MirroredStrategy, view: GroupView
) -> None:
    async def step() -> None:
        await view.reduce("sum", ar.PerReplica([1, 2]))

    with pytest.raises(ContextError, match=r"Use ctx\.group\(members\)\.all_reduce"):
        await quad.run(step)
