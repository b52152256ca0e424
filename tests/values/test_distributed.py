"""DistributedValues, PerReplica and Mirrored: sequences with one value per replica."""

import copy
import pickle
from typing import Any

import numpy as np
import optree
import pytest

import aioreplica as ar

KINDS = [ar.PerReplica, ar.Mirrored]
NAMESPACE = "aioreplica"


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_it_is_a_sequence_of_components(kind: Any) -> None:
    value = kind([10, 20, 30])

    assert value.values == (10, 20, 30)
    assert len(value) == 3
    assert list(value) == [10, 20, 30]
    assert (value[0], value[-1]) == (10, 30)
    assert value[1:] == (20, 30)
    assert (value.index(20), value.count(30)) == (1, 1)
    assert 20 in value
    assert list(reversed(value)) == [30, 20, 10]
    assert isinstance(value, ar.DistributedValues)


def test_an_index_beyond_the_replicas_is_an_index_error(kind: Any) -> None:
    with pytest.raises(IndexError):
        kind([1, 2])[2]


@pytest.mark.parametrize(
    "sequence", [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), ar.PerReplica([1, 2])]
)
def test_it_is_built_from_any_sequence(kind: Any, sequence: Any) -> None:
    assert kind(sequence).values == (1, 2)


def test_the_components_are_the_objects_themselves(kind: Any) -> None:
    first, second = [1], {"a": 2}
    source = [first, second]
    value = kind(source)
    source.clear()

    assert value[0] is first
    assert value[1] is second


@pytest.mark.parametrize(
    "bad", [5, None, "ab", b"ab", {"a": 1, "b": 2}, {1, 2}, ar.Variable([1.0, 2.0])]
)
def test_values_that_are_not_a_sequence_are_a_type_error(kind: Any, bad: Any) -> None:
    with pytest.raises(TypeError, match="one value per replica"):
        kind(bad)


def test_an_array_without_axes_is_a_type_error(kind: Any) -> None:
    with pytest.raises(TypeError):
        kind(np.array(3.0))


@pytest.mark.parametrize("empty", [[], (), np.array([])])
def test_no_value_at_all_is_a_value_error(kind: Any, empty: Any) -> None:
    with pytest.raises(ValueError, match="at least one"):
        kind(empty)


def test_distributed_values_are_abstract() -> None:
    with pytest.raises(TypeError):
        ar.DistributedValues([1])  # type: ignore[abstract]


def test_only_one_kind_is_mirrored() -> None:
    assert ar.Mirrored([1, 1]).is_mirrored
    assert not ar.PerReplica([1, 1]).is_mirrored


def test_it_cannot_be_changed(kind: Any) -> None:
    value = kind([1, 2])

    with pytest.raises(TypeError):
        value[0] = 3
    with pytest.raises(AttributeError):
        value.values = (3, 4)


def test_repr_shows_each_replica(kind: Any) -> None:
    assert repr(kind(["a", None])) == f"{kind.__name__}({{0: 'a', 1: None}})"


# --- as a pytree node -------------------------------------------------------------------------


def test_users_see_a_pytree_node(kind: Any) -> None:
    tree = {"x": kind([1, 2]), "y": 3}

    leaves, spec = optree.tree_flatten(tree, namespace=NAMESPACE)
    rebuilt = optree.tree_unflatten(spec, [10, 20, 30])

    assert leaves == [1, 2, 3]
    assert type(rebuilt["x"]) is kind
    assert rebuilt["x"].values == (10, 20)
    assert rebuilt["y"] == 30


def test_components_may_be_pytrees(kind: Any) -> None:
    tree = kind([{"a": 1}, {"a": [2, 3]}])

    doubled = optree.tree_map(lambda leaf: 2 * leaf, tree, namespace=NAMESPACE)

    assert doubled.values == ({"a": 2}, {"a": [4, 6]})


def test_other_namespaces_see_a_leaf(kind: Any) -> None:
    value = kind([1, 2])

    assert optree.tree_leaves([value]) == [value]


# --- not an array -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "convert",
    [np.asarray, np.array, lambda v: np.add(v, 1), lambda v: np.ones(2) + v, np.sum],
    ids=["asarray", "array", "add", "radd", "sum"],
)
def test_converting_it_to_one_array_is_an_error_with_advice(kind: Any, convert: Any) -> None:
    with pytest.raises(TypeError, match=r"\.values.*reduce"):
        convert(kind([1.0, 2.0]))


# --- copies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_it_survives_pickling(kind: Any, protocol: int) -> None:
    value = kind([np.arange(3), None])

    loaded = pickle.loads(pickle.dumps(value, protocol))

    assert type(loaded) is kind
    assert loaded[0].tolist() == [0, 1, 2]
    assert loaded[1] is None


def test_a_deep_copy_has_components_of_its_own(kind: Any) -> None:
    value = kind([[1], [2]])

    copied = copy.deepcopy(value)
    copied[0].append(9)

    assert type(copied) is kind
    assert value.values == ([1], [2])


def test_a_shallow_copy_shares_the_components(kind: Any) -> None:
    value = kind([[1], [2]])

    assert copy.copy(value)[0] is value[0]
