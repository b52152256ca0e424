"""ReplicaContext: who it is, and that it serves its own replica only."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.errors import ContextError

pytestmark = pytest.mark.usefixtures("no_task_left")

CALLS: dict[str, Callable[[ar.ReplicaContext], Any]] = {
    "merge_call": lambda ctx: ctx.merge_call(lambda _s: None),
    "all_reduce": lambda ctx: ctx.all_reduce("sum", 1),
    "all_gather": lambda ctx: ctx.all_gather(np.ones(1), 0),
    "broadcast": lambda ctx: ctx.broadcast(1),
    "barrier": lambda ctx: ctx.barrier(),
    "any": lambda ctx: ctx.any(True),
    "all": lambda ctx: ctx.all(True),
    "agree": lambda ctx: ctx.agree(1),
    "run_on_device": lambda ctx: ctx.run_on_device(int),
}


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def my_id() -> int:
    return me().replica_id_in_sync_group


async def refused(ctx: ar.ReplicaContext) -> list[str]:
    """Call everything; return the texts of the errors."""
    texts = []
    for call in CALLS.values():
        with pytest.raises(ContextError) as caught:
            await call(ctx)
        texts.append(str(caught.value))
    return texts


# ---- identity -----------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_it_knows_its_replica(strategy: ar.Strategy) -> None:
    async def step() -> tuple[object, ...]:
        ctx = me()
        assert me() is ctx
        assert ctx.devices == (() if ctx.device is None else (ctx.device,))
        return ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync, ctx.device, ctx.strategy

    count = strategy.num_replicas_in_sync
    results = strategy.local_results(await strategy.run(step))
    assert results == tuple(
        (i, count, strategy._runtime.replica_devices[i], strategy) for i in range(count)
    )


@pytest.mark.asyncio
async def test_its_repr_says_where_it_is(pair: ar.MirroredStrategy) -> None:
    async def step() -> ar.ReplicaContext:
        await me().barrier()
        assert repr(me()) == (
            f"<ReplicaContext {my_id()}/2 on cpu:{my_id()} | step 0, 1 collectives, open>"
        )
        return me()

    for ctx in pair.local_results(await pair.run(step)):
        assert "closed" in repr(ctx)


@pytest.mark.asyncio
async def test_current_device_is_the_replicas(gang: ar.MirroredStrategy) -> None:
    async def step() -> list[ar.Device]:
        return [ar.current_device(), await me().run_on_device(ar.current_device)]

    for replica_id, found in enumerate(gang.local_results(await gang.run(step))):
        assert found == [ar.Device(f"cpu:{replica_id}")] * 2


@pytest.mark.asyncio
async def test_outside_every_strategy_one_replica_meets_itself() -> None:
    ctx = me()

    assert (ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync, ctx.device) == (0, 1, None)
    assert await ctx.all_reduce("sum", 3) == 3
    assert await ctx.merge_call(lambda _s, x: x + 1, (1,)) == 2
    assert await ctx.run_on_device(pow, 2, 3) == 8
    assert ctx.strategy is ar.get_strategy()


# ---- misuse -------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_after_its_run(strategy: ar.Strategy) -> None:
    async def step() -> ar.ReplicaContext:
        return me()

    for ctx in strategy.local_results(await strategy.run(step)):
        for name, text in zip(CALLS, await refused(ctx), strict=True):
            assert name in text
            assert "after its run" in text


@pytest.mark.asyncio
async def test_after_a_failed_run(strategy: ar.Strategy) -> None:
    kept: list[ar.ReplicaContext] = []

    async def step() -> None:
        kept.append(me())
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await strategy.run(step)
    await refused(kept[0])


@pytest.mark.asyncio
async def test_by_another_replica(pair: ar.MirroredStrategy) -> None:
    contexts: list[ar.ReplicaContext] = []

    async def step() -> None:
        contexts.append(me())
        await me().barrier()
        [other] = [ctx for ctx in contexts if ctx is not me()]
        for name, text in zip(CALLS, await refused(other), strict=True):
            assert name in text
            assert "from a replica of" in text
        await me().barrier()

    await pair.run(step)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["rng", "shared_rng"])
async def test_random_streams_are_those_of_the_own_replica_and_run(
    pair: ar.MirroredStrategy, name: str
) -> None:
    contexts: list[ar.ReplicaContext] = []

    async def step() -> None:
        ctx = me()
        contexts.append(ctx)
        await ctx.barrier()
        for kept in contexts:
            if kept is not ctx:
                with pytest.raises(ContextError, match=f"{name} was called .* from a replica of"):
                    getattr(kept, name)("dropout")
        with pytest.raises(TypeError, match=r"needs a str as its name, got 3\."):
            getattr(ctx, name)(3)
        there = await ctx.run_on_device(lambda: getattr(ctx, name)("a"))
        assert there.random() == getattr(ctx, name)("a").random()
        await ctx.barrier()

    await pair.run(step)
    for ctx in contexts:
        with pytest.raises(ContextError, match=f"{name} was called .* after its run"):
            getattr(ctx, name)("dropout")


@pytest.mark.asyncio
async def test_random_streams_may_be_drawn_where_no_replica_is_current(
    pair: ar.MirroredStrategy,
) -> None:
    with pair.scope():
        w = ar.Variable(0.0)

    async def step() -> list[float]:
        ctx = me()
        v = await ctx.variable(lambda: ctx.shared_rng("a").random())
        await ctx.update(w, lambda v, x: v.assign(x + ctx.shared_rng("a").random()), (0.0,))
        merged = await ctx.merge_call(lambda _strategy: ctx.shared_rng("a").random())
        loop = asyncio.get_running_loop()
        drawn = await loop.run_in_executor(None, lambda: ctx.shared_rng("a").random())
        return [float(v.value), float(w.value), merged, drawn, ctx.shared_rng("a").random()]

    for found in pair.local_results(await pair.run(step)):
        assert len(set(found)) == 1


@pytest.mark.asyncio
async def test_plain_functions_and_code_outside_every_run_draw_random_numbers(
    pair: ar.MirroredStrategy,
) -> None:
    outside = me()

    def step() -> float:
        assert me().shared_rng("a").random() == me().shared_rng("a").random()
        with pytest.raises(ContextError, match="rng was called"):
            outside.rng("a")
        return float(me().rng("a").random())

    numbers = pair.local_results(await pair.run(step, options=ar.RunOptions(seed=0)))

    assert outside.rng("a").random() == numbers[0] != numbers[1]
    assert await outside.run_on_device(lambda: outside.shared_rng("a")) is not None


@pytest.mark.asyncio
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_in_a_merge_function(strategy: ar.Strategy, asynchronous: bool) -> None:
    async def step() -> None:
        ctx = me()

        async def merge_later(_strategy: ar.Strategy) -> None:
            for text in await refused(ctx):
                assert "a merge function" in text

        def merge(_strategy: ar.Strategy) -> None:
            with pytest.raises(ContextError, match=r"strategy\.reduce"):
                ctx.all_reduce("sum", 1)
            with pytest.raises(ContextError, match=r"strategy\.gather"):
                ctx.all_gather(np.ones(1), 0)

        await ctx.merge_call(merge_later if asynchronous else merge)

    await strategy.run(step)


@pytest.mark.asyncio
async def test_in_a_plain_step(strategy: ar.Strategy) -> None:
    def step() -> None:
        for name in ("barrier", "all_reduce", "merge_call"):
            with pytest.raises(ContextError, match="async def"):
                CALLS[name](me())

    await strategy.run(step)


@pytest.mark.asyncio
async def test_in_the_scope_that_runs_it(strategy: ar.Strategy) -> None:
    contexts: list[ar.ReplicaContext] = []
    ready = asyncio.Event()

    async def step() -> None:
        contexts.append(me())
        ready.set()
        await asyncio.Event().wait()

    task = asyncio.get_running_loop().create_task(strategy.run(step))
    await ready.wait()
    with strategy.scope():
        is_default = isinstance(strategy, ar.DefaultStrategy)  # whose scope changes nothing
        for text in await refused(contexts[0]):
            assert ("no strategy's scope" if is_default else "the scope of") in text
    for text in await refused(contexts[0]):
        assert "no strategy's scope" in text
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.asyncio
async def test_variables_are_not_made_in_a_replica(strategy: ar.Strategy) -> None:
    async def step() -> None:
        ar.Variable(1.0)

    with pytest.raises(ContextError, match="variable"):
        await strategy.run(step)


def test_the_default_context_runs_ops_in_one_event_loop_after_another() -> None:
    ctx, calls = me(), list[int]()

    async def main() -> int:
        calls.append(await ctx.run_on_device(pow, 2, 3))
        return int(await ctx.all_reduce("sum", 1))

    assert [asyncio.run(main()) for _ in range(2)] == [1, 1]
    assert calls == [8, 8]


# ---- device ops and randomness ------------------------------------------------------------------


@pytest.mark.asyncio
async def test_run_on_device_passes_arguments_results_and_errors(strategy: ar.Strategy) -> None:
    async def step() -> None:
        assert await me().run_on_device(lambda a, *, b: a - b, 5, b=3) == 2
        with pytest.raises(ZeroDivisionError):
            await me().run_on_device(lambda: 1 // 0)
        for bad in (step, None, 3):
            with pytest.raises(TypeError, match="plain function"):
                await me().run_on_device(bad)

    await strategy.run(step)


@pytest.mark.asyncio
async def test_random_streams_are_keyed(pair: ar.MirroredStrategy) -> None:
    async def step() -> list[float]:
        return [
            me().rng("a").random(),
            me().rng("a").random(),
            me().rng("b").random(),
            me().shared_rng("a").random(),
        ]

    async def drawn(seed: int | None) -> tuple[list[float], ...]:
        results = await pair.run(step, options=ar.RunOptions(seed=seed))
        return pair.local_results(results)

    zero, one = await drawn(3)
    assert zero[0] == zero[1]
    assert len({zero[0], zero[2], zero[3], one[0], one[2]}) == 5
    assert zero[3] == one[3]
    assert await drawn(3) != (zero, one)  # the next step
    again = copy.deepcopy(pair)
    try:
        results = await again.run(step, options=ar.RunOptions(seed=3))
        assert again.local_results(results) == (zero, one)
        results = await again.run(step, options=ar.RunOptions(seed=4))
    finally:
        await again.aclose()
