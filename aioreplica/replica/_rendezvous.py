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
from ._meeting import Call, Generation, SyncGroup, WaitedFor, new_generation
from ._messages import SEND_BOUND, Messages, Transfer


@final
@unique
class ReplicaState(Enum):
    """State of a replica in its run."""

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
        follows_return: Whether a replica that returned is the cause. Another may be about to fail
            in the same cycle of the loop, which would explain it better.
        is_of_messages: Whether sends and receives are the cause.
    """

    reason: str
    rows: tuple[ReplicaRow, ...]
    follows_return: bool = False
    is_of_messages: bool = False


@final
class Rendezvous:
    """Decides when a generation of calls may merge, and when one never will.

    Args:
        device_names: One per replica; "-" for a replica without a device.
        everyone: The group of all replicas; made if it is not given.

    Attributes:
        everyone: The group of all replicas.
        in_flight: Generations that some replica started without waiting and that are not merged,
            as the keys.
        messages: What replicas send each other; None before the first send or receive.
        may_act: Tells of a replica, and of how many waits it has here, whether a task or an op of
            it does something else; asked where messages are part of a circle. None if none can.
    """

    __slots__ = (
        "_blocked", "_current", "_devices", "_failed", "_gone", "_groups", "_handle_waits",
        "_is_over", "_may_cross", "_states", "everyone", "in_flight", "may_act", "messages",
    )  # fmt: skip

    def __init__(self, device_names: Sequence[str], everyone: SyncGroup | None = None) -> None:
        size = len(device_names)
        self._devices = device_names
        self.everyone = everyone or SyncGroup(range(size), device_names)
        self.in_flight: dict[Generation, None] = {}
        self.messages: Messages | None = None
        self.may_act: Callable[[int, int], bool] | None = None
        self._groups: dict[tuple[int, ...], SyncGroup] = {}
        self._may_cross = False  # whether there are groups or messages, and so perhaps circles
        self._current: list[Generation | None] = [None] * size
        self._handle_waits: dict[int, dict[WaitedFor, int]] = {}  # how many tasks wait for each
        self._blocked: dict[int, int] = {}  # how many of them block the replica
        self._states: dict[int, ReplicaState] = {}  # of replicas that left; the rest follow
        self._gone: list[int] = []
        self._failed = False
        self._is_over = False

    # ---- events --------------------------------------------------------------------------

    def arrive(
        self, replica_id: int, call: Call, now_s: float = 0.0, *, waits: bool = True
    ) -> Generation | Mismatch:
        """Record that a replica takes part in a collective; with no call missing it may merge.

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
            self.in_flight[generation] = None
        # Before the count: an argument that differs ends the run even if others are missing.
        if not is_new:
            first = generation.first
            if call.collective is not first.collective or not call.collective.agrees(first, call):
                return self._mismatch(partial(_clash, generation)) or generation
        generation.missing = missing = generation.missing - 1
        if not missing:
            del group.open[call.sequence]
            return generation
        # Members that returned earlier can never come, so waiting would be for ever.
        if self._gone and any(map(generation.lacks, self._gone)):
            return self._absence(generation) or generation
        # With one open generation no circle is possible, so the usual path works nothing out.
        if waits and (self._may_cross or len(group.open) > 1):
            return self._deadlock(generation) or generation
        return generation

    def open_messages(self, bound: int = SEND_BOUND) -> Messages:
        """Return what replicas send each other, made at the first send or receive."""
        if self.messages is None:
            self.messages = Messages(bound)
            self._may_cross = True
        return self.messages

    def exchange(self, transfer: Transfer) -> Transfer | Mismatch | None:
        """Record a send or a receive; return the one that it lets go on, if there is one.

        The transfer itself waits if it is not over afterwards: see `wait_for_started`.
        """
        messages = self.open_messages()
        if transfer.peer in self._gone and (transfer.is_send or not messages.has_value(transfer)):
            messages.wait(transfer)
            return self._mismatch(
                partial(_gone_peer, transfer), follows_return=True, is_of_messages=True
            )
        return messages.arrive(transfer)

    def wait_for_started(
        self, replica_id: int, generation: WaitedFor, *, blocks: bool = True
    ) -> Mismatch | None:
        """Record that a task of the replica waits for what was started before, or a message.

        It `blocks` the replica if it is the replica's own task, which can start nothing meanwhile.
        Whether a child task that waits keeps the replica from continuing cannot be known.
        """
        waits = self._handle_waits.setdefault(replica_id, {})
        waits[generation] = waits.get(generation, 0) + 1
        # A child task may wait while its replica makes the very call that is missing.
        if not blocks:
            return None
        self._blocked[replica_id] = self._blocked.get(replica_id, 0) + 1
        return self._deadlock(generation)

    def waited_for_started(
        self, replica_id: int, generation: WaitedFor, *, blocks: bool = True
    ) -> Mismatch | None:
        """Record that a task waits no longer; others of the replica may, and now do so alone."""
        waits = self._handle_waits.get(replica_id, {})
        if generation in waits:  # not after `forget`
            waits[generation] -= 1
            if not waits[generation]:
                del waits[generation]
            if blocks:
                self._blocked[replica_id] -= 1
        # What the task waited for may have been the replica's one way to continue.
        current = self._current[replica_id]
        left: list[WaitedFor] = [] if current is None else [current]
        if self._blocked.get(replica_id):
            left += waits
        for other in left:
            mismatch = self._deadlock(other) if other.missing else None
            if mismatch is not None:
                return mismatch
        return None

    def leave(
        self, replica_id: int, state: ReplicaState, call: Call | None = None
    ) -> Mismatch | None:
        """Record that a replica ended (RETURNED or FAILED) or gave up its call (WITHDREW).

        `call` is the one given up, if the replica had not arrived in it.
        """
        self._states[replica_id] = state
        # No mismatch from now on: whoever is missing now is missing because of the failure.
        if state is ReplicaState.FAILED:
            self._failed = True
            return None
        if state is ReplicaState.WITHDREW:
            call = call or self.current_call(replica_id)
            assert call is not None
            number, current = self.everyone.global_id(replica_id), self._current[replica_id]
            return self._mismatch(partial(_withdrawal, number, current, call))
        self._gone.append(replica_id)
        current = self._current[replica_id]
        if current is not None and current.missing:
            return self._mismatch(partial(_left_behind, replica_id, current), follows_return=True)
        if self.everyone.open or self._groups:
            for generation in self.open_generations():
                if generation.lacks(replica_id):
                    return self._absence(generation)
        explain = None if self.messages is None else _unmet(self.messages, replica_id)
        if explain is None:
            return None
        return self._mismatch(explain, follows_return=True, is_of_messages=True)

    # ---- questions -----------------------------------------------------------------------

    def group(self, members: tuple[int, ...], ids: tuple[int, ...] = ()) -> SyncGroup:
        """Return the group of some replicas, one object per run; all of them are `everyone`.

        With `ids` of replicas of other workers too, it meets those.
        """
        if members == self.everyone.members and self.everyone.across is None:
            return self.everyone
        group = self._groups.get(ids or members)  # ids of several workers are members of none
        if group is None:
            # In one go: ops of two replicas may ask at once, each on its own device thread.
            group = self._groups.setdefault(ids or members, self.everyone.part(members, ids))
            self._may_cross = True
        return group

    def open_generations(self) -> list[Generation]:
        """Return what is waited for in any group, the oldest numbers of everyone's first."""
        found = list(self.everyone.open.values())
        for group in list(self._groups.values()):  # an op's thread may make another one
            found += group.open.values()
        return found

    def open_waits(self) -> list[Generation | Transfer]:
        """Return what is waited for in any group, and the sends and receives that wait."""
        transfers = () if self.messages is None else self.messages.waiting()
        return [*self.open_generations(), *transfers]

    def is_in(self, replica_id: int, generation: Generation) -> bool:
        """Tell whether a generation is the newest that a replica came to wait in."""
        return self._current[replica_id] is generation

    def current_call(self, replica_id: int) -> Call | None:
        """Return the call a replica is in, or the last one it waited for."""
        generation = self._current[replica_id]
        return None if generation is None else generation.call_of(replica_id)

    def may_be_stuck(self) -> bool:
        """Tell whether replicas wait for each other in a circle, if child tasks count as waiting.

        They may continue all the same: a replica whose child waits can still make the missing call.
        """
        return not self._is_over and not self._failed and bool(self._idle(self._all_waits))

    def waits(self, replica_id: int) -> list[WaitedFor]:
        """Return the generations and messages that tasks of a replica wait for, past ones too."""
        waits = list(self._handle_waits.get(replica_id, ()))
        current = self._current[replica_id]
        if current is not None and not current.is_merged and replica_id not in self._states:
            waits.append(current)
        return waits

    def rows(self) -> tuple[ReplicaRow, ...]:
        """Describe every replica, in replica order."""
        return tuple(self._row(replica_id) for replica_id in range(len(self._devices)))

    def forget(self) -> None:
        """Let go of all calls, and with them of the arguments of the last merge."""
        self._current = [None] * len(self._devices)
        self.everyone.open.clear()
        if self.messages is not None:
            self.messages.forget()
        if self._groups or self._handle_waits or self.in_flight:
            self._handle_waits.clear()
            self._blocked.clear()
            self.in_flight.clear()
            for group in list(self._groups.values()):
                group.open.clear()

    # ---- decisions -----------------------------------------------------------------------

    def _mismatch(self, explain: Callable[[], str], **kind: bool) -> Mismatch | None:
        """Decide that the run is over, unless that is decided or a failure explains it better."""
        if self._failed or self._is_over:
            return None
        self._is_over = True
        return Mismatch(explain(), self.rows(), **kind)

    def _absence(self, generation: Generation) -> Mismatch | None:
        """Decide that a generation can never be complete, because a member has returned."""
        return self._mismatch(partial(_who_is_absent, self._gone, generation), follows_return=True)

    def _all_waits(self, replica_id: int) -> list[WaitedFor]:
        """Return the incomplete generations and messages that tasks of a replica wait for.

        None if one that they wait for is complete: the replica can continue.
        """
        waits = self.waits(replica_id)
        return waits if all(generation.missing for generation in waits) else []

    def _waits(self, replica_id: int) -> list[WaitedFor]:
        """Return the same, or none where only child tasks wait: then the replica may continue."""
        current = self._current[replica_id]
        is_in_call = current is not None and not current.is_merged
        if (is_in_call and replica_id not in self._states) or self._blocked.get(replica_id):
            return self._all_waits(replica_id)
        return []

    def _deadlock(self, joined: WaitedFor) -> Mismatch | None:
        """Decide that some generation can never be complete, because its replicas wait elsewhere.

        A replica has just begun to wait in `joined`, so a circle can only lead through it.
        """
        if self._failed or self._is_over:
            return None
        num_open = _num_open(self.everyone, list(self._groups.values()))
        is_alone = num_open == (type(joined) is not Transfer) and not any(self._blocked.values())
        if is_alone or not any(map(self._waits, joined.missing_members())):
            return None
        stuck = self._idle(self._waits)
        is_of_messages = _has_messages(stuck)
        explain = partial(_crossed, stuck)
        return self._mismatch(explain, is_of_messages=is_of_messages) if stuck else None

    def _idle(self, waits_of: Callable[[int], list[WaitedFor]]) -> dict[int, list[WaitedFor]]:
        """Return the replicas that can never continue; with messages, where nothing else acts.

        A replica that waits in a collective makes no other call. One that waits for a message may
        have a child task, or an op, that sends what another one waits for.
        """
        stuck, may_act = self._stuck(waits_of), self.may_act
        if may_act is None or not _has_messages(stuck):
            return stuck
        waits, current = self._handle_waits, self._current
        acting = {i for i in stuck if may_act(i, _num_waits(waits.get(i, {}), current[i]))}
        return self._stuck(lambda i: [] if i in acting else waits_of(i)) if acting else stuck

    def _stuck(self, waits_of: Callable[[int], list[WaitedFor]]) -> dict[int, list[WaitedFor]]:
        """Return the replicas that can never continue, and what they wait for.

        A replica can continue if it waits for nothing, or if one of the generations it waits for
        can become complete; that one can if all who are missing in it can continue.
        """
        waits = {i: waits_of(i) for i in range(len(self._devices))}
        free = {i for i, own in waits.items() if not own}
        stuck = {i: own for i, own in waits.items() if own}
        while True:
            freed = {
                i
                for i, own in stuck.items()
                if any(free.issuperset(generation.missing_members()) for generation in own)
            }
            if not freed:
                return stuck
            free |= freed
            for replica_id in freed:
                del stuck[replica_id]

    # ---- words ---------------------------------------------------------------------------

    def _row(self, replica_id: int) -> ReplicaRow:
        device, state = self._devices[replica_id], self._states.get(replica_id)
        current = self._current[replica_id]
        inside = [g for g in self._handle_waits.get(replica_id, ()) if not g.is_merged]
        if current is not None and not current.is_merged:
            inside.insert(0, current)
        sent: list[Transfer] = []
        if self.messages is not None:
            inside += [t for t in self.messages.waiting_of(replica_id) if t not in inside]
            sent = self.messages.not_received_of(replica_id)
        flying = [
            generation
            for generation in self.in_flight
            if replica_id in generation.present_members()
            and not (generation.is_merged or generation in inside)
        ]
        if inside:
            call: Call | Transfer | None = inside[0].call_of(replica_id)
            label = "waiting" if inside[0].missing else "merging"
        else:
            call, label = self.current_call(replica_id), "running"
        texts = [] if call is None else [("" if inside else "after ") + call.describe()]
        if flying:
            calls = [generation.call_of(replica_id) for generation in flying]
            texts += [f"{started.describe()} in flight, from {started.site}" for started in calls]
            call = calls[0] if call is None else call
        if sent:
            more = f" and {len(sent) - 1} more" if len(sent) > 1 else ""
            texts.append(f"{sent[0].describe()}{more} not received, from {sent[0].site}")
        return ReplicaRow(
            self.everyone.global_id(replica_id),
            device,
            label if state is None else state.value,
            "; ".join(texts) or "before any",
            "-" if call is None else call.site,
        )


def _who_is_absent(gone: Sequence[int], generation: Generation) -> str:
    name_of = generation.group.global_id
    absent = sorted(map(name_of, filter(generation.lacks, gone)))
    waiting = tuple(map(name_of, generation.present_members()))
    return (
        f"{_name(absent)} returned while {_name(waiting, 'replica')} "
        f"wait{'s' if len(waiting) == 1 else ''} in {generation.first.describe()}"
    )


def _withdrawal(number: int, current: Generation | None, call: Call) -> str:
    is_merging = current is not None and not current.missing and not current.is_merged
    merging = ", while its merge was running" if is_merging else ""
    return (
        f"Replica {number} withdrew from {call.describe()}{merging} "
        "(a timeout or cancellation inside the replica)"
    )


def _clash(generation: Generation) -> str:
    """Explain why the calls that are there cannot merge, replica by replica in order."""
    base_id, *others = generation.present_members()
    base = generation.call_of(base_id)
    for replica_id in others:
        call = generation.call_of(replica_id)
        if call.collective is not base.collective:
            return _elsewhere(base_id, base, replica_id, call)
        difference = call.collective.difference(base, call)
        if difference is not None:
            where = f" in group {call.group.global_members}" if call.group.is_partial else ""
            name_of = call.group.global_id
            return (
                f"Replicas {name_of(base_id)} and {name_of(replica_id)} disagree in "
                f"{base.collective.name} #{base.sequence}{where}: {difference}"
            )
    raise AssertionError("no two calls differ")


def _num_open(everyone: SyncGroup, groups: Sequence[SyncGroup]) -> int:
    """Return how many generations are not complete; with one alone nobody waits elsewhere."""
    return len(everyone.open) + sum([len(group.open) for group in groups])


def _num_waits(waits: dict[WaitedFor, int], current: Generation | None) -> int:
    """Return how many tasks and ops of a replica wait in the meeting."""
    return sum(waits.values()) + (current is not None and not current.is_merged)


def _has_messages(stuck: dict[int, list[WaitedFor]]) -> bool:
    return any(type(each) is Transfer for own in stuck.values() for each in own)


def _unmet(messages: Messages, returned: int) -> Callable[[], str] | None:
    """Find a message that never arrives because a replica has returned; return its explanation."""
    own, lost = messages.waiting_of(returned), messages.not_received(returned)
    waiting = messages.waiting_for(returned)
    if own:
        return partial(_left_in_message, returned, own[0])
    if lost is not None:
        return partial(_never_received, lost)
    return None if waiting is None else partial(_gone_peer, waiting)


def _gone_peer(transfer: Transfer) -> str:
    """Explain that a replica waits for one that has returned."""
    if transfer.is_send:
        return _never_received(transfer)
    name_of = transfer.group.global_id
    return (
        f"Replica {name_of(transfer.source)} returned while replica "
        f"{name_of(transfer.destination)} waits in {transfer.describe()}"
    )


def _never_received(send: Transfer) -> str:
    name_of = send.group.global_id
    return (
        f"Replica {name_of(send.destination)} returned without receiving what replica "
        f"{name_of(send.source)} sent it: {send.describe()}, called at {send.site}"
    )


def _left_in_message(returned: int, own: Transfer) -> str:
    number = own.group.global_id(returned)
    return f"Replica {number} returned while a task of it waits in {own.describe()}"


def _crossed(stuck: dict[int, list[WaitedFor]]) -> str:
    """Explain a circle of replicas that wait for each other in different calls."""
    replica_id = min(stuck)
    generation = stuck[replica_id][0]
    other_id = min(i for i in generation.missing_members() if i in stuck)
    other = stuck[other_id][0].call_of(other_id)
    return _elsewhere(replica_id, generation.call_of(replica_id), other_id, other)


def _left_behind(replica_id: int, generation: Generation) -> str:
    call = generation.call_of(replica_id)
    number = call.group.global_id(replica_id)
    return f"Replica {number} returned while a task of it waits in {call.describe()}"


def _elsewhere(
    replica_id: int, call: Call | Transfer, other_id: int, other: Call | Transfer
) -> str:
    return (
        f"Replica {call.group.global_id(replica_id)} is in {call.describe()} but replica "
        f"{other.group.global_id(other_id)} is in "
        f"{other.describe()}"
    )


def _name(ids: Sequence[int], word: str = "Replica") -> str:
    if len(ids) == 1:
        return f"{word} {ids[0]}"
    shown = [*map(str, ids)] if len(ids) <= 8 else [*map(str, ids[:7]), f"{len(ids) - 7} more"]
    return f"{word}s {', '.join(shown[:-1])} and {shown[-1]}"
