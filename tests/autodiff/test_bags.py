"""Rows of a table that are combined bag by bag, and the gradients of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aioreplica as ar
from aioreplica.autodiff import differentiate_variables, embedding_lookup_sparse
from aioreplica.values import IndexedSlices
from tests.autodiff.libraries import NAMES, library

INDICES = [3, 0, 3, 1, 2]
SEGMENTS = [2, 0, 0, 2, 2]
WEIGHTS = [0.5, 2.0, 1.0, 3.0, 1.5]


def table_of(dtype: str = "float64") -> ar.Variable:
    return ar.Variable(np.random.default_rng(7).normal(size=(5, 3)).astype(dtype), name="table")


def matrix(combiner: str, weights: Any = WEIGHTS, num_segments: int = 4) -> Any:
    """Return what the table is multiplied with: the definition, row by row."""
    found = np.zeros((num_segments, 5))
    for segment in range(num_segments):
        own = [i for i, each in enumerate(SEGMENTS) if each == segment]
        divisor = {
            "sum": 1.0,
            "mean": sum(weights[i] for i in own),
            "sqrtn": sum(weights[i] ** 2 for i in own) ** 0.5,
        }[combiner]
        for i in own:
            found[segment, INDICES[i]] += weights[i] / divisor
    return found


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["ones", "weights"])
def test_bags_are_rows_times_weights_by_their_divisor(combiner: Any, weights: Any) -> None:
    table = table_of()
    found = embedding_lookup_sparse(
        table, INDICES, SEGMENTS, weights, num_segments=4, combiner=combiner
    )
    expected = matrix(combiner, [1.0] * 5 if weights is None else weights) @ table.value
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert not found[1].any()
    assert not found[3].any()


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_goes_back_to_the_rows(name: str) -> None:
    of = library(name)
    table = table_of("float32" if name == "jax" else "float64")

    def loss() -> Any:
        bags = embedding_lookup_sparse(table, INDICES, SEGMENTS, WEIGHTS, num_segments=4)
        return of.sum(bags * bags)

    value, [(gradient, variable)] = differentiate_variables(loss, backend=name)
    bags = matrix("mean") @ table.value
    assert variable is table
    assert isinstance(gradient, IndexedSlices)
    assert gradient.indices.tolist() == INDICES
    np.testing.assert_allclose(float(value), np.sum(bags**2), rtol=max(of.rtol, 1e-12))
    np.testing.assert_allclose(
        gradient.to_dense(), matrix("mean").T @ (2 * bags), rtol=max(of.rtol, 1e-10)
    )


def test_nothing_to_look_up_gives_zeros_and_no_rows() -> None:
    anp = pytest.importorskip("autograd.numpy")
    table = table_of()
    assert embedding_lookup_sparse(table, [], []).shape == (0, 3)
    _, [(gradient, _)] = differentiate_variables(
        lambda: anp.sum(embedding_lookup_sparse(table, [], [], num_segments=2))
    )
    assert isinstance(gradient, IndexedSlices)
    assert gradient.values.shape == (0, 3)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"segments": [0, 0]}, ValueError, "one segment per index"),
        ({"segments": [0.0] * 5}, TypeError, "Segments are integers"),
        ({"segments": [0, 0, 0, 0, -1]}, ValueError, "Segment -1 is out of range"),
        ({"num_segments": 2}, ValueError, "Segment 2 is out of range: there are 2 segments"),
        ({"indices": [0, 0, 0, 0, 5]}, ValueError, "Index 5 is out of range"),
        ({"indices": [[0, 0, 0, 0, 1]]}, ValueError, r"indices of shape \(1, 5\)"),
        ({"weights": [1.0]}, ValueError, "one weight per index"),
        ({"weights": ["a"] * 5}, TypeError, "Weights of embedding_lookup_sparse are numbers"),
        ({"weights": [0.0] * 5}, ValueError, "segment 2 add up to 0"),
        ({"combiner": "max"}, ValueError, "combiner must be"),
        ({"variable": np.ones((5, 3))}, TypeError, "takes a variable"),
        ({"variable": table_of("int64")}, TypeError, "no fractions"),
        (
            {"variable": table_of("int64"), "combiner": "sum", "weights": WEIGHTS},
            TypeError,
            "no fractions",
        ),
    ],
)
def test_wrong_arguments_are_refused(change: Any, kind: Any, words: str) -> None:
    given: Any = {"variable": table_of(), "indices": INDICES, "segments": SEGMENTS, **change}
    with pytest.raises(kind, match=words):
        embedding_lookup_sparse(**given)
