"""Pytrees: None and distributed values are leaves inside the library; nodes may be registered."""

from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import optree
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aioreplica as ar
from aioreplica.tree import (
    LEAF_TYPES,
    Leaf,
    flatten,
    flatten_one_level,
    leaves,
    map_leaves,
    paths,
    register_node,
    unflatten,
)

Point = namedtuple("Point", "x y")

trees = st.recursive(
    st.none() | st.integers() | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=10,
)


class Box:
    """A container that the tests teach the library."""

    def __init__(self, content: Any, label: str) -> None:
        self.content = content
        self.label = label


class Closed:
    """A container that stays whole inside the library."""

    def __init__(self, content: Any) -> None:
        self.content = content


def naive_leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in naive_leaves(tree[key])]
    if isinstance(tree, (list, tuple)):
        return [leaf for part in tree for leaf in naive_leaves(part)]
    return [tree]


@given(trees)
def test_leaves_are_those_of_the_naive_walk(tree: Any) -> None:
    assert leaves(tree) == flatten(tree)[0] == naive_leaves(tree)
    assert len(paths(tree)) == len(leaves(tree))


@given(trees)
def test_flatten_and_unflatten_are_inverse(tree: Any) -> None:
    parts, spec = flatten(tree)

    assert unflatten(spec, parts) == tree
    assert flatten(tree)[1] == spec


@given(trees)
def test_map_keeps_the_structure_and_sees_every_leaf(tree: Any) -> None:
    marked = map_leaves(lambda leaf: ("seen", leaf).__repr__(), tree)

    assert flatten(marked)[1] == flatten(tree)[1]
    assert leaves(marked) == [repr(("seen", leaf)) for leaf in leaves(tree)]


@given(trees)
def test_one_level_rebuilds_the_container(tree: Any) -> None:
    level = flatten_one_level(tree)

    if level is None:
        assert leaves(tree) == [tree]
    else:
        children, rebuild, _kind = level
        assert rebuild(children) == tree


@pytest.mark.parametrize(
    ("first", "other", "same"),
    [
        ([1], [[2, 3]], True),
        ([1], [1, 2], False),
        ([1], (1,), False),
        ({"a": 1}, {"a": [2]}, True),
        ({"a": 1}, {"b": 1}, False),
        (Point(1, 2), Point(3, None), True),
        (Point(1, 2), (1, 2), False),
        ([], (), False),
    ],
)
def test_one_level_describes_the_kind_of_container(first: Any, other: Any, same: bool) -> None:
    kinds = [flatten_one_level(tree) for tree in (first, other)]

    assert all(kind is not None for kind in kinds)
    assert (kinds[0][2] == kinds[1][2]) is same  # type: ignore[index]


@pytest.mark.parametrize("leaf", [None, 1, "a", np.zeros(2), ar.PerReplica([1, 2]), object()])
def test_a_leaf_has_no_level(leaf: Any) -> None:
    assert flatten_one_level(leaf) is None
    assert len(leaves(leaf)) == 1
    assert paths(leaf) == ["value"]


def test_none_is_a_leaf() -> None:
    assert leaves([None, {"a": None}]) == [None, None]
    assert map_leaves(lambda leaf: leaf is None, (None, 1)) == (True, False)


@pytest.mark.parametrize("kind", [ar.PerReplica, ar.Mirrored])
def test_distributed_values_are_leaves_inside_the_library(kind: Any) -> None:
    value = kind([[1], [2]])

    assert leaves({"a": value}) == [value]
    assert map_leaves(lambda leaf: leaf.values, (value,)) == (([1], [2]),)


def test_usual_containers_are_opened() -> None:
    containers: list[Any] = [
        Point(1, 2),
        OrderedDict(b=1, a=2),
        deque([1, 2], maxlen=3),
        defaultdict(list, a=1, b=2),
    ]

    for container in containers:
        doubled = map_leaves(lambda leaf: leaf * 2, container)
        assert type(doubled) is type(container)
        assert sorted(leaves(doubled)) == [2, 4]


def test_arrays_strings_and_sets_are_not_opened() -> None:
    tree = [np.zeros(3), "abc", b"abc", {1, 2}, range(3)]

    assert len(leaves(tree)) == len(tree)


def test_the_fast_types_are_leaves() -> None:
    for kind in LEAF_TYPES - {np.ndarray, type(None)}:
        assert flatten_one_level(kind()) is None


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (3, ["value"]),
        ([], []),
        ({}, []),
        ({"w": [1, 2]}, ["['w'][0]", "['w'][1]"]),
        ((1, {"b": None}), ["[0]", "[1]['b']"]),
        (Point(1, 2), [".x", ".y"]),
    ],
)
def test_paths_are_readable(tree: Any, expected: list[str]) -> None:
    assert paths(tree) == expected


def test_a_registered_node_is_opened_everywhere_in_the_library() -> None:
    register_node(
        Box,
        lambda box: ((box.content,), box.label),
        lambda label, parts: Box(*parts, label),
    )

    mapped = map_leaves(lambda leaf: leaf + 1, [Box({"a": 1}, "left")])

    assert mapped[0].content == {"a": 2}
    assert mapped[0].label == "left"
    assert flatten(Box(1, "left"))[1] != flatten(Box(1, "right"))[1]
    assert optree.tree_leaves(Box([1, 2], "x"), namespace="aioreplica") == [1, 2]
    assert len(optree.tree_leaves(Box([1, 2], "x"))) == 1  # other libraries do not see it
    with pytest.raises(ValueError, match="Box"):
        register_node(Box, lambda box: ((), None), lambda _none, _parts: Box(1, ""))


def test_an_opaque_node_is_opened_for_users_only() -> None:
    register_node(
        Closed,
        lambda closed: ((closed.content,), None),
        lambda _none, parts: Closed(*parts),
        opaque=True,
    )
    value = Closed([1, 2])

    assert leaves(value) == [value]
    assert optree.tree_leaves(value, namespace="aioreplica") == [1, 2]


def test_the_wrong_number_of_leaves_is_a_value_error() -> None:
    spec = flatten([1, 2])[1]

    with pytest.raises(ValueError, match=r"(?i)leaves"):
        unflatten(spec, [1])


# ---- mappings ----------------------------------------------------------------------------------


class Bag(dict):  # type: ignore[type-arg]
    """A dict of a kind of its own."""


class Ordered(OrderedDict):  # type: ignore[type-arg]
    """Its order counts."""


class Named(Mapping):  # type: ignore[type-arg]
    """A mapping that no dict makes."""

    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Whole(Bag, Leaf):
    """A mapping that is a leaf."""


@pytest.mark.parametrize("kind", [Bag, Ordered, UserDict, MappingProxyType, Counter, dict])
def test_every_mapping_is_a_container(kind: Any) -> None:
    tree = kind({"b": 1, "a": kind({"c": 3})})

    new = map_leaves(lambda x: 2 * x, [tree])[0]

    assert type(new) is type(new["a"]) is kind
    assert (new["b"], new["a"]["c"], list(new)) == (2, 6, ["b", "a"])
    assert leaves(tree) == ([1, 3] if kind is Ordered else [3, 1])
    found, spec = flatten(tree)
    assert dict(unflatten(spec, found)) == dict(tree)
    assert len(paths(tree)) == 2


def test_the_order_of_keys_does_not_count() -> None:
    assert flatten(Bag(a=1, b=2))[1] == flatten(Bag(b=1, a=2))[1]
    assert flatten(Bag(a=1, b=2))[1] != flatten(Bag(a=1, c=2))[1]
    assert flatten(Ordered(a=1, b=2))[1] != flatten(Ordered(b=1, a=2))[1]
    assert flatten(UserDict({1: 1, "a": 2}))[0] == [1, 2]


def test_a_mapping_that_cannot_be_rebuilt_becomes_a_dict() -> None:
    assert map_leaves(lambda x: 2 * x, Named(a=1, b=2)) == {"a": 2, "b": 4}


def test_a_mapping_may_be_a_leaf() -> None:
    tree = Whole(a=1)
    assert leaves([tree]) == [tree]
    assert flatten_one_level(tree) is None
