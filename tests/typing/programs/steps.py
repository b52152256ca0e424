"""A program of a user, which type checkers have to understand: training and steps."""

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import aioreplica as ar

Array = npt.NDArray[np.float64]


@ar.with_context
async def step(ctx: ar.ReplicaContext, batch: Array) -> float:
    assert_type(await ctx.run_on_device(len, batch), int)
    assert_type(await ctx.all_reduce("mean", 1), float)
    assert_type(await ctx.all_reduce("SUM", batch), Array)
    assert_type(await ctx.all_gather(batch, 0), Array)
    assert_type(await ctx.broadcast([1]), list[int])
    assert_type(await ctx.agree("x"), str)
    assert_type(await ctx.any(True), bool)
    return await ctx.all_reduce(ar.ReduceOp.MEAN, 2.0)


@ar.with_context
def plain_step(ctx: ar.ReplicaContext, x: int) -> int:
    return ctx.blocking.agree(x)


async def structured(x: int) -> dict[str, int]:
    return {"x": x}


@ar.device_op
def scaled(x: Array, factor: float = 2.0) -> Array:
    return x * factor


class Model:
    def __init__(self) -> None:
        self.weights = ar.Variable([1.0, 2.0], name="weights", aggregation="mean")


async def reductions(ctx: ar.ReplicaContext, model: Model, parts: ar.PerReplica[int]) -> None:
    assert_type(await ctx.all_reduce("sum", model.weights), npt.NDArray[Any])
    assert_type(await ctx.all_reduce("sum", parts), int)
    assert_type(await ctx.all_reduce("sum", {"a": [1.5]}), dict[str, list[float]])


async def main() -> None:
    async with ar.MirroredStrategy() as strategy:
        with strategy.scope():
            model = Model()
            optimizer = ar.optimizers.SGD(0.1)
        assert_type(ar.Variable(1.0), ar.Variable)
        assert_type(model.weights.value, npt.NDArray[Any])
        assert_type(await model.weights.assign_add(1.0), npt.NDArray[Any])
        losses = await strategy.run(step, args=(np.ones(2),))
        assert_type(losses, ar.PerReplica[float])
        assert_type(losses[0], float)
        assert_type(losses.values, tuple[float, ...])
        assert_type(await strategy.run(plain_step, args=(1,)), ar.PerReplica[int])
        assert_type(await strategy.run(structured, args=(1,)), Any)
        assert_type(await scaled(np.ones(2), factor=3.0), Array)
        assert_type(await ar.run_on_host(sum, [1, 2]), int)
        assert_type(await step(np.ones(2)), float)
        snapshot = strategy.snapshot()
        assert_type(snapshot[model.weights], npt.NDArray[Any])
        data = ar.ArrayDataset(np.arange(8.0), batch_size=4)
        async with strategy.distribute_dataset(data) as batches:
            assert_type(batches, ar.DistributedDataset)
        assert_type(await optimizer.minimize(lambda: 0.0, [model.weights]), Any)


async def undistributed() -> None:
    strategy = ar.DefaultStrategy()
    assert_type(await strategy.run(structured, args=(1,)), dict[str, int])
    assert_type(await strategy.run(len, args=("x",)), int)


async def learn(learner: ar.online.OnlineLearner) -> None:
    assert_type(await learner.submit({"x": 1.0}), ar.online.Ticket)


async def closures(coordinator: ar.ClusterCoordinator) -> None:
    remote = await coordinator.schedule(structured, args=(1,))
    assert_type(remote, ar.RemoteValue[dict[str, int]])
    assert_type(await remote.fetch(), dict[str, int])
    assert_type(await coordinator.schedule(len, args=([1],)), ar.RemoteValue[int])


def prepared(strategy: ar.Strategy) -> None:
    module, optimizer, batches = ar.prepare(Net(), [1.0], [(1, "a")], strategy=strategy)
    assert_type(module, ar.PerReplica[Net])
    assert_type(optimizer, ar.PerReplica[list[float]])
    for number, text in batches.values[0]:
        assert_type(number, int)
        assert_type(text, str)


class Net:
    """In place of a module: type checkers see the user's own class again."""
