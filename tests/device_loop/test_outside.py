"""outside_compilation: functions that run on the host while a device program waits."""

import asyncio
import gc
import threading
import traceback
import weakref
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest

import aioreplica as ar
from aioreplica.device_loop import current_cluster
from aioreplica.errors import ContextError, ReplicaCancelledError
from aioreplica.optimizers import Adam
from tests.replica.gated import me, my_id, spawn
from tests.sequencer import idle

pytestmark = [pytest.mark.usefixtures("no_task_left"), pytest.mark.asyncio]

outside = ar.outside_compilation
WORD: ContextVar[str] = ContextVar("word", default="none")


async def test_plain_and_async_functions_run_on_the_event_loop(strategy: ar.Strategy) -> None:
    threads: set[int] = set()

    def plain(x: int, *, y: int) -> int:
        threads.add(threading.get_ident())
        return x + y

    async def later(x: int) -> int:
        await asyncio.sleep(0)
        threads.add(threading.get_ident())
        return 10 * x

    def step(x: int) -> Any:
        device = threading.get_ident()
        result = outside(later, outside(plain, x, y=1))
        assert threading.get_ident() == device
        return result

    results = await strategy.run(step, args=(2,))

    assert set(strategy.local_results(results)) == {30}
    assert threads == {threading.get_ident()}


async def test_it_sees_the_context_and_the_replica(strategy: ar.Strategy) -> None:
    with strategy.scope():
        v = ar.Variable(1.0, aggregation="mean")

    def look() -> Any:
        return WORD.get(), my_id(), me().device, float(v.value), ar.get_strategy() is strategy

    def step() -> Any:
        WORD.set(f"from {my_id()}")
        v.blocking.assign(7.0)
        return [outside(look)]

    with strategy.scope():
        results = await strategy.run(lambda: (step(),))
    for i in range(strategy.num_replicas_in_sync):
        word, own, device, value, same = (strategy.local_results(leaf)[i] for leaf in results[0][0])
        assert (word, own, value, same) == (f"from {i}", i, 7.0, True)
        assert device is None or device == strategy._runtime.replica_devices[i]


async def test_device_ops_run_on_the_host_there(pair: ar.MirroredStrategy) -> None:
    @ar.device_op
    def where() -> str:
        return threading.current_thread().name

    async def call() -> list[str]:
        return [await where(), await ar.run_on_host(lambda: threading.current_thread().name)]

    names = await pair.run(lambda: outside(call))

    assert all("host" in leaf for part in names for leaf in part.values)


async def test_clusters_are_named_in_order_and_recorded(pair: ar.MirroredStrategy) -> None:
    def step(ctx: ar.MultiStepContext, x: int) -> None:
        names = [outside(current_cluster) for _ in range(3)]
        ctx.set_non_tensor_output("names", names)
        assert current_cluster() is None

    result = await pair.run_steps(step, iter([1, 2]), 2)

    assert result.non_tensor_outputs["names"].values == (["0", "1", "2"],) * 2
    seen = [(e.step, e.name) for e in pair.events.events("outside") if e.replica_id == 1]
    assert seen == [(k, name) for k in range(2) for name in "012"]


async def test_outside_a_device_program_it_just_calls(strategy: ar.Strategy) -> None:
    async def later() -> str:
        return "later"

    async def step() -> Any:
        assert outside(lambda: outside(max, 1, 2)) == 2
        assert await me().run_on_device(lambda: outside(threading.get_ident)) != 0
        return await outside(later)

    assert set(strategy.local_results(await strategy.run(step))) == {"later"}
    assert outside(max, 1, 2) == 2
    with pytest.raises(TypeError, match="needs a function"):
        outside(3)  # type: ignore[arg-type]


async def test_host_exceptions_are_raised_with_both_tracebacks(gang: ar.MirroredStrategy) -> None:
    def on_the_host() -> None:
        raise KeyError("mine")

    def on_the_device() -> None:
        outside(on_the_host)

    seen: list[str] = []

    def step() -> None:
        try:
            on_the_device()
        except KeyError as error:
            seen.append("".join(traceback.format_exception(error)))
            raise

    with pytest.raises(KeyError, match="mine"):
        await gang.run(step)

    text = seen[0]
    assert text.index("in on_the_device") < text.index("in on_the_host")
    assert f"Raised on the host in outside cluster '0', called at {__file__}" in text


class Odd(BaseException):
    """Neither an Exception nor one of those that end the interpreter."""


@pytest.mark.parametrize("error", [asyncio.CancelledError("mine"), GeneratorExit("mine"), Odd()])
async def test_a_base_exception_is_raised_by_the_run_alone(
    pair: ar.MirroredStrategy, error: BaseException
) -> None:
    reported: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: reported.append(what))

    def fail() -> None:
        raise error

    is_cancelled = isinstance(error, asyncio.CancelledError)  # which the run did not send
    with pytest.raises(ReplicaCancelledError if is_cancelled else type(error)) as caught:
        await pair.run(lambda: outside(fail))

    assert (caught.value.__cause__ if is_cancelled else caught.value) is error
    assert reported == []


async def test_an_async_functions_exception_can_be_caught(pair: ar.MirroredStrategy) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("later")

    def step() -> str:
        try:
            outside(fail)
        except ValueError as error:
            return str(error)
        return "nothing"

    assert (await pair.run(step)).values == ("later", "later")


async def test_nothing_of_a_call_is_kept_after_it(solo: ar.OneDeviceStrategy) -> None:
    class Argument:
        pass

    def step() -> bool:
        argument = Argument()
        kept = weakref.ref(argument)
        outside(lambda _: None, argument)
        del argument
        gc.collect()
        return kept() is None

    assert solo.local_results(await solo.run(step)) == (True,)


async def test_nesting_is_refused(pair: ar.MirroredStrategy) -> None:
    async def inner() -> None:
        with pytest.raises(ContextError, match="inside outside cluster '0'"):
            outside(max, 1, 2)
        with pytest.raises(ContextError, match="cross-replica method"):
            await pair.run_steps(lambda ctx, x: None, iter([1]))

    await pair.run(lambda: outside(inner))


async def test_replica_calls_are_refused_there(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        v, adam = ar.Variable(1.0, aggregation="mean"), Adam(0.1)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: me().all_reduce("sum", 1), r"ctx\.blocking\.all_reduce in the device program"),
        (lambda: me().blocking.all_reduce("sum", 1), "was called in outside_compilation"),
        (lambda: me().run_on_device(len, []), r"outside_compilation.*ar\.run_on_host\(fn\)"),
        (lambda: v.assign(2.0), r"variable\.blocking\.assign"),
        (lambda: v.blocking.assign(2.0), "outside_compilation"),
        (lambda: adam.apply_gradients([(1.0, v)]), r"optimizer\.blocking\.apply_gradients"),
        (lambda: adam.blocking.apply_gradients([(1.0, v)]), "outside_compilation"),
    ]

    def look() -> None:
        for call, text in calls:
            with pytest.raises(ContextError, match=text):
                call()

    await pair.run(lambda: outside(look))


async def test_a_foreign_thread_is_refused(pair: ar.MirroredStrategy) -> None:
    texts: list[str] = []

    def call() -> None:
        with pytest.raises(ContextError) as caught:
            outside(max, 1, 2)
        texts.append(str(caught.value))

    def step() -> None:
        thread = threading.Thread(target=copy_context().run, args=(call,))
        thread.start()
        thread.join()

    await pair.run(step)

    assert len(texts) == 2
    assert all("ar.outside_compilation was called on another thread" in text for text in texts)


async def test_cancelling_ends_the_awaits_on_the_host(pair: ar.MirroredStrategy) -> None:
    both_began = asyncio.Barrier(3)
    order: list[str] = []

    async def forever() -> None:
        await both_began.wait()
        try:
            await asyncio.Event().wait()
        finally:
            order.append("host")

    def step() -> None:
        try:
            outside(forever)
        finally:
            order.append("device")

    running = spawn(pair.run(step))
    await both_began.wait()
    await idle()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    assert sorted(order) == ["device", "device", "host", "host"]
    assert order[0] == "host"


async def test_a_failing_replica_ends_the_awaits_on_the_host(pair: ar.MirroredStrategy) -> None:
    began = asyncio.Event()
    ended: list[int] = []

    async def forever() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(my_id())

    def step() -> None:
        if my_id() == 0:
            outside(began.wait)
            raise ValueError("mine")
        outside(forever)

    with pytest.raises(ValueError, match="mine"):
        await pair.run(step)

    assert ended == [1]


# --- gradients ------------------------------------------------------------------------------------


def clusters_of(strategy: ar.Strategy) -> list[str]:
    return [e.name for e in strategy.events.events("outside") if e.replica_id == 0]


def square(x: Any) -> Any:
    return anp.sum(x * x) * 3.0


async def square_later(x: Any) -> Any:
    await asyncio.sleep(0)
    return square(x)


@pytest.mark.parametrize("fn", [square, square_later], ids=["sync", "async"])
async def test_the_gradient_runs_outside_too(solo: ar.OneDeviceStrategy, fn: Any) -> None:
    x = np.array([1.0, 2.0])

    def step() -> Any:
        loss = ar.autodiff.value_and_grad(lambda a: 2.0 * outside(fn, a[0]))
        return loss([x])

    value, [gradient] = await solo.run(step)

    assert value[0] == 30.0
    np.testing.assert_array_equal(gradient[0], 12.0 * x)
    assert clusters_of(solo) == ["0", "0.uid"]


async def test_the_function_runs_once_for_value_and_gradient(
    solo: ar.OneDeviceStrategy,
) -> None:
    calls: list[int] = []

    def counted(x: Any) -> Any:
        calls.append(threading.get_ident())
        return square(x)

    await solo.run(lambda: autograd.grad(lambda x: outside(counted, x))(np.ones(2)))

    assert calls == [threading.get_ident()]


async def test_one_gradient_call_shares_its_uid(solo: ar.OneDeviceStrategy) -> None:
    def both(x: Any) -> Any:
        return outside(square, x) + outside(square, 2.0 * x)

    def step() -> Any:
        return [autograd.grad(both)(1.0), autograd.grad(both)(1.0)]

    first, second = await solo.run(step)

    assert first[0] == second[0] == 30.0
    names = clusters_of(solo)
    assert names[:2] == ["0", "1"]
    assert sorted(names[2:4]) == ["0.uid", "1.uid"]
    assert names[4:6] == ["2", "3"]
    assert sorted(names[6:]) == ["2.uid_1", "3.uid_1"]


async def test_a_gradient_of_a_gradient_appends_its_own(solo: ar.OneDeviceStrategy) -> None:
    def cube(x: Any) -> Any:
        return x**3

    def step() -> Any:
        return autograd.grad(autograd.grad(lambda x: outside(cube, x)))(2.0)

    assert (await solo.run(step)).values == (12.0,)
    assert clusters_of(solo) == ["0", "0.uid", "0.uid.uid_1"]


async def test_an_outer_pass_through_value_and_gradient_shares_one_uid(
    solo: ar.OneDeviceStrategy,
) -> None:
    def both(x: Any) -> Any:
        value, vjp = autograd.make_vjp(lambda y: outside(lambda z: z**3, y))(x)[::-1]
        return value + vjp(1.0)

    assert (await solo.run(lambda: autograd.grad(both)(2.0))).values == (24.0,)
    assert clusters_of(solo) == ["0", "0.uid", "0.uid.uid_1", "0.uid_1"]


async def test_several_arguments_constants_and_trees(solo: ar.OneDeviceStrategy) -> None:
    def mixed(tree: Any, scale: float, *, label: str) -> Any:
        assert label == "kept"
        return anp.sum(tree["a"] * tree["b"][0]) * scale

    def loss(arrays: Any) -> Any:
        return outside(mixed, {"a": arrays[0], "b": [arrays[1], 7]}, 2.0, label="kept")

    def step() -> Any:
        return ar.autodiff.value_and_grad(loss)([np.array([1.0, 2.0]), np.array([3.0, 4.0])])

    value, gradients = await solo.run(step)

    assert value[0] == 22.0
    np.testing.assert_array_equal(gradients[0][0], [6.0, 8.0])
    np.testing.assert_array_equal(gradients[1][0], [2.0, 4.0])


async def test_a_result_that_is_not_a_number_needs_no_gradient(solo: ar.OneDeviceStrategy) -> None:
    logged: list[float] = []

    def log(x: Any) -> None:
        logged.append(autograd.tracer.getval(x))

    def loss(x: Any) -> Any:
        outside(log, x)
        return x * x

    assert (await solo.run(lambda: autograd.grad(loss)(3.0))).values == (6.0,)
    assert logged == [3.0]


async def test_a_result_without_the_argument_has_gradient_zero(
    solo: ar.OneDeviceStrategy,
) -> None:
    def step() -> Any:
        return autograd.grad(lambda x: outside(lambda y: 4.0, x) + x)(3.0)

    assert (await solo.run(step)).values == (1.0,)


async def test_training_with_a_loss_on_the_host(gang: ar.MirroredStrategy) -> None:
    with gang.scope():
        v, adam = ar.Variable(np.ones(2)), Adam(0.1)

    def step(ctx: ar.MultiStepContext, x: Any) -> None:
        loss = adam.blocking.minimize(lambda: outside(square, v.value - x))
        ctx.set_last_step_output("loss", loss, "mean")

    result = await gang.run_steps(step, iter([np.zeros(2)] * 20), 20)

    assert result.last_step_outputs["loss"] < 6.0
    assert int(adam.iterations.value) == 20
    assert {"0", "0.uid"} == set(clusters_of(gang))


class Later:
    """A callable object whose calls have to be awaited."""

    async def __call__(self, x: Any) -> Any:
        await asyncio.sleep(0)
        return x**3


async def cube_later(x: Any) -> Any:
    return await Later()(x)


@pytest.mark.parametrize(
    "fn", [cube_later, Later(), lambda x: cube_later(x)], ids=["async", "object", "lambda"]
)
async def test_whatever_has_to_be_awaited_is_differentiated(
    solo: ar.OneDeviceStrategy, fn: Any
) -> None:
    def step() -> Any:
        once = autograd.grad(lambda x: outside(fn, x))
        return float(once(2.0)), float(autograd.grad(once)(2.0))

    first, second = await solo.run(step)

    assert (first.values, second.values) == ((12.0,), (12.0,))


async def test_every_part_of_a_result_has_its_gradient(solo: ar.OneDeviceStrategy) -> None:
    def parts(x: Any) -> Any:
        return {"a": 2.0 * x, "rest": (x**3, None, "text", 5)}

    def loss(x: Any) -> Any:
        made = outside(parts, x)
        assert made["rest"][1:] == (None, "text", 5)
        return made["a"] * made["rest"][0]  # 2 x^4

    def step() -> Any:
        return float(autograd.grad(loss)(2.0)), float(autograd.grad(autograd.grad(loss))(2.0))

    first, second = await solo.run(step)

    assert (first.values, second.values) == ((64.0,), (96.0,))
    assert clusters_of(solo)[:2] == ["0", "0.uid"]


async def test_a_part_that_is_not_used_has_no_gradient(solo: ar.OneDeviceStrategy) -> None:
    def step() -> Any:
        return float(autograd.grad(lambda x: outside(lambda y: (y * y, y**3), x)[1])(2.0))

    assert (await solo.run(step)).values == (12.0,)
