"""View of a strategy for merge functions of a group of replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from ..typing import OpName, ReduceOp
from ._combine import Axis, gather_tree, local_results, reduce_tree
from ._extended import Extended
from ._runtime import Replicas, Runtime

if TYPE_CHECKING:
    from ._strategy import Strategy


@final
class GroupView:
    """A strategy as the replicas of one group see it: values have one entry per member.

    The first argument of a merge function that was passed to `ctx.group(members).merge_call`.
    Variables and devices stay those of the whole strategy: `extended.update` writes every
    component. For all the rest, such as `run` and `snapshot`, there is `strategy`.

    Args:
        runtime: The whole strategy.
        members: Ids of the replicas in the group, ascending.

    Attributes:
        strategy: The whole strategy.
        members: Ids of the replicas in the group, ascending.
        device_names: One device name per member.

    Example:
        >>> import asyncio
        >>> import aioreplica as ar
        >>> strategy = ar.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> async def step():
        ...     ctx = ar.get_replica_context()
        ...     return await ctx.group([ctx.replica_id_in_sync_group]).merge_call(
        ...         lambda view: view.num_replicas_in_sync
        ...     )
        >>> asyncio.run(strategy.run(step))
        PerReplica({cpu:0: 1, cpu:1: 1})
    """

    __slots__ = ("_replicas", "device_names", "members", "strategy")

    def __init__(self, runtime: Runtime, members: tuple[int, ...]) -> None:
        self._replicas = Replicas(runtime, members)
        self.strategy: Strategy = runtime.facade
        self.members = members
        self.device_names = tuple(runtime.device_names[i] for i in members)

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in the group."""
        return len(self.members)

    @property
    def extended(self) -> Extended:
        """Devices, updates of single components, and reductions of the group's values."""
        return Extended(self._replicas.runtime, self.members)

    async def reduce(self, op: ReduceOp | OpName, value: object, axis: Axis = None) -> Any:
        """Reduce values over the members, as `Strategy.reduce` does over all replicas."""
        self._open("reduce", "ctx.group(members).all_reduce(op, value)")
        return await reduce_tree(self._replicas, ReduceOp.parse(op), value, axis)

    async def gather(self, value: object, axis: int) -> Any:
        """Join the members' components along `axis`, in the order of their ids."""
        self._open("gather", "ctx.group(members).all_gather(value, axis)")
        return await gather_tree(self._replicas, value, axis)

    def local_results(self, value: object) -> tuple[Any, ...]:
        """Return one entry per member, selected through pytrees.

        A variable has an entry per replica of the strategy, of which the members' are taken. A
        value without distributed leaves gives `(value,)`.
        """
        return local_results(value, self.members)

    def _open(self, what: str, twin: str) -> None:
        runtime = self._replicas.runtime
        runtime.require_cross_replica(what, twin)
        runtime.open()

    def __repr__(self) -> str:
        return f"<GroupView {self.members} of {self.strategy!r}>"
