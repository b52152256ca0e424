"""barrier, any, all and agree: meeting to decide together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from ..collectives import Turn, no_data
from ..tree import flatten
from ._meeting import Call, Collective, Parts, SyncGroup
from ._signature import value_text


@final
class Agree(Collective):
    """Returns the value that all replicas hold; different ones cannot meet."""

    __slots__ = ()

    def detail(self, argument: object) -> str:
        """Return nothing: the value is shown where it differs."""
        return ""

    def agrees(self, first: Call, call: Call) -> bool:
        """Tell whether the values are equal; NaN equals NaN."""
        return _equal_trees(first.args[0], call.args[0])

    def difference(self, first: Call, call: Call) -> str | None:
        """Show both values."""
        if self.agrees(first, call):
            return None
        return f"values {first.args[0]!r} and {call.args[0]!r} differ"

    def signature(self, call: Call) -> str:
        """Describe the value, which has to be equal."""
        return value_text(call.args[0])

    async def across(self, group: SyncGroup, calls: Sequence[Call], turn: Turn) -> Parts:
        """Give each replica its own value back if all workers hold equal ones."""
        await turn.exchange(b"", no_data)
        return self.perform(group, calls)

    def perform(self, group: SyncGroup, calls: Sequence[Call]) -> Parts:
        """Give each replica its own, equal value back."""
        return [call.args[0] for call in calls]


@final
class Decision(Collective):
    """Combines one flag per replica: `any`, `all`, or nothing at all for `barrier`."""

    __slots__ = ("_decide",)

    def __init__(self, name: str, decide: Callable[[list[Any]], bool | None]) -> None:
        super().__init__(name)
        self._decide = decide

    def detail(self, argument: object) -> str:
        """Return nothing: there is no argument."""
        return ""

    def agrees(self, first: Call, call: Call) -> bool:
        """Return True: flags may differ."""
        return True

    def difference(self, first: Call, call: Call) -> str | None:
        """Return None: flags may differ."""
        return None

    def signature(self, call: Call) -> str:
        """Return nothing: flags may differ."""
        return ""

    async def across(self, group: SyncGroup, calls: Sequence[Call], turn: Turn) -> Parts:
        """Decide here, then over the decisions of all workers."""
        own = self._decide([call.args[0] for call in calls])
        slots = await turn.exchange(bytes([bool(own)]), no_data)
        return [self._decide([slot != b"\0" for slot in slots])] * len(calls)

    def perform(self, group: SyncGroup, calls: Sequence[Call]) -> Parts:
        """Decide once for all."""
        return [self._decide([call.args[0] for call in calls])] * len(calls)


def _equal_trees(first: object, other: object) -> bool:
    leaves, spec = flatten(first)
    other_leaves, other_spec = flatten(other)
    if spec != other_spec:
        return False
    return all(_equal_leaves(a, b) for a, b in zip(leaves, other_leaves, strict=True))


def _equal_leaves(a: object, b: object) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic, float, complex)):
        x, y = np.asarray(a), np.asarray(b)
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        return bool(np.array_equal(x, y, equal_nan=x.dtype.kind in "fc"))
    return bool(a == b)


AGREE = Agree("agree")
BARRIER = Decision("barrier", lambda _flags: None)
ANY = Decision("any", any)
ALL = Decision("all", all)
