"""Regrouping: results by type and never by value; arguments checked before they are merged."""

import functools
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioreplica as ar
from aioreplica.values import argument_difference, merged_column, regroup_results

Point = namedtuple("Point", "x y")


class Colour(Enum):
    """Two members to tell apart."""

    RED = 1
    BLUE = 2


def double(x: Any) -> Any:
    return 2 * x


def new_lambda() -> Any:
    return lambda x: x


leaves = st.none() | st.integers(0, 2) | st.floats(0, 1) | st.booleans()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.builds(Point, inner, inner)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=8,
)


def naive_regroup(results: Sequence[Any]) -> Any:
    """The rule of the contract, written down for lists, tuples and dicts."""
    first = results[0]
    if all(result is None for result in results):
        return None
    if {type(result) for result in results} == {type(first)}:
        if isinstance(first, dict) and all(result.keys() == first.keys() for result in results):
            return {key: naive_regroup([result[key] for result in results]) for key in first}
        if isinstance(first, (list, tuple)) and {len(r) for r in results} == {len(first)}:
            children = [naive_regroup(column) for column in zip(*results, strict=True)]
            return type(first)(*children) if isinstance(first, Point) else type(first)(children)
    return ar.PerReplica(results)


def shown(tree: Any) -> Any:
    """The tree with distributed values made comparable."""
    if isinstance(tree, ar.DistributedValues):
        return type(tree).__name__, [repr(value) for value in tree.values]
    if isinstance(tree, dict):
        return {key: shown(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree).__name__, [shown(value) for value in tree]
    return repr(tree)


def fill(tree: Any, replica_id: int) -> Any:
    """A tree of the same structure whose leaves tell the replica."""
    if isinstance(tree, dict):
        return {key: fill(value, replica_id) for key, value in tree.items()}
    if isinstance(tree, Point):
        return Point(*(fill(value, replica_id) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(fill(value, replica_id) for value in tree)
    return None if tree is None else (replica_id + tree)


# --- results ----------------------------------------------------------------------------------


@given(trees, st.integers(1, 4))
def test_results_of_one_structure(tree: Any, num_replicas: int) -> None:
    results = [fill(tree, i) for i in range(num_replicas)]

    assert shown(regroup_results(results)) == shown(naive_regroup(results))


@given(st.lists(trees, min_size=1, max_size=4))
def test_results_of_any_structures(results: list[Any]) -> None:
    assert shown(regroup_results(results)) == shown(naive_regroup(results))


@pytest.mark.parametrize("leaf", [1, 0.5, "same", b"same", True, Colour.RED, double, int, "a"])
def test_equal_results_are_per_replica_all_the_same(leaf: Any) -> None:
    regrouped = regroup_results([leaf, leaf])

    assert isinstance(regrouped, ar.PerReplica)
    assert regrouped.values == (leaf, leaf)


def test_one_replica_gives_per_replica_too() -> None:
    assert regroup_results([5]).values == (5,)
    assert regroup_results([None]) is None
    assert regroup_results([{"a": 5}])["a"].values == (5,)


def test_none_here_and_a_value_there_is_per_replica() -> None:
    assert regroup_results([None, 1]).values == (None, 1)
    assert regroup_results([[None], [1]])[0].values == (None, 1)


def test_arrays_are_leaves_and_stay_themselves() -> None:
    arrays = [np.zeros(2), np.ones(3)]

    regrouped = regroup_results(arrays)

    assert all(kept is array for kept, array in zip(regrouped, arrays, strict=True))


def test_a_different_subtree_becomes_per_replica_where_it_differs() -> None:
    regrouped = regroup_results([{"a": 1, "b": [1, 2]}, {"a": 2, "b": [3]}])

    assert regrouped["a"].values == (1, 2)
    assert regrouped["b"].values == ([1, 2], [3])


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ([1], (1,)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ((1, 2), Point(1, 2)),
        ({"a": 1}, OrderedDict(a=1)),
        ([], ()),
        ([], 1),
        ((), None),
    ],
)
def test_containers_of_different_kinds_are_not_mixed(first: Any, other: Any) -> None:
    regrouped = regroup_results([first, other])

    assert isinstance(regrouped, ar.PerReplica)
    assert regrouped.values == (first, other)


def test_registered_nodes_are_regrouped_inside() -> None:
    regrouped = regroup_results([ar.Weighted(1.0, 2), ar.Weighted(3.0, 4)])

    assert isinstance(regrouped, ar.Weighted)
    assert (regrouped.total.values, regrouped.weight.values) == ((1.0, 3.0), (2, 4))


def test_distributed_values_are_leaves() -> None:
    inner = ar.PerReplica([1, 2, 3])

    assert regroup_results([inner, inner]).values == (inner, inner)


def test_one_variable_on_all_replicas_stays_that_variable() -> None:
    variable, other = ar.Variable(1.0), ar.Variable(1.0)

    assert regroup_results([variable, variable]) is variable
    assert regroup_results([[variable], [variable]])[0] is variable
    assert regroup_results([variable, other]).values == (variable, other)
    assert regroup_results([variable, 1.0]).values == (variable, 1.0)


# --- arguments --------------------------------------------------------------------------------


@given(trees, st.integers(1, 4))
def test_arguments_of_one_structure_are_regrouped_like_results(tree: Any, count: int) -> None:
    column = [fill(tree, i) for i in range(count)]

    assert all(argument_difference(column[0], other, "x") is None for other in column)
    assert shown(merged_column(column)) == shown(naive_regroup(column))


@given(trees, trees)
def test_arguments_of_different_structures_differ(first: Any, other: Any) -> None:
    def structure(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: structure(value) for key, value in tree.items()}
        if isinstance(tree, (list, tuple)):
            return type(tree).__name__, [structure(value) for value in tree]
        return "leaf"

    same = structure(first) == structure(other)

    assert (argument_difference(first, other, "args[0]") is None) == same


@pytest.mark.parametrize(
    "constant",
    ["text", b"bytes", Colour.RED, double, int, len, [].append, Point],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_constants_stay_themselves_in_arguments(constant: Any) -> None:
    assert argument_difference(constant, constant, "x") is None
    assert merged_column([constant, constant, constant]) is constant
    assert merged_column([{"a": constant}, {"a": constant}]) == {"a": constant}


@pytest.mark.parametrize(
    "function",
    [np.add, np.mean, str.upper, functools.cache(double)],
    ids=["ufunc", "numpy function", "method of a built-in", "cached function"],
)
def test_functions_of_every_make_stay_themselves_in_arguments(function: Any) -> None:
    assert argument_difference(function, function, "x") is None
    assert merged_column([function, function]) is function
    assert argument_difference(function, double, "x") is not None


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("a", "b"),
        (b"a", b"b"),
        ("a", b"a"),
        (Colour.RED, Colour.BLUE),
        (int, float),
        (len, max),
        (double, new_lambda),
        ("a", 1),
        (1, "a"),
    ],
)
def test_different_constants_are_a_difference_that_names_them(first: Any, other: Any) -> None:
    difference = argument_difference(first, other, "args[1]")

    assert difference is not None
    assert "args[1]" in difference
    assert repr(first) in difference
    assert repr(other) in difference
    assert argument_difference({"k": [first]}, {"k": [other]}, "args[1]") is not None


def test_a_lambda_made_anew_on_each_replica_is_the_same_function() -> None:
    first, other = new_lambda(), new_lambda()

    assert argument_difference(first, other, "x") is None
    assert merged_column([first, other]) is first


def test_numbers_and_arrays_may_differ_in_shape_and_dtype() -> None:
    pairs = [(1, 2), (1, 2.5), (np.zeros(2), np.zeros((3, 1))), (np.zeros(1), 5), (True, 0)]

    assert [argument_difference(a, b, "x") for a, b in pairs] == [None] * len(pairs)


def test_different_structures_are_shown() -> None:
    difference = argument_difference({"a": 1}, {"a": 1, "b": 2}, "kwargs['x']")

    assert difference is not None
    assert "kwargs['x']" in difference
    assert "'b'" in difference


def test_variables_must_be_the_same() -> None:
    variable, other = ar.Variable(1.0, name="v"), ar.Variable(1.0, name="w")

    assert argument_difference(variable, variable, "x") is None
    assert merged_column([variable, variable]) is variable
    assert argument_difference(variable, other, "x") is not None
    assert argument_difference(variable, 1.0, "x") is not None
    assert argument_difference(1.0, variable, "x") is not None


@pytest.mark.parametrize("value", [3, 1.5, np.zeros(2), True])
def test_one_replica_is_merged_too(value: Any) -> None:
    [merged] = merged_column([value]).values

    assert merged is value


class Output(OrderedDict[str, Any]):
    """A dict with attributes, as model libraries return them."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [Output, UserDict, MappingProxyType, dict])
async def test_results_that_are_mappings_regroup_as_mappings(
    pair: ar.MirroredStrategy, kind: Any
) -> None:
    async def step(x: float) -> Any:
        return kind({"loss": x, "nested": kind({"none": None, "x": [x]})})

    results = await pair.run(step, args=(ar.PerReplica([1.0, 2.0]),))

    assert type(results) is type(results["nested"]) is kind
    assert results["loss"].values == results["nested"]["x"][0].values == (1.0, 2.0)
    assert results["nested"]["none"] is None
    assert (await pair.reduce("sum", results["nested"]["x"]))[0] == 3.0
    assert [part["loss"] for part in pair.local_results(results)] == [1.0, 2.0]

    async def use(batch: Any) -> Any:
        return batch["loss"]

    again = await pair.run(use, args=(results,))
    assert again.values == (1.0, 2.0)


def test_a_snapshot_in_a_result_is_a_leaf() -> None:
    v = ar.Variable([1.0, 2.0])
    snapshots = [ar.get_strategy().snapshot(v) for _ in range(2)]
    assert regroup_results(snapshots).values == tuple(snapshots)
