"""View of a strategy for merge functions of a group of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from ..collectives import Reducer
from ..typing import ReduceOp
from ._combine import Axis, gather_tree, local_results, reduce_tree
from ._extended import Extended

if TYPE_CHECKING:
    from ._strategy import Strategy


@final
class GroupView:
    """A strategy as the replicas of one group see it: values have one entry per member.

    The first argument of a merge function that was passed to `ctx.group(members).merge_call`.
    Variables and devices stay those of the whole strategy: `extended.update` writes every
    component. For all the rest, such as `run` and `snapshot`, there is `strategy`.

    Args:
        strategy: The whole strategy.
        members: Ids of the replicas in the group, ascending.

    Attributes:
        strategy: The whole strategy.
        device_names: One device name per member.

    Example:
        >>> import aioreplica as ar
        >>> strategy = ar.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.view_of([1]).local_results(ar.PerReplica(["b"]))
        ('b',)
    """

    __slots__ = ("_members", "device_names", "strategy")

    def __init__(self, strategy: Strategy, members: Sequence[int]) -> None:
        self.strategy = strategy
        self._members = tuple(members)
        self.device_names = tuple(strategy.device_names[i] for i in members)

    @property
    def members(self) -> tuple[int, ...]:
        """Ids of the replicas in the group, ascending."""
        return self._members

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in the group."""
        return len(self.members)

    @property
    def num_local_replicas(self) -> int:
        """The same: a group's replicas are all in this process."""
        return len(self.members)

    @property
    def workers(self) -> None:
        """None: a group's replicas are all in this process."""
        return None

    @property
    def has_plain_values(self) -> bool:
        """True if values stay plain instead of becoming PerReplica (the default strategy)."""
        return self.strategy.has_plain_values

    @property
    def reducer(self) -> Reducer:
        """Reducer that carries out collectives on arrays."""
        return self.strategy.reducer

    @property
    def extended(self) -> Extended:
        """Devices, updates of single components, and reductions of the group's values."""
        return Extended(self.strategy, self)

    async def reduce(self, op: ReduceOp | str, value: object, axis: Axis = None) -> Any:
        """Reduce values over the members, as `Strategy.reduce` does over all replicas."""
        self.require_cross_replica("reduce", "ctx.group(members).all_reduce(op, value)")
        self.open()
        return await reduce_tree(self, ReduceOp.parse(op), value, axis, None)

    async def gather(self, value: object, axis: int) -> Any:
        """Join the members' components along `axis`, in the order of their ids."""
        self.require_cross_replica("gather", "ctx.group(members).all_gather(value, axis)")
        self.open()
        return await gather_tree(self, value, axis)

    def local_results(self, value: object) -> tuple[Any, ...]:
        """Return one entry per member, selected through pytrees.

        A variable has an entry per replica of the strategy, of which the members' are taken. A
        value without distributed leaves gives `(value,)`.
        """
        return local_results(value, self._members)

    def require_cross_replica(self, what: str, twin: str | None) -> None:
        """Check that a cross-replica method is called where the strategy may be in charge."""
        self.strategy.require_cross_replica(what, twin)

    def open(self) -> None:
        """Bind the strategy to the running loop, at the first use."""
        self.strategy.open()

    def __repr__(self) -> str:
        return f"<GroupView {self.members} of {self.strategy!r}>"
