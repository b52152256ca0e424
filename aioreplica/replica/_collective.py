"""What replicas can meet in: how calls are compared, and what is done with all of them."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, final

if TYPE_CHECKING:
    from ..collectives import CommunicationOptions, Reducer
    from ..context import Place
    from ..devices import OpTracker
    from ._call import Call

Parts: TypeAlias = Sequence[Any]  # one result per replica, in replica order


@final
@dataclass(slots=True)
class Pending:
    """A merge that takes longer: what to await, and how its result becomes parts."""

    awaitable: Awaitable[Any]
    to_parts: Callable[[Any], Parts]

    def discard(self) -> None:
        """Close what will never be awaited."""
        if inspect.iscoroutine(self.awaitable):
            self.awaitable.close()
        elif isinstance(self.awaitable, asyncio.Future):
            self.awaitable.cancel()


@final
@dataclass(slots=True)
class Meeting:
    """What a collective needs to know of the sync group it happens in.

    Attributes:
        strategy: Passed to merge functions.
        merge_place: Where merge functions run.
        device_names: One per member.
        has_plain_values: Whether merge functions get plain values (the default strategy).
        reducer: Does the work on arrays.
        ops: What counts the run's work in flight.
        members: The replica ids.
        num_replicas: How many there are.
        timeout_s: How long they wait for each other unless a call says otherwise, in seconds.
        is_blocking: Whether they meet on their device threads, where all work is done at once.
    """

    strategy: Any  # Any: the strategies layer lies above this one
    merge_place: Place
    device_names: Sequence[str]
    has_plain_values: bool
    reducer: Reducer
    ops: OpTracker
    members: Sequence[int]
    num_replicas: int
    timeout_s: float | None
    is_blocking: bool = False

    def of(self, members: Sequence[int]) -> Meeting:
        """Return the meeting of some of the members."""
        names = [self.device_names[i] for i in members]
        return replace(self, device_names=names, members=members, num_replicas=len(members))


class Collective(ABC):
    """One kind of collective; stateless, one instance per process.

    Attributes:
        is_uneven: Whether replicas may bring values of different sizes.
    """

    __slots__ = ()
    is_uneven = False

    @property
    @abstractmethod
    def name(self) -> str:
        """Name as users call it, such as "all_reduce"."""

    @abstractmethod
    def detail(self, argument: Any) -> str:
        """Describe the decisive argument for tables; may be empty."""

    def options(self, argument: Any) -> CommunicationOptions | None:
        """Return the options of a call, None if it has none of its own."""
        return None

    def op_name(self, argument: Any) -> str:
        """Name the operator of a reduction for records; empty for the rest."""
        return ""

    def num_bytes(self, call: Call) -> int:
        """Return the size of what one replica brought."""
        return 0

    @abstractmethod
    def agrees(self, first: Call, call: Call) -> bool:
        """Tell quickly whether two calls of this collective can merge."""

    @abstractmethod
    def difference(self, first: Call, call: Call) -> str | None:
        """Say in words why two calls cannot merge; None exactly if they agree."""

    @abstractmethod
    def perform(self, meeting: Meeting, calls: Sequence[Call]) -> Parts | Pending:
        """Merge the calls of all replicas, at once or, if that takes long, in a task."""
