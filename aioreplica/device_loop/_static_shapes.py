"""Static shapes: every element of an infeed must look like the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, final

import numpy as np

from ..tree import TreeSpec, describe_structure, flatten, paths_of
from ..values import PerReplica

Look: TypeAlias = tuple[Any, ...]  # shape and dtype of an array; the type of anything else


@final
class StaticShapes:
    """Compares the parts of each element with those of the first.

    Args:
        num_replicas: How many parts an element has.

    Invariants:
        * A part is compared with the first one of the same replica: its queue is what has a shape.
    """

    __slots__ = ("_arrays", "_looks", "_specs")

    def __init__(self, num_replicas: int) -> None:
        self._specs: list[TreeSpec | None] = [None] * num_replicas
        self._arrays: list[list[Look] | None] = [None] * num_replicas  # of tuples of arrays only
        self._looks: list[list[Look]] = [[] for _ in range(num_replicas)]

    def check(self, step: int, parts: Sequence[object]) -> None:
        """Check the parts of one element, one per replica.

        Raises:
            ValueError: If a structure, shape, dtype or type differs; names step, replica and leaf.
        """
        for replica_id, part in enumerate(parts):
            arrays = self._arrays[replica_id]
            if arrays is not None and _are_like(part, arrays):
                continue
            found, spec = flatten(part)
            looks = list(map(_look, found))
            if self._specs[replica_id] is None:
                if type(part) is tuple and all(type(leaf) is np.ndarray for leaf in part):
                    self._arrays[replica_id] = looks
                self._specs[replica_id], self._looks[replica_id] = spec, looks
            elif looks != self._looks[replica_id] or spec != self._specs[replica_id]:
                raise ValueError(self._difference(step, replica_id, spec, looks))

    def split_alike(self, elements: Sequence[object]) -> list[Sequence[tuple[object, ...]]]:
        """Return the parts of elements, if all of them are tuples of arrays like the first ones.

        Looked at input by input, which takes a third of the time of `check` for each.

        Returns:
            For each element its parts, one per replica; nothing at all if one may differ.
        """
        count, first = len(self._arrays), self._arrays[0]
        if first is None or set(map(type, elements)) != {tuple}:
            return []
        if set(map(len, elements)) != {len(first)}:  # type: ignore[arg-type]  # they are tuples
            return []
        inputs: list[list[Sequence[object]]] = [[] for _ in range(count)]
        for at, column in enumerate(zip(*elements, strict=True)):
            values = [leaf.values for leaf in column if type(leaf) is PerReplica]
            if len(values) < len(elements) or set(map(len, values)) != {count}:
                return []
            of_each = zip(inputs, zip(*values, strict=True), self._arrays, strict=True)
            for own, arrays, looks in of_each:
                if looks is None or not _all_like(arrays, looks[at]):
                    return []
                own.append(arrays)
        return list(zip(*(zip(*own, strict=True) for own in inputs), strict=True))

    def _difference(self, step: int, replica_id: int, spec: TreeSpec, looks: list[Look]) -> str:
        where = f"The element of step {step} differs from the first one, for replica {replica_id}:"
        first_spec = self._specs[replica_id]
        assert first_spec is not None  # there was a first element
        if spec != first_spec:
            return (
                f"{where} {_structures(first_spec, spec)}. A device loop has one structure: bring "
                "every element into it."
            )
        for name, first, look in zip(paths_of(spec), self._looks[replica_id], looks, strict=True):
            if first != look:
                return (
                    f"{where} leaf {name} is {_show(look)}, the first was {_show(first)}. "
                    f"A device loop has static shapes: {_cure(first, look)}."
                )
        raise AssertionError("the elements do not differ")


def _are_like(part: object, looks: list[Look]) -> bool:
    """Tell quickly whether a part is a tuple of arrays that look like the first ones."""
    if type(part) is not tuple or len(part) != len(looks):
        return False
    for leaf, (shape, dtype) in zip(part, looks, strict=True):
        if type(leaf) is not np.ndarray or leaf.dtype != dtype or leaf.shape != shape:
            return False
    return True


def _all_like(arrays: Sequence[Any], look: Look) -> bool:
    """Tell quickly whether all of them are arrays with the shape and dtype of the first one."""
    if set(map(type, arrays)) != {np.ndarray}:
        return False
    shapes, dtypes = [array.shape for array in arrays], [array.dtype for array in arrays]
    return shapes.count(look[0]) == dtypes.count(look[1]) == len(arrays)


def _look(leaf: object) -> Look:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return (type(leaf),) if shape is None or dtype is None else (shape, dtype)


def _structures(first: TreeSpec, spec: TreeSpec) -> str:
    """Say how two structures differ: by their leaves, or by what holds them."""
    names, first_names = paths_of(spec), paths_of(first)
    if names != first_names:
        return f"it has leaves {', '.join(names)}, the first had {', '.join(first_names)}"
    return f"its structure is {describe_structure(spec)}, the first was {describe_structure(first)}"


def _cure(first: Look, look: Look) -> str:
    if len(first) == len(look) == 2 and first[1] == look[1]:
        return "drop or pad a short last batch (drop_remainder=True)"
    return "convert it to what the first was, such as with np.asarray(leaf, dtype)"


def _show(look: Look) -> str:
    if len(look) == 1:
        return f"of type {look[0].__name__}"
    return f"of shape {tuple(look[0])} and dtype {look[1]}"
