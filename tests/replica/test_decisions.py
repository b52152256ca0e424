"""broadcast, barrier, any, all and agree."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import MergeMismatchError

pytestmark = pytest.mark.usefixtures("no_task_left")


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def my_id() -> int:
    return me().replica_id_in_sync_group


@pytest.mark.asyncio
async def test_broadcast_gives_everybody_the_value_of_the_source(strategy: ar.Strategy) -> None:
    last = strategy.num_replicas_in_sync - 1

    async def step() -> list[Any]:
        return [
            await me().broadcast({"x": my_id()}),
            await me().broadcast([np.full(2, my_id())], source=last),
            await me().broadcast("s" * my_id(), last),
        ]

    for result in strategy.local_results(await strategy.run(step)):
        assert result[0] == {"x": 0}
        assert result[1][0].tolist() == [last, last]
        assert result[2] == "s" * last


@pytest.mark.asyncio
async def test_values_of_other_replicas_than_the_source_are_ignored(
    gang: ar.MirroredStrategy,
) -> None:
    async def step() -> Any:
        return await me().broadcast(np.ones(3) if my_id() == 1 else None, source=1)

    assert [r.tolist() for r in gang.local_results(await gang.run(step))] == (
        [[1.0] * 3] * gang.num_replicas_in_sync
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("source", [-1, 9])
async def test_the_source_must_exist(strategy: ar.Strategy, source: int) -> None:
    async def step() -> None:
        with pytest.raises(ValueError, match=f"source={source}"):
            me().broadcast(1, source)

    await strategy.run(step)


@pytest.mark.asyncio
async def test_different_sources_are_a_mismatch(gang: ar.MirroredStrategy) -> None:
    async def step() -> None:
        await me().broadcast(1, source=int(my_id() == 1))

    with pytest.raises(MergeMismatchError, match="sources 0 and 1 differ"):
        await gang.run(step)


@pytest.mark.asyncio
async def test_a_barrier_lets_nobody_through_before_the_last(gang: ar.MirroredStrategy) -> None:
    arrived: list[int] = []

    async def step() -> None:
        for _ in range(3):
            arrived.append(my_id())
            assert await me().barrier() is None
            assert len(arrived) % me().num_replicas_in_sync == 0
            await me().barrier()

    await gang.run(step)


@pytest.mark.asyncio
@pytest.mark.parametrize("position", [None, 0, 1])
async def test_any_and_all(gang: ar.MirroredStrategy, position: int | None) -> None:
    async def step() -> list[object]:
        true = my_id() == position
        return [
            await me().any(true),
            await me().all(true),
            await me().all(not true),
            await me().any(np.bool_(true)),
            await me().all([1] if true else []),
        ]

    found = position is not None
    for result in gang.local_results(await gang.run(step)):
        assert result == [found, False, not found, found, False]
        assert {type(flag) for flag in result} == {bool}


@pytest.mark.asyncio
@pytest.mark.parametrize("position", [None, 0, 1])
@pytest.mark.parametrize("is_blocking", [False, True])
async def test_flags_in_distributed_values_are_those_of_the_replica(
    gang: ar.MirroredStrategy, position: int | None, is_blocking: bool
) -> None:
    true = [i == position for i in range(gang.num_replicas_in_sync)]
    flags = ar.PerReplica(true)

    async def step() -> tuple[bool, bool]:
        return await me().any(flags), await me().all(flags)

    def plain() -> tuple[bool, bool]:
        return me().blocking.any(flags), me().blocking.all(flags)

    for result in gang.local_results(await gang.run(plain if is_blocking else step)):
        assert result == (any(true), all(true))


@pytest.mark.asyncio
async def test_one_replica_decides_alone(solo: ar.OneDeviceStrategy) -> None:
    async def step() -> None:
        for flag in (True, False):
            assert await me().any(flag) is flag
            assert await me().all(flag) is flag
        assert await me().agree("x") == "x"
        await me().barrier()

    await solo.run(step)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "value",
    [3, "s", None, float("nan"), (1, {"a": [2.5]}), np.arange(3), np.array([np.nan, 1.0])],
    ids=["int", "str", "none", "nan", "tree", "array", "array with nan"],
)
async def test_agree_returns_equal_values(gang: ar.MirroredStrategy, value: object) -> None:
    async def step() -> None:
        own = np.array(value) if isinstance(value, np.ndarray) else value
        np.testing.assert_equal(await me().agree(own), value)

    await gang.run(step)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (1, 2),
        (1, 1.0),
        ("a", "b"),
        (None, 0),
        ([1], (1,)),
        ({"a": 1}, {"b": 1}),
        (np.arange(3), np.arange(4)),
        (np.arange(3), np.array([0, 1, 3])),
        (np.ones(1, "f4"), np.ones(1, "f8")),
        (float("nan"), 0.0),
    ],
    ids=str,
)
async def test_different_values_are_a_mismatch_that_shows_both(
    gang: ar.MirroredStrategy, ours: object, theirs: object
) -> None:
    async def step() -> None:
        await me().agree(theirs if my_id() == 1 else ours)

    with pytest.raises(MergeMismatchError) as caught:
        await gang.run(step)

    assert f"values {ours!r} and {theirs!r} differ" in str(caught.value)
    assert "agree #1" in caught.value.rows[0].collective


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["PerReplica", "variable"])
async def test_agree_reads_distributed_values_where_the_replica_runs(
    gang: ar.MirroredStrategy, kind: str
) -> None:
    async def create() -> ar.Variable:
        own = await me().variable(np.zeros(3, "i8"), synchronization="on_read", aggregation="sum")
        await own.assign(np.full(3, my_id()))
        return own

    size = gang.num_replicas_in_sync
    value: Any = await gang.run(create) if kind == "variable" else None
    if value is None:
        value = ar.PerReplica([np.full(3, i) for i in range(size)])

    async def step() -> None:
        await me().agree(value)

    with pytest.raises(MergeMismatchError, match=r"values array\(\[0, 0, 0\]\) and array"):
        await gang.run(step)


@pytest.mark.asyncio
async def test_agree_gives_the_value_of_a_mirrored_variable(gang: ar.MirroredStrategy) -> None:
    with gang.scope():
        weights = ar.Variable(np.arange(3.0))

    async def step() -> Any:
        return await me().agree({"w": weights})

    for result in gang.local_results(await gang.run(step)):
        assert isinstance(result["w"], np.ndarray)
        assert result["w"].tolist() == [0, 1, 2]
