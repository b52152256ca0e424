"""Selecting one replica's part of distributed values, through pytrees."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..context import OVERRIDES, Place
from ..tree import LEAF_TYPES, flatten, leaves, map_leaves, unflatten
from ._distributed import DistributedValues
from ._variable import Variable


def split_per_replica(tree: Any, num_replicas: int, what: str) -> list[Any]:
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


def read_at(value: Any, place: Place, what: str) -> Any:
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
    return map_leaves(partial(_read_one, place, what), value)


def _read_one(place: Place, what: str, leaf: object) -> Any:
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


_DISTRIBUTED = (DistributedValues, Variable)
