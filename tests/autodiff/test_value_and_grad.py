"""value_and_grad: values and gradients of functions of arrays, by the adapter of that name."""

import sys
from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioreplica as ar
from aioreplica.autodiff import find_adapter, value_and_grad


def test_the_name_chooses_the_adapter() -> None:
    assert find_adapter("autograd").name == "autograd"


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'theano'.*'autograd'"):
        find_adapter("theano")


def test_a_missing_library_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "aioreplica.autodiff._autograd", raising=False)
    monkeypatch.delitem(sys.modules, "autograd", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_Absent(), *sys.meta_path])

    with pytest.raises(ImportError, match=r'pip install "aioreplica\[autograd\]"') as caught:
        find_adapter("autograd")

    assert caught.value.name == "autograd"


class _Absent:
    """Makes autograd look as if it were not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "autograd":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


RNG = np.random.default_rng(0)


def polynomial(arrays: Any) -> Any:
    a, b = arrays
    return anp.sum(a**3 * b)


def test_value_and_gradients_are_plain_numpy() -> None:
    a, b = np.array([1.0, 2.0]), np.array([3.0, 4.0])

    value, gradients = value_and_grad(polynomial)([a, b])

    assert value == 35.0
    assert isinstance(value, np.float64)
    assert [type(gradient) for gradient in gradients] == [np.ndarray, np.ndarray]
    np.testing.assert_array_equal(gradients[0], 3 * a**2 * b)
    np.testing.assert_array_equal(gradients[1], a**3)


def test_a_tuple_arrives_as_a_tuple() -> None:
    seen = []

    value_and_grad(lambda arrays: seen.append(type(arrays)) or arrays[0])((np.float64(1.0),))
    value_and_grad(lambda arrays: seen.append(type(arrays)) or arrays[0])([np.float64(1.0)])

    assert seen == [tuple, list]


def test_the_total_of_a_weighted_is_differentiated_and_its_weight_is_not() -> None:
    def loss(arrays: Any) -> Any:
        return ar.Weighted(anp.sum(arrays[0] ** 2), anp.sum(arrays[0]))

    value, (gradient,) = value_and_grad(loss)([np.array([1.0, 2.0])])

    assert (value.total, value.weight) == (5.0, 3.0)
    assert not hasattr(value.weight, "_trace")
    np.testing.assert_array_equal(gradient, [2.0, 4.0])


@pytest.mark.parametrize("loss", [lambda _: 3.0, lambda arrays: anp.sum(arrays[0])])
def test_an_unused_argument_has_gradient_zero(loss: Any) -> None:
    _, gradients = value_and_grad(loss)([np.ones(2), np.ones((2, 3), np.float32)])

    np.testing.assert_array_equal(gradients[1], np.zeros((2, 3)))
    assert gradients[1].dtype == np.float32


def test_gradients_have_the_dtype_of_their_arrays() -> None:
    _, (narrow, wide) = value_and_grad(lambda a: anp.sum(a[0] * a[1]))(
        [np.ones(2, np.float32), np.ones(2, np.float64)]
    )

    assert (narrow.dtype, wide.dtype) == (np.float32, np.float64)


def test_an_array_used_twice_collects_both_contributions() -> None:
    _, (gradient,) = value_and_grad(lambda a: anp.sum(a[0]) + anp.sum(a[0] * a[0]))([np.ones(3)])

    np.testing.assert_array_equal(gradient, [3.0, 3.0, 3.0])


@given(st.integers(0, 5), st.integers(1, 5))
def test_gradients_agree_with_central_differences(rows: int, columns: int) -> None:
    x, w = RNG.normal(size=(rows, columns)), RNG.normal(size=(columns, 2))

    def loss(arrays: Any) -> Any:
        return anp.sum(anp.tanh(anp.dot(x, arrays[0])))

    _, (gradient,) = value_and_grad(loss)([w])

    step = 1e-6
    for index in np.ndindex(w.shape):
        up, down = w.copy(), w.copy()
        up[index] += step
        down[index] -= step
        numeric = (loss([up]) - loss([down])) / (2 * step)
        assert gradient[index] == pytest.approx(numeric, abs=1e-7)


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        (np.ones(2), ValueError, r"scalar, got shape \(2,\)"),
        (None, TypeError, "NoneType"),
        ("loss", TypeError, "'loss'"),
        (1j, TypeError, "complex"),
        (ar.Weighted(np.ones(2), 2), ValueError, r"shape \(2,\)"),
        (ar.Weighted(ar.Weighted(1.0, 1), 2), TypeError, "Weighted"),
    ],
)
def test_a_loss_must_be_a_real_scalar(result: Any, error: Any, text: Any) -> None:
    with pytest.raises(error, match=text):
        value_and_grad(lambda _: result)([np.ones(2)])


@pytest.mark.parametrize("array", [np.arange(3), np.ones(2, complex), np.array([True])])
def test_a_gradient_needs_floating_point(array: Any) -> None:
    with pytest.raises(TypeError, match=f"dtype {array.dtype}"):
        value_and_grad(lambda arrays: anp.sum(arrays[0]))([array])


def test_an_error_in_the_function_leaves_later_calls_right() -> None:
    def broken(_: Any) -> Any:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        value_and_grad(broken)([np.ones(1)])

    value, _ = value_and_grad(polynomial)([np.ones(1), np.ones(1)])
    assert value == 1.0


def test_an_unknown_backend_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match="'nothing'"):
        value_and_grad(polynomial, backend="nothing")
