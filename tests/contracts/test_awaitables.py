"""Every awaitable of the public API says so if it is not awaited, or on another loop or thread.

An `async def` that is not awaited is Python's own RuntimeWarning. What else gives something to
await has a row: what happens if that is dropped, and if it is awaited on an event loop of another
thread. A new public awaitable without a row fails the last test.
"""

import asyncio
import gc
import inspect
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.cluster import LocalCommunicator
from aioreplica.errors import ContextError, LoopMismatchError
from aioreplica.online import OnlineLearner
from aioreplica.optimizers import ExponentialMovingAverage
from tests.conftest import mirrored
from tests.contracts.test_callbacks import PACKAGES, functions_of
from tests.parameter_server.coordinating import Gate, coordinating


class Parts:
    """What steps use; made in the scope of a strategy."""

    def __init__(self, strategy: ar.Strategy) -> None:
        with strategy.scope():
            self.strategy = strategy
            self.gate = threading.Event()
            self.gate.set()
            self.w = ar.Variable(1.0, aggregation="mean")
            self.table = ar.Variable(np.zeros(2), aggregation="only_first_replica")
            self.sgd = ar.optimizers.SGD(0.5)
            self.window = ar.GradientAccumulator(self.sgd)
            self.average = ExponentialMovingAverage([self.w], 0.5)

    @property
    def pairs(self) -> list[tuple[Any, ar.Variable]]:
        return [(np.float64(1.0), self.w)]

    def loss(self) -> Any:
        """Hold the device, if that is wanted."""
        assert self.gate.wait(30.0)
        return self.w.value * 2.0


def context() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


ROW = ar.IndexedSlices(np.ones(1), np.array([1]), (2,))


def other() -> int:
    """Id of the other one of two replicas."""
    return 1 - context().replica_id_in_sync_group


IN_REPLICA: dict[str, Callable[[Parts], Awaitable[Any]]] = {
    "Collectives.agree": lambda p: context().agree(1),
    "Collectives.all": lambda p: context().all(True),
    "Collectives.all_gather": lambda p: context().all_gather(np.ones(2), 0),
    "Collectives.all_reduce": lambda p: context().all_reduce("sum", 1.0),
    "Collectives.all_to_all": lambda p: context().all_to_all(np.ones(2)),
    "Collectives.any": lambda p: context().any(True),
    "Collectives.barrier": lambda p: context().barrier(),
    "Collectives.broadcast": lambda p: context().broadcast(1.0),
    "Collectives.merge_call": lambda p: context().merge_call(lambda strategy: 1),
    "Collectives.reduce_scatter": lambda p: context().reduce_scatter("sum", np.ones(2)),
    "ReplicaContext.receive": lambda p: context().receive(other()),
    "ReplicaContext.send": lambda p: context().send(1.0, other()),
    "ReplicaContext.update": lambda p: context().update(p.w, lambda w: None),
    "ReplicaContext.variable": lambda p: context().variable(1.0),
    "Extended.update": lambda p: p.strategy.extended.update(p.w, lambda w: None),
    "ExponentialMovingAverage.update": lambda p: p.average.update(),
    "GradientAccumulator.add": lambda p: p.window.add(p.pairs),
    "GradientAccumulator.apply": lambda p: p.window.apply(),
    "Optimizer.apply_gradients": lambda p: p.sgd.apply_gradients(p.pairs),
    "Optimizer.minimize": lambda p: p.sgd.minimize(p.loss, [p.w]),
    "Writes.assign": lambda p: p.w.assign(2.0),
    "Writes.assign_add": lambda p: p.w.assign_add(2.0),
    "Writes.assign_sub": lambda p: p.w.assign_sub(2.0),
    "Writes.scatter_update": lambda p: p.table.scatter_update(ROW),
    "Writes.scatter_min": lambda p: p.table.scatter_min(ROW),
    "Writes.scatter_max": lambda p: p.table.scatter_max(ROW),
    "Writes.scatter_mul": lambda p: p.table.scatter_mul(ROW),
    "Writes.scatter_div": lambda p: p.table.scatter_div(ROW),
}
WARNED = {
    "Collectives.start_all_reduce": lambda p: context().start_all_reduce("sum", 1.0),
    "ReplicaContext.run_on_device": lambda p: context().run_on_device(p.loss),
    "device_op": lambda p: ar.device_op(p.loss)(),
    "Optimizer.compute_gradients": lambda p: p.sgd.compute_gradients(p.loss, [p.w]),
}
"""What was not done, or its result, concerns one replica alone: a RuntimeWarning, and no error."""


async def collected(made: Awaitable[Any], *, drop: bool = False) -> None:
    """Await something, or drop it; then collect what nobody has."""
    if not drop:
        await made
    del made
    gc.collect()


# ---- not awaited ---------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("name", IN_REPLICA)
async def test_a_call_of_replicas_that_is_not_awaited_fails_the_run(name: str) -> None:
    async with mirrored(2) as strategy:
        parts = Parts(strategy)

        async def step() -> None:
            IN_REPLICA[name](parts)

        method = name.partition(".")[2]
        with pytest.raises(
            ContextError, match=rf"never awaited in step 0: replica 0: .*{method}"
        ) as e:
            await strategy.run(step)
        assert f"{__file__}:" in str(e.value)
        assert (parts.w.value, parts.window.num_added) == (1.0, 0)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", WARNED)
async def test_a_call_of_one_replica_that_is_not_awaited_warns(name: str) -> None:
    async with mirrored(2) as strategy:
        parts = Parts(strategy)

        async def step() -> None:
            WARNED[name](parts)

        with pytest.warns(RuntimeWarning, match="never awaited"):
            await collected(strategy.run(step))


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["minimize", "add"])
async def test_an_awaitable_cancelled_before_it_begins_counts_as_awaited(name: str) -> None:
    """Neither is a collective before it has begun, so nobody waits for it in vain."""
    async with mirrored(2) as strategy:
        parts = Parts(strategy)

        async def step() -> float:
            call = (
                parts.window.add(parts.pairs) if name == "add" else parts.sgd.minimize(parts.loss)
            )
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 0)
            return await context().all_reduce("sum", 1.0)

        assert (await strategy.run(step)).values == (2.0, 2.0)
        assert (parts.w.value, parts.window.num_added) == (1.0, 0)


OUTSIDE: dict[str, Callable[[Parts], Awaitable[Any]]] = {
    "Extended.update": lambda p: p.strategy.extended.update(p.w, lambda w: w.assign(5.0)),
    "ExponentialMovingAverage.update": lambda p: p.average.update(),
    "GradientAccumulator.apply": lambda p: p.window.apply(),
    "Writes.assign": lambda p: p.w.assign(2.0),
    "Writes.assign_add": lambda p: p.w.assign_add(2.0),
    "Writes.assign_sub": lambda p: p.w.assign_sub(2.0),
    "Writes.scatter_update": lambda p: p.table.scatter_update(ROW),
    "Writes.scatter_min": lambda p: p.table.scatter_min(ROW),
    "Writes.scatter_max": lambda p: p.table.scatter_max(ROW),
    "Writes.scatter_mul": lambda p: p.table.scatter_mul(ROW),
    "Writes.scatter_div": lambda p: p.table.scatter_div(ROW),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", OUTSIDE)
async def test_a_cross_replica_call_that_is_not_awaited_warns(name: str) -> None:
    async with mirrored(2) as strategy:
        parts = Parts(strategy)
        with pytest.warns(RuntimeWarning, match="never awaited"):
            await collected(OUTSIDE[name](parts), drop=True)
        assert parts.w.value == 1.0


@pytest.mark.xslow
@pytest.mark.asyncio
async def test_calls_of_a_program_without_a_strategy_that_are_not_awaited_warn() -> None:
    w = ar.Variable(1.0)
    sgd, window = ar.optimizers.SGD(0.5), ar.GradientAccumulator(ar.optimizers.SGD(0.5))
    pairs: list[Any] = [(np.float64(1.0), w)]
    for call in (
        lambda: sgd.apply_gradients(pairs),
        lambda: sgd.minimize(lambda: w.value * 2.0, [w]),
        lambda: window.add(pairs),
    ):
        with pytest.warns(RuntimeWarning, match="never awaited"):
            await collected(call(), drop=True)
    assert w.value == 1.0


# ---- on the event loop of another thread ---------------------------------------------------------


async def elsewhere(make: Callable[[], Awaitable[Any]]) -> None:
    """Await on an event loop of another thread, in the same context variables."""

    async def main() -> None:
        await make()

    await asyncio.to_thread(lambda: asyncio.run(main()))


TO_ANOTHER = {"ReplicaContext.send", "ReplicaContext.receive"}  # takes two replicas
AT_HOME_ANYWHERE = {"device_op"}  # it begins when it is awaited, on the loop that does that


@pytest.mark.asyncio
@pytest.mark.parametrize("name", sorted({*IN_REPLICA, *WARNED} - AT_HOME_ANYWHERE))
async def test_awaitables_of_a_replica_are_refused_on_another_loop(name: str) -> None:
    """An op that has ended may be: its function has run, and its result is there."""
    async with mirrored(2 if name in TO_ANOTHER else 1) as strategy:
        parts = Parts(strategy)
        parts.gate.clear()

        async def step() -> None:
            if context().replica_id_in_sync_group:
                return
            made = {**IN_REPLICA, **WARNED}[name](parts)
            try:
                await elsewhere(lambda: made)
            finally:
                parts.gate.set()

        with pytest.raises(LoopMismatchError, match=r"was awaited on .* Await it there"):
            await strategy.run(step)
        assert (parts.w.value, parts.window.num_added) == (1.0, 0)


@pytest.mark.asyncio
async def test_no_callback_is_added_to_a_handle_on_another_loop() -> None:
    """It would be called by the loop of the run, woken from a thread that may not do that."""
    async with mirrored(1) as strategy:

        async def step() -> None:
            handle = context().start_all_reduce("sum", 1.0)

            async def add() -> None:
                handle.add_done_callback(print)

            with pytest.raises(LoopMismatchError, match="belongs to"):
                await elsewhere(add)
            assert await handle == 1.0

        await strategy.run(step)


@asynccontextmanager
async def trained() -> AsyncIterator[Parts]:
    """A strategy that has run on this loop."""
    async with mirrored(2) as strategy:
        parts = Parts(strategy)
        await strategy.run(idle)
        yield parts


async def idle() -> None: ...


@asynccontextmanager
async def read() -> AsyncIterator[Any]:
    """An epoch that has begun here."""
    async with (
        mirrored(2) as strategy,
        strategy.distribute_dataset(ar.ArrayDataset(np.arange(8.0), 2)) as dataset,
    ):
        batches = aiter(dataset)
        await anext(batches)
        yield batches


@asynccontextmanager
async def learner() -> AsyncIterator[tuple[OnlineLearner, Any]]:
    """A learner that is paused, and a ticket that waits."""
    async with mirrored(2) as strategy:
        parts = Parts(strategy)
        async with OnlineLearner(
            strategy, lambda ctx, batch: None, [parts.w], max_batch=1, max_delay_s=0.0, queue_size=4
        ) as online:
            await online.pause()
            yield online, online.submit_nowait({"x": np.float64(1.0)})
            online.resume()


@asynccontextmanager
async def closures() -> AsyncIterator[tuple[ar.ClusterCoordinator, Any]]:
    """A coordinator whose closure waits, and its result."""
    gate = Gate()
    async with coordinating(num_workers=1) as (_, coordinator):
        remote = await coordinator.schedule(gate.pass_through)
        yield coordinator, remote
        gate.open()


@asynccontextmanager
async def tpu() -> AsyncIterator[ar.TPUStrategy]:
    async with ar.TPUStrategy(ar.TPUClusterResolver(2, 1)) as strategy:
        yield strategy


@asynccontextmanager
async def workers() -> AsyncIterator[Any]:
    group = LocalCommunicator.group(2)
    calls = [each.barrier() for each in group]
    await asyncio.gather(*calls)
    yield group[0]
    for each in group:
        await each.aclose()


ELSEWHERE: dict[str, tuple[Any, Callable[[Any], Awaitable[Any]]]] = {
    "Strategy.run": (trained, lambda p: p.strategy.run(idle)),
    "Strategy.run of a plain function": (trained, lambda p: p.strategy.run(p.loss)),
    "Strategy.run_steps": (
        trained,
        lambda p: p.strategy.run_steps(lambda ctx, x: None, iter([1])),
    ),
    "Strategy.reduce": (trained, lambda p: p.strategy.reduce("sum", ar.PerReplica([1, 2]))),
    "Strategy.gather": (
        trained,
        lambda p: p.strategy.gather(ar.PerReplica([np.ones(1), np.ones(1)]), 0),
    ),
    "Strategy.check_in_sync": (trained, lambda p: p.strategy.check_in_sync([p.w])),
    "Strategy.aclose": (trained, lambda p: p.strategy.aclose()),
    "Extended.call_for_each_replica": (
        trained,
        lambda p: p.strategy.extended.call_for_each_replica(idle),
    ),
    "Extended.reduce_to": (
        trained,
        lambda p: p.strategy.extended.reduce_to("sum", ar.PerReplica([1, 2]), p.w),
    ),
    "Optimizer.distributed_apply": (trained, lambda p: p.sgd.distributed_apply(p.pairs)),
    "DistributedDataset.__anext__": (read, lambda batches: anext(batches)),
    "OnlineLearner.submit": (learner, lambda it: it[0].submit({"x": np.float64(1.0)})),
    "OnlineLearner.submit_many": (learner, lambda it: it[0].submit_many([{"x": np.float64(1)}])),
    "OnlineLearner.pause": (learner, lambda it: it[0].pause()),
    "OnlineLearner.checkpoint": (learner, lambda it: it[0].checkpoint()),
    "OnlineLearner.dead_letters": (learner, lambda it: it[0].dead_letters()),
    "OnlineLearner.aclose": (learner, lambda it: it[0].aclose()),
    "OnlineLearner.retry": (learner, lambda it: it[0].retry(1)),
    "OnlineLearner.discard": (learner, lambda it: it[0].discard(1)),
    "Ticket.__await__": (learner, lambda it: it[1]),
    "ClusterCoordinator.schedule": (closures, lambda it: it[0].schedule(idle)),
    "ClusterCoordinator.join": (closures, lambda it: it[0].join()),
    "ClusterCoordinator.fetch": (closures, lambda it: it[0].fetch([it[1]])),
    "ClusterCoordinator.aclose": (closures, lambda it: it[0].aclose()),
    "RemoteValue.fetch": (closures, lambda it: it[1].fetch()),
    "Communicator.barrier": (workers, lambda communicator: communicator.barrier()),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ELSEWHERE)
async def test_awaitables_bound_to_a_loop_are_refused_on_another(name: str) -> None:
    opened, call = ELSEWHERE[name]
    async with opened() as made:
        with pytest.raises((LoopMismatchError, ContextError)):
            await elsewhere(lambda: call(made))


# ---- on a thread without a loop ------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("name", [*IN_REPLICA, "Collectives.start_all_reduce"])
async def test_a_call_of_replicas_on_a_thread_is_refused(name: str) -> None:
    async with mirrored(2 if name in TO_ANOTHER else 1) as strategy:
        parts = Parts(strategy)

        async def step() -> None:
            if context().replica_id_in_sync_group:
                return
            await asyncio.to_thread({**IN_REPLICA, **WARNED}[name], parts)

        with pytest.raises(ContextError):
            await strategy.run(step)
        assert (parts.w.value, parts.window.num_added) == (1.0, 0)


ON_A_THREAD: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "OnlineLearner.submit_nowait": (learner, lambda it: it[0].submit_nowait({"x": np.float64(1)})),
    "OnlineLearner.submit_many_nowait": (
        learner,
        lambda it: it[0].submit_many_nowait([{"x": np.float64(1)}]),
    ),
    "ClusterCoordinator.schedule_nowait": (closures, lambda it: it[0].schedule_nowait(idle)),
    "Communicator.barrier": (workers, lambda it: it.barrier()),
    "Communicator.all_gather": (workers, lambda it: it.all_gather(np.ones(1))),
    "Communicator.all_reduce": (workers, lambda it: it.all_reduce(np.ones(1), "sum")),
    "Communicator.broadcast": (workers, lambda it: it.broadcast(np.ones(1), 0)),
    "Communicator.reduce_scatter": (workers, lambda it: it.reduce_scatter(np.ones(2), "sum")),
    "TPUStrategy.initialize": (tpu, lambda it: it.initialize()),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ON_A_THREAD)
async def test_calls_that_begin_on_the_loop_are_refused_on_a_thread(name: str) -> None:
    opened, call = ON_A_THREAD[name]
    async with opened() as made:
        with pytest.raises(ContextError):
            await asyncio.to_thread(call, made)


# ---- the table is complete -----------------------------------------------------------------------

BEGINS_BY_ITSELF = {
    "OnlineLearner.submit_nowait": "the example is learned, or becomes a dead letter",
    "OnlineLearner.submit_many_nowait": "the same",
    "ClusterCoordinator.schedule_nowait": "the closure runs; its error is raised by `join`",
    "Communicator.all_gather": "the call is made; a failure is raised by every later one",
    "Communicator.all_reduce": "the same",
    "Communicator.barrier": "the same",
    "Communicator.broadcast": "the same",
    "Communicator.reduce_scatter": "the same",
    "TPUStrategy.initialize": "it is done at the call",
    "Handle.__await__": "of start_all_reduce",
    "Ticket.__await__": "of submit",
}
OF_THE_LIBRARY = {
    "Communicator.all_gather_then_reduce", "LocalSGD.counted", "ObservedWait.awaited",
}  # fmt: skip
AWAITABLE = re.compile(r"\b(Coroutine|Awaitable|Future|Handle|Op|Ticket|RemoteValue)\b|^R$")


def test_every_public_awaitable_has_a_row() -> None:
    """Those that are `async def` need none: Python warns that they were never awaited."""
    found = {
        name
        for module in PACKAGES
        for name, fn in functions_of(module)
        if inspect.isfunction(fn) and not inspect.iscoroutinefunction(fn)
        if AWAITABLE.search(str(fn.__annotations__.get("return")))
    }
    known = {*IN_REPLICA, *WARNED, *OUTSIDE, *BEGINS_BY_ITSELF, *OF_THE_LIBRARY}

    assert found - known == set()
    assert known - found - FURTHER == set()


FURTHER = {"Extended.update", "Optimizer.compute_gradients", "Handle.__await__", "Ticket.__await__"}
"""Of a package that is not walked, `async def`, or with an underscore."""
