"""reduce_to and broadcast_to: results that live where a destination lives.

Arrays are immutable once they are here, so the entries of a Mirrored share one read-only buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..collectives import CommunicationOptions, leaf_bytes, require_options
from ..devices import INLINE_BYTES, run_together
from ..tree import flatten, leaves, map_leaves, unflatten
from ..typing import ReduceOp
from ..values import DistributedValues, Mirrored, Variable
from ._combine import reduce_tree
from ._destinations import require_destination

if TYPE_CHECKING:
    from ._strategy import Strategy


async def reduce_pairs(
    strategy: Strategy,
    op: ReduceOp | str,
    pairs: Sequence[tuple[Any, Any]],
    what: str,
    options: CommunicationOptions | None = None,
) -> list[Any]:
    """Reduce the values of all pairs together; nothing is reduced if one destination is wrong."""
    require_options(options, what)
    counts = [_entries(destinations, strategy, what) for _, destinations in pairs]
    flattened = [flatten(value) for value, _ in pairs]
    columns = [column for column, _ in flattened]
    strategy.open()
    reduced = await reduce_tree(strategy, ReduceOp.parse(op), columns, None, options)
    results = []
    for count, (_, spec), column in zip(counts, flattened, reduced, strict=True):
        placed = [leaf if count is None else _mirrored(leaf, count) for leaf in column]
        results.append(unflatten(spec, placed))
    return results


async def broadcast_value(strategy: Strategy, value: Any, destinations: Any) -> Any:
    """Return a Mirrored of `value` with an entry per destination device."""
    what = "extended.broadcast_to"
    count = require_destination(destinations, strategy, what) or 1
    for leaf in leaves(value):
        if isinstance(leaf, DistributedValues) and not leaf.is_mirrored:
            raise ValueError(
                f"{what} got a {type(leaf).__name__}, whose values may differ. Reduce it to the "
                "destinations instead (await strategy.extended.reduce_to(...))."
            )
    one = map_leaves(_one_value, value)
    if strategy.has_plain_values:
        return one
    if sum(map(leaf_bytes, leaves(one))) <= INLINE_BYTES:
        return _mirrored(map_leaves(_frozen, one), count)
    [frozen] = await run_together([partial(map_leaves, _frozen, one)])
    return _mirrored(frozen, count)


def _entries(destinations: Any, strategy: Strategy, what: str) -> int | None:
    count = require_destination(destinations, strategy, what)
    return None if strategy.has_plain_values else count


def _mirrored(value: Any, count: int) -> Mirrored:
    """Repeat a value: containers are built anew for each entry, leaves are shared."""
    structure = flatten(value)
    return Mirrored([unflatten(structure[1], structure[0]) for _ in range(count)])


def _one_value(leaf: Any) -> Any:
    if isinstance(leaf, Variable):
        return leaf.value
    return leaf[0] if isinstance(leaf, DistributedValues) else leaf


def _frozen(leaf: Any) -> Any:
    """Return the leaf as something that nobody can write, copied if it could be."""
    if type(leaf) is not np.ndarray or (leaf.base is None and not leaf.flags.writeable):
        return leaf
    copy = np.array(leaf)
    copy.flags.writeable = False
    return copy
