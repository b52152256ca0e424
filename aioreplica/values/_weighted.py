"""A total and the weight behind it, so that means over unequal parts are exact."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, final

import numpy as np
from array_api_compat import array_namespace, is_array_api_obj

from ..context import TRACE
from ..tree import LEAF_SPEC, TreeSpec, flatten, map_nodes, register_node
from ._distributed import DistributedValues, PerReplica
from ._indexed_slices import IndexedSlices


@final
@dataclass(frozen=True, slots=True)
class Weighted:
    """A sum and the number of examples (or tokens) behind it; a pytree node.

    Totals and weights are reduced apart and divided once, at the end. An average of averages
    would overweight a replica with a short batch.

    Attributes:
        total: Sum over the local examples, a scalar or an array.
        weight: How many examples the total stands for; 0 is legal and contributes nothing.

    Example:
        >>> Weighted(6.0, 3).mean()
        2.0
    """

    total: Any
    weight: Any

    def mean(self) -> Any:
        """Divide the total by the weight.

        Raises:
            ValueError: If the weight is 0; in a step that is compiled the result is NaN then.
        """
        if TRACE.get() is None and self.weight == 0:
            raise ValueError(
                "The mean of a Weighted with weight 0 is undefined. Reduce it over all replicas "
                "before dividing, or skip empty batches."
            )
        return self.total / self.weight


register_node(
    Weighted,
    lambda value: ((value.total, value.weight), None),
    lambda _none, parts: Weighted(*parts),
)


def flatten_summands(tree: object) -> tuple[list[object], TreeSpec]:
    """Do what `tree.flatten` does for a reduction: totals of weight 0 contribute zeros.

    Example:
        >>> flatten_summands({"loss": Weighted(float("nan"), 0)})[0]
        [0.0, 0]
    """
    leaves, spec = flatten(tree)
    if spec is LEAF_SPEC or not _holds_weighted(spec):
        return leaves, spec
    return flatten(map_nodes(Weighted, _empty_as_zero, tree))


@lru_cache(maxsize=256)
def _holds_weighted(spec: TreeSpec) -> bool:
    return spec.type is Weighted or any(map(_holds_weighted, spec.children()))


def _empty_as_zero(part: Weighted) -> Weighted:
    total, weight = part.total, part.weight
    if isinstance(total, DistributedValues) and isinstance(weight, DistributedValues):
        if len(total) == len(weight) and any(map(_is_zero, weight)):
            pairs = zip(total, weight, strict=True)
            return Weighted(PerReplica([_zero(t) if _is_zero(w) else t for t, w in pairs]), weight)
        return part
    return Weighted(_zero(total), weight) if _is_zero(weight) else part


def _is_zero(weight: Any) -> bool:
    return np.ndim(weight) == 0 and bool(weight == 0)


def _zero(total: object) -> object:
    if isinstance(total, (bool, int, float, complex)):
        return type(total)(0)
    if isinstance(total, IndexedSlices):
        return IndexedSlices(total.values[:0], total.indices[:0], total.dense_shape)
    if isinstance(total, (np.ndarray, np.generic)) or not is_array_api_obj(total):
        return np.zeros_like(total)
    return array_namespace(total).zeros_like(total)
