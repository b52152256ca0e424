"""Who runs what, without any engine: events and the time in, closures out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest

from aioreplica.strategies.parameter_server._packing import Packed
from aioreplica.strategies.parameter_server._queue import (
    FILL_S,
    FIRST_WAITING,
    GRACE_S,
    LONG_S,
    MAX_WAITING,
    MIN_WAITING,
    SLOW_S,
    ClosureQueue,
    ScheduledClosure,
)

A, B = "a", "b"


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


class Coordinator:
    """A queue with closures, and what sends them."""

    def __init__(self, loop: Any, count: int, workers: Any = (A, B), **options: Any) -> None:
        self.queue = ClosureQueue(100, **options)
        self.made = [
            ScheduledClosure(i, "fn", False, Packed(b"", ()), {}, None, loop.create_future())
            for i in range(count)
        ]
        for closure in self.made:
            self.queue.add(closure)
        self.queue.set_workers(0.0, dict.fromkeys(workers, 1))

    def send(self, now: float = 0.0, **options: Any) -> list[int]:
        taken = self.queue.take(now, **options)
        for closure in taken:
            closure.submission = object()  # type: ignore[assignment]
        self.queue.sent(now, taken)
        return [closure.number for closure in taken]

    def at(self, worker: str) -> list[int]:
        return [each.number for each in self.queue.with_workers() if each.worker == worker]

    def lose(self, now: float, *left: str) -> list[int]:
        lost = self.queue.set_workers(now, dict.fromkeys(left, 1))
        for closure in lost:
            closure.submission = None
        return [closure.number for closure in lost]


def test_closures_go_in_turn_and_a_few_wait_with_each_worker(loop: Any) -> None:
    c = Coordinator(loop, 20)
    assert c.send() == list(range(2 * (1 + FIRST_WAITING)))
    assert c.at(A)[:3] == [0, 2, 4]
    assert c.at(B)[:3] == [1, 3, 5]
    assert (c.queue.depth, c.queue.num_running) == (10, 10)
    c.queue.finished(0.001, c.made[1])
    assert c.send()[0] == 10
    assert c.at(B)[:5] == [3, 5, 7, 9, 10]


@pytest.mark.parametrize(
    ("took_s", "waiting"),
    [(0.001, MAX_WAITING), (FILL_S / 4 + 1e-9, 4), (2 * FILL_S, MIN_WAITING), (2 * LONG_S, 1)],
)
def test_fewer_wait_behind_long_closures(loop: Any, took_s: float, waiting: int) -> None:
    c = Coordinator(loop, 80, (A,))
    for number in c.send():
        c.queue.finished((number + 1) * took_s, c.made[number])
    assert len(c.send(99.0)) == 1 + waiting


@pytest.mark.parametrize(("took_s", "waiting"), [(0.001, MAX_WAITING), (FILL_S / 9.5, 10)])
def test_a_worker_gets_more_when_half_of_its_work_is_done(
    loop: Any, took_s: float, waiting: int
) -> None:
    c = Coordinator(loop, 5 + waiting + 2 * (waiting // 2), (A, B))
    c.lose(0.0, A)
    for number in c.send():
        c.queue.finished((number + 1) * took_s, c.made[number])
    now, sizes = 99.0, [len(c.send(99.0))]
    while c.queue.num_running:
        now += took_s
        c.queue.finished(now, c.made[c.at(A)[0]])
        sizes.append(len(c.send(now)))
    assert [size for size in sizes if size] == [1 + waiting, waiting // 2, waiting // 2 - 1]
    assert [i for i, size in enumerate(sizes) if size] == [0, waiting // 2, 2 * (waiting // 2)]


def test_a_worker_may_run_several_at_a_time(loop: Any) -> None:
    c = Coordinator(loop, 20, ())
    c.queue.set_workers(0.0, {A: 3})
    c.send(1.0)
    running = [each.number for each in c.made if each.began_s is not None]
    assert (running, len(c.at(A))) == ([0, 1, 2], 3 + FIRST_WAITING)


def test_the_oldest_is_the_least_that_is_not_over(loop: Any) -> None:
    c = Coordinator(loop, 3)
    c.send()
    c.queue.finished(1.0, c.made[1])
    assert c.queue.oldest == 0
    c.queue.finished(1.0, c.made[0])
    assert (c.queue.oldest, c.queue.is_idle) == (2, False)
    c.queue.finished(1.0, c.made[2])
    assert (c.queue.oldest, c.queue.is_idle) == (3, True)


# ---- workers that come and go --------------------------------------------------------------------


def test_only_the_closure_that_ran_loses_an_attempt(loop: Any) -> None:
    c = Coordinator(loop, 6)
    c.send()
    assert c.lose(1.0, B) == [0, 2, 4]
    assert [each.lost_with for each in c.made] == [[A], [], [], [], [], []]
    assert c.send(1.0) == [0, 2]  # the others wait for room
    assert c.at(B) == [1, 3, 5, 0, 2]
    assert c.queue.oldest == 0


def test_a_closure_that_never_begins_is_never_given_up(loop: Any) -> None:
    c = Coordinator(loop, 2, (A,))
    for turn in range(50):
        name = f"worker {turn}"
        c.lose(turn, name)
        assert c.send(turn) == [0, 1]
    assert len(c.made[0].lost_with) == 49
    assert c.made[1].lost_with == []


def test_what_was_not_sent_yet_has_not_run(loop: Any) -> None:
    c = Coordinator(loop, 1, (A,))
    c.queue.take(0.0)
    assert c.lose(1.0) == [0]
    assert c.made[0].lost_with == []


def test_indices_of_the_dead_are_used_again(loop: Any) -> None:
    c = Coordinator(loop, 0, (A, B))
    assert [c.queue.index_of(each) for each in (A, B)] == [0, 1]
    c.lose(1.0, B)
    c.queue.set_workers(2.0, {B: 1, "c": 1, "d": 1})
    assert [c.queue.index_of(each) for each in (B, "c", "d")] == [1, 0, 2]


def test_what_waits_too_long_for_any_worker_is_told(loop: Any) -> None:
    c = Coordinator(loop, 1, (A,), worker_wait_s=60.0)
    assert c.queue.next_look() == math.inf
    c.lose(100.0)
    assert (c.queue.next_look(), c.queue.alone_for(159.0)) == (160.0, None)
    assert c.queue.alone_for(160.0) == 60.0
    c.queue.set_workers(161.0, {B: 1})
    c.send(161.0)
    assert (c.queue.next_look(), c.queue.alone_for(1e9)) == (math.inf, None)


def test_nobody_waits_for_workers_if_nothing_waits(loop: Any) -> None:
    c = Coordinator(loop, 0, (A,), worker_wait_s=60.0)
    c.lose(100.0)
    assert (c.queue.next_look(), c.queue.alone_for(1e9)) == (math.inf, None)


# ---- clocks --------------------------------------------------------------------------------------


def test_a_clock_starts_when_the_closure_before_has_ended(loop: Any) -> None:
    c = Coordinator(loop, 3, (A,))
    for closure in c.made:
        closure.timeout_s = 5.0
    c.send(100.0)
    assert c.queue.next_look() == 105.0 + GRACE_S
    assert c.queue.overdue(104.9 + GRACE_S) == []
    c.queue.finished(104.0, c.made[0])
    assert [each.began_s for each in c.made[1:]] == [104.0, None]
    assert c.queue.overdue(109.0 + GRACE_S) == [c.made[1]]


def test_a_clock_does_not_run_before_the_closure_was_sent(loop: Any) -> None:
    c = Coordinator(loop, 1, (A,))
    c.made[0].timeout_s = 5.0
    c.queue.take(0.0)
    assert c.queue.next_look() == math.inf
    c.made[0].submission = object()  # type: ignore[assignment]
    c.queue.sent(50.0, c.made)
    assert c.queue.next_look() == 55.0 + GRACE_S


def test_work_behind_a_slow_closure_goes_to_a_worker_that_has_none(loop: Any) -> None:
    c = Coordinator(loop, 4)
    c.send()  # 0 and 2 with a, 1 and 3 with b
    for number in (1, 3):
        c.queue.finished(0.01, c.made[number])
    assert c.queue.next_look() == SLOW_S
    assert c.queue.take_back(SLOW_S / 2) == []
    assert c.queue.take_back(SLOW_S) == [c.made[2]]
    c.made[2].submission = None
    assert c.send(SLOW_S) == [2]
    assert (c.at(A), c.at(B)) == ([0], [2])
    assert c.made[2].began_s == SLOW_S
    assert c.made[2].lost_with == []


def test_much_work_behind_a_closure_goes_to_a_worker_that_has_none_at_once(loop: Any) -> None:
    c = Coordinator(loop, 8)
    c.send()  # 0, 2, 4 and 6 with a, the others with b
    c.queue.finished(0.3, c.made[0])
    assert c.queue.next_look() == math.inf
    for number in (1, 3, 5, 7):
        c.queue.finished(0.3, c.made[number])
    assert c.queue.next_look() == 0.3  # not SLOW_S after the closure 2 has begun
    assert c.queue.take_back(0.3) == [c.made[6]]  # 4 may have begun
    c.made[6].submission = None
    assert c.send(0.3) == [6]
    assert c.queue.take_back(0.3) == []


def test_nothing_is_taken_back_while_all_have_work(loop: Any) -> None:
    c = Coordinator(loop, 4)
    c.send()
    assert c.queue.next_look() == math.inf
    assert c.queue.take_back(1e9) == []


# ---- errors --------------------------------------------------------------------------------------


def test_the_first_error_is_seen_once_after_the_end_of_the_rest(loop: Any) -> None:
    c = Coordinator(loop, 4)
    c.send()
    error = ValueError("first")
    assert c.queue.failed(0.1, error) == c.made
    assert c.queue.take_error() is None  # servers do not know yet
    assert (c.queue.is_ending, c.queue.is_idle) == (True, False)
    c.queue.ended()
    assert (c.queue.is_idle, c.queue.oldest) == (True, 4)
    c.queue.put_error(ValueError("second"))
    assert (c.queue.take_error(), c.queue.take_error()) == (error, None)


def test_what_runs_while_it_is_cancelled_keeps_its_place(loop: Any) -> None:
    c = Coordinator(loop, 2, (A,))
    c.send()
    c.queue.failed(1.0, ValueError("no"))
    c.queue.ended()
    assert c.at(A) == [0]
    new = ScheduledClosure(2, "fn", False, Packed(b"", ()), {}, 5.0, loop.create_future())
    c.queue.add(new)
    assert c.send(1.0) == [2]
    assert (new.began_s, c.queue.next_look()) == (None, math.inf)
    c.queue.leave(9.0, c.made[0])
    assert new.began_s == 9.0
    c.queue.finished(9.5, c.made[0])  # it comes too late
    assert c.queue.num_running == 1


def test_what_still_runs_keeps_its_place_in_the_next_queue(loop: Any) -> None:
    old = Coordinator(loop, 6)
    old.send()
    old.queue.failed(1.0, ValueError("first"))
    c = Coordinator(loop, 4, workers=())
    c.queue.take_over(old.queue)
    c.queue.set_workers(2.0, {A: 1, "c": 1})  # B has gone meanwhile, with what ran there
    assert c.send(2.0) == [0, 1, 2, 3]
    assert c.at(A) == [0, 1, 3]  # the first one is the old one
    assert c.made[1].began_s is None
    assert c.made[0].began_s == 2.0
    c.queue.leave(5.0, old.made[0])
    assert c.made[1].began_s == 5.0


def test_workers_of_another_cluster_have_no_place_in_the_next_queue(loop: Any) -> None:
    old = Coordinator(loop, 2)
    old.send()
    old.queue.failed(1.0, ValueError("first"))
    queue = ClosureQueue(8, None, "another")
    queue.take_over(old.queue)
    assert queue.with_workers() == []
    assert (queue.num_gone, sorted(queue.last_gone)) == (2, [A, B])
    queue.set_workers(2.0, {A: 1})
    assert queue.num_gone == 2


def test_an_error_of_one_alone_leaves_the_others(loop: Any) -> None:
    c = Coordinator(loop, 2)
    c.send()
    c.queue.drop(1.0, c.made[0])
    assert (c.queue.oldest, c.at(A), c.at(B)) == (1, [], [1])
    c.queue.finished(1.0, c.made[1])
    assert not c.queue.is_idle  # servers do not know of the first one's end yet
    assert not c.queue.is_ending
    c.queue.ended(is_alone=True)
    assert (c.queue.is_idle, c.queue.take_error()) == (True, None)


def test_a_lost_result_is_made_again_and_holds_nothing_up(loop: Any) -> None:
    c = Coordinator(loop, 2, (A,))
    c.send()
    c.queue.finished(1.0, c.made[0])
    c.made[0].again, c.made[0].submission = loop.create_future(), None
    c.queue.add_again(c.made[0])
    assert (c.queue.oldest, c.queue.num_running, c.queue.depth) == (1, 1, 0)
    assert c.send(1.0) == [0]
    c.queue.failed(1.0, ValueError("of another one"))
    c.queue.ended()
    assert c.at(A) == [1, 0]
    c.queue.leave(2.0, c.made[1])
    c.queue.finished(3.0, c.made[0])
    assert (c.at(A), c.queue.is_idle) == ([], True)


def test_a_checkpoint_holds_back_only_what_was_with_no_worker(loop: Any) -> None:
    """It waits for those that were: they have to run again although it holds others back."""
    c = Coordinator(loop, 20, (A,))
    under_way = c.send()
    c.lose(1.0, B)
    assert c.send(1.0, begun_only=True) == under_way
    for number in under_way:
        c.queue.finished(1.0, c.made[number])
    assert c.send(1.0, begun_only=True) == []
    assert c.send(1.0)[0] == 5
