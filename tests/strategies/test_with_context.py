import asyncio
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError


@ar.with_context
async def step(ctx: ar.ReplicaContext, x: float, *, factor: float = 1.0) -> tuple[int, float]:
    return ctx.replica_id_in_sync_group, await ctx.all_reduce("sum", x * factor)


@ar.with_context
def plain_step(ctx: ar.ReplicaContext, x: float) -> tuple[int, float]:
    return ctx.replica_id_in_sync_group, ctx.blocking.all_reduce("sum", x)


def run(fn: Any, *args: Any, **kwargs: Any) -> Any:
    async def main() -> Any:
        async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
            return await strategy.run(fn, args, kwargs)

    return asyncio.run(main())


def test_an_async_step_gets_the_context_of_its_replica_first() -> None:
    replica, total = run(step, 1.0, factor=2.0)

    assert replica.values == (0, 1)
    assert total.values == (4.0, 4.0)


def test_a_plain_step_gets_the_context_of_its_replica_first() -> None:
    replica, total = run(plain_step, 1.0)

    assert replica.values == (0, 1)
    assert total.values == (2.0, 2.0)


def test_under_the_default_strategy_the_one_replica_has_a_context() -> None:
    assert asyncio.run(ar.DefaultStrategy().run(step, args=(3.0,))) == (0, 3.0)


def test_the_decorated_function_keeps_its_name_and_kind() -> None:
    assert step.__name__ == "step"
    assert asyncio.iscoroutinefunction(step)
    assert not asyncio.iscoroutinefunction(plain_step)


def test_a_call_outside_a_replica_says_to_use_run() -> None:
    with pytest.raises(ContextError, match=r"outside a replica, in no strategy's scope\. Pass it"):
        plain_step(1.0)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match="with_context marks a step function, got 3"):
        ar.with_context(3)  # type: ignore[arg-type]


def test_run_steps_refuses_a_marked_function() -> None:
    async def main() -> None:
        async with ar.MirroredStrategy(["cpu:0"]) as strategy:
            await strategy.run_steps(plain_step, [1.0], 1)

    with pytest.raises(TypeError, match=r"run_steps passes a context .* Leave out the decorator"):
        asyncio.run(main())


def test_an_online_learner_refuses_a_marked_function() -> None:
    async def main() -> None:
        async with ar.MirroredStrategy(["cpu:0"]) as strategy:
            with strategy.scope():
                w = ar.Variable(np.zeros(1))
            ar.online.OnlineLearner(strategy, step, [w], max_batch=1, max_delay_s=0.0, queue_size=1)

    with pytest.raises(TypeError, match=r"OnlineLearner passes a context .* Leave out"):
        asyncio.run(main())
