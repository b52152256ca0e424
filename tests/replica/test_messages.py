"""Messages in the rendezvous: who goes on, who waits, and a verdict exactly when it is due."""

import random
import sys
from itertools import product

import pytest

from aioreplica.replica import Mismatch, Rendezvous, ReplicaState, SyncGroup
from aioreplica.replica._messages import Messages, Transfer
from tests.replica.programs import (
    Meet,
    Program,
    Receive,
    Send,
    Start,
    can_finish,
    every_schedule,
    random_program,
    random_schedule,
)

EVERYONE = SyncGroup(range(3), ["cpu:0", "cpu:1", "cpu:2"])
E2, E3 = (0, 1), (0, 1, 2)


def send(value: object = None, way: tuple[int, int] = (0, 1), tag: str | None = None) -> Transfer:
    return Transfer(EVERYONE, *way, tag, value, sys._getframe(1), is_send=True)


def receive(way: tuple[int, int] = (0, 1), tag: str | None = None) -> Transfer:
    return Transfer(EVERYONE, *way, tag, None, sys._getframe(1), is_send=False)


# ---- who goes on -------------------------------------------------------------------------------


def test_values_come_in_the_order_in_which_they_were_sent() -> None:
    messages = Messages()
    for value in "ab":
        assert messages.arrive(send(value)) is None

    taken = [receive(), receive()]
    assert [messages.arrive(each) for each in taken] == [None, None]

    assert [each.value for each in taken] == ["a", "b"]
    assert [each.sequence for each in taken] == [1, 2]
    assert messages.num_moved == 2


def test_a_send_waits_while_the_channel_is_full_and_the_first_goes_on_first() -> None:
    messages = Messages(bound=2)
    sends = [send(value) for value in range(4)]
    for each in sends:
        messages.arrive(each)
    assert [each.is_over for each in sends] == [True, True, False, False]
    assert [each.sequence for each in sends] == [1, 2, 3, 4]

    assert messages.arrive(receive()) is sends[2]
    assert [each.is_over for each in sends] == [True, True, True, False]
    assert [(messages.arrive(each), each.value) for each in [receive()]] == [(sends[3], 1)]


def test_a_receive_that_waits_is_let_go_by_the_send() -> None:
    messages = Messages()
    first, second = receive(), receive()
    assert messages.arrive(first) is messages.arrive(second) is None

    assert messages.arrive(send("a")) is first
    assert (first.value, first.is_over, second.is_over) == ("a", True, False)
    assert messages.arrive(send("b")) is second
    assert second.value == "b"


def test_tags_and_directions_are_channels_of_their_own() -> None:
    messages = Messages(bound=1)
    assert [messages.arrive(send(i, tag=tag)) for i, tag in enumerate("ab")] == [None, None]
    back, other, own = receive((1, 0)), receive(tag="c"), receive(tag="b")
    for each in (back, other, own):
        messages.arrive(each)

    assert (back.is_over, other.is_over, own.value) == (False, False, 1)
    assert [each.describe() for each in messages.waiting()] == [
        "receive #1 from replica 1",
        "receive #1 from replica 0 (tag 'c')",
    ]


def test_a_send_that_is_given_up_was_not_made() -> None:
    messages = Messages(bound=1)
    messages.arrive(send("a"))
    waits, later = send("b"), send("c")
    messages.arrive(waits)
    messages.arrive(later)

    assert messages.withdraw(waits) is None
    taken = [receive(), receive()]
    assert messages.arrive(taken[0]) is later
    messages.arrive(taken[1])

    assert [each.value for each in taken] == ["a", "c"]


def test_a_receive_that_is_given_up_has_taken_nothing() -> None:
    messages = Messages()
    given_up, after = receive(), receive()
    messages.arrive(given_up)
    messages.withdraw(given_up)
    messages.arrive(send("a"))
    messages.arrive(after)

    assert (given_up.is_over, after.value, after.sequence) == (False, "a", 1)


def test_a_value_that_was_handed_to_a_cancelled_receive_goes_to_the_next() -> None:
    messages = Messages()
    given_up = receive()
    messages.arrive(given_up)
    assert messages.arrive(send("a")) is given_up
    messages.arrive(send("b"))

    assert messages.withdraw(given_up) is None
    taken = [receive(), receive()]
    for each in taken:
        messages.arrive(each)
    assert [each.value for each in taken] == ["a", "b"]
    assert messages.num_moved == 2


def test_or_to_one_that_waits_already() -> None:
    messages = Messages()
    given_up, waits = receive(), receive()
    messages.arrive(given_up)
    messages.arrive(waits)
    messages.arrive(send("a"))

    assert messages.withdraw(given_up) is waits
    assert waits.value == "a"


def test_what_was_sent_stays_sent_if_its_task_is_cancelled_behind_it() -> None:
    messages = Messages(bound=1)
    messages.arrive(send("a"))
    second = send("b")
    messages.arrive(second)
    messages.arrive(receive())
    assert second.is_over

    assert messages.withdraw(second) is None
    last = receive()
    messages.arrive(last)
    assert last.value == "b"


# ---- verdicts ----------------------------------------------------------------------------------


def S(count: int) -> list[Send]:  # noqa: N802 - as short as the programs
    return [Send(1)] * count


def R(count: int) -> list[Receive]:  # noqa: N802 - see above
    return [Receive(0)] * count


FINISH: dict[str, Program] = {
    "there and back": [[Send(1), Receive(1)], [Receive(0), Send(0)]],
    "a pipeline": [[Send(1)] * 4, [Receive(0), Send(2)] * 4, [Receive(1)] * 4],
    "up to the bound crosswise": [[*S(2), Receive(1)], [Send(0), *R(2)]],
    "tags out of order": [[Send(1, "a"), Send(1, "b")], [Receive(0, "b"), Receive(0, "a")]],
    "around a collective": [[Send(1), Meet(E2), Receive(1)], [Meet(E2), Receive(0), Send(0)]],
    "a collective of others": [[Send(1), Meet(E3)], [Meet((1, 2)), Receive(0), Meet(E3)],
                               [Meet((1, 2)), Meet(E3)]],
    "the sender leaves first": [[Send(1)], [Receive(0)], []],
}  # fmt: skip

NEVER: dict[str, Program] = {
    "both receive": [[Receive(1), Send(1)], [Receive(0), Send(0)]],
    "a ring of receives": [[Receive(2)], [Receive(0)], [Receive(1)]],
    "over the bound crosswise": [[*S(3), *[Receive(1)] * 3], [*[Send(0)] * 3, *R(3)]],
    "a receive against a collective": [[Receive(1), Meet(E2)], [Meet(E2), Send(0)]],
    "a full channel against a collective": [[*S(3), Meet(E2)], [Meet(E2), *R(3)]],
    "a circle over a third": [[Meet(E3), Send(1)], [Receive(0), Meet(E3)], [Meet(E3)]],
    "never received": [[Send(1)], []],
    "never sent": [[Receive(1)], []],
    "another tag": [[Send(1, "a")], [Receive(0, "b")]],
    "one too many": [[Send(1), Send(1)], [Receive(0)]],
    "from one that waits": [[Receive(1)], [Meet((1, 2)), Send(0)], [Receive(0), Meet((1, 2))]],
    "a handle against a receive": [[Start(E2), Receive(1)], [Receive(0), Start(E2)]],
}  # fmt: skip


@pytest.mark.parametrize("name", FINISH)
def test_programs_that_can_finish_do_in_every_order(name: str) -> None:
    assert can_finish(FINISH[name])

    assert set(every_schedule(FINISH[name])) == {None}


@pytest.mark.parametrize("name", NEVER)
def test_programs_that_cannot_finish_never_do(name: str) -> None:
    assert not can_finish(NEVER[name])

    ends = every_schedule(NEVER[name])

    assert all(isinstance(end, Mismatch) for end in ends)


@pytest.mark.xslow
def test_every_program_of_three_replicas_with_two_steps() -> None:
    def parts(i: int) -> list[tuple[Send | Receive | Meet, ...]]:
        one = [Meet(E3), *(Send(j) for j in range(3) if j != i)]
        one += [Receive(j) for j in range(3) if j != i]
        return [(), *((step,) for step in one), *product(one, one)]

    ends = {True: 0, False: 0}
    for seed, program in enumerate(product(*map(parts, range(3)))):
        if seed % 7:  # a part is enough: 29,791 programs
            continue
        finishes = can_finish(program)
        ends[finishes] += 1
        assert (random_schedule(program, seed) is None) is finishes, program
    assert min(ends.values()) > 20


@pytest.mark.parametrize("bend", [False, True], ids=["sound", "bent"])
@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.xslow)])
def test_random_programs_in_random_orders(bend: bool, count: int) -> None:
    rng = random.Random(900 + bend)
    verdicts = {True: 0, False: 0}
    for number in range(count):
        program = random_program(rng, bend=bend, with_messages=True)
        finishes = can_finish(program)
        verdicts[finishes] += 1
        assert (random_schedule(program, number) is None) is finishes, program
    assert verdicts[True] > count // 10
    assert (verdicts[False] > count // 10) is bend


# ---- words -------------------------------------------------------------------------------------


def new() -> Rendezvous:
    return Rendezvous(["cpu:0", "cpu:1", "cpu:2"])


def test_a_circle_is_told_with_both_calls() -> None:
    rendezvous = new()
    ours, theirs = receive((1, 0), "x"), receive((0, 1))
    for each in (ours, theirs):
        rendezvous.exchange(each)
    assert rendezvous.wait_for_started(0, ours) is None

    decision = rendezvous.wait_for_started(1, theirs)

    assert isinstance(decision, Mismatch)
    assert decision.is_of_messages
    assert decision.reason == (
        "Replica 0 is in receive #1 from replica 1 (tag 'x') but replica 1 is in receive #1 from "
        "replica 0"
    )
    assert decision.rows[0].site == ours.site


def test_the_table_names_what_was_sent_and_not_received() -> None:
    rendezvous = new()
    first = send("a")
    rendezvous.exchange(first)
    rendezvous.exchange(send("b", tag="t"))

    assert rendezvous.rows()[0].collective == (
        f"send #1 to replica 1 and 1 more not received, from {first.site}"
    )


def test_a_value_that_is_lost_names_its_send() -> None:
    rendezvous = new()
    lost = send("a", tag="t")
    rendezvous.exchange(send("b", (2, 0)))
    rendezvous.exchange(lost)

    decision = rendezvous.leave(1, ReplicaState.RETURNED)

    assert isinstance(decision, Mismatch)
    assert decision.follows_return
    assert decision.reason == (
        "Replica 1 returned without receiving what replica 0 sent it: send #1 to replica 1 (tag "
        f"'t'), called at {lost.site}"
    )


def test_a_receive_of_a_child_task_cannot_outlive_its_replica() -> None:
    rendezvous = new()
    own = receive((1, 0))
    rendezvous.exchange(own)
    rendezvous.wait_for_started(0, own, blocks=False)

    decision = rendezvous.leave(0, ReplicaState.RETURNED)

    assert isinstance(decision, Mismatch)
    assert decision.reason == (
        "Replica 0 returned while a task of it waits in receive #1 from replica 1"
    )


def test_where_something_else_acts_there_is_no_circle() -> None:
    rendezvous, asked = new(), []
    rendezvous.may_act = lambda replica_id, num_waits: bool(asked.append((replica_id, num_waits)))
    ours, theirs = receive((1, 0)), receive((0, 1))
    for each in (ours, theirs):
        rendezvous.exchange(each)
    rendezvous.wait_for_started(0, ours)
    rendezvous.may_act = lambda replica_id, _num_waits: replica_id == 0
    assert rendezvous.wait_for_started(1, theirs) is None
    assert not rendezvous.may_be_stuck()

    rendezvous.may_act = lambda replica_id, num_waits: bool(asked.append((replica_id, num_waits)))

    assert rendezvous.may_be_stuck()
    assert asked == [(0, 1), (1, 1)]


def test_a_failure_silences_lost_values() -> None:
    rendezvous = new()
    rendezvous.exchange(send("a"))
    rendezvous.leave(2, ReplicaState.FAILED)

    assert rendezvous.leave(1, ReplicaState.RETURNED) is None
