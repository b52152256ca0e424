"""Who meets: a sync group, and one generation of calls in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import asyncio

    from ._call import Call
    from ._collective import Meeting

_new = object.__new__


@final
class SyncGroup:
    """Replicas that meet in collectives, in ascending order; all of a run, or some of them.

    Attributes:
        members: Their replica ids.
        is_partial: Whether it is a part of the run's replicas, which tables then name.
        open: The generations that are not complete, by sequence number.
        meeting: What collectives need to know of it.
    """

    __slots__ = ("is_partial", "meeting", "members", "open")

    meeting: Meeting

    def __init__(self, members: Sequence[int], *, is_partial: bool) -> None:
        self.members = tuple(members)
        self.is_partial = is_partial
        self.open: dict[int, Generation] = {}

    def __repr__(self) -> str:
        return f"<SyncGroup {self.members} | {len(self.open)} open>"


@final
class Generation:
    """The calls with one sequence number of a group: one per member, as they arrive.

    One is made per merge, so it is built by `new_generation`, without the frame of an `__init__`.

    Attributes:
        group: Whose calls.
        first: The call that arrived first; the others are compared with it.
        calls: One per member, None for those who are missing.
        visits: Where each call was made and when it arrived, for the recorder.
        missing: How many are.
        is_merged: Whether the members have been released.
        waiter: The future that all waiting tasks share; the group's shell makes it.
        timer: What ends the run if the members do not meet in time, or None.
        parts: One result per member, where threads meet and no future carries them.
        error: What the merge raised there, or None.
    """

    __slots__ = (
        "calls", "error", "first", "group", "is_merged", "missing", "parts", "timer", "visits",
        "waiter",
    )  # fmt: skip

    group: SyncGroup
    first: Call
    calls: list[Any]  # of Call | None; of Call alone once nobody is missing
    visits: list[Any]  # of Visit
    missing: int
    is_merged: bool
    waiter: asyncio.Future[Sequence[Any]] | None
    timer: asyncio.TimerHandle | None
    parts: Sequence[Any]
    error: BaseException | None

    def __repr__(self) -> str:
        return f"<Generation {self.first.describe()} | {self.missing} missing>"


def new_generation(group: SyncGroup, first: Call) -> Generation:
    """Open the generation of a call that is the first of its number to arrive."""
    generation = _new(Generation)
    generation.group = group
    generation.first = first
    size = len(group.members)
    generation.calls = [None] * size
    generation.visits = [None] * size
    generation.missing = size
    generation.is_merged = False
    generation.waiter = None
    generation.timer = None
    group.open[first.sequence] = generation
    return generation


def is_given_up(generation: Generation) -> bool:
    """Tell whether somebody who waited was cancelled, and with it the future of all."""
    waiter = generation.waiter
    return waiter is not None and waiter.cancelled()
