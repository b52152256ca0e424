"""The lanes of a process: options, forks, the end of the interpreter."""

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aioreplica.devices import CompletionQueue, Op, lane_table, set_lane_options
from aioreplica.errors import DeviceError

RunScript = Callable[[str], str]


@pytest.mark.parametrize("num_streams", [0, -1])
def test_a_lane_has_at_least_one_stream(num_streams: int) -> None:
    with pytest.raises(ValueError, match=f"num_streams.*{num_streams}"):
        set_lane_options(num_streams=num_streams)


@pytest.mark.parametrize("nice", [-1, 20])
def test_nice_is_between_0_and_19(nice: int) -> None:
    with pytest.raises(ValueError, match=f"nice.*{nice}"):
        set_lane_options(nice=nice)


@pytest.mark.parametrize("name", ["num_streams", "nice", "num_collective_streams"])
@pytest.mark.parametrize("value", [1.5, "1", True, np.ones(2)], ids=repr)
def test_other_options_are_whole_numbers(name: str, value: Any) -> None:
    """A thread that cannot set its niceness would end before its first op, which then hangs."""
    with pytest.raises(TypeError, match=f"{name} must be an int"):
        set_lane_options(**{name: value})


@pytest.mark.parametrize(
    ("threads", "kind"),
    [
        (0, ValueError),
        (2**31, ValueError),
        (2**32 + 1, ValueError),
        (True, TypeError),
        ("2", TypeError),
        (1.0, TypeError),
    ],
)
def test_blas_threads_are_a_number_auto_or_none(threads: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"blas_threads must be .* got {threads!r}"):
        set_lane_options(blas_threads=threads)


@pytest.mark.slow
def test_blas_threads_can_be_left_alone_also_while_a_strategy_is_open(
    run_script: RunScript,
) -> None:
    output = run_script("""
        import asyncio
        import numpy as np
        from threadpoolctl import threadpool_info, threadpool_limits
        import aioreplica as ar

        def threads():
            return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

        async def main():
            ar.set_lane_options(blas_threads=None)
            async with ar.MirroredStrategy(["cpu:0", "cpu:1"]):
                found = [threads() <= {4}]
                ar.set_lane_options(blas_threads=3)
                found.append(threads() <= {3})
                ar.set_lane_options(blas_threads=None)
                found.append(threads() <= {4})
            print(found, threads() <= {4})

        with threadpool_limits(limits=4, user_api="blas"):
            asyncio.run(main())
    """)

    assert output == "[True, True, True] True\n"


@pytest.mark.asyncio
async def test_options_are_fixed_once_a_lane_is_in_use(lane_names: tuple[str, str]) -> None:
    lane_table().lane(lane_names[0])

    with pytest.raises(DeviceError, match=lane_names[0]):
        set_lane_options(nice=1)


@pytest.mark.asyncio
async def test_a_lane_that_was_given_back_refuses_ops() -> None:
    lane_table().acquire(("test:gone",))
    lane = lane_table().lane("test:gone")
    lane_table().release(("test:gone",))

    with pytest.raises(DeviceError, match="test:gone"):
        lane.put(Op(CompletionQueue.of_running_loop(), int, (), {}))


def test_the_table_finds_the_same_lane_again(lane_names: tuple[str, str]) -> None:
    table = lane_table()

    assert lane_table() is table
    assert table.lane(lane_names[0]) is table.lane(lane_names[0])
    assert table.lane(lane_names[0]) is not table.lane(lane_names[1])


def test_the_table_shows_its_lanes(lane_names: tuple[str, str]) -> None:
    lane_table().lane(lane_names[1])

    assert lane_table().statistics()[lane_names[1]].done == 0
    assert repr(lane_table()).startswith("<LaneTable | ")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="niceness is per thread on Linux only")
def test_lane_options_hold_for_lanes_made_later(run_script: RunScript) -> None:
    output = run_script("""
        import asyncio, os, threading
        import aioreplica as ar
        from aioreplica.devices import set_lane_options

        set_lane_options(num_streams=2, nice=0)
        meet = threading.Barrier(2)

        def niceness():
            meet.wait(60)  # both streams of one device at once
            return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

        async def step():
            replica = ar.get_replica_context()
            return await asyncio.gather(*(replica.run_on_device(niceness) for _ in range(2)))

        async def main():
            async with ar.OneDeviceStrategy("cpu:0") as strategy:
                both = strategy.local_results(await strategy.run(step))[0]
            mine = os.getpriority(os.PRIO_PROCESS, 0)
            print(both == [mine, mine])

        asyncio.run(main())
    """)

    assert output == "True\n"


FORK = """
import asyncio, os, threading, warnings
import aioreplica as ar

# From 3.12 on the interpreter warns of the lanes' threads, which are what is under test.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

ar.set_logical_devices("cpu", 2)

async def step():
    thread = await ar.get_replica_context().run_on_device(threading.current_thread)
    return thread.is_alive()

strategy = ar.MirroredStrategy()

async def main(strategy):
    host = await ar.run_on_host(threading.current_thread)
    return host.is_alive(), (await strategy.run(step)).values

def in_child(body):
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException as error:
            print(type(error).__name__, flush=True)
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

print(asyncio.run(main(strategy)), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_starts_afresh(run_script: RunScript) -> None:
    output = run_script(f"""{FORK}
in_child(lambda: print(asyncio.run(main(ar.MirroredStrategy())), flush=True))
in_child(lambda: print(strategy.statistics().state, flush=True))
in_child(lambda: asyncio.run(main(strategy)))
""")

    fresh = "(True, (True, True))"
    assert output.splitlines() == [fresh, fresh, "0", "closed", "0", "ContextError", "1"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_restores_blas_threads_and_forgets_the_parents_threads(
    run_script: RunScript,
) -> None:
    output = run_script("""
        import asyncio, os, warnings
        import numpy as np
        from threadpoolctl import threadpool_info
        import aioreplica as ar
        from aioreplica.devices._lane import _serving_threads

        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        ar.set_logical_devices("cpu", 2)

        def threads():
            found = [p["num_threads"] for p in threadpool_info() if p["user_api"] == "blas"]
            return max(found, default=1)

        async def step():
            await ar.get_replica_context().run_on_device(int)

        async def main(body):
            async with ar.MirroredStrategy() as strategy:
                await strategy.run(step)
                body()

        def fork():
            child = os.fork()
            if child == 0:
                asyncio._set_running_loop(None)
                found = [len(_serving_threads())]
                asyncio.run(main(lambda: found.append(threads())))
                print(*found, threads() == before, flush=True)
                os._exit(0)
            os.waitpid(child, 0)

        before = threads()
        ar.set_lane_options(blas_threads=1)
        asyncio.run(main(fork))
    """)

    assert output == "0 1 True\n"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_an_op_runs_leaves_both_processes_working(run_script: RunScript) -> None:
    output = run_script(f"""{FORK}
async def busy():
    started, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def block():
        loop.call_soon_threadsafe(started.set)
        return gate.wait(60)

    task = asyncio.create_task(ar.run_on_host(block))
    await started.wait()
    child = os.fork()
    if child == 0:
        asyncio._set_running_loop(None)  # as a program that forks in a callback has to
        print(asyncio.run(main(ar.MirroredStrategy())), flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    gate.set()
    print(await task, flush=True)

asyncio.run(busy())
""")

    assert output.splitlines() == ["(True, (True, True))", "(True, (True, True))", "0", "True"]


@pytest.mark.slow
def test_a_program_that_ends_with_open_strategies_ends_quietly(run_script: RunScript) -> None:
    output = run_script("""
        import asyncio
        import aioreplica as ar

        async def step():
            return await ar.get_replica_context().run_on_device(int, 3)

        async def main():
            print((await ar.MirroredStrategy(["cpu:0", "cpu:1"]).run(step)).values)

        asyncio.run(main())
        asyncio.run(main())
    """)

    assert output == "(3, 3)\n(3, 3)\n"


def lane_of(statistics: dict[str, Any], name: str) -> Any:
    return statistics.get(name)


@pytest.mark.asyncio
async def test_statistics_list_lanes_by_name(lane_names: tuple[str, str]) -> None:
    port = CompletionQueue.of_running_loop()
    for name in reversed(lane_names):
        op = Op(port, int, (), {})
        lane_table().lane(name).put(op)
        await op

    statistics = lane_table().statistics()

    assert list(statistics) == sorted(statistics)
    assert [lane_of(statistics, name).done for name in lane_names] == [1, 1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="policies are per thread on Linux only")
def test_the_host_and_files_are_never_in_the_background(run_script: RunScript) -> None:
    output = run_script("""
        import asyncio, os
        import aioreplica as ar
        from aioreplica.devices import lane_table, run_on_lane, set_lane_options, CompletionQueue

        set_lane_options(background=True)

        def policy():
            return os.sched_getscheduler(0)

        async def step():
            return await ar.get_replica_context().run_on_device(policy)

        async def main():
            async with ar.OneDeviceStrategy("cpu:0") as strategy:
                device = strategy.local_results(await strategy.run(step))[0]
            own = lane_table().lane("journal:0", num_streams=1)
            port = CompletionQueue.of_running_loop()
            journal = await run_on_lane(own, port, policy, (), {})
            own.stop()
            return device, await ar.run_on_host(policy), journal

        print(asyncio.run(main()) == (os.SCHED_IDLE, policy(), policy()))
    """)

    assert output == "True\n"


@pytest.mark.xslow
@pytest.mark.skipif(sys.platform != "linux", reason="policies are per thread on Linux only")
def test_device_processes_are_in_the_background_with_their_lanes(run_script: RunScript) -> None:
    pytest.importorskip("cloudpickle")

    output = run_script("""
        import asyncio, os
        import aioreplica as ar
        from aioreplica.devices import set_lane_options

        def policy():
            return os.getpid(), os.sched_getscheduler(0)

        async def step():
            return await ar.get_replica_context().run_on_device(policy)

        async def main():
            ar.set_logical_devices("cpu", 2, processes=True)
            set_lane_options(background=True)
            async with ar.OneDeviceStrategy("cpu:0") as strategy:
                pid, found = strategy.local_results(await strategy.run(step))[0]
                print(pid != os.getpid(), found == os.SCHED_IDLE, policy()[1] == os.SCHED_IDLE)

        asyncio.run(main())
    """)

    assert output == "True True False\n"
