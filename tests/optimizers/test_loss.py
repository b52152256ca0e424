"""compute_gradients: where the loss runs, what it may be, which variables count."""

import threading
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest

import aioreplica as ar
from aioreplica.optimizers import Adam


@pytest.mark.asyncio
async def test_the_loss_runs_on_the_device_of_its_replica(gang: ar.MirroredStrategy) -> None:
    with gang.scope():
        w, adam = ar.Variable(1.0), Adam()

    async def step() -> Any:
        threads = []

        def loss() -> Any:
            threads.append(threading.current_thread().name)
            return w.value * 1.0

        await adam.compute_gradients(loss)
        return threads[0]

    threads = await gang.run(step)

    assert list(threads) == [f"aioreplica {name}" for name in gang._runtime.device_names]


@pytest.mark.asyncio
async def test_outside_replicas_it_runs_on_the_host() -> None:
    w, threads = ar.Variable(1.0), []

    await Adam().compute_gradients(
        lambda: threads.append(threading.current_thread().name) or w.value * 1.0
    )

    assert threads == ["aioreplica host"]


@pytest.mark.asyncio
async def test_gradients_of_a_weighted_loss_are_weighted(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        w, unread, adam = ar.Variable([1.0, 2.0]), ar.Variable(0.0), Adam()

    async def step(x: Any) -> Any:
        def loss() -> Any:
            return ar.Weighted(anp.sum(anp.dot(x, w.value)), len(x))

        (first, _), (none, _) = await adam.compute_gradients(loss, [w, unread])
        return first, none

    x = [np.array([[1.0, 2.0], [3.0, 4.0]]), np.zeros((0, 2))]
    gradient, none = await pair.run(step, args=(ar.PerReplica(x),))

    assert none is None
    assert list(gradient.weight) == [2, 0]
    np.testing.assert_array_equal(gradient.total[0], [4.0, 6.0])
    np.testing.assert_array_equal(gradient.total[1], [0.0, 0.0])


@pytest.mark.asyncio
async def test_variables_come_in_order_of_creation(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        a, b, adam = ar.Variable(1.0, name="a"), ar.Variable(2.0, name="b"), Adam()

    async def step(flip: Any) -> Any:
        def loss() -> Any:
            first, second = (b, a) if flip else (a, b)
            return first.value + 2 * second.value

        pairs = await adam.compute_gradients(loss)
        await adam.apply_gradients(pairs)
        return [variable.name for _, variable in pairs]

    names = await pair.run(step, args=(ar.PerReplica([False, True]),))

    assert [list(column) for column in names] == [["a", "a"], ["b", "b"]]


@pytest.mark.asyncio
@pytest.mark.parametrize("var_list", [None, [], ()])
async def test_no_variables_is_an_error(var_list: Any) -> None:
    with pytest.raises(ValueError, match="no variables"):
        await Adam().compute_gradients(lambda: 1.0, var_list)


async def asynchronous() -> float:
    return 1.0


@pytest.mark.asyncio
@pytest.mark.parametrize("loss", [1.0, None, asynchronous])
async def test_the_loss_must_be_a_plain_function(loss: Any) -> None:
    with pytest.raises(TypeError, match="plain function"):
        await Adam().compute_gradients(loss)


@pytest.mark.asyncio
@pytest.mark.parametrize("var_list", [ar.Variable(1.0), [1.0], [np.ones(1)], "w"])
async def test_var_list_must_hold_variables(var_list: Any) -> None:
    with pytest.raises(TypeError, match="variables"):
        await Adam().compute_gradients(lambda: 1.0, var_list)


@pytest.mark.asyncio
async def test_an_error_of_the_loss_is_the_error_of_the_run(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        adam = Adam()

    def loss() -> Any:
        raise KeyError("no such label")

    async def step() -> Any:
        await adam.minimize(loss)

    with pytest.raises(KeyError, match="no such label"):
        await pair.run(step)


@pytest.mark.asyncio
@pytest.mark.parametrize("scale", [None, 8.0])
async def test_a_loss_must_be_a_number_or_weighted_and_scalar(scale: Any) -> None:
    w, adam = ar.Variable([1.0, 2.0]), Adam(loss_scale=scale)

    with pytest.raises(TypeError, match=r"real number or ar\.Weighted.*None"):
        await adam.minimize(lambda: None, [w])
    with pytest.raises(ValueError, match=r"returns a scalar, got shape \(2,\)"):
        await adam.minimize(lambda: w.value * 2.0)
    assert w.version == 0
