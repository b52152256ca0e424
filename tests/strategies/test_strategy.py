"""run: arguments unwrapped, plain functions on device threads, results regrouped."""

import asyncio
import functools
import threading
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.context import DEVICE
from aioreplica.errors import ContextError
from tests.sequencer import Sequencer

pytestmark = pytest.mark.usefixtures("no_task_left")


def me() -> ar.ReplicaContext:
    ctx = ar.get_replica_context()
    assert ctx is not None
    return ctx


def my_id() -> int:
    return me().replica_id_in_sync_group


async def double(x: Any) -> Any:
    return 2 * x


# ---- arguments ----------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("args", ["ab", {"a": 1}, 3, None, np.ones(2), {1}, ar.PerReplica([1, 2])])
async def test_args_must_be_a_tuple_or_list(either: ar.Strategy, args: Any) -> None:
    with pytest.raises(ValueError, match=r"args=\(value,\)"):
        await either.run(double, args=args)
    assert either.statistics().num_steps == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("fn", [None, 3, "step"])
async def test_fn_must_be_callable(strategy: ar.Strategy, fn: Any) -> None:
    with pytest.raises(TypeError, match="step function"):
        await strategy.run(fn)


@pytest.mark.asyncio
async def test_options_must_be_run_options(strategy: ar.Strategy) -> None:
    with pytest.raises(TypeError, match="RunOptions"):
        await strategy.run(double, (1,), options={"seed": 1})


@pytest.mark.asyncio
@pytest.mark.parametrize("where", ["args", "kwargs", "deep"])
async def test_distributed_values_of_the_wrong_length_are_refused(
    gang: ar.MirroredStrategy, where: str
) -> None:
    wrong = ar.PerReplica([1, 2, 3])
    args = {"args": (wrong,), "kwargs": (), "deep": ([{"x": wrong}],)}[where]
    with pytest.raises(ValueError, match="has 3 values"):
        await gang.run(double, args, {"x": wrong} if where == "kwargs" else None)


@pytest.mark.asyncio
async def test_distributed_values_are_unwrapped_anywhere(gang: ar.MirroredStrategy) -> None:
    count = gang.num_replicas_in_sync
    ids = ar.PerReplica(range(count))
    shared = object()

    async def step(*args: Any, **kwargs: Any) -> None:
        mine = my_id()
        assert args == (mine, "m", [{"deep": (mine, None)}], shared)
        assert kwargs == {"key": {"deep": mine}, "plain": 5}

    await gang.run(
        step,
        [ids, ar.Mirrored(["m"] * count), [{"deep": (ids, None)}], shared],
        {"key": {"deep": ids}, "plain": 5},
    )


@pytest.mark.asyncio
async def test_components_that_are_trees_stay_whole(pair: ar.MirroredStrategy) -> None:
    trees = [{"a": [1]}, {"b": (2, 3)}]

    async def step(tree: Any) -> bool:
        return tree is trees[my_id()]

    assert (await pair.run(step, (ar.PerReplica(trees),))).values == (True, True)


@pytest.mark.asyncio
async def test_a_call_that_does_not_fit_is_a_type_error(strategy: ar.Strategy) -> None:
    with pytest.raises(TypeError):
        await strategy.run(double)
    with pytest.raises(TypeError):
        await strategy.run(lambda x: x)
    assert strategy.statistics().num_active == 0


# ---- kinds of functions -------------------------------------------------------------------------


class AsyncCallable:
    async def __call__(self, x: int) -> int:
        await me().barrier()
        return x


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["partial", "bound", "object", "lambda"])
async def test_everything_that_gives_a_coroutine_is_async(strategy: ar.Strategy, kind: str) -> None:
    fn = {
        "partial": functools.partial(AsyncCallable.__call__, AsyncCallable()),
        "bound": AsyncCallable().__call__,
        "object": AsyncCallable(),
        "lambda": functools.partial(functools.partial(AsyncCallable().__call__)),
    }[kind]

    result = await strategy.run(fn, (4,))

    assert strategy.local_results(result) == (4,) * strategy.num_replicas_in_sync


@pytest.mark.asyncio
async def test_plain_functions_run_on_device_threads(strategy: ar.Strategy) -> None:
    def step(x: int) -> tuple[int, str]:
        return my_id() + x, threading.current_thread().name

    results = strategy.local_results(await strategy.run(step, (10,)))

    for replica_id, (value, thread) in enumerate(results):
        assert value == 10 + replica_id
        assert thread != threading.current_thread().name
        device = strategy._runtime.replica_devices[replica_id]
        assert device is None or str(device) in thread


@pytest.mark.asyncio
async def test_plain_functions_run_side_by_side(gang: ar.MirroredStrategy) -> None:
    together = threading.Barrier(gang.num_replicas_in_sync)

    await gang.run(lambda: together.wait(10) and None)


@pytest.mark.asyncio
async def test_two_plain_runs_never_hold_devices_crosswise(gang: ar.MirroredStrategy) -> None:
    """Each run needs all of its replicas at the same time."""

    async def once() -> None:
        together = threading.Barrier(gang.num_replicas_in_sync)
        await gang.run(lambda: together.wait(10) and None)

    await asyncio.gather(*(once() for _ in range(20)))


@pytest.mark.asyncio
async def test_a_plain_function_that_returns_a_coroutine_is_refused(
    strategy: ar.Strategy,
) -> None:
    with pytest.raises(TypeError, match="async def"):
        await strategy.run(lambda: double(1))


# ---- results ------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("plain", [False, True], ids=["async def", "def"])
async def test_results_follow_types_not_values(gang: ar.MirroredStrategy, plain: bool) -> None:
    count = gang.num_replicas_in_sync
    with gang.scope():
        variable = ar.Variable(0.0)

    def make() -> dict[str, Any]:
        return {
            "equal": 1,
            "own": my_id(),
            "text": "same",
            "none": None,
            "some": my_id() or None,
            "variable": variable,
            "deep": [(np.full(my_id(), 1.0), None)],
            "function": len,
        }

    async def step() -> dict[str, Any]:
        return make()

    result = await gang.run(make if plain else step)

    assert type(result["equal"]) is ar.PerReplica
    assert result["equal"].values == (1,) * count
    assert result["own"].values == tuple(range(count))
    assert result["text"].values == ("same",) * count
    assert result["none"] is None
    assert result["some"].values == (None, *range(1, count))
    assert result["variable"] is variable
    assert [len(part) for part in result["deep"][0][0]] == list(range(count))
    assert result["deep"][0][1] is None
    assert result["function"].values == (len,) * count


@pytest.mark.asyncio
async def test_one_replica_gives_per_replica_too(solo: ar.OneDeviceStrategy) -> None:
    result = await solo.run(double, (3,))

    assert type(result) is ar.PerReplica
    assert result.values == (6,)


@pytest.mark.asyncio
async def test_the_default_strategy_gives_plain_values() -> None:
    strategy = ar.DefaultStrategy()

    assert await strategy.run(double, (3,)) == 6
    assert await strategy.run(lambda: {"a": [1, None]}) == {"a": [1, None]}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("shapes", "check"),
    [
        (((1, 2), [1, 2]), lambda r: r.values == ((1, 2), [1, 2])),
        (((1, 2), (1, 2, 3)), lambda r: r.values == ((1, 2), (1, 2, 3))),
        (({"a": 1}, {"b": 1}), lambda r: r.values == ({"a": 1}, {"b": 1})),
        ((1, [1]), lambda r: r.values == (1, [1])),
        (((1, [2]), (1, 2)), lambda r: r[0].values == (1, 1) and r[1].values == ([2], 2)),
        (({"a": (1,), "b": 2},) * 2, lambda r: r["a"][0].values == (1, 1)),
        (([None, 1], [None, (1,)]), lambda r: r[0] is None and r[1].values == (1, (1,))),
    ],
    ids=["container", "length", "keys", "leaf and tree", "subtree", "equal", "none beside"],
)
async def test_different_structures_give_per_replica_there(
    pair: ar.MirroredStrategy, shapes: Any, check: Any
) -> None:
    async def step() -> Any:
        return shapes[my_id()]

    assert check(await pair.run(step))


@pytest.mark.asyncio
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
async def test_results_are_in_replica_order(
    triple: ar.MirroredStrategy, order: tuple[int, ...]
) -> None:
    sequencer = Sequencer(order)

    async def step() -> int:
        await sequencer.turn(my_id())
        return my_id()

    assert (await triple.run(step)).values == (0, 1, 2)


# ---- several runs -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_concurrent_runs_have_a_rendezvous_each(strategy: ar.Strategy) -> None:
    async def step(run_id: int) -> list[int]:
        totals = []
        for turn in range(5):
            totals.append(await me().all_reduce("sum", run_id))
            await me().run_on_device(int)
            if run_id % 2:
                await asyncio.sleep(0)
            assert await me().agree((run_id, turn)) == (run_id, turn)
        return totals

    results = await asyncio.gather(*(strategy.run(step, (i,)) for i in range(20)))

    count = strategy.num_replicas_in_sync
    for run_id, result in enumerate(results):
        assert set(map(tuple, strategy.local_results(result))) == {(run_id * count,) * 5}
    assert strategy.statistics().num_steps == 20
    assert strategy.statistics().num_active == 0


@pytest.mark.asyncio
async def test_a_failed_run_leaves_its_neighbours_alone(gang: ar.MirroredStrategy) -> None:
    async def step(fail: bool) -> int:
        await me().barrier()
        if fail and my_id() == 1:
            raise ValueError
        for _ in range(5):
            await me().barrier()
        return 1

    results = await asyncio.gather(
        *(gang.run(step, (i % 2 == 0,)) for i in range(6)), return_exceptions=True
    )

    assert [type(result) for result in results] == [ValueError, ar.PerReplica] * 3


@pytest.mark.asyncio
async def test_run_inside_a_replica_is_refused(strategy: ar.Strategy) -> None:
    async def step() -> None:
        with pytest.raises(ContextError, match="run is a cross-replica method"):
            await strategy.run(double, (1,))
        with pytest.raises(ContextError):
            await ar.OneDeviceStrategy("cpu:0").run(double, (1,))

    await strategy.run(step)


@pytest.mark.asyncio
async def test_the_callers_context_variables_are_seen(strategy: ar.Strategy) -> None:
    with ar.device("cpu:1"):

        async def step() -> Any:
            return await ar.run_on_host(lambda: DEVICE.get())

        [found, *_] = strategy.local_results(await strategy.run(step))
    assert str(found) == "cpu:1"


@pytest.mark.asyncio
async def test_every_merge_is_recorded(strategy: ar.Strategy) -> None:
    async def step() -> None:
        await me().barrier()
        await me().all_reduce("sum", 1)

    await strategy.run(step)
    await strategy.run(step)

    records = strategy.recorder.records()
    assert [(r.step, r.sequence, r.collective) for r in records] == [
        (0, 1, "barrier"), (0, 2, "all_reduce"), (1, 1, "barrier"), (1, 2, "all_reduce"),
    ]  # fmt: skip
    assert {r.file for r in records} == {__file__}
    assert len({r.line for r in records}) == 2
    assert {r.num_replicas for r in records} == {strategy.num_replicas_in_sync}


class _AsyncCall:
    """An object that is called like an `async def`."""

    async def __call__(self, x: int) -> int:
        context = ar.get_replica_context()
        assert context is not None
        return await context.all_reduce("max", x)


@pytest.mark.asyncio
@pytest.mark.parametrize("wrap", [lambda f: f, functools.partial], ids=["object", "partial"])
async def test_objects_with_an_async_call_are_steps(strategy: ar.Strategy, wrap: Any) -> None:
    results = await strategy.run(wrap(_AsyncCall()), args=(3,))
    assert strategy.local_results(results) == (3,) * strategy.num_replicas_in_sync
