"""Every arrival order of two to four replicas, and everything that can happen to one of them."""

import sys
from collections.abc import Iterator, Sequence
from itertools import permutations

import pytest

from aioreplica.errors import ReplicaRow
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

SIZES = (2, 3, 4)
CLASHES = ("collective", "sequence", "argument", "structure")
EVENTS = (*CLASHES, "return", "fail", "withdraw")


class Numbers(Collective):
    """A collective whose calls agree if argument and number of arguments are equal."""

    def detail(self, argument: object) -> str:
        return str(argument)

    def agrees(self, first: Call, call: Call) -> bool:
        return self.difference(first, call) is None

    def difference(self, first: Call, call: Call) -> str | None:
        if first.argument != call.argument:
            return f"{first.argument} is not {call.argument}"
        if len(first.args) != len(call.args):
            return f"{len(first.args)} and {len(call.args)} values"
        return None

    def perform(self, meeting: SyncGroup, calls: Sequence[Call]) -> list[object]:
        raise AssertionError("the rendezvous decides only")


NUMBERS, OTHER = Numbers("numbers"), Numbers("other")


def call(group: SyncGroup, position: int, sequence: int = 1, kind: str = "good") -> Call:
    collective = OTHER if kind == "collective" else NUMBERS
    argument = "B" if kind == "argument" else "A"
    args = (1, 2) if kind == "structure" else (1,)
    number = sequence + 7 if kind == "sequence" else sequence
    return new_call(collective, argument, args, None, group, position, number, sys._getframe())


def arrive(
    rendezvous: Rendezvous, replica_id: int, sequence: int = 1, kind: str = "good"
) -> Generation | Mismatch | None:
    """Let a replica arrive; return the generation if it is complete, None if it is not."""
    made = call(rendezvous.everyone, replica_id, sequence, kind)
    decision = rendezvous.arrive(replica_id, made)
    return None if isinstance(decision, Generation) and decision.missing else decision


def waits(rendezvous: Rendezvous, replica_id: int) -> bool:
    return rendezvous.rows()[replica_id].state in {"waiting", "merging"}


def new(num_replicas: int) -> Rendezvous:
    return Rendezvous([f"cpu:{i}" for i in range(num_replicas)])


def meet_once(rendezvous: Rendezvous, num_replicas: int, sequence: int = 1) -> None:
    """Let one whole generation pass, last replica first."""
    for replica_id in reversed(range(num_replicas)):
        decision = arrive(rendezvous, replica_id, sequence)
    assert isinstance(decision, Generation)
    decision.is_merged = True


def cases() -> Iterator[tuple[int, tuple[int, ...], int, str]]:
    """Size, order of arrival, how many have arrived when it happens, and what happens."""
    for size in SIZES:
        for order in permutations(range(size)):
            for position in range(size):
                for event in EVENTS:
                    yield size, order, position, event


def row(replica_id: int, state: str, text: str) -> tuple[int, str, str, str]:
    return (replica_id, f"cpu:{replica_id}", state, text)


def seen(rows: Sequence[ReplicaRow]) -> list[tuple[int, str, str, str]]:
    return [(r.replica_id, r.device, r.state, r.collective) for r in rows]


def listed(ids: Sequence[int], word: str) -> str:
    if len(ids) == 1:
        return f"{word} {ids[0]}"
    return f"{word}s {', '.join(map(str, ids[:-1]))} and {ids[-1]}"


# ---- everybody comes ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, *SIZES])
def test_every_order_meets_once_in_replica_order(size: int) -> None:
    for order in permutations(range(size)):
        rendezvous = new(size)
        for generation in (1, 2, 3):
            calls = {i: call(rendezvous.everyone, i, generation) for i in order}
            for replica_id in order[:-1]:
                assert not waits(rendezvous, replica_id)
                opened = rendezvous.arrive(replica_id, calls[replica_id])
                assert isinstance(opened, Generation)
                assert opened.missing
                assert waits(rendezvous, replica_id)
            decision = rendezvous.arrive(order[-1], calls[order[-1]])
            assert isinstance(decision, Generation)
            assert not decision.missing
            assert decision.calls == [calls[i] for i in range(size)]
            decision.is_merged = True


@pytest.mark.parametrize("size", SIZES)
def test_a_complete_generation_resets_the_state(size: int) -> None:
    for order in permutations(range(size)):
        rendezvous = new(size)
        before = [row(i, "running", "before any") for i in range(size)]
        assert seen(rendezvous.rows()) == before
        assert {r.site for r in rendezvous.rows()} == {"-"}
        for generation in (1, 2):
            for replica_id in order:
                complete = arrive(rendezvous, replica_id, generation)
            assert isinstance(complete, Generation)
            merging = [row(i, "merging", f"numbers #{generation} (A)") for i in range(size)]
            assert seen(rendezvous.rows()) == merging

            complete.is_merged = True

            after = [row(i, "running", f"after numbers #{generation} (A)") for i in range(size)]
            assert seen(rendezvous.rows()) == after


def test_replicas_may_return_at_any_time_once_nobody_waits() -> None:
    for size in SIZES:
        for order in permutations(range(size)):
            rendezvous = new(size)
            meet_once(rendezvous, size)
            assert [rendezvous.leave(i, ReplicaState.RETURNED) for i in order] == [None] * size
            text = "after numbers #1 (A)"
            assert seen(rendezvous.rows()) == [row(i, "returned", text) for i in range(size)]


# ---- one does something else ---------------------------------------------------------------


class Story:
    """Feeds one case to a rendezvous and says what must come of it, told independently."""

    def __init__(
        self, size: int, order: tuple[int, ...], position: int, event: str, generation: int
    ) -> None:
        self.size, self.order, self.position, self.event = size, order, position, event
        self.generation = generation
        self.who = order[position]
        self.rendezvous = new(size)
        if generation == 2:
            meet_once(self.rendezvous, size)

    def play(self) -> list[object]:
        """Everybody up to `position` arrives, then it happens; then the next one arrives."""
        arrivals = [
            arrive(self.rendezvous, i, self.generation) for i in self.order[: self.position]
        ]
        assert arrivals == [None] * self.position
        return [self.happen(), *self._next()]

    def happen(self) -> object:
        if self.event in (*CLASHES, "good"):
            return arrive(self.rendezvous, self.who, self.generation, self.event)
        if self.event == "withdraw":
            arrive(self.rendezvous, self.who, self.generation)
            return self.rendezvous.leave(self.who, ReplicaState.WITHDREW)
        state = ReplicaState.RETURNED if self.event == "return" else ReplicaState.FAILED
        return self.rendezvous.leave(self.who, state)

    def _next(self) -> list[object]:
        if self.position + 1 == self.size:
            return []
        return [arrive(self.rendezvous, self.order[self.position + 1], self.generation)]

    # what is expected

    def decides_at_once(self) -> bool:
        if self.event == "fail":
            return False
        return self.event == "withdraw" or self.position > 0

    def reason(self) -> str:
        """The sentence, given who waits at the moment of the decision."""
        good = f"numbers #{self.generation} (A)"
        waiting = sorted(self.order[: self.position] or self.order[1:2])
        if self.event == "return":
            verb = "wait" if len(waiting) > 1 else "waits"
            return (
                f"{listed([self.who], 'Replica')} returned while {listed(waiting, 'replica')} "
                f"{verb} in {good}"
            )
        if self.event == "withdraw":
            last = self.position + 1 == self.size
            merging = ", while its merge was running" if last else ""
            return (
                f"Replica {self.who} withdrew from {good}{merging} "
                "(a timeout or cancellation inside the replica)"
            )
        first, other = sorted((self.who, min(waiting)))
        texts = {i: self.text(i) for i in (first, other)}
        if self.event in {"collective", "sequence"}:
            return f"Replica {first} is in {texts[first]} but replica {other} is in {texts[other]}"
        swap = self.who == first
        if self.event == "argument":
            detail = "B is not A" if swap else "A is not B"
        else:
            detail = "2 and 1 values" if swap else "1 and 2 values"
        number = f"numbers #{self.generation}"
        return f"Replicas {first} and {other} disagree in {number}: {detail}"

    def text(self, replica_id: int) -> str:
        if replica_id != self.who:
            return f"numbers #{self.generation} (A)"
        name = "other" if self.event == "collective" else "numbers"
        number = self.generation + (7 if self.event == "sequence" else 0)
        return f"{name} #{number} ({'B' if self.event == 'argument' else 'A'})"

    def rows(self) -> list[tuple[int, str, str, str]]:
        """The table at the moment of the decision."""
        here = set(self.order[: self.position])
        if not self.decides_at_once():
            here.add(self.order[self.position + 1])
        outside = "before any" if self.generation == 1 else "after numbers #1 (A)"
        merging = self.event == "withdraw" and self.position + 1 == self.size
        rows = []
        for replica_id in range(self.size):
            if replica_id == self.who:
                states = {"return": "returned", "withdraw": "withdrew"}
                state = states.get(self.event, "waiting")
                text = outside if self.event == "return" else self.text(replica_id)
                rows.append(row(replica_id, state, text))
            elif replica_id in here:
                state = "merging" if merging else "waiting"
                rows.append(row(replica_id, state, self.text(replica_id)))
            else:
                rows.append(row(replica_id, "running", outside))
        return rows


@pytest.mark.parametrize("generation", [1, 2], ids=["first merge", "second merge"])
@pytest.mark.parametrize("event", [event for event in EVENTS if event != "fail"])
@pytest.mark.parametrize("size", SIZES)
def test_every_mismatch_is_decided_at_once(size: int, event: str, generation: int) -> None:
    for case in cases():
        if case[0] != size or case[3] != event:
            continue
        story = Story(*case, generation)
        decisions = story.play()
        if story.decides_at_once():
            decision = decisions[0]
        else:
            assert decisions[0] is None, case
            decision = decisions[1]
        assert isinstance(decision, Mismatch), case
        assert decision.reason == story.reason(), case
        assert seen(decision.rows) == story.rows(), case


@pytest.mark.parametrize("size", SIZES)
def test_a_call_names_its_line_in_the_table(size: int) -> None:
    rendezvous = new(size)
    here = call(rendezvous.everyone, 0)
    rendezvous.arrive(0, here)

    rows = rendezvous.rows()

    assert rows[0].site == f"{__file__}:{here.line}"
    assert {r.site for r in rows[1:]} == {"-"}


# ---- failures ------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", [1, 2], ids=["first merge", "second merge"])
@pytest.mark.parametrize("event", [*EVENTS, "good"])
@pytest.mark.parametrize("size", SIZES)
def test_after_a_failure_nothing_is_a_mismatch(size: int, event: str, generation: int) -> None:
    """Whatever another replica does next, the failure is the better explanation."""
    for case in cases():
        _, order, position, happened = case
        if case[0] != size or happened != "fail":
            continue
        story = Story(*case, generation)
        decisions = story.play()
        assert decisions == [None] * len(decisions), case
        for replica_id in order[position + 2 : position + 3]:
            story.who, story.event = replica_id, event
            assert story.happen() is None, (case, event)


def test_a_failed_replica_is_shown_with_its_last_call() -> None:
    rendezvous = new(2)
    meet_once(rendezvous, 2)
    rendezvous.leave(1, ReplicaState.FAILED)

    text = "after numbers #1 (A)"
    assert seen(rendezvous.rows()) == [row(0, "running", text), row(1, "failed", text)]


# ---- after the decision --------------------------------------------------------------------


def test_after_a_mismatch_nothing_is_decided_any_more() -> None:
    for size in SIZES:
        for order in permutations(range(size)):
            rendezvous = new(size)
            rendezvous.leave(order[0], ReplicaState.RETURNED)
            decisions = [arrive(rendezvous, i) for i in order[1:]]
            assert isinstance(decisions[0], Mismatch)
            assert decisions[1:] == [None] * (size - 2), order


def test_long_lists_of_replicas_are_shortened() -> None:
    rendezvous = new(20)
    for replica_id in range(10):
        arrive(rendezvous, replica_id)

    decision = rendezvous.leave(19, ReplicaState.RETURNED)

    assert isinstance(decision, Mismatch)
    assert decision.reason == (
        "Replica 19 returned while replicas 0, 1, 2, 3, 4, 5, 6 and 3 more wait in numbers #1 (A)"
    )
    assert len(decision.rows) == 20


def test_several_that_returned_are_named_together() -> None:
    rendezvous = new(3)
    for replica_id in (2, 0):
        assert rendezvous.leave(replica_id, ReplicaState.RETURNED) is None

    decision = arrive(rendezvous, 1)

    assert isinstance(decision, Mismatch)
    assert decision.reason == "Replicas 0 and 2 returned while replica 1 waits in numbers #1 (A)"


def test_the_clash_named_is_the_lowest_one_whatever_the_order() -> None:
    """Replica 0 differs from 1 and 2; who comes last finds out, the sentence is the same."""
    reasons = set()
    for last in ((1, 0), (2, 0)):
        rendezvous = new(4)
        arrive(rendezvous, last[0])
        decision = arrive(rendezvous, last[1], kind="argument")
        assert isinstance(decision, Mismatch)
        reasons.add(decision.reason)

    assert reasons == {
        "Replicas 0 and 1 disagree in numbers #1: B is not A",
        "Replicas 0 and 2 disagree in numbers #1: B is not A",
    }
