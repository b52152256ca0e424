"""GroupContext: the collectives among some of the replicas."""

from __future__ import annotations

import operator
from collections.abc import Coroutine, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any, final

from ._collective import Collective
from ._collectives import Collectives
from ._handle import Handle
from ._sync_group import SyncGroup

if TYPE_CHECKING:
    from ._context import ReplicaContext


@final
class GroupContext(Collectives):
    """One replica's place in a group of some replicas; got from `ctx.group(members)`.

    The group's collectives concern its members only and are numbered on their own. Among
    themselves and with those of other groups, members must keep one order: two groups that wait
    for each other are a MergeMismatchError at once.

    Attributes:
        members: Ids of the replicas in the group, ascending.
    """

    __slots__ = ("_context", "_group", "_position", "members")

    def __init__(self, context: ReplicaContext, group: SyncGroup) -> None:
        self._context = context
        self._group = group
        self.members = group.members
        self._position = self.members.index(context.replica_id_in_sync_group)

    @property
    def replica_id_in_sync_group(self) -> int:
        """Position of this replica in the group, from 0."""
        return self._position

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas are in the group."""
        return len(self.members)

    def _call(
        self,
        collective: Collective,
        argument: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        frame: FrameType,
    ) -> Coroutine[Any, Any, Any]:
        return self._context.call_in(
            self._group, self._position, collective, argument, args, kwargs, frame
        )

    def _start(
        self, collective: Collective, argument: Any, args: tuple[Any, ...], frame: FrameType
    ) -> Handle:
        return self._context.start_in(
            self._group, self._position, collective, argument, args, frame
        )

    def __repr__(self) -> str:
        return f"<GroupContext {self.members} | position {self._position}>"


def require_members(members: Iterable[int], own: int, num_replicas: int) -> tuple[int, ...]:
    """Return the ids of a group in ascending order.

    Raises:
        TypeError: If they are no ints.
        ValueError: If there is none, one is given twice or is not a replica, or the caller is not
            among them.
    """
    shown = members
    try:
        ids = tuple(operator.index(member) for member in members)
    except TypeError:
        raise TypeError(f"group needs a sequence of replica ids, got {shown!r}.") from None
    if not ids:
        raise ValueError("group needs at least one replica id, got none.")
    outside = [i for i in ids if not 0 <= i < num_replicas]
    if outside:
        raise ValueError(
            f"group got {list(ids)}, but there is no replica {outside[0]}: ids are 0 to "
            f"{num_replicas - 1}."
        )
    if len(set(ids)) < len(ids):
        raise ValueError(f"group got {list(ids)}, where an id is repeated. Name each once.")
    if own not in ids:
        raise ValueError(
            f"group got {list(ids)}, which leaves out the replica that asks. Only members can "
            "call it: guard it with `if ctx.replica_id_in_sync_group in ids:`."
        )
    return tuple(sorted(ids))
