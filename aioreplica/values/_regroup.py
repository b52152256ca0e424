"""From one tree of distributed values to one tree per replica, and back: regrouping.

The rule of regrouping looks at types, never at values, so what a step gets back does not depend on
whether two replicas happened to compute the same number. Source: tf.distribute's regroup, with the
two differences of docs/decisions/0002-regroup.md.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import Enum
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    WrapperDescriptorType,
)

import numpy as np

from ..context import OVERRIDES, Place
from ..tree import (
    LEAF_TYPES,
    Tree,
    describe_structure,
    flatten,
    flatten_one_level,
    leaves,
    map_leaves,
    unflatten,
)
from ._distributed import DistributedValues, new_per_replica
from ._variable import Variable

_CONSTANT_TYPES = (
    str,
    bytes,
    Enum,
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
    np.ufunc,
    type(np.mean),  # a NumPy function that other arrays can override
    type(functools.cache(len)),
)
_FAST_TYPES = LEAF_TYPES - {str, bytes, type(None)}
_DISTRIBUTED = (DistributedValues, Variable)


def split_per_replica(tree: object, num_replicas: int, what: str) -> list[Tree]:
    """Return one tree per replica, with distributed values replaced by their components.

    Args:
        tree: Any pytree; trees without distributed values are shared, not copied.
        num_replicas: How many parts are wanted.
        what: Names the tree in errors, such as "args".

    Raises:
        ValueError: If a distributed value has another number of components.
    """
    kind = type(tree)
    if kind in LEAF_TYPES or ((kind is tuple or kind is dict) and not tree):
        return [tree] * num_replicas
    found, spec = flatten(tree)
    is_distributed = [isinstance(leaf, DistributedValues) for leaf in found]
    if True not in is_distributed:
        return [tree] * num_replicas
    pairs = list(zip(found, is_distributed, strict=True))
    for value, is_one in pairs:
        if is_one and len(value) != num_replicas:
            raise ValueError(
                f"A {type(value).__name__} in {what} has {len(value)} values, but there are "
                f"{num_replicas} replicas. Build it with one value per replica."
            )
    return [
        unflatten(spec, [leaf.values[i] if is_one else leaf for leaf, is_one in pairs])
        for i in range(num_replicas)
    ]


def read_at(value: Tree, place: Place, what: str) -> Tree:
    """Return a pytree with every distributed value in it read where one replica runs.

    A PerReplica or Mirrored gives the replica's own component, a variable its value there: the
    local component of an on-read one, and what stands in for a variable while a gradient is taken.
    Weighted are opened like any container; IndexedSlices hold arrays and stay as they are.

    Args:
        value: Any pytree; one without distributed values is returned itself, at the cost of one
            test of its type if it is an array or a number.
        place: Where the replica runs; another thread may ask.
        what: Names the call in errors, such as "all_reduce".

    Raises:
        ValueError: If a PerReplica or Mirrored has not one value per replica.
    """
    kind = type(value)
    if kind in LEAF_TYPES:
        return value
    if kind is list or kind is tuple:
        if LEAF_TYPES.issuperset(map(type, value)):
            return value
    elif kind is dict:
        if LEAF_TYPES.issuperset(map(type, value.values())):
            return value
    elif isinstance(value, _DISTRIBUTED):
        return _read_one(place, what, value)
    if not any(isinstance(leaf, _DISTRIBUTED) for leaf in leaves(value)):
        return value
    return map_leaves(functools.partial(_read_one, place, what), value)


def _read_one(place: Place, what: str, leaf: object) -> object:
    if isinstance(leaf, Variable):
        overrides = OVERRIDES.get()
        return leaf._value_at(place) if overrides is None else overrides.read(leaf)
    if not isinstance(leaf, DistributedValues):
        return leaf
    count = 1 if place.strategy is None else place.strategy.num_local_replicas
    if len(leaf) != count:
        raise ValueError(
            f"{what} got a {type(leaf).__name__} of {len(leaf)} values, but there are {count} "
            "replicas. Build it with one value per replica, or pass one of its values."
        )
    index = 0 if place.replica is None else place.replica.local_replica_id
    return read_at(leaf.values[index], place, what)  # a component may hold variables


# ---- back ------------------------------------------------------------------------------------


def regroup_results(results: Sequence[object], devices: Sequence[str] | None = None) -> object:
    """Combine what the replicas returned: None stays None, variables stay, the rest PerReplica.

    Where structures differ, the subtrees become one PerReplica.

    Example:
        >>> regroup_results([(1, None), (2, None)])
        (PerReplica({0: 1, 1: 2}), None)
    """
    first = results[0]
    kinds = set(map(type, results))
    if len(kinds) == 1 and type(first) in LEAF_TYPES:
        return None if first is None else new_per_replica(tuple(results), devices)
    if first is results[-1] and isinstance(first, Variable) and all(r is first for r in results):
        return first
    flattened = [flatten(result) for result in results]
    spec = flattened[0][1]
    if all(other == spec for _, other in flattened):
        columns = zip(*(found for found, _ in flattened), strict=True)
        return unflatten(spec, [_regroup_result_leaf(column, devices) for column in columns])
    return _regroup_level(results, devices)


def _regroup_level(results: Sequence[object], devices: Sequence[str] | None) -> object:
    levels = [flatten_one_level(result) for result in results]
    first = levels[0]
    if first is None or any(level is None or level[2] != first[2] for level in levels):
        return new_per_replica(tuple(results), devices)
    children = zip(*(level[0] for level in levels if level is not None), strict=True)
    return first[1]([regroup_results(child, devices) for child in children])


def _regroup_result_leaf(column: tuple[object, ...], devices: Sequence[str] | None) -> object:
    first = column[0]
    if (first is None or isinstance(first, Variable)) and all(leaf is first for leaf in column):
        return first
    return new_per_replica(column, devices)


def merged_column(column: Sequence[object], devices: Sequence[str] | None = None) -> object:
    """Regroup one argument of a merge function, checked before to have one structure."""
    if type(column[0]) in _FAST_TYPES and len(set(map(type, column))) == 1:
        return new_per_replica(tuple(column), devices)
    flattened = [flatten(value)[0] for value in column]
    spec = flatten(column[0])[1]
    merged = [_merged_leaf(each, devices) for each in zip(*flattened, strict=True)]
    return unflatten(spec, merged)


def _merged_leaf(column: tuple[object, ...], devices: Sequence[str] | None) -> object:
    first = column[0]
    if isinstance(first, (*_CONSTANT_TYPES, Variable)):
        return first
    if first is None and all(leaf is None for leaf in column):
        return None
    return new_per_replica(column, devices)


def argument_difference(first: object, other: object, name: str) -> str | None:
    """Say how one replica's argument cannot be merged with another's; None if it can.

    Structures must be equal, and so must strings, enums, functions, classes and variables:
    they are handed to the merge function as they are.
    """
    kind = type(first)
    if kind is type(other) and kind in _FAST_TYPES:
        return None
    own_leaves, spec = flatten(first)
    other_leaves, other_spec = flatten(other)
    if spec != other_spec:
        ours, theirs = describe_structure(spec), describe_structure(other_spec)
        return f"{name} has structure {ours} here and {theirs} there"
    for a, b in zip(own_leaves, other_leaves, strict=True):
        if isinstance(a, Variable) or isinstance(b, Variable):
            if a is not b:
                return f"{name} holds {a!r} here and {b!r} there"
        elif not _same_constant(a, b):
            return f"{name} is {a!r} here and {b!r} there, but constants must be equal"
    return None


def _same_constant(a: object, b: object) -> bool:
    """Tell whether two leaves are equal constants, or no constants at all."""
    if not isinstance(a, _CONSTANT_TYPES) and not isinstance(b, _CONSTANT_TYPES):
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (FunctionType, MethodType)):
        return a == b or getattr(a, "__code__", a) is getattr(b, "__code__", None)
    return bool(a == b)
