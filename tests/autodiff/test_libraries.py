"""What holds for the adapter of every library."""

import threading
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.autodiff import differentiate_variables, find_adapter, value_and_grad
from tests.autodiff.libraries import NAMES, Library, library


@pytest.fixture(params=NAMES)
def lib(request: pytest.FixtureRequest) -> Library:
    return library(request.param)


def test_values_and_gradients_of_numpy_arrays_are_numpys(lib: Library) -> None:
    x = np.array([1.0, 2.0])
    x.flags.writeable = False

    value, (gradient,) = value_and_grad(lambda xs: lib.sum(xs[0] ** 3), lib.name)([x])

    assert isinstance(value, (float, np.floating))
    assert value == 9.0
    assert type(gradient) is np.ndarray
    assert gradient.dtype == np.float64
    np.testing.assert_array_equal(gradient, [3.0, 12.0])


def test_gradients_of_its_own_arrays_are_its_own(lib: Library) -> None:
    x = lib.array([1.0, 2.0])

    value, (gradient,) = value_and_grad(lambda xs: lib.sum(xs[0] ** 3), lib.name)([x])

    assert type(gradient) is type(x)
    assert gradient.tolist() == [3.0, 12.0]
    assert float(value) == 9.0
    assert not getattr(value, "requires_grad", False)
    assert not getattr(gradient, "requires_grad", False)


def test_a_call_inside_a_call_is_a_higher_derivative(lib: Library) -> None:
    def curvature(xs: Any) -> Any:
        def slope(ys: Any) -> Any:
            return value_and_grad(lambda zs: zs[0] ** 4, lib.name)(ys)[1][0]

        return value_and_grad(slope, lib.name)(xs)[1][0]

    value, (gradient,) = value_and_grad(curvature, lib.name)([np.array(2.0)])

    assert (float(value), float(gradient)) == (48.0, 48.0)


def test_what_the_inner_call_reads_from_outside_counts(lib: Library) -> None:
    def outer(xs: Any) -> Any:
        value, (slope,) = value_and_grad(lambda ys: ys[0] * xs[0] ** 2, lib.name)([np.array(5.0)])
        return value * slope

    value, (gradient,) = value_and_grad(outer, lib.name)([np.array(2.0)])

    assert (float(value), float(gradient)) == (80.0, 160.0)


def test_an_array_without_effect_has_gradient_zero(lib: Library) -> None:
    def fn(xs: Any) -> Any:
        return lib.sum(xs[0])

    _, gradients = value_and_grad(fn, lib.name)([np.ones(2), np.ones(3)])
    value, constants = value_and_grad(lambda _: 2.0, lib.name)([np.ones(2)])

    np.testing.assert_array_equal(gradients[1], np.zeros(3))
    np.testing.assert_array_equal(constants[0], np.zeros(2))
    assert value == 2.0


def test_totals_are_differentiated_and_weights_are_not(lib: Library) -> None:
    def fn(xs: Any) -> Any:
        return ar.Weighted(lib.sum(xs[0] * xs[0]), 4)

    value, (gradient,) = value_and_grad(fn, lib.name)([np.array([3.0])])

    assert (float(value.total), value.weight) == (9.0, 4)
    assert gradient.tolist() == [6.0]


def test_a_loss_may_read_variables(lib: Library) -> None:
    w, b = ar.Variable([1.0, 2.0], name="w"), ar.Variable(3.0, name="b")

    value, pairs = differentiate_variables(lambda: lib.sum(w.value**2) * b.value, backend=lib.name)

    assert float(value) == 15.0
    assert [variable.name for _, variable in pairs] == ["w", "b"]
    assert [type(gradient) for gradient, _ in pairs] == [np.ndarray] * 2
    np.testing.assert_array_equal(pairs[0][0], [6.0, 12.0])
    assert pairs[1][0] == 5.0


def test_integers_have_no_gradient(lib: Library) -> None:
    with pytest.raises(TypeError, match="floating-point array, got dtype"):
        value_and_grad(lambda xs: lib.sum(xs[0]), lib.name)([np.array([1, 2])])


def test_a_loss_is_a_scalar(lib: Library) -> None:
    with pytest.raises(ValueError, match=r"scalar, got shape \(2,\)"):
        value_and_grad(lambda xs: xs[0] * 2.0, lib.name)([np.ones(2)])


def test_a_loss_is_a_number(lib: Library) -> None:
    with pytest.raises(TypeError, match="returns a real number"):
        value_and_grad(lambda _: "nine", lib.name)([np.ones(2)])


@pytest.mark.slow
def test_nested_gradients_on_four_threads_are_those_of_one(lib: Library) -> None:
    def loss(xs: Any) -> Any:
        value, (slope,) = value_and_grad(lambda ys: lib.sum(lib.sin(ys[0] * xs[0])), lib.name)(xs)
        return value + lib.sum(slope * slope)

    inputs = [np.array([0.3 + i, 0.7]) for i in range(4)]
    expected = [value_and_grad(loss, lib.name)([x])[1][0] for x in inputs]
    start, wrong = threading.Barrier(4), []

    def work(i: int) -> None:
        start.wait(10)
        for _ in range(25):
            gradient = value_and_grad(loss, lib.name)([inputs[i]])[1][0]
            if not np.array_equal(gradient, expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert wrong == []


def test_torch_does_not_heed_the_threads_grad_mode() -> None:
    torch = pytest.importorskip("torch")
    find_adapter("torch")

    with torch.no_grad():
        _, (gradient,) = value_and_grad(lambda xs: xs[0] ** 2, "torch")([np.array(3.0)])

    assert gradient == 6.0


def test_torch_gradients_go_on_to_a_graph_outside() -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor(3.0, requires_grad=True)

    _, (gradient,) = value_and_grad(lambda xs: xs[0] ** 3, "torch")([x])
    gradient.backward()

    assert float(x.grad) == 18.0


def test_jax_may_compile_what_gets_variables_as_arguments() -> None:
    jax = pytest.importorskip("jax")
    w = ar.Variable(np.float32(3.0))
    squared = jax.jit(lambda value: value**2)

    value, [(gradient, _)] = differentiate_variables(lambda: squared(w.value), backend="jax")

    assert (value, gradient) == (9.0, 6.0)


def test_jax_may_not_read_variables_in_what_it_compiles() -> None:
    jax = pytest.importorskip("jax")
    w = ar.Variable(np.float32(3.0))

    with pytest.raises(TypeError, match=r"inside a function compiled by jax\.jit"):
        differentiate_variables(jax.jit(lambda: w.value**2), backend="jax")


def test_jax_may_differentiate_and_compile_around_it() -> None:
    jax = pytest.importorskip("jax")

    def slope(x: Any) -> Any:
        return value_and_grad(lambda xs: xs[0] ** 3, "jax")([x])[1][0]

    assert float(jax.grad(slope)(3.0)) == 18.0
    assert float(jax.jit(slope)(3.0)) == 27.0


@pytest.mark.asyncio
async def test_the_optimizer_differentiates_with_any_library(
    lib: Library, pair: ar.MirroredStrategy
) -> None:
    with pair.scope():
        w, adam = ar.Variable([3.0, 1.0], name="w"), ar.optimizers.Adam(0.5)

    async def step() -> Any:
        return await adam.minimize(lambda: lib.sum((w.value - 1.0) ** 2), backend=lib.name)

    losses = [float((await pair.run(step)).values[0]) for _ in range(5)]

    assert losses[0] == 4.0
    assert losses == sorted(losses, reverse=True)
