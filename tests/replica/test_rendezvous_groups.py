"""Groups and started calls in the rendezvous: a verdict exactly when it is due, in every order."""

import random
import re
import sys
import threading
from collections.abc import Callable
from itertools import permutations, product
from typing import Any

import pytest

from aioreplica.replica import (
    Call,
    Generation,
    Mismatch,
    Rendezvous,
    ReplicaState,
    collective_named,
)
from aioreplica.replica._meeting import SyncGroup, new_call
from aioreplica.replica._merge_call import MergeCall
from tests.replica.programs import (
    KINDS,
    Await,
    Meet,
    Program,
    Start,
    can_finish,
    every_schedule,
    random_program,
    random_schedule,
)

E2, E3, E4 = (0, 1), (0, 1, 2), (0, 1, 2, 3)
AB, BC, AC = (0, 1), (1, 2), (0, 2)
LIMIT_S = 60


# ---- every order of small programs ---------------------------------------------------------

FINISH: dict[str, Program] = {
    "two groups side by side": [[Meet(AB)], [Meet(AB)], [Meet((2, 3))], [Meet((2, 3))]],
    "a chain of groups": [[Meet(AB)], [Meet(AB), Meet(BC)], [Meet(BC)]],
    "a ring in one order": [[Meet(AB), Meet(AC)], [Meet(AB), Meet(BC)], [Meet(BC), Meet(AC)]],
    "a group before everybody": [[Meet(AB), Meet(E3)], [Meet(AB), Meet(E3)], [Meet(E3)]],
    "one alone": [[Meet((0,)), Meet(E2)], [Meet(E2)]],
    "a handle for everybody": [[Start(E2), Await(0)], [Start(E2), Await(0)]],
    "one started, one met": [[Start(E2), Meet(E2), Await(0)], [Start(E2), Await(0), Meet(E2)]],
    "two handles, awaited crosswise": [
        [Start(E2), Start(E2), Await(0), Await(1)],
        [Start(E2), Start(E2), Await(1), Await(0)],
    ],
    "groups started crosswise": [
        [Start(AB), Start(E3), Await(0), Await(1)],
        [Start(E3), Start(AB), Await(0), Await(1)],
        [Start(E3), Await(0)],
    ],
    "a ring of started calls": [
        [Start(AC), Start(AB), Await(0), Await(1)],
        [Start(AB), Start(BC), Await(0), Await(1)],
        [Start(BC), Start(AC), Await(0), Await(1)],
    ],
    "started and not awaited": [[Start(E2), Meet(E2)], [Start(E2), Meet(E2)]],
    "nothing at all": [[], []],
}

NEVER: dict[str, Program] = {
    "two groups crosswise": [[Meet((0,)), Meet(AB), Meet(E3)], [Meet(E3), Meet(AB)], [Meet(E3)]],
    "a ring": [[Meet(AB), Meet(AC)], [Meet(BC), Meet(AB)], [Meet(AC), Meet(BC)]],
    "awaited before the other is started": [
        [Start(AB), Await(0), Start(E3)],
        [Start(E3), Await(0), Start(AB)],
        [Start(E3)],
    ],
    "a handle and a group": [
        [Start(E3), Await(0), Meet(AB)],
        [Meet(AB), Start(E3)],
        [Start(E3)],
    ],
    "another kind in a group": [[Meet(AB, "A")], [Meet(AB, "B")], []],
    "another kind, started": [[Start(AB, "A")], [Start(AB, "B")], []],
    "a member that never comes": [[Meet(AB)], [], []],
    "a member that never starts": [[Start(E2)], []],
    "one call too many": [[Meet(AB), Meet(AB)], [Meet(AB)], []],
    "others go on": [[Meet(AB), Meet(E4)], [Meet(BC), Meet(AB)], [Meet(AC), Meet(BC)], []],
}


SLOW = {"a ring of started calls", "groups started crosswise"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.xslow] * (n in SLOW)) for n in FINISH]
)
def test_programs_that_can_finish_do_in_every_order(name: str) -> None:
    assert can_finish(FINISH[name])

    assert set(every_schedule(FINISH[name])) == {None}


@pytest.mark.parametrize("name", NEVER)
def test_programs_that_cannot_finish_never_do(name: str) -> None:
    assert not can_finish(NEVER[name])

    ends = every_schedule(NEVER[name])

    assert all(isinstance(end, Mismatch) for end in ends)


# ---- many orders of many programs ----------------------------------------------------------


@pytest.mark.slow
def test_every_program_of_three_replicas_with_two_calls() -> None:
    """Three replicas, three pairs and everybody, up to two calls each: 2197 programs."""
    groups = {i: [g for g in (E3, AB, BC, AC) if i in g] for i in range(3)}
    parts = {
        i: [(), *((Meet(g),) for g in own), *((Meet(g), Meet(h)) for g in own for h in own)]
        for i, own in groups.items()
    }
    num_finished = 0
    for seed, program in enumerate(product(*parts.values())):
        finishes = can_finish(program)
        num_finished += finishes
        for more in range(2):
            assert (random_schedule(program, 2 * seed + more) is None) is finishes, program
    assert 0 < num_finished < 2197


@pytest.mark.slow
@pytest.mark.parametrize("bend", [False, True], ids=["sound", "bent"])
def test_random_programs_in_random_orders(bend: bool) -> None:
    rng = random.Random(7 + bend)
    verdicts = {True: 0, False: 0}
    for number in range(600):
        program = random_program(rng, bend=bend)
        finishes = can_finish(program)
        verdicts[finishes] += 1
        for seed in range(4):
            assert (random_schedule(program, 4 * number + seed) is None) is finishes, program
    assert verdicts[True] > 50
    assert (verdicts[False] > 50) is bend


@pytest.mark.parametrize("bend", [False, True], ids=["sound", "bent"])
def test_a_few_random_programs(bend: bool) -> None:
    rng = random.Random(70 + bend)
    for number in range(50):
        program = random_program(rng, bend=bend)
        assert (random_schedule(program, number) is None) is can_finish(program), program


def test_the_oracle_tells_programs_apart() -> None:
    """What the tests above rely on, by hand."""
    assert can_finish([[Meet(E2)], [Meet(E2)]])
    assert not can_finish([[Meet(E2)], [Meet((1,))]])
    assert not can_finish([[Meet(E2, "A")], [Meet(E2, "B")]])
    assert not can_finish([[Start(E2)], []])
    assert can_finish([[Start((0,))], []])


# ---- words ---------------------------------------------------------------------------------


def call(
    rendezvous: Rendezvous, members: tuple[int, ...], i: int, kind: str = "A", number: int = 1
) -> Call:
    group = rendezvous.group(members)
    return new_call(KINDS, kind, (), None, group, members.index(i), number, sys._getframe(1))


def new(count: int) -> Rendezvous:
    return Rendezvous([f"cpu:{i}" for i in range(count)])


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_a_ring_is_found_by_the_last_one_with_one_sentence(order: tuple[int, ...]) -> None:
    rendezvous = new(3)
    ring = {0: AB, 1: BC, 2: AC}

    *earlier, last = [rendezvous.arrive(i, call(rendezvous, ring[i], i)) for i in order]

    assert all(isinstance(one, Generation) for one in earlier)
    assert isinstance(last, Mismatch)
    assert last.reason == (
        "Replica 0 is in kinds #1 (A) in group (0, 1) but replica 1 is in kinds #1 (A) in group "
        "(1, 2)"
    )
    assert [row.collective for row in last.rows] == [
        f"kinds #1 (A) in group {ring[i]}" for i in range(3)
    ]
    assert [row.state for row in last.rows] == ["waiting"] * 3


def test_a_clash_in_a_group_names_the_group() -> None:
    rendezvous = new(3)
    rendezvous.arrive(2, call(rendezvous, BC, 2, "A"))

    decision = rendezvous.arrive(1, call(rendezvous, BC, 1, "B"))

    assert isinstance(decision, Mismatch)
    assert decision.reason == ("Replicas 1 and 2 disagree in kinds #1 in group (1, 2): B is not A")
    assert [row.state for row in decision.rows] == ["running", "waiting", "waiting"]


def test_everybody_named_one_by_one_is_everybody() -> None:
    rendezvous = new(3)

    assert rendezvous.group(E3) is rendezvous.everyone
    assert rendezvous.group(AB) is rendezvous.group(AB)
    assert rendezvous.group(AB) is not rendezvous.group(BC)


def test_groups_are_numbered_on_their_own() -> None:
    rendezvous = new(3)
    for number in (1, 2):
        for i in AB:
            decision = rendezvous.arrive(i, call(rendezvous, AB, i, number=number))
        assert isinstance(decision, Generation)
        decision.is_merged = True
    for i in E3:
        decision = rendezvous.arrive(i, call(rendezvous, E3, i))

    assert isinstance(decision, Generation)
    assert not decision.missing
    texts = [row.collective for row in rendezvous.rows()]
    assert texts == ["kinds #1 (A)"] * 3


def test_replicas_that_can_wait_nowhere_else_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each arrival would look at all who are missing, which adds up."""
    asked: list[int] = []
    waits_of = Rendezvous._waits

    def ask(rendezvous: Rendezvous, replica_id: int) -> list[Any]:
        asked.append(replica_id)
        return list(waits_of(rendezvous, replica_id))

    monkeypatch.setattr(Rendezvous, "_waits", ask)
    rendezvous = new(4)
    rendezvous.group(AB)  # from now on there may be circles
    for i in E4:
        assert isinstance(rendezvous.arrive(i, call(rendezvous, E4, i)), Generation)
    assert asked == []

    rendezvous.arrive(0, call(rendezvous, AB, 0))
    rendezvous.arrive(1, call(rendezvous, E4, 1, number=2))
    assert 0 in asked


def test_replicas_outside_the_group_may_leave() -> None:
    rendezvous = new(3)
    rendezvous.arrive(0, call(rendezvous, AB, 0))

    assert rendezvous.leave(2, ReplicaState.RETURNED) is None
    decision = rendezvous.leave(1, ReplicaState.RETURNED)

    assert isinstance(decision, Mismatch)
    assert decision.reason == (
        "Replica 1 returned while replica 0 waits in kinds #1 (A) in group (0, 1)"
    )


def test_a_failure_silences_circles() -> None:
    rendezvous = new(4)
    rendezvous.leave(3, ReplicaState.FAILED)
    ring = {0: AB, 1: BC, 2: AC}

    decisions = [rendezvous.arrive(i, call(rendezvous, ring[i], i)) for i in range(3)]

    assert not any(isinstance(decision, Mismatch) for decision in decisions)


def test_a_circle_is_decided_once() -> None:
    rendezvous = new(4)
    ring = {0: AB, 1: BC, 2: AC}
    decisions = [rendezvous.arrive(i, call(rendezvous, ring[i], i)) for i in range(3)]
    assert isinstance(decisions[-1], Mismatch)

    assert rendezvous.leave(3, ReplicaState.RETURNED) is None


def test_started_collectives_are_in_the_table() -> None:
    rendezvous = new(2)
    for kind, number in (("A", 1), ("B", 2)):
        rendezvous.arrive(0, call(rendezvous, E2, 0, kind, number), waits=False)

    [row, other] = rendezvous.rows()

    flying = re.sub(r", from \S+?:\d+", "", row.collective)
    assert (row.state, flying) == ("running", "kinds #1 (A) in flight; kinds #2 (B) in flight")
    assert row.collective.count(f"in flight, from {__file__}:") == 2
    assert (other.state, other.collective) == ("running", "before any")


def test_an_await_that_was_given_up_no_longer_counts() -> None:
    """Replica 0 stops waiting for its handle, so replica 1 can wait for it."""
    rendezvous = new(3)
    started = rendezvous.arrive(0, call(rendezvous, E3, 0), waits=False)
    assert isinstance(started, Generation)
    assert rendezvous.wait_for_started(0, started) is None
    rendezvous.waited_for_started(0, started)

    assert isinstance(rendezvous.arrive(1, call(rendezvous, AB, 1)), Generation)
    assert isinstance(rendezvous.wait_for_started(0, started), Mismatch)


def test_a_replica_that_waits_for_two_handles_goes_on_with_either() -> None:
    """Two of its tasks wait; one of the handles can be complete, so it is no circle."""
    rendezvous = new(3)
    everybody = rendezvous.arrive(0, call(rendezvous, E3, 0), waits=False)
    both = rendezvous.arrive(0, call(rendezvous, AC, 0), waits=False)
    assert isinstance(everybody, Generation)
    assert isinstance(both, Generation)
    assert rendezvous.wait_for_started(0, everybody) is None
    assert rendezvous.wait_for_started(0, both) is None

    assert isinstance(rendezvous.arrive(1, call(rendezvous, AB, 1)), Generation)


def test_a_complete_handle_lets_a_replica_go_on_before_it_wakes() -> None:
    """One of its two tasks is about to wake, so what the other one waits for is no circle."""
    rendezvous = new(3)
    first = rendezvous.arrive(0, call(rendezvous, E3, 0), waits=False)
    second = rendezvous.arrive(0, call(rendezvous, AC, 0), waits=False)
    assert isinstance(first, Generation)
    assert isinstance(second, Generation)
    assert rendezvous.wait_for_started(0, first) is None
    assert rendezvous.wait_for_started(0, second) is None
    for i in (1, 2):
        rendezvous.arrive(i, call(rendezvous, E3, i), waits=False)
    assert not first.missing

    met = rendezvous.arrive(2, call(rendezvous, E3, 2, number=2))
    assert isinstance(met, Generation)

    assert isinstance(rendezvous.waited_for_started(0, first), Mismatch)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_calls_that_are_awaited_in_another_order_than_made(order: tuple[int, int]) -> None:
    rendezvous = new(2)
    numbers = {0: 2, 1: 1}

    decisions = [rendezvous.arrive(i, call(rendezvous, E2, i, number=numbers[i])) for i in order]

    assert isinstance(decisions[0], Generation)
    assert isinstance(decisions[1], Mismatch)
    assert decisions[1].reason == "Replica 0 is in kinds #2 (A) but replica 1 is in kinds #1 (A)"


def test_nothing_is_held_after_forgetting() -> None:
    rendezvous = new(3)
    started = rendezvous.arrive(0, call(rendezvous, AB, 0), waits=False)
    assert isinstance(started, Generation)
    rendezvous.wait_for_started(0, started)
    rendezvous.arrive(1, call(rendezvous, E3, 1))
    assert len(rendezvous.open_generations()) == 2

    rendezvous.forget()

    assert rendezvous.open_generations() == []
    assert [row.collective for row in rendezvous.rows()] == ["before any"] * 3


def at_once(fn: Callable[[], Any]) -> list[Any]:
    """Return what a function gives on two threads."""
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(fn())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return found


def test_two_threads_that_ask_at_once_get_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous, both_miss, part = new(3), threading.Barrier(2), SyncGroup.part

    def slow_part(group: SyncGroup, *ids: tuple[int, ...]) -> SyncGroup:
        both_miss.wait(LIMIT_S)
        return part(group, *ids)

    monkeypatch.setattr(SyncGroup, "part", slow_part)

    first, second = at_once(lambda: rendezvous.group(AB))

    assert first is second is rendezvous.group(AB)


def test_two_threads_that_name_a_collective_at_once_get_one() -> None:
    both_miss = threading.Barrier(2)

    def slow(name: str) -> MergeCall:
        both_miss.wait(LIMIT_S)
        return MergeCall(name)

    first, second = at_once(lambda: collective_named(slow, "one"))

    assert first is second
