"""Lending a lane: other ops run while one waits, and never two at once."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aioreplica.devices import CompletionQueue, Lane, Op, OpTracker, lend_lane, run_on_lane


def put(lane: Lane, fn: Callable[..., Any], *args: Any, run: OpTracker | None = None) -> Op[Any]:
    op = run_on_lane(lane, CompletionQueue.of_running_loop(), fn, args, {}, run)
    op.put()
    return op


class Waiting:
    """An op that lends its lane until it is let go, and notes what runs when."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.gate = threading.Event()
        self.started = threading.Event()

    def __call__(self) -> str:
        self.events.append("begins")
        with lend_lane():
            self.started.set()
            assert self.gate.wait(60)
        self.events.append("goes on")
        return "done"


@pytest.mark.asyncio
@pytest.mark.parametrize("num_streams", [1, 2])
async def test_ops_put_while_one_waits_run_meanwhile(num_streams: int) -> None:
    lane, op = Lane("test", num_streams=num_streams), Waiting()
    waiting = put(lane, op)
    assert op.started.wait(60)

    for name in "ab":
        await put(lane, op.events.append, name)
    op.gate.set()

    assert await waiting == "done"
    assert op.events == ["begins", "a", "b", "goes on"]
    assert lane.statistics().done >= 2
    lane.stop()
    lane.join(60)


@pytest.mark.asyncio
async def test_another_thread_takes_over_however_often_threads_were_idle_before() -> None:
    lane, op, may_end = Lane("test", num_streams=2), Waiting(), threading.Event()
    both = threading.Barrier(2)
    for _ in range(5):
        await asyncio.gather(*(put(lane, both.wait, 60) for _ in range(2)))
    ops = [put(lane, op), put(lane, may_end.wait, 60)]
    assert op.started.wait(60)

    assert await put(lane, str, "taken") == "taken"

    assert not any(each.is_done for each in ops)
    may_end.set()
    op.gate.set()
    assert [await each for each in ops] == ["done", True]
    lane.stop()
    lane.join(60)


@pytest.mark.asyncio
async def test_ops_queued_before_run_meanwhile_too() -> None:
    lane, op = Lane("test"), Waiting()
    ops = [put(lane, op), *(put(lane, op.events.append, name) for name in "ab")]
    await ops[2]
    op.gate.set()

    await ops[0]

    assert op.events == ["begins", "a", "b", "goes on"]
    lane.stop()


@pytest.mark.asyncio
async def test_the_waiting_op_goes_on_only_when_the_other_has_ended() -> None:
    lane, op = Lane("test"), Waiting()
    is_over, inside = threading.Event(), threading.Event()

    def other() -> None:
        op.events.append("other begins")
        op.gate.set()  # the first one wants its lane back now
        inside.set()
        assert is_over.wait(60)
        op.events.append("other ends")

    both = asyncio.gather(put(lane, op), put(lane, other))
    await asyncio.to_thread(inside.wait, 60)
    is_over.set()
    await both

    assert op.events == ["begins", "other begins", "other ends", "goes on"]
    lane.stop()


@pytest.mark.asyncio
async def test_ops_of_the_same_run_keep_their_order() -> None:
    lane, op, own, other = Lane("test"), Waiting(), OpTracker(), OpTracker()
    first = put(lane, op, run=own)
    later = [put(lane, op.events.append, f"own {i}", run=own) for i in range(2)]
    await put(lane, op.events.append, "other", run=other)
    assert lane.statistics().queued == 2
    op.gate.set()

    await asyncio.gather(first, *later)

    assert op.events == ["begins", "other", "goes on", "own 0", "own 1"]
    lane.stop()
    lane.join(60)


@pytest.mark.asyncio
async def test_an_op_held_back_runs_on_an_idle_thread_once_the_wait_is_over() -> None:
    """The op that lent the lane goes on for as long as it likes, here until the other has run."""
    lane, own = Lane("test", num_streams=2), OpTracker()
    op, has_run = Waiting(), threading.Event()

    def first() -> bool:
        op()
        return has_run.wait(60)

    waiting = put(lane, first, run=own)
    assert op.started.wait(60)
    later = put(lane, has_run.set, run=own)
    while not lane._held_back:
        await put(lane, int)
    op.gate.set()

    assert await waiting is True
    await later
    lane.stop()
    lane.join(60)


@pytest.mark.asyncio
async def test_a_stopped_lane_runs_the_ops_held_back() -> None:
    lane, op, own = Lane("test"), Waiting(), OpTracker()
    first, later = put(lane, op, run=own), put(lane, op.events.append, "own", run=own)
    assert op.started.wait(60)
    lane.stop()
    op.gate.set()

    await asyncio.gather(first, later)

    assert op.events == ["begins", "goes on", "own"]
    lane.join(60)


@pytest.mark.asyncio
async def test_threads_do_not_add_up() -> None:
    lane = Lane("test")
    before = threading.active_count()

    for _ in range(20):
        op = Waiting()
        waiting = put(lane, op)
        await put(lane, op.gate.set)
        await waiting

    await put(lane, int)
    lane.stop()
    lane.join(60)
    assert threading.active_count() <= before
    assert lane.statistics().done == 41


@pytest.mark.asyncio
async def test_a_stopped_lane_lets_the_waiting_op_end() -> None:
    lane, op = Lane("test"), Waiting()
    waiting = put(lane, op)
    await put(lane, int)

    lane.stop()
    op.gate.set()

    assert await waiting == "done"
    lane.join(60)


@pytest.mark.asyncio
@pytest.mark.parametrize("is_stopped_first", [True, False])
async def test_a_stopped_lane_lets_the_waiting_op_end_beside_one_that_does_not(
    gated_op: Any, is_stopped_first: bool
) -> None:
    lane, op = Lane("test"), Waiting()
    waiting, endless = put(lane, op), put(lane, gated_op)
    await gated_op.started.wait()

    for act in (lane.stop, op.gate.set) if is_stopped_first else (op.gate.set, lane.stop):
        act()

    assert await waiting == "done"
    assert not endless.done()
    gated_op.release()
    await endless
    lane.join(60)


def test_elsewhere_there_is_nothing_to_lend() -> None:
    with lend_lane():
        pass
