"""Rendezvous of the replicas of one run: who has arrived, who never will, what that means.

Pure decision code: events go in, decisions come out, nothing here awaits or touches a task. The
awaitable shell is in `_meeting_point.py`; keeping the two apart lets a test feed every order of
events.

Calls meet by group and sequence number, so several generations can be open: some replica has
started the next reduction, or other replicas meet in a group of their own. Most often there is one.

Invariants:
    * A generation leaves `group.open` exactly once, when its last call arrives; its calls are in
      the order of the group's members.
    * After a `Mismatch` nothing is decided any more: the run is over.
    * Once a replica has failed no mismatch is decided: the failure is the better explanation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, unique
from functools import partial
from typing import final

from ..errors import ReplicaRow
from ._call import Call
from ._sync_group import Generation, SyncGroup, new_generation


@final
@unique
class ReplicaState(Enum):
    """Where a replica is in its run."""

    RUNNING = "running"
    WAITING = "waiting"
    RETURNED = "returned"
    FAILED = "failed"
    WITHDREW = "withdrew"


@final
@dataclass(frozen=True, slots=True)
class Mismatch:
    """The replicas can never meet: end the run.

    Attributes:
        reason: One sentence naming who did what.
        rows: One row per replica.
    """

    reason: str
    rows: tuple[ReplicaRow, ...]


@final
class Rendezvous:
    """Decides when a generation of calls may merge, and when one never will.

    Args:
        device_names: One per replica; "-" for a replica without a device.
        is_blocked: Tells of a replica that waits for handles whether its own task does, so that it
            can start nothing else meanwhile; a child task that waits blocks nobody.

    Attributes:
        everyone: The group of all replicas.
    """

    __slots__ = (
        "_current",
        "_devices",
        "_failed",
        "_gone",
        "_groups",
        "_handles",
        "_is_blocked",
        "_is_over",
        "_started",
        "_states",
        "everyone",
    )

    def __init__(
        self, device_names: Sequence[str], is_blocked: Callable[[int], bool] = lambda _id: True
    ) -> None:
        self._devices = device_names
        self._is_blocked = is_blocked
        self.everyone = SyncGroup(range(len(device_names)), is_partial=False)
        self._groups: dict[tuple[int, ...], SyncGroup] = {}
        self._current: list[Generation | None] = [None] * len(device_names)
        self._handles: dict[int, list[Generation]] = {}  # that tasks of the replica wait for
        self._started: dict[int, list[Generation]] = {}  # without waiting, not merged so far
        self._states: dict[int, ReplicaState] = {}  # of replicas that left; the rest follow
        self._gone: list[int] = []
        self._failed = False
        self._is_over = False

    # ---- events --------------------------------------------------------------------------

    def arrive(
        self, replica_id: int, call: Call, now_s: float = 0.0, *, waits: bool = True
    ) -> Generation | Mismatch:
        """Record that a replica takes part in a collective; with nobody missing it may merge.

        With `waits` its task can do nothing else until then. `now_s` is noted for records.
        """
        group = call.group
        generation = group.open.get(call.sequence)
        is_new = generation is None
        if generation is None:
            generation = new_generation(group, call)
        position = call.position
        generation.calls[position] = call
        generation.visits[position] = (call.code, call.instruction, now_s)
        if waits:
            self._current[replica_id] = generation
        else:
            self._note_started(replica_id, generation)
        if not is_new:
            first = generation.first
            if call.collective is not first.collective or not call.collective.agrees(first, call):
                return self._mismatch(partial(_clash, generation)) or generation
        generation.missing = missing = generation.missing - 1
        if not missing:
            del group.open[call.sequence]
            return generation
        if self._gone and any(_lacks(generation, gone) for gone in self._gone):
            return self._mismatch(partial(self._absence, generation)) or generation
        if waits and (self._groups or len(group.open) > 1):
            return self._deadlock(generation) or generation
        return generation

    def wait_for_started(self, replica_id: int, generation: Generation) -> Mismatch | None:
        """Record that a task of the replica waits for what was started before."""
        self._handles.setdefault(replica_id, []).append(generation)
        return self._deadlock(generation)

    def waited_for_started(self, replica_id: int, generation: Generation) -> Mismatch | None:
        """Record that a task waits no longer; others of the replica may, and now do so alone."""
        waits = self._handles.get(replica_id, [])
        if generation in waits:
            waits.remove(generation)
        for other in waits:
            if other.missing:
                mismatch = self._deadlock(other)
                if mismatch is not None:
                    return mismatch
        return None

    def _note_started(self, replica_id: int, generation: Generation) -> None:
        started = self._started.get(replica_id, ())
        self._started[replica_id] = [*(g for g in started if not g.is_merged), generation]

    def leave(
        self, replica_id: int, state: ReplicaState, call: Call | None = None
    ) -> Mismatch | None:
        """Record that a replica ended (RETURNED or FAILED) or gave up its call (WITHDREW).

        `call` is the one given up, if the replica had not arrived in it.
        """
        self._states[replica_id] = state
        if state is ReplicaState.FAILED:
            self._failed = True
            return None
        if state is ReplicaState.WITHDREW:
            return self._mismatch(partial(self._withdrawal, replica_id, call))
        self._gone.append(replica_id)
        current = self._current[replica_id]
        if current is not None and current.missing:
            return self._mismatch(partial(_left_behind, replica_id, current))
        for generation in self.open_generations():
            if _lacks(generation, replica_id):
                return self._mismatch(partial(self._absence, generation))
        return None

    # ---- questions -----------------------------------------------------------------------

    def group(self, members: tuple[int, ...]) -> SyncGroup:
        """Return the group of some replicas, one object per run; all of them are `everyone`."""
        if members == self.everyone.members:
            return self.everyone
        group = self._groups.get(members)
        if group is None:
            group = self._groups[members] = SyncGroup(members, is_partial=True)
        return group

    def open_generations(self) -> list[Generation]:
        """Return what is waited for in any group, the oldest numbers of everyone's first."""
        found = list(self.everyone.open.values())
        for group in self._groups.values():
            found += group.open.values()
        return found

    def is_in(self, replica_id: int, generation: Generation) -> bool:
        """Tell whether a generation is the newest that a replica came to wait in."""
        return self._current[replica_id] is generation

    def current_call(self, replica_id: int) -> Call | None:
        """Return the call a replica is in, or the last one it waited for."""
        generation = self._current[replica_id]
        return None if generation is None else _call_of(generation, replica_id)

    def rows(self) -> tuple[ReplicaRow, ...]:
        """Describe every replica, in replica order."""
        return tuple(self._row(replica_id) for replica_id in range(len(self._devices)))

    def forget(self) -> None:
        """Let go of all calls, and with them of the arguments of the last merge."""
        self._current = [None] * len(self._devices)
        self._handles.clear()
        self._started.clear()
        for group in (self.everyone, *self._groups.values()):
            group.open.clear()

    # ---- decisions -----------------------------------------------------------------------

    def _mismatch(self, explain: Callable[[], str]) -> Mismatch | None:
        """Decide that the run is over, unless that is decided or a failure explains it better."""
        if self._failed or self._is_over:
            return None
        self._is_over = True
        return Mismatch(explain(), self.rows())

    def _waits(self, replica_id: int) -> list[Generation]:
        """Return the incomplete generations that a replica waits for; none if it can go on."""
        handles = self._handles.get(replica_id, ())
        if any(not generation.missing for generation in handles):
            return []  # something it waits for is complete
        current = self._current[replica_id]
        if current is not None and not current.is_merged and replica_id not in self._states:
            return [*handles, current] if current.missing else []
        return list(handles) if handles and self._is_blocked(replica_id) else []

    def _deadlock(self, joined: Generation) -> Mismatch | None:
        """Decide that some generation can never be complete, because its replicas wait elsewhere.

        Somebody has just begun to wait in `joined`, so a circle can only lead through it.

        A replica can go on if it waits for nothing, or if one of the generations it waits for can
        become complete; that one can if all who are missing in it can go on.
        """
        if self._failed or self._is_over or not any(map(self._waits, _missing(joined))):
            return None
        waits = {i: self._waits(i) for i in range(len(self._devices))}
        free = {i for i, own in waits.items() if not own}
        stuck = {i: own for i, own in waits.items() if own}
        while True:
            freed = {
                i
                for i, own in stuck.items()
                if any(all(m in free for m in _missing(generation)) for generation in own)
            }
            if not freed:
                break
            free |= freed
            for replica_id in freed:
                del stuck[replica_id]
        if not stuck:
            return None
        return self._mismatch(partial(_crossed, stuck))

    # ---- words ---------------------------------------------------------------------------

    def _row(self, replica_id: int) -> ReplicaRow:
        device, state = self._devices[replica_id], self._states.get(replica_id)
        current = self._current[replica_id]
        inside = [g for g in self._handles.get(replica_id, ()) if not g.is_merged]
        if current is not None and not current.is_merged:
            inside.insert(0, current)
        flying = [g for g in self._started.get(replica_id, ()) if not g.is_merged]
        flying = [g for g in flying if g not in inside]
        if inside:
            call: Call | None = _call_of(inside[0], replica_id)
            label = "waiting" if inside[0].missing else "merging"
        else:
            call, label = self.current_call(replica_id), "running"
        texts = [] if call is None else [("" if inside else "after ") + call.describe()]
        if flying:
            calls = [_call_of(generation, replica_id) for generation in flying]
            texts += [f"{started.describe()} in flight, from {started.site}" for started in calls]
            call = calls[0] if call is None else call
        return ReplicaRow(
            replica_id,
            device,
            label if state is None else state.value,
            "; ".join(texts) or "before any",
            "-" if call is None else call.site,
        )

    def _absence(self, generation: Generation) -> str:
        gone = sorted(i for i in self._gone if _lacks(generation, i))
        waiting = _present(generation)
        return (
            f"{_name(gone)} returned while {_name(waiting, 'replica')} "
            f"wait{'s' if len(waiting) == 1 else ''} in {generation.first.describe()}"
        )

    def _withdrawal(self, replica_id: int, given_up: Call | None) -> str:
        call = given_up or self.current_call(replica_id)
        assert call is not None
        current = self._current[replica_id]
        is_merging = current is not None and not current.missing and not current.is_merged
        merging = ", while its merge was running" if is_merging else ""
        return (
            f"Replica {replica_id} withdrew from {call.describe()}{merging} "
            "(a timeout or cancellation inside the replica)"
        )


def _call_of(generation: Generation, replica_id: int) -> Call:
    call: Call = generation.calls[generation.group.members.index(replica_id)]
    return call


def _present(generation: Generation) -> list[int]:
    pairs = zip(generation.group.members, generation.calls, strict=True)
    return [member for member, call in pairs if call is not None]


def _missing(generation: Generation) -> list[int]:
    pairs = zip(generation.group.members, generation.calls, strict=True)
    return [member for member, call in pairs if call is None]


def _lacks(generation: Generation, replica_id: int) -> bool:
    members = generation.group.members
    return replica_id in members and generation.calls[members.index(replica_id)] is None


def _clash(generation: Generation) -> str:
    """Explain why the calls that are there cannot merge, replica by replica in order."""
    base_id, *others = _present(generation)
    base = _call_of(generation, base_id)
    for replica_id in others:
        call = _call_of(generation, replica_id)
        if call.collective is not base.collective:
            return _elsewhere(base_id, base, replica_id, call)
        difference = call.collective.difference(base, call)
        if difference is not None:
            where = f" in group {call.group.members}" if call.group.is_partial else ""
            return (
                f"Replicas {base_id} and {replica_id} disagree in {base.collective.name} "
                f"#{base.sequence}{where}: {difference}"
            )
    raise AssertionError("no two calls differ")


def _crossed(stuck: dict[int, list[Generation]]) -> str:
    """Explain a circle of replicas that wait for each other in different calls."""
    replica_id = min(stuck)
    generation = stuck[replica_id][0]
    other_id = min(i for i in _missing(generation) if i in stuck)
    other = _call_of(stuck[other_id][0], other_id)
    return _elsewhere(replica_id, _call_of(generation, replica_id), other_id, other)


def _left_behind(replica_id: int, generation: Generation) -> str:
    call = _call_of(generation, replica_id)
    return f"Replica {replica_id} returned while a task of it waits in {call.describe()}"


def _elsewhere(replica_id: int, call: Call, other_id: int, other: Call) -> str:
    return (
        f"Replica {replica_id} is in {call.describe()} but replica {other_id} is in "
        f"{other.describe()}"
    )


def _name(ids: Sequence[int], word: str = "Replica") -> str:
    if len(ids) == 1:
        return f"{word} {ids[0]}"
    shown = [*map(str, ids)] if len(ids) <= 8 else [*map(str, ids[:7]), f"{len(ids) - 7} more"]
    return f"{word}s {', '.join(shown[:-1])} and {shown[-1]}"
