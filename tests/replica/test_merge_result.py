"""merge_call: its result handed out in parts, its error raised in every replica."""

from collections.abc import Callable
from contextvars import ContextVar
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from tests.sequencer import Sequencer

pytestmark = pytest.mark.usefixtures("no_task_left")

WHO: ContextVar[int] = ContextVar("who")


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def my_id() -> int:
    return me().replica_id_in_sync_group


# ---- the result -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_each_replica_gets_its_part(gang: ar.MirroredStrategy) -> None:
    count = gang.num_replicas_in_sync
    shared = np.ones(3)

    async def step() -> None:
        result = await me().merge_call(
            lambda _s: {
                "mine": ar.PerReplica(range(count)),
                "same": ar.Mirrored(["m"] * count),
                "deep": [(ar.PerReplica([[i, i] for i in range(count)]), shared), "plain", None],
            }
        )
        assert result == {
            "mine": my_id(), "same": "m", "deep": [([my_id()] * 2, shared), "plain", None],
        }  # fmt: skip
        assert result["deep"][0][1] is shared
        assert await me().merge_call(lambda _s: ar.PerReplica(range(count))) == my_id()
        assert await me().merge_call(lambda _s: ar.Mirrored([5] * count)) == 5
        assert await me().merge_call(lambda _s: "plain") == "plain"
        assert await me().merge_call(lambda _s: None) is None

    await gang.run(step)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [ar.PerReplica, ar.Mirrored])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"deep": x}], ids=["bare", "nested"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_a_result_of_the_wrong_length_is_an_error(
    gang: ar.MirroredStrategy, kind: type, wrap: Callable[[Any], Any], asynchronous: bool
) -> None:
    async def merge_later(_strategy: ar.Strategy) -> Any:
        return wrap(kind([1, 2, 3]))

    async def step() -> None:
        merge = merge_later if asynchronous else lambda _s: wrap(kind([1, 2, 3]))
        with pytest.raises(ValueError, match=r"has 3 values, but there are \d replicas"):
            await me().merge_call(merge)
        await me().barrier()

    await gang.run(step)


@pytest.mark.asyncio
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_an_error_of_the_merge_is_raised_in_every_replica(
    strategy: ar.Strategy, asynchronous: bool
) -> None:
    error = ValueError("merge")

    def fail(_strategy: ar.Strategy) -> None:
        raise error

    async def fail_later(_strategy: ar.Strategy) -> None:
        await ar.run_on_host(int)
        raise error

    async def step(*, catch: bool) -> None:
        call = me().merge_call(fail_later if asynchronous else fail)
        if not catch:
            await call
        with pytest.raises(ValueError, match="merge") as caught:
            await call
        assert caught.value is error
        assert await me().all_reduce("sum", 1) == me().num_replicas_in_sync

    await strategy.run(step, kwargs={"catch": True})
    with pytest.raises(ValueError, match="merge") as caught:
        await strategy.run(step, kwargs={"catch": False})

    assert caught.value is error
    notes = "\n".join(error.__notes__)
    assert "merge_call #1" in notes
    assert __file__ in notes
    assert "step 1" in notes


@pytest.mark.asyncio
@pytest.mark.parametrize("order", list(permutations(range(3))))
async def test_the_result_does_not_depend_on_arrival(
    triple: ar.MirroredStrategy, order: tuple[int, ...]
) -> None:
    sequencer = Sequencer(order)
    arrived: list[int] = []

    def merge(_strategy: ar.Strategy, ids: Any) -> Any:
        return ids.values, WHO.get(), ar.PerReplica(["a", "b", "c"])

    async def step() -> Any:
        WHO.set(my_id())
        await sequencer.turn(my_id())
        arrived.append(my_id())
        return [await me().merge_call(merge, (my_id(),))]

    results = triple.local_results(await triple.run(step))

    assert arrived == list(order)
    assert results == tuple([((0, 1, 2), 0, letter)] for letter in "abc")
