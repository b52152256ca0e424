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


def test_values_that_the_inner_call_reads_from_outside_count(lib: Library) -> None:
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


def test_torch_ignores_the_grad_mode_of_the_thread() -> None:
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


def test_jax_may_compile_functions_of_variable_values() -> None:
    jax = pytest.importorskip("jax")
    w = ar.Variable(np.float32(3.0))
    squared = jax.jit(lambda value: value**2)

    value, [(gradient, _)] = differentiate_variables(lambda: squared(w.value), backend="jax")

    assert (value, gradient) == (9.0, 6.0)


def test_variables_cannot_be_read_inside_jax_jit() -> None:
    jax = pytest.importorskip("jax")
    w = ar.Variable(np.float32(3.0))

    for chosen in (None, [ar.Variable(1.0)]):
        with pytest.raises(TypeError, match=r"inside a function compiled by jax\.jit"):
            differentiate_variables(jax.jit(lambda: w.value**2), chosen, backend="jax")


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


def kind_of(lib: Library) -> type:
    """Return the type of arrays that carry no gradient in a loss."""
    return np.ndarray if lib.name == "autograd" else type(lib.array([1.0]))


def test_variables_that_are_not_differentiated_are_the_librarys_arrays(lib: Library) -> None:
    w, left_out = ar.Variable([1.0, 2.0]), ar.Variable([3.0, 4.0])
    fixed, counter = ar.Variable([5.0, 6.0], trainable=False), ar.Variable([1, 2])
    seen = []

    def loss() -> Any:
        seen.extend([left_out.value, fixed.value, counter.value, left_out.value])
        return lib.sum(w.value * left_out.value * fixed.value * counter.value)

    value, pairs = differentiate_variables(loss, [w], lib.name)

    assert float(value) == 15.0 + 96.0
    assert [type(array) for array in seen] == [kind_of(lib)] * 4
    assert not any(getattr(array, "requires_grad", False) for array in seen)
    assert seen[0] is seen[3]
    assert [gradient.tolist() for gradient, _ in pairs] == [[15.0, 48.0]]


def test_constants_of_a_loss_inside_a_loss_keep_the_outer_trace(lib: Library) -> None:
    w, b = ar.Variable(3.0), ar.Variable(2.0)

    def slope() -> Any:
        return differentiate_variables(lambda: w.value**2 * b.value**2, [w], lib.name)[1][0][0]

    value, [(gradient, _)] = differentiate_variables(slope, [b], lib.name)

    assert (float(value), float(gradient)) == (24.0, 24.0)


def test_aux_goes_with_the_value_and_has_no_trace(lib: Library) -> None:
    def fn(xs: Any) -> Any:
        hidden = lib.sin(xs[0])
        return lib.sum(hidden), {
            "hidden": hidden,
            "name": "sine",
            "parts": [ar.Weighted(hidden, 2)],
        }

    (value, aux), (gradient,) = value_and_grad(fn, lib.name, has_aux=True)([np.array([0.5])])

    np.testing.assert_allclose(value, np.sin(0.5), rtol=1e-6)
    np.testing.assert_allclose(gradient, np.cos([0.5]), rtol=1e-6)
    assert type(aux["hidden"]) is kind_of(lib)
    assert not getattr(aux["hidden"], "requires_grad", False)
    np.testing.assert_allclose(aux["hidden"], np.sin([0.5]), rtol=1e-6)
    np.testing.assert_allclose(aux["parts"][0].total, np.sin([0.5]), rtol=1e-6)
    assert aux["name"] == "sine"


def test_aux_of_an_inner_call_is_part_of_the_outer_one(lib: Library) -> None:
    def outer(xs: Any) -> Any:
        def fn(ys: Any) -> Any:
            return ys[0] ** 2, (ys[0] * xs[0], xs[0] ** 2)  # one of both traces, one of the outer

        (_, aux), _ = value_and_grad(fn, lib.name, has_aux=True)([np.array(5.0)])
        return aux[0] + aux[1]

    value, (gradient,) = value_and_grad(outer, lib.name)([np.array(2.0)])

    assert (float(value), float(gradient)) == (14.0, 9.0)


def test_aux_needs_a_pair(lib: Library) -> None:
    with pytest.raises(TypeError, match=r"With has_aux=True a loss returns \(loss, aux\)"):
        value_and_grad(lambda xs: xs[0], lib.name, has_aux=True)([np.array(1.0)])


def test_a_loss_that_reads_variables_may_have_aux(lib: Library) -> None:
    w = ar.Variable(3.0)

    (value, aux), [(gradient, _)] = differentiate_variables(
        lambda: (w.value**2, w.value + 1.0), backend=lib.name, has_aux=True
    )

    assert (float(value), float(aux), float(gradient)) == (9.0, 4.0, 6.0)


# ---- lookups -----------------------------------------------------------------------------


def test_a_lookup_has_a_sparse_gradient(lib: Library) -> None:
    table = ar.Variable(np.arange(8.0).reshape(4, 2), name="table")
    ids = np.array([[3, 0], [3, 1]])

    def loss() -> Any:
        mine = ids.copy()
        rows = ar.autodiff.embedding_lookup(table, mine)
        mine[:] = 2  # the gradient is that of the rows that were read
        assert tuple(rows.shape) == (2, 2, 2)
        return lib.sum(rows**2)

    value, [(gradient, variable)] = differentiate_variables(loss, [table], lib.name)

    assert variable is table
    assert float(value) == float((table.value[ids] ** 2).sum())
    assert type(gradient) is ar.IndexedSlices
    assert gradient.indices.tolist() == [3, 0, 3, 1]
    np.testing.assert_array_equal(gradient.values, 2 * table.value[[3, 0, 3, 1]])


def test_lookups_of_one_variable_are_joined_and_added_to_a_dense_read(lib: Library) -> None:
    table = ar.Variable(np.ones((3, 1)))

    def sparse() -> Any:
        found = [ar.autodiff.embedding_lookup(table, ids) for ids in ([0], [2, 2])]
        return lib.sum(found[0]) + 3.0 * lib.sum(found[1])

    _, [(joined, _)] = differentiate_variables(sparse, backend=lib.name)
    _, [(both, _)] = differentiate_variables(
        lambda: sparse() + lib.sum(table.value), backend=lib.name
    )

    assert (joined.indices.tolist(), joined.values.ravel().tolist()) == ([0, 2, 2], [1.0, 3.0, 3.0])
    np.testing.assert_array_equal(both, [[2.0], [1.0], [7.0]])


def test_a_lookup_of_a_constant_and_of_nothing(lib: Library) -> None:
    table, w = ar.Variable(np.ones((3, 2))), ar.Variable(2.0)

    def loss() -> Any:
        rows = ar.autodiff.embedding_lookup(table, [1])
        assert type(rows) is kind_of(lib)
        return lib.sum(rows) * w.value

    _, pairs = differentiate_variables(loss, [w], lib.name)
    _, [(empty, _)] = differentiate_variables(
        lambda: lib.sum(ar.autodiff.embedding_lookup(table, [])), [table], lib.name
    )

    assert [float(gradient) for gradient, _ in pairs] == [2.0]
    assert (len(empty.indices), empty.dense_shape) == (0, (3, 2))


def test_indices_of_the_library_will_do(lib: Library) -> None:
    table = ar.Variable(np.arange(3.0))

    assert ar.autodiff.embedding_lookup(table, lib.array([2, 0])).tolist() == [2.0, 0.0]


def test_a_lookup_differentiated_twice_is_refused(lib: Library) -> None:
    table = ar.Variable(np.ones(3))

    def slope() -> Any:
        def inner() -> Any:
            return lib.sum(ar.autodiff.embedding_lookup(table, [0]) ** 3)

        return differentiate_variables(inner, [table], lib.name)[1][0][0].values.sum()

    with pytest.raises(TypeError, match="differentiated again"):
        differentiate_variables(slope, [table], lib.name)


@pytest.mark.parametrize(
    ("table", "indices", "error", "text"),
    [
        (ar.Variable(np.ones(3)), [0, 3], ValueError, "Index 3 is out of range.*rows 0 to 2"),
        (ar.Variable(np.ones(3)), [-1, 0], ValueError, "Index -1 is out of range"),
        (ar.Variable(np.ones(3)), [0.0], TypeError, "integer indices, got dtype float64"),
        (ar.Variable(1.0), [0], ValueError, "is a scalar and has no rows"),
        (np.ones(3), [0], TypeError, "takes a variable, got ndarray"),
    ],
)
def test_lookups_check_their_arguments(table: Any, indices: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        ar.autodiff.embedding_lookup(table, indices)


@pytest.mark.asyncio
async def test_the_optimizer_updates_the_rows_that_replicas_looked_up(
    lib: Library, pair: ar.MirroredStrategy
) -> None:
    with pair.scope():
        table, sgd = ar.Variable(np.ones((4, 1)), name="table"), ar.optimizers.SGD(0.5)

    async def step(ids: Any) -> None:
        def loss() -> Any:
            rows = ar.autodiff.embedding_lookup(table, ids)
            return ar.Weighted(lib.sum(rows), len(ids))

        await sgd.minimize(loss, [table], backend=lib.name)

    await pair.run(step, args=(ar.PerReplica([np.array([0, 2, 2]), np.array([2])]),))

    np.testing.assert_allclose(table.value.ravel(), [1 - 0.5 / 4, 1.0, 1 - 1.5 / 4, 1.0])
