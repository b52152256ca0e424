"""VariableReads and differentiate_variables: losses that read variables."""

from typing import Any

import autograd.numpy as anp
import numpy as np
import pytest

import aioreplica as ar
from aioreplica.autodiff import VariableReads, differentiate_variables
from aioreplica.context import OVERRIDES


def test_one_pass_gives_value_variables_and_gradients() -> None:
    w, b = ar.Variable([1.0, 2.0], name="w"), ar.Variable(3.0, name="b")
    calls = []

    def loss() -> Any:
        calls.append(1)
        return anp.sum(w.value**2) * b.value

    value, pairs = differentiate_variables(loss)

    assert calls == [1]
    assert value == 15.0
    assert [variable.name for _, variable in pairs] == ["w", "b"]
    np.testing.assert_array_equal(pairs[0][0], [6.0, 12.0])
    assert pairs[1][0] == 5.0


def test_only_trainable_floating_variables_count() -> None:
    w = ar.Variable(2.0)
    fixed, counter = ar.Variable(3.0, trainable=False), ar.Variable(4)

    value, pairs = differentiate_variables(lambda: w.value * fixed.value * counter.value)

    assert value == 24.0
    assert [(float(gradient), variable) for gradient, variable in pairs] == [(12.0, w)]


def test_chosen_variables_come_in_the_given_order_with_none_for_the_unread() -> None:
    w, b, unread = ar.Variable(2.0), ar.Variable(3.0, trainable=False), ar.Variable(4.0)

    _, pairs = differentiate_variables(lambda: w.value * b.value, [unread, b, w])

    assert pairs[0] == (None, unread)
    assert [(float(g), v) for g, v in pairs[1:]] == [(2.0, b), (3.0, w)]


def test_a_variable_read_without_effect_has_gradient_zero() -> None:
    w = ar.Variable([1.0, 1.0])

    _, [(gradient, _)] = differentiate_variables(lambda: float(len(w.value)))

    np.testing.assert_array_equal(gradient, [0.0, 0.0])


def test_reading_twice_gives_one_traced_array() -> None:
    w = ar.Variable(3.0)
    seen = []

    def loss() -> Any:
        seen.extend([w.value, w.value])
        return w.value * w.value

    _, [(gradient, _)] = differentiate_variables(loss)

    assert seen[0] is seen[1]
    assert gradient == 6.0


def test_reads_end_with_the_loss() -> None:
    w = ar.Variable(3.0)

    with pytest.raises(ZeroDivisionError):
        differentiate_variables(lambda: 1 // 0)
    differentiate_variables(lambda: w.value)

    assert OVERRIDES.get() is None
    assert type(w.value) is np.ndarray


def test_an_integer_variable_has_no_gradient() -> None:
    counter = ar.Variable(1)

    with pytest.raises(TypeError, match="int64"):
        differentiate_variables(lambda: counter.value * 1.0, [counter])


@pytest.mark.parametrize("backend", ["autograd", "torch"])
def test_bfloat16_is_for_jax(backend: str) -> None:
    pytest.importorskip(backend)
    w = ar.Variable(np.ones(3, pytest.importorskip("ml_dtypes").bfloat16))

    with pytest.raises(TypeError, match=r"array of bfloat16 needs backend='jax'"):
        differentiate_variables(lambda: w.value.sum(), [w], backend)


def test_variables_may_come_from_an_iterator_and_are_variables() -> None:
    w, b = ar.Variable([2.0, 3.0], name="w"), ar.Variable(4.0)

    def loss() -> Any:
        return anp.sum(w.value) * b.value

    value, pairs = differentiate_variables(loss, (v for v in (b, w)))

    assert value == 20.0
    assert [variable for _, variable in pairs] == [b, w]
    with pytest.raises(TypeError, match=r"got the variable 'w'\. Put it into a list"):
        differentiate_variables(loss, w)
    with pytest.raises(TypeError, match=r"must hold variables, got 3\.0 \(float\)"):
        differentiate_variables(loss, [w, 3.0])  # type: ignore[list-item]


@pytest.mark.asyncio
async def test_each_replica_reads_its_own_component(pair: ar.MirroredStrategy) -> None:
    with pair.scope():
        w = ar.Variable(0.0)
    w.store.write({w: (np.array(1.0), np.array(10.0))})

    async def step() -> Any:
        context = ar.get_replica_context()
        value, pairs = await context.run_on_device(differentiate_variables, lambda: w.value**2)
        return value, pairs[0][0]

    value, gradient = await pair.run(step)

    assert list(value) == [1.0, 100.0]
    assert [float(part) for part in gradient] == [2.0, 20.0]


def test_reads_show_how_many_they_traced() -> None:
    reads = VariableReads()
    w = ar.Variable(1.0)

    reads.trace(lambda: w.value, lambda array: array)

    assert repr(reads) == "<VariableReads | 1 traced>"
    assert reads.variables == (w,)
