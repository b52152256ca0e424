"""Gradients as users bring them: what fits a variable, and what is refused."""

import asyncio
from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.optimizers import SGD
from tests.optimizers.rules import made


def apply(pairs: Any) -> None:
    """Apply gradients of the default strategy, with a learning rate of one."""
    asyncio.run(SGD(1.0).apply_gradients(pairs))


def test_pairs_without_gradient_are_dropped_and_numbers_become_arrays() -> None:
    a, b, c = ar.Variable([1.0]), ar.Variable(np.float32(2.0)), ar.Variable([0.0])

    apply([(np.ones(1), a), (1.5, b), (None, c)])

    assert (a.value.tolist(), float(b.value), b.value.dtype) == ([0.0], 0.5, np.float32)
    assert c.version == 0


@pytest.mark.parametrize("pairs", [[], [(None, ar.Variable(0.0))]])
def test_no_gradient_at_all_is_an_error(pairs: Any) -> None:
    with pytest.raises(ValueError, match="no gradient"):
        apply(pairs)


@pytest.mark.parametrize("gradient", ["1.0", [1.0, 2.0], {}, object(), 1j, np.array(["a", "b"])])
def test_a_gradient_that_is_not_an_array_is_a_type_error(gradient: Any) -> None:
    with pytest.raises(TypeError, match="gradient of 'w'"):
        apply([(gradient, ar.Variable([1.0, 2.0], name="w"))])


def test_a_gradient_of_another_kind_does_not_fit() -> None:
    with pytest.raises(TypeError, match=r"float32, got dtype complex128"):
        apply([(np.ones(1, complex), ar.Variable(np.float32([1.0])))])


def test_integers_cannot_be_trained() -> None:
    with pytest.raises(TypeError, match=r"'n' has dtype int64, but only floating-point"):
        apply([(np.ones(2), ar.Variable([1, 2], name="n"))])


def test_a_variable_that_is_not_trainable_takes_no_gradient() -> None:
    with pytest.raises(ValueError, match=r"'frozen' is not trainable.*trainable=True"):
        apply([(1.0, ar.Variable(0.0, trainable=False, name="frozen"))])


def test_sparse_gradients_come_in_the_dtype_of_their_variable() -> None:
    table = ar.Variable(np.zeros((4, 2), np.float32), name="table")

    apply([(ar.IndexedSlices(np.ones((1, 2)), [3], (4, 2)), table)])

    assert table.value.dtype == np.float32
    assert table.value.tolist() == [[0.0, 0.0]] * 3 + [[-1.0, -1.0]]
    with pytest.raises(ValueError, match=r"dense shape \(5, 2\).*shape \(4, 2\)"):
        apply([(ar.IndexedSlices(np.ones((1, 2)), [3], (5, 2)), table)])


@pytest.mark.asyncio
async def test_parts_of_all_replicas_are_checked_one_by_one(pair: ar.MirroredStrategy) -> None:
    a, b = made(pair, [1.0], "a"), made(pair, [1.0], "b")
    with pair.scope():
        sgd = SGD(1.0)
    parts = ar.PerReplica([np.ones(1, np.float32), np.zeros(1)])

    await sgd.distributed_apply([(parts, a), (ar.PerReplica([None, None]), b)])
    assert (a.value.tolist(), a.value.dtype, b.version) == ([0.0], np.float64, 0)

    await sgd.distributed_apply([(ar.Weighted(parts, ar.PerReplica([1, 3])), a)])
    assert a.value.tolist() == [-0.25]
    await sgd.distributed_apply([(ar.Mirrored([np.ones(1)] * 2), a)])
    assert a.value.tolist() == [-1.25]  # it is the sum already


@pytest.mark.parametrize(
    ("gradient", "said"),
    [
        (ar.PerReplica([np.ones(1), None]), r"'a' is None on replicas \[1\] of 2"),
        (ar.PerReplica([np.ones(1)] * 3), r"'a' has 3 parts, but there are 2"),
        (ar.Weighted(ar.PerReplica([np.ones(1)] * 2), 3), r"2 totals but 1 weights"),
        (None, r"None as the gradient of 'a'"),
    ],
)
@pytest.mark.asyncio
async def test_parts_that_do_not_fit_are_refused(
    pair: ar.MirroredStrategy, gradient: Any, said: str
) -> None:
    w = made(pair, [1.0], "a")

    with pytest.raises(ValueError, match=said):
        await SGD(1.0).distributed_apply([(gradient, w)])
    assert w.version == 0


@pytest.mark.parametrize("gradient", [1.0, np.ones(3), ar.Weighted(np.ones((1, 2)), 1)])
def test_a_wrong_shape_is_an_error(gradient: Any) -> None:
    with pytest.raises(ValueError, match=r"'w' has shape .*\(2,\)"):
        apply([(gradient, ar.Variable([1.0, 2.0], name="w"))])


@pytest.mark.parametrize("weight", [-1, np.nan, np.inf, [1], "1", None])
def test_a_weight_must_be_a_finite_number_from_zero(weight: Any) -> None:
    with pytest.raises(ValueError, match="weight"):
        apply([(ar.Weighted(1.0, weight), ar.Variable(1.0))])


@pytest.mark.parametrize("pair", [1.0, (1.0,), "gv", (1.0, 2.0), (1.0, np.ones(1))])
def test_an_item_that_is_not_a_pair_is_a_type_error(pair: Any) -> None:
    with pytest.raises(TypeError, match="pairs"):
        apply([pair])


def test_a_variable_has_one_gradient() -> None:
    w = ar.Variable(1.0, name="w")

    with pytest.raises(ValueError, match="'w' has two"):
        apply([(1.0, w), (2.0, w)])
