"""Small programs of replicas, an oracle that judges them, and a driver that feeds a rendezvous.

The oracle knows nothing of the rendezvous: it keeps its own log of who called what, and looks for
circles in the graph of who waits for whom.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from types import FrameType
from typing import Any

from aioreplica.replica import (
    Call,
    Collective,
    Generation,
    Mismatch,
    Rendezvous,
    ReplicaState,
    SyncGroup,
)
from aioreplica.replica._meeting import new_call
from aioreplica.replica._messages import SEND_BOUND, Transfer

Members = tuple[int, ...]
Key = tuple[Any, int]  # a group, or a channel's end, and the number of a call in it
Channel = tuple[int, int, str]  # from, to, tag
Chooser = Callable[[int, "Driver"], int]  # from how many events may come next to which one does


@dataclass(frozen=True)
class Meet:
    """Call a collective and wait for it."""

    group: Members
    kind: str = "A"


@dataclass(frozen=True)
class Start:
    """Call a collective and go on."""

    group: Members
    kind: str = "A"


@dataclass(frozen=True)
class Await:
    """Wait for the n-th of the replica's started calls."""

    index: int


@dataclass(frozen=True)
class Send:
    """Hand a value to another replica; waits where two of them were not received."""

    to: int
    tag: str = ""


@dataclass(frozen=True)
class Receive:
    """Wait for a value of another replica."""

    source: int
    tag: str = ""


Step = Meet | Start | Await | Send | Receive
Program = Sequence[Sequence[Step]]


class Kinds(Collective):
    """A collective whose calls agree if their arguments are equal."""

    def detail(self, argument: object) -> str:
        return str(argument)

    def agrees(self, first: Call, call: Call) -> bool:
        return bool(first.argument == call.argument)

    def difference(self, first: Call, call: Call) -> str | None:
        return None if self.agrees(first, call) else f"{first.argument} is not {call.argument}"

    def perform(self, meeting: SyncGroup, calls: Sequence[Call]) -> list[object]:
        raise AssertionError("the rendezvous decides only")


KINDS = Kinds("kinds")


# ---- the oracle ----------------------------------------------------------------------------


@dataclass
class Log:
    """What has happened so far, in the words of a program, and what that means."""

    arrived: dict[Key, dict[int, str]] = field(default_factory=dict)
    waits: dict[int, Key] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    sent: dict[Channel, int] = field(default_factory=dict)
    received: dict[Channel, int] = field(default_factory=dict)

    def arrive(self, replica_id: int, key: Key, kind: str) -> None:
        self.arrived.setdefault(key, {})[replica_id] = kind

    def transfer(self, replica_id: int, step: Send | Receive) -> Key:
        """Count a send or a receive; return what the replica waits for."""
        if isinstance(step, Send):
            channel, counts, what = (replica_id, step.to, step.tag), self.sent, "send"
        else:
            channel, counts, what = (step.source, replica_id, step.tag), self.received, "receive"
        counts[channel] = counts.get(channel, 0) + 1
        return (what, channel), counts[channel]

    def missing(self, key: Key) -> set[int]:
        if key[0][0] == "send":
            channel, number = key[0][1], key[1]
            return {channel[1]} if self.received.get(channel, 0) < number - SEND_BOUND else set()
        if key[0][0] == "receive":
            channel, number = key[0][1], key[1]
            return {channel[0]} if self.sent.get(channel, 0) < number else set()
        return set(key[0]) - set(self.arrived.get(key, ()))

    def not_received(self) -> list[Channel]:
        return [each for each, count in self.sent.items() if self.received.get(each, 0) < count]

    def is_hopeless(self) -> bool:
        """Tell whether something that was called can never be complete, or disagrees."""
        clash = any(len(set(kinds.values())) > 1 for kinds in self.arrived.values())
        waited = [*self.arrived, *self.waits.values()]
        absent = any(self.missing(key) & self.left for key in waited)
        lost = any(channel[1] in self.left for channel in self.not_received())
        return clash or absent or lost or self.has_circle()

    def has_circle(self) -> bool:
        """Look for replicas that wait for each other, from each one on along every path."""
        edges = {i: self.missing(key) for i, key in self.waits.items()}
        return any(_reaches(edges, i, i) for i in edges)


def _reaches(edges: dict[int, set[int]], start: int, goal: int) -> bool:
    seen, left = set(), [start]
    while left:
        for other in edges.get(left.pop(), ()):
            if other == goal:
                return True
            if other not in seen:
                seen.add(other)
                left.append(other)
    return False


def can_finish(program: Program) -> bool:
    """Run every replica as far as it comes, again and again; the order cannot matter."""
    log = Log()
    positions = [0] * len(program)
    counts: dict[tuple[int, Members], int] = {}
    started: list[list[Key]] = [[] for _ in program]
    went_on = True
    while went_on:
        went_on = False
        for i, steps in enumerate(program):
            while positions[i] < len(steps) and not _is_held(log, i):
                step = steps[positions[i]]
                if isinstance(step, Await):
                    log.waits[i] = started[i][step.index]
                elif isinstance(step, (Send, Receive)):
                    log.waits[i] = log.transfer(i, step)
                else:
                    number = counts[i, step.group] = counts.get((i, step.group), 0) + 1
                    log.arrive(i, (step.group, number), step.kind)
                    if isinstance(step, Start):
                        started[i].append((step.group, number))
                    else:
                        log.waits[i] = (step.group, number)
                positions[i] += 1
                went_on = True
    everybody_ended = not any(_is_held(log, i) for i in range(len(program)))
    complete = not any(log.missing(key) for key in log.arrived)
    agreed = all(len(set(kinds.values())) == 1 for kinds in log.arrived.values())
    return everybody_ended and complete and agreed and not log.not_received()


def _is_held(log: Log, replica_id: int) -> bool:
    key = log.waits.get(replica_id)
    return key is not None and bool(log.missing(key))


# ---- the driver ----------------------------------------------------------------------------


class Driver:
    """Plays a program against a rendezvous and the oracle, event by event.

    Events of their own, in any order: a replica's next instruction, a complete generation merges,
    a replica that waited wakes up, the end of a replica is noticed.
    """

    def __init__(self, program: Program, choose: Chooser) -> None:
        self.program = program
        self.choose = choose
        self.log = Log()
        self.rendezvous = Rendezvous([f"cpu:{i}" for i in range(len(program))])
        self.positions = [0] * len(program)
        self.counts: dict[tuple[int, Members], int] = {}
        self.started: list[list[tuple[Key, Generation]]] = [[] for _ in program]
        # The flag says that it awaits a handle, or a message.
        self.inside: dict[int, tuple[Key, Generation | Transfer, bool]] = {}
        self.complete: list[Generation] = []
        self.story: list[str] = []

    def play(self) -> Mismatch | None:
        """Play to the end; check after every event that the verdict comes exactly when due."""
        while events := self._events():
            name, replica_id, event = events[self.choose(len(events), self)]
            self.story.append(f"{name} {replica_id}")
            decision = event()
            expected = self.log.is_hopeless()
            assert isinstance(decision, Mismatch) is expected, self.describe(decision)
            if isinstance(decision, Mismatch):
                self._check_rows(decision)
                return decision
        assert self.log.left == set(range(len(self.program))), self.describe(None)
        return None

    def describe(self, decision: object) -> str:
        return f"{self.program}\n{self.story}\n{self.log}\n{decision}"

    def state(self) -> object:
        """Everything that what comes next can depend on, orders of arrival included."""
        arrived = [(key, *kinds) for key, kinds in self.log.arrived.items()]
        inside = [(i, generation.is_merged) for i, (_, generation, _) in self.inside.items()]
        merged = [started[1].is_merged for own in self.started for started in own]
        moved = sorted((*self.log.sent.items(), *self.log.received.items()))
        left = sorted(self.log.left)
        parts = (self.positions, sorted(arrived), sorted(inside), merged, left, moved)
        return tuple(map(tuple, parts))

    def _events(self) -> list[tuple[str, int, Callable[[], object]]]:
        events: list[tuple[str, int, Callable[[], object]]] = []
        for i, steps in enumerate(self.program):
            if i in self.inside:
                if self.inside[i][1].is_merged:
                    events.append(("wake", i, lambda i=i: self._wake(i)))
            elif self.positions[i] < len(steps):
                events.append(("step", i, lambda i=i: self._step(i)))
            elif i not in self.log.left:
                events.append(("leave", i, lambda i=i: self._leave(i)))
        for n, generation in enumerate(self.complete):
            events.append(("merge", n, lambda g=generation: self._merge(g)))
        return events

    def _step(self, i: int) -> object:
        step = self.program[i][self.positions[i]]
        self.positions[i] += 1
        if isinstance(step, Await):
            key, generation = self.started[i][step.index]
            if generation.is_merged:
                return None
            self.inside[i] = key, generation, True
            self.log.waits[i] = key
            return self.rendezvous.wait_for_started(i, generation)
        if isinstance(step, (Send, Receive)):
            return self._transfer(i, step)
        group = self.rendezvous.group(step.group)
        number = self.counts[i, step.group] = self.counts.get((i, step.group), 0) + 1
        key = (step.group, number)
        made = new_call(KINDS, step.kind, (), None, group, step.group.index(i), number, _frame())
        waits = isinstance(step, Meet)
        self.log.arrive(i, key, step.kind)
        if waits:
            self.log.waits[i] = key
        decision = self.rendezvous.arrive(i, made, waits=waits)
        if isinstance(decision, Generation):
            if waits:
                self.inside[i] = key, decision, False
            else:
                self.started[i].append((key, decision))
            if not decision.missing:
                self.complete.append(decision)
                assert [call is None for call in decision.calls] == [False] * len(step.group)
        return decision

    def _transfer(self, i: int, step: Send | Receive) -> object:
        key, everyone = self.log.transfer(i, step), self.rendezvous.everyone
        source, destination, tag = key[0][1]
        transfer = Transfer(
            everyone, source, destination, tag or None, key[1], _frame(),
            is_send=isinstance(step, Send),
        )  # fmt: skip
        self.log.waits[i] = key
        decision = self.rendezvous.exchange(transfer)
        if transfer.is_over:
            assert isinstance(step, Send) or transfer.value == key[1]  # in order
            del self.log.waits[i]
            return decision
        self.inside[i] = key, transfer, True
        if decision is None:
            decision = self.rendezvous.wait_for_started(i, transfer)
        return decision

    def _merge(self, generation: Generation) -> None:
        self.complete.remove(generation)
        generation.is_merged = True

    def _wake(self, i: int) -> None:
        _, generation, is_handle = self.inside.pop(i)
        del self.log.waits[i]
        if is_handle:
            self.rendezvous.waited_for_started(i, generation)

    def _leave(self, i: int) -> object:
        self.log.left.add(i)
        return self.rendezvous.leave(i, ReplicaState.RETURNED)

    def _check_rows(self, mismatch: Mismatch) -> None:
        """The table at the verdict tells the truth about everybody."""
        for row in mismatch.rows:
            i = row.replica_id
            if i in self.log.left:
                assert row.state == "returned", self.describe(mismatch)
                continue
            key = self.log.waits.get(i)
            merged = i in self.inside and self.inside[i][1].is_merged
            if key is None or merged:
                assert row.state == "running", self.describe(mismatch)
                continue
            if isinstance(key[0][0], str):
                assert row.state == "waiting", self.describe(mismatch)
                assert row.collective.startswith(f"{key[0][0]} #{key[1]} "), self.describe(mismatch)
                continue
            clash = len(set(self.log.arrived[key].values())) > 1
            waiting = bool(self.log.missing(key)) or clash
            assert row.state == ("waiting" if waiting else "merging"), self.describe(mismatch)
            where = "" if len(key[0]) == len(self.program) else f" in group {key[0]}"
            kind = self.log.arrived[key][i]
            expected = f"kinds #{key[1]} ({kind}){where}"
            assert row.collective.split(";")[0] == expected, self.describe(mismatch)


@lru_cache
def _frame() -> FrameType:
    return sys._getframe()


# ---- schedules and programs ----------------------------------------------------------------


class KnownStateError(Exception):
    """The state that a schedule has come to was looked at before."""


def every_schedule(program: Program) -> set[Mismatch | None]:
    """Play a program in every order of its events; return the ends.

    What follows on a state is played once, however many orders lead there.
    """
    ends: set[Mismatch | None] = set()
    seen: set[object] = set()
    prefixes: list[list[int]] = [[]]
    while prefixes:
        prefix = prefixes.pop()
        taken: list[int] = []

        def choose(
            count: int, driver: Driver, taken: list[int] = taken, prefix: list[int] = prefix
        ) -> int:
            if len(taken) < len(prefix):
                taken.append(prefix[len(taken)])
                return taken[-1]
            state = driver.state()
            if state in seen:
                raise KnownStateError
            seen.add(state)
            prefixes.extend([*taken, other] for other in range(1, count))
            taken.append(0)
            return 0

        with suppress(KnownStateError):
            ends.add(Driver(program, choose).play())
    return ends


def random_schedule(program: Program, seed: int) -> Mismatch | None:
    """Play a program in one order."""
    rng = random.Random(seed)
    return Driver(program, lambda count, _driver: rng.randrange(count)).play()


def random_program(rng: random.Random, *, bend: bool, with_messages: bool = False) -> Program:
    """Make a program that can finish; with `bend`, change one replica's part of it at random."""
    count = rng.randint(2, 4)
    groups = [tuple(range(count))] + [
        tuple(sorted(rng.sample(range(count), rng.randint(1, count)))) for _ in range(2)
    ]
    steps: list[list[Step]] = [[] for _ in range(count)]
    open_handles: list[list[int]] = [[] for _ in range(count)]
    num_started = [0] * count
    for _ in range(rng.randint(1, 5)):
        if with_messages and rng.random() < 0.6:
            source, destination = rng.sample(range(count), 2)
            tag = rng.choice(("", "", "t"))
            for _ in range(rng.randint(1, 3)):
                steps[source].append(Send(destination, tag))
                steps[destination].append(Receive(source, tag))
            continue
        group, kind, starts = rng.choice(groups), rng.choice("AB"), rng.random() < 0.5
        for i in group:
            if open_handles[i] and rng.random() < 0.4:
                steps[i].append(Await(open_handles[i].pop(rng.randrange(len(open_handles[i])))))
            if starts:
                steps[i].append(Start(group, kind))
                open_handles[i].append(num_started[i])
                num_started[i] += 1
            else:
                steps[i].append(Meet(group, kind))
    for i in range(count):
        rng.shuffle(open_handles[i])
        steps[i] += [Await(index) for index in open_handles[i] if rng.random() < 0.8]
    return _bent(rng, steps, groups) if bend else steps


def _bent(rng: random.Random, steps: list[list[Step]], groups: list[Members]) -> Program:
    for _ in range(rng.randint(1, 2)):
        i = rng.randrange(len(steps))
        own = steps[i]
        how = rng.choice(["swap", "drop", "extra", "kind"])
        place = rng.randrange(len(own) + 1)
        if how == "swap" and len(own) > 1:
            place = rng.randrange(len(own) - 1)
            own[place], own[place + 1] = own[place + 1], own[place]
        elif how == "drop" and own:
            own.pop(rng.randrange(len(own)))
        elif how == "kind" and own:
            place = rng.randrange(len(own))
            step = own[place]
            if isinstance(step, (Meet, Start)):
                own[place] = type(step)(step.group, rng.choice("ABC"))
            elif isinstance(step, Send):
                own[place] = Send(step.to, rng.choice(("", "t", "u")))
        else:
            own.insert(place, Meet(rng.choice([g for g in groups if i in g])))
        steps[i] = _without_dangling(own)
    return steps


def _without_dangling(steps: list[Step]) -> list[Step]:
    """Drop awaits of what has not been started by then, which no program can write."""
    kept: list[Step] = []
    num_started = 0
    for step in steps:
        if isinstance(step, Await) and step.index >= num_started:
            continue
        num_started += isinstance(step, Start)
        kept.append(step)
    return kept
