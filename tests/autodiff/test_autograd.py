"""The autograd adapter, and why it numbers autograd's traces."""

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
from autograd import tracer

import aioreplica as ar
from aioreplica.autodiff import find_adapter, value_and_grad

NUM_THREADS = 4


def in_threads(fns: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guarded(fn: Callable[[], None]) -> None:
        try:
            fn()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(fn,)) for fn in fns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []


def crossing(other_has_begun: threading.Event, other_may_end: threading.Event) -> float:
    """Take d/dx (x * d/dy (x * y)) at 3, which is 6, in a trace that outlives another thread's.

    A second thread begins a trace first and ends it while this one is open, which is where a
    counter of depths goes wrong.
    """
    ended = threading.Event()

    def elsewhere() -> None:
        def traced(x: Any) -> Any:
            other_has_begun.set()
            assert other_may_end.wait(10)
            return x * 1.0

        autograd.grad(traced)(1.0)
        ended.set()

    def outer(x: Any) -> Any:
        other_may_end.set()
        assert ended.wait(10)
        return x * autograd.grad(lambda y: x * y)(1.0)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert other_has_begun.wait(10)
    slope = float(autograd.grad(outer)(3.0))
    thread.join(10)
    return slope


def test_autograd_alone_confuses_traces_of_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracer, "trace_stack", tracer.TraceStack())  # as autograd makes it

    assert crossing(threading.Event(), threading.Event()) != 6.0


def test_unique_numbers_keep_them_apart() -> None:
    find_adapter("autograd")

    assert crossing(threading.Event(), threading.Event()) == 6.0


def nested(arrays: Any) -> Any:
    """A loss that holds a gradient of a gradient."""
    x, y = arrays

    def inner(pair: Any) -> Any:
        _, (slope,) = value_and_grad(lambda z: anp.sum(anp.sin(z[0] * pair[0]) * y))([pair[0]])
        return anp.sum(slope * slope)

    value, (curve,) = value_and_grad(inner)([x])
    return value + anp.sum(anp.tanh(curve) * x) + autograd.grad(lambda t: t * x[0])(2.0)


@pytest.mark.xslow
def test_nested_gradients_on_four_threads_are_those_of_one_thread() -> None:
    inputs = [[np.array([0.3 + i, 0.7]), np.array([1.1, -0.2 * i])] for i in range(NUM_THREADS)]
    expected = [value_and_grad(nested)(pair) for pair in inputs]
    start = threading.Barrier(NUM_THREADS)
    rounds = 100
    done = [0] * NUM_THREADS

    def work(i: int) -> None:
        start.wait(10)
        for _ in range(rounds):
            value, gradients = value_and_grad(nested)(inputs[i])
            assert value == expected[i][0]
            for gradient, right in zip(gradients, expected[i][1], strict=True):
                np.testing.assert_array_equal(gradient, right)
            done[i] += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads([lambda i=i: work(i) for i in range(NUM_THREADS)])  # type: ignore[misc]
    finally:
        sys.setswitchinterval(before)

    assert done == [rounds] * NUM_THREADS


@pytest.mark.asyncio
async def test_replicas_differentiate_at_the_same_time(gang: ar.MirroredStrategy) -> None:
    count = gang.num_replicas_in_sync
    together = threading.Barrier(count)

    def loss(arrays: Any) -> Any:
        together.wait(10)  # breaks unless all replicas are inside at once
        return anp.sum(anp.sin(arrays[0]))

    async def step(x: Any) -> Any:
        context = ar.get_replica_context()
        assert context is not None
        return await context.run_on_device(value_and_grad(loss), [x])

    inputs = [np.array([0.3 + i]) for i in range(count)]
    _, gradients = await gang.run(step, args=(ar.PerReplica(inputs),))

    for i, x in enumerate(inputs):
        np.testing.assert_array_equal(gradients[0][i], np.cos(x))


def test_gradients_come_in_order_of_watching() -> None:
    def fn(watch: Any) -> Any:
        a = watch(np.float64(2.0))
        b = watch(np.float64(5.0))
        return b * b * a

    value, gradients = find_adapter("autograd").differentiate(fn)

    assert value == 50.0
    assert [float(gradient) for gradient in gradients] == [25.0, 20.0]


def test_the_loop_is_free_while_a_gradient_is_taken() -> None:
    async def main() -> list[str]:
        order: list[str] = []
        ticked = threading.Event()

        def loss(arrays: Any) -> Any:
            order.append("tick" if ticked.wait(timeout=10) else "stuck")
            return arrays[0]

        asyncio.get_running_loop().call_soon(ticked.set)
        await ar.run_on_host(value_and_grad(loss), [np.float64(1.0)])
        return order

    assert asyncio.run(main()) == ["tick"]
