"""split_per_replica and read_at: one replica's part of a pytree."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioreplica as ar
from aioreplica.context import PLACE, Place
from aioreplica.values import read_at, regroup_results, split_per_replica

leaves = st.none() | st.integers() | st.text(max_size=2) | st.floats(allow_nan=False)
distributed = st.builds(
    lambda kind, parts: kind(parts),
    st.sampled_from([ar.PerReplica, ar.Mirrored]),
    st.lists(leaves, min_size=3, max_size=3),
)


def trees(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        of,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        ),
        max_leaves=8,
    )


def naive_part(tree: Any, index: int) -> Any:
    if isinstance(tree, ar.DistributedValues):
        return tree.values[index]
    if isinstance(tree, dict):
        return {key: naive_part(value, index) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(naive_part(value, index) for value in tree)
    return tree


@given(trees(leaves | distributed))
def test_every_replica_gets_its_components(tree: Any) -> None:
    assert split_per_replica(tree, 3, "args") == [naive_part(tree, i) for i in range(3)]


@given(trees(leaves))
def test_trees_without_distributed_values_are_shared(tree: Any) -> None:
    assert all(part is tree for part in split_per_replica(tree, 4, "args"))


@given(trees(distributed.filter(lambda value: any(part is not None for part in value))))
def test_regrouping_undoes_a_split(tree: Any) -> None:
    regrouped = regroup_results(split_per_replica(tree, 3, "args"))

    assert split_per_replica(regrouped, 3, "args") == split_per_replica(tree, 3, "args")


@pytest.mark.parametrize("tree", [(), {}, [], None, 3, "text", np.zeros(2)])
def test_small_trees(tree: Any) -> None:
    parts = split_per_replica(tree, 2, "args")

    assert len(parts) == 2
    assert all(part is tree for part in parts)


def test_components_are_not_looked_into() -> None:
    inner = ar.PerReplica([1, 2, 3])

    assert split_per_replica(ar.PerReplica([inner, "b"]), 2, "args") == [inner, "b"]


def test_registered_nodes_are_opened() -> None:
    value = ar.Weighted(ar.PerReplica([1.0, 2.0]), ar.Mirrored([4, 4]))

    assert split_per_replica(value, 2, "args") == [ar.Weighted(1.0, 4), ar.Weighted(2.0, 4)]


def test_the_wrong_number_of_components_is_a_value_error() -> None:
    tree = {"x": ar.PerReplica([1, 2]), "y": [ar.Mirrored([1, 1, 1])]}

    with pytest.raises(ValueError, match=r"Mirrored in kwargs has 3 values.*2 replicas"):
        split_per_replica(tree, 2, "kwargs")


async def read_in_step(strategy: ar.Strategy, value: Any) -> list[Any]:
    """Read a value in every replica, as a collective does at the call."""

    async def step() -> Any:
        return [read_at(value, PLACE.get(), "all_reduce")]

    results = await strategy.run(step)
    return [strategy.local_results(results)[i][0] for i in range(strategy.num_replicas_in_sync)]


@pytest.mark.asyncio
async def test_every_kind_is_read_in_its_own_replica(gang: ar.MirroredStrategy) -> None:
    count = gang.num_replicas_in_sync
    with gang.scope():
        on_read = ar.Variable(0.0, synchronization="on_read", aggregation="sum")
        mirrored = ar.Variable([1.0, 2.0])
    plain = ar.Variable(7.0)

    async def write() -> None:
        await on_read.assign(float(my_id() + 1))

    await gang.run(write)
    rows = [ar.IndexedSlices([float(i)], [i], (count,)) for i in range(count)]
    tree = {
        "on_read": on_read,
        "mirrored": (mirrored, [plain]),
        "per_replica": ar.PerReplica(range(count)),
        "same": ar.Mirrored(["x"] * count),
        "rows": ar.PerReplica(rows),
        "weighted": ar.Weighted(ar.PerReplica(range(count)), 2),
        "nested": ar.PerReplica([{"v": on_read}] * count),
        "leaf": 3,
    }

    for i, read in enumerate(await read_in_step(gang, tree)):
        assert read["on_read"] == read["nested"]["v"] == i + 1
        assert read["mirrored"][0] is mirrored.components[i]
        assert read["mirrored"][1][0] is plain.components[0]
        assert (read["per_replica"], read["same"], read["leaf"]) == (i, "x", 3)
        assert read["rows"] is rows[i]
        assert (read["weighted"].total, read["weighted"].weight) == (i, 2)


@pytest.mark.parametrize(
    "value",
    [1.5, np.ones(3), [1, 2], (), {"a": np.ones(2)}, [{"a": (1, None)}, object()],
     ar.IndexedSlices([1.0], [0], (2,))],
    ids=["number", "array", "list", "empty", "dict", "tree", "slices"],
)  # fmt: skip
def test_a_plain_value_is_returned_as_it_is(value: Any) -> None:
    assert read_at(value, PLACE.get(), "all_reduce") is value


@pytest.mark.parametrize("value", [ar.PerReplica([1, 2, 3]), [ar.Mirrored([1, 2, 3])]])
def test_reading_needs_one_value_per_replica(value: Any) -> None:
    with pytest.raises(ValueError, match=r"all_gather got a \w+ of 3 values, but there are 2"):
        read_at(value, Place(ar.MirroredStrategy(["cpu:0", "cpu:1"])), "all_gather")


def test_a_place_is_read_from_any_thread() -> None:
    strategy = ar.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        total = ar.Variable(0.0, synchronization="on_read", aggregation="sum")
    total.store.write({total: (np.array(1.0), np.array(2.0))})
    read: list[Any] = []

    def look(place: Place) -> None:
        read.append(read_at(total, place, "all_reduce"))

    async def step() -> None:
        thread = threading.Thread(target=look, args=(PLACE.get(),))
        thread.start()
        thread.join()

    async def main() -> None:
        async with strategy:
            await strategy.run(step)

    asyncio.run(main())

    assert read == [1.0, 2.0]


def my_id() -> int:
    context = ar.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group
