"""distributed_apply: the cross-replica form, in merge functions and outside the replicas."""

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError
from aioreplica.optimizers import SGD
from tests.optimizers.rules import made


def sgd_in(strategy: ar.Strategy) -> tuple[ar.Variable, SGD]:
    with strategy.scope():
        return ar.Variable([0.0, 0.0], name="w"), SGD(1.0)


@pytest.mark.asyncio
async def test_a_merge_function_can_apply_its_gradients(gang: ar.MirroredStrategy) -> None:
    w, sgd = sgd_in(gang)

    async def merge(_strategy: Any, gradient: Any, weight: Any) -> None:
        await sgd.distributed_apply([(ar.Weighted(gradient, weight), w)])

    async def step() -> Any:
        ctx = ar.get_replica_context()
        me = ctx.replica_id_in_sync_group
        await ctx.merge_call(merge, args=(np.array([me, 1.0]), 2))
        return w.value

    values = await gang.run(step)

    n = gang.num_replicas_in_sync
    for value in values:
        np.testing.assert_allclose(value, [-(n - 1) / 4, -0.5])


@pytest.mark.asyncio
@pytest.mark.parametrize("is_in_scope", [True, False])
async def test_gradients_of_a_run_can_be_applied_outside(
    pair: ar.MirroredStrategy, is_in_scope: bool
) -> None:
    w, sgd = sgd_in(pair)
    global_step = made(pair, 0, "global_step")

    async def step() -> Any:
        return np.ones(2) * (1 + ar.get_replica_context().replica_id_in_sync_group)

    gradient = await pair.run(step)
    if is_in_scope:
        with pair.scope():
            await sgd.distributed_apply([(gradient, w)], global_step)
    else:
        await sgd.distributed_apply([(gradient, w)], global_step)

    assert (w.value.tolist(), global_step.value) == ([-3.0, -3.0], 1)


@pytest.mark.asyncio
async def test_a_single_value_counts_as_the_sum(pair: ar.MirroredStrategy) -> None:
    w, sgd = sgd_in(pair)
    b = made(pair, 0.0, "b")
    parts = ar.PerReplica([np.ones(2), np.ones(2)])

    await sgd.distributed_apply([(parts, w), (ar.Mirrored([5.0, 5.0]), b)])
    await sgd.distributed_apply([(np.ones(2), w), (5.0, b)])

    assert (w.value.tolist(), b.value) == ([-3.0, -3.0], -10.0)


@pytest.mark.asyncio
async def test_plain_variables_are_their_own_strategy() -> None:
    w = ar.Variable(0.0)

    await SGD(1.0).distributed_apply([(2.0, w)])

    assert w.value == -2.0


@pytest.mark.asyncio
async def test_in_a_replica_the_error_names_apply_gradients(pair: ar.MirroredStrategy) -> None:
    w, sgd = sgd_in(pair)

    async def step() -> None:
        await sgd.distributed_apply([(np.ones(2), w)])

    with pytest.raises(ContextError, match=r"await optimizer\.apply_gradients"):
        await pair.run(step)


@pytest.mark.asyncio
async def test_variables_of_two_strategies_are_refused(
    pair: ar.MirroredStrategy, solo: ar.OneDeviceStrategy
) -> None:
    w, sgd = sgd_in(pair)
    theirs = made(solo, [0.0, 0.0], "theirs")

    with pytest.raises(ContextError, match="'theirs'"):
        await sgd.distributed_apply([(np.ones(2), w), (np.ones(2), theirs)])
    with solo.scope(), pytest.raises(ContextError, match="'w'"):
        await sgd.distributed_apply([(np.ones(2), w)])
    assert w.version == 0
