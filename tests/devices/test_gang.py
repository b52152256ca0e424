"""Gangs: ops on several lanes at once, in the same order on all of them."""

import asyncio
import sys
import threading

import pytest

import aioreplica as ar
from aioreplica.devices import CompletionQueue, Op, lane_table, submit_gang
from aioreplica.errors import DeviceError

LIMIT_S = 60
NUM_GANGS = 300


@pytest.mark.asyncio
async def test_a_gang_puts_one_op_on_each_lane(lane_names: tuple[str, str]) -> None:
    port = CompletionQueue.of_running_loop()
    ops = [Op(port, threading.current_thread, (), {}) for _ in lane_names]

    submit_gang(lane_names, ops)

    threads = [await op for op in ops]
    assert all(name in thread.name for name, thread in zip(lane_names, threads, strict=True))


@pytest.mark.asyncio
async def test_a_gang_needs_one_op_per_lane(lane_names: tuple[str, str]) -> None:
    op = Op(CompletionQueue.of_running_loop(), int, (), {})

    with pytest.raises(ValueError, match=r"shorter|longer"):
        submit_gang(lane_names, [op])


@pytest.mark.asyncio
async def test_of_a_gang_that_can_not_be_put_nothing_runs(lane_names: tuple[str, str]) -> None:
    port, free, ran = CompletionQueue.of_running_loop(), threading.Event(), list[int]()
    first, second = (lane_table().lane(name) for name in lane_names)
    held = Op(port, free.wait, (LIMIT_S,), {})
    first.put(held)
    second.stop()

    with pytest.raises(DeviceError):
        submit_gang(lane_names, [Op(port, ran.append, (i,), {}) for i in range(2)])

    behind = Op(port, int, (), {})
    first.put(behind)
    free.set()
    assert [await held, await behind] == [True, 0]
    assert ran == []


@pytest.mark.asyncio
async def test_gangs_of_two_threads_never_interleave(lane_names: tuple[str, str]) -> None:
    port, start = CompletionQueue.of_running_loop(), threading.Barrier(2)
    orders: dict[str, list[str]] = {name: [] for name in lane_names}
    gangs: dict[str, list[list[Op]]] = {
        who: [
            [Op(port, orders[name].append, (f"{who}{i}",), {}) for name in lane_names]
            for i in range(NUM_GANGS)
        ]
        for who in "ab"
    }

    def submit(who: str) -> None:
        start.wait(LIMIT_S)
        names = lane_names if who == "a" else lane_names[::-1]
        for ops in gangs[who]:
            submit_gang(names, ops if who == "a" else ops[::-1])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=submit, args=(who,)) for who in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    finally:
        sys.setswitchinterval(interval)
    for ops in [*gangs["a"], *gangs["b"]]:
        for op in ops:
            await op

    first, second = orders.values()
    assert len(first) == 2 * NUM_GANGS
    assert first == second


@pytest.mark.asyncio
async def test_gangs_that_need_each_others_devices_do_not_lock_up(
    lane_names: tuple[str, str],
) -> None:
    """Each gang's ops wait for each other: held crosswise, both gangs would wait for ever."""
    port = CompletionQueue.of_running_loop()
    everything: list[Op] = []
    for i in range(50):
        meet = threading.Barrier(2)
        ops = [Op(port, meet.wait, (LIMIT_S,), {}) for _ in lane_names]
        submit_gang(lane_names if i % 2 else lane_names[::-1], ops)
        everything += ops

    async with asyncio.timeout(LIMIT_S):
        for op in everything:
            assert await op in (0, 1)


@pytest.mark.asyncio
async def test_two_ops_on_two_devices_overlap(pair: ar.MirroredStrategy) -> None:
    meet = threading.Barrier(2)

    async def step() -> int:
        return await ar.get_replica_context().run_on_device(meet.wait, LIMIT_S)

    results = await pair.run(step)

    assert sorted(results.values) == [0, 1]


@pytest.mark.asyncio
async def test_the_parts_of_a_plain_step_overlap(pair: ar.MirroredStrategy) -> None:
    meet = threading.Barrier(2)

    results = await pair.run(meet.wait, args=(LIMIT_S,))

    assert sorted(results.values) == [0, 1]


@pytest.mark.asyncio
async def test_plain_steps_of_two_strategies_on_the_same_devices_do_not_lock_up() -> None:
    async def repeat(devices: list[str]) -> None:
        async with ar.MirroredStrategy(devices) as strategy:
            for _ in range(30):
                meet = threading.Barrier(2)
                await strategy.run(meet.wait, args=(LIMIT_S,))

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(repeat(["cpu:4", "cpu:5"]), repeat(["cpu:5", "cpu:4"]))


@pytest.mark.asyncio
async def test_lanes_end_with_their_last_user() -> None:
    table, names = lane_table(), ("test:3", "test:4")
    table.acquire(names)
    table.acquire(names[:1])
    lane = table.lane("test:3")

    table.release(names)
    assert table.lane("test:3") is lane
    assert "test:4" not in table.statistics()

    op = Op(CompletionQueue.of_running_loop(), threading.current_thread, (), {})
    lane.put(op)
    table.release(names[:1])
    thread = await op
    lane.join(LIMIT_S)
    assert not thread.is_alive()
    assert "test:3" not in table.statistics()


@pytest.mark.asyncio
async def test_ops_queued_at_the_last_release_still_run() -> None:
    table, names = lane_table(), ("test:5",)
    table.acquire(names)
    gate = threading.Event()
    port = CompletionQueue.of_running_loop()
    ops = [Op(port, gate.wait, (LIMIT_S,), {}), Op(port, int, (9,), {})]
    for op in ops:
        table.lane("test:5").put(op)

    table.release(names)
    gate.set()

    assert [await op for op in ops] == [True, 9]
