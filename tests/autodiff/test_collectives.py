"""Gradients through collectives: those of the same function in one process."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica import autodiff
from aioreplica.autodiff import differentiate_variables, value_and_grad
from aioreplica.autodiff._linear import from_source
from aioreplica.devices import lane_table
from aioreplica.errors import ContextError, MergeMismatchError, StallError
from tests.autodiff.libraries import NAMES, Library, library
from tests.conftest import mirrored
from tests.replica.gated import me, my_id

Loss = Callable[[Any, int], Any]


@pytest.fixture(params=NAMES)
def lib(request: pytest.FixtureRequest) -> Library:
    return library(request.param)


async def gradients_in_replicas(lib: Library, loss: Loss, inputs: list[Any]) -> list[Any]:
    """Return each replica's gradient of its own loss, of which all together are differentiated."""

    async def step(x: Any) -> Any:
        i = my_id()
        fn = value_and_grad(lambda xs: loss(xs[0], i), lib.name)
        return (await me().run_on_device(fn, [x]))[1][0]

    async with mirrored(len(inputs)) as strategy:
        result = await strategy.run(step, args=(ar.PerReplica(inputs),))
    return list(result.values)


def gradients_in_one_process(
    lib: Library, losses: Callable[[list[Any]], list[Any]], inputs: list[Any]
) -> list[Any]:
    def total(xs: list[Any]) -> Any:
        first, *rest = losses(list(xs))
        for loss in rest:
            first = first + loss
        return first

    gradients: list[Any] = value_and_grad(total, lib.name)(inputs)[1]
    return gradients


def added(values: list[Any]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def assert_equal(lib: Library, found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=lib.rtol)


COUNTS = pytest.mark.parametrize("count", [1, 2, 4])


@pytest.mark.asyncio
@COUNTS
@pytest.mark.parametrize("op", ["sum", "MEAN"])
async def test_all_reduce(lib: Library, count: int, op: str) -> None:
    inputs = [np.array([0.3 + i, 1.0 - 0.2 * i]) for i in range(count)]
    divisor = count if op == "MEAN" else 1

    def after(y: Any, x: Any, i: int) -> Any:
        return lib.sum(y * y * (i + 1)) + lib.sum(lib.sin(x) * y)

    def loss(x: Any, i: int) -> Any:
        return after(autodiff.all_reduce(op, lib.sin(x)), x, i)

    def losses(xs: list[Any]) -> list[Any]:
        y = added([lib.sin(x) for x in xs]) / divisor
        return [after(y, x, i) for i, x in enumerate(xs)]

    found = await gradients_in_replicas(lib, loss, inputs)

    assert_equal(lib, found, gradients_in_one_process(lib, losses, inputs))


@pytest.mark.asyncio
@COUNTS
@pytest.mark.parametrize("smallest", [0, 1])
async def test_all_gather_of_uneven_sizes(lib: Library, count: int, smallest: int) -> None:
    sizes = [smallest + i for i in range(count)]
    inputs = [np.linspace(0.1, 1.0, 2 * size).reshape(2, size) for size in sizes]
    scale = lib.array(np.arange(1.0, 1 + sum(sizes)))

    def loss(x: Any, i: int) -> Any:
        joined = autodiff.all_gather(lib.sin(x).T, 0)[:, 0]
        return lib.sum(joined * joined * scale * (i + 1))

    def losses(xs: list[Any]) -> list[Any]:
        joined = lib.concatenate([lib.sin(x).T for x in xs])[:, 0]
        return [lib.sum(joined * joined * scale * (i + 1)) for i in range(count)]

    found = await gradients_in_replicas(lib, loss, inputs)

    assert_equal(lib, found, gradients_in_one_process(lib, losses, inputs))


@pytest.mark.asyncio
@COUNTS
@pytest.mark.parametrize("op", ["sum", "mean"])
async def test_reduce_scatter_and_broadcast(lib: Library, count: int, op: str) -> None:
    inputs = [np.linspace(0.1 + i, 1.0, 5) for i in range(count)]
    source = count - 1
    divisor = count if op == "mean" else 1

    def loss(x: Any, i: int) -> Any:
        part = autodiff.reduce_scatter(op, lib.sin(x))
        given = autodiff.broadcast(x * x, source=source)
        return lib.sum(part * part * (i + 1)) + lib.sum(given * lib.sin(x))

    def losses(xs: list[Any]) -> list[Any]:
        total = added([lib.sin(x) for x in xs]) / divisor
        parts = np.array_split(np.arange(5), count)
        return [
            lib.sum(total[p[0] : p[-1] + 1] ** 2 * (i + 1)) + lib.sum(xs[source] ** 2 * lib.sin(x))
            for i, (p, x) in enumerate(zip(parts, xs, strict=True))
        ]

    found = await gradients_in_replicas(lib, loss, inputs)

    assert_equal(lib, found, gradients_in_one_process(lib, losses, inputs))


def test_the_gradient_of_a_broadcast_is_on_the_device_of_what_was_sent() -> None:
    torch = pytest.importorskip("torch")
    caller: Any = SimpleNamespace(
        replica=SimpleNamespace(replica_id_in_sync_group=1),
        broadcast=lambda value, _source: value,
        sum=lambda _op, value: value,
    )
    _, back = from_source(0)(caller, torch.ones(3, device="meta"))  # as on a GPU

    gradient, _ = back(caller, torch.ones(2, device="meta"))

    assert (gradient.shape, gradient.device.type) == ((3,), "meta")


@pytest.mark.asyncio
async def test_gradients_of_gradients_go_through_collectives(lib: Library) -> None:
    inputs = [np.array(0.5), np.array(0.8)]

    def cubed_sum(x: Any) -> Any:
        return autodiff.all_reduce("sum", x * x) ** 3

    def loss(x: Any, i: int) -> Any:
        slope = value_and_grad(lambda xs: cubed_sum(xs[0]), lib.name)([x])[1][0]
        return slope * slope * (i + 1)

    def losses(xs: list[Any]) -> list[Any]:
        # each replica's slope is that of all replicas' losses with respect to its own input
        total = xs[0] ** 2 + xs[1] ** 2
        return [(2 * 3 * total**2 * 2 * x) ** 2 * (i + 1) for i, x in enumerate(xs)]

    found = await gradients_in_replicas(lib, loss, inputs)

    assert_equal(lib, found, gradients_in_one_process(lib, losses, inputs))


@pytest.mark.asyncio
async def test_a_loss_that_reads_variables_may_meet_the_others(
    lib: Library, pair: ar.MirroredStrategy
) -> None:
    with pair.scope():
        w = ar.Variable(3.0, name="w")

    async def step() -> Any:
        def loss() -> Any:
            return autodiff.all_reduce("mean", w.value * (my_id() + 1.0)) ** 2

        value, [(gradient, _)] = await me().run_on_device(
            differentiate_variables, loss, None, lib.name
        )
        return value, gradient

    value, gradient = await pair.run(step)

    assert [float(v) for v in value.values] == [20.25, 20.25]
    assert [float(g) for g in gradient.values] == [9.0, 18.0]


@pytest.mark.asyncio
async def test_plain_steps_may_meet_the_others(pair: ar.MirroredStrategy) -> None:
    def step() -> Any:
        return autodiff.all_reduce("sum", {"a": np.array(1.0 + my_id()), "b": (np.ones(1),)})

    result = await pair.run(step)

    assert [float(part) for part in result["a"].values] == [3.0, 3.0]
    assert result["b"][0].values[0].tolist() == [2.0]


# ---- what goes wrong -------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_different_collectives_are_a_mismatch_on_the_way_back_too(
    pair: ar.MirroredStrategy, lib: Library, no_task_left: None
) -> None:
    def loss(xs: Any) -> Any:
        y = autodiff.all_reduce("sum", xs[0])
        return lib.sum(y if my_id() else lib.array([2.0]) * autodiff.all_gather(xs[0], 0)[:1])

    async def step() -> Any:
        return await me().run_on_device(value_and_grad(loss, lib.name), [np.ones(1)])

    with pytest.raises(MergeMismatchError, match=r"all_gather #2.*test_collectives.py"):
        await pair.run(step)


@pytest.mark.asyncio
async def test_a_branch_that_only_one_way_back_takes_is_a_mismatch(
    pair: ar.MirroredStrategy, lib: Library, no_task_left: None
) -> None:
    def loss(xs: Any) -> Any:
        y = autodiff.all_reduce("sum", xs[0])
        return lib.sum(y) if my_id() else lib.sum(xs[0])

    async def step() -> Any:
        return await me().run_on_device(value_and_grad(loss, lib.name), [np.ones(2)])

    with pytest.raises(MergeMismatchError, match="gradient of all_reduce #2") as caught:
        await pair.run(step)

    assert "Replica 0 returned" in str(caught.value)


@pytest.mark.asyncio
async def test_an_error_on_the_way_wakes_the_waiting_thread(
    pair: ar.MirroredStrategy, lib: Library, no_task_left: None
) -> None:
    def loss(xs: Any) -> Any:
        if my_id():
            raise ZeroDivisionError("on purpose")
        return lib.sum(autodiff.all_reduce("sum", xs[0]))

    async def step() -> Any:
        return await me().run_on_device(value_and_grad(loss, lib.name), [np.ones(2)])

    with pytest.raises(ZeroDivisionError, match="on purpose"):
        await pair.run(step)
    assert (await pair.run(lambda: 1)).values == (1, 1)  # both lanes serve again


@pytest.mark.asyncio
async def test_cancelling_the_run_wakes_threads_that_wait(
    pair: ar.MirroredStrategy, lib: Library, no_task_left: None
) -> None:
    gate, waiting = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def loss(xs: Any) -> Any:
        if my_id():
            loop.call_soon_threadsafe(waiting.set)
            assert gate.wait(10)
            return lib.sum(xs[0])
        return lib.sum(autodiff.all_reduce("sum", xs[0]))

    async def step() -> Any:
        return await me().run_on_device(value_and_grad(loss, lib.name), [np.ones(2)])

    run = loop.create_task(pair.run(step))
    await waiting.wait()
    run.cancel()
    gate.set()

    with pytest.raises(asyncio.CancelledError):
        await run
    assert (await pair.run(lambda: 1)).values == (1, 1)


@pytest.mark.explore(schedules=30)
async def test_a_stall_wakes_the_waiting_thread() -> None:
    async def step() -> None:
        if my_id():
            await asyncio.Event().wait()
        await me().run_on_device(autodiff.all_reduce, "sum", np.ones(2))

    async with mirrored(2) as pair:
        with pytest.raises(StallError, match=r"autodiff\.all_reduce #1"):
            await pair.run(step, options=ar.RunOptions(stall_timeout=60))
        assert (await pair.run(lambda: 1)).values == (1, 1)


@pytest.mark.asyncio
async def test_awaited_and_blocking_collectives_do_not_meet(
    pair: ar.MirroredStrategy, no_task_left: None
) -> None:
    async def step() -> Any:
        if my_id():
            return await me().all_reduce("sum", np.ones(2))
        return await me().run_on_device(autodiff.all_reduce, "sum", np.ones(2))

    with pytest.raises(MergeMismatchError, match=r"is in autodiff\.all_reduce #1"):
        await pair.run(step)


@pytest.mark.asyncio
async def test_two_runs_that_wait_on_each_others_devices_both_end(
    pair: ar.MirroredStrategy,
) -> None:
    """Run A holds cpu:0 first, run B cpu:1: each waits for an op queued behind the other's."""
    first_in = [asyncio.Event(), asyncio.Event()]
    loop = asyncio.get_running_loop()

    def step_of(run: int) -> Callable[[], Any]:
        def meet() -> Any:
            loop.call_soon_threadsafe(first_in[run].set)
            return autodiff.all_reduce("sum", np.array(1.0 + run))

        async def step() -> Any:
            if my_id() != run:
                await first_in[0].wait()
                await first_in[1].wait()
            return await me().run_on_device(meet)

        return step

    results = await asyncio.gather(pair.run(step_of(0)), pair.run(step_of(1)))

    assert [[float(part) for part in result.values] for result in results] == [[2, 2], [4, 4]]
    for name in ("cpu:0", "cpu:1"):
        assert lane_table().lane(name).statistics().running == 0


@pytest.mark.asyncio
async def test_two_losses_of_one_replica_never_mix_their_collectives(
    gang: ar.MirroredStrategy,
) -> None:
    def losses_of(kind: float) -> list[float]:
        return [float(autodiff.all_reduce("sum", np.array(kind + i))) for i in range(20)]

    async def step() -> Any:
        ctx = me()
        return await asyncio.gather(
            *(ctx.run_on_device(losses_of, 100.0 * kind) for kind in range(3))
        )

    result = await gang.run(step)

    count = gang.num_replicas_in_sync
    for kind in range(3):
        for i in range(20):
            assert set(result[kind][i].values) == {count * (100.0 * kind + i)}


@pytest.mark.asyncio
async def test_the_event_loop_is_not_blocked(pair: ar.MirroredStrategy) -> None:
    async def step() -> Any:
        return autodiff.all_reduce("sum", np.ones(2))

    with pytest.raises(ContextError, match=r"all_reduce was called on the event loop"):
        await pair.run(step)


def test_in_scope_a_collective_is_an_error() -> None:
    strategy = mirrored(2)
    with strategy.scope(), pytest.raises(ContextError, match="collective of the replicas"):
        autodiff.all_gather(np.ones(2), 0)


@pytest.mark.parametrize("op", ["min", "MAX"])
def test_extremes_are_not_linear(op: str) -> None:
    with pytest.raises(ValueError, match=f"SUM or MEAN, got {op.upper()}"):
        autodiff.all_reduce(op, np.ones(2))


def test_an_unknown_source_is_refused() -> None:
    with pytest.raises(ValueError, match="source=1, but replicas are 0 to 0"):
        autodiff.broadcast(np.ones(2), source=1)


def test_jax_cannot_compile_a_collective() -> None:
    jax = pytest.importorskip("jax")

    with pytest.raises(TypeError, match=r"all_reduce was reached by jax\.jit"):
        jax.jit(lambda x: autodiff.all_reduce("sum", x))(1.0)


@pytest.mark.asyncio
@pytest.mark.parametrize(("value", "axis"), [(np.float64(1.0), 0), (np.ones(2), 1)])
async def test_an_axis_that_is_missing_is_told_before_replicas_meet(
    pair: ar.MirroredStrategy, value: Any, axis: int
) -> None:
    def step() -> None:
        if my_id() == 0:
            autodiff.reduce_scatter("sum", value, axis)  # the other one never comes

    with pytest.raises(ValueError, match=r"reduce_scatter.*axis"):
        await pair.run(step)
