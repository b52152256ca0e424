"""Neighbours: who is moved away from whose core, and when nobody is."""

import os
from typing import Any

import pytest

import aioreplica as ar
from aioreplica.devices import CompletionPort, Lane, Op, _lane, _lane_table, _neighbours, lane_table
from aioreplica.devices._neighbours import MOST, Neighbours


class SomeLane:
    """As much of a lane as its neighbours look at."""

    def __init__(self, native_id: int | None, *, has_yet_to_run: bool = False) -> None:
        self.native_id = native_id
        self.has_yet_to_run = has_yet_to_run


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Which threads were moved away from which cores; the calling thread is on core 1."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(_neighbours, "find_getcpu", lambda: lambda: 1)
    monkeypatch.setattr(_neighbours, "move_away", lambda *args: found.append(args))
    return found


@pytest.mark.parametrize(
    ("num_lanes", "num_cores", "expected"),
    [(2, 2, 2), (1, 2, 0), (3, 2, 0), (1, 1, 0), (MOST, MOST, MOST), (MOST + 1, MOST + 1, 0)],
)
def test_lanes_are_neighbours_if_each_can_have_a_core_and_the_loop_none(
    moved: object, num_lanes: int, num_cores: int, expected: int
) -> None:
    neighbours = Neighbours()
    lanes: Any = [SomeLane(i) for i in range(num_lanes)]

    neighbours.settle(lanes, num_cores)

    assert len(neighbours.lanes) == expected


def test_those_who_wait_for_a_core_are_moved(moved: list[tuple[int, int]]) -> None:
    neighbours = Neighbours()
    mine = SomeLane(10, has_yet_to_run=True)
    woken, idle = SomeLane(11, has_yet_to_run=True), SomeLane(12)
    new = SomeLane(None, has_yet_to_run=True)
    lanes: Any = [mine, woken, idle, new]
    neighbours.settle(lanes, 4)

    neighbours.make_room(mine)  # type: ignore[arg-type]  # as much of one as it looks at

    assert moved == [(11, 1)]


def test_nobody_is_moved_where_cores_have_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_neighbours, "find_getcpu", lambda: None)
    neighbours = Neighbours()
    lanes: Any = [SomeLane(1), SomeLane(2)]

    neighbours.settle(lanes, 2)

    assert neighbours.lanes == ()


@pytest.mark.asyncio
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be moved here")
async def test_lanes_are_neighbours_while_strategies_use_them_and_stay_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_lane_table, "num_cores", lambda: 2)
    neighbours = lane_table()._neighbours

    async def step() -> None:
        for _ in range(20):
            await ar.get_replica_context().run_on_device(len, [])

    async with ar.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        await strategy.run(step)
        assert [lane.name for lane in neighbours.lanes] == ["cpu:0", "cpu:1"]
        for lane in neighbours.lanes:
            assert lane.native_id is not None
            assert os.sched_getaffinity(lane.native_id) == os.sched_getaffinity(0)
        async with ar.OneDeviceStrategy("cpu:2") as third:
            await third.run(step)
            assert neighbours.lanes == ()
        assert len(neighbours.lanes) == 2

    assert neighbours.lanes == ()


@pytest.mark.asyncio
async def test_a_lane_has_yet_to_run_until_its_thread_has_begun(
    lane: Lane, gated_op: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (lane.has_yet_to_run, lane.native_id) == (False, None)
    port = CompletionPort.of_running_loop()
    with monkeypatch.context() as without_threads:
        without_threads.setattr(Lane, "_start_thread", lambda *_: None)
        lane.put(Op(port, gated_op, (), {}))
        assert lane.has_yet_to_run

    last = Op(port, len, ([],), {})
    lane.put(last)
    await gated_op.started.wait()
    assert not lane.has_yet_to_run  # one runs, and one waits behind it
    assert lane.native_id is not None

    gated_op.release()
    assert await last == 0
    assert not lane.has_yet_to_run


@pytest.mark.asyncio
@pytest.mark.parametrize(("long_s", "expected"), [(-1.0, 3), (3600.0, 0)])
async def test_neighbours_are_looked_for_after_long_ops_only(
    monkeypatch: pytest.MonkeyPatch, long_s: float, expected: int
) -> None:
    class Counting:
        lanes = ("some", "more")
        num_looks = 0

        def make_room(self, mine: Lane) -> None:
            self.num_looks += 1

    monkeypatch.setattr(_lane, "LONG_S", long_s)
    neighbours: Any = Counting()
    lane, port = Lane("test:1", neighbours=neighbours), CompletionPort.of_running_loop()

    for _ in range(3):
        op = Op(port, len, ([],), {})
        lane.put(op)
        await op

    assert neighbours.num_looks == expected
    lane.stop()
    lane.join(10)
